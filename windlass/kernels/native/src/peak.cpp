// The rate of integer dot products, which bounds GEMMs of many rows.

#include "api.h"
#include "dots.h"
#include "pool.h"

namespace windlass::tile {
namespace {

constexpr int kPanels = kManyRegisters ? 4 : 1;
constexpr int kItems = 8;  // per thread, so that threads finish together

// The inner loop of a GEMM on data in the L1 cache. Codes are zeros, so that sums do not overflow.
void multiply(int64_t rounds) {
  alignas(64) uint8_t codes[4 * sizeof(Codes)] = {};
  alignas(64) int8_t x[kPanels][16 * kPanelRows] = {};
  Dots<kPanelRows> dots[kPanels];
  for (auto& of_panel : dots) start_dots(of_panel);
  for (; rounds > 0; --rounds) {
    __asm__ volatile("" : : "r"(codes), "r"(x) : "memory");  // loads stay in the loop
    const auto codes_at = [&](int i) WINDLASS_INLINED {
      return load_codes(codes + static_cast<size_t>(i) * sizeof(Codes));
    };
    unrolled<kPanels>([&](auto p) WINDLASS_INLINED { add_dots<8>(dots[p], codes_at, x[p]); });
  }
  alignas(64) float sums[kTile];
  for (auto& of_panel : dots) {
    unrolled<kPanelRows>([&](auto m) WINDLASS_INLINED {
      store(sums, sum_finish(row_of_dots<m>(of_panel)));
      __asm__ volatile("" : : "r"(sums) : "memory");
    });
  }
}

}  // namespace
}  // namespace windlass::tile

extern "C" int64_t windlass_multiply_int8(WindlassPool* pool, int64_t rounds) {
  using namespace windlass;
  const std::lock_guard<std::mutex> lock(pool->pool.mutex());
  const int items = tile::kItems * pool->pool.threads();
  pool->pool.each(items, 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) tile::multiply(rounds);
  });
  return items * rounds * (16 * kTile * kPanelRows * tile::kPanels);
}
