// Some rows of a linear command: where their inputs are, and the gemm that they make.

#pragma once

#include "gemm.h"

namespace windlass {

struct LinearRows {
  const Run& run;
  const Weight& w;
  int first, count;

  // `rows` rows from the `row`-th of these on; normalised, where that is asked for.
  const float* inputs(int row, int rows) const;
  Product gemm(const uint8_t* panels, size_t panel_bytes, int cut, int planes = 1) const;
};

// For int4 weights; returns whether there was memory enough.
bool run_prompt_rows(const LinearRows& rows);

}  // namespace windlass
