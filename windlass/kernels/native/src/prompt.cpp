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
  int groups;
  int group;  // inputs
};

// Addresses of a weight's tiles, computed once since that needs divisions.
struct PackedTiles {
  const Weight& w;
  size_t bytes = tile_bytes(w), scales = scale_bytes(w);
  int groups = num_groups(w);

  Packed at(int t) const {
    const uint8_t* data = w.data + static_cast<size_t>(t) * bytes;
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(data);
    return {data + scales, halves, halves + groups * kTile, groups, w.group};
  }
};

// Decodes codes: code * scale + offset.
struct Groups {
  // Besides groups of 16 inputs a prompt block contains the ends of at most two groups.
  static constexpr int kMaxGroups = kPromptBlock / 16 + 2;
  alignas(64) float scales[kMaxGroups * kTile];
  // If the weight has offsets; else codes lie around 8.
  alignas(64) float offsets[kMaxGroups * kTile];
  int count;
};

// Reads the groups up to input `end`, from group `first` on. Returns the largest magnitude that the codes
// of each output can represent.
template <bool OFFSETS>
WINDLASS_INLINE Floats read_groups(const Packed& tile, int first, int end, Groups& out) {
  const Floats unit = splat(1.0f / kF16Unit);
  Floats peak = zero();
  int i = 0, g = first;
  do {
    const Floats scale = mul(load_scales(tile.scales + g * kTile), unit);
    store(out.scales + i * kTile, scale);
    Floats magnitude = mul(absolute(scale), splat(8.0f));
    if constexpr (OFFSETS) {
      const Floats offset = mul(load_scales(tile.offsets + g * kTile), unit);
      store(out.offsets + i * kTile, offset);
      magnitude = maximum_abs(absolute(offset), absolute(fma(offset, scale, splat(15.0f))));
    }
    peak = maximum_abs(peak, magnitude);
    ++i, ++g;
  } while (g < tile.groups && g * tile.group < end);
  out.count = i;
  return peak;
}

// How inputs [begin, end) of a tile, a prompt block, are requantised: code c becomes
// floor((c * factor + start) / 256), with factor and start in the group's Requantiser.
struct BlockPlan {
  alignas(64) float scales[kTile];  // of the new codes
  Requantiser steps[Groups::kMaxGroups];
  int begin, end;
  int first, count;  // groups

  // The first group of the next block.
  int next_group(const Packed& tile) const {
    const int last = first + count - 1;
    return (last + 1) * tile.group <= end ? last + 1 : last;
  }
};

template <bool OFFSETS>
WINDLASS_INLINE void plan_block(const Packed& tile, int begin, int end, int first_group,
                                BlockPlan& out) {
  Groups groups;
  const Floats peak = read_groups<OFFSETS>(tile, first_group, end, groups);
  // The product of a scale of 12 bits with kSumStart is exact.
  const Floats scale = ceil_12_bits(mul(peak, splat(1.0f / 127.0f)));
  const Floats by = divide_or_zero(splat(256.0f), scale);
  store(out.scales, scale);
  out.begin = begin, out.end = end, out.first = first_group, out.count = groups.count;
  for (int i = 0; i < groups.count; ++i) {
    const Floats factor = mul(load(groups.scales + i * kTile), by);
    const Floats offset = OFFSETS ? mul(load(groups.offsets + i * kTile),
                                        by) : mul(factor, splat(-8.0f));
    out.steps[i] = Requantiser(factor, add(offset, splat(128.0f)));
  }
}

// Calls body(requantiser, units of 16 inputs) for the groups of a block in order.
template <class Body>
WINDLASS_INLINE void each_group(const Packed& tile, const BlockPlan& plan, const Body& body) {
  for (int i = 0, k = plan.begin; i < plan.count; ++i) {
    // The last group extends over the padding.
    const int stop = i + 1 == plan.count ? plan.end : (plan.first + i + 1) * tile.group;
    body(plan.steps[i], static_cast<int>(static_cast<unsigned>(stop - k) / 16));
    k = stop;
  }
}

// Plans the prompt blocks of a tile in order, one ahead of the caller, which hides the latency.
template <bool OFFSETS>
class BlockPlans {
 public:
  BlockPlans(const Packed& tile, int padded) : tile_(tile), padded_(padded) { plan(0, 0); }

  // Returns the next block. It stays valid until the call after the next one.
  WINDLASS_INLINE const BlockPlan& next() {
    const BlockPlan& block = plans_[at_];
    at_ ^= 1;
    if (block.end < padded_) plan(block.end, block.next_group(tile_));
    return block;
  }

