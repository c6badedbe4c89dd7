// Products of bfloat16 weights where the CPU multiplies bfloat16: float32 sums, and x as the sum of
// two rows of bfloat16, which keeps 17 bits of it. float_gemm.cpp computes them for other CPUs.

#include "bf16.h"
#include "gemm.h"

namespace windlass {

void bf16_gemm_rows(const Product& job) {
  if constexpr (kSplitsInputs) {
    using namespace tile;
    const int count = padded_in(job.w);
    each_piece(job, [&](int t, int first, int last, Target to) {
      const uint16_t* w = reinterpret_cast<const uint16_t*>(job.tile(t));
      if (kHasAmx && job.squares != nullptr) {
        each_square(job, first, last, [&](int p, int rows) {
          alignas(64) float sums[kSquare * kTile];
          const uint16_t* x = reinterpret_cast<const uint16_t*>(job.square(p));
          Squares(rows, square_run(job.w)).multiply_bf16(x, w, count, sums);
          store_tile(job, to, t, p * kPanel, rows, sums, job.add);
        });
        return;
      }
      each_panel(job, first, last, [&](auto rows, int p) {
        alignas(64) float sums[kPanel * kTile];
        multiply_bf16<rows>(w, reinterpret_cast<const uint16_t*>(job.panel(p)), count, sums);
        store_tile(job, to, t, p * kPanel, rows, sums, job.add);
      });
    });
  }
}

}  // namespace windlass
