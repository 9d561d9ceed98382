// Flash attention, forward and backward, on one head of one sequence.
//
// Both are tiled the same way. The block that stays, queries in forward and keys in backward, lies along
// the vector lanes: it is transposed once, into panels of kLanes columns. The blocks that stream past it
// are only converted to fp32; the matrix kernel broadcasts their elements. So a score tile is always
// [streaming rows, kLanes], small enough for the L1 cache, and needs no reduction across lanes in forward.
#include "aiter/host/kernels.h"

#include <math.h>
#include <string.h>

#include "aiter/host/simd.h"

namespace aiter_host::AITER_HOST_ISA {
namespace {

constexpr int64_t kLanes = 16 * kTileVecs;
static_assert(kLanes % (kTileVecs * kWidth) == 0);

constexpr int64_t kForwardPanels = 8;
constexpr int64_t kForwardQueries = kForwardPanels * kLanes;
constexpr int64_t kForwardKeys = 128;

constexpr int64_t kBackwardPanels = 4;
constexpr int64_t kBackwardKeys = kBackwardPanels * kLanes;
constexpr int64_t kBackwardQueries = 64;
static_assert(kBackwardKeys % kBackwardQueries == 0, "backward_block must be a multiple of both");

// Leading dimensions: head dims, padded for vectors and for tiles alike.
int64_t Pad(int64_t hdim) { return RoundUp(hdim, kWidth > kTileRows ? kWidth : kTileRows); }

// Hands out cache-line aligned buffers; without memory, only adds up what they need.
class Arena {
 public:
  explicit Arena(float* base) : base_(base) {}
  float* Take(int64_t floats) {
    float* p = base_ ? base_ + used_ : nullptr;
    used_ += RoundUp(floats, 16);
    return p;
  }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

// The keys that query i sees, and the queries that see key j.
int64_t KeyBegin(const Head& h, int64_t i) { return Max(0, i - h.left); }
int64_t KeyEnd(const Head& h, int64_t i) { return Min(h.seqlen_k, i + h.right + 1); }
int64_t QueryBegin(const Head& h, int64_t j) { return Max(0, j - h.right); }
int64_t QueryEnd(const Head& h, int64_t j) { return Min(h.seqlen_q, j + h.left + 1); }

// Transposes rows into the lanes of one panel [ld, kLanes].
template <typename T>
void LoadPanel(const Rows& x, int64_t begin, int64_t end, int64_t cols, float scale, float* staging,
               int64_t ld, float* panel) {
  LoadRows<T>(x, begin, Min(kLanes, end - begin), kLanes, cols, scale, staging, ld);
  TransposeBlocks(kLanes, ld, staging, ld, panel, kLanes);
}

template <typename T>
void StorePanel(const Rows& x, int64_t begin, int64_t end, int64_t cols, const float* panel, float* staging,
                int64_t ld) {
  TransposeBlocks(ld, kLanes, panel, kLanes, staging, ld);
  StoreRows<T>(x, begin, Min(kLanes, end - begin), cols, staging, ld);
}

// x where lo <= index < hi, otherwise `hidden`.
Vec Mask(const Vec& x, const Vec& index, const Vec& lo, const Vec& hi, const Vec& hidden) {
  return simd::pselect(simd::pand(simd::pcmp_le(lo, index), simd::pcmp_lt(index, hi)), x, hidden);
}

// ---------------------------------------------------------------------------------------- forward

struct ForwardBuffers {
  int64_t ld_q, ld_v;
  float *q, *o, *max, *sum;        // per panel: q^T, o^T, running maximum and sum
  float *k, *v, *score, *staging;  // shared
  ForwardBuffers(Arena& arena, int64_t hdim_q, int64_t hdim_v)
      : ld_q(Pad(hdim_q)),
        ld_v(Pad(hdim_v)),
        q(arena.Take(kForwardPanels * ld_q * kLanes)),
        o(arena.Take(kForwardPanels * ld_v * kLanes)),
        max(arena.Take(kForwardQueries)),
        sum(arena.Take(kForwardQueries)),
        k(arena.Take((kForwardKeys + kTileRows) * ld_q)),
        v(arena.Take((kForwardKeys + kTileRows) * ld_v)),
        score(arena.Take((kForwardKeys + kTileRows) * kLanes)),
        staging(arena.Take(kLanes * Max(ld_q, ld_v))) {}
};

size_t ForwardScratch(int64_t hdim_q, int64_t hdim_v) {
  Arena arena(nullptr);
  ForwardBuffers(arena, hdim_q, hdim_v);
  return arena.used();
}

// Scores to exp(score - max), in place, with the panel's running max and sum; o is rescaled to the new max.
// Lane l sees the rows [lo[l], hi[l]).
template <bool kMasked>
void OnlineSoftmax(int64_t rows, float* score, const float* lo, const float* hi, float* max, float* sum,
                   float* o, int64_t o_rows) {
  const Vec minus_inf = Set(-INFINITY);
  for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
    const Vec old_max = Load(max + lane);
    Vec new_max = old_max;
    for (int64_t r = 0; r < rows; ++r) {
      float* s = score + r * kLanes + lane;
      if constexpr (kMasked)
        Store(s, Mask(Load(s), Set(float(r)), Load(lo + lane), Load(hi + lane), minus_inf));
      new_max = simd::pmax(new_max, Load(s));
    }
    // A lane that has seen nothing yet subtracts 0, not -inf, so that its exponentials are zero.
    const Vec shift = simd::pselect(simd::pcmp_eq(new_max, minus_inf), Set(0.0f), new_max);
    Vec total = Set(0.0f);
    for (int64_t r = 0; r < rows; ++r) {
      float* s = score + r * kLanes + lane;
      const Vec p = Exp(simd::psub(Load(s), shift));
      Store(s, p);
      total = simd::padd(total, p);
    }
    const Vec rescale = Exp(simd::psub(old_max, shift));
    Store(max + lane, new_max);
    Store(sum + lane, simd::pmadd(Load(sum + lane), rescale, total));
    for (int64_t r = 0; r < o_rows; ++r) {
      float* p = o + r * kLanes + lane;
      Store(p, simd::pmul(Load(p), rescale));
    }
  }
}

template <typename T>
void ForwardTyped(const Head& h, int64_t q_begin, float* scratch) {
  Arena arena(scratch);
  const ForwardBuffers buf(arena, h.hdim_q, h.hdim_v);
  const int64_t ld_q = buf.ld_q, ld_v = buf.ld_v;
  const int64_t q_end = Min(h.seqlen_q, q_begin + kForwardQueries);

  for (int64_t q0 = q_begin, p = 0; q0 < q_end; q0 += kLanes, ++p)
    LoadPanel<T>(h.q, q0, q_end, h.hdim_q, h.scale, buf.staging, ld_q, buf.q + p * ld_q * kLanes);
  const int64_t lanes = RoundUp(q_end - q_begin, kLanes);
  for (int64_t i = 0; i < lanes; ++i) buf.max[i] = -INFINITY;
  memset(buf.sum, 0, lanes * sizeof(float));
  memset(buf.o, 0, lanes * ld_v * sizeof(float));

  const int64_t k_end = KeyEnd(h, q_end - 1);
  for (int64_t k0 = KeyBegin(h, q_begin); k0 < k_end; k0 += kForwardKeys) {
    const int64_t keys = Min(kForwardKeys, k_end - k0);
    LoadRows<T>(h.k, k0, keys, keys + kTileRows, h.hdim_q, 1.0f, buf.k, ld_q);
    LoadRows<T>(h.v, k0, keys, keys, h.hdim_v, 1.0f, buf.v, ld_v);
    for (int64_t q0 = q_begin, p = 0; q0 < q_end; q0 += kLanes, ++p) {
      const int64_t q_last = Min(q0 + kLanes, q_end) - 1;
      const int64_t first = Max(k0, KeyBegin(h, q0)) - k0;
      const int64_t rows = Min(k0 + keys, KeyEnd(h, q_last)) - k0 - first;
      if (rows <= 0) continue;
      float* o = buf.o + p * ld_v * kLanes;
      float* max = buf.max + p * kLanes;
      float* sum = buf.sum + p * kLanes;

      Gemm<kPlain, kAssign>(rows, kLanes, h.hdim_q, buf.k + first * ld_q, ld_q, buf.q + p * ld_q * kLanes,
                            kLanes, buf.score, kLanes);
      if (KeyBegin(h, q_last) <= k0 + first && k0 + first + rows <= KeyEnd(h, q0)) {
        OnlineSoftmax<false>(rows, buf.score, nullptr, nullptr, max, sum, o, h.hdim_v);
      } else {
        alignas(64) float lo[kLanes], hi[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) {
          lo[i] = float(Min(rows, KeyBegin(h, q0 + i) - k0 - first));
          hi[i] = float(Max(0, KeyEnd(h, q0 + i) - k0 - first));
        }
        OnlineSoftmax<true>(rows, buf.score, lo, hi, max, sum, o, h.hdim_v);
      }
      Gemm<kTransposed, kAdd>(h.hdim_v, kLanes, rows, buf.v + first * ld_v, ld_v, buf.score, kLanes, o,
                              kLanes);
    }
  }

  for (int64_t q0 = q_begin, p = 0; q0 < q_end; q0 += kLanes, ++p) {
    float* o = buf.o + p * ld_v * kLanes;
    float* max = buf.max + p * kLanes;
    float* sum = buf.sum + p * kLanes;
    for (int64_t i = 0; h.lse && i < Min(kLanes, q_end - q0); ++i)
      h.lse[q0 + i] = sum[i] == 0.0f ? -INFINITY : max[i] + logf(sum[i]);
    for (int64_t i = 0; i < kLanes; ++i) sum[i] = sum[i] == 0.0f ? 0.0f : 1.0f / sum[i];
    for (int64_t r = 0; r < h.hdim_v; ++r)
      for (int64_t i = 0; i < kLanes; i += kWidth)
        Store(o + r * kLanes + i, simd::pmul(Load(o + r * kLanes + i), Load(sum + i)));
    StorePanel<T>(h.o, q0, q_end, h.hdim_v, o, buf.staging, ld_v);
  }
}

// --------------------------------------------------------------------------------------- backward

struct BackwardBuffers {
  int64_t ld_q, ld_v;
  float *k, *v, *dk, *dv;                                   // per panel, transposed
  float *k_rows, *q, *d_o, *dq, *score, *dscore, *staging;  // shared
  BackwardBuffers(Arena& arena, int64_t hdim_q, int64_t hdim_v)
      : ld_q(Pad(hdim_q)),
        ld_v(Pad(hdim_v)),
        k(arena.Take(ld_q * kBackwardKeys)),
        v(arena.Take(ld_v * kBackwardKeys)),
        dk(arena.Take(ld_q * kBackwardKeys)),
        dv(arena.Take(ld_v * kBackwardKeys)),
        k_rows(arena.Take(ld_q * kBackwardKeys)),
        q(arena.Take((kBackwardQueries + kTileRows) * ld_q)),
        d_o(arena.Take((kBackwardQueries + kTileRows) * ld_v)),
        dq(arena.Take((kBackwardQueries + kTileRows) * ld_q)),
        score(arena.Take((kBackwardQueries + kTileRows) * kLanes)),
        dscore(arena.Take((kBackwardQueries + kTileRows) * kLanes)),
        staging(arena.Take(kLanes * Max(ld_q, ld_v))) {}
};

size_t BackwardScratch(int64_t hdim_q, int64_t hdim_v) {
  Arena arena(nullptr);
  BackwardBuffers(arena, hdim_q, hdim_v);
  return arena.used();
}

// score to P = exp(score - lse) and dP to dS = P (dP - delta), in place, for the queries from `q0` on and
// the keys from `k0` on.
template <bool kMasked>
void ScoreGradient(const Head& h, int64_t rows, int64_t q0, int64_t k0, float* score, float* dscore) {
  for (int64_t r = 0; r < rows; ++r) {
    const Vec lse = Set(h.lse[q0 + r]), delta = Set(h.delta[q0 + r]);
    const Vec lo = Set(float(Min(kLanes, KeyBegin(h, q0 + r) - k0)));
    const Vec hi = Set(float(Max(0, KeyEnd(h, q0 + r) - k0)));
    for (int64_t lane = 0; lane < kLanes; lane += kWidth, score += kWidth, dscore += kWidth) {
      Vec p = Exp(simd::psub(Load(score), lse));
      if constexpr (kMasked) p = Mask(p, simd::plset<Vec>(float(lane)), lo, hi, Set(0.0f));
      Store(score, p);
      Store(dscore, simd::pmul(p, simd::psub(Load(dscore), delta)));
    }
  }
}

template <typename T>
void BackwardTyped(const Head& h, Range q, Range k, bool want_dq, bool want_dkv, float* scratch) {
  Arena arena(scratch);
  const BackwardBuffers buf(arena, h.hdim_q, h.hdim_v);
  const int64_t ld_q = buf.ld_q, ld_v = buf.ld_v;

  // delta is summed in the order of dP, so that dS is exactly zero where a query sees a single key.
  for (int64_t q0 = q.begin; want_dq && q0 < q.end; q0 += kLanes) {
    LoadPanel<T>(h.d_o, q0, q.end, h.hdim_v, 1.0f, buf.staging, ld_v, buf.v);
    LoadPanel<T>(h.o, q0, q.end, h.hdim_v, 1.0f, buf.staging, ld_v, buf.dv);
    for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
      Vec sum = Set(0.0f);
      for (int64_t r = 0; r < h.hdim_v; ++r)
        sum = simd::pmadd(Load(buf.v + r * kLanes + lane), Load(buf.dv + r * kLanes + lane), sum);
      Store(buf.score + lane, sum);
    }
    memcpy(h.delta + q0, buf.score, Min(kLanes, q.end - q0) * sizeof(float));
  }
  for (int64_t i = q.begin; want_dq && i < q.end; ++i) Row<float>(h.dq_sum, i, h.hdim_q).setZero();

