// Products of int4, int8 and codebook weights with inputs that were rounded to int8.
//
// Dot gemm of whole numbers within a block, then one multiplication by both scales. With few
// rows codes are unpacked in registers; with many a tile is unpacked once into the nearest cache, but
// on NEON 8 rows at a time meet them as they are packed.

#include <cstring>

#include "dots.h"
#include "gemm.h"
#include "int_amx.h"
#include "int_tile.h"
#include "int_unpack.h"
#include "pairs_neon.h"
#include "panels.h"
#include "rows_neon.h"

namespace windlass {

namespace tile {
namespace {

// Adds 16 inputs; returns where the codes of the next ones lie.
template <int MT, Coding CODING, bool MINS>
WINDLASS_INLINE const uint8_t* dot16(const uint8_t* codes, const Codebook& book, const int8_t* x,
                                     Dots<MT>& dots) {
  constexpr int wide = sizeof(Codes);
  if constexpr (CODING == Coding::kCodebook) {
    const Codes first = load_codes(codes), second = load_codes(codes + wide);
    const Codes w[4] = {look_up(book, low_nibbles(first)), look_up(book, low_nibbles(second)),
                        look_up(book, high_nibbles(first)), look_up(book, high_nibbles(second))};
    add_dots<false>(dots, [&](int i) WINDLASS_INLINED { return w[i]; }, x);
    return codes + 2 * wide;
  } else if constexpr (CODING == Coding::kNibbles) {
    const Codes first = load_codes(codes), second = load_codes(codes + wide);
    const Codes w[4] = {low_codes<MINS>(first), low_codes<MINS>(second), high_codes<MINS>(first),
                        high_codes<MINS>(second)};
    add_dots<true>(dots, [&](int i) WINDLASS_INLINED { return w[i]; }, x);
    return codes + 2 * wide;
  } else {
    add_dots<false>(dots, [&](int i) WINDLASS_INLINED { return load_codes(codes + wide * i); }, x);
    return codes + 4 * wide;
  }
}

// With few rows the weights come from memory, and the CPU's own guesses stop at pages: asks for 16
// inputs, soon for the first cache, and some time before for the second.
template <Coding CODING>
WINDLASS_INLINE void fetch_ahead(const uint8_t* codes) {
  constexpr bool wide = CODING == Coding::kBytes;
  constexpr int bytes = 16 * kTile / (wide ? 1 : 2);
  constexpr int soon = wide ? 1536 : 1024, before = wide ? 2 * kAhead : kAhead;
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(codes + soon + i);
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(codes + before + i, 0, 2);
}

// Adds to MT rows x the outputs of a tile. BLOCK inputs share a scale of x.
template <int MT, int BLOCK, Coding CODING, bool MINS, class Scale>
WINDLASS_INLINE void multiply(const IntTile<Scale>& tile, IntPanel x, float* out) {
  constexpr bool nibbles = CODING == Coding::kNibbles;
  if constexpr (kHasRowLoops && MT == 1 && nibbles) {
    return multiply_1<BLOCK, MINS>(tile.codes, tile.scales, tile.offsets, tile.groups, tile.blocks,
                                   x.codes, x.next_run(), x.scales, x.sums, out);
  }
  if constexpr (kHasRowLoops && MT == kPanel && nibbles && BLOCK == 32) {
    return multiply_panel<MINS>(tile.codes, tile.scales, tile.offsets, tile.groups, tile.blocks,
                                x.codes, x.scales, x.sums, out);
  }
  Floats acc[MT];
  for (int m = 0; m < MT; ++m) acc[m] = load(out + m * kTile);
  const uint8_t* codes = tile.codes;
  Codebook book{};
  if constexpr (CODING == Coding::kCodebook) book = load_codebook(tile.codebook);
  for (int g = 0; g < tile.groups; ++g) {
    const Floats scale = scale_at<CODING>(tile, g);
    for (int b = 0; b < tile.blocks; ++b) {
      Dots<MT> dots;
      if constexpr (kOffCentre<CODING, MINS>) {
        start_dots(dots, load_quad(x.centre));
        x.centre += kPanel;
      } else {
        start_dots(dots);
      }
      for (int k = 0; k < BLOCK; k += 16) {
        if constexpr (MT <= 3) fetch_ahead<CODING>(codes);
        codes = dot16<MT, CODING, MINS>(codes, book, x.codes, dots);
        x.codes += 16 * (MT == 1 ? x.rows : kPanel);
      }
      const Quad x_scale = load_quad(x.scales);
      x.scales += kPanel;
      unrolled<MT>([&](auto m) WINDLASS_INLINED {
        acc[m] = fma_lane<m>(acc[m], mul(sum_finish(row_of_dots<m>(dots)), scale), x_scale);
      });
    }
    if constexpr (MINS) {
      const Floats low = load_scales(tile.offsets + g * kTile);
      const Quad sums = load_quad(x.sums + g * kPanel);
      unrolled<MT>([&](auto m) WINDLASS_INLINED { acc[m] = fma_lane<m>(acc[m], low, sums); });
    }
  }
  for (int m = 0; m < MT; ++m) store(out + m * kTile, acc[m]);
}

// The weights that outliers of a packed tile meet.
template <Coding CODING, bool MINS>
WINDLASS_INLINE auto packed_weights(const Weight& w, const IntTile<uint16_t>& tile) {
  return [&](const Outlier& o) WINDLASS_INLINED {
    return weight_at<CODING, MINS>(w, tile.codes, o.input, scale_at<CODING>(tile, o.group));
  };
}

// With one row a tile takes so little time that what surrounds the gemm counts.
template <int BLOCK, Coding CODING, bool MINS>
void one_row(const Product& job) {
  const Tiles tiles(job.w);
  const IntPanel x = IntSizes(job.w, 1).panel(job.panel(0));
  const Floats gain = splat(job.gain);
  const int whole = job.w.num_out / kTile, padded = padded_in(job.w);
  each_piece(job, [&](int t, int, int, Target to) WINDLASS_INLINED {
    const IntTile<uint16_t> tile = tiles.at(t);
    alignas(64) float sums[kTile] = {};
    multiply<1, BLOCK, CODING, MINS>(tile, x, sums);
    if (job.outliers != nullptr) {
      alignas(64) float rest[kTile] = {};
      int32_t at = 0;
      multiply_rows(job.row_outliers(0), 0, 1, padded, &at,
                    packed_weights<CODING, MINS>(job.w, tile), rest);
      store(sums, add(load(sums), load(rest)));
    }
    if (t >= whole) return store_tile(job, to, t, 0, 1, sums, job.add);
    const Floats value = mul(load(sums), gain);
    store(to.first, job.add ? add(load(to.first), value) : value);
  });
}

template <int BLOCK, Coding CODING, bool MINS>
void few_rows(const Product& job) {
  if (job.rows == 1) return one_row<BLOCK, CODING, MINS>(job);
  const IntSizes sizes(job.w, job.rows);
  const Tiles tiles(job.w);
  const int padded = padded_in(job.w);
  each_piece(job, [&](int t, int first, int last, Target to) {
    const IntTile<uint16_t> tile = tiles.at(t);
    each_panel(job, first, last, [&](auto rows, int p) {
      alignas(64) float sums[kPanel * kTile] = {};
      multiply<rows, BLOCK, CODING, MINS>(tile, sizes.panel(job.panel(p)), sums);
      // Outliers are summed on their own and added last: where a tile is cut makes no difference then.
      alignas(64) float rest[kPanel * kTile] = {};
      const bool more = job.outliers != nullptr;
      int32_t at[kPanel] = {};
      if (more) {
        multiply_rows(job.row_outliers(p * kPanel), job.outlier_bytes, rows, padded, at,
                      packed_weights<CODING, MINS>(job.w, tile), rest);
      }
      store_tile(job, to, t, p * kPanel, rows, sums, job.add, more ? rest : nullptr);
    });
  });
}

template <int MT, int BLOCK, bool MINS>
inline void multiply_unpacked(const IntTile<float>& tile, const IntPanel& x, float* out) {
  if constexpr (kHasMultiply4 && MT == kPanel && BLOCK == 16) {
    multiply_4<MINS>(tile.codes, tile.scales, tile.shifts, tile.offsets, tile.groups, tile.blocks,
                     x.codes, x.scales, x.sums, out);
  } else {
    multiply<MT, BLOCK, Coding::kBytes, MINS>(tile, x, out);
  }
}

// Asks for the i-th of `count` shares of the next tile, where nothing else reads it beforehand.
inline void fetch_next(const uint8_t* from, size_t bytes, int i, int count) {
  const size_t share = bytes / static_cast<size_t>(count);
  const uint8_t* const first = from + share * static_cast<size_t>(i);
  for (size_t at = 0; at < share + 64; at += 64) __builtin_prefetch(first + at);
}

// What the outliers of panels [first, last) add to their sums.
struct Rest {
  alignas(64) float sums[kMostPanels][kPanel * kTile];
  int32_t at[kMostPanels * kPanel];  // how far each panel has come, or each row
  const Product& job;
  int first, panels;
  OutlierColumns columns;
  bool any;

