// Vectors, tiles and conversions, over Eigen's packet layer.
//
// Everything lives in a namespace per instruction set, as does Eigen itself (see CMakeLists.txt).
#pragma once

#include <Eigen/Core>
#include <cstdint>

#include "aiter/host/kernels.h"

namespace aiter_host::AITER_HOST_ISA {

namespace simd = Eigen::internal;

using Vec = simd::packet_traits<float>::type;
using IntVec = simd::unpacket_traits<Vec>::integer_packet;
constexpr int64_t kWidth = simd::unpacket_traits<Vec>::size;

// The register tile of the matrix kernel: as many sums as the register file holds.
#if EIGEN_ARCH_i386_OR_x86_64 && !defined(EIGEN_VECTORIZE_AVX512)
constexpr int kTileRows = 4, kTileVecs = 3;
#else
constexpr int kTileRows = 8, kTileVecs = 2;
#endif

inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t RoundUp(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

inline Vec Set(float x) { return simd::pset1<Vec>(x); }
inline Vec Load(const float* p) { return simd::pload<Vec>(p); }
inline void Store(float* p, const Vec& x) { simd::pstore(p, x); }

// e^x for x <= 88, to about an ulp; exactly zero below -88, NaN for NaN.
inline Vec Exp(const Vec& x_in) {
  // 2^n, n = round(x / ln 2), comes from adding a number so large that n + 127, the exponent field,
  // lands in the lowest bits. At n = -127 the field is zero, hence the result.
  const Vec shift = Set(12582912.0f + 127.0f);
  const Vec x = simd::pmax(x_in, Set(-88.0f));
  const Vec shifted = simd::pmadd(x, Set(1.44269504f), shift);
  const Vec power =
      simd::preinterpret<Vec>(simd::plogical_shift_left<23>(simd::preinterpret<IntVec>(shifted)));
  const Vec n = simd::psub(shifted, shift);
  Vec r = simd::pmadd(n, Set(-0.693359375f), x);
  r = simd::pmadd(n, Set(2.12194440e-4f), r);
  Vec y = simd::pmadd(Set(1.9875691500e-4f), r, Set(1.3981999507e-3f));
  y = simd::pmadd(y, r, Set(8.3334519073e-3f));
  y = simd::pmadd(y, r, Set(4.1665795894e-2f));
  y = simd::pmadd(y, r, Set(1.6666665459e-1f));
  y = simd::pmadd(y, r, Set(5.0000001201e-1f));
  y = simd::pmadd(simd::pmul(r, r), y, r);
  return simd::pmul(simd::padd(y, Set(1.0f)), power);
}

// C[kTileRows, kVecs vectors] = (or +=) A B, over `depth`.
template <bool kTransA, bool kAdd, int kVecs>
inline void Tile(int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                 int64_t ldc) {
  Vec sum[kTileRows][kVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) sum[i][j] = Set(0.0f);
  for (int64_t l = 0; l < depth; ++l) {
    Vec b_vec[kVecs];
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) b_vec[j] = Load(b + l * ldb + j * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < kTileRows; ++i) {
      const Vec a_vec = Set(kTransA ? a[l * lda + i] : a[i * lda + l]);
#pragma GCC unroll 8
      for (int j = 0; j < kVecs; ++j) sum[i][j] = simd::pmadd(a_vec, b_vec[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) {
      float* out = c + i * ldc + j * kWidth;
      Store(out, kAdd ? simd::padd(Load(out), sum[i][j]) : sum[i][j]);
    }
}

enum Transpose : bool { kPlain = false, kTransposed = true };
enum Update : bool { kAssign = false, kAdd = true };

// C[rows, cols] = (or +=) A[rows, depth] B[depth, cols]; kTransposed: A is stored [depth, rows].
// Rows are done kTileRows at a time: A must be readable and C writable up to there.
template <Transpose kTransA, Update kUpdate, int kVecs = kTileVecs>
void Gemm(int64_t rows, int64_t cols, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb,
          float* c, int64_t ldc) {
  int64_t j = 0;
  for (; j + kVecs * kWidth <= cols; j += kVecs * kWidth)
    for (int64_t i = 0; i < rows; i += kTileRows)
      Tile<kTransA, kUpdate, kVecs>(depth, a + (kTransA ? i : i * lda), lda, b + j, ldb, c + i * ldc + j,
                                    ldc);
  if constexpr (kVecs > 1) {
    if (j < cols) Gemm<kTransA, kUpdate, kVecs - 1>(rows, cols - j, depth, a, lda, b + j, ldb, c + j, ldc);
  }
}

// dst[cols, rows] = src[rows, cols]^T, both multiples of kWidth.
inline void TransposeBlocks(int64_t rows, int64_t cols, const float* src, int64_t ld_src, float* dst,
                            int64_t ld_dst) {
  for (int64_t i = 0; i < rows; i += kWidth)
    for (int64_t j = 0; j < cols; j += kWidth) {
      simd::PacketBlock<Vec, kWidth> block;
      for (int64_t l = 0; l < kWidth; ++l) block.packet[l] = Load(src + (i + l) * ld_src + j);
      simd::ptranspose(block);
      for (int64_t l = 0; l < kWidth; ++l) Store(dst + (j + l) * ld_dst + i, block.packet[l]);
    }
}

template <typename T>
auto Row(const Rows& x, int64_t row, int64_t cols) {
  return Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>(static_cast<T*>(x.data) + row * x.stride, cols);
}

// A row of one of our own, aligned buffers.
inline auto Padded(float* row, int64_t cols) {
  return Eigen::Map<Eigen::ArrayXf, Eigen::AlignedMax>(row, cols);
}

// dst[count, ld] = scale * x[begin : begin + count, :cols] in fp32, zero beyond cols and down to `padded`
// rows.
template <typename T>
void LoadRows(const Rows& x, int64_t begin, int64_t count, int64_t padded, int64_t cols, float scale,
              float* dst, int64_t ld) {
  for (int64_t i = 0; i < count; ++i, dst += ld) {
    Padded(dst, cols) = Row<T>(x, begin + i, cols).template cast<float>() * scale;
    for (int64_t j = cols; j < ld; ++j) dst[j] = 0.0f;
  }
  for (int64_t j = 0; j < (padded - count) * ld; ++j) dst[j] = 0.0f;
}

template <typename T>
void StoreRows(const Rows& x, int64_t begin, int64_t count, int64_t cols, float* src, int64_t ld) {
  for (int64_t i = 0; i < count; ++i)
    Row<T>(x, begin + i, cols) = Padded(src + i * ld, cols).template cast<T>();
}

}  // namespace aiter_host::AITER_HOST_ISA
