// Rows of x, rearranged for the kernels into panels of 4 rows.

#pragma once

#include "outliers.h"
#include "weight.h"

namespace windlass {

// 4 rows quantised to int8, with a scale per block.
struct IntPanel {
  const int8_t* codes;  // [inputs / kRun][rows][kRun]
  const float* scales;  // [blocks][4]
  // [blocks][4]: minus the sum of the codes times the offset of stored weight codes.
  const int32_t* correction;
  const float* sums;  // [groups][4]: the sum of the quantised inputs
  int rows;  // allocated rows of `codes`

  int next_run() const { return kRun * rows; }  // bytes between two runs of a row
};

// Bytes of a panel's arrays, for a GEMM of `all_rows` rows. A single row is stored without gaps,
// since every tile reads it again; i8mm reads rows in pairs.
struct IntSizes {
  int rows;
  size_t codes, blocks, groups;

  IntSizes(const Weight& w, int all_rows)
      : rows(all_rows == 1 && kRun == 16 ? 1 : kPanelRows),
        codes(static_cast<size_t>(padded_in(w)) * static_cast<size_t>(rows)),
        blocks(static_cast<size_t>(padded_in(w) / block_size(w)) * kPanelRows * 4),
        groups(static_cast<size_t>(num_groups(w)) * kPanelRows * 4) {}

  size_t all() const { return codes + 2 * blocks + groups; }

  IntPanel panel(const uint8_t* memory) const {
    const uint8_t* scales = memory + codes;
    const uint8_t* correction = scales + blocks;
    return {reinterpret_cast<const int8_t*>(memory), reinterpret_cast<const float*>(scales),
            reinterpret_cast<const int32_t*>(correction),
            reinterpret_cast<const float*>(correction + blocks), rows};
  }
};

// Returns inputs [first, first + count) of a row in the weight's column order, zero-padded: in
// place, or copied to `scratch`.
inline const float* inputs_of(const Weight& w, const float* row, int first, int count,
                              float* scratch) {
  if (w.perm == nullptr && first + count <= w.num_in) return row + first;
  for (int i = 0; i < count; ++i) {
    const int k = first + i;
    scratch[i] = k >= w.num_in ? 0.0f : row[w.perm == nullptr ? k : w.perm[k]];
  }
  return scratch;
}

int max_outliers(const Weight& w);  // per row: one per block

// With two planes each row of x takes two panel rows: its codes, and the quantised residual. With
// one plane, outliers go to `outliers` (outlier_bytes per row), if given; IntPanel::sums includes
// them, for the weight offsets. With x_scales, x holds int8 codes already.
void fill_int_panel(const Weight& w, const IntSizes& sizes, const float* x, const float* x_scales,
                    int rows, int planes, uint8_t* memory, uint8_t* outliers);

// 4 rows in float32: [inputs][4 rows].
size_t float_panel_bytes(const Weight& w);
void fill_float_panel(const Weight& w, const float* x, int rows, uint8_t* memory);

// 2 rows, each split into two rows of bfloat16 whose sum has a relative error of 2^-17: [inputs /
// kBf16Run][4][kBf16Run].
size_t bf16_panel_bytes(const Weight& w);
void fill_bf16_panel(const Weight& w, const float* x, int rows, uint8_t* memory);

// Rows of a panel rounded to bfloat16, or with two planes split into two rows each. `memory` holds 16 rows in the
// AMX layout (amx.h), of which this is panel `index`.
void fill_amx_panel(const Weight& w, const float* x, int rows, int planes, int index, uint8_t* memory);

}  // namespace windlass