  Rest(const Product& gemm, int from, int last)
      : job(gemm),
        first(from),
        panels(last - from),
        columns(job.columns ? job.piece_columns(from) : OutlierColumns{}),
        any(columns.count > 0) {
    if (!any) return;
    std::memset(sums, 0, static_cast<size_t>(panels) * sizeof sums[0]);
    if (columns.pay) {
      std::copy(columns.firsts, columns.firsts + panels, at);
    } else {
      std::fill(at, at + panels * kPanel, 0);
    }
  }

  // Adds those of inputs [begin, end); runs follow one another.
  template <class WeightOf>
  void multiply(int begin, int end, const WeightOf& weight_of) {
    if (!any) return;
    if (columns.pay) {
      multiply_columns(columns, begin, end, panels, at, weight_of, sums[0]);
    } else {
      const int rows = std::min(panels * kPanel, job.rows - first * kPanel);
      multiply_rows(job.row_outliers(first * kPanel), job.outlier_bytes, rows, end, at, weight_of,
                    sums[0]);
    }
  }
  const float* panel(int p) const { return any ? sums[p] : nullptr; }
};

// Writes the sums of panels [first, last) of a tile.
inline void store_panels(const Product& job, Target to, int t, int first, int last,
                         const float (*sums)[kPanel * kTile], const Rest& rest) {
  each_panel(job, first, last, [&](auto rows, int p) {
    const float *sum = sums[p - first], *more = rest.panel(p - first);
    if (rows == kPanel && job.planes == 1 && (t + 1) * kTile <= job.w.num_out) {
      store_whole(job, to, p * kPanel, sum, job.add, more);
    } else {
      store_tile(job, to, t, p * kPanel, rows, sum, job.add, more);
    }
  });
}

// The scales of groups [first, first + count) of a tile; without the minima of one that goes on.
template <bool MINS>
inline void read_scales(const IntTile<uint16_t>& tile, int first, int count, bool ends,
                        GroupScales* out) {
  for (int g = first; g < first + count; ++g, ++out) {
    const Floats scale = load_half(tile.scales + g * kTile);
    store(out->scales, scale);
    store(out->shifts, mul(scale, splat(-kSumStart)));
    if constexpr (MINS) store(out->offsets, ends ? load_half(tile.offsets + g * kTile) : zero());
  }
}

// Panels in pairs, which meet codes as they are packed. One of less than 4 rows ends with what nobody
// reads; the last of an odd number is multiplied as with few rows.
template <Coding CODING, bool MINS>
void paired_rows(const Product& job) {
  constexpr bool nibbles = CODING == Coding::kNibbles;
  const IntSizes sizes(job.w, job.rows);
  const Tiles tiles(job.w);
  each_piece(job, [&](int t, int first, int last, Target to) {
    alignas(64) float sums[kMostPanels][kPanel * kTile];
    std::memset(sums, 0, static_cast<size_t>(last - first) * sizeof sums[0]);
    Rest rest(job, first, last);
    const IntTile<uint16_t> tile = tiles.at(t);
    const int group = tile.blocks * 32, padded = padded_in(job.w);
    // The next tile is asked for while this one is multiplied.
    const int paired = (last - first) / 2 * 2;
    const int64_t step = static_cast<int64_t>(tiles.bytes) / (std::max(paired, 1) * (padded / 32));
    const uint8_t* ahead = tiles.data + tiles.bytes * static_cast<size_t>(t + 1);
    alignas(64) GroupScales scales[kMostInputs / 32];
    for (int begin = 0, end; begin < padded; begin = end) {
      end = run_end(begin, group, padded);
      const int groups = ceil_div(end - begin, group), blocks = (end - begin) / 32 / groups;
      read_scales<MINS>(tile, begin / group, groups, end % group == 0, scales);
      for (int p = first; p < first + paired; p += 2) {
        const IntPanel x = sizes.panel(job.panel(p));
        for (int i = 0; i < kTile; i += 4, ahead += step * groups * blocks) {
          const uint8_t* codes = tile.codes + begin * kTile / (nibbles ? 2 : 1) + kSpan * i;
          multiply_8<nibbles, MINS>(codes, scales[0].scales + i, groups, blocks,
                                    x.codes + begin * kPanel, x.scales + begin / 32 * kPanel,
                                    x.sums + begin / group * kPanel, job.panel_bytes, ahead,
                                    step, sums[p - first] + i);
        }
      }
      rest.multiply(begin, end, [&](const auto& o) WINDLASS_INLINED {
        const Floats scale = load(scales[o.group - begin / group].scales);
        return weight_at<CODING, MINS>(job.w, tile.codes, o.input, scale);
      });
    }
    each_panel(job, first + paired, last, [&](auto rows, int p) {
      multiply<rows, 32, CODING, MINS>(tile, sizes.panel(job.panel(p)), sums[p - first]);
    });
    store_panels(job, to, t, first, last, sums, rest);
  });
}

// Sums go through the inputs in the same order as with few rows: a row's result does not depend on
// the rows beside it.
template <int BLOCK, bool MINS>
void many_rows(const Product& job) {
  const IntSizes sizes(job.w, job.rows);
  const Tiles tiles(job.w);
  each_piece(job, [&](int t, int first, int last, Target to) {
    Unpacked room;
    alignas(64) float sums[kMostPanels][kPanel * kTile];
    std::memset(sums, 0, static_cast<size_t>(last - first) * sizeof sums[0]);
    Rest rest(job, first, last);
    const IntTile<uint16_t> packed = tiles.at(t);
    const int group = packed.blocks * BLOCK;
    const int padded = padded_in(job.w);
    const bool unpacks = has_nibbles(job.w);
    for (int begin = 0, end; begin < padded; begin = end) {
      end = run_end(begin, group, padded);
      const IntTile<float> tile = unpack<MINS>(job, packed, begin, end, room);
      const auto panel = [&](int p) {
        IntPanel x = sizes.panel(job.panel(p));
        x.codes += begin * kPanel;
        x.scales += begin / BLOCK * kPanel;
        x.centre += begin / BLOCK * kPanel;
        x.sums += begin / group * kPanel;
        return x;
      };
      if (kHasAmx && job.squares != nullptr) {
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
      rest.multiply(begin, end, [&](const auto& o) WINDLASS_INLINED {
        const Floats scale = load(tile.scales + (o.group - begin / group) * kTile);
        return weight_at<Coding::kBytes, MINS>(job.w, tile.codes, o.input - begin, scale);
      });
    }
    store_panels(job, to, t, first, last, sums, rest);
  });
}

template <int BLOCK, bool MINS>
void with_block(const Product& job) {
  if (job.rows >= kManyRows) {
    if constexpr (kHasRowLoops && BLOCK == 32) {
      if (job.w.kind == kInt4) return paired_rows<Coding::kNibbles, MINS>(job);
      if (job.w.kind == kInt8) return paired_rows<Coding::kBytes, MINS>(job);
    }
    return many_rows<BLOCK, MINS>(job);
  }
  if (job.w.kind == kInt4) return few_rows<BLOCK, Coding::kNibbles, MINS>(job);
  if (job.w.kind == kInt8) return few_rows<BLOCK, Coding::kBytes, MINS>(job);
  if constexpr (!MINS) return few_rows<BLOCK, Coding::kCodebook, false>(job);
}

}  // namespace
}  // namespace tile

void int_product(const Product& job) {
  using namespace tile;
  const bool offsets = job.w.has_mins != 0;
  if (block_size(job.w) == 32) return offsets ? with_block<32, true>(job) : with_block<32, false>(job);
  return offsets ? with_block<16, true>(job) : with_block<16, false>(job);
}

}  // namespace windlass
