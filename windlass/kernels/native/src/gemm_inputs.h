// Rows of x arranged for one GEMM: in panels, with their outliers.

#pragma once

#include "gemm.h"

namespace windlass {

// Whether int4 weights multiply prompt rows with a GEMM of their own. AMX multiplies blocks faster
// than other instructions multiply prompt blocks. Without VNNI the signs of requantised codes cost
// more instructions than the scales of blocks.
#if defined(WINDLASS_WORD_SUMS)
constexpr bool has_prompt_gemm() { return false; }
#else
inline bool has_prompt_gemm() { return !(kHasAmx && amx_allowed()); }
#endif

// The sizes of the memory, which the caller allocates: `bytes` of it, aligned to 64 bytes.
class GemmInputs {
 public:
  // Only int4 weights distinguish prompt rows. With `has_scales` x holds int8 codes already.
  GemmInputs(const Weight& w, int rows, bool is_prompt, bool has_scales);

  int panels;
  int panel_rows;  // rows of x per panel
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
  size_t amx_at() const {
    return columns_at() + (column_bytes_ * static_cast<size_t>(chunks_) + 63) / 64 * 64;
  }

  const Weight& w_;
  int rows_;
  bool is_prompt_;
  bool split_;  // into rows of bfloat16
  bool uses_amx_;  // AMX layout: see amx.h
  int planes_;  // panel rows per row of x
  int max_outliers_;
  size_t panel_bytes_, outlier_bytes_, column_bytes_;
  int panels_per_chunk_, chunks_;
};

}  // namespace windlass
