// Attention forward: (q, k, v, sequence arrays…) -> (out, lse).
#include "ffi/attention.h"
#include "ffi/device.h"
#include "ffi/handlers.h"

namespace attention {
namespace {

aiter_contract::mha_fwd_args ForwardArgs(const Problem& p) {
  aiter_contract::mha_fwd_args a{};
  a.data_type = p.data_type();
  a.is_group_mode = p.varlen;
  a.has_lse = true;
  a.seqstart_q_ptr = p.seqstart_q;
  a.seqstart_k_ptr = p.seqstart_k;
  a.seqlen_q_ptr = p.seqlens_q;
  a.seqlen_k_ptr = p.seqlens_k;
  a.seqlen_q = p.seqlen_q;
  a.seqlen_k = p.seqlen_k;
  a.batch = p.batch;
  a.max_seqlen_q = p.max_seqlen_q;
  a.hdim_q = p.hdim_q;
  a.hdim_v = p.hdim_v;
  a.nhead_q = p.nhead_q;
  a.nhead_k = p.nhead_k;
  a.scale_s = p.scale;
  a.mask_type = p.mask_type();
  a.window_size_left = p.window_left;
  a.window_size_right = p.window_right;

  const auto set = [](const Strides& s, int32_t& token, int32_t& head, int32_t& batch) {
    token = s.token, head = s.head, batch = s.batch;
  };
  set(ArrayStrides(p, p.seqlen_q, p.nhead_q, p.hdim_q), a.stride_q, a.nhead_stride_q, a.batch_stride_q);
  set(ArrayStrides(p, p.seqlen_k, p.nhead_k, p.hdim_q), a.stride_k, a.nhead_stride_k, a.batch_stride_k);
  set(ArrayStrides(p, p.seqlen_k, p.nhead_k, p.hdim_v), a.stride_v, a.nhead_stride_v, a.batch_stride_v);
  set(ArrayStrides(p, p.seqlen_q, p.nhead_q, p.hdim_v), a.stride_o, a.nhead_stride_o, a.batch_stride_o);
  int32_t lse_token;  // AITER takes it as 1
  set(LseStrides(p), lse_token, a.nhead_stride_lse, a.batch_stride_lse);
  return a;
}

ffi::Error Forward(device::Context context, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   ffi::RemainingArgs sequence, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                   float scale, int32_t window_left, int32_t window_right, int32_t max_seqlen_q,
                   int32_t max_seqlen_k) {
  auto parsed = ParseProblem(q, k, v, sequence, {scale, window_left, window_right, max_seqlen_q, max_seqlen_k});
  if (parsed.has_error()) return parsed.error();
  const Problem& p = *parsed;
  if (auto e = CheckBuffer("out", *out, p.dtype, ArrayShape(p, p.seqlen_q, p.nhead_q, p.hdim_v)); e.failure()) {
    return e;
  }
  if (auto e = CheckBuffer("lse", *lse, ffi::DataType::F32, LseShape(p)); e.failure()) return e;
  auto split = MustSplitRows(p);
  if (split.has_error()) return split.error();

  const device::Stream stream(context);
  const int64_t calls = *split ? p.batch : 1;
  aiter_contract::mha_fwd_args args = ForwardArgs(*split ? OneRow(p) : p);
  for (int64_t row = 0; row < calls; ++row) {
    args.q_ptr = Row(q, row, calls);
    args.k_ptr = Row(k, row, calls);
    args.v_ptr = Row(v, row, calls);
    args.o_ptr = Row(*out, row, calls);
    args.lse_ptr = Row(*lse, row, calls);
    if (auto e = Call("mha_fwd", [&] { return aiter_contract::mha_fwd(args, stream.config()); }); e.failure()) {
      return e;
    }
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace attention

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionForward, attention::Forward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<device::Context>()
                                  .Arg<xla::ffi::AnyBuffer>()  // q
                                  .Arg<xla::ffi::AnyBuffer>()  // k
                                  .Arg<xla::ffi::AnyBuffer>()  // v
                                  .RemainingArgs()             // sequence arrays
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Ret<xla::ffi::AnyBuffer>()  // lse
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("window_left")
                                  .Attr<int32_t>("window_right")
                                  .Attr<int32_t>("max_seqlen_q")
                                  .Attr<int32_t>("max_seqlen_k"));
