// Between the driver (mha_host.cc) and the kernels (kernels.cc, compiled once per instruction set).
//
// Plain data only: an inline function here would be emitted, under one name, by translation units
// built for different CPUs, and the linker could keep the one an older CPU cannot run.
#pragma once

#include <cstddef>
#include <cstdint>

namespace aiter_host {

enum class DType { kF32, kF16, kBF16 };

// The rows of one head in one sequence: row i starts at element i * stride.
struct Rows {
  void* data;
  int64_t stride;
};

struct Range {
  int64_t begin, end;
};

// One head of one sequence: the problem a kernel solves.
struct Head {
  DType dtype;
  int64_t seqlen_q, seqlen_k, hdim_q, hdim_v;
  float scale;
  int64_t left, right;  // query i sees the keys [i - left, i + right] that exist
  Rows q, k, v, o;
  float* lse;  // may be null in forward
  // Backward only.
  Rows d_o, dq, dk, dv;
  Rows dq_sum;   // fp32; dq itself where that is fp32
  float* delta;  // rowsum(dO * O)
};

struct Kernels {
  const char* isa;

  // Computes o and lse of the queries [q_begin, q_begin + forward_block).
  int64_t forward_block;
  size_t (*forward_scratch)(int64_t hdim_q, int64_t hdim_v);  // in floats
  void (*forward)(const Head&, int64_t q_begin, float* scratch);

  // Computes, when asked, dq (and delta) of the queries `q` from the keys `k`, and dk and dv of the
  // keys `k` from the queries `q` (and delta, if dq is not asked). Each range is the whole sequence, or
  // begins at a multiple of backward_block: results do not depend on how a sequence is divided.
  int64_t backward_block;
  size_t (*backward_scratch)(int64_t hdim_q, int64_t hdim_v);
  void (*backward)(const Head&, Range q, Range k, bool want_dq, bool want_dkv, float* scratch);
};

}  // namespace aiter_host
