// What the forward and backward attention handlers share: the operands checked and measured once, and
// the parts of AITER's argument structs that follow from them alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "aiter/contract.h"
#include "xla/ffi/api/ffi.h"

namespace attention {

namespace ffi = xla::ffi;

// Shapes: dense q [batch, seqlen_q, nhead_q, hdim_q], k and v likewise; varlen without the batch
// dimension, where `batch` counts sequences and seqlen_* are totals.
struct Problem {
  ffi::DataType dtype;
  bool varlen;
  int64_t batch;
  int64_t seqlen_q, seqlen_k;
  int64_t max_seqlen_q, max_seqlen_k;
  int64_t nhead_q, nhead_k;
  int64_t hdim_q, hdim_v;
  float scale;
  int32_t window_left, window_right;
  // Varlen: cumulative physical offsets [batch + 1] and, when sequences are padded, lengths [batch].
  const void* seqstart_q = nullptr;
  const void* seqstart_k = nullptr;
  const void* seqlens_q = nullptr;
  const void* seqlens_k = nullptr;

  std::string data_type() const;
  size_t element_size() const;
  int64_t group() const { return nhead_q / nhead_k; }
  int64_t rows() const { return varlen ? 1 : batch; }  // leading dimension of the arrays
  int32_t mask_type() const;
};

// The attributes both handlers take.
struct Attributes {
  float scale;
  int32_t window_left, window_right;
  int32_t max_seqlen_q, max_seqlen_k;  // varlen only
};

ffi::ErrorOr<Problem> ParseProblem(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                                   ffi::RemainingArgs sequence, const Attributes& attributes);

// Success if `buffer`, called `name` in the message, has this dtype and shape.
ffi::Error CheckBuffer(const char* name, ffi::AnyBuffer buffer, ffi::DataType dtype,
                       const std::vector<int64_t>& shape);

// The shape of q, k, v, out with `heads` and `dim`, and of lse.
std::vector<int64_t> ArrayShape(const Problem& p, int64_t seqlen, int64_t heads, int64_t dim);
std::vector<int64_t> LseShape(const Problem& p);

// One array's strides in AITER's terms, 64 bits wide until they are known to fit its fields.
struct Strides {
  int64_t token, head, batch;
};
Strides ArrayStrides(const Problem& p, int64_t seqlen, int64_t heads, int64_t dim);
Strides LseStrides(const Problem& p);

// AITER's fields hold 32 bits. A dense problem whose rows lie further apart than that is computed row
// by row (the strides between rows are then never used); anything else that does not fit is an error.
ffi::ErrorOr<bool> MustSplitRows(const Problem& p);
Problem OneRow(const Problem& p);

}  // namespace attention
