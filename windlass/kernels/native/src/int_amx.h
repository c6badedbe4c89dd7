// Up to 16 rows of x by an unpacked tile, with the sums of gemm by AMX; see int_gemm.cpp for the
// rest, whose order of sums this keeps. Elsewhere it is empty.

#pragma once

#include <algorithm>

#include "amx.h"
#include "panels.h"

namespace windlass::tile {

// `panel_at` gives the panels from `first` on, and `square` has their codes.
template <int BLOCK, bool MINS, class Tile, class PanelAt>
void multiply_square(const Tile& tile, const PanelAt& panel_at, int first, const int8_t* square,
                     int rows, float* out) {
#if defined(WINDLASS_AMX)
  constexpr int most = 4;  // blocks whose sums are kept before they are scaled
  alignas(64) int32_t dots[most][kSquare * kTile];
  const Squares squares(rows, BLOCK);
  const int blocks = tile.groups * tile.blocks;
  for (int begin = 0; begin < blocks; begin += most) {
    const int end = std::min(begin + most, blocks);
    for (int b = begin; b < end; ++b) {
      squares.multiply_codes(square + b * BLOCK * kSquare, tile.codes + b * BLOCK * kTile, BLOCK,
                             dots[b - begin]);
    }
    for (int row = 0; row < rows; row += kPanel) {
      const IntPanel x = panel_at(first + row / kPanel);
      Floats acc[kPanel];
      for (int m = 0; m < kPanel; ++m) acc[m] = load(out + (row + m) * kTile);
      for (int b = begin; b < end; ++b) {
        const int g = b / tile.blocks;
        const Floats scale = load(tile.scales + g * kTile);
        const QuadInt centre = load_quad(x.centre + b * kPanel);
        const Quad x_scale = load_quad(x.scales + b * kPanel);
        const int32_t* from = dots[b - begin] + row * kTile;
        unrolled<kPanel>([&](auto m) WINDLASS_INLINED {
          const Sums sum = add(sum_start<m>(centre), load_sums(from + m * kTile));
          acc[m] = fma_lane<m>(acc[m], mul(sum_finish(sum), scale), x_scale);
        });
        if (!MINS || (b + 1) % tile.blocks != 0) continue;
        const Floats low = load(tile.offsets + g * kTile);
        const Quad sums = load_quad(x.sums + g * kPanel);
        unrolled<kPanel>([&](auto m) WINDLASS_INLINED { acc[m] = fma_lane<m>(acc[m], low, sums); });
      }
      for (int m = 0; m < kPanel; ++m) store(out + (row + m) * kTile, acc[m]);
    }
  }
#endif
}

}  // namespace windlass::tile
