// x86-64 with AVX-512: tiles of 16 outputs in 512-bit registers.
//
// Without VNNI, vpmaddubsw multiplies unsigned by signed bytes and adds two products in 16 bits with
// saturation. Codes of x lie in -127 to 127, so no sum saturates: two products of int4 codes are at most
// 2 * 15 * 127 = 3810, and those of the magnitudes of int8 codes at most 2 * 128 * 127 = 32512.
// Operations other than GEMMs use 8 values, as with AVX2.

#pragma once

#include "simd_avx2.h"

namespace windlass::tile {

struct Floats {
  __m512 v;
};
struct Sums {
  __m512i v;
};
struct Codes {  // 16 outputs x 4 inputs
  __m512i v;
};

struct Quad {
  const float* p;
};
struct QuadInt {
  const int32_t* p;
};
struct Bf16 {
  uint16_t bits;
};

inline Floats zero() { return {_mm512_setzero_ps()}; }
inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats load_f16_fast(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Floats load_scales(const float* p) { return load(p); }
inline Floats load_scales(const uint16_t* p) { return load_f16_fast(p); }
inline Floats load_scales(const Bf16* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline Floats add(Floats x, Floats y) { return {_mm512_add_ps(x.v, y.v)}; }
inline Floats sub(Floats x, Floats y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline Floats mul(Floats x, Floats y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline Floats fma(Floats acc, Floats x, Floats y) { return {_mm512_fmadd_ps(x.v, y.v, acc.v)}; }
inline Floats absolute(Floats x) { return {_mm512_abs_ps(x.v)}; }
inline Floats maximum_abs(Floats x, Floats y) {
  return {_mm512_castsi512_ps(
      _mm512_max_epi32(_mm512_castps_si512(x.v), _mm512_castps_si512(y.v)))};
}
inline Floats divide_or_zero(Floats x, Floats y) {
  return {_mm512_maskz_div_ps(_mm512_cmp_ps_mask(y.v, _mm512_setzero_ps(), _CMP_GT_OQ), x.v, y.v)};
}
inline Floats ceil_12_bits(Floats x) {
  const __m512i up = _mm512_add_epi32(_mm512_castps_si512(x.v), _mm512_set1_epi32(0xfff));
  return {_mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(~0xfff)))};
}
inline Quad load_quad(const float* p) { return {p}; }
inline QuadInt load_quad(const int32_t* p) { return {p}; }
template <int LANE>
inline Floats fma_lane(Floats acc, Floats x, Quad q) {
  return {_mm512_fmadd_ps(x.v, _mm512_set1_ps(q.p[LANE]), acc.v)};
}

inline Codes load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_codes(uint8_t* p, Codes x) { _mm512_storeu_si512(p, x.v); }
inline Codes low_nibbles(Codes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline Codes high_nibbles(Codes x) {
  return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))};
}
inline Codes low_6_bits(Codes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(63))}; }
inline Codes join_top_bits(Codes x, Codes y, Codes z) {
  constexpr int either = 0xf8;  // a | (b & c)
  const __m512i first = _mm512_and_si512(_mm512_srli_epi16(x.v, 2), _mm512_set1_epi8(0x30));
  const __m512i second = _mm512_ternarylogic_epi32(first, _mm512_srli_epi16(y.v, 4),
                                                   _mm512_set1_epi8(0x0c), either);
  return {_mm512_ternarylogic_epi32(second, _mm512_srli_epi16(z.v, 6), _mm512_set1_epi8(3), either)};
}
inline Codes subtract(Codes x, int8_t y) { return {_mm512_sub_epi8(x.v, _mm512_set1_epi8(y))}; }
inline Floats codes_at(const uint8_t* p, int shift, int mask) {
  const __m512i by = _mm512_srl_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(shift));
  return {_mm512_cvtepi32_ps(_mm512_and_si512(by, _mm512_set1_epi32(mask)))};
}
inline Floats nibbles_at(const uint8_t* p, int i) {
  return codes_at(p + i % 8 / 4 * 64, 8 * (i % 4) + i / 8 * 4, 15);
}
inline Floats bytes_at(const uint8_t* p, int i) {
  if constexpr (kUnsignedCodes) return codes_at(p + i / 4 * 64, 8 * (i % 4), 255);
  const __m128i shift = _mm_cvtsi32_si128(24 - 8 * (i % 4));
  const __m512i up = _mm512_sll_epi32(_mm512_loadu_si512(p + i / 4 * 64), shift);
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(up, 24))};
}

