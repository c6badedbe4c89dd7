// Rows of x, rearranged so that the kernels read them in order: panels of 4 rows.

#pragma once

#include "outliers.h"
#include "weight.h"

namespace windlass {

// 4 rows rounded to int8, a scale for each block.
struct IntPanel {
  const int8_t* codes;    // [inputs / kRun][rows][kRun]
  const float* scales;    // [blocks][4]
  const int32_t* centre;  // [blocks][4]: the sum of the codes times what stored codes have too much
  const float* sums;      // [groups][4]: the sum of the rounded inputs
  int rows;               // that there is room for among the codes

  int next_run() const { return kRun * rows; }  // bytes from one of a row to the next
};

// Bytes of a panel's arrays, found once for a gemm of `all_rows` rows. One row alone lies without
// gaps, since it is read again with every tile; but i8mm reads rows in pairs.
struct IntSizes {
  int rows;
  size_t codes, blocks, groups;

  IntSizes(const Weight& w, int all_rows)
      : rows(all_rows == 1 && kRun == 16 ? 1 : kPanel),
        codes(static_cast<size_t>(padded_in(w)) * static_cast<size_t>(rows)),
        blocks(static_cast<size_t>(padded_in(w) / block_size(w)) * kPanel * 4),
        groups(static_cast<size_t>(num_groups(w)) * kPanel * 4) {}

  size_t all() const { return codes + 2 * blocks + groups; }

  IntPanel panel(const uint8_t* memory) const {
    const uint8_t* scales = memory + codes;
    const uint8_t* centre = scales + blocks;
    return {reinterpret_cast<const int8_t*>(memory), reinterpret_cast<const float*>(scales),
            reinterpret_cast<const int32_t*>(centre),
            reinterpret_cast<const float*>(centre + blocks), rows};
  }
};

// Inputs [first, first + count) of a row, in the weight's order, with zeros past the end: where they
// are, or in `spare`.
inline const float* inputs_of(const Weight& w, const float* row, int first, int count,
                              float* spare) {
  if (w.order == nullptr && first + count <= w.num_in) return row + first;
  for (int i = 0; i < count; ++i) {
    const int k = first + i;
    spare[i] = k >= w.num_in ? 0.0f : row[w.order == nullptr ? k : w.order[k]];
  }
  return spare;
}

int most_outliers(const Weight& w);  // of a row: one in every block

// With two planes each row of x takes two of the panel's: its codes, and what they leave, rounded
// in turn. With one, inputs that outweigh their block go to `outliers` (outlier_bytes for each
// row), if given; their part of the minima is in IntPanel::sums. With scales x is whole numbers
// already.
void fill_int_panel(const Weight& w, const IntSizes& sizes, const float* x, const float* x_scales,
                    int rows, int planes, uint8_t* memory, uint8_t* outliers);

// 4 rows as they are: [inputs][4 rows].
size_t float_panel_bytes(const Weight& w);
void fill_float_panel(const Weight& w, const float* x, int rows, uint8_t* memory);

// 2 rows, each as two of bfloat16 whose sum it is but for 2^-17: [inputs / kBf16Run][4][kBf16Run].
size_t bf16_panel_bytes(const Weight& w);
void fill_bf16_panel(const Weight& w, const float* x, int rows, uint8_t* memory);

}  // namespace windlass
