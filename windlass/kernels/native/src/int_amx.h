// AMX: up to 16 rows of x by an unpacked tile. The order of float sums is that of int_gemm.cpp. On
// other CPUs this header is empty.

#pragma once

#include <algorithm>

#include "amx.h"
#include "panels.h"

namespace windlass::tile {

// `panel_at` returns the panels from `first` on; `amx_panel` holds their codes.
template <int BLOCK, bool OFFSETS, class Tile, class PanelAt>
void multiply_amx(const Tile& tile, const PanelAt& panel_at, int first, const int8_t* amx_panel,
                  int rows, float* out) {
#if defined(WINDLASS_AMX)
  constexpr int max_blocks = 4;  // blocks whose int32 sums are kept before they are scaled
  alignas(64) int32_t dots[max_blocks][kAmxRows * kTile];
  const AmxTiles amx_panels(rows, BLOCK);
  const int blocks = tile.groups * tile.blocks;
  for (int begin = 0; begin < blocks; begin += max_blocks) {
    const int end = std::min(begin + max_blocks, blocks);
    for (int b = begin; b < end; ++b) {
      amx_panels.multiply_codes(amx_panel + b * BLOCK * kAmxRows, tile.codes + b * BLOCK * kTile,
                                BLOCK,
                                dots[b - begin]);
    }
    for (int row = 0; row < rows; row += kPanelRows) {
      const IntPanel x = panel_at(first + row / kPanelRows);
      Floats acc[kPanelRows];
      for (int m = 0; m < kPanelRows; ++m) acc[m] = load(out + (row + m) * kTile);
      for (int b = begin; b < end; ++b) {
        const int g = b / tile.blocks;
        const Floats scale = load(tile.scales + g * kTile);
        const QuadInt correction = load_quad(x.correction + b * kPanelRows);
        const Quad x_scale = load_quad(x.scales + b * kPanelRows);
        const int32_t* from = dots[b - begin] + row * kTile;
        unrolled<kPanelRows>([&](auto m) WINDLASS_INLINED {
          const Sums sum = add(sum_start<m>(correction), load_sums(from + m * kTile));
          acc[m] = fma_lane<m>(acc[m], mul(sum_finish(sum), scale), x_scale);
        });
        if (!OFFSETS || (b + 1) % tile.blocks != 0) continue;
        const Floats low = load(tile.offsets + g * kTile);
        const Quad sums = load_quad(x.sums + g * kPanelRows);
        unrolled<kPanelRows>([&](auto m) WINDLASS_INLINED { acc[m] = fma_lane<m>(acc[m], low, sums); });
      }
      for (int m = 0; m < kPanelRows; ++m) store(out + (row + m) * kTile, acc[m]);
    }
  }
#endif
}

}  // namespace windlass::tile
