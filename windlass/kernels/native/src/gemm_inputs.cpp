// Arranges rows of x for a GEMM: see gemm_inputs.h.

#include "gemm_inputs.h"

#include "panels.h"
#include "prompt_panels.h"

namespace windlass {

GemmInputs::GemmInputs(const Weight& w, int rows, bool is_prompt, bool has_scales)
    : w_(w),
      rows_(rows),
      is_prompt_(is_prompt && has_prompt_gemm(w) && !has_scales),
      split_(kSplitsInputs && w.kind == kBf16),
      uses_amx_(kHasAmx && amx_allowed() && (split_ || is_prompt_)),
      max_outliers_(is_prompt_ ? max_prompt_outliers(w) : is_integer(w) ? max_outliers(w) : 0) {
  if (uses_amx_) {
    planes_ = split_ ? 2 : 1;
    panel_rows = kPanelRows / planes_;
    panels = ceil_div(rows, panel_rows);
    constexpr size_t l2_bytes = 1 << 20;
    panels_per_chunk_ = choose_panels_per_chunk(rows * planes_, amx_bytes(w) / kAmxPanels, l2_bytes, kMaxPanels);
    bytes = amx_bytes(w) * static_cast<size_t>(ceil_div(panels, kAmxPanels));
    return;
  }
  // int8 and int6 weights keep 15 bits of their inputs, unless quantise_once is set. For codes with a given
  // scale the format defines the quantisation, so there is no residual.
  const bool integer = is_integer(w), quantises = integer && !has_scales;
  planes_ = split_ || (quantises && has_int8_values(w) && !w.quantise_once) ? 2 : 1;
  panel_rows = kPanelRows / planes_;
  panels = ceil_div(rows, panel_rows);
  const size_t panel = is_prompt_ ? PromptSizes(w).all()
                       : integer  ? IntSizes(w, rows * planes_).all()
                       : split_   ? bf16_panel_bytes(w)
                                  : float_panel_bytes(w);
  panel_bytes_ = (panel + 63) / 64 * 64;
  outlier_bytes_ = quantises && planes_ == 1 ? outlier_bytes(max_outliers_) : 0;
  panels_per_chunk_ = choose_panels_per_chunk(rows * planes_, panel_bytes_);
  if (is_prompt_) {  // even, since panels are multiplied in pairs
    panels_per_chunk_ =
        round_up(choose_panels_per_chunk(rows, panel_bytes_, 512 << 10, kMaxPanels), 2);
  }
  chunks_ = ceil_div(panels, panels_per_chunk_);
  const bool gathers = is_prompt_ || (outlier_bytes_ > 0 && rows >= kMinUnpackRows);
  column_bytes_ =
      gathers ? windlass::column_bytes(w, max_outliers_, panels_per_chunk_ * kPanelRows) : 0;
  bytes = columns_at() + column_bytes_ * static_cast<size_t>(chunks_);
  bytes = (bytes + 63) / 64 * 64;
}

void GemmInputs::fill(int panel, const float* x, const float* scales, uint8_t* memory) const {
  const int count = num_rows(panel);
  if (uses_amx_) {
    const size_t group = static_cast<size_t>(panel / kAmxPanels) * amx_bytes(w_);
    return fill_amx_panel(w_, x, count, planes_, panel % kAmxPanels, memory + group);
  }
  uint8_t* to = memory + static_cast<size_t>(panel) * panel_bytes_;
  uint8_t* outliers = nullptr;
  if (outlier_bytes_ > 0) {
    const size_t skipped = static_cast<size_t>(first_row(panel)) * outlier_bytes_;
    outliers = memory + outliers_at() + skipped;
  }
  if (is_prompt_) {
    fill_prompt_panel(w_, x, count, to, outliers);
  } else if (is_integer(w_)) {
    fill_int_panel(w_, IntSizes(w_, rows_ * planes_), x, scales, count, planes_, to, outliers);
  } else if (split_) {
    fill_bf16_panel(w_, x, count, to);
  } else {
    fill_float_panel(w_, x, count, to);
  }
}

void GemmInputs::gather(int chunk, uint8_t* memory) const {
  const int rows_per_chunk = panels_per_chunk_ * kPanelRows, first = chunk * rows_per_chunk;
  const uint8_t* outliers = memory + outliers_at() + outlier_bytes_ * static_cast<size_t>(first);
  gather_columns(w_, outliers, max_outliers_, std::min(rows_per_chunk, rows_ - first),
                 rows_per_chunk, memory + columns_at() + column_bytes_ * static_cast<size_t>(chunk));
}

void GemmInputs::multiply(GemmArgs job, const uint8_t* memory) const {
  job.panels = memory;
  job.panel_bytes = panel_bytes_;
  job.panels_per_chunk = panels_per_chunk_;
  job.planes = planes_;
  job.rows = rows_ * planes_;
  job.gain = has_f16(w_) && !is_prompt_ ? w_.gain * kF16Gain : w_.gain;
  if (outlier_bytes_ > 0 && !is_prompt_) {
    job.outliers = memory + outliers_at();
    job.outlier_bytes = outlier_bytes_;
  }
  if (column_bytes_ > 0) {
    job.columns = memory + columns_at();
    job.column_bytes = column_bytes_;
  }
  if (uses_amx_) {
    job.amx_panels = memory;
    return bf16_gemm(job);
  }
  if (is_prompt_) return prompt_gemm(job);
  is_integer(w_) ? int_gemm(job) : split_ ? bf16_gemm(job) : float_gemm(job);
}

}  // namespace windlass
