// Dequantises tiles of int4, int6, int8 and codebook weights to bfloat16, for prompts on CPUs with AMX. On
// other CPUs this header is empty.

#pragma once

#include <algorithm>
#include <cstring>

#include "int_tile.h"

#if defined(WINDLASS_AMX)

namespace windlass::tile {

// Converts the codes of a group of inputs, bytes from 0 to 255: code * scale + offset.
class Dequantiser {
 public:
  Dequantiser(Floats scale, Floats offset)
      : scale_(_mm512_mul_ps(scale.v, _mm512_set1_ps(256.0f))), offset_(_mm512_sub_ps(offset.v, scale_)) {}

  // Writes 4 inputs of 16 outputs in the layout of bfloat16 weights, rounded to nearest.
  WINDLASS_INLINE void convert(Codes codes, uint16_t* to) const {
    const __m512i pairs[2] = {
        joined(value(_mm512_slli_epi32(codes.v, 15)), value(_mm512_slli_epi32(codes.v, 7))),
        joined(value(_mm512_srli_epi32(codes.v, 1)), value(_mm512_srli_epi32(codes.v, 9)))};
    _mm512_storeu_si512(to, pairs[0]);
    _mm512_storeu_si512(to + 2 * kTile, pairs[1]);
  }

 private:
  // The value of codes in bits 15 to 22: with the exponent of 1 the number is 1 + code / 256.
  WINDLASS_INLINE __m512i value(__m512i codes) const {
    constexpr int masked_or = 0xea;  // (a & b) | c
    const __m512i number = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(0x007f8000),
                                                     _mm512_set1_epi32(0x3f800000), masked_or);
    const __m512 value = _mm512_fmadd_ps(_mm512_castsi512_ps(number), scale_, offset_);
    // Half of the last bit that bfloat16 keeps.
    return _mm512_add_epi32(_mm512_castps_si512(value), _mm512_set1_epi32(0x8000));
  }
  static WINDLASS_INLINE __m512i joined(__m512i even, __m512i odd) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
  }

  __m512 scale_, offset_;
};

// Converts 16 inputs; returns the address of the next codes.
template <Coding CODING>
WINDLASS_INLINE const uint8_t* dequantise_16(const uint8_t* codes, const Codebook& book, const Dequantiser& group,
                                             uint16_t* to) {
  constexpr int wide = sizeof(Codes);
  constexpr int next = 4 * kTile;  // values
  __builtin_prefetch(codes + 4096);
  __builtin_prefetch(codes + 4096 + 64);
  if constexpr (CODING == Coding::kBytes) {
    __builtin_prefetch(codes + 4096 + 128);
    __builtin_prefetch(codes + 4096 + 192);
    for (int i = 0; i < 4; ++i) group.convert(load_codes(codes + wide * i), to + next * i);
    return codes + 4 * wide;
  } else if constexpr (CODING == Coding::kSixBits) {
    __builtin_prefetch(codes + 4096 + 128);
    Codes four[4];
    read_six_bits(codes, four);
    for (int i = 0; i < 4; ++i) group.convert(four[i], to + next * i);
    return codes + 3 * wide;
  } else {
    const auto value = [&](Codes nibbles) WINDLASS_INLINED {
      if constexpr (CODING == Coding::kCodebook) return look_up(book, nibbles);
      return nibbles;
    };
    for (int i = 0; i < 2; ++i) {
      const Codes both = load_codes(codes + wide * i);
      group.convert(value(low_nibbles(both)), to + next * i);
      group.convert(value(high_nibbles(both)), to + next * (2 + i));
    }
    return codes + 2 * wide;
  }
}

// Writes inputs [begin, end) of a tile, multiples of 16, and zeros up to a multiple of 32.
template <Coding CODING>
void dequantise(const Weight& w, const IntTile<uint16_t>& tile, int begin, int end, uint16_t* to) {
  Codebook book{};
  if constexpr (CODING == Coding::kCodebook) book = load_codebook(tile.codebook);
  const int group = w.group == w.num_in ? padded_in(w) : w.group;
  const Floats zero_point = splat(static_cast<float>(code_offset(w)));
  const uint8_t* codes = tile.codes + code_bytes(w, begin);
  for (int k = begin; k < end;) {
    const int g = k / group, last = std::min(end, (g + 1) * group);
    const Floats scale = scale_at<CODING>(tile, g);
    const Floats offset = w.has_offsets ? load_scales(tile.offsets + g * kTile) : zero();
    const Dequantiser dequantiser(scale, sub(offset, mul(zero_point, scale)));
    for (; k < last; k += 16, to += 16 * kTile) codes = dequantise_16<CODING>(codes, book, dequantiser, to);
  }
  if ((end - begin) % 32 != 0) std::memset(to, 0, 16 * kTile * sizeof(uint16_t));
}

inline void dequantise(const Weight& w, const IntTile<uint16_t>& tile, int begin, int end, uint16_t* to) {
  switch (w.kind) {
    case kInt4:
      return dequantise<Coding::kNibbles>(w, tile, begin, end, to);
    case kInt6:
      return dequantise<Coding::kSixBits>(w, tile, begin, end, to);
    case kInt8:
      return dequantise<Coding::kBytes>(w, tile, begin, end, to);
    default:
      return dequantise<Coding::kCodebook>(w, tile, begin, end, to);
  }
}

}  // namespace windlass::tile

#endif
