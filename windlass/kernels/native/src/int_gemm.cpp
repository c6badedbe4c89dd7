// GEMMs of int4, int6, int8 and codebook weights with activations quantised to int8.
//
// Integer dot products within a block, then one multiplication by both scales. With few rows codes
// are unpacked in registers; with many rows a tile is unpacked once into the L1 cache, except on
// NEON, where 8 rows at a time read the packed codes.

#include <cstring>

#include "dots.h"
#include "gemm.h"
#include "int_tile.h"
#include "int_unpack.h"
#include "panels.h"
#include "short_prompt_neon.h"

namespace windlass {

namespace tile {
namespace {

// Adds 16 inputs; returns the address of the next codes.
template <int MT, Coding CODING, bool OFFSETS>
WINDLASS_INLINE const uint8_t* dot16(const uint8_t* codes, const Codebook& book, const int8_t* x,
                                     Dots<MT>& dots) {
  constexpr int wide = sizeof(Codes);
  if constexpr (CODING == Coding::kCodebook) {
    const Codes first = load_codes(codes), second = load_codes(codes + wide);
    const Codes w[4] = {look_up(book, low_nibbles(first)), look_up(book, low_nibbles(second)),
                        look_up(book, high_nibbles(first)), look_up(book, high_nibbles(second))};
    add_dots<8>(dots, [&](int i) WINDLASS_INLINED { return w[i]; }, x);
    return codes + 2 * wide;
  } else if constexpr (CODING == Coding::kSixBits) {
    Codes w[4];
    read_six_bits(codes, w);
    add_dots<6>(dots, [&](int i) WINDLASS_INLINED { return w[i]; }, x);
    return codes + 3 * wide;
  } else if constexpr (CODING == Coding::kNibbles) {
    const Codes first = load_codes(codes), second = load_codes(codes + wide);
    const Codes w[4] = {low_codes<OFFSETS>(first), low_codes<OFFSETS>(second), high_codes<OFFSETS>(first),
                        high_codes<OFFSETS>(second)};
    add_dots<4>(dots, [&](int i) WINDLASS_INLINED { return w[i]; }, x);
    return codes + 2 * wide;
  } else {
    add_dots<8>(dots, [&](int i) WINDLASS_INLINED { return load_codes(codes + wide * i); }, x);
    return codes + 4 * wide;
  }
}

// With few rows the weights come from memory, and hardware prefetchers stop at page ends:
// prefetches 16 inputs into L1, and later ones into L2.
template <Coding CODING>
WINDLASS_INLINE void prefetch_weights(const uint8_t* codes) {
  constexpr bool wide = CODING == Coding::kBytes || CODING == Coding::kSixBits;
  constexpr int bytes = CODING == Coding::kBytes ? 16 * kTile : wide ? 12 * kTile : 8 * kTile;
  constexpr int soon = wide ? 1536 : 1024, before = wide ? 2 * kAhead : kAhead;
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(codes + soon + i);
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(codes + before + i, 0, 2);
}

// Adds MT rows of each of PANELS panels by the outputs of a tile. The panels lie `next` bytes apart.
// BLOCK inputs share a scale of x.
template <int MT, int BLOCK, Coding CODING, bool OFFSETS, int PANELS = 1, class Scale>
WINDLASS_INLINE void multiply(const IntTile<Scale>& tile, IntPanel x, float* out, size_t next = 0) {
  constexpr bool nibbles = CODING == Coding::kNibbles;
  if constexpr (kHasRowLoops && MT == 1 && nibbles) {
    return multiply_1<BLOCK, OFFSETS>(tile.codes, tile.scales, tile.offsets, tile.groups,
                                      tile.blocks,
                                      x.codes, x.next_run(), x.scales, x.sums, out);
  }
  if constexpr (kHasRowLoops && MT == kPanelRows && nibbles && BLOCK == 32) {
    return multiply_panel<OFFSETS>(tile.codes, tile.scales, tile.offsets, tile.groups, tile.blocks,
                                   x.codes, x.scales, x.sums, out);
  }
  const auto of_panel = [next](const auto* first, int p) { return skip_bytes(first, next * p); };
  constexpr int chains = BLOCK == 32 && num_chains(MT * PANELS) > 1 ? 2 : 1;
  Floats acc[PANELS][MT];
  for (int p = 0; p < PANELS; ++p) {
    for (int m = 0; m < MT; ++m) acc[p][m] = load(out + (p * kPanelRows + m) * kTile);
  }
  const uint8_t* codes = tile.codes;
  Codebook book{};
  if constexpr (CODING == Coding::kCodebook) book = load_codebook(tile.codebook);
  for (int g = 0; g < tile.groups; ++g) {
    const Floats scale = scale_at<CODING>(tile, g);
    for (int b = 0; b < tile.blocks; ++b) {
      Dots<MT> dots[PANELS][chains];
      unrolled<PANELS>([&](auto p) WINDLASS_INLINED {
        if constexpr (kHasCodeOffset<CODING, OFFSETS>) {
          start_dots(dots[p][0], load_quad(of_panel(x.correction, p)));
        } else {
          start_dots(dots[p][0]);
        }
        for (int i = 1; i < chains; ++i) start_dots(dots[p][i]);
      });
      x.correction += kPanelRows;
      unrolled<BLOCK / 16>([&](auto half) WINDLASS_INLINED {
        if constexpr (MT <= 3 || PANELS > 1) prefetch_weights<CODING>(codes);
        const uint8_t* const from = codes;
        unrolled<PANELS>([&](auto p) WINDLASS_INLINED {
          codes = dot16<MT, CODING, OFFSETS>(from, book, of_panel(x.codes, p),
                                             dots[p][half % chains]);
        });
        x.codes += 16 * (MT == 1 ? x.rows : kPanelRows);
      });
      unrolled<PANELS>([&](auto p) WINDLASS_INLINED {
        if constexpr (chains > 1) join_dots(dots[p]);
        const Quad x_scale = load_quad(of_panel(x.scales, p));
        unrolled<MT>([&](auto m) WINDLASS_INLINED {
          acc[p][m] = fma_lane<m>(acc[p][m], mul(sum_finish(row_of_dots<m>(dots[p][0])), scale),
                                  x_scale);
        });
      });
      x.scales += kPanelRows;
    }
    if constexpr (OFFSETS) {
      const Floats low = load_scales(tile.offsets + g * kTile);
      unrolled<PANELS>([&](auto p) WINDLASS_INLINED {
        const Quad sums = load_quad(of_panel(x.sums + g * kPanelRows, p));
        unrolled<MT>([&](auto m) WINDLASS_INLINED {
          acc[p][m] = fma_lane<m>(acc[p][m], low, sums);
        });
      });
    }
  }
  for (int p = 0; p < PANELS; ++p) {
    for (int m = 0; m < MT; ++m) store(out + (p * kPanelRows + m) * kTile, acc[p][m]);
  }
}

// Returns a function that dequantises the weight of an outlier from a packed tile.
template <Coding CODING, bool OFFSETS>
WINDLASS_INLINE auto packed_weights(const Weight& w, const IntTile<uint16_t>& tile) {
  return [&](const auto& o) WINDLASS_INLINED {
    return weight_at<CODING, OFFSETS>(w, tile.codes, o.input, scale_at<CODING>(tile, o.group));
  };
}

// With one row a tile takes so little time that the code around the loop matters.
template <int BLOCK, Coding CODING, bool OFFSETS>
void one_row(const GemmArgs& job) {
  const Tiles tiles(job.w);
  const IntPanel x = IntSizes(job.w, 1).panel(job.panel(0));
  const Floats gain = splat(job.gain);
  const int whole = job.w.num_out / kTile, padded = padded_in(job.w);
  each_chunk(job, [&](int t, int, int, Target to) WINDLASS_INLINED {
    const IntTile<uint16_t> tile = tiles.at(t);
    alignas(64) float sums[kTile] = {};
    multiply<1, BLOCK, CODING, OFFSETS>(tile, x, sums);
    if (job.outliers != nullptr) {
      alignas(64) float outlier_sums[kTile] = {};
      int32_t at = 0;
      multiply_rows(job.row_outliers(0), 0, 1, padded, &at,
                    packed_weights<CODING, OFFSETS>(job.w, tile), outlier_sums);
      store(sums, add(load(sums), load(outlier_sums)));
    }
    if (t >= whole) return store_tile(job, to, t, 0, 1, sums, job.add);
    const Floats value = mul(load(sums), gain);
    store(to.first, job.add ? add(load(to.first), value) : value);
  });
}

template <int BLOCK, Coding CODING, bool OFFSETS>
void few_rows(const GemmArgs& job) {
  if (job.rows == 1) return one_row<BLOCK, CODING, OFFSETS>(job);
  const IntSizes sizes(job.w, job.rows);
  const Tiles tiles(job.w);
  const int padded = padded_in(job.w);
  each_chunk(job, [&](int t, int first, int last, Target to) {
    const IntTile<uint16_t> tile = tiles.at(t);
    each_panel(job, first, last, [&](auto rows, int p) {
      alignas(64) float sums[kPanelRows * kTile] = {};
      multiply<rows, BLOCK, CODING, OFFSETS>(tile, sizes.panel(job.panel(p)), sums);
      // Outliers are summed apart and added last, so that the split of a tile into ranges makes no
      // difference.
      alignas(64) float outlier_sums[kPanelRows * kTile] = {};
      const bool has_outliers = job.outliers != nullptr;
      int32_t at[kPanelRows] = {};
      if (has_outliers) {
        multiply_rows(job.row_outliers(p * kPanelRows), job.outlier_bytes, rows, padded, at,
                      packed_weights<CODING, OFFSETS>(job.w, tile), outlier_sums);
      }
      store_tile(job, to, t, p * kPanelRows, rows, sums, job.add,
                 has_outliers ? outlier_sums : nullptr);
    });
  });
}

template <int MT, int BLOCK, bool OFFSETS>
inline void multiply_unpacked(const IntTile<float>& tile, const IntPanel& x, float* out) {
  if constexpr (kHasMultiply4 && MT == kPanelRows && BLOCK == 16) {
    multiply_4<OFFSETS>(tile.codes, tile.scales, tile.shifts, tile.offsets, tile.groups,
                        tile.blocks,
                        x.codes, x.scales, x.sums, out);
  } else {
    multiply<MT, BLOCK, Coding::kBytes, OFFSETS>(tile, x, out);
  }
}

// Prefetches the i-th of `count` shares of the next tile, where no other loop does.
inline void prefetch_next_tile(const uint8_t* from, size_t bytes, int i, int count) {
  const size_t share = bytes / static_cast<size_t>(count);
  const uint8_t* const first = from + share * static_cast<size_t>(i);
  for (size_t at = 0; at < share + 64; at += 64) __builtin_prefetch(first + at);
}

// The contribution of outliers to panels [first, last).
struct OutlierSums {
  alignas(64) float sums[kMaxPanels][kPanelRows * kTile];
  int32_t at[kMaxPanels * kPanelRows];  // next quad of each panel, or next outlier of each row
  const GemmArgs& job;
  int first, panels;
  OutlierColumns columns;
  bool any;

