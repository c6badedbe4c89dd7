// Which instructions are used, and how weights and rows of x lie in memory for them.
//
// The compiler says what the CPU has. WINDLASS_SCALAR asks for portable code whatever that is.

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
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WINDLASS_AVX512
#if defined(__AVX512BF16__)
#define WINDLASS_DPBF16
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define WINDLASS_AMX
#endif
#endif
#endif
#endif
#endif

namespace windlass {

constexpr int kPanel = 4;  // rows of x that are computed together

// int4 codes without minima are stored less 8, with a sign: from either half of a byte one instruction
// makes 16 times the code, and x is divided by 16 instead. Elsewhere IntPanel::centre takes 8 away.
#if defined(WINDLASS_NEON)
constexpr bool kSignedNibbles = true;
#else
constexpr bool kSignedNibbles = false;
#endif

#if defined(WINDLASS_AVX512)
constexpr int kTile = 16;  // outputs that are computed side by side
// There is no gemm of signed bytes: int8 codes are stored with 128 added, int4 ones stay as they
// are, and what that adds to a sum of gemm is taken away by IntPanel::centre.
constexpr bool kUnsignedCodes = true;
#else
constexpr int kTile = 8;
constexpr bool kUnsignedCodes = false;
#endif

#if defined(WINDLASS_I8MM)
constexpr int kSpan = 8;  // inputs of one output whose codes lie side by side
constexpr int kRun = 8;   // inputs of one row of x that do
#else
constexpr int kSpan = 4;
constexpr int kRun = 16;
#endif

// The same for weights in bfloat16 and the inputs that meet them. Where spans are longer than 1, x
// is the sum of two rows of bfloat16.
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
