// Products of int4 weights with rows of prompts.
//
// A tile is unpacked to int8, a stretch at a time, with one scale for each output: what then is left
// of a gemm is a loop over whole numbers. Inputs that were left out meet the weight as it is.

#include <cstring>

#include "dots.h"
#include "linear.h"
#include "outliers.h"
#include "prompt_neon.h"
#include "prompt_panels.h"
#include "prompt_steps.h"

namespace windlass {

namespace tile {
namespace {

// A tile as it is packed.
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

// What codes mean: code * scale + low.
struct Groups {
  // A stretch has the ends of two groups at most beside those of 16 inputs.
  static constexpr int kMost = kStretch / 16 + 2;
  alignas(64) float scales[kMost * kTile];
  alignas(64) float lows[kMost * kTile];  // where there are minima; else codes lie around 8
  int first, count;
};

// Returns the largest magnitude of what codes of each output can mean.
template <bool MINS>
Floats read_groups(const Weight& w, const Packed& tile, int begin, int end, Groups& out) {
  const Floats unit = splat(1.0f / kHalfUnit);
  out.first = begin / w.group;
  out.count = std::min((end - 1) / w.group, num_groups(w) - 1) - out.first + 1;
  Floats peak = zero();
  for (int i = 0; i < out.count; ++i) {
    const int at = (out.first + i) * kTile;
    const Floats scale = mul(load_scales(tile.scales + at), unit);
    store(out.scales + i * kTile, scale);
    Floats most = mul(magnitude(scale), splat(8.0f));
    if constexpr (MINS) {
      const Floats low = mul(load_scales(tile.offsets + at), unit);
      store(out.lows + i * kTile, low);
      most = larger_magnitude(magnitude(low), magnitude(fma(low, scale, splat(15.0f))));
    }
    peak = larger_magnitude(peak, most);
  }
  return peak;
}

// A stretch of a tile in int8.
struct Stretch {
  alignas(64) uint8_t codes[kStretch * kTile];
  alignas(64) float scales[kTile];
  alignas(64) float shifts[kTile];  // see multiply_64
};

// The scale of each output. 12 bits of it, rounded up: times kSumStart it still is exact.
void find_scales(Floats peak, Stretch& out) {
  store(out.scales, mul(peak, splat(1.0f / 127.0f)));
  for (float& scale : out.scales) {
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    bits = (bits + 0xfff) & ~uint32_t{0xfff};
    std::memcpy(&scale, &bits, 4);
  }
  if constexpr (kHasMultiply64) store(out.shifts, mul(load(out.scales), splat(-kSumStart)));
}

// Inputs [begin, end) of a tile. A code c becomes (c * factor + start) / 256, rounded down.
template <bool MINS>
void unpack_stretch(const Weight& w, const Packed& tile, int begin, int end, Stretch& out) {
  Groups groups;
  find_scales(read_groups<MINS>(w, tile, begin, end, groups), out);
  float inverse[kTile];
  for (int r = 0; r < kTile; ++r) {
    inverse[r] = out.scales[r] > 0.0f ? 256.0f / out.scales[r] : 0.0f;
  }
  const Floats by = load(inverse);
  // All of them before the first is used, which would wait for it.
  Steps steps[Groups::kMost];
  for (int i = 0; i < groups.count; ++i) {
    const Floats factor = mul(load(groups.scales + i * kTile), by);
    const Floats low = MINS ? mul(load(groups.lows + i * kTile), by) : mul(factor, splat(-8.0f));
    steps[i] = Steps(factor, add(low, splat(128.0f)));
  }
  const uint8_t* from = tile.codes + static_cast<size_t>(begin) * kTile / 2;
  uint8_t* to = out.codes;
  for (int i = 0, k = begin; i < groups.count; ++i) {
    // The last group goes on over the padding.
    const int stop = i + 1 == groups.count ? end : (groups.first + i + 1) * w.group;
    const int units = (stop - k) / 16;
    steps[i].unpack<kSignedNibbles && !MINS>(from, units, to);
    k = stop, from += units * 8 * kTile, to += units * 16 * kTile;
  }
}

// Adds a stretch for MT rows.
template <int MT>
inline void multiply_stretch(const Stretch& w, int inputs, const int8_t* x, const float* x_scales,
                             const int32_t* centre, float* out) {
  constexpr int wide = sizeof(Codes);
  Dots<MT> dots;
  if constexpr (kUnsignedCodes) {
    start_dots(dots, load_quad(centre));
  } else {
    start_dots(dots);
  }
  const uint8_t* codes = w.codes;
  for (int k = 0; k < inputs; k += 16, codes += 4 * wide, x += 16 * kPanel) {
    add_dots<false>(dots, [&](int i) WINDLASS_INLINED { return load_codes(codes + wide * i); }, x);
  }
  const Floats scale = load(w.scales);
  const Quad x_scale = load_quad(x_scales);
  unrolled<MT>([&](auto m) WINDLASS_INLINED {
    const Floats sum = mul(sum_finish(row_of_dots<m>(dots)), scale);
    store(out + m * kTile, fma_lane<m>(load(out + m * kTile), sum, x_scale));
  });
}

// The weights of outliers' inputs, as they are. Inputs come in their order, so that a group's scale
// and minimum are read once.
template <bool MINS>
class Weights {
 public:
  explicit Weights(const Packed& tile) : tile_(tile) {}

