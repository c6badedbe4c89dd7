// The product: rearranges x, which may be normalised on the way, then multiplies.

#include <new>
#include <system_error>

#include "api.h"
#include "gemm.h"
#include "panels.h"

namespace windlass {

namespace {

// How x lies in panels.
struct Layout {
  bool integer;
  int planes;      // rows of a panel that one of x takes
  int panel_rows;  // of x
  size_t panel_bytes, outlier_bytes;
  int panels;

  Layout(const Weight& w, int rows, bool given) : integer(is_integer(w)) {
    // int8 weights are there to lose nothing: inputs keep 15 bits. Whole numbers with a given scale
    // are what the format means, and nothing is to be mended.
    const bool rounds = integer && !given;
    planes = rounds && w.kind == kInt8 ? 2 : 1;
    panel_rows = kPanel / planes;
    panels = ceil_div(rows, panel_rows);
    const size_t bytes = integer ? IntSizes(w).all() : float_panel_bytes(w);
    panel_bytes = (bytes + 63) / 64 * 64;
    outlier_bytes = rounds && planes == 1 ? windlass::outlier_bytes(w) : 0;
  }
};

// The rows of x that a panel is made of.
const float* panel_inputs(const Run& run, const Weight& w, int first, int count) {
  const float* x = row_of(run.moving(0), first, w.num_in);
  if (!(run.size(2) & kNormFirst)) return x;
  float* normed = row_of(run.moving(2), first, w.num_in);
  for (int m = 0; m < count; ++m) {
    normalise(row_of(x, m, w.num_in), run.fixed<float>(2), w.num_in, run.command.numbers[0],
              row_of(normed, m, w.num_in));
  }
  return normed;
}

}  // namespace

bool run_linear(const Run& run) {
  const Weight& w = *run.fixed<Weight>(0);
  const int flags = run.size(2);
  const float* scales = flags & kGivenScales ? run.moving(4) : nullptr;
  const Layout to(w, run.rows, scales != nullptr);
  const size_t all_panels = to.panel_bytes * static_cast<size_t>(to.panels);
  uint8_t* memory =
      run.pool.buffer(all_panels + to.outlier_bytes * static_cast<size_t>(run.rows));
  if (memory == nullptr) return false;
  uint8_t* outliers = to.outlier_bytes > 0 ? memory + all_panels : nullptr;
  run.pool.each(to.panels, to.panels < 4 ? to.panels : 1, [&](int begin, int end) {
    for (int p = begin; p < end; ++p) {
      const int first = p * to.panel_rows;
      const int count = std::min(to.panel_rows, run.rows - first);
      const float* from = panel_inputs(run, w, first, count);
      uint8_t* panel = memory + static_cast<size_t>(p) * to.panel_bytes;
      if (to.integer) {
        const size_t skipped = static_cast<size_t>(first) * to.outlier_bytes;
        fill_int_panel(w, from, scales ? scales + first : nullptr, count, to.planes, panel,
                       outliers ? outliers + skipped : nullptr);
      } else {
        fill_float_panel(w, from, count, panel);
      }
    }
  });
  const Product job{run.pool,
                    w,
                    memory,
                    to.panel_bytes,
                    outliers,
                    to.outlier_bytes,
                    to.planes,
                    run.rows * to.planes,
                    run.moving(1) + run.size(1),
                    run.size(0),
                    (flags & kAddToY) != 0,
                    run.fixed<float>(1),
                    flags & kGated ? run.moving(3) : nullptr};
  to.integer ? int_product(job) : float_product(job);
  return true;
}

}  // namespace windlass

extern "C" {

const char* windlass_simd(void) { return windlass::kSimdName; }

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
