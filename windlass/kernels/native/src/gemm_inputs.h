// Rows of x arranged for one GEMM: in panels, with their outliers.

#pragma once

#include "gemm.h"

namespace windlass {

// Whether a weight multiplies prompt rows with a GEMM of their own: with AMX in bfloat16 (bf16_gemm.cpp), else
// quantised in blocks of 192 inputs, and only int4 weights (prompt.cpp). Without VNNI the signs of requantised
// codes cost more instructions than the scales of blocks. An LM head multiplies few rows of a prompt.
inline bool has_prompt_gemm(const Weight& w) {
  if (kHasAmx && amx_allowed()) return has_nibbles(w) || (has_int8_values(w) && !w.quantise_once);
#if defined(WINDLASS_WORD_SUMS)
  return false;
#else
  return w.kind == kInt4;
#endif
}

// The sizes of the memory, which the caller allocates: `bytes` of it, aligned to 64 bytes.
class GemmInputs {
 public:
  // Only weights with a prompt GEMM distinguish prompt rows. With `has_scales` x holds int8 codes already.
  GemmInputs(const Weight& w, int rows, bool is_prompt, bool has_scales);

  int panels = 0;
  int panel_rows = kPanelRows;  // rows of x per panel
  size_t bytes;

  int first_row(int panel) const { return panel * panel_rows; }
  int num_rows(int panel) const { return std::min(panel_rows, rows_ - first_row(panel)); }
  // The number of chunks of panels whose outliers must be gathered.
  int num_gathered() const { return column_bytes_ > 0 ? chunks_ : 0; }

  // Arranges the rows of one panel. `scales`, if given, has one scale per row.
  void fill(int panel, const float* x, const float* scales, uint8_t* memory) const;
  // Gathers the outliers of one chunk, after its panels are filled.
  void gather(int chunk, uint8_t* memory) const;
  // Runs the GEMM. `job` has the weight, or some of its tiles, and the outputs.
  void multiply(GemmArgs job, const uint8_t* memory) const;

 private:
  // Offsets in the memory, after the panels.
  size_t outliers_at() const { return panel_bytes_ * static_cast<size_t>(panels); }
  size_t columns_at() const {
    return outliers_at() + (outlier_bytes_ * static_cast<size_t>(rows_) + 63) / 64 * 64;
  }

  const Weight& w_;
  int rows_;
  bool is_prompt_;
  bool split_;  // into rows of bfloat16
  bool uses_amx_;  // AMX layout: see amx.h
  int planes_ = 1;  // panel rows per row of x
  int max_outliers_;
  size_t panel_bytes_ = 0, outlier_bytes_ = 0, column_bytes_ = 0;
  int panels_per_chunk_ = 1, chunks_ = 1;
};

}  // namespace windlass