 private:
  WINDLASS_INLINE void plan(int begin, int first_group) {
    plan_block<OFFSETS>(tile_, begin, std::min(begin + kPromptBlock, padded_), first_group,
                        plans_[at_]);
  }

  const Packed& tile_;
  const int padded_;
  int at_ = 0;
  BlockPlan plans_[2];
};

// A prompt block of a tile in int8.
struct PromptBlock {
  alignas(64) uint8_t codes[kPromptBlock * kTile];
  alignas(64) float scales[kTile];
  alignas(64) float shifts[kTile];  // see multiply_64
};

template <bool OFFSETS>
void unpack_block(const Packed& tile, const BlockPlan& plan, PromptBlock& out) {
  store(out.scales, load(plan.scales));
  if constexpr (kHasMultiply64) store(out.shifts, mul(load(out.scales), splat(-kSumStart)));
  const uint8_t* from = tile.codes + static_cast<size_t>(plan.begin) * kTile / 2;
  uint8_t* to = out.codes;
  each_group(tile, plan, [&](const Requantiser& step, int units) WINDLASS_INLINED {
    step.unpack<kSignedNibbles && !OFFSETS>(from, units, to);
    from += units * 8 * kTile, to += units * 16 * kTile;
  });
}

// Panels multiplied together where registers suffice: a vector of codes is then loaded once for all
// their rows.
constexpr int kPanelsAtOnce = kManyRegisters ? 4 : 1;

// The integer sums of MT rows of each of PANELS panels, `next` bytes apart.
template <int MT, int PANELS, int CHAINS>
struct BlockSums {
  Dots<MT> dots[PANELS][CHAINS];
  const PromptPanel& x;
  size_t next;

  template <class T>
  const T* of_panel(const T* first, int p) const {
    return skip_bytes(first, next * static_cast<size_t>(p));
  }

  WINDLASS_INLINE BlockSums(const PromptPanel& panel, size_t panel_bytes)
      : x(panel), next(panel_bytes) {
    unrolled<PANELS>([&](auto p) WINDLASS_INLINED {
      if constexpr (kUnsignedCodes) {
        start_dots(dots[p][0], load_quad(of_panel(x.correction, p)));
      } else {
        start_dots(dots[p][0]);
      }
      for (int i = 1; i < CHAINS; ++i) start_dots(dots[p][i]);
    });
  }

  // Adds 16 inputs, with the weight's codes in codes_at(0) to codes_at(3).
  template <class CodesAt>
  WINDLASS_INLINE void add_16(int chain, const CodesAt& codes_at, const int8_t* inputs) {
    unrolled<PANELS>([&](auto p) WINDLASS_INLINED {
      add_dots<8>(dots[p][chain], codes_at, of_panel(inputs, p));
    });
  }

  // Adds the block to the float sums of all panels.
  WINDLASS_INLINE void finish(const float* scales, float* out) {
    if constexpr (CHAINS > 1) {
      for (auto& of_panel_dots : dots) join_dots(of_panel_dots);
    }
    const Floats scale = load(scales);
    unrolled<PANELS>([&](auto p) WINDLASS_INLINED {
      const Quad x_scale = load_quad(of_panel(x.scales, p));
      float* sums = out + p * kPanelRows * kTile;
      unrolled<MT>([&](auto m) WINDLASS_INLINED {
        const Floats sum = mul(sum_finish(row_of_dots<m>(dots[p][0])), scale);
        store(sums + m * kTile, fma_lane<m>(load(sums + m * kTile), sum, x_scale));
      });
    });
  }
};

// Adds one requantised prompt block for MT rows of each of PANELS panels.
template <int MT, int PANELS>
WINDLASS_INLINE void multiply_block(const PromptBlock& w, int inputs, const PromptPanel& x,
                                    size_t next, float* out) {
  constexpr int wide = sizeof(Codes);
  constexpr int chains = num_chains(MT * PANELS);
  BlockSums<MT, PANELS, chains> sums(x, next);
  const uint8_t* codes = w.codes;
  const int8_t* at = x.codes;
  const auto add_16 = [&](auto chain) WINDLASS_INLINED {
    sums.add_16(chain, [&](int i) WINDLASS_INLINED { return load_codes(codes + wide * i); }, at);
    codes += 4 * wide, at += 16 * kPanelRows;
  };
  int left = inputs / 16;
  for (; left >= chains; left -= chains) unrolled<chains>(add_16);
  for (; left > 0; --left) add_16(std::integral_constant<int, 0>{});
  sums.finish(w.scales, out);
}

