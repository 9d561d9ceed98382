// What the handlers need of a device; device_host.cc implements it for CPUs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "aiter/contract.h"
#include "aiter/host/executor.h"
#include "xla/ffi/api/ffi.h"

namespace device {

// The FFI context that a handler binds, and the stream made of it for the length of one call.
using Context = xla::ffi::ThreadPool;

class Stream {
 public:
  explicit Stream(Context context);
  ~Stream();
  aiter_contract::stream_config config() const;

  void Zero(void* data, size_t bytes) const;

  // Sums the `group` query heads that share a key/value head: `expanded` [rows, heads, group, dim]
  // into `out` [rows, heads, dim], accumulating in float32.
  void SumOverGroup(xla::ffi::DataType dtype, const void* expanded, void* out, int64_t rows, int64_t heads,
                    int64_t group, int64_t dim) const;

 private:
  std::unique_ptr<aiter_host::Executor> executor_;
};

}  // namespace device
