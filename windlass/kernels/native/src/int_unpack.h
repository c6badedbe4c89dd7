// Unpacks ranges of inputs of tiles of 4 or 6 bits to int8 in the L1 cache, for GEMMs of many rows.

#pragma once

#include <algorithm>

#include "gemm.h"
#include "int_tile.h"

namespace windlass::tile {

constexpr int kAhead = 4096;  // bytes

constexpr int kMaxInputs = 16384 / kTile;  // of an unpacked tile: 16 KiB of codes

struct Unpacked {
  alignas(64) uint8_t codes[kMaxInputs * kTile];
  alignas(64) float scales[kMaxInputs / 16 * kTile];
  alignas(64) float offsets[kMaxInputs / 16 * kTile];
  alignas(64) float shifts[kMaxInputs / 16 * kTile];
};

// Returns the end of the range of inputs that begins at k: after whole groups, or inside a group
// that is too long.
inline int run_end(int k, int group, int padded) {
  if (group <= kMaxInputs) return std::min(k + kMaxInputs / group * group, padded);
  return std::min({k + kMaxInputs, (k / group + 1) * group, padded});
}

// Decoders of the low and the high nibbles of bytes.
template <bool OFFSETS>
struct IntegerCodes {
  WINDLASS_INLINE Codes low(Codes both) const { return centred(low_codes<OFFSETS>(both)); }
  WINDLASS_INLINE Codes high(Codes both) const { return centred(high_codes<OFFSETS>(both)); }

 private:
  static WINDLASS_INLINE Codes centred(Codes codes) {
    if constexpr (!OFFSETS && !kUnsignedCodes && !kSignedNibbles) return subtract(codes, 8);
    return codes;
  }
};

struct CodebookValues {
  Codebook book;

  WINDLASS_INLINE Codes low(Codes both) const { return look_up(book, low_nibbles(both)); }
  WINDLASS_INLINE Codes high(Codes both) const { return look_up(book, high_nibbles(both)); }
};

template <class Decoder>
inline void unpack_codes(const uint8_t* from, int inputs, uint8_t* to, const Decoder& decoder) {
  constexpr int wide = sizeof(Codes);
  for (int k = 0; k < inputs; k += 16, from += 2 * wide, to += 4 * wide) {
    __builtin_prefetch(from + kAhead);
    for (int i = 0; i < 2; ++i) {
      const Codes both = load_codes(from + wide * i);
      store_codes(to + wide * i, decoder.low(both));
      store_codes(to + wide * (2 + i), decoder.high(both));
    }
  }
}

// For dot products of 8 bits: see dots.h.
inline void unpack_six_bits(const uint8_t* from, int inputs, uint8_t* to) {
  for (int k = 0; k < inputs; k += 16, from += 12 * kTile, to += 16 * kTile) {
    for (int i = 0; i < 12 * kTile; i += 64) __builtin_prefetch(from + kAhead + i);
    Codes four[4];
    read_six_bits(from, four);
    for (int i = 0; i < 4; ++i) {
      store_codes(to + kInt6Vector * i, kUnsignedCodes ? four[i] : subtract(four[i], 32));
    }
  }
}

// Unpacks inputs [begin, end) of a tile.
template <bool OFFSETS>
inline IntTile<float> unpack(const GemmArgs& job, const IntTile<uint16_t>& tile, int begin, int end,
                             Unpacked& out) {
  const int block = block_size(job.w);
  const int group = tile.blocks * block;
  const int first = begin / group;
  const int groups = ceil_div(end - begin, group);
  for (int g = 0; g < groups; ++g) {
    const Floats scale = scale_at<Coding::kCodebook>(tile, first + g);
    store(out.scales + g * kTile, scale);
    if constexpr (kHasMultiply4) store(out.shifts + g * kTile, mul(scale, splat(-kSumStart)));
    if constexpr (OFFSETS) {
      // A group split over several ranges adds its offset once, with its last range.
      const bool ends = end % group == 0;
      store(out.offsets + g * kTile,
            ends ? load_f16_fast(tile.offsets + (first + g) * kTile) : zero());
    }
  }
  const int blocks = std::min(group, end - begin) / block;
  const uint8_t* from = tile.codes + code_bytes(job.w, begin);
  if (job.w.kind == kInt8) {
    return {from, out.scales, out.offsets, out.shifts, groups, blocks};
  }
  if (job.w.kind == kInt6) {
    unpack_six_bits(from, end - begin, out.codes);
  } else if (job.w.kind == kCodebook4) {
    unpack_codes(from, end - begin, out.codes, CodebookValues{load_codebook(tile.codebook)});
  } else {
    unpack_codes(from, end - begin, out.codes, IntegerCodes<OFFSETS>{});
  }
  return {out.codes, out.scales, out.offsets, out.shifts, groups, blocks};
}

}  // namespace windlass::tile
