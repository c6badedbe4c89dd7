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

// A block of one row in which rounding lost too much: what it lost, rounded in turn. It is
// multiplied like a block of inputs of its own; its part of the minima is in IntPanel::sums.
struct Remainder {
  int32_t block;
  int32_t group;
  float scale;
  float centre;  // -8 times the sum of the codes
};

// Those of one row, in the order of the inputs.
struct Remainders {
  const Remainder* list;
  const int8_t* codes;  // [count][inputs of a block]
  int count;
};

size_t int_panel_bytes(const Weight& w);
IntPanel int_panel(const Weight& w, const uint8_t* memory);
size_t remainder_bytes(const Weight& w);  // of one row, if every block has one
Remainders row_remainders(const Weight& w, const uint8_t* memory);
// With two planes each row of x takes two of the panel's: its codes, and what they leave, rounded in
// turn. With one, blocks that lost too much have that in `remainders` (remainder_bytes for each row),
// if given. With scales x is whole numbers already.
void fill_int_panel(const Weight& w, const float* x, const float* x_scales, int rows, int planes,
                    uint8_t* memory, uint8_t* remainders);

// 4 rows as they are: [inputs][4 rows].
size_t float_panel_bytes(const Weight& w);
void fill_float_panel(const Weight& w, const float* x, int rows, uint8_t* memory);

}  // namespace windlass
