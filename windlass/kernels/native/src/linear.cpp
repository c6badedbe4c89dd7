// The linear command: rearranges or quantises x, with an optional RMSNorm, then runs the GEMM.

#include <new>
#include <system_error>

#include "api.h"
#include "linear_rows.h"
#include "panels.h"
#include "prompt.h"

namespace windlass {

namespace {

// The layout of x in panels.
struct Layout {
  bool integer;
  bool split;  // into rows of bfloat16
  int planes;  // panel rows per row of x
  int panel_rows;  // rows of x per panel
  size_t panel_bytes, outlier_bytes, column_bytes;
  bool uses_amx;  // AMX layout: see amx.h
  int panels;
  int panels_per_chunk, chunks;  // panels per chunk, and number of chunks

  Layout(const Weight& w, int rows, bool has_scales)
      : integer(is_integer(w)), split(kSplitsInputs && w.kind == kBf16) {
    // int8 weights keep 15 bits of their inputs, unless quantise_once is set. For codes with a
    // given scale the format defines the quantisation, so there is no residual.
    const bool quantises = integer && !has_scales;
    planes = split || (quantises && w.kind == kInt8 && !w.quantise_once) ? 2 : 1;
    panel_rows = kPanelRows / planes;
    panels = ceil_div(rows, panel_rows);
    const size_t bytes = integer ? IntSizes(w, rows * planes).all()
                         : split ? bf16_panel_bytes(w)
                                 : float_panel_bytes(w);
    panel_bytes = (bytes + 63) / 64 * 64;
    outlier_bytes = quantises && planes == 1 ? windlass::outlier_bytes(max_outliers(w)) : 0;
    panels_per_chunk = choose_panels_per_chunk(rows * planes, panel_bytes);
    chunks = ceil_div(panels, panels_per_chunk);
    const bool gathers_columns = outlier_bytes > 0 && rows >= kMinUnpackRows;
    const int rows_per_chunk = panels_per_chunk * kPanelRows;
    column_bytes =
        gathers_columns ? windlass::column_bytes(w, max_outliers(w), rows_per_chunk) : 0;
    // Float sums must be the same for any number of rows; integer sums always are.
    uses_amx = kHasAmx && amx_allowed() && (split || (integer && rows * planes >= kMinUnpackRows));
  }

  size_t all_panels() const { return panel_bytes * static_cast<size_t>(panels); }
  size_t all_outliers(int rows) const { return outlier_bytes * static_cast<size_t>(rows); }
  size_t all_columns() const { return (column_bytes * static_cast<size_t>(chunks) + 63) / 64 * 64; }
  size_t all_amx(const Weight& w) const {
    return uses_amx ? amx_bytes(w) * static_cast<size_t>(ceil_div(panels, kAmxPanels)) : 0;
  }
};

bool run_rows(const LinearRows& rows) {
  const Run& run = rows.run;
  const Weight& w = rows.w;
  const float* scales = run.size(2) & kQuantisedInputs ? run.step_tensor(4) + rows.first : nullptr;
  const Layout layout(w, rows.count, scales != nullptr);
  const size_t before_columns =
      layout.all_panels() + (layout.all_outliers(rows.count) + 63) / 64 * 64;
  const size_t before_amx = before_columns + layout.all_columns();
  uint8_t* memory = run.pool.buffer(before_amx + layout.all_amx(w));
  if (memory == nullptr) return false;
  uint8_t* outliers = layout.outlier_bytes > 0 ? memory + layout.all_panels() : nullptr;
  uint8_t* columns = layout.column_bytes > 0 ? memory + before_columns : nullptr;
  uint8_t* amx_panels = layout.uses_amx ? memory + before_amx : nullptr;
  run.pool.each(layout.panels, 1, [&](int begin, int end) {
    for (int p = begin; p < end; ++p) {
      const int first = p * layout.panel_rows;
      const int count = std::min(layout.panel_rows, rows.count - first);
      const float* from = rows.inputs(first, count);
      uint8_t* panel = memory + static_cast<size_t>(p) * layout.panel_bytes;
      if (layout.integer) {
        const size_t skipped = static_cast<size_t>(first) * layout.outlier_bytes;
        fill_int_panel(w, IntSizes(w, rows.count * layout.planes), from,
                       scales ? scales + first : nullptr, count, layout.planes, panel,
                       outliers ? outliers + skipped : nullptr);
      } else if (layout.split) {
        fill_bf16_panel(w, from, count, panel);
      } else {
        fill_float_panel(w, from, count, panel);
      }
      if (amx_panels != nullptr) {
        const size_t amx_panel = static_cast<size_t>(p / kAmxPanels) * amx_bytes(w);
        copy_to_amx(w, panel, p % kAmxPanels, amx_panels + amx_panel);
      }
    }
  });
  if (columns != nullptr) {
    const int rows_per_chunk = layout.panels_per_chunk * kPanelRows;
    run.pool.each(layout.chunks, 1, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        gather_columns(w, outliers + layout.all_outliers(i * rows_per_chunk), max_outliers(w),
                       std::min(rows_per_chunk, rows.count - i * rows_per_chunk), rows_per_chunk,
                       columns + layout.column_bytes * static_cast<size_t>(i));
      }
    });
  }
  GemmArgs job = rows.gemm(memory, layout.panel_bytes, layout.panels_per_chunk, layout.planes);
  job.outliers = outliers;
  job.outlier_bytes = layout.outlier_bytes;
  job.columns = columns;
  job.column_bytes = layout.column_bytes;
  job.amx_panels = amx_panels;
  layout.integer ? int_gemm(job) : layout.split ? bf16_gemm(job) : float_gemm(job);
  return true;
}

