// Tiles of int4, int6, int8 and codebook weights: layout and decoding of codes.

#pragma once

#include "simd.h"
#include "weight.h"

namespace windlass::tile {

// Storage of codes: one byte each, four in three bytes, two per byte, or two per byte as codebook indices.
enum class Coding { kBytes, kSixBits, kNibbles, kCodebook };

// A range of inputs of one tile. Scale is uint16_t (float16) for packed tiles, float for unpacked
// ones.
template <class Scale>
struct IntTile {
  const uint8_t* codes;
  const Scale* scales;
  const Scale* offsets;
  const float* shifts;  // unpacked tiles only: see multiply_4
  int groups;
  int blocks;  // per group
  // Codebook tiles only.
  const int8_t* codebook = nullptr;
  const int8_t* sub_scales = nullptr;
  int scale_shift = 0;  // group g has scale g >> scale_shift
};

template <Coding CODING, class Scale>
WINDLASS_INLINE Floats scale_at(const IntTile<Scale>& tile, int g) {
  if constexpr (CODING == Coding::kCodebook) {
    if (tile.sub_scales != nullptr) {
      const Floats scale = load_scales(tile.scales + (g >> tile.scale_shift) * kTile);
      return mul(load_int8(tile.sub_scales + g * kTile), scale);
    }
  }
  return load_scales(tile.scales + g * kTile);
}

template <bool OFFSETS>
WINDLASS_INLINE Codes low_codes(Codes both) {
  if constexpr (kSignedNibbles && !OFFSETS) return low_signed(both);
  return low_nibbles(both);
}
template <bool OFFSETS>
WINDLASS_INLINE Codes high_codes(Codes both) {
  if constexpr (kSignedNibbles && !OFFSETS) return high_signed(both);
  return high_nibbles(both);
}

// Whether stored codes carry an offset that must be subtracted.
template <Coding CODING, bool OFFSETS>
constexpr bool kHasCodeOffset =
    kUnsignedCodes || CODING == Coding::kSixBits || (CODING == Coding::kNibbles && !OFFSETS && !kSignedNibbles);

// Reads the four vectors of 16 inputs, as codes from 0 to 63.
WINDLASS_INLINE void read_six_bits(const uint8_t* codes, Codes (&out)[4]) {
  static_assert(sizeof(Codes) == kInt6Vector);
  const Codes first = load_codes(codes), second = load_codes(codes + kInt6Vector),
              third = load_codes(codes + 2 * kInt6Vector);
  out[0] = low_6_bits(first), out[1] = low_6_bits(second), out[2] = low_6_bits(third);
  out[3] = join_top_bits(first, second, third);
}

WINDLASS_INLINE Floats six_bits_at(const uint8_t* codes, int in_16) {
  Codes four[4];
  read_six_bits(codes, four);
  alignas(64) uint8_t bytes[16 * kTile];
  for (size_t i = 0; i < 4; ++i) store_codes(bytes + i * sizeof(Codes), four[i]);
  return bytes_at(bytes, in_16);
}

// Looks up the values of one input in the codes of 16 inputs.
WINDLASS_INLINE Floats values_at(const int8_t* codebook, const uint8_t* codes, int in_16) {
  const Codebook book = load_codebook(codebook);
  alignas(64) uint8_t bytes[8 * kTile];
  for (size_t i = 0; i < sizeof bytes; i += sizeof(Codes)) {
    const Codes both = load_codes(codes + i);
    store_codes(bytes + i, look_up(book, in_16 < 8 ? low_nibbles(both) : high_nibbles(both)));
  }
  return bytes_at(bytes, in_16 % 8);
}

// Returns the codes of input k. k is unsigned, since dividing a signed value takes as long as the
// rest.
template <Coding CODING, bool OFFSETS>
WINDLASS_INLINE Floats code_at(const Weight& w, const uint8_t* codes, uint32_t k) {
  const int in_16 = static_cast<int>(k % 16);
  if constexpr (CODING == Coding::kCodebook) {
    return values_at(w.codebook, codes + k / 16 * 8 * kTile, in_16);
  } else if constexpr (CODING == Coding::kSixBits) {
    return six_bits_at(codes + k / 16 * 12 * kTile, in_16);
  } else if constexpr (CODING == Coding::kNibbles && kSignedNibbles && !OFFSETS) {
    return signed_nibbles_at(codes + k / 16 * 8 * kTile, in_16);
  } else if constexpr (CODING == Coding::kNibbles) {
    return nibbles_at(codes + k / 16 * 8 * kTile, in_16);
  }
  return bytes_at(codes + k / 16 * 16 * kTile, in_16);
}

// Dequantises the weights of one input, for inputs that are not quantised.
template <Coding CODING, bool OFFSETS>
WINDLASS_INLINE Floats weight_at(const Weight& w, const uint8_t* codes, int k, Floats scale) {
  Floats code = code_at<CODING, OFFSETS>(w, codes, static_cast<uint32_t>(k));
  if constexpr (kHasCodeOffset<CODING, OFFSETS>) {
    code = sub(code, splat(static_cast<float>(code_offset(w))));
  }
  return mul(code, scale);
}

// Addresses of a weight's tiles, computed once since that needs divisions.
struct Tiles {
  const uint8_t* data;
  size_t bytes, scales;
  int groups, blocks, num_halves;
  const int8_t* codebook;
  int scale_shift = -1;  // -1: no sub-scales

  explicit Tiles(const Weight& w)
      : data(w.data),
        bytes(tile_bytes(w)),
        scales(scale_bytes(w)),
        groups(num_groups(w)),
        blocks(padded_in(w) / groups / block_size(w)),
        num_halves(num_scales(w) * kTile),
        codebook(w.codebook) {
    for (int left = w.super_group / w.group; left > 0; left /= 2) ++scale_shift;
  }

  IntTile<uint16_t> at(int t) const {
    const uint8_t* tile = data + static_cast<size_t>(t) * bytes;
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(tile);
    IntTile<uint16_t> at{tile + scales, halves, halves + num_halves, nullptr, groups, blocks};
    at.codebook = codebook;
    if (scale_shift >= 0) {
      at.sub_scales = reinterpret_cast<const int8_t*>(halves + num_halves);
      at.scale_shift = scale_shift;
    }
    return at;
  }
};

}  // namespace windlass::tile