// Adds one prompt block for MT rows of a panel. Codes are requantised in registers.
template <int MT>
WINDLASS_INLINE void multiply_packed(const Packed& tile, const BlockPlan& plan,
                                     const PromptPanel& x, float* out) {
  constexpr int chains = kManyRegisters && MT == 1 ? 2 : 1;
  BlockSums<MT, 1, chains> sums(x, 0);
  const uint8_t* codes = tile.codes + static_cast<size_t>(plan.begin) * kTile / 2;
  const int8_t* at = x.codes;
  each_group(tile, plan, [&](const Requantiser& step, int units) WINDLASS_INLINED {
    const auto add_16 = [&](auto chain) WINDLASS_INLINED {
      Codes four[4];
      step.convert(codes, four);
      sums.add_16(chain, [&](int i) WINDLASS_INLINED { return four[i]; }, at);
      codes += 8 * kTile, at += 16 * kPanelRows;
    };
    for (; units >= chains; units -= chains) unrolled<chains>(add_16);
    if (units > 0) add_16(std::integral_constant<int, 0>{});
  });
  sums.finish(plan.scales, out);
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

PromptPanel panel_at(const PromptSizes& sizes, const uint8_t* memory, int begin) {
  const PromptPanel x = sizes.panel(memory);
  const int s = begin / kPromptBlock * kPanelRows;
  return {x.codes + begin * kPanelRows, x.scales + s, x.correction + s};
}

template <bool OFFSETS>
void add_outliers(const GemmArgs& job, const Packed& tile, int first, int last, float* sums) {
  const OutlierColumns& columns = job.chunk_columns(first);
  int32_t outliers_at[kMaxPanels];
  std::copy(columns.quad_starts, columns.quad_starts + (last - first), outliers_at);
  Weights<OFFSETS> weights(tile);
  const auto weight_of = [&](const OutlierColumn& c) WINDLASS_INLINED { return weights.at(c); };
  multiply_columns(columns, 0, padded_in(job.w), last - first, outliers_at, weight_of, sums);
}

// Up to 4 rows: to store requantised codes and to load them again would take longer than the dot products.
template <bool OFFSETS>
void multiply_few(const GemmArgs& job) {
  if constexpr (kRequantisesInRegisters) {
    const PromptSizes sizes(job.w);
    const PackedTiles tiles{job.w};
    const int padded = padded_in(job.w);
    each_chunk(job, [&](int t, int first, int last, Target to) {
      const Packed tile = tiles.at(t);
      each_panel(job, first, last, [&](auto rows, int p) {
        alignas(64) float sums[kPanelRows * kTile] = {};
        BlockPlans<OFFSETS> plans(tile, padded);
        for (int begin = 0; begin < padded; begin += kPromptBlock) {
          multiply_packed<rows>(tile, plans.next(), panel_at(sizes, job.panel(p), begin), sums);
        }
        add_outliers<OFFSETS>(job, tile, first, last, sums);
        store_tile(job, to, t, p * kPanelRows, rows, sums, job.add);
      });
    });
  }
}

template <bool OFFSETS>
void multiply_prompt(const GemmArgs& job) {
  if (kRequantisesInRegisters && job.rows <= kPanelRows) return multiply_few<OFFSETS>(job);
  const PromptSizes sizes(job.w);
  const PackedTiles tiles{job.w};
  const int padded = padded_in(job.w);
  each_chunk(job, [&](int t, int first, int last, Target to) {
    PromptBlock block;
    const int pairs = kHasMultiply64 ? (last - first) / 2 : 0;
    alignas(64) float sums[kMaxPanels][kPanelRows * kTile];
    std::memset(sums, 0, static_cast<size_t>(last - first) * sizeof sums[0]);
    const Packed tile = tiles.at(t);
    BlockPlans<OFFSETS> plans(tile, padded);
    for (int begin = 0; begin < padded; begin += kPromptBlock) {
      const int end = std::min(begin + kPromptBlock, padded);
      unpack_block<OFFSETS>(tile, plans.next(), block);
      const auto panel = [&](int p) { return panel_at(sizes, job.panel(p), begin); };
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
    add_outliers<OFFSETS>(job, tile, first, last, sums[0]);
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
