// The host implementation of aiter/contract.h: what it offers beside mha_fwd and mha_bwd themselves.
#pragma once

#include <cstddef>

#include "aiter/contract.h"

namespace aiter_host {

// What mha_bwd will ask of `workspace_alloc`; depends on shapes and dtype only.
size_t mha_bwd_workspace_bytes(const aiter_contract::mha_bwd_args& args);

// The instruction set in use: "avx512", "avx2" or "baseline".
const char* mha_host_isa();
// For tests: use this one from now on, nullptr for the best again. False if this CPU lacks it.
bool mha_host_force_isa(const char* name);

}  // namespace aiter_host
