// Rows of x, rearranged so that the kernels read them in order: panels of 4 rows.

#pragma once

#include "weight.h"

namespace windlass {

// 4 rows rounded to int8, a scale for each block.
struct IntPanel {
  const int8_t* codes;    // [inputs / 16][4 rows][16]
  const float* scales;    // [blocks][4]
  const int32_t* centre;  // [blocks][4]: -8 times the sum of the codes
  const float* sums;      // [groups][4]: the sum of the rounded inputs
};

size_t int_panel_bytes(const Weight& w);
IntPanel int_panel(const Weight& w, const uint8_t* memory);
// With scales x is whole numbers already.
void fill_int_panel(const Weight& w, const float* x, const float* x_scales, int rows,
                    uint8_t* memory);

// 4 rows as they are: [inputs][4 rows].
size_t float_panel_bytes(const Weight& w);
void fill_float_panel(const Weight& w, const float* x, int rows, uint8_t* memory);

}  // namespace windlass
