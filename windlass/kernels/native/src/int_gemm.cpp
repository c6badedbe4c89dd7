// Products of int4 and int8 weights with inputs that were rounded to int8.
//
// Dot products of whole numbers within a block, then one multiplication by both scales. With few
// rows codes are unpacked in registers; with many a tile is unpacked once into the nearest cache.

#include <cstring>

#include "dots.h"
#include "gemm.h"
#include "int_amx.h"
#include "panels.h"
#include "rows_neon.h"

namespace windlass {

namespace tile {
namespace {

// A run of inputs of one tile. Scale is uint16_t (half) where it was packed, float where unpacked.
template <class Scale>
struct IntTile {
  const uint8_t* codes;
  const Scale* scales;
  const Scale* mins;
  const float* shifts;  // of unpacked tiles: see multiply_4
  int groups;
  int blocks;  // in a group
};

// Adds 16 inputs; returns where the codes of the next ones lie.
template <int MT, bool NIBBLES>
WINDLASS_INLINE const uint8_t* dot16(const uint8_t* codes, const int8_t* x, Dots<MT>& dots) {
  constexpr int wide = sizeof(Codes);
  if constexpr (NIBBLES) {
    const Codes first = load_codes(codes), second = load_codes(codes + wide);
    const Codes w[4] = {low_nibbles(first), low_nibbles(second), high_nibbles(first),
                        high_nibbles(second)};
    add_dots<true>(dots, [&](int i) WINDLASS_INLINED { return w[i]; }, x);
    return codes + 2 * wide;
  } else {
    add_dots<false>(dots, [&](int i) WINDLASS_INLINED { return load_codes(codes + wide * i); }, x);
    return codes + 4 * wide;
  }
}

constexpr int kAhead = 4096;  // bytes

// Adds to MT rows x the outputs of a tile. BLOCK inputs share a scale of x.
template <int MT, int BLOCK, bool NIBBLES, bool MINS, class Scale>
WINDLASS_INLINE void multiply(const IntTile<Scale>& tile, IntPanel x, float* out) {
  if constexpr (kHasRowLoops && MT == 1 && NIBBLES) {
    return multiply_1<BLOCK, MINS>(tile.codes, tile.scales, tile.mins, tile.groups, tile.blocks,
                                   x.codes, x.scales, x.centre, x.sums, out);
  }
  Floats acc[MT];
  for (int m = 0; m < MT; ++m) acc[m] = load(out + m * kTile);
  const uint8_t* codes = tile.codes;
  for (int g = 0; g < tile.groups; ++g) {
    const Floats scale = load_scales(tile.scales + g * kTile);
    for (int b = 0; b < tile.blocks; ++b) {
      Dots<MT> dots;
      if constexpr (kUnsignedCodes || (NIBBLES && !MINS)) {
        start_dots(dots, load_quad(x.centre));
        x.centre += kPanel;
      } else {
        start_dots(dots);
      }
      for (int k = 0; k < BLOCK; k += 16) {
        // With few rows the weights come from memory; the CPU's own guesses stop at pages.
        if constexpr (MT <= 2 && NIBBLES) __builtin_prefetch(codes + kAhead);
        codes = dot16<MT, NIBBLES>(codes, x.codes, dots);
        x.codes += 16 * kPanel;
      }
      const Quad x_scale = load_quad(x.scales);
      x.scales += kPanel;
      unrolled<MT>([&](auto m) WINDLASS_INLINED {
        acc[m] = fma_lane<m>(acc[m], mul(sum_finish(row_of_dots<m>(dots)), scale), x_scale);
      });
    }
    if constexpr (MINS) {
      const Floats low = load_scales(tile.mins + g * kTile);
      const Quad sums = load_quad(x.sums + g * kPanel);
      unrolled<MT>([&](auto m) WINDLASS_INLINED { acc[m] = fma_lane<m>(acc[m], low, sums); });
    }
  }
  for (int m = 0; m < MT; ++m) store(out + m * kTile, acc[m]);
}

// The codes of input k. Unsigned, since dividing what may be negative takes as long as the rest.
template <bool NIBBLES>
WINDLASS_INLINE Floats code_at(const uint8_t* codes, uint32_t k) {
  const int in_16 = static_cast<int>(k % 16);
  if constexpr (NIBBLES) return nibbles_at(codes + k / 16 * 8 * kTile, in_16);
  return bytes_at(codes + k / 16 * 16 * kTile, in_16);
}

// The weights of one input, as inputs that were not rounded meet them.
template <bool NIBBLES, bool MINS, class Scale>
WINDLASS_INLINE Floats weight_at(const Weight& w, const IntTile<Scale>& tile, int k, int group) {
  Floats code = code_at<NIBBLES>(tile.codes, static_cast<uint32_t>(k));
  if constexpr (kUnsignedCodes || (NIBBLES && !MINS)) {
    code = sub(code, splat(static_cast<float>(code_offset(w))));
  }
  return mul(code, load_scales(tile.scales + group * kTile));
}

// Adds to out[row][output] what the outliers of `rows` rows contribute, row by row.
template <bool NIBBLES, bool MINS>
inline void multiply_outliers(const Product& job, int row, int rows, const IntTile<uint16_t>& tile,
                              float* out) {
  for (int m = 0; m < rows; ++m, out += kTile) {
    const Outliers x = row_outliers(job.row_outliers(row + m));
    Floats acc = load(out);
    for (const Outlier* o = x.list; o < x.list + x.count; ++o) {
      acc = fma(acc, weight_at<NIBBLES, MINS>(job.w, tile, o->input, o->group), splat(o->x));
    }
    store(out, acc);
  }
}

// Where the tiles of a weight lie: found once, since it takes divisions.
struct Tiles {
  const uint8_t* data;
  size_t bytes, scales;
  int groups, blocks;

