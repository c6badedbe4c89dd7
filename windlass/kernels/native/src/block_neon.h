// NEON: 4 rows by 8 outputs, in blocks of 16 inputs. eight_rows_neon.h handles blocks of 32.
//
// Written in assembly because compilers spill the accumulators to the stack, which costs two thirds
// of the speed. v0-v7: int32 accumulators; v8-v11: rows of x; v12-v13: weights; v16-v23: float
// accumulators; v24-v25: weight scales; v15: scales of x.

#pragma once

#include "simd_neon.h"

namespace windlass {

// With i8mm, dots_i8mm.h is faster: it multiplies two rows at a time.
constexpr bool kHasMultiply4 = kSpan == 4;

#define WINDLASS_ROW(A, B, X, LANE)              \
  "sdot " A ".4s, v12.16b, " X ".4b[" LANE "]\n" \
  "sdot " B ".4s, v13.16b, " X ".4b[" LANE "]\n"

#define WINDLASS_LANE(LANE)                                                 \
  "ldp q12, q13, [%[codes]], #32\n"                                         \
  WINDLASS_ROW("v0", "v1", "v8", LANE) WINDLASS_ROW("v2", "v3", "v9", LANE) \
  WINDLASS_ROW("v4", "v5", "v10", LANE) WINDLASS_ROW("v6", "v7", "v11", LANE)

#define WINDLASS_16             \
  "ldp q8, q9, [%[x]], #32\n"   \
  "ldp q10, q11, [%[x]], #32\n" \
  WINDLASS_LANE("0") WINDLASS_LANE("1") WINDLASS_LANE("2") WINDLASS_LANE("3")

// A sum that started at 1.5 * 2^23 is a float already: see simd_neon.h. The start times the scale
// is exact in float32, so one fused operation can subtract it: the result is rounded once, like
// (sum - start) * scale. The start is reloaded each time, since the load pipes are idle.
#define WINDLASS_SCALE(SUM, SCALE, OFFSET, LANE, OUT, T) \
  "ldr q" T ", [%[shifts], #" OFFSET "]\n"               \
  "fmla v" T ".4s, " SUM ".4s, " SCALE ".4s\n"           \
  "fmla " OUT ".4s, v" T ".4s, v15.s[" LANE "]\n"

#define WINDLASS_BLOCK                                                                  \
  "ldr q15, [%[x_scales]], #16\n"                                                       \
  "ldr q0, [%[start]]\n ldr q1, [%[start]]\n ldr q2, [%[start]]\n ldr q3, [%[start]]\n" \
  "ldr q4, [%[start]]\n ldr q5, [%[start]]\n ldr q6, [%[start]]\n ldr q7, [%[start]]\n" \
  WINDLASS_16                                                                           \
  WINDLASS_SCALE("v0", "v24", "0", "0", "v16", "8")                                     \
  WINDLASS_SCALE("v1", "v25", "16", "0", "v17", "9")                                    \
  WINDLASS_SCALE("v2", "v24", "0", "1", "v18", "10")                                    \
  WINDLASS_SCALE("v3", "v25", "16", "1", "v19", "11")                                   \
  WINDLASS_SCALE("v4", "v24", "0", "2", "v20", "12")                                    \
  WINDLASS_SCALE("v5", "v25", "16", "2", "v21", "13")                                   \
  WINDLASS_SCALE("v6", "v24", "0", "3", "v22", "14")                                    \
  WINDLASS_SCALE("v7", "v25", "16", "3", "v23", "27")                                        

#define WINDLASS_OFFSETS                                          \
  "ldp q8, q9, [%[offsets]], #32\n"                               \
  "ldr q15, [%[sums]], #16\n"                                     \
  "fmla v16.4s, v8.4s, v15.s[0]\n fmla v17.4s, v9.4s, v15.s[0]\n" \
  "fmla v18.4s, v8.4s, v15.s[1]\n fmla v19.4s, v9.4s, v15.s[1]\n" \
  "fmla v20.4s, v8.4s, v15.s[2]\n fmla v21.4s, v9.4s, v15.s[2]\n" \
  "fmla v22.4s, v8.4s, v15.s[3]\n fmla v23.4s, v9.4s, v15.s[3]\n"

#define WINDLASS_LOOP(OFFSETS_PART)                                                                \
  __asm__ volatile(                                                                                \
      "ldp q16, q17, [%[out]]\n ldp q18, q19, [%[out], #32]\n"                                     \
      "ldp q20, q21, [%[out], #64]\n ldp q22, q23, [%[out], #96]\n"                                \
      "1: ldp q24, q25, [%[scales]], #32\n"                                                        \
      "mov %w[left], %w[blocks]\n"                                                                 \
      "2:\n" WINDLASS_BLOCK                                                                        \
      "subs %w[left], %w[left], #1\n"                                                              \
      "b.ne 2b\n" OFFSETS_PART                                                                     \
      "add %[shifts], %[shifts], #32\n"                                                            \
      "subs %w[groups], %w[groups], #1\n"                                                          \
      "b.ne 1b\n"                                                                                  \
      "stp q16, q17, [%[out]]\n stp q18, q19, [%[out], #32]\n"                                     \
      "stp q20, q21, [%[out], #64]\n stp q22, q23, [%[out], #96]\n"                                \
      : [codes] "+r"(codes), [x] "+r"(x), [x_scales] "+r"(x_scales), [sums] "+r"(sums),            \
        [scales] "+r"(scales), [offsets] "+r"(offsets), [groups] "+r"(groups), [left] "=&r"(left), \
        [shifts] "+r"(shifts)                                                                      \
      : [blocks] "r"(blocks), [start] "r"(kStarts), [out] "r"(out)                                 \
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",         \
        "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22",        \
        "v23", "v24", "v25", "v27")

// Adds `groups` groups of `blocks` blocks of 16 inputs to out[row][output], at least one of each.
// `shifts` are the scales times -kSumStart.
template <bool OFFSETS>
inline void multiply_4(const uint8_t* codes, const float* scales, const float* shifts,
                       const float* offsets, int groups, int blocks, const int8_t* x,
                       const float* x_scales, const float* sums, float* out) {
  int left;
  if constexpr (OFFSETS) {
    WINDLASS_LOOP(WINDLASS_OFFSETS);
  } else {
    WINDLASS_LOOP("");
  }
}

#undef WINDLASS_LOOP
#undef WINDLASS_OFFSETS
#undef WINDLASS_BLOCK
#undef WINDLASS_SCALE
#undef WINDLASS_16
#undef WINDLASS_LANE
#undef WINDLASS_ROW

}  // namespace windlass
