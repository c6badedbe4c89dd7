// The gemm: rearranges x, which may be normalised on the way, then multiplies.

#include <new>
#include <system_error>

#include "api.h"
#include "linear.h"
#include "panels.h"

namespace windlass {

namespace {

// How x lies in panels.
struct Layout {
  bool integer;
  bool split;      // into rows of bfloat16
  int planes;      // rows of a panel that one of x takes
  int panel_rows;  // of x
  size_t panel_bytes, outlier_bytes, column_bytes;
  bool squares;  // for AMX: see amx.h
  int panels;
  int cut, pieces;  // panels of a piece, and how many there are

  Layout(const Weight& w, int rows, bool given)
      : integer(is_integer(w)), split(kSplitsInputs && w.kind == kBf16) {
    // int8 weights are there to lose nothing: inputs keep 15 bits, unless they were asked not to.
    // Whole numbers with a given scale are what the format means, and nothing is to be mended.
    const bool rounds = integer && !given;
    planes = split || (rounds && w.kind == kInt8 && !w.round_once) ? 2 : 1;
    panel_rows = kPanel / planes;
    panels = ceil_div(rows, panel_rows);
    const size_t bytes = integer ? IntSizes(w, rows * planes).all()
                         : split ? bf16_panel_bytes(w)
                                 : float_panel_bytes(w);
    panel_bytes = (bytes + 63) / 64 * 64;
    outlier_bytes = rounds && planes == 1 ? windlass::outlier_bytes(most_outliers(w)) : 0;
    cut = panel_cut(rows * planes, panel_bytes);
    pieces = ceil_div(panels, cut);
    const bool by_column = outlier_bytes > 0 && rows >= kManyRows;
    column_bytes = by_column ? windlass::column_bytes(w, most_outliers(w), cut * kPanel) : 0;
    // Sums of floats must be the same for any number of rows; those of whole numbers are anyway.
    squares = kHasAmx && amx_allowed() && (split || (integer && rows * planes >= kManyRows));
  }

