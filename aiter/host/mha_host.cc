// AITER's attention entry points on a CPU: checks a request, finds its sequences, and divides the work.
#include "aiter/host/mha_host.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
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

constexpr float kSuccess = 0.0f, kUnsupported = -1.0f;

// The kernels this CPU can run, best first.
const std::vector<const Kernels*>& AvailableKernels() {
  static const std::vector<const Kernels*> available = [] {
    std::vector<const Kernels*> list;
#ifdef AITER_HOST_X86
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
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

// A run of rows in a tensor: those of one sequence, or of none.
struct Span {
  int64_t batch, begin, size;  // group mode has one batch, 0
};

// The rows of queries or of keys: one span per sequence, and what lies between them.
struct Side {
  std::vector<Span> sequences, gaps;
};

Side FindSequences(bool is_group_mode, int64_t batch, int64_t seqlen, const void* seqstart_ptr,
                   const void* cu_seqlen_ptr, const void* seqlen_ptr) {
  const auto* seqstart = static_cast<const int32_t*>(seqstart_ptr);
  const auto* cu_logical = static_cast<const int32_t*>(cu_seqlen_ptr);
  const auto* logical = static_cast<const int32_t*>(seqlen_ptr);
  Side side;
  auto add_gap = [&](int64_t b, int64_t begin, int64_t end) {
    constexpr int64_t kRowsPerTask = 256;
    for (; begin < end; begin += kRowsPerTask)
      side.gaps.push_back({b, begin, std::min(kRowsPerTask, end - begin)});
  };
  int64_t covered = 0;  // rows of a group accounted for
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t begin = is_group_mode ? seqstart[b] : 0;
    const int64_t end = is_group_mode ? seqstart[b + 1] : seqlen;
    int64_t size = end - begin;
    if (cu_logical)
      size = std::min<int64_t>(size, cu_logical[b + 1] - cu_logical[b]);
    else if (logical)
      size = std::min<int64_t>(size, logical[b]);
    size = std::max<int64_t>(size, 0);
    const int64_t index = is_group_mode ? 0 : b;
    side.sequences.push_back({index, begin, size});
    if (is_group_mode) {
      add_gap(0, covered, begin);
      covered = begin + size;
    } else {
      add_gap(b, size, seqlen);
    }
  }
  if (is_group_mode) add_gap(0, covered, seqlen);
  return side;
}

// A tensor [batch, row, head, hdim] of `size`-byte elements, with any strides but the last.
struct Tensor {
  void* data;
  int64_t size, batch_stride, row_stride, head_stride;

  Tensor(const void* data, int64_t size, int64_t batch_stride, int64_t row_stride, int64_t head_stride)
      : data(const_cast<void*>(data)),
        size(size),
        batch_stride(batch_stride),
        row_stride(row_stride),
        head_stride(head_stride) {}

  Rows At(const Span& span, int64_t head) const {
    const int64_t offset = span.batch * batch_stride + span.begin * row_stride + head * head_stride;
    return {static_cast<char*>(data) + offset * size, row_stride};
  }
  float* FloatsAt(const Span& span, int64_t head) const { return static_cast<float*>(At(span, head).data); }

  void Zero(const Span& span, int64_t heads, int64_t hdim) const {
    for (int64_t head = 0; head < heads; ++head) {
      const Rows rows = At(span, head);
      for (int64_t i = 0; i < span.size; ++i)
        std::memset(static_cast<char*>(rows.data) + i * row_stride * size, 0, hdim * size);
    }
  }
};

// What forward and backward have in common.
template <typename Args>
struct Problem {
  const Args& args;
  DType dtype = DType::kF32;
  bool known_dtype = ParseDType(args.data_type, &dtype);
  int64_t size = dtype == DType::kF32 ? 4 : 2;
  int64_t heads = args.nhead_q;
  Tensor q{args.q_ptr, size, args.batch_stride_q, args.stride_q, args.nhead_stride_q};
  Tensor k{args.k_ptr, size, args.batch_stride_k, args.stride_k, args.nhead_stride_k};
  Tensor v{args.v_ptr, size, args.batch_stride_v, args.stride_v, args.nhead_stride_v};
  Tensor o{args.o_ptr, size, args.batch_stride_o, args.stride_o, args.nhead_stride_o};
  Side queries, keys;

  explicit Problem(const Args& a) : args(a) {}

  bool Supported(const stream_config& stream) const {
    return known_dtype && stream.stream_id_ && !args.v3_api_check &&
           args.bias_type == aiter_contract::kBiasNone && !(args.p_drop > 0) && !args.sink_ptr &&
           args.mask_type >= aiter_contract::kMaskNone &&
           args.mask_type <= aiter_contract::kMaskWindowGeneric && args.hdim_q > 0 && args.hdim_v > 0 &&
           args.nhead_k > 0 && args.nhead_q % args.nhead_k == 0 &&
           (!args.is_group_mode || (args.seqstart_q_ptr && args.seqstart_k_ptr));
  }

  void FindRows() {
    queries = FindSequences(args.is_group_mode, args.batch, args.seqlen_q, args.seqstart_q_ptr,
                            args.cu_seqlen_q_ptr, args.seqlen_q_ptr);
    keys = FindSequences(args.is_group_mode, args.batch, args.seqlen_k, args.seqstart_k_ptr,
                         args.cu_seqlen_k_ptr, args.seqlen_k_ptr);
  }

  Head MakeHead(int64_t sequence, int64_t head, float scale) const {
    const Span &sq = queries.sequences[sequence], &sk = keys.sequences[sequence];
    const int64_t head_k = head / (heads / args.nhead_k);
    Head h{};
    h.dtype = dtype;
    h.seqlen_q = sq.size, h.seqlen_k = sk.size;
    h.hdim_q = args.hdim_q, h.hdim_v = args.hdim_v;
    h.scale = scale;
    h.q = q.At(sq, head), h.k = k.At(sk, head_k), h.v = v.At(sk, head_k), h.o = o.At(sq, head);

    constexpr int64_t kUnbounded = int64_t{1} << 40;
    const int64_t left = args.window_size_left, right = args.window_size_right;
    if (args.mask_type == aiter_contract::kMaskNone) {
      h.left = h.right = kUnbounded;
    } else if (args.mask_type == aiter_contract::kMaskWindowGeneric) {  // keys (i - left, i + right)
      h.left = left - 1, h.right = right - 1;
    } else {
      const int64_t diagonal = args.mask_type == aiter_contract::kMaskBottomRight ? sk.size - sq.size : 0;
      h.left = left < 0 ? kUnbounded : left - diagonal;
      h.right = right < 0 ? kUnbounded : right + diagonal;
    }
    return h;
  }
};

// How many scores a head has, roughly.
double Cost(const Head& h) {
  return double(h.seqlen_q) *
         std::min(double(h.seqlen_k), std::max(0.0, double(h.left) + double(h.right) + 1));
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
  Problem<mha_fwd_args> problem(a);
  if (!problem.Supported(stream) || a.qscale_type != 0 || a.has_sink || a.sink_size > 0 ||
      a.logits_soft_cap > 0 || a.s_randval || (a.has_lse && !a.lse_ptr && a.seqlen_q > 0))
    return kUnsupported;

  const Kernels& kernels = CurrentKernels();
  problem.FindRows();
  const Side& queries = problem.queries;
  const Tensor lse(a.lse_ptr, sizeof(float), a.batch_stride_lse, 1, a.nhead_stride_lse);
  const Division pieces(queries.sequences, a.nhead_q, kernels.forward_block);

  RunTasks(stream, pieces.size() + queries.gaps.size(), kernels.forward_scratch(a.hdim_q, a.hdim_v),
           [&](int64_t task, float* scratch) {
             if (task < pieces.size()) {
               const auto [sequence, head, rows] = pieces[task];
               Head h = problem.MakeHead(sequence, head, a.scale_s);
               if (a.has_lse) h.lse = lse.FloatsAt(queries.sequences[sequence], head);
               kernels.forward(h, rows.begin, scratch);
             } else {
               const Span& gap = queries.gaps[task - pieces.size()];
               problem.o.Zero(gap, a.nhead_q, a.hdim_v);
               for (int64_t head = 0; a.has_lse && head < a.nhead_q; ++head)
                 std::fill_n(lse.FloatsAt(gap, head), gap.size, -INFINITY);
             }
           });
  return kSuccess;
}

float mha_bwd(const mha_bwd_args& a, const stream_config& stream) {
  Problem<mha_bwd_args> problem(a);
  if (!problem.Supported(stream) || a.has_dbias || a.has_dropout || a.is_store_randval || a.d_sink_ptr ||
      (!(a.lse_ptr && a.d_ptr) && a.seqlen_q > 0))
    return kUnsupported;

  const int64_t size = problem.size, heads = a.nhead_q;
  const Tensor d_o(a.do_ptr, size, a.batch_stride_do, a.stride_do, a.nhead_stride_do);
  const Tensor dq(a.dq_ptr, size, a.batch_stride_dq, a.stride_dq, a.nhead_stride_dq);
  const Tensor dk(a.dk_ptr, size, a.batch_stride_dk, a.stride_dk, a.nhead_stride_dk);
  const Tensor dv(a.dv_ptr, size, a.batch_stride_dv, a.stride_dv, a.nhead_stride_dv);
  const Tensor lse(a.lse_ptr, sizeof(float), a.batch_stride_lsed, 1, a.nhead_stride_lsed);
  const Tensor delta(a.d_ptr, sizeof(float), a.batch_stride_lsed, 1, a.nhead_stride_lsed);
  Tensor dq_sum = dq;
  if (const size_t bytes = mha_bwd_workspace_bytes(a)) {
    void* workspace = a.workspace_alloc ? a.workspace_alloc(bytes, /*zero_init=*/false) : nullptr;
    if (!workspace) return kUnsupported;
    const int64_t head_stride = int64_t{a.seqlen_q} * a.hdim_q;
    dq_sum = Tensor(workspace, sizeof(float), heads * head_stride, a.hdim_q, head_stride);
  }

  const Kernels& kernels = CurrentKernels();
  problem.FindRows();
  const Side &queries = problem.queries, &keys = problem.keys;
  auto make_head = [&](int64_t sequence, int64_t head) {
    const Span &sq = queries.sequences[sequence], &sk = keys.sequences[sequence];
    Head h = problem.MakeHead(sequence, head, a.scale);
    h.lse = lse.FloatsAt(sq, head), h.delta = delta.FloatsAt(sq, head);
    h.d_o = d_o.At(sq, head), h.dq = dq.At(sq, head), h.dq_sum = dq_sum.At(sq, head);
    h.dk = dk.At(sk, head), h.dv = dv.At(sk, head);
    return h;
  };
  const size_t scratch_floats = kernels.backward_scratch(a.hdim_q, a.hdim_v);

  const int64_t gaps = queries.gaps.size() + keys.gaps.size();
  auto zero_gap = [&](size_t i) {
    if (i < queries.gaps.size()) {
      const Span& gap = queries.gaps[i];
      dq.Zero(gap, heads, a.hdim_q);
      for (int64_t head = 0; head < heads; ++head) std::fill_n(delta.FloatsAt(gap, head), gap.size, 0.0f);
    } else {
      const Span& gap = keys.gaps[i - queries.gaps.size()];
      dk.Zero(gap, heads, a.hdim_q);
      dv.Zero(gap, heads, a.hdim_v);
    }
  };

  // One task per sequence and head, the longest first, computes P once for all three gradients. Where that
  // would leave threads idle, P is computed twice: for dq in blocks of queries, then for dk and dv in blocks
  // of keys.
  std::vector<std::pair<double, int64_t>> order;  // cost of a sequence, and its index
  double total = 0;
  for (size_t s = 0; s < queries.sequences.size(); ++s) {
    order.push_back({Cost(make_head(s, 0)), s});
    total += order.back().first * heads;
  }
  std::sort(order.rbegin(), order.rend());
  const double longest = order.empty() ? 0 : order[0].first;
  const double threads = std::max<int64_t>(1, static_cast<Executor*>(stream.stream_id_)->num_threads());

  if (longest == 0 || std::ceil(total / longest / threads) * longest <= 1.5 * total / threads) {
    const int64_t wholes = order.size() * heads;
    RunTasks(stream, wholes + gaps, scratch_floats, [&](int64_t task, float* scratch) {
      if (task >= wholes) return zero_gap(task - wholes);
      const Head h = make_head(order[task / heads].second, task % heads);
      kernels.backward(h, {0, h.seqlen_q}, {0, h.seqlen_k}, /*want_dq=*/true, /*want_dkv=*/true, scratch);
    });
  } else {
    const Division q_pieces(queries.sequences, heads, kernels.backward_block);
    RunTasks(stream, q_pieces.size() + gaps, scratch_floats, [&](int64_t task, float* scratch) {
      if (task >= q_pieces.size()) return zero_gap(task - q_pieces.size());
      const auto [sequence, head, rows] = q_pieces[task];
      const Head h = make_head(sequence, head);
      kernels.backward(h, rows, {0, h.seqlen_k}, /*want_dq=*/true, /*want_dkv=*/false, scratch);
    });
    const Division k_pieces(keys.sequences, heads, kernels.backward_block);
    RunTasks(stream, k_pieces.size(), scratch_floats, [&](int64_t task, float* scratch) {
      const auto [sequence, head, rows] = k_pieces[task];
      const Head h = make_head(sequence, head);
      kernels.backward(h, {0, h.seqlen_q}, rows, /*want_dq=*/false, /*want_dkv=*/true, scratch);
    });
  }
  return kSuccess;
}

}  // namespace aiter_contract
