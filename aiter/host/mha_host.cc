// AITER's attention entry points on a CPU: checks a request, finds its sequences, and divides the work.
#include "aiter/host/mha_host.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "aiter/host/executor.h"
#include "aiter/host/kernels.h"

namespace aiter_host {

namespace baseline {
extern const Kernels kKernels;
}
#ifdef AITER_HOST_X86
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

namespace {

using aiter_contract::mha_bwd_args;
using aiter_contract::mha_fwd_args;
using aiter_contract::stream_config;

constexpr float kUnsupported = -1.0f;

// The kernels this CPU can run, best first.
const std::vector<const Kernels*>& AvailableKernels() {
  static const std::vector<const Kernels*> available = [] {
    std::vector<const Kernels*> list;
#ifdef AITER_HOST_X86
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512) list.push_back(&avx512::kKernels);
    if (avx2) list.push_back(&avx2::kKernels);
#endif
    list.push_back(&baseline::kKernels);
    return list;
  }();
  return available;
}

std::atomic<const Kernels*> forced_kernels{nullptr};

const Kernels& CurrentKernels() {
  const Kernels* forced = forced_kernels.load();
  return forced ? *forced : *AvailableKernels().front();
}

bool ParseDType(const std::string& name, DType* dtype) {
  if (name == "fp32") return *dtype = DType::kF32, true;
  if (name == "fp16") return *dtype = DType::kF16, true;
  if (name == "bf16") return *dtype = DType::kBF16, true;
  return false;
}

int64_t SizeOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// What both directions refuse.
template <typename Args>
bool Supported(const Args& a, const stream_config& stream) {
  DType dtype;
  return ParseDType(a.data_type, &dtype) && stream.stream_id_ && !a.v3_api_check &&
         a.bias_type == aiter_contract::kBiasNone && !(a.p_drop > 0) && !a.sink_ptr &&
         a.mask_type >= aiter_contract::kMaskNone && a.mask_type <= aiter_contract::kMaskWindowGeneric &&
         a.hdim_q > 0 && a.hdim_v > 0 && a.nhead_k > 0 && a.nhead_q % a.nhead_k == 0 &&
         (!a.is_group_mode || (a.seqstart_q_ptr && a.seqstart_k_ptr));
}

// A run of rows in a tensor: `batch` selects by batch stride (0 in group mode).
struct Span {
  int64_t batch, begin, size;
};

// Which rows are sequences (one span per sequence), and which belong to none.
struct Side {
  std::vector<Span> sequences, gaps;
};

Side FindSequences(bool is_group_mode, int64_t batch, int64_t seqlen, const void* seqstart_ptr, const void* cu_ptr,
                   const void* seqlen_ptr) {
  const auto* seqstart = static_cast<const int32_t*>(seqstart_ptr);
  const auto* cu_seqlen = static_cast<const int32_t*>(cu_ptr);
  const auto* logical = static_cast<const int32_t*>(seqlen_ptr);
  Side side;
  auto add_gap = [&](int64_t b, int64_t begin, int64_t end) {
    constexpr int64_t kRowsPerTask = 256;
    for (; begin < end; begin += kRowsPerTask) side.gaps.push_back({b, begin, std::min(kRowsPerTask, end - begin)});
  };
  if (is_group_mode) add_gap(0, 0, batch > 0 ? seqstart[0] : seqlen);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t index = is_group_mode ? 0 : b;
    const int64_t begin = is_group_mode ? seqstart[b] : 0;
    const int64_t end = is_group_mode ? seqstart[b + 1] : seqlen;
    int64_t size = end - begin;
    if (cu_seqlen)
      size = std::min<int64_t>(size, cu_seqlen[b + 1] - cu_seqlen[b]);
    else if (logical)
      size = std::min<int64_t>(size, logical[b]);
    side.sequences.push_back({index, begin, size});
    add_gap(index, begin + size, end);
  }
  if (is_group_mode && batch > 0) add_gap(0, seqstart[batch], seqlen);
  return side;
}

template <typename Args>
Side FindQueries(const Args& a) {
  return FindSequences(a.is_group_mode, a.batch, a.seqlen_q, a.seqstart_q_ptr, a.cu_seqlen_q_ptr, a.seqlen_q_ptr);
}

template <typename Args>
Side FindKeys(const Args& a) {
  return FindSequences(a.is_group_mode, a.batch, a.seqlen_k, a.seqstart_k_ptr, a.cu_seqlen_k_ptr, a.seqlen_k_ptr);
}

// A tensor [batch, row, head, hdim] of `size`-byte elements, any strides.
struct Tensor {
  void* data;
  int64_t size, batch_stride, row_stride, head_stride;