// AMX multiplies blocks faster than other instructions multiply prompt blocks.
bool has_prompt_gemm() { return !(kHasAmx && amx_allowed()); }

// Tells which rows of a command are quantised as prompt rows; rows must be queried in order.
class PromptTokens {
 public:
  explicit PromptTokens(const Run& run)
      : step_(run.step),
        of_all_(run.command.rows == kTokens || run.rows == run.step.num_tokens),
        left_(applies(run) ? run.step.num_prompts : 0),
        next_(run.step.prompts) {}

  bool has(int row) {
    if (left_ == 0) return false;
    const int token = of_all_ ? row : step_.sampled[row];
    for (; left_ > 0 && next_->last <= token; --left_) ++next_;
    return left_ > 0 && next_->first <= token;
  }

 private:
  static bool applies(const Run& run) {
    return (run.size(2) & kStepRows) && run.model_tensor<Weight>(0)->kind == kInt4 && has_prompt_gemm();
  }

  const WindlassStep& step_;
  bool of_all_;
  int left_;
  const WindlassPrompt* next_;
};

}  // namespace

// Splits rows into runs of prompt rows and others: mostly there is at most one of each.
bool run_linear(const Run& run) {
  const Weight& w = *run.model_tensor<Weight>(0);
  PromptTokens prompts(run);
  for (int row = 0, end; row < run.rows; row = end) {
    const bool is_prompt = prompts.has(row);
    for (end = row + 1; end < run.rows && prompts.has(end) == is_prompt;) ++end;
    const LinearRows rows{run, w, row, end - row};
    if (!(is_prompt ? run_prompt_gemm(rows) : run_rows(rows))) return false;
  }
  return true;
}

}  // namespace windlass

extern "C" {

const char* windlass_simd(void) {
  if (!windlass::kHasAmx || windlass::amx_allowed()) return windlass::kSimdName;
  return "AVX-512 VNNI and BF16 (the system does not allow AMX)";
}

int32_t windlass_has_prompt_gemm(void) { return windlass::has_prompt_gemm() ? 1 : 0; }

int32_t windlass_reads_nonfinite_f16(void) { return windlass::kF16Unit == 1.0f ? 1 : 0; }

WindlassPool* windlass_pool_new(int32_t threads, int32_t spin_us) {
  try {
    return new WindlassPool{{threads, spin_us}};
  } catch (const std::system_error&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void windlass_pool_free(WindlassPool* pool) { delete pool; }

}  // extern "C"
