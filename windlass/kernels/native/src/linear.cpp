// The C face of the products: rearranges x, then multiplies.

#include <new>
#include <system_error>

#include "api.h"
#include "gemm.h"
#include "panels.h"

using namespace windlass;

struct WindlassPool {
  Pool pool;
};

extern "C" {

const char* windlass_simd(void) { return kSimdName; }

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

int32_t windlass_linear(WindlassPool* pool, const WindlassWeight* weight, const float* x,
                        const float* x_scales, int32_t rows, float* y, int32_t add) {
  const Weight& w = *weight;
  std::lock_guard<std::mutex> hold(pool->pool.mutex());
  const bool integer = is_integer(w);
  const size_t bytes = round_up(
      static_cast<int>(integer ? int_panel_bytes(w) : float_panel_bytes(w)), 64);
  // int8 weights are there to lose nothing: inputs keep 15 bits. Whole numbers with a given scale
  // are what the format means, and nothing is to be mended.
  const bool rounds = integer && x_scales == nullptr;
  const int planes = rounds && w.kind == kInt8 ? 2 : 1;
  const int panel_rows = kPanel / planes;  // of x
  const int panels = ceil_div(rows, panel_rows);
  const size_t all_panels = bytes * static_cast<size_t>(panels);
  const size_t rest_bytes = rounds && planes == 1 ? remainder_bytes(w) : 0;
  uint8_t* memory = pool->pool.buffer(all_panels + rest_bytes * static_cast<size_t>(rows));
  if (memory == nullptr) return 1;
  uint8_t* rests = rest_bytes > 0 ? memory + all_panels : nullptr;
  pool->pool.each(panels, panels < 4 ? panels : 1, [&](int begin, int end) {
    for (int p = begin; p < end; ++p) {
      const int first = p * panel_rows;
      const float* from = x + static_cast<size_t>(first) * static_cast<size_t>(w.num_in);
      const int count = std::min(panel_rows, rows - first);
      uint8_t* to = memory + static_cast<size_t>(p) * bytes;
      if (integer) {
        fill_int_panel(w, from, x_scales ? x_scales + first : nullptr, count, planes, to,
                       rests ? rests + static_cast<size_t>(first) * rest_bytes : nullptr);
      } else {
        fill_float_panel(w, from, count, to);
      }
    }
  });
  const Product job{pool->pool, w, memory, bytes, rests, rest_bytes, planes, rows * planes, y,
                    add != 0};
  integer ? int_product(job) : float_product(job);
  return 0;
}

}  // extern "C"
