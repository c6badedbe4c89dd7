// GEMMs of int4 weights with prompt rows.
//
// A tile is requantised to int8, one prompt block at a time, with one scale per output: the inner
// loop then has integer operations only. Outliers are multiplied with the int4 weights in float32.

#include <cstring>

#include "dots.h"
#include "gemm.h"
#include "outliers.h"
#include "prompt_neon.h"
#include "prompt_panels.h"
#include "requantise.h"

namespace windlass {

namespace tile {
namespace {

// A packed tile.
struct Packed {
  const uint8_t* codes;
  const uint16_t* scales;
  const uint16_t* offsets;

  Packed(const Weight& w, int tile) {
    const uint8_t* data = w.data + static_cast<size_t>(tile) * tile_bytes(w);
    codes = data + scale_bytes(w);
    scales = reinterpret_cast<const uint16_t*>(data);
    offsets = scales + num_groups(w) * kTile;
  }
};

// Decodes codes: code * scale + offset.
struct Groups {
  // Besides groups of 16 inputs a prompt block contains the ends of at most two groups.
  static constexpr int kMaxGroups = kPromptBlock / 16 + 2;
  alignas(64) float scales[kMaxGroups * kTile];
  // If the weight has offsets; else codes lie around 8.
  alignas(64) float offsets[kMaxGroups * kTile];
  int first, count;
};

// Returns the largest magnitude that the codes of each output can represent.
template <bool OFFSETS>
Floats read_groups(const Weight& w, const Packed& tile, int begin, int end, Groups& out) {
  const Floats unit = splat(1.0f / kF16Unit);
  out.first = begin / w.group;
  out.count = std::min((end - 1) / w.group, num_groups(w) - 1) - out.first + 1;
  Floats peak = zero();
  for (int i = 0; i < out.count; ++i) {
    const int at = (out.first + i) * kTile;
    const Floats scale = mul(load_scales(tile.scales + at), unit);
    store(out.scales + i * kTile, scale);
    Floats rows_per_chunk = mul(absolute(scale), splat(8.0f));
    if constexpr (OFFSETS) {
      const Floats offset = mul(load_scales(tile.offsets + at), unit);
      store(out.offsets + i * kTile, offset);
      rows_per_chunk = maximum_abs(absolute(offset), absolute(fma(offset, scale, splat(15.0f))));
    }
    peak = maximum_abs(peak, rows_per_chunk);
  }
  return peak;
}

// A prompt block of a tile in int8.
struct PromptBlock {
  alignas(64) uint8_t codes[kPromptBlock * kTile];
  alignas(64) float scales[kTile];
  alignas(64) float shifts[kTile];  // see multiply_64
};

// The scale of each output, rounded up to 12 bits so that its product with kSumStart is exact.
void find_scales(Floats peak, PromptBlock& out) {
  store(out.scales, mul(peak, splat(1.0f / 127.0f)));
  for (float& scale : out.scales) {
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    bits = (bits + 0xfff) & ~uint32_t{0xfff};
    std::memcpy(&scale, &bits, 4);
  }
  if constexpr (kHasMultiply64) store(out.shifts, mul(load(out.scales), splat(-kSumStart)));
}

// Requantises inputs [begin, end) of a tile: code c becomes floor((c * factor + start) / 256).
template <bool OFFSETS>
void unpack_block(const Weight& w, const Packed& tile, int begin, int end, PromptBlock& out) {
  Groups groups;
  find_scales(read_groups<OFFSETS>(w, tile, begin, end, groups), out);
  float inverse[kTile];
  for (int r = 0; r < kTile; ++r) {
    inverse[r] = out.scales[r] > 0.0f ? 256.0f / out.scales[r] : 0.0f;
  }
  const Floats by = load(inverse);
  // Computes all tables before the first is used, which hides the latency.
  Requantiser steps[Groups::kMaxGroups];
  for (int i = 0; i < groups.count; ++i) {
    const Floats factor = mul(load(groups.scales + i * kTile), by);
    const Floats offset = OFFSETS ? mul(load(groups.offsets + i * kTile),
                                        by) : mul(factor, splat(-8.0f));
    steps[i] = Requantiser(factor, add(offset, splat(128.0f)));
  }
  const uint8_t* from = tile.codes + static_cast<size_t>(begin) * kTile / 2;
  uint8_t* to = out.codes;
  for (int i = 0, k = begin; i < groups.count; ++i) {
    // The last group extends over the padding.
    const int stop = i + 1 == groups.count ? end : (groups.first + i + 1) * w.group;
    const int units = (stop - k) / 16;
    steps[i].unpack<kSignedNibbles && !OFFSETS>(from, units, to);
    k = stop, from += units * 8 * kTile, to += units * 16 * kTile;
  }
}

// Panels multiplied together where registers suffice: a vector of codes is then loaded once for all
// their rows.
constexpr int kPanelsAtOnce = kManyRegisters ? 4 : 1;

// Adds one prompt block for MT rows of each of PANELS panels, `next` bytes apart.
template <int MT, int PANELS>
WINDLASS_INLINE void multiply_block(const PromptBlock& w, int inputs, const PromptPanel& x,
                                    size_t next, float* out) {
  constexpr int wide = sizeof(Codes);
  const auto of_panel = [next](const auto* first, int p) { return skip_bytes(first, next * p); };
  constexpr int chains = num_chains(MT * PANELS);
  Dots<MT> dots[PANELS][chains];
  unrolled<PANELS>([&](auto p) WINDLASS_INLINED {
    if constexpr (kUnsignedCodes) {
      start_dots(dots[p][0], load_quad(of_panel(x.correction, p)));
    } else {
      start_dots(dots[p][0]);
    }
    for (int i = 1; i < chains; ++i) start_dots(dots[p][i]);
  });
  const uint8_t* codes = w.codes;
  const int8_t* at = x.codes;
  const auto add_16 = [&](auto chain) WINDLASS_INLINED {
    const auto codes_at = [&](int i) WINDLASS_INLINED { return load_codes(codes + wide * i); };
    unrolled<PANELS>([&](auto p) WINDLASS_INLINED {
      add_dots<false>(dots[p][chain], codes_at, of_panel(at, p));
    });
    codes += 4 * wide, at += 16 * kPanelRows;
  };
  int left = inputs / 16;
  for (; left >= chains; left -= chains) unrolled<chains>(add_16);
  for (; left > 0; --left) add_16(std::integral_constant<int, 0>{});
  if constexpr (chains > 1) {
    for (auto& of_panel_dots : dots) join_dots(of_panel_dots);
  }
  const Floats scale = load(w.scales);
  unrolled<PANELS>([&](auto p) WINDLASS_INLINED {
    const Quad x_scale = load_quad(of_panel(x.scales, p));
    float* sums = out + p * kPanelRows * kTile;
    unrolled<MT>([&](auto m) WINDLASS_INLINED {
      const Floats sum = mul(sum_finish(row_of_dots<m>(dots[p][0])), scale);
      store(sums + m * kTile, fma_lane<m>(load(sums + m * kTile), sum, x_scale));
    });
  });
}

// Dequantises the weights of outliers. Inputs come in order, so that a group's scale and offset are
// read once.
template <bool OFFSETS>
class Weights {
 public:
  explicit Weights(const Packed& tile) : tile_(tile) {}

