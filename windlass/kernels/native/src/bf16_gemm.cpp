// GEMMs of bfloat16 weights on CPUs with bfloat16 instructions: float32 sums, and x split into two
// rows of bfloat16, which keeps 17 bits. float_gemm.cpp serves other CPUs.

#include "bf16.h"
#include "gemm.h"

namespace windlass {

void bf16_gemm(const GemmArgs& job) {
  if constexpr (kSplitsInputs) {
    using namespace tile;
    const int count = padded_in(job.w);
    each_chunk(job, [&](int t, int first, int last, Target to) {
      const uint16_t* w = reinterpret_cast<const uint16_t*>(job.tile(t));
      if (kHasAmx && job.amx_panels != nullptr) {
        each_amx_group(job, first, last, [&](int p, int rows) {
          alignas(64) float sums[kAmxRows * kTile];
          const uint16_t* x = reinterpret_cast<const uint16_t*>(job.amx_panel(p));
          AmxTiles(rows, amx_run_bytes(job.w)).multiply_bf16(x, w, count, sums);
          store_tile(job, to, t, p * kPanelRows, rows, sums, job.add);
        });
        return;
      }
      each_panel(job, first, last, [&](auto rows, int p) {
        alignas(64) float sums[kPanelRows * kTile];
        multiply_bf16<rows>(w, reinterpret_cast<const uint16_t*>(job.panel(p)), count, sums);
        store_tile(job, to, t, p * kPanelRows, rows, sums, job.add);
      });
    });
  }
}

}  // namespace windlass
