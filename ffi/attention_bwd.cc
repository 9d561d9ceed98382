// Attention backward: (q, k, v, out, lse, dout, sequence arrays…) -> (dq, dk, dv, scratch).
#include "ffi/attention_bwd.h"

#include "ffi/attention.h"
#include "ffi/device.h"
#include "ffi/handlers.h"
#include "aiter/host/mha_host.h"

namespace attention {
namespace {

aiter_contract::mha_bwd_args BackwardArgs(const Problem& p) {
  aiter_contract::mha_bwd_args a{};
  a.v3_atomic_fp32 = true;  // dq is accumulated in float32
  a.hdim_q = p.hdim_q;
  a.hdim_v = p.hdim_v;
  a.data_type = p.data_type();
  a.is_group_mode = p.varlen;
  a.is_deterministic = true;
  a.mask_type = p.mask_type();
  a.seqstart_q_ptr = p.seqstart_q;
  a.seqstart_k_ptr = p.seqstart_k;
  a.seqlen_q_ptr = p.seqlens_q;
  a.seqlen_k_ptr = p.seqlens_k;
  a.seqlen_q = p.seqlen_q;
  a.seqlen_k = p.seqlen_k;
  a.batch = p.batch;
  a.max_seqlen_q = p.max_seqlen_q;
  a.max_seqlen_k = p.max_seqlen_k;
  a.nhead_q = p.nhead_q;
  a.nhead_k = p.nhead_k;
  a.scale = p.scale;
  a.window_size_left = p.window_left;
  a.window_size_right = p.window_right;
  a.p_undrop = 1;

  const auto set = [](const Strides& s, int& token, int& head, int& batch) {
    token = s.token, head = s.head, batch = s.batch;
  };
  const Strides q = ArrayStrides(p, p.seqlen_q, p.nhead_q, p.hdim_q);
  const Strides out = ArrayStrides(p, p.seqlen_q, p.nhead_q, p.hdim_v);
  set(q, a.stride_q, a.nhead_stride_q, a.batch_stride_q);
  set(q, a.stride_dq, a.nhead_stride_dq, a.batch_stride_dq);
  set(out, a.stride_o, a.nhead_stride_o, a.batch_stride_o);
  set(out, a.stride_do, a.nhead_stride_do, a.batch_stride_do);
  set(ArrayStrides(p, p.seqlen_k, p.nhead_k, p.hdim_q), a.stride_k, a.nhead_stride_k, a.batch_stride_k);
  set(ArrayStrides(p, p.seqlen_k, p.nhead_k, p.hdim_v), a.stride_v, a.nhead_stride_v, a.batch_stride_v);
  set(ArrayStrides(p, p.seqlen_k, p.nhead_q, p.hdim_q), a.stride_dk, a.nhead_stride_dk, a.batch_stride_dk);
  set(ArrayStrides(p, p.seqlen_k, p.nhead_q, p.hdim_v), a.stride_dv, a.nhead_stride_dv, a.batch_stride_dv);
  int lse_token;  // AITER takes it as 1
  set(LseStrides(p), lse_token, a.nhead_stride_lsed, a.batch_stride_lsed);
  return a;
}

// Where in the scratch buffer of one call each part lies.
struct Scratch {
  size_t delta, dk, dv, workspace, end;

