// The vector types of the kernels: 8 values, on any CPU.
//
// Each backend defines the same types and functions:
//   F32x8, I32x8   one value for each of 8 outputs
//   Codes32        weight codes of 8 outputs x 4 inputs, a byte each (with i8mm 4 outputs x 8)
//   Inputs16       16 consecutive activation codes of one row of x
//   Quad, QuadInt  one value for each of 4 rows of x
// GEMMs use Floats, Sums and Codes, which hold the outputs of a tile: 8 of them, or 16 in
// simd_avx512.h. They have a namespace of their own, so that the same names mean the wider types.
// low_signed, high_signed and signed_nibbles_at return 16 times the signed nibbles of kSignedNibbles.
// nibbles_at and bytes_at read the codes of one input for all outputs of a tile, out of the codes of
// 16 inputs. A dot product adds 4 inputs; the lane selects 4 of the 16.
// fma(Addend(c), x, y) is fma(splat(c), x, y) where that is part of a polynomial: on NEON splat(c) would be
// copied, since the result replaces the addend.
// sum_of_codes adds int8 codes by dot products, where kHasSumOfCodes; elsewhere compilers vectorise a loop.
// load_f16_fast returns the value times kF16Unit, whatever is cheapest for the CPU; load_f16 the value.
// Where kF16Unit is not 1, load_f16_fast turns NaN and infinity into values from 65536 on.
// low_6_bits returns the low 6 bits of bytes, join_top_bits the upper 2 bits of three as 6 bits, those of
// the first uppermost.
// look_up returns the Codebook values of nibbles, a byte each; load_codebook reads its 16 values.
// requantise makes int8 codes of nibbles: see requantise.h. On x86-64 only.
// maximum is NaN where either operand is. clamp_min(x, bound) is NaN where x is, and costs less; the
// bound must not be NaN. maximum_abs is maximum for operands without a sign bit.
// divide_or_zero(x, y) is 0 where y is not above 0. ceil_12_bits rounds magnitudes up to 12 significant
// bits.
// exp2_int(shifted) is 2^n, where n is a small integer in the low bits of `shifted`: 0 for n = -127 and
// infinity for n = 128.
// store_sums4 stores the sums over the 8 lanes of four vectors; store_interleaved4 stores their first
// values, their second values, and so on.

#pragma once

#include <type_traits>
#include <utility>

#include "layout.h"

#if defined(WINDLASS_NEON)
#include "block_neon.h"
#elif defined(WINDLASS_AVX512)
#include "simd_avx512.h"
#elif defined(WINDLASS_AVX2)
#include "simd_avx2.h"
#else
#include "simd_scalar.h"
#endif

namespace windlass {

// Compilers stop inlining in unrolled loops, where a call costs more than its body.
#define WINDLASS_INLINED __attribute__((always_inline))
#define WINDLASS_INLINE inline WINDLASS_INLINED

// Calls body(constant 0) ... body(constant COUNT - 1): lane indices must be constants.
template <int... I, class Body>
WINDLASS_INLINE void unrolled(std::integer_sequence<int, I...>, Body&& body) {
  (body(std::integral_constant<int, I>{}), ...);
}

template <int COUNT, class Body>
WINDLASS_INLINE void unrolled(Body&& body) {
  unrolled(std::make_integer_sequence<int, COUNT>{}, std::forward<Body>(body));
}

// Where weights or scales are float16, x is multiplied by this, so that products stay in the middle
// of the float32 range; kF16Gain scales the outputs back.
constexpr float kInputGain = kF16Unit == 1.0f ? 1.0f : 0x1p56f;
constexpr float kF16Gain = 1.0f / kF16Unit / kInputGain;

#if !defined(WINDLASS_AVX512)
namespace tile {

using Floats = F32x8;
using Sums = I32x8;
using Codes = Codes32;

// A bfloat16, distinct from a float16 by its type.
struct Bf16 {
  uint16_t bits;
};

// Scales are float16 in packed weights and float32 in unpacked tiles.
inline Floats load_scales(const uint16_t* p) { return load_f16_fast(p); }
inline Floats load_scales(const float* p) { return load(p); }
inline Floats load_scales(const Bf16* p) { return load_bf16(&p->bits); }

}  // namespace tile
#endif

#if !defined(WINDLASS_NEON)
struct Addend {
  float x;

  constexpr explicit Addend(float value) : x(value) {}
};
inline F32x8 fma(const Addend& acc, F32x8 x, F32x8 y) { return fma(splat(acc.x), x, y); }

constexpr bool kHasSumOfCodes = false;
int32_t sum_of_codes(const int8_t*, int);  // never called

namespace tile {

// Never called: see kSignedNibbles.
Codes low_signed(Codes);
Codes high_signed(Codes);
Floats signed_nibbles_at(const uint8_t*, int);

}  // namespace tile
#endif

}  // namespace windlass