  for (int64_t k0 = k.begin; k0 < k.end; k0 += kBackwardKeys) {
    const int64_t k_end = Min(k.end, k0 + kBackwardKeys);
    for (int64_t p = 0; k0 + p * kLanes < k_end; ++p) {
      const int64_t kp = k0 + p * kLanes;
      LoadPanel<T>(h.k, kp, k_end, h.hdim_q, 1.0f, buf.staging, ld_q, buf.k + p * ld_q * kLanes);
      LoadPanel<T>(h.v, kp, k_end, h.hdim_v, 1.0f, buf.staging, ld_v, buf.v + p * ld_v * kLanes);
    }
    const int64_t lanes = RoundUp(k_end - k0, kLanes);
    LoadRows<T>(h.k, k0, k_end - k0, lanes, h.hdim_q, h.scale, buf.k_rows, ld_q);
    memset(buf.dk, 0, lanes * ld_q * sizeof(float));
    memset(buf.dv, 0, lanes * ld_v * sizeof(float));

    const int64_t q_end = Min(q.end, QueryEnd(h, k_end - 1));
    int64_t q0 = Max(q.begin, QueryBegin(h, k0) / kBackwardQueries * kBackwardQueries);
    for (; q0 < q_end; q0 += kBackwardQueries) {
      const int64_t queries = Min(kBackwardQueries, q_end - q0);
      LoadRows<T>(h.q, q0, queries, queries + kTileRows, h.hdim_q, h.scale, buf.q, ld_q);
      LoadRows<T>(h.d_o, q0, queries, queries + kTileRows, h.hdim_v, 1.0f, buf.d_o, ld_v);
      memset(buf.dq, 0, queries * ld_q * sizeof(float));
      for (int64_t kp = k0, p = 0; kp < k_end; kp += kLanes, ++p) {
        const int64_t k_last = Min(kp + kLanes, k_end) - 1;
        const int64_t first = Max(q0, QueryBegin(h, kp)) - q0;
        const int64_t visible = Min(q0 + queries, QueryEnd(h, k_last)) - q0 - first;
        if (visible <= 0) continue;
        // Whole tiles, since what lies below the last one in `dq` belongs to other queries.
        const int64_t rows = Min(RoundUp(visible, kTileRows), queries - first);
        const float* q_rows = buf.q + first * ld_q;
        const float* do_rows = buf.d_o + first * ld_v;
        const int64_t qk = p * ld_q * kLanes, vo = p * ld_v * kLanes;

        Gemm<kPlain, kAssign>(rows, kLanes, h.hdim_q, q_rows, ld_q, buf.k + qk, kLanes, buf.score, kLanes);
        Gemm<kPlain, kAssign>(rows, kLanes, h.hdim_v, do_rows, ld_v, buf.v + vo, kLanes, buf.dscore, kLanes);
        const int64_t q_first = q0 + first, q_last = q_first + rows - 1;
        if (KeyBegin(h, q_last) <= kp && kp + kLanes <= KeyEnd(h, q_first))
          ScoreGradient<false>(h, rows, q_first, kp, buf.score, buf.dscore);
        else
          ScoreGradient<true>(h, rows, q_first, kp, buf.score, buf.dscore);
        if (want_dkv) {
          Gemm<kTransposed, kAdd>(h.hdim_v, kLanes, rows, do_rows, ld_v, buf.score, kLanes, buf.dv + vo,
                                  kLanes);
          Gemm<kTransposed, kAdd>(h.hdim_q, kLanes, rows, q_rows, ld_q, buf.dscore, kLanes, buf.dk + qk,
                                  kLanes);
        }
        if (want_dq)
          Gemm<kPlain, kAdd>(rows, ld_q, kLanes, buf.dscore, kLanes, buf.k_rows + qk, ld_q,
                             buf.dq + first * ld_q, ld_q);
      }
      for (int64_t i = 0; want_dq && i < queries; ++i)
        Row<float>(h.dq_sum, q0 + i, h.hdim_q) += Padded(buf.dq + i * ld_q, h.hdim_q);
    }
    for (int64_t p = 0; want_dkv && k0 + p * kLanes < k_end; ++p) {
      const int64_t kp = k0 + p * kLanes;
      StorePanel<T>(h.dk, kp, k_end, h.hdim_q, buf.dk + p * ld_q * kLanes, buf.staging, ld_q);
      StorePanel<T>(h.dv, kp, k_end, h.hdim_v, buf.dv + p * ld_v * kLanes, buf.staging, ld_v);
    }
  }