  size_t all_panels() const { return panel_bytes * static_cast<size_t>(panels); }
  size_t all_outliers(int rows) const { return outlier_bytes * static_cast<size_t>(rows); }
  size_t all_columns() const { return (column_bytes * static_cast<size_t>(pieces) + 63) / 64 * 64; }
  size_t all_squares(const Weight& w) const {
    return squares ? square_bytes(w) * static_cast<size_t>(ceil_div(panels, kSquarePanels)) : 0;
  }
};

}  // namespace

const float* LinearRows::inputs(int row, int rows) const {
  const float* x = row_of(run.moving(0), first + row, w.num_in);
  if (!(run.size(2) & kNormFirst)) return x;
  float* normed = row_of(run.moving(2), first + row, w.num_in);
  for (int m = 0; m < rows; ++m) {
    normalise(row_of(x, m, w.num_in), run.fixed<float>(2), w.num_in, run.command.numbers[0],
              row_of(normed, m, w.num_in));
  }
  return normed;
}

Product LinearRows::gemm(const uint8_t* panels, size_t panel_bytes, int cut, int planes) const {
  const int flags = run.size(2);
  Product job{run.pool, w, panels, panel_bytes};
  job.cut = cut;
  job.planes = planes;
  job.rows = count * planes;
  job.gain = has_halves(w) ? w.gain * kHalfGain : w.gain;
  job.stride = run.size(0);
  job.y = row_of(run.moving(1), first, job.stride) + run.size(1);
  job.add = (flags & kAddToY) != 0;
  job.bias = run.fixed<float>(1);
  if (flags & kGated) job.active = row_of(run.moving(3), first, w.num_out / 2);
  return job;
}

namespace {

bool run_rows(const LinearRows& rows) {
  const Run& run = rows.run;
  const Weight& w = rows.w;
  const float* scales = run.size(2) & kGivenScales ? run.moving(4) + rows.first : nullptr;
  const Layout to(w, rows.count, scales != nullptr);
  const size_t before_columns = to.all_panels() + (to.all_outliers(rows.count) + 63) / 64 * 64;
  const size_t before_squares = before_columns + to.all_columns();
  uint8_t* memory = run.pool.buffer(before_squares + to.all_squares(w));
  if (memory == nullptr) return false;
  uint8_t* outliers = to.outlier_bytes > 0 ? memory + to.all_panels() : nullptr;
  uint8_t* columns = to.column_bytes > 0 ? memory + before_columns : nullptr;
  uint8_t* squares = to.squares ? memory + before_squares : nullptr;
  run.pool.each(to.panels, 1, [&](int begin, int end) {
    for (int p = begin; p < end; ++p) {
      const int first = p * to.panel_rows;
      const int count = std::min(to.panel_rows, rows.count - first);
      const float* from = rows.inputs(first, count);
      uint8_t* panel = memory + static_cast<size_t>(p) * to.panel_bytes;
      if (to.integer) {
        const size_t skipped = static_cast<size_t>(first) * to.outlier_bytes;
        fill_int_panel(w, IntSizes(w, rows.count * to.planes), from,
                       scales ? scales + first : nullptr, count, to.planes, panel,
                       outliers ? outliers + skipped : nullptr);
      } else if (to.split) {
        fill_bf16_panel(w, from, count, panel);
      } else {
        fill_float_panel(w, from, count, panel);
      }
      if (squares != nullptr) {
        const size_t square = static_cast<size_t>(p / kSquarePanels) * square_bytes(w);
        copy_to_square(w, panel, p % kSquarePanels, squares + square);
      }
    }
  });
  if (columns != nullptr) {
    const int most = to.cut * kPanel;
    run.pool.each(to.pieces, 1, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        gather_columns(w, outliers + to.all_outliers(i * most), most_outliers(w),
                       std::min(most, rows.count - i * most), most,
                       columns + to.column_bytes * static_cast<size_t>(i));
      }
    });
  }
  Product job = rows.gemm(memory, to.panel_bytes, to.cut, to.planes);
  job.outliers = outliers;
  job.outlier_bytes = to.outlier_bytes;
  job.columns = columns;
  job.column_bytes = to.column_bytes;
  job.squares = squares;
  to.integer ? int_product(job) : to.split ? bf16_gemm_rows(job) : float_product(job);
  return true;
}

// AMX multiplies blocks faster than anything else multiplies stretches.
bool prompts_apart() { return !(kHasAmx && amx_allowed()); }

// Which rows of a command are rounded as those of prompts; asked in their order.
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
    return (run.size(2) & kOfNetwork) && run.fixed<Weight>(0)->kind == kInt4 && prompts_apart();
  }

  const WindlassStep& step_;
  bool of_all_;
  int left_;
  const WindlassPrompt* next_;
};

}  // namespace

// Rows of prompts and others, run by run: there seldom are more than one of each.
bool run_linear(const Run& run) {
  const Weight& w = *run.fixed<Weight>(0);
  PromptTokens prompts(run);
  for (int row = 0, end; row < run.rows; row = end) {
    const bool is_prompt = prompts.has(row);
    for (end = row + 1; end < run.rows && prompts.has(end) == is_prompt;) ++end;
    const LinearRows rows{run, w, row, end - row};
    if (!(is_prompt ? run_prompt_rows(rows) : run_rows(rows))) return false;
  }
  return true;
}

}  // namespace windlass

extern "C" {

const char* windlass_simd(void) {
  if (!windlass::kHasAmx || windlass::amx_allowed()) return windlass::kSimdName;
  return "AVX-512 VNNI and BF16 (the system does not allow AMX)";
}

int32_t windlass_prompts_apart(void) { return windlass::prompts_apart() ? 1 : 0; }

int32_t windlass_takes_nonfinite_halves(void) { return windlass::kHalfUnit == 1.0f ? 1 : 0; }

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
