#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>

#include "ffi/device.h"

namespace device {
namespace {

namespace ffi = xla::ffi;

// A fork-join loop on XLA's own thread pool. The handler already occupies one of the pool's threads, so
// the caller works too and never waits for a task that has not started: with every thread inside a
// handler, nobody would be left to start it.
class PoolExecutor final : public aiter_host::Executor {
 public:
  explicit PoolExecutor(Context pool) : pool_(pool) {}

  int64_t num_threads() const override { return std::max<int64_t>(1, pool_.num_threads()); }

  void ParallelFor(int64_t n, const std::function<void(int64_t)>& task) override {
    struct Loop {
      const std::function<void(int64_t)>* task;
      int64_t n;
      std::atomic<int64_t> next{0};
      std::atomic<int64_t> done{0};
      std::mutex mutex;
      std::condition_variable all_done;

      void Work() {
        for (int64_t i = next++; i < n; i = next++) {
          (*task)(i);
          if (++done == n) {
            std::lock_guard lock(mutex);
            all_done.notify_all();
          }
        }
      }
    };
    if (n <= 0) return;
    // Shared: a helper that starts late finds no work left, perhaps after the caller has returned.
    auto loop = std::make_shared<Loop>();
    loop->task = &task;
    loop->n = n;
    for (int64_t i = 1; i < std::min(n, num_threads()); ++i) pool_.Schedule([loop] { loop->Work(); });
    loop->Work();
    std::unique_lock lock(loop->mutex);
    loop->all_done.wait(lock, [&] { return loop->done == n; });
  }

 private:
  Context pool_;
};

struct Float32 {
  using Storage = float;
  static float Load(float x) { return x; }
  static float Store(float x) { return x; }
};

struct BFloat16 {
  using Storage = uint16_t;
  static float Load(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }
  static uint16_t Store(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (x != x) return static_cast<uint16_t>(bits >> 16) | 0x40;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

struct Float16 {
  using Storage = _Float16;
  static float Load(_Float16 x) { return static_cast<float>(x); }
  static _Float16 Store(float x) { return static_cast<_Float16>(x); }
};

template <typename Type>
void SumRow(const void* expanded, void* out, int64_t row, int64_t heads, int64_t group, int64_t dim) {
  using Storage = typename Type::Storage;
  const Storage* source = static_cast<const Storage*>(expanded) + row * heads * group * dim;
  Storage* target = static_cast<Storage*>(out) + row * heads * dim;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t d = 0; d < dim; ++d) {
      float sum = 0;
      for (int64_t g = 0; g < group; ++g) sum += Type::Load(source[(h * group + g) * dim + d]);
      target[h * dim + d] = Type::Store(sum);
    }
  }
}

constexpr int64_t kRowsPerTask = 64;

}  // namespace

Stream::Stream(Context context) : executor_(std::make_unique<PoolExecutor>(context)) {}
Stream::~Stream() = default;

aiter_contract::stream_config Stream::config() const {
  aiter_contract::stream_config config;
  config.stream_id_ = executor_.get();
  return config;
}

void Stream::Zero(void* data, size_t bytes) const { std::memset(data, 0, bytes); }

void Stream::SumOverGroup(ffi::DataType dtype, const void* expanded, void* out, int64_t rows, int64_t heads,
                          int64_t group, int64_t dim) const {
  auto sum_row = dtype == ffi::DataType::F32   ? SumRow<Float32>
                 : dtype == ffi::DataType::F16 ? SumRow<Float16>
                                               : SumRow<BFloat16>;
  executor_->ParallelFor((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) sum_row(expanded, out, row, heads, group, dim);
  });
}

}  // namespace device
