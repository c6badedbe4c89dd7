// x86-64 with AVX2, FMA and F16C; with VNNI a dot product is one instruction.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "layout.h"

namespace windlass {

#if defined(WINDLASS_AMX)
constexpr const char* kSimdName = "AVX-512 VNNI, BF16 and AMX";
#elif defined(WINDLASS_DPBF16)
constexpr const char* kSimdName = "AVX-512 VNNI and BF16";
#elif defined(WINDLASS_VNNI512)
constexpr const char* kSimdName = "AVX-512 VNNI";
#elif defined(WINDLASS_AVX512)
constexpr const char* kSimdName = "AVX-512 BW";
#elif defined(__AVXVNNI__)
constexpr const char* kSimdName = "AVX2 with VNNI";
#else
constexpr const char* kSimdName = "AVX2";
#endif

struct F32x8 {
  __m256 v;
};
struct I32x8 {
  __m256i v;
};
struct Codes32 {
  __m256i v;
};
// Broadcasts read memory, so these are only pointers.
struct Inputs16 {
  const int8_t* p;
};
struct Quad {
  const float* p;
};
struct QuadInt {
  const int32_t* p;
};

inline F32x8 zero() { return {_mm256_setzero_ps()}; }
inline F32x8 splat(float x) { return {_mm256_set1_ps(x)}; }
inline F32x8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
constexpr float kF16Unit = 1.0f;
inline F32x8 load_f16_fast(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store(float* p, F32x8 x) { _mm256_storeu_ps(p, x.v); }
inline F32x8 add(F32x8 x, F32x8 y) { return {_mm256_add_ps(x.v, y.v)}; }
inline F32x8 mul(F32x8 x, F32x8 y) { return {_mm256_mul_ps(x.v, y.v)}; }
inline F32x8 fma(F32x8 acc, F32x8 x, F32x8 y) { return {_mm256_fmadd_ps(x.v, y.v, acc.v)}; }

inline F32x8 sub(F32x8 x, F32x8 y) { return {_mm256_sub_ps(x.v, y.v)}; }
inline F32x8 divide(F32x8 x, F32x8 y) { return {_mm256_div_ps(x.v, y.v)}; }
inline F32x8 divide_or_zero(F32x8 x, F32x8 y) {
  return {_mm256_and_ps(_mm256_cmp_ps(y.v, _mm256_setzero_ps(), _CMP_GT_OQ), divide(x, y).v)};
}
inline F32x8 ceil_12_bits(F32x8 x) {
  const __m256i up = _mm256_add_epi32(_mm256_castps_si256(x.v), _mm256_set1_epi32(0xfff));
  return {_mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(~0xfff)))};
}
inline F32x8 absolute(F32x8 x) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.v)}; }
// maxps returns its second operand where either is NaN.
inline F32x8 clamp_min(F32x8 x, F32x8 bound) { return {_mm256_max_ps(bound.v, x.v)}; }
// One of the two maxima is the NaN, and a NaN or-ed with any value stays NaN. Without NaN both are
// equal.
inline F32x8 maximum(F32x8 x, F32x8 y) {
  return {_mm256_or_ps(_mm256_max_ps(x.v, y.v), _mm256_max_ps(y.v, x.v))};
}
// Non-negative floats compare like their bits, and NaN is above infinity.
inline F32x8 maximum_abs(F32x8 x, F32x8 y) {
  return {_mm256_castsi256_ps(
      _mm256_max_epi32(_mm256_castps_si256(x.v), _mm256_castps_si256(y.v)))};
}
inline F32x8 exp2_int(F32x8 shifted) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)))};
}
inline void store_sums4(float* p, F32x8 x, F32x8 y, F32x8 z, F32x8 w) {
  const auto halves = [](F32x8 v) {
    return _mm_add_ps(_mm256_castps256_ps128(v.v), _mm256_extractf128_ps(v.v, 1));
  };
  const __m128 xy = _mm_hadd_ps(halves(x), halves(y));
  _mm_storeu_ps(p, _mm_hadd_ps(xy, _mm_hadd_ps(halves(z), halves(w))));
}
inline void store_interleaved4(float* p, F32x8 x, F32x8 y, F32x8 z, F32x8 w) {
  const auto pairs = [](__m256 a, __m256 b, auto&& pick) {
    return _mm256_castpd_ps(pick(_mm256_castps_pd(a), _mm256_castps_pd(b)));
  };
  const auto low = [](__m256d a, __m256d b) { return _mm256_unpacklo_pd(a, b); };
  const auto high = [](__m256d a, __m256d b) { return _mm256_unpackhi_pd(a, b); };
  const __m256 xy = _mm256_unpacklo_ps(x.v, y.v), zw = _mm256_unpacklo_ps(z.v, w.v);
  const __m256 xy2 = _mm256_unpackhi_ps(x.v, y.v), zw2 = _mm256_unpackhi_ps(z.v, w.v);
  // Values 0 and 4 of all four vectors, then 1 and 5, 2 and 6, 3 and 7.
  const __m256 quads[4] = {pairs(xy, zw, low), pairs(xy, zw, high), pairs(xy2, zw2, low),
                           pairs(xy2, zw2, high)};
  for (int i = 0; i < 4; ++i) {
    _mm_storeu_ps(p + 4 * i, _mm256_castps256_ps128(quads[i]));
    _mm_storeu_ps(p + 16 + 4 * i, _mm256_extractf128_ps(quads[i], 1));
  }
}
inline F32x8 load_f16(const uint16_t* p) { return load_f16_fast(p); }
inline void store_f16(uint16_t* p, F32x8 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline F32x8 load_bf16(const uint16_t* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
}
inline F32x8 load_int8(const int8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
}

inline Quad load_quad(const float* p) { return {p}; }
template <int LANE>
inline F32x8 mul_lane(F32x8 x, Quad q) {
  return {_mm256_mul_ps(x.v, _mm256_broadcast_ss(q.p + LANE))};
}
template <int LANE>
inline F32x8 fma_lane(F32x8 acc, F32x8 x, Quad q) {
  return {_mm256_fmadd_ps(x.v, _mm256_broadcast_ss(q.p + LANE), acc.v)};
}

inline Codes32 load_codes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline void store_codes(uint8_t* p, Codes32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.v);
}
inline Codes32 low_nibbles(Codes32 x) {
  return {_mm256_and_si256(x.v, _mm256_set1_epi8(15))};
}
inline Codes32 high_nibbles(Codes32 x) {
  return {_mm256_and_si256(_mm256_srli_epi16(x.v, 4), _mm256_set1_epi8(15))};
}
inline Codes32 low_6_bits(Codes32 x) { return {_mm256_and_si256(x.v, _mm256_set1_epi8(63))}; }
inline Codes32 join_top_bits(Codes32 x, Codes32 y, Codes32 z) {
  const __m256i first = _mm256_and_si256(_mm256_srli_epi16(x.v, 2), _mm256_set1_epi8(0x30));
  const __m256i second = _mm256_and_si256(_mm256_srli_epi16(y.v, 4), _mm256_set1_epi8(0x0c));
  const __m256i third = _mm256_and_si256(_mm256_srli_epi16(z.v, 6), _mm256_set1_epi8(3));
  return {_mm256_or_si256(_mm256_or_si256(first, second), third)};
}
inline Codes32 subtract(Codes32 x, int8_t y) {
  return {_mm256_sub_epi8(x.v, _mm256_set1_epi8(y))};
}
inline F32x8 nibbles_at(const uint8_t* p, int i) {
  const __m128i shift = _mm_cvtsi32_si128(8 * (i % 4) + i / 8 * 4);
  const __m256i by = _mm256_srl_epi32(load_codes(p + i % 8 / 4 * 32).v, shift);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(by, _mm256_set1_epi32(15)))};
}
inline F32x8 bytes_at(const uint8_t* p, int i) {
  const __m128i shift = _mm_cvtsi32_si128(24 - 8 * (i % 4));
  const __m256i up = _mm256_sll_epi32(load_codes(p + i / 4 * 32).v, shift);
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(up, 24))};
}
inline Inputs16 load_inputs(const int8_t* p) { return {p}; }