  Rows At(const Span& span, int64_t head) const {
    const int64_t offset = span.batch * batch_stride + span.begin * row_stride + head * head_stride;
    return {static_cast<char*>(data) + offset * size, row_stride};
  }
  void Fill(const Span& span, int64_t heads, int64_t hdim, float value) const {
    for (int64_t head = 0; head < heads; ++head) {
      const Rows rows = At(span, head);
      for (int64_t i = 0; i < span.size; ++i) {
        char* row = static_cast<char*>(rows.data) + i * row_stride * size;
        if (value == 0)
          std::memset(row, 0, hdim * size);
        else
          std::fill_n(reinterpret_cast<float*>(row), hdim, value);
      }
    }
  }
};

Tensor MakeTensor(const void* data, int64_t size, int64_t batch_stride, int64_t row_stride, int64_t head_stride) {
  return {const_cast<void*>(data), size, batch_stride, row_stride, head_stride};
}

template <typename Args>
void SetWindow(const Args& a, Head* head) {
  constexpr int64_t kUnbounded = int64_t{1} << 40;
  const int64_t left = a.window_size_left, right = a.window_size_right;
  switch (a.mask_type) {
    case aiter_contract::kMaskNone:
      head->left = head->right = kUnbounded;
      break;
    case aiter_contract::kMaskWindowGeneric:
      head->left = left - 1;
      head->right = right - 1;
      break;
    default: {
      const bool bottom_right = a.mask_type == aiter_contract::kMaskBottomRight;
      const int64_t diagonal = bottom_right ? head->seqlen_k - head->seqlen_q : 0;
      head->left = left < 0 ? kUnbounded : left - diagonal;
      head->right = right < 0 ? kUnbounded : right + diagonal;
    }
  }
}

// How many keys the queries of a sequence see, roughly: full rectangles bounded by the window.
double Cost(const Head& h) {
  const double visible = std::min<double>(h.seqlen_k, std::max<double>(0, double(h.left) + double(h.right) + 1));
  return double(h.seqlen_q) * visible;
}

// Runs task(0) … task(n - 1) on all threads, each with its own scratch. Threads take the next task when they
// are free: tasks differ in length, and some threads may be busy elsewhere.
template <typename Task>
void RunTasks(const stream_config& stream, int64_t n, size_t scratch_floats, const Task& task) {
  if (n == 0) return;
  auto& executor = *static_cast<Executor*>(stream.stream_id_);
  std::atomic<int64_t> next{0};
  executor.ParallelFor(std::min(n, std::max<int64_t>(1, executor.num_threads())), [&](int64_t) {
    constexpr std::align_val_t kCacheLine{64};
    auto release = [](float* p) { ::operator delete(p, kCacheLine); };
    std::unique_ptr<float, decltype(release)> scratch(
        static_cast<float*>(::operator new(scratch_floats * sizeof(float), kCacheLine)), release);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) task(i, scratch.get());
  });
}

// Every head of every sequence, divided into pieces of at most `block` rows: the tasks of a call.
class Division {
 public:
  struct Task {
    int64_t sequence, head;
    Range rows;
  };

  Division(const std::vector<Span>& sequences, int64_t heads, int64_t block)
      : sequences_(sequences), heads_(heads), block_(block) {
    for (size_t s = 0; s < sequences.size(); ++s) {
      first_.push_back(owner_.size());
      owner_.insert(owner_.end(), (sequences[s].size + block - 1) / block, s);
    }
    first_.push_back(owner_.size());
  }
  int64_t size() const { return owner_.size() * heads_; }
  // Sequence by sequence and head by head, for the caches; the last piece first, which is the longest under a
  // causal mask, so that a thread does not begin it when all others are done.
  Task operator[](int64_t i) const {
    const int64_t s = owner_[i / heads_], pieces = first_[s + 1] - first_[s], local = i - first_[s] * heads_;
    const int64_t begin = (pieces - 1 - local % pieces) * block_;
    return {s, local / pieces, {begin, std::min(begin + block_, sequences_[s].size)}};
  }

 private:
  const std::vector<Span>& sequences_;
  int64_t heads_, block_;
  std::vector<int64_t> owner_, first_;  // piece to sequence, sequence to its first piece
};

}  // namespace

const char* mha_host_isa() { return CurrentKernels().isa; }

bool mha_host_force_isa(const char* name) {
  if (!name) return forced_kernels = nullptr, true;
  for (const Kernels* kernels : AvailableKernels())
    if (!std::strcmp(kernels->isa, name)) return forced_kernels = kernels, true;
  return false;
}

