// GEMMs with bfloat16 instructions and float32 sums.
//
// bfloat16 weights: x is split into two rows of bfloat16, which keeps 17 bits. float_gemm.cpp serves other
// CPUs. With AMX also prompts of int4, int6, int8 and codebook weights: a tile is dequantised to bfloat16 once
// for all rows, and x is rounded to bfloat16.

#include "bf16.h"
#include "dequantise_bf16.h"
#include "gemm.h"

namespace windlass {

namespace tile {
namespace {

// Two tiles of a weight by all rows, in ranges of inputs: both tiles' range stays in the L1 cache, while
// the rows come from L2.
class AmxGemm {
 public:
  static constexpr int kMaxRange = 512;  // inputs
  using Sums = float[kMaxPanels][kPanelRows * kTile];

  explicit AmxGemm(const GemmArgs& job)
      : job_(job), inputs_(amx_inputs(job.w)), range_(range_of(inputs_)) {}

  void multiply(const TileRange& tiles, int first, int last, Sums* sums) const {
#if defined(WINDLASS_AMX)
    alignas(64) uint16_t unpacked[2][kMaxRange * kTile];
    const Tiles packed(job_.w);
    for (int begin = 0; begin < inputs_; begin += range_) {
      const int end = std::min(begin + range_, inputs_);
      const uint16_t* w[2] = {};
      for (int i = 0; i < tiles.count; ++i) {
        if (job_.w.kind == kBf16) {
          w[i] = reinterpret_cast<const uint16_t*>(job_.tile(tiles.first + i)) + begin * kTile;
          continue;
        }
        dequantise(job_.w, packed.at(tiles.first + i), begin, std::min(end, padded_in(job_.w)), unpacked[i]);
        w[i] = unpacked[i];
      }
      const int last_row = std::min(last * kPanelRows, job_.rows);
      for (int p = first; p < last; p += 2 * kAmxPanels) {
        const int rows = last_row - p * kPanelRows;
        multiply(tiles.count, p, rows, begin, end, w, p - first, sums);
      }
    }
#endif
  }

 private:
  // Equal ranges, multiples of 32.
  static int range_of(int inputs) {
    return round_up(ceil_div(inputs, ceil_div(inputs, kMaxRange)), 32);
  }

  const uint16_t* x(int panel, int begin) const {
    return reinterpret_cast<const uint16_t*>(job_.amx_panel(panel)) + begin * kAmxRows;
  }

  // Up to 32 rows from panel p on.
  void multiply(int count, int p, int rows, int begin, int end, const uint16_t* const (&w)[2],
                int at, Sums* sums) const {
    const bool more_rows = rows > kAmxRows;
    const int next = more_rows ? kAmxPanels : 0;
    const uint16_t* const from[2] = {x(p, begin), x(p + next, begin)};
    float* const out[2][2] = {{sums[0][at], sums[0][at + next]}, {sums[1][at], sums[1][at + next]}};
    const bool starts = begin == 0;
    if (more_rows) {
      count == 2 ? amx_multiply_bf16<2, 2>(from, w, end - begin, starts, out)
                 : amx_multiply_bf16<2, 1>(from, w, end - begin, starts, out);
    } else {
      count == 2 ? amx_multiply_bf16<1, 2>(from, w, end - begin, starts, out)
                 : amx_multiply_bf16<1, 1>(from, w, end - begin, starts, out);
    }
  }

  const GemmArgs& job_;
  int inputs_, range_;
};

void amx_gemm(const GemmArgs& job) {
  const AmxGemm gemm(job);
  each_tiles<AmxTiles, 2>(job, [&](AmxTiles&, const TileRange& tiles, int first, int last) {
    alignas(64) AmxGemm::Sums sums[2];
    gemm.multiply(tiles, first, last, sums);
    for (int i = 0; i < tiles.count; ++i) {
      each_panel(job, first, last, [&](auto rows, int p) {
        store_tile(job, tiles.target(i), tiles.first + i, p * kPanelRows, rows, sums[i][p - first], job.add);
      });
    }
  });
}

}  // namespace
}  // namespace tile

void bf16_gemm(const GemmArgs& job) {
  using namespace tile;
  if (kHasAmx && job.amx_panels != nullptr) return amx_gemm(job);
  if constexpr (kSplitsInputs) {
    const int count = padded_in(job.w);
    each_chunk(job, [&](int t, int first, int last, Target to) {
      const uint16_t* w = reinterpret_cast<const uint16_t*>(job.tile(t));
      each_panel(job, first, last, [&](auto rows, int p) {
        alignas(64) float sums[kPanelRows * kTile];
        multiply_bf16<rows>(w, reinterpret_cast<const uint16_t*>(job.panel(p)), count, sums);
        store_tile(job, to, t, p * kPanelRows, rows, sums, job.add);
      });
    });
  }
}

}  // namespace windlass