  OutlierSums(const GemmArgs& gemm, int from, int last)
      : job(gemm),
        first(from),
        panels(last - from),
        columns(job.columns ? job.chunk_columns(from) : OutlierColumns{}),
        any(columns.count > 0) {
    if (!any) return;
    std::memset(sums, 0, static_cast<size_t>(panels) * sizeof sums[0]);
    if (columns.by_column) {
      std::copy(columns.quad_starts, columns.quad_starts + panels, at);
    } else {
      std::fill(at, at + panels * kPanelRows, 0);
    }
  }

  // Adds the outliers of inputs [begin, end); ranges must follow one another.
  template <class WeightOf>
  void multiply(int begin, int end, const WeightOf& weight_of) {
    if (!any) return;
    if (columns.by_column) {
      multiply_columns(columns, begin, end, panels, at, weight_of, sums[0]);
    } else {
      const int rows = std::min(panels * kPanelRows, job.rows - first * kPanelRows);
      multiply_rows(job.row_outliers(first * kPanelRows), job.outlier_bytes, rows, end, at,
                    weight_of,
                    sums[0]);
    }
  }
  const float* panel(int p) const { return any ? sums[p] : nullptr; }
};

// Writes the sums of panels [first, last) of a tile.
inline void store_panels(const GemmArgs& job, Target to, int t, int first, int last,
                         const float (*sums)[kPanelRows * kTile], const OutlierSums& outlier_sums) {
  each_panel(job, first, last, [&](auto rows, int p) {
    const float *sum = sums[p - first], *outlier_sum = outlier_sums.panel(p - first);
    if (rows == kPanelRows && job.planes == 1 && (t + 1) * kTile <= job.w.num_out) {
      store_whole(job, to, p * kPanelRows, sum, job.add, outlier_sum);
    } else {
      store_tile(job, to, t, p * kPanelRows, rows, sum, job.add, outlier_sum);
    }
  });
}

// Reads the scales of groups [first, first + count) of a tile; the offsets only if the last group
// ends here.
template <bool OFFSETS>
inline void read_scales(const IntTile<uint16_t>& tile, int first, int count, bool ends,
                        GroupScales* out) {
  for (int g = first; g < first + count; ++g, ++out) {
    Floats offsets = zero();
    if (OFFSETS && ends) offsets = load_f16_fast(tile.offsets + g * kTile);
    out->set(load_f16_fast(tile.scales + g * kTile), offsets);
  }
}

// Multiplies panels in pairs with packed codes, where multiply_16 applies four at a time as far as possible;
// codes of 6 bits are unpacked once for all. A panel of less than 4 rows computes unused rows; the last of an
// odd number of panels is multiplied as with few rows.
template <Coding CODING, bool OFFSETS>
void paired_rows(const GemmArgs& job) {
  constexpr bool nibbles = CODING == Coding::kNibbles;
  const IntSizes sizes(job.w, job.rows);
  const Tiles tiles(job.w);
  each_chunk(job, [&](int t, int first, int last, Target to) {
    alignas(64) float sums[kMaxPanels][kPanelRows * kTile];
    std::memset(sums, 0, static_cast<size_t>(last - first) * sizeof sums[0]);
    OutlierSums outlier_sums(job, first, last);
    const IntTile<uint16_t> tile = tiles.at(t);
    const int group = tile.blocks * 32, padded = padded_in(job.w);
    const int paired = (last - first) / 2 * 2;
    const int in_fours = nibbles && OFFSETS && tile.blocks == 1 ? paired / 4 * 4 : 0;
    // Prefetches the next tile while this one is multiplied, in equal shares.
    const int loops = 2 * (in_fours / 4 + (paired - in_fours) / 2);
    const int64_t step = static_cast<int64_t>(tiles.bytes) / (std::max(loops, 1) * (padded / 32));
    const uint8_t* ahead = tiles.data + tiles.bytes * static_cast<size_t>(t + 1);
    alignas(64) GroupScales all_scales[1 + kMaxInputs / 32];
    GroupScales* const scales = all_scales + 1;
    all_scales[0].set(zero(), zero());
    alignas(64) uint8_t unpacked[CODING == Coding::kSixBits ? kMaxInputs * kTile : 1];
    for (int begin = 0, end; begin < padded; begin = end) {
      end = run_end(begin, group, padded);
      const int groups = ceil_div(end - begin, group), blocks = (end - begin) / 32 / groups;
      read_scales<OFFSETS>(tile, begin / group, groups, end % group == 0, scales);
      const uint8_t* from = tile.codes + code_bytes(job.w, begin);
      if constexpr (CODING == Coding::kSixBits) {
        if (paired > 0) unpack_six_bits(from, end - begin, unpacked);
        from = unpacked;
      }
      for (int p = first, count; p < first + paired; p += count) {
        count = p < first + in_fours ? 4 : 2;
        const IntPanel x = sizes.panel(job.panel(p));
        const int8_t* const x_codes = x.codes + begin * kPanelRows;
        const float* const x_scales = x.scales + begin / 32 * kPanelRows;
        const float* const x_sums = x.sums + begin / group * kPanelRows;
        for (int i = 0; i < kTile; i += 4, ahead += step * groups * blocks) {
          const uint8_t* const codes = from + kSpan * i;
          float* const out = sums[p - first] + i;
          if (nibbles && OFFSETS && count == 4) {
            // int4 weights with offsets have a correction of 0.
            multiply_16(codes, scales[0].half(i), groups, x_codes, x_scales, x_sums, x.correction,
                        job.panel_bytes, ahead, step, out);
          } else {
            multiply_8<nibbles, OFFSETS>(codes, scales[0].half(i), groups, blocks, x_codes, x_scales,
                                         x_sums, job.panel_bytes, ahead, step, out);
          }
        }
      }
      outlier_sums.multiply(begin, end, [&](const auto& o) WINDLASS_INLINED {
        const Floats scale = scales[o.group - begin / group].scales();
        return weight_at<CODING, OFFSETS>(job.w, tile.codes, o.input, scale);
      });
    }
    each_panel(job, first + paired, last, [&](auto rows, int p) {
      multiply<rows, 32, CODING, OFFSETS>(tile, sizes.panel(job.panel(p)), sums[p - first]);
    });
    store_panels(job, to, t, first, last, sums, outlier_sums);
  });
}

// Multiplies panels with packed codes, which are unpacked in registers: 8 rows take as long to multiply as
// a tile takes to store and load. With many registers panels are multiplied in pairs, and one of less than
// 4 rows computes unused rows.
template <int BLOCK, Coding CODING, bool OFFSETS>
void packed_rows(const GemmArgs& job) {
  const IntSizes sizes(job.w, job.rows);
  const Tiles tiles(job.w);
  const int padded = padded_in(job.w);
  each_chunk(job, [&](int t, int first, int last, Target to) {
    alignas(64) float sums[kMaxPanels][kPanelRows * kTile];
    std::memset(sums, 0, static_cast<size_t>(last - first) * sizeof sums[0]);
    OutlierSums outlier_sums(job, first, last);
    const IntTile<uint16_t> tile = tiles.at(t);
    int paired = first;
    if constexpr (kManyRegisters) {
      for (; paired + 2 <= last; paired += 2) {
        multiply<kPanelRows, BLOCK, CODING, OFFSETS, 2>(tile, sizes.panel(job.panel(paired)),
                                                        sums[paired - first], job.panel_bytes);
      }
    }
    each_panel(job, paired, last, [&](auto rows, int p) {
      multiply<rows, BLOCK, CODING, OFFSETS>(tile, sizes.panel(job.panel(p)), sums[p - first]);
    });
    outlier_sums.multiply(0, padded, packed_weights<CODING, OFFSETS>(job.w, tile));
    store_panels(job, to, t, first, last, sums, outlier_sums);
  });
}

// Inputs are added in the same order as with few rows: a row's result does not depend on the batch.
template <int BLOCK, bool OFFSETS>
void many_rows(const GemmArgs& job) {
  const IntSizes sizes(job.w, job.rows);
  const Tiles tiles(job.w);
  each_chunk(job, [&](int t, int first, int last, Target to) {
    Unpacked scratch;
    alignas(64) float sums[kMaxPanels][kPanelRows * kTile];
    std::memset(sums, 0, static_cast<size_t>(last - first) * sizeof sums[0]);
    OutlierSums outlier_sums(job, first, last);
    const IntTile<uint16_t> packed = tiles.at(t);
    const int group = packed.blocks * BLOCK;
    const int padded = padded_in(job.w);
    const bool unpacks = job.w.kind != kInt8;
    for (int begin = 0, end; begin < padded; begin = end) {
      end = run_end(begin, group, padded);
      const IntTile<float> tile = unpack<OFFSETS>(job, packed, begin, end, scratch);
      const auto panel = [&](int p) {
        IntPanel x = sizes.panel(job.panel(p));
        x.codes += begin * kPanelRows;
        x.scales += begin / BLOCK * kPanelRows;
        x.correction += begin / BLOCK * kPanelRows;
        x.sums += begin / group * kPanelRows;
        return x;
      };
      each_panel(job, first, last, [&](auto rows, int p) {
        prefetch_output(job, to, p);
        if (!unpacks) prefetch_next_tile(packed.codes + tiles.bytes, tiles.bytes, p - first,
                                         last - first);
        multiply_unpacked<rows, BLOCK, OFFSETS>(tile, panel(p), sums[p - first]);
      });
      outlier_sums.multiply(begin, end, [&](const auto& o) WINDLASS_INLINED {
        const Floats scale = load(tile.scales + (o.group - begin / group) * kTile);
        return weight_at<Coding::kBytes, OFFSETS>(job.w, tile.codes, o.input - begin, scale);
      });
    }
    store_panels(job, to, t, first, last, sums, outlier_sums);
  });
}

// Whether codes of 6 bits, and of 4 bits, are unpacked in registers for any number of rows: on x86-64 the
// loops are limited by loads, or without VNNI by the signs of int8 codes. On NEON tiles are unpacked for loops
// in assembly.
#if defined(WINDLASS_AVX2)
constexpr bool kKeepsSixBits = true;
#else
constexpr bool kKeepsSixBits = false;
#endif
#if defined(WINDLASS_WORD_SUMS)
constexpr bool kKeepsNibbles = true;
#else
constexpr bool kKeepsNibbles = kManyRegisters;
#endif

template <int BLOCK, bool OFFSETS>
void dispatch_rows(const GemmArgs& job) {
  if (job.rows >= kMinUnpackRows) {
    if constexpr (kHasRowLoops && BLOCK == 32) {
      if (job.w.kind == kInt4) {
        if (OFFSETS && is_short_prompt(job)) return short_prompt_gemm(job);
        return paired_rows<Coding::kNibbles, OFFSETS>(job);
      }
      if (job.w.kind == kInt6) return paired_rows<Coding::kSixBits, OFFSETS>(job);
      if (job.w.kind == kInt8) return paired_rows<Coding::kBytes, OFFSETS>(job);
    }
    if constexpr (kKeepsNibbles) {
      if (job.w.kind == kInt4) return packed_rows<BLOCK, Coding::kNibbles, OFFSETS>(job);
    }
    if constexpr (kManyRegisters) {
      if (job.w.kind == kInt8) return packed_rows<BLOCK, Coding::kBytes, OFFSETS>(job);
      if constexpr (!OFFSETS) {
        if (job.w.kind == kCodebook4) return packed_rows<BLOCK, Coding::kCodebook, false>(job);
      }
    }
    if constexpr (kKeepsSixBits) {
      if (job.w.kind == kInt6) return packed_rows<BLOCK, Coding::kSixBits, OFFSETS>(job);
    }
    return many_rows<BLOCK, OFFSETS>(job);
  }
  if (job.w.kind == kInt4) return few_rows<BLOCK, Coding::kNibbles, OFFSETS>(job);
  if (job.w.kind == kInt6) return few_rows<BLOCK, Coding::kSixBits, OFFSETS>(job);
  if (job.w.kind == kInt8) return few_rows<BLOCK, Coding::kBytes, OFFSETS>(job);
  if constexpr (!OFFSETS) return few_rows<BLOCK, Coding::kCodebook, false>(job);
}

}  // namespace
}  // namespace tile

void int_gemm(const GemmArgs& job) {
  using namespace tile;
  const bool offsets = job.w.has_offsets != 0;
  if (block_size(job.w) == 32) return offsets ? dispatch_rows<32, true>(job) : dispatch_rows<32, false>(job);
  return offsets ? dispatch_rows<16, true>(job) : dispatch_rows<16, false>(job);
}

}  // namespace windlass