inline I32x8 sum_start() { return {_mm256_setzero_si256()}; }
inline QuadInt load_quad(const int32_t* p) { return {p}; }
template <int LANE>
inline I32x8 sum_start(QuadInt q) {
  return {_mm256_set1_epi32(q.p[LANE])};
}
inline F32x8 sum_finish(I32x8 x) { return {_mm256_cvtepi32_ps(x.v)}; }

inline __m256i broadcast4(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
// Unsigned by signed bytes. Without VNNI pairs are summed in 16 bits: 2 * 128 * 127 still fits.
inline I32x8 dot_mixed(I32x8 acc, __m256i w, __m256i x) {
#if defined(__AVXVNNI__)
  return {_mm256_dpbusd_avx_epi32(acc.v, w, x)};
#else
  const __m256i pairs = _mm256_maddubs_epi16(w, x);
  return {_mm256_add_epi32(acc.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
#endif
}
template <int LANE>
inline I32x8 dot_unsigned(I32x8 acc, Codes32 w, Inputs16 x) {
  return dot_mixed(acc, w.v, broadcast4(x.p + 4 * LANE));
}
// Moves the sign from the weight to the input: there is no signed-by-signed dot product.
template <int LANE>
inline I32x8 dot_signed(I32x8 acc, Codes32 w, Inputs16 x) {
  return dot_mixed(acc, _mm256_abs_epi8(w.v), _mm256_sign_epi8(broadcast4(x.p + 4 * LANE), w.v));
}

// Sums of two products in 16 bits: see WINDLASS_WORD_SUMS.
template <int LANE>
inline __m256i pair_dots(Codes32 w, Inputs16 x) {
  return _mm256_maddubs_epi16(w.v, broadcast4(x.p + 4 * LANE));
}
inline __m256i add_words(__m256i x, __m256i y) { return _mm256_add_epi16(x, y); }
inline I32x8 add_pairs(I32x8 acc, __m256i words) {
  return {_mm256_add_epi32(acc.v, _mm256_madd_epi16(words, _mm256_set1_epi16(1)))};
}

// A 16-bit integer of each output, twice: its 4 codes are two such words.
struct Words {
  __m256i v;
};
inline Words round_to_words(F32x8 x, int32_t more) {
  const __m256i whole = _mm256_add_epi32(_mm256_cvtps_epi32(x.v), _mm256_set1_epi32(more));
  return {_mm256_blend_epi16(whole, _mm256_slli_epi32(whole, 16), 0xaa)};
}
inline void requantise(Codes32 both, Words factor, Words start, Codes32& low, Codes32& high) {
  const __m256i nibble = _mm256_set1_epi16(15), high_bytes = _mm256_set1_epi16(-256);
  const auto made = [&](__m256i codes) {
    return _mm256_add_epi16(_mm256_mullo_epi16(codes, factor.v), start.v);
  };
  const auto joined = [&](__m256i even, __m256i odd) {
    return _mm256_or_si256(_mm256_srli_epi16(made(even), 8),
                           _mm256_and_si256(made(odd), high_bytes));
  };
  low.v = joined(_mm256_and_si256(both.v, nibble),
                 _mm256_and_si256(_mm256_srli_epi16(both.v, 8), nibble));
  high.v = joined(_mm256_and_si256(_mm256_srli_epi16(both.v, 4), nibble),
                  _mm256_srli_epi16(both.v, 12));
}

// The 16 values of nibbles, in both halves of a register.
struct Codebook {
  __m256i v;
};
inline Codebook load_codebook(const int8_t* p) {
  return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Codes32 look_up(Codebook book, Codes32 x) { return {_mm256_shuffle_epi8(book.v, x.v)}; }

// A table of 16 floats, in two registers of 8.
struct Table16 {
  __m256 low, high;
};
inline Table16 load_table(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F32x8 lookup8(const Table16& table, __m256i codes) {
  const __m256 low = _mm256_permutevar8x32_ps(table.low, codes);
  const __m256 high = _mm256_permutevar8x32_ps(table.high, codes);
  // Bit 3 of a code, shifted to the sign, selects the half.
  return {_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)))};
}
// 16 bytes hold 4 inputs of 8 outputs: two in the low nibbles, two in the high ones.
inline void lookup32(const Table16& table, const uint8_t* codes, F32x8 scale, float* out) {
  for (int i = 0; i < 2; ++i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * i));
    const __m256i wide = _mm256_cvtepu8_epi32(bytes);
    const __m256i low = _mm256_and_si256(wide, _mm256_set1_epi32(15));
    store(out + 8 * i, mul(lookup8(table, low), scale));
    store(out + 16 + 8 * i, mul(lookup8(table, _mm256_srli_epi32(wide, 4)), scale));
  }
}

// block_neon.h has these for NEON.
constexpr bool kHasMultiply4 = false;
constexpr float kSumStart = 0.0f;
template <bool OFFSETS>
inline void multiply_4(const uint8_t*, const float*, const float*, const float*, int, int,
                       const int8_t*, const float*, const float*, float*) {}

inline void cpu_pause() { _mm_pause(); }

}  // namespace windlass
