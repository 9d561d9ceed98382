// Helpers of every handler, and the handlers themselves.
#pragma once

#include <exception>
#include <string>

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(AttentionForward);
XLA_FFI_DECLARE_HANDLER_SYMBOL(AttentionBackward);

// Row `row` of a buffer that is computed in `rows` calls.
inline void* Row(xla::ffi::AnyBuffer buffer, int64_t row, int64_t rows) {
  return static_cast<char*>(buffer.untyped_data()) + row * (static_cast<int64_t>(buffer.size_bytes()) / rows);
}

// Runs one of AITER's entry points; what it reports or throws becomes an error, never an abort.
template <typename F>
xla::ffi::Error Call(const char* name, F&& entry_point) {
  try {
    if (entry_point() >= 0) return xla::ffi::Error::Success();
  } catch (const std::exception& e) {
    return xla::ffi::Error::Internal(std::string("attention: AITER's ") + name + " failed: " + e.what());
  }
  return xla::ffi::Error(xla::ffi::ErrorCode::kUnimplemented, std::string("attention: AITER's ") + name +
                                                                  " has no kernel for this shape, dtype and mask");
}
