// Unpacks runs of inputs of tiles with 4-bit codes into bytes, which many rows then meet in the nearest cache.

#pragma once

#include <algorithm>

#include "gemm.h"
#include "int_tile.h"

namespace windlass::tile {

constexpr int kAhead = 4096;  // bytes

constexpr int kMostInputs = 16384 / kTile;  // of an unpacked tile: 16 KiB of codes

struct Unpacked {
  alignas(64) uint8_t codes[kMostInputs * kTile];
  alignas(64) float scales[kMostInputs / 16 * kTile];
  alignas(64) float offsets[kMostInputs / 16 * kTile];
  alignas(64) float shifts[kMostInputs / 16 * kTile];
};

// Where a run of inputs that begins at k ends: after whole groups, or within one that is too long.
inline int run_end(int k, int group, int padded) {
  if (group <= kMostInputs) return std::min(k + kMostInputs / group * group, padded);
  return std::min({k + kMostInputs, (k / group + 1) * group, padded});
}

// What becomes of the low and the high halves of bytes.
template <bool MINS>
struct WholeNumbers {
  WINDLASS_INLINE Codes low(Codes both) const { return centred(low_codes<MINS>(both)); }
  WINDLASS_INLINE Codes high(Codes both) const { return centred(high_codes<MINS>(both)); }

 private:
  static WINDLASS_INLINE Codes centred(Codes codes) {
    if constexpr (!MINS && !kUnsignedCodes && !kSignedNibbles) return subtract(codes, 8);
    return codes;
  }
};

struct Values {
  Codebook book;

  WINDLASS_INLINE Codes low(Codes both) const { return look_up(book, low_nibbles(both)); }
  WINDLASS_INLINE Codes high(Codes both) const { return look_up(book, high_nibbles(both)); }
};

template <class Meaning>
inline void unpack_codes(const uint8_t* from, int inputs, uint8_t* to, const Meaning& meaning) {
  constexpr int wide = sizeof(Codes);
  for (int k = 0; k < inputs; k += 16, from += 2 * wide, to += 4 * wide) {
    __builtin_prefetch(from + kAhead);
    for (int i = 0; i < 2; ++i) {
      const Codes both = load_codes(from + wide * i);
      store_codes(to + wide * i, meaning.low(both));
      store_codes(to + wide * (2 + i), meaning.high(both));
    }
  }
}

// Inputs [begin, end) of a tile.
template <bool MINS>
inline IntTile<float> unpack(const Product& job, const IntTile<uint16_t>& tile, int begin, int end,
                             Unpacked& out) {
  const int block = block_size(job.w);
  const int group = tile.blocks * block;
  const int first = begin / group;
  const int groups = ceil_div(end - begin, group);
  for (int g = 0; g < groups; ++g) {
    const Floats scale = scale_at<Coding::kCodebook>(tile, first + g);
    store(out.scales + g * kTile, scale);
    if constexpr (kHasMultiply4) store(out.shifts + g * kTile, mul(scale, splat(-kSumStart)));
    if constexpr (MINS) {
      // A group that was cut takes its minimum once, with its last part.
      const bool ends = end % group == 0;
      store(out.offsets + g * kTile, ends ? load_half(tile.offsets + (first + g) * kTile) : zero());
    }
  }
  const int blocks = std::min(group, end - begin) / block;
  if (job.w.kind == kInt8) {
    const uint8_t* codes = tile.codes + static_cast<size_t>(begin) * kTile;
    return {codes, out.scales, out.offsets, out.shifts, groups, blocks};
  }
  const uint8_t* from = tile.codes + static_cast<size_t>(begin) * kTile / 2;
  if (job.w.kind == kCodebook4) {
    unpack_codes(from, end - begin, out.codes, Values{load_codebook(tile.codebook)});
  } else {
    unpack_codes(from, end - begin, out.codes, WholeNumbers<MINS>{});
  }
  return {out.codes, out.scales, out.offsets, out.shifts, groups, blocks};
}

}  // namespace windlass::tile
