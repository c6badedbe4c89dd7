// The vectors that the kernels are written in: 8 outputs side by side, whatever the CPU.
//
// Each backend defines the same types and functions:
//   F32x8, I32x8   one number for each of 8 outputs
//   Codes32        weight codes of 8 outputs x 4 inputs, a byte each
//   Inputs16       16 consecutive input codes of one row of x
//   Quad, QuadInt  one number for each of 4 rows of x
// nibbles_at and bytes_at read one input's codes of 8 outputs out of 32 bytes.
// A dot product adds 4 inputs at a time; the lane says which 4 of the 16.
// load_half gives the value times kHalfUnit, whatever is cheapest for the CPU; read_half the value.
// larger keeps what is no number; add_exponent multiplies by the power of two in the low bits of
// `shifted`; store_sums4 stores the sums over the 8 lanes of four vectors,
// store_interleaved4 their first numbers, their second ones, and so on.

#pragma once

#include <type_traits>
#include <utility>

#if defined(WINDLASS_SCALAR)
#include "simd_scalar.h"
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "block_neon.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
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

// Where halves are read, x is multiplied by this, so that products stay in the middle of the range
// of floats; the outputs are multiplied by what then is missing.
constexpr float kLift = kHalfUnit == 1.0f ? 1.0f : 0x1p56f;
constexpr float kHalfGain = 1.0f / kHalfUnit / kLift;

// Scales lie as halves in packed weights and as floats in unpacked tiles.
inline F32x8 load_scales(const uint16_t* p) { return load_half(p); }
inline F32x8 load_scales(const float* p) { return load(p); }

// A bfloat16, told from a half by its type.
struct Brain {
  uint16_t bits;
};
inline F32x8 load_scales(const Brain* p) { return read_brain(&p->bits); }

}  // namespace windlass