  WINDLASS_INLINE Floats at(const OutlierColumn& c) {
    if (c.group != group_) {
      group_ = c.group;
      const Floats unit = splat(1.0f / kF16Unit);
      scale_ = mul(load_scales(tile_.scales + group_ * kTile), unit);
      // Without offsets codes lie around 8, or are signed.
      offset_ = OFFSETS ? mul(load_scales(tile_.offsets + group_ * kTile), unit)
                  : mul(scale_, splat(kSignedNibbles ? 0.0f : -8.0f));
    }
    const uint32_t input = static_cast<uint32_t>(c.input);
    const uint8_t* codes = tile_.codes + input / 16 * (8 * kTile);
    const int in_16 = static_cast<int>(input % 16);
    if constexpr (kSignedNibbles && !OFFSETS) {
      return mul(mul(signed_nibbles_at(codes, in_16), splat(1.0f / 16)), scale_);
    } else {
      return fma(offset_, nibbles_at(codes, in_16), scale_);
    }
  }

 private:
  const Packed& tile_;
  int group_ = -1;
  Floats scale_ = zero(), offset_ = zero();
};

template <bool OFFSETS>
void multiply_prompt(const GemmArgs& job) {
  const PromptSizes sizes(job.w);
  const int padded = padded_in(job.w);
  each_chunk(job, [&](int t, int first, int last, Target to) {
    PromptBlock block;
    const int pairs = kHasMultiply64 ? (last - first) / 2 : 0;
    alignas(64) float sums[kMaxPanels][kPanelRows * kTile];
    std::memset(sums, 0, static_cast<size_t>(last - first) * sizeof sums[0]);
    const Packed tile(job.w, t);
    for (int begin = 0, s = 0; begin < padded; begin += kPromptBlock, ++s) {
      const int end = std::min(begin + kPromptBlock, padded);
      unpack_block<OFFSETS>(job.w, tile, begin, end, block);
      const auto panel = [&](int p) {
        PromptPanel x = sizes.panel(job.panel(p));
        return PromptPanel{x.codes + begin * kPanelRows, x.scales + s * kPanelRows, x.correction + s * kPanelRows};
      };
      if constexpr (kHasMultiply64) {
        if (pairs > 0) {
          const PromptPanel x = panel(first);
          multiply_64(block.codes, block.scales, block.shifts, (end - begin) / 16, x.codes,
                      x.scales, job.panel_bytes, pairs, sums[0]);
        }
      }
      int p = first + 2 * pairs;
      const auto multiply_panels = [&](auto count) WINDLASS_INLINED {
        for (; p + count <= last; p += count) {
          multiply_block<kPanelRows, count>(block, end - begin, panel(p), job.panel_bytes,
                                            sums[p - first]);
        }
      };
      // The last panel computes unused rows if others are multiplied with it.
      if constexpr (kPanelsAtOnce >= 4) multiply_panels(std::integral_constant<int, 4>{});
      if constexpr (kPanelsAtOnce >= 2) multiply_panels(std::integral_constant<int, 2>{});
      each_panel(job, p, last, [&](auto rows, int panel_index) {
        multiply_block<rows, 1>(block, end - begin, panel(panel_index), 0, sums[panel_index - first]);
      });
    }
    constexpr int ahead = 8;  // panels
    for (int p = first; p < std::min(first + ahead, last); ++p) prefetch_output(job, to, p);
    const OutlierColumns& columns = job.chunk_columns(first);
    int32_t outliers_at[kMaxPanels];
    std::copy(columns.quad_starts, columns.quad_starts + (last - first), outliers_at);
    Weights<OFFSETS> weights(tile);
    const auto weight_of = [&](const OutlierColumn& c) WINDLASS_INLINED { return weights.at(c); };
    multiply_columns(columns, 0, padded, last - first, outliers_at, weight_of, sums[0]);
    each_panel(job, first, last, [&](auto rows, int p) {
      if (p + ahead < last) prefetch_output(job, to, p + ahead);
      store_tile(job, to, t, p * kPanelRows, rows, sums[p - first], job.add);
    });
  });
}

}  // namespace
}  // namespace tile

void prompt_gemm(const GemmArgs& job) {
  job.w.has_offsets ? tile::multiply_prompt<true>(job) : tile::multiply_prompt<false>(job);
}

}  // namespace windlass
