// Some rows of a linear command. linear.cpp and prompt.cpp both build their GEMM from them.

#pragma once

#include "gemm.h"

namespace windlass {

struct LinearRows {
  const Run& run;
  const Weight& w;
  int first, count;

  // Returns `rows` rows of x from `row` on, normalised if the command has kNormFirst.
  const float* inputs(int row, int rows) const;
  GemmArgs gemm(const uint8_t* panels, size_t panel_bytes, int panels_per_chunk,
                int planes = 1) const;
};

}  // namespace windlass
