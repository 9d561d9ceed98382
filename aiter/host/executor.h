// What the host implementation runs on: a fork-join loop, given by the caller as the "stream".
#pragma once

#include <cstdint>
#include <functional>

namespace aiter_host {

class Executor {
 public:
  virtual ~Executor() = default;
  virtual int64_t num_threads() const = 0;
  // Calls task(0) … task(n - 1), each once, from any thread, and returns when all are done.
  virtual void ParallelFor(int64_t n, const std::function<void(int64_t)>& task) = 0;
};

}  // namespace aiter_host
