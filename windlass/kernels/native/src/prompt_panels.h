// Prompt rows, quantised to int8 with one scale per 192 inputs instead of 32.
//
// The loop over such a block consists of integer dot products only. Outliers are left out of it and
// multiplied in float32: see prompt.cpp.

#pragma once

#include "weight.h"

namespace windlass {

// Inputs that share a scale. Integer sums over so many inputs stay below 2^22, as simd_neon.h
// requires.
constexpr int kPromptBlock = 192;
static_assert(kPromptBlock * 127 * 127 < 1 << 22);

inline int num_prompt_blocks(const Weight& w) { return ceil_div(padded_in(w), kPromptBlock); }

// 4 rows.
struct PromptPanel {
  const int8_t* codes;  // [inputs / kRun][4 rows][kRun]
  const float* scales;  // [prompt blocks][4]
  // [prompt blocks][4]: minus the sum of the codes times the offset of stored weight codes.
  const int32_t* correction;
};

// Bytes of a panel's arrays. Loops read a few codes past the end.
struct PromptSizes {
  size_t codes, blocks;

  explicit PromptSizes(const Weight& w)
      : codes(static_cast<size_t>(padded_in(w)) * kPanelRows),
        blocks(static_cast<size_t>(num_prompt_blocks(w)) * kPanelRows * 4) {}

  size_t all() const { return (codes + 2 * blocks + kRun * kPanelRows + 63) / 64 * 64; }

  PromptPanel panel(const uint8_t* memory) const {
    return {reinterpret_cast<const int8_t*>(memory),
            reinterpret_cast<const float*>(memory + codes),
            reinterpret_cast<const int32_t*>(memory + codes + blocks)};
  }
};

int max_prompt_outliers(const Weight& w);  // per row

// Quantises up to 4 rows of x and writes the outliers of each: outlier_bytes per row.
void fill_prompt_panel(const Weight& w, const float* x, int rows, uint8_t* memory,
                       uint8_t* outliers);

}  // namespace windlass