  Scratch(const Problem& p, size_t workspace_bytes) {
    const bool expanded = p.group() > 1;
    const size_t per_dim = expanded ? p.rows() * p.seqlen_k * p.nhead_q * p.element_size() : 0;
    size_t offset = 0;
    const auto place = [&](size_t bytes) {
      const size_t here = offset;
      offset += (bytes + 255) / 256 * 256;
      return here;
    };
    delta = place(p.rows() * p.nhead_q * p.seqlen_q * sizeof(float));
    dk = place(per_dim * p.hdim_q);
    dv = place(per_dim * p.hdim_v);
    workspace = place(workspace_bytes);
    end = offset;
  }
};

ffi::Error Backward(device::Context context, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                    ffi::AnyBuffer out, ffi::AnyBuffer lse, ffi::AnyBuffer dout, ffi::RemainingArgs sequence,
                    ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk, ffi::Result<ffi::AnyBuffer> dv,
                    ffi::Result<ffi::Buffer<ffi::DataType::U8>> scratch, float scale, int32_t window_left,
                    int32_t window_right, int32_t max_seqlen_q, int32_t max_seqlen_k) {
  auto parsed = ParseProblem(q, k, v, sequence, {scale, window_left, window_right, max_seqlen_q, max_seqlen_k});
  if (parsed.has_error()) return parsed.error();
  const Problem& p = *parsed;
  const auto out_shape = ArrayShape(p, p.seqlen_q, p.nhead_q, p.hdim_v);
  for (const auto& error : {CheckBuffer("out", out, p.dtype, out_shape),
                            CheckBuffer("dout", dout, p.dtype, out_shape),
                            CheckBuffer("lse", lse, ffi::DataType::F32, LseShape(p)),
                            CheckBuffer("dq", *dq, p.dtype, ArrayShape(p, p.seqlen_q, p.nhead_q, p.hdim_q)),
                            CheckBuffer("dk", *dk, p.dtype, ArrayShape(p, p.seqlen_k, p.nhead_k, p.hdim_q)),
                            CheckBuffer("dv", *dv, p.dtype, ArrayShape(p, p.seqlen_k, p.nhead_k, p.hdim_v))}) {
    if (error.failure()) return error;
  }
  auto split = MustSplitRows(p);
  if (split.has_error()) return split.error();

  const device::Stream stream(context);
  const int64_t calls = *split ? p.batch : 1;
  const Problem call = *split ? OneRow(p) : p;
  aiter_contract::mha_bwd_args args = BackwardArgs(call);
  const size_t workspace_bytes = aiter_host::mha_bwd_workspace_bytes(args);
  const Scratch layout(call, workspace_bytes);
  if (scratch->size_bytes() < layout.end) {
    return ffi::Error::InvalidArgument("attention: backward needs " + std::to_string(layout.end) +
                                       " bytes of scratch and was given " + std::to_string(scratch->size_bytes()));
  }
  uint8_t* base = scratch->typed_data();
  const bool expanded = p.group() > 1;
  size_t asked = 0;
  args.d_ptr = base + layout.delta;
  args.workspace_alloc = [&](size_t bytes, bool zero_init) -> void* {
    asked = bytes;
    if (bytes > workspace_bytes) return nullptr;
    if (zero_init) stream.Zero(base + layout.workspace, bytes);
    return base + layout.workspace;
  };
  for (int64_t row = 0; row < calls; ++row) {
    void* dk_row = Row(*dk, row, calls);
    void* dv_row = Row(*dv, row, calls);
    args.q_ptr = Row(q, row, calls);
    args.k_ptr = Row(k, row, calls);
    args.v_ptr = Row(v, row, calls);
    args.o_ptr = Row(out, row, calls);
    args.do_ptr = Row(dout, row, calls);
    args.lse_ptr = Row(lse, row, calls);
    args.dq_ptr = Row(*dq, row, calls);
    args.dk_ptr = expanded ? base + layout.dk : dk_row;
    args.dv_ptr = expanded ? base + layout.dv : dv_row;
    if (auto e = Call("mha_bwd", [&] { return aiter_contract::mha_bwd(args, stream.config()); }); e.failure()) {
      if (asked <= workspace_bytes) return e;
      return ffi::Error::Internal("attention: AITER asked for a workspace of " + std::to_string(asked) +
                                  " bytes where " + std::to_string(workspace_bytes) + " were planned");
    }
    if (expanded) {
      const int64_t tokens = call.rows() * p.seqlen_k;
      stream.SumOverGroup(p.dtype, args.dk_ptr, dk_row, tokens, p.nhead_k, p.group(), p.hdim_q);
      stream.SumOverGroup(p.dtype, args.dv_ptr, dv_row, tokens, p.nhead_k, p.group(), p.hdim_v);
    }
  }
  return ffi::Error::Success();
}

}  // namespace

size_t BackwardScratchBytes(const Problem& p) {
  auto split = MustSplitRows(p);
  const Problem call = split.has_value() && *split ? OneRow(p) : p;
  return Scratch(call, aiter_host::mha_bwd_workspace_bytes(BackwardArgs(call))).end;
}

}  // namespace attention

XLA_FFI_DEFINE_HANDLER_SYMBOL(AttentionBackward, attention::Backward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<device::Context>()
                                  .Arg<xla::ffi::AnyBuffer>()  // q
                                  .Arg<xla::ffi::AnyBuffer>()  // k
                                  .Arg<xla::ffi::AnyBuffer>()  // v
                                  .Arg<xla::ffi::AnyBuffer>()  // out
                                  .Arg<xla::ffi::AnyBuffer>()  // lse
                                  .Arg<xla::ffi::AnyBuffer>()  // dout
                                  .RemainingArgs()             // sequence arrays
                                  .Ret<xla::ffi::AnyBuffer>()  // dq
                                  .Ret<xla::ffi::AnyBuffer>()  // dk
                                  .Ret<xla::ffi::AnyBuffer>()  // dv
                                  .Ret<xla::ffi::Buffer<xla::ffi::DataType::U8>>()  // scratch
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("window_left")
                                  .Attr<int32_t>("window_right")
                                  .Attr<int32_t>("max_seqlen_q")
                                  .Attr<int32_t>("max_seqlen_k"));