size_t mha_bwd_workspace_bytes(const mha_bwd_args& a) {
  if (a.data_type == "fp32") return 0;
  return size_t(a.is_group_mode ? 1 : a.batch) * a.nhead_q * a.seqlen_q * a.hdim_q * sizeof(float);
}

}  // namespace aiter_host

namespace aiter_contract {

using namespace aiter_host;

float mha_fwd(const mha_fwd_args& a, const stream_config& stream) {
  if (!Supported(a, stream) || a.qscale_type != 0 || a.has_sink || a.sink_size > 0 || a.logits_soft_cap > 0 ||
      a.s_randval || (a.has_lse && !a.lse_ptr))
    return kUnsupported;

  DType dtype;
  ParseDType(a.data_type, &dtype);
  const int64_t size = SizeOf(dtype);
  const Tensor q = MakeTensor(a.q_ptr, size, a.batch_stride_q, a.stride_q, a.nhead_stride_q);
  const Tensor k = MakeTensor(a.k_ptr, size, a.batch_stride_k, a.stride_k, a.nhead_stride_k);
  const Tensor v = MakeTensor(a.v_ptr, size, a.batch_stride_v, a.stride_v, a.nhead_stride_v);
  const Tensor o = MakeTensor(a.o_ptr, size, a.batch_stride_o, a.stride_o, a.nhead_stride_o);
  const Tensor lse = MakeTensor(a.lse_ptr, sizeof(float), a.batch_stride_lse, 1, a.nhead_stride_lse);

  const Kernels& kernels = CurrentKernels();
  const Side queries = FindQueries(a), keys = FindKeys(a);
  const Division tasks(queries.sequences, a.nhead_q, kernels.forward_block);
  const int64_t heads = a.nhead_q, computed = tasks.size(), gaps = queries.gaps.size();

  RunTasks(stream, computed + gaps, kernels.forward_scratch(a.hdim_q, a.hdim_v), [&](int64_t i, float* scratch) {
    if (i >= computed) {
      const Span& gap = queries.gaps[i - computed];
      o.Fill(gap, heads, a.hdim_v, 0.0f);
      if (a.has_lse) lse.Fill(gap, heads, 1, -INFINITY);
      return;
    }
    const auto [sequence, head, rows] = tasks[i];
    const int64_t head_k = head / (heads / a.nhead_k);
    const Span &sq = queries.sequences[sequence], &sk = keys.sequences[sequence];
    Head h{};
    h.dtype = dtype;
    h.seqlen_q = sq.size, h.seqlen_k = sk.size, h.hdim_q = a.hdim_q, h.hdim_v = a.hdim_v;
    h.scale = a.scale_s;
    SetWindow(a, &h);
    h.q = q.At(sq, head), h.k = k.At(sk, head_k), h.v = v.At(sk, head_k), h.o = o.At(sq, head);
    h.lse = a.has_lse ? static_cast<float*>(lse.At(sq, head).data) : nullptr;
    kernels.forward(h, rows.begin, scratch);
  });
  return 0.0f;
}

float mha_bwd(const mha_bwd_args& a, const stream_config& stream) {
  if (!Supported(a, stream) || a.has_dbias || a.has_dropout || a.is_store_randval || a.d_sink_ptr) return kUnsupported;

  DType dtype;
  ParseDType(a.data_type, &dtype);
  const int64_t size = SizeOf(dtype), heads = a.nhead_q;
  const Tensor q = MakeTensor(a.q_ptr, size, a.batch_stride_q, a.stride_q, a.nhead_stride_q);
  const Tensor k = MakeTensor(a.k_ptr, size, a.batch_stride_k, a.stride_k, a.nhead_stride_k);
  const Tensor v = MakeTensor(a.v_ptr, size, a.batch_stride_v, a.stride_v, a.nhead_stride_v);
  const Tensor o = MakeTensor(a.o_ptr, size, a.batch_stride_o, a.stride_o, a.nhead_stride_o);
  const Tensor d_o = MakeTensor(a.do_ptr, size, a.batch_stride_do, a.stride_do, a.nhead_stride_do);
  const Tensor dq = MakeTensor(a.dq_ptr, size, a.batch_stride_dq, a.stride_dq, a.nhead_stride_dq);
  const Tensor dk = MakeTensor(a.dk_ptr, size, a.batch_stride_dk, a.stride_dk, a.nhead_stride_dk);
  const Tensor dv = MakeTensor(a.dv_ptr, size, a.batch_stride_dv, a.stride_dv, a.nhead_stride_dv);
  const Tensor lse = MakeTensor(a.lse_ptr, sizeof(float), a.batch_stride_lsed, 1, a.nhead_stride_lsed);
  const Tensor delta = MakeTensor(a.d_ptr, sizeof(float), a.batch_stride_lsed, 1, a.nhead_stride_lsed);

  Tensor dq_sum = dq;
  if (const size_t bytes = mha_bwd_workspace_bytes(a)) {
    void* workspace = a.workspace_alloc ? a.workspace_alloc(bytes, /*zero_init=*/false) : nullptr;
    if (!workspace) return kUnsupported;
    const int64_t head_stride = int64_t{a.seqlen_q} * a.hdim_q;
    dq_sum = MakeTensor(workspace, sizeof(float), heads * head_stride, a.hdim_q, head_stride);
  }

  const Kernels& kernels = CurrentKernels();
  const Side queries = FindQueries(a), keys = FindKeys(a);
  auto make_head = [&](int64_t sequence, int64_t head) {
    const int64_t head_k = head / (heads / a.nhead_k);
    const Span &sq = queries.sequences[sequence], &sk = keys.sequences[sequence];
    Head h{};
    h.dtype = dtype;
    h.seqlen_q = sq.size, h.seqlen_k = sk.size, h.hdim_q = a.hdim_q, h.hdim_v = a.hdim_v;
    h.scale = a.scale;
    SetWindow(a, &h);
    h.q = q.At(sq, head), h.k = k.At(sk, head_k), h.v = v.At(sk, head_k), h.o = o.At(sq, head);
    h.lse = static_cast<float*>(lse.At(sq, head).data);
    h.d_o = d_o.At(sq, head), h.dq = dq.At(sq, head), h.dk = dk.At(sk, head), h.dv = dv.At(sk, head);
    h.dq_sum = dq_sum.At(sq, head);
    h.delta = static_cast<float*>(delta.At(sq, head).data);
    return h;
  };
  const size_t scratch_floats = kernels.backward_scratch(a.hdim_q, a.hdim_v);

  // One task per sequence and head computes its P once for all three gradients. Where that leaves threads idle,
  // P is computed twice: for dq in blocks of queries, then for dk and dv in blocks of keys.
  double total = 0, longest = 0;
  for (int64_t s = 0; s < int64_t(queries.sequences.size()); ++s) {
    const double cost = Cost(make_head(s, 0));
    total += cost * heads;
    longest = std::max(longest, cost);
  }
  const double threads = std::max<int64_t>(1, static_cast<Executor*>(stream.stream_id_)->num_threads());
  const bool divide = longest > 0 && std::ceil(total / longest / threads) * longest > 1.5 * total / threads;

  const int64_t gaps_q = queries.gaps.size(), gaps_k = keys.gaps.size();
  auto fill_gap = [&](int64_t i) {
    if (i < gaps_q) {
      dq.Fill(queries.gaps[i], heads, a.hdim_q, 0.0f);
      delta.Fill(queries.gaps[i], heads, 1, 0.0f);
    } else {
      dk.Fill(keys.gaps[i - gaps_q], heads, a.hdim_q, 0.0f);
      dv.Fill(keys.gaps[i - gaps_q], heads, a.hdim_v, 0.0f);
    }
  };

  if (!divide) {
    const int64_t computed = int64_t(queries.sequences.size()) * heads;
    RunTasks(stream, computed + gaps_q + gaps_k, scratch_floats, [&](int64_t i, float* scratch) {
      if (i >= computed) return fill_gap(i - computed);
      const Head h = make_head(i / heads, i % heads);
      kernels.backward(h, {0, h.seqlen_q}, {0, h.seqlen_k}, true, true, scratch);
    });
    return 0.0f;
  }
  const Division q_tasks(queries.sequences, heads, kernels.backward_block);
  RunTasks(stream, q_tasks.size() + gaps_q + gaps_k, scratch_floats, [&](int64_t i, float* scratch) {
    if (i >= q_tasks.size()) return fill_gap(i - q_tasks.size());
    const auto [sequence, head, rows] = q_tasks[i];
    const Head h = make_head(sequence, head);
    kernels.backward(h, rows, {0, h.seqlen_k}, true, false, scratch);
  });
  const Division k_tasks(keys.sequences, heads, kernels.backward_block);
  RunTasks(stream, k_tasks.size(), scratch_floats, [&](int64_t i, float* scratch) {
    const auto [sequence, head, rows] = k_tasks[i];
    const Head h = make_head(sequence, head);
    kernels.backward(h, {0, h.seqlen_q}, rows, false, true, scratch);
  });
  return 0.0f;
}

}  // namespace aiter_contract
