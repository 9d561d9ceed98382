// The Python module maxtext_aiter._ffi: the handlers, for Python to register with XLA.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "aiter/host/mha_host.h"
#include "ffi/attention.h"
#include "ffi/attention_bwd.h"
#include "ffi/handlers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

nb::dict Registrations() {
  nb::dict handlers;
  handlers["maxtext_aiter_attention_fwd"] = Capsule(AttentionForward);
  handlers["maxtext_aiter_attention_bwd"] = Capsule(AttentionBackward);
  return handlers;
}

size_t AttentionBackwardScratchBytes(const std::string& dtype, bool varlen, int64_t batch, int64_t seqlen_q,
                                     int64_t seqlen_k, int64_t num_heads_q, int64_t num_heads_kv,
                                     int64_t head_dim_qk, int64_t head_dim_v) {
  attention::Problem p{};
  p.dtype = dtype == "float32"   ? xla::ffi::DataType::F32
            : dtype == "float16" ? xla::ffi::DataType::F16
                                 : xla::ffi::DataType::BF16;
  p.varlen = varlen;
  p.batch = batch;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.nhead_q = num_heads_q;
  p.nhead_k = num_heads_kv;
  p.hdim_q = head_dim_qk;
  p.hdim_v = head_dim_v;
  return attention::BackwardScratchBytes(p);
}

}  // namespace

NB_MODULE(_ffi, m) {
  m.def("registrations", &Registrations, "The XLA FFI handlers: a dict of target name to capsule.");
  m.def("attention_bwd_scratch_bytes", &AttentionBackwardScratchBytes, nb::kw_only(), "dtype"_a, "varlen"_a,
        "batch"_a, "seqlen_q"_a, "seqlen_k"_a, "num_heads_q"_a, "num_heads_kv"_a, "head_dim_qk"_a,
        "head_dim_v"_a, "Bytes of the scratch result of maxtext_aiter_attention_bwd.");
  m.def("host_isa", &aiter_host::mha_host_isa, "The instruction set that the host implementation uses.");
  m.def("force_host_isa", &aiter_host::mha_host_force_isa, "isa"_a,
        "Makes the host implementation use another instruction set (for tests).");
}