  for (int64_t i = q.begin; want_dq && h.dq.data != h.dq_sum.data && i < q.end; ++i)
    Row<T>(h.dq, i, h.hdim_q) = Row<float>(h.dq_sum, i, h.hdim_q).template cast<T>();
}

void Forward(const Head& h, int64_t q_begin, float* scratch) {
  switch (h.dtype) {
    case DType::kF32:
      return ForwardTyped<float>(h, q_begin, scratch);
    case DType::kF16:
      return ForwardTyped<Eigen::half>(h, q_begin, scratch);
    case DType::kBF16:
      return ForwardTyped<Eigen::bfloat16>(h, q_begin, scratch);
  }
}

void Backward(const Head& h, Range q, Range k, bool want_dq, bool want_dkv, float* scratch) {
  switch (h.dtype) {
    case DType::kF32:
      return BackwardTyped<float>(h, q, k, want_dq, want_dkv, scratch);
    case DType::kF16:
      return BackwardTyped<Eigen::half>(h, q, k, want_dq, want_dkv, scratch);
    case DType::kBF16:
      return BackwardTyped<Eigen::bfloat16>(h, q, k, want_dq, want_dkv, scratch);
  }
}

}  // namespace

#define AITER_HOST_STRING(x) #x
#define AITER_HOST_NAME(x) AITER_HOST_STRING(x)
extern const Kernels kKernels = {AITER_HOST_NAME(AITER_HOST_ISA),
                                 kForwardQueries,
                                 ForwardScratch,
                                 Forward,
                                 kBackwardKeys,
                                 BackwardScratch,
                                 Backward};

}  // namespace aiter_host::AITER_HOST_ISA
