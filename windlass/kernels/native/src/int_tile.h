// Tiles of int4 and int8 weights: where they lie, and what a code means.

#pragma once

#include "simd.h"
#include "weight.h"

namespace windlass::tile {

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

template <bool MINS>
WINDLASS_INLINE Codes low_codes(Codes both) {
  if constexpr (kSignedNibbles && !MINS) return low_signed(both);
  return low_nibbles(both);
}
template <bool MINS>
WINDLASS_INLINE Codes high_codes(Codes both) {
  if constexpr (kSignedNibbles && !MINS) return high_signed(both);
  return high_nibbles(both);
}

// Whether stored codes are too large.
template <bool NIBBLES, bool MINS>
constexpr bool kOffCentre = kUnsignedCodes || (NIBBLES && !MINS && !kSignedNibbles);

// The codes of input k. Unsigned, since dividing what may be negative takes as long as the rest.
template <bool NIBBLES, bool MINS>
WINDLASS_INLINE Floats code_at(const uint8_t* codes, uint32_t k) {
  const int in_16 = static_cast<int>(k % 16);
  if constexpr (NIBBLES && kSignedNibbles && !MINS) {
    return signed_nibbles_at(codes + k / 16 * 8 * kTile, in_16);
  } else if constexpr (NIBBLES) {
    return nibbles_at(codes + k / 16 * 8 * kTile, in_16);
  }
  return bytes_at(codes + k / 16 * 16 * kTile, in_16);
}

// The weights of one input, as inputs that were not rounded meet them.
template <bool NIBBLES, bool MINS>
WINDLASS_INLINE Floats weight_at(const Weight& w, const uint8_t* codes, int k, Floats scale) {
  Floats code = code_at<NIBBLES, MINS>(codes, static_cast<uint32_t>(k));
  if constexpr (kOffCentre<NIBBLES, MINS>) {
    code = sub(code, splat(static_cast<float>(code_offset(w))));
  }
  return mul(code, scale);
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

}  // namespace windlass::tile