  WINDLASS_INLINE Floats at(const OutlierColumn& c) {
    if (c.group != group_) {
      group_ = c.group;
      const Floats unit = splat(1.0f / kHalfUnit);
      scale_ = mul(load_scales(tile_.scales + group_ * kTile), unit);
      // Without minima codes lie around 8, or have a sign.
      low_ = MINS ? mul(load_scales(tile_.offsets + group_ * kTile), unit)
                  : mul(scale_, splat(kSignedNibbles ? 0.0f : -8.0f));
    }
    const uint32_t input = static_cast<uint32_t>(c.input);
    const uint8_t* codes = tile_.codes + input / 16 * (8 * kTile);
    const int in_16 = static_cast<int>(input % 16);
    if constexpr (kSignedNibbles && !MINS) {
      return mul(mul(signed_nibbles_at(codes, in_16), splat(1.0f / 16)), scale_);
    } else {
      return fma(low_, nibbles_at(codes, in_16), scale_);
    }
  }

 private:
  const Packed& tile_;
  int group_ = -1;
  Floats scale_ = zero(), low_ = zero();
};

template <bool MINS>
void multiply_prompt(const Product& job) {
  const PromptSizes sizes(job.w);
  const int padded = padded_in(job.w);
  each_piece(job, [&](int t, int first, int last, Target to) {
    Stretch stretch;
    const int pairs = kHasMultiply64 ? (last - first) / 2 : 0;
    alignas(64) float sums[kMostPanels][kPanel * kTile];
    std::memset(sums, 0, static_cast<size_t>(last - first) * sizeof sums[0]);
    const Packed tile(job.w, t);
    for (int begin = 0, s = 0; begin < padded; begin += kStretch, ++s) {
      const int end = std::min(begin + kStretch, padded);
      unpack_stretch<MINS>(job.w, tile, begin, end, stretch);
      const auto panel = [&](int p) {
        PromptPanel x = sizes.panel(job.panel(p));
        return PromptPanel{x.codes + begin * kPanel, x.scales + s * kPanel, x.centre + s * kPanel};
      };
      if constexpr (kHasMultiply64) {
        if (pairs > 0) {
          const PromptPanel x = panel(first);
          multiply_64(stretch.codes, stretch.scales, stretch.shifts, (end - begin) / 16, x.codes,
                      x.scales, job.panel_bytes, pairs, sums[0]);
        }
      }
      each_panel(job, first + 2 * pairs, last, [&](auto rows, int p) {
        const PromptPanel x = panel(p);
        multiply_stretch<rows>(stretch, end - begin, x.codes, x.scales, x.centre, sums[p - first]);
      });
    }
    constexpr int ahead = 8;  // panels
    for (int p = first; p < std::min(first + ahead, last); ++p) fetch_target(job, to, p);
    const OutlierColumns& columns = job.piece_columns(first);
    int32_t outliers_at[kMostPanels];
    std::copy(columns.firsts, columns.firsts + (last - first), outliers_at);
    Weights<MINS> weights(tile);
    const auto weight_of = [&](const OutlierColumn& c) WINDLASS_INLINED { return weights.at(c); };
    multiply_columns(columns, 0, padded, last - first, outliers_at, weight_of, sums[0]);
    each_panel(job, first, last, [&](auto rows, int p) {
      if (p + ahead < last) fetch_target(job, to, p + ahead);
      store_tile(job, to, t, p * kPanel, rows, sums[p - first], job.add);
    });
  });
}

}  // namespace
}  // namespace tile

bool run_prompt_rows(const LinearRows& linear) {
  const Weight& w = linear.w;
  const size_t panel_bytes = PromptSizes(w).all();
  const int panels = ceil_div(linear.count, kPanel);
  // Even, since panels are best multiplied in pairs.
  const int cut = round_up(panel_cut(linear.count, panel_bytes, 512 << 10, kMostPanels), 2);
  const int pieces = ceil_div(panels, cut);
  const size_t all_panels = static_cast<size_t>(panels) * panel_bytes;
  const int most_outliers = most_prompt_outliers(w);
  const size_t row_bytes = outlier_bytes(most_outliers);
  const size_t all_rows = (static_cast<size_t>(linear.count) * row_bytes + 63) / 64 * 64;
  const size_t piece_bytes = column_bytes(w, most_outliers, cut * kPanel);
  uint8_t* memory =
      linear.run.pool.buffer(all_panels + all_rows + piece_bytes * static_cast<size_t>(pieces));
  if (memory == nullptr) return false;
  uint8_t* by_row = memory + all_panels;
  uint8_t* columns = by_row + all_rows;
  linear.run.pool.each(panels, 1, [&](int begin, int end) {
    for (int p = begin; p < end; ++p) {
      const int count = std::min(kPanel, linear.count - p * kPanel);
      fill_prompt_panel(w, linear.inputs(p * kPanel, count), count,
                        memory + static_cast<size_t>(p) * panel_bytes,
                        by_row + static_cast<size_t>(p) * kPanel * row_bytes);
    }
  });
  const int most = cut * kPanel;
  linear.run.pool.each(pieces, 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      gather_columns(w, by_row + static_cast<size_t>(i * most) * row_bytes, most_outliers,
                     std::min(most, linear.count - i * most), most,
                     columns + static_cast<size_t>(i) * piece_bytes);
    }
  });
  Product job = linear.gemm(memory, panel_bytes, cut);
  job.gain = w.gain;
  job.columns = columns;
  job.column_bytes = piece_bytes;
  w.has_mins ? tile::multiply_prompt<true>(job) : tile::multiply_prompt<false>(job);
  return true;
}

}  // namespace windlass
