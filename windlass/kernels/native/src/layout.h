// Selects the instruction set, and the layout of weights and activations for it.
//
// The compiler flags define what the CPU has. WINDLASS_SCALAR forces portable code.

#pragma once

#if !defined(WINDLASS_SCALAR)
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define WINDLASS_NEON
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define WINDLASS_I8MM
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define WINDLASS_BFMMLA
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WINDLASS_AVX2
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define WINDLASS_AVX512
#if defined(__AVX512VNNI__)
#define WINDLASS_VNNI512
#if defined(__AVX512BF16__)
#define WINDLASS_DPBF16
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define WINDLASS_AMX
#endif
#endif
#endif
#endif
// Without VNNI, dot products of int4 codes are summed in 16 bits: see dots.h.
#if !defined(WINDLASS_VNNI512) && !defined(__AVXVNNI__)
#define WINDLASS_WORD_SUMS
#endif
#endif
#endif

namespace windlass {

constexpr int kPanelRows = 4;  // rows of x computed together

// int4 codes without offsets are stored signed (code - 8): one instruction turns either nibble of a
// byte into 16 times the code, and x is divided by 16 instead. On other CPUs IntPanel::correction
// subtracts the 8.
#if defined(WINDLASS_NEON)
constexpr bool kSignedNibbles = true;
#else
constexpr bool kSignedNibbles = false;
#endif

#if defined(WINDLASS_AVX512)
constexpr int kTile = 16;  // outputs computed side by side
#else
constexpr int kTile = 8;
#endif

#if defined(WINDLASS_VNNI512)
// There is no signed-by-signed dot product: int8 codes are stored with 128 added, int4 codes
// unsigned, and IntPanel::correction subtracts the excess from the sums.
constexpr bool kUnsignedCodes = true;
#else
constexpr bool kUnsignedCodes = false;
#endif

// Whether loops can keep 16 accumulators and more: AVX-512 has 32 vector registers. NEON has them too,
// but its loops are written in assembly.
#if defined(WINDLASS_AVX512)
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

#if defined(WINDLASS_I8MM)
constexpr int kSpan = 8;  // inputs of one output whose codes are contiguous
constexpr int kRun = 8;  // inputs of one row of x that are contiguous
#else
constexpr int kSpan = 4;
constexpr int kRun = 16;
#endif

// The same for bfloat16 weights and their activations. Where spans are longer than 1, a row of x is
// the sum of two rows of bfloat16.
#if defined(WINDLASS_BFMMLA)
constexpr int kBf16Span = 4;
constexpr int kBf16Run = 4;
#elif defined(WINDLASS_DPBF16)
constexpr int kBf16Span = 2;
constexpr int kBf16Run = 32;
#else
constexpr int kBf16Span = 1;
constexpr int kBf16Run = 1;
#endif
constexpr bool kSplitsInputs = kBf16Span > 1;

}  // namespace windlass
