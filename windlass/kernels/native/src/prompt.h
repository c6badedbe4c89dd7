// The GEMM of prompt rows with int4 weights.

#pragma once

#include "linear_rows.h"

namespace windlass {

// Returns false if memory could not be allocated.
bool run_prompt_gemm(const LinearRows& linear);

}  // namespace windlass
