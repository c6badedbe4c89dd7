// Rows of prompts, rounded to int8 with one scale for a stretch of inputs instead of a block.
//
// The loop over a stretch is nothing but gemm of whole numbers. Inputs that stand out of their
// stretch are left out of it and multiplied as they are: see prompt.cpp.

#pragma once

#include "weight.h"

namespace windlass {

// Inputs that share a scale. Sums of so many gemm of codes stay below 2^22, as NEON wants them.
constexpr int kStretch = 192;
static_assert(kStretch * 127 * 127 < 1 << 22);

inline int num_stretches(const Weight& w) { return ceil_div(padded_in(w), kStretch); }

// 4 rows.
struct PromptPanel {
  const int8_t* codes;    // [inputs / kRun][4 rows][kRun]
  const float* scales;    // [stretches][4]
  const int32_t* centre;  // [stretches][4]: the sum of the codes times what stored codes have too much
};

// Bytes of a panel's arrays. Loops read ahead by some codes.
struct PromptSizes {
  size_t codes, stretches;

  explicit PromptSizes(const Weight& w)
      : codes(static_cast<size_t>(padded_in(w)) * kPanel),
        stretches(static_cast<size_t>(num_stretches(w)) * kPanel * 4) {}

  size_t all() const { return (codes + 2 * stretches + kRun * kPanel + 63) / 64 * 64; }

  PromptPanel panel(const uint8_t* memory) const {
    return {reinterpret_cast<const int8_t*>(memory),
            reinterpret_cast<const float*>(memory + codes),
            reinterpret_cast<const int32_t*>(memory + codes + stretches)};
  }
};

int most_prompt_outliers(const Weight& w);  // of a row

// Rounds up to 4 rows of x, and notes what is left out of each: outlier_bytes for a row.
void fill_prompt_panel(const Weight& w, const float* x, int rows, uint8_t* memory,
                       uint8_t* outliers);

}  // namespace windlass
