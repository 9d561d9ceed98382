#include "ffi/attention.h"

#include <limits>

namespace attention {
namespace {

ffi::Error Invalid(const std::string& message) { return ffi::Error::InvalidArgument("attention: " + message); }

std::string ToString(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::vector<int64_t> Shape(ffi::AnyBuffer buffer) {
  return {buffer.dimensions().begin(), buffer.dimensions().end()};
}

bool Fits32(int64_t value) { return value <= std::numeric_limits<int32_t>::max(); }

}  // namespace

std::string Problem::data_type() const {
  return dtype == ffi::DataType::F32 ? "fp32" : dtype == ffi::DataType::F16 ? "fp16" : "bf16";
}

size_t Problem::element_size() const { return dtype == ffi::DataType::F32 ? 4 : 2; }

int32_t Problem::mask_type() const {
  // Bottom-right for every mask: AITER rewrites top-left by comparing totals in group mode, which is
  // wrong when single sequences differ in length.
  const bool masked = window_left >= 0 || window_right >= 0;
  return masked ? aiter_contract::kMaskBottomRight : aiter_contract::kMaskNone;
}

ffi::Error CheckBuffer(const char* name, ffi::AnyBuffer buffer, ffi::DataType dtype,
                       const std::vector<int64_t>& shape) {
  if (buffer.element_type() != dtype) return Invalid(std::string(name) + " has the wrong element type");
  if (Shape(buffer) != shape) {
    return Invalid(std::string(name) + " has shape " + ToString(Shape(buffer)) + " where " + ToString(shape) +
                   " is needed");
  }
  return ffi::Error::Success();
}

std::vector<int64_t> ArrayShape(const Problem& p, int64_t seqlen, int64_t heads, int64_t dim) {
  if (p.varlen) return {seqlen, heads, dim};
  return {p.batch, seqlen, heads, dim};
}

std::vector<int64_t> LseShape(const Problem& p) {
  if (p.varlen) return {p.nhead_q, p.seqlen_q};
  return {p.batch, p.nhead_q, p.seqlen_q};
}

Strides ArrayStrides(const Problem& p, int64_t seqlen, int64_t heads, int64_t dim) {
  return {heads * dim, dim, p.rows() > 1 ? seqlen * heads * dim : 0};
}

Strides LseStrides(const Problem& p) { return {1, p.seqlen_q, p.rows() > 1 ? p.nhead_q * p.seqlen_q : 0}; }

ffi::ErrorOr<Problem> ParseProblem(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                                   ffi::RemainingArgs sequence, const Attributes& attributes) {
  const auto error = [](const std::string& message) { return ffi::Unexpected(Invalid(message)); };
  const auto dims = Shape(q), dims_k = Shape(k), dims_v = Shape(v);
  const size_t rank = dims.size();
  if (rank != 3 && rank != 4) {
    return error("q has shape " + ToString(dims) + "; [batch, seq, heads, head_dim] or [total, heads, head_dim] is needed");
  }
  Problem p;
  p.dtype = q.element_type();
  if (p.dtype != ffi::DataType::F32 && p.dtype != ffi::DataType::F16 && p.dtype != ffi::DataType::BF16) {
    return error("q is neither float32, float16 nor bfloat16");
  }
  if (dims_k.size() != rank || dims_v.size() != rank) return error("q, k and v differ in rank");
  p.varlen = rank == 3;
  p.seqlen_q = dims[rank - 3];
  p.seqlen_k = dims_k[rank - 3];
  p.nhead_q = dims[rank - 2];
  p.nhead_k = dims_k[rank - 2];
  p.hdim_q = dims[rank - 1];
  p.hdim_v = dims_v[rank - 1];
  if (p.nhead_k == 0 || p.nhead_q % p.nhead_k != 0) {
    return error(std::to_string(p.nhead_q) + " query heads are not a multiple of " + std::to_string(p.nhead_k) +
                 " key/value heads");
  }
  p.scale = attributes.scale;
  p.window_left = attributes.window_left;
  p.window_right = attributes.window_right;

  // Sequence arrays: none (dense), seqstart_q, seqstart_k, and for padded sequences their lengths.
  if (sequence.size() != 0 && sequence.size() != 2 && sequence.size() != 4) {
    return error("takes 0, 2 or 4 sequence arrays, not " + std::to_string(sequence.size()));
  }
  if (p.varlen != (sequence.size() > 0)) return error("sequence arrays come with varlen shapes, and only there");
  if (!p.varlen) {
    p.batch = dims[0];
    p.max_seqlen_q = p.seqlen_q;
    p.max_seqlen_k = p.seqlen_k;
  } else {
    const void* pointers[4] = {};
    for (size_t i = 0; i < sequence.size(); ++i) {
      auto array = sequence.get<ffi::Buffer<ffi::DataType::S32>>(i);
      if (!array.has_value()) return error("sequence arrays are int32");
      const int64_t length = array->dimensions().size() == 1 ? array->dimensions()[0] : -1;
      if (i == 0) p.batch = length - 1;
      if (length < 1 || length != (i < 2 ? p.batch + 1 : p.batch)) return error("sequence arrays disagree in length");
      pointers[i] = array->untyped_data();
    }
    p.seqstart_q = pointers[0];
    p.seqstart_k = pointers[1];
    p.seqlens_q = pointers[2];
    p.seqlens_k = pointers[3];
    p.max_seqlen_q = attributes.max_seqlen_q;
    p.max_seqlen_k = attributes.max_seqlen_k;
  }
  if (auto e = CheckBuffer("k", k, p.dtype, ArrayShape(p, p.seqlen_k, p.nhead_k, p.hdim_q)); e.failure()) {
    return ffi::Unexpected(e);
  }
  if (auto e = CheckBuffer("v", v, p.dtype, ArrayShape(p, p.seqlen_k, p.nhead_k, p.hdim_v)); e.failure()) {
    return ffi::Unexpected(e);
  }
  return p;
}

ffi::ErrorOr<bool> MustSplitRows(const Problem& p) {
  // The widest array of either side bounds the strides of them all (dk and dv are expanded to nhead_q).
  const int64_t dim = std::max(p.hdim_q, p.hdim_v);
  const int64_t token = p.nhead_q * dim;
  for (const auto& [name, value] : {std::pair{"tokens of q", p.seqlen_q}, std::pair{"tokens of k", p.seqlen_k},
                                    std::pair{"batch", p.batch}, std::pair{"heads times head_dim", token}}) {
    if (!Fits32(value)) {
      return ffi::Unexpected(Invalid(std::string(name) + " = " + std::to_string(value) +
                                     " does not fit AITER's 32-bit fields"));
    }
  }
  const int64_t row = std::max(p.seqlen_q, p.seqlen_k) * token;
  return p.rows() > 1 && !Fits32(std::max(row, p.nhead_q * p.seqlen_q));
}

Problem OneRow(const Problem& p) {
  Problem one = p;
  one.batch = 1;
  return one;
}

}  // namespace attention