inline Floats load_int8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}

struct Words {
  __m512i v;
};
inline Words round_to_words(Floats x, int32_t more) {
  const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(x.v), _mm512_set1_epi32(more));
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, whole, _mm512_slli_epi32(whole, 16))};
}
inline void requantise(Codes both, Words factor, Words start, Codes& low, Codes& high) {
  const __m512i nibble = _mm512_set1_epi16(15), high_bytes = _mm512_set1_epi16(-256);
  const auto made = [&](__m512i codes) {
    return _mm512_add_epi16(_mm512_mullo_epi16(codes, factor.v), start.v);
  };
  const auto joined = [&](__m512i even, __m512i odd) {
    constexpr int either = 0xf8;  // a | (b & c)
    return _mm512_ternarylogic_epi32(_mm512_srli_epi16(made(even), 8), made(odd), high_bytes, either);
  };
  low.v = joined(_mm512_and_si512(both.v, nibble),
                 _mm512_and_si512(_mm512_srli_epi16(both.v, 8), nibble));
  high.v = joined(_mm512_and_si512(_mm512_srli_epi16(both.v, 4), nibble),
                  _mm512_srli_epi16(both.v, 12));
}

// The 16 values of nibbles, with 128 added if kUnsignedCodes.
struct Codebook {
  __m512i v;
};
inline Codebook load_codebook(const int8_t* p) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i offset = _mm_set1_epi8(kUnsignedCodes ? -128 : 0);
  return {_mm512_broadcast_i32x4(_mm_xor_si128(values, offset))};
}
inline Codes look_up(Codebook book, Codes x) { return {_mm512_shuffle_epi8(book.v, x.v)}; }

inline Sums sum_start() { return {_mm512_setzero_si512()}; }
template <int LANE>
inline Sums sum_start(QuadInt q) {
  return {_mm512_set1_epi32(q.p[LANE])};
}
inline Sums load_sums(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Sums add(Sums x, Sums y) { return {_mm512_add_epi32(x.v, y.v)}; }
inline Floats sum_finish(Sums x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline __m512i broadcast4(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
#if defined(WINDLASS_VNNI512)
template <int LANE>
inline Sums dot_unsigned(Sums acc, Codes w, Inputs16 x) {
  return {_mm512_dpbusd_epi32(acc.v, w.v, broadcast4(x.p + 4 * LANE))};
}
// Codes are never signed here: see kUnsignedCodes.
template <int LANE>
inline Sums dot_signed(Sums acc, Codes w, Inputs16 x) {
  return dot_unsigned<LANE>(acc, w, x);
}
#else
template <int LANE>
inline __m512i pair_dots(Codes w, Inputs16 x) {
  return _mm512_maddubs_epi16(w.v, broadcast4(x.p + 4 * LANE));
}
inline __m512i add_words(__m512i x, __m512i y) { return _mm512_add_epi16(x, y); }
inline Sums add_pairs(Sums acc, __m512i words) {
  return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(words, _mm512_set1_epi16(1)))};
}
// Moves the sign from the weight to the input.
template <int LANE>
inline Sums dot_signed(Sums acc, Codes w, Inputs16 x) {
  const __m512i in = broadcast4(x.p + 4 * LANE);
  const __m512i turned = _mm512_mask_sub_epi8(in, _mm512_movepi8_mask(w.v),
                                              _mm512_setzero_si512(), in);
  return add_pairs(acc, _mm512_maddubs_epi16(_mm512_abs_epi8(w.v), turned));
}
#endif

struct Table16 {
  __m512 v;
};
inline Table16 load_table(const float* p) { return {_mm512_loadu_ps(p)}; }
// 32 bytes hold 4 inputs of 16 outputs: two in the low nibbles, two in the high ones.
inline void lookup32(const Table16& table, const uint8_t* codes, Floats scale, float* out) {
  for (int i = 0; i < 2; ++i) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * i));
    const __m512i wide = _mm512_cvtepu8_epi32(bytes);
    const __m512i high = _mm512_srli_epi32(wide, 4);
    // Only the lowest 4 bits of an index count.
    store(out + 16 * i, mul({_mm512_permutexvar_ps(wide, table.v)}, scale));
    store(out + 32 + 16 * i, mul({_mm512_permutexvar_ps(high, table.v)}, scale));
  }
}

}  // namespace windlass::tile
