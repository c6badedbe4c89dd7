// The vectors that the kernels are written in: 8 numbers side by side, whatever the CPU.
//
// Each backend defines the same types and functions:
//   F32x8, I32x8   one number for each of 8 outputs
//   Codes32        weight codes of 8 outputs x 4 inputs, a byte each (with i8mm 4 outputs x 8)
//   Inputs16       16 consecutive input codes of one row of x
//   Quad, QuadInt  one number for each of 4 rows of x
// Products compute with Floats, Sums and Codes, which hold a tile's outputs: those of 8, or of 16 in
// simd_avx512.h. They are in a namespace of their own, so that the same names mean the wider ones.
// low_signed and high_signed make 16 times the signed nibbles of kSignedNibbles, as
// signed_nibbles_at. nibbles_at and bytes_at read one input's codes of all outputs of a tile, out of 16 inputs' codes.
// A dot gemm adds 4 inputs at a time; the lane says which 4 of the 16.
// load_half gives the value times kHalfUnit, whatever is cheapest for the CPU; read_half the value. Where
// kHalfUnit is not 1, load_half takes NaN and infinity for numbers from 65536 on.
// look_up gives the values of a Codebook for nibbles, a byte each; load_codebook reads its 16 values.
// larger is NaN where either operand is. at_least(x, bound) is NaN where x is, and costs less; the bound
// must not be NaN. larger_magnitude is larger for operands without a sign bit.
// exp2_int(shifted) is 2^n, where n is a small integer in the low bits of `shifted`: 0 for n = -127 and
// infinity for n = 128.
// store_sums4 stores the sums over the 8 lanes of four vectors, store_interleaved4 their first numbers,
// their second ones, and so on.

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

// Compilers give up inlining where loops are unrolled, and calls cost more than what is called.
#define WINDLASS_INLINED __attribute__((always_inline))
#define WINDLASS_INLINE inline WINDLASS_INLINED

// Calls body(constant 0) ... body(constant COUNT - 1): lanes must be known to the compiler.
template <int... I, class Body>
WINDLASS_INLINE void unrolled(std::integer_sequence<int, I...>, Body&& body) {
  (body(std::integral_constant<int, I>{}), ...);
}

template <int COUNT, class Body>
WINDLASS_INLINE void unrolled(Body&& body) {
  unrolled(std::make_integer_sequence<int, COUNT>{}, std::forward<Body>(body));
}

// Where halves are read, x is multiplied by this, so that gemm stay in the middle of the range
// of floats; the outputs are multiplied by what then is missing.
constexpr float kLift = kHalfUnit == 1.0f ? 1.0f : 0x1p56f;
constexpr float kHalfGain = 1.0f / kHalfUnit / kLift;

#if !defined(WINDLASS_AVX512)
namespace tile {

using Floats = F32x8;
using Sums = I32x8;
using Codes = Codes32;

// A bfloat16, told from a half by its type.
struct Bf16 {
  uint16_t bits;
};

// Scales lie as halves in packed weights and as floats in unpacked tiles.
inline Floats load_scales(const uint16_t* p) { return load_half(p); }
inline Floats load_scales(const float* p) { return load(p); }
inline Floats load_scales(const Bf16* p) { return read_bf16(&p->bits); }

}  // namespace tile
#endif

#if !defined(WINDLASS_NEON)
namespace tile {

// Never called: see kSignedNibbles.
Codes low_signed(Codes);
Codes high_signed(Codes);
Floats signed_nibbles_at(const uint8_t*, int);

}  // namespace tile
#endif

}  // namespace windlass
