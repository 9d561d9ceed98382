#pragma once

#include <cstddef>

namespace attention {

struct Problem;

// The size of the backward handler's scratch result, known from the shapes alone.
size_t BackwardScratchBytes(const Problem& problem);

}  // namespace attention