  explicit Tiles(const Weight& w)
      : data(w.data),
        bytes(tile_bytes(w)),
        scales(scale_bytes(w)),
        groups(num_groups(w)),
        blocks(padded_in(w) / groups / block_size(w)) {}

  IntTile<uint16_t> at(int t) const {
    const uint8_t* tile = data + static_cast<size_t>(t) * bytes;
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(tile);
    return {tile + scales, halves, halves + groups * kTile, nullptr, groups, blocks};
  }
};

template <int BLOCK, bool NIBBLES, bool MINS>
void few_rows(const Product& job) {
  const IntSizes sizes(job.w);
  const Tiles tiles(job.w);
  each_piece(job, [&](int t, int first, int last, Target to) {
    const IntTile<uint16_t> tile = tiles.at(t);
    each_panel(job, first, last, [&](auto rows, int p) {
      alignas(64) float sums[kPanel * kTile] = {};
      multiply<rows, BLOCK, NIBBLES, MINS>(tile, sizes.panel(job.panel(p)), sums);
      // Outliers are summed on their own and added last: where a tile is cut makes no difference then.
      alignas(64) float rest[kPanel * kTile] = {};
      const bool more = job.outliers != nullptr;
      if (more) multiply_outliers<NIBBLES, MINS>(job, p * kPanel, rows, tile, rest);
      store_tile(job, to, t, p * kPanel, rows, sums, job.add, more ? rest : nullptr);
    });
  });
}

constexpr int kMostInputs = 16384 / kTile;  // of an unpacked tile: 16 KiB of codes

struct Unpacked {
  alignas(64) uint8_t codes[kMostInputs * kTile];
  alignas(64) float scales[kMostInputs / 16 * kTile];
  alignas(64) float mins[kMostInputs / 16 * kTile];
  alignas(64) float shifts[kMostInputs / 16 * kTile];
};

// Where a run of inputs that begins at k ends: after whole groups, or within one that is too long.
int run_end(int k, int group, int padded) {
  if (group <= kMostInputs) return std::min(k + kMostInputs / group * group, padded);
  return std::min({k + kMostInputs, (k / group + 1) * group, padded});
}

// Inputs [begin, end) of a tile. With NIBBLES only the scales are unpacked.
template <bool NIBBLES, bool MINS>
IntTile<float> unpack(const Product& job, const IntTile<uint16_t>& tile, int begin, int end,
                      Unpacked& out) {
  const int block = block_size(job.w);
  const int group = tile.blocks * block;
  const int first = begin / group;
  const int groups = ceil_div(end - begin, group);
  for (int g = 0; g < groups; ++g) {
    const Floats scale = load_half(tile.scales + (first + g) * kTile);
    store(out.scales + g * kTile, scale);
    if constexpr (kHasMultiply4) store(out.shifts + g * kTile, mul(scale, splat(-kSumStart)));
    if constexpr (MINS) {
      // A group that was cut takes its minimum once, with its last part.
      const bool ends = end % group == 0;
      store(out.mins + g * kTile, ends ? load_half(tile.mins + (first + g) * kTile) : zero());
    }
  }
  const int blocks = std::min(group, end - begin) / block;
  if (job.w.kind == kInt8) {
    const uint8_t* codes = tile.codes + static_cast<size_t>(begin) * kTile;
    return {codes, out.scales, out.mins, out.shifts, groups, blocks};
  }
  const uint8_t* from = tile.codes + static_cast<size_t>(begin) * kTile / 2;
  if constexpr (NIBBLES) return {from, out.scales, out.mins, out.shifts, groups, blocks};
  uint8_t* to = out.codes;
  constexpr int wide = sizeof(Codes);
  for (int k = begin; k < end; k += 16, from += 2 * wide, to += 4 * wide) {
    __builtin_prefetch(from + kAhead);
    for (int i = 0; i < 2; ++i) {
      const Codes both = load_codes(from + wide * i);
      Codes low = low_nibbles(both), high = high_nibbles(both);
      if constexpr (!MINS && !kUnsignedCodes) low = subtract(low, 8), high = subtract(high, 8);
      store_codes(to + wide * i, low);
      store_codes(to + wide * (2 + i), high);
    }
  }
  return {out.codes, out.scales, out.mins, out.shifts, groups, blocks};
}

template <int MT, int BLOCK, bool MINS>
inline void multiply_unpacked(const IntTile<float>& tile, const IntPanel& x, float* out) {
  if constexpr (kHasMultiply4 && MT == kPanel) {
    multiply_4<BLOCK, MINS>(tile.codes, tile.scales, tile.shifts, tile.mins, tile.groups,
                            tile.blocks, x.codes, x.scales, x.sums, out);
  } else {
    multiply<MT, BLOCK, false, MINS>(tile, x, out);
  }
}

// Asks for the i-th of `count` shares of the next tile, where nothing else reads it beforehand.
inline void fetch_next(const uint8_t* from, size_t bytes, int i, int count) {
  const size_t share = bytes / static_cast<size_t>(count);
  const uint8_t* const first = from + share * static_cast<size_t>(i);
  for (size_t at = 0; at < share + 64; at += 64) __builtin_prefetch(first + at);
}

// Two panels. One of less than 4 rows ends with what nobody reads.
inline void multiply_pair(const Product& job, const IntTile<float>& tile, const IntPanel& x,
                          float* out) {
  const uint8_t* ahead = tile.codes + kBytesAhead;
  for (int i = 0; i < kTile; i += 4, ahead += 160 * tile.groups * tile.blocks) {
    multiply_8(tile.codes + 4 * i, tile.scales + i, tile.shifts + i, tile.mins + i, tile.groups,
               tile.blocks, x.codes, x.scales, x.sums, job.panel_bytes, ahead, out + i);
  }
}

// Sums go through the inputs in the same order as with few rows: a row's result does not depend on
// the rows beside it. NIBBLES: there are two panels, which meet the codes as they are packed.
template <int BLOCK, bool NIBBLES, bool MINS>
void many_rows(const Product& job) {
  const IntSizes sizes(job.w);
  const Tiles tiles(job.w);
  each_piece(job, [&](int t, int first, int last, Target to) {
    Unpacked room;
    alignas(64) float sums[kMostPanels][kPanel * kTile];
    alignas(64) float rest[kMostPanels][kPanel * kTile];
    std::memset(sums, 0, static_cast<size_t>(last - first) * sizeof sums[0]);
    OutlierColumns columns{};
    int32_t outliers_at[kMostPanels];
    if (job.columns != nullptr) {
      std::memset(rest, 0, static_cast<size_t>(last - first) * sizeof rest[0]);
      columns = outlier_columns(job.w, most_outliers(job.w), job.cut * kPanel,
                                job.piece_columns(first));
      std::copy(columns.firsts, columns.firsts + (last - first), outliers_at);
    }
    const IntTile<uint16_t> packed = tiles.at(t);
    const int group = packed.blocks * BLOCK;
    const int padded = padded_in(job.w);
    const bool unpacks = job.w.kind == kInt4;
    for (int begin = 0, end; begin < padded; begin = end) {
      end = run_end(begin, group, padded);
      const IntTile<float> tile = unpack<NIBBLES, MINS>(job, packed, begin, end, room);
      const auto panel = [&](int p) {
        IntPanel x = sizes.panel(job.panel(p));
        x.codes += begin * kPanel;
        x.scales += begin / BLOCK * kPanel;
        x.centre += begin / BLOCK * kPanel;
        x.sums += begin / group * kPanel;
        return x;
      };
      if constexpr (NIBBLES) {
        multiply_pair(job, tile, panel(first), sums[0]);
      } else if (kHasAmx && job.squares != nullptr) {
        each_square(job, first, last, [&](int p, int rows) {
          const int8_t* x = reinterpret_cast<const int8_t*>(job.square(p)) + begin * kSquare;
          multiply_square<BLOCK, MINS>(tile, panel, p, x, rows, sums[p - first]);
        });
      } else {
        each_panel(job, first, last, [&](auto rows, int p) {
          fetch_target(job, to, p);
          if (!unpacks) fetch_next(packed.codes + tiles.bytes, tiles.bytes, p - first, last - first);
          multiply_unpacked<rows, BLOCK, MINS>(tile, panel(p), sums[p - first]);
        });
      }
      if (job.columns != nullptr) {
        const auto weight_of = [&](const OutlierColumn& c) WINDLASS_INLINED {
          return weight_at<NIBBLES, MINS>(job.w, tile, c.input - begin, c.group - begin / group);
        };
        multiply_columns(columns, begin, end, last - first, outliers_at, weight_of, rest[0]);
      }
    }
    each_panel(job, first, last, [&](auto rows, int p) {
      const float* more = job.columns != nullptr ? rest[p - first] : nullptr;
      if (rows == kPanel && job.planes == 1 && (t + 1) * kTile <= job.w.num_out) {
        store_whole(job, to, p * kPanel, sums[p - first], job.add, more);
      } else {
        store_tile(job, to, t, p * kPanel, rows, sums[p - first], job.add, more);
      }
    });
  });
}

template <int BLOCK, bool MINS>
void with_block(const Product& job) {
  if (job.rows >= kManyRows) {
    if constexpr (kHasRowLoops && BLOCK == 32 && MINS) {
      if (job.w.kind == kInt4 && job.num_panels() == 2) return many_rows<BLOCK, true, MINS>(job);
    }
    return many_rows<BLOCK, false, MINS>(job);
  }
  if (job.w.kind == kInt4) return few_rows<BLOCK, true, MINS>(job);
  return few_rows<BLOCK, false, MINS>(job);
}

}  // namespace
}  // namespace tile

void int_product(const Product& job) {
  using namespace tile;
  const bool mins = job.w.has_mins != 0;
  if (block_size(job.w) == 32) return mins ? with_block<32, true>(job) : with_block<32, false>(job);
  return mins ? with_block<16, true>(job) : with_block<16, false>(job);
}

}  // namespace windlass
