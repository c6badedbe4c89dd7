// NEON: 8 rows by 8 outputs over one prompt block, the inner loop of prompt GEMMs.
//
// Assembly for the same reason as multiply_4 in block_neon.h. v0-v15: int32 accumulators; v16-v23:
// rows of x; v24-v31: weights.

#pragma once

#include "simd.h"

namespace windlass {

#if defined(WINDLASS_NEON)

// With i8mm the layout of codes differs and two rows are multiplied at a time: see dots_i8mm.h.
constexpr bool kHasMultiply64 = kSpan == 4;

#define WINDLASS_ROW(A, B, W, V, X, LANE)             \
  "sdot v" A ".4s, v" W ".16b, v" X ".4b[" LANE "]\n" \
  "sdot v" B ".4s, v" V ".16b, v" X ".4b[" LANE "]\n"
#define WINDLASS_ROWS_0(W, V, LANE) \
  WINDLASS_ROW("0", "1", W, V, "16", LANE) WINDLASS_ROW("2", "3", W, V, "17", LANE)
#define WINDLASS_ROWS_2(W, V, LANE) \
  WINDLASS_ROW("4", "5", W, V, "18", LANE) WINDLASS_ROW("6", "7", W, V, "19", LANE)
#define WINDLASS_ROWS_4(W, V, LANE) \
  WINDLASS_ROW("8", "9", W, V, "20", LANE) WINDLASS_ROW("10", "11", W, V, "21", LANE)
#define WINDLASS_ROWS_6(W, V, LANE) \
  WINDLASS_ROW("12", "13", W, V, "22", LANE) WINDLASS_ROW("14", "15", W, V, "23", LANE)
#define WINDLASS_LANE(W, V, LANE)                         \
  WINDLASS_ROWS_0(W, V, LANE) WINDLASS_ROWS_2(W, V, LANE) \
  WINDLASS_ROWS_4(W, V, LANE) WINDLASS_ROWS_6(W, V, LANE)

// Prefetches the same inputs of the next two panels: the hardware prefetcher stays within a panel.
#define WINDLASS_FETCH "prfm pldl1keep, [%[x], %[ahead]]\n prfm pldl1keep, [%[x_b], %[ahead]]\n"

// 16 inputs. Loads are spread between dot products and run ahead to the next inputs.
#define WINDLASS_16                                                            \
  "ldp q26, q27, [%[at], #32]\n" WINDLASS_LANE("24", "25", "0")                \
  "ldp q28, q29, [%[at], #64]\n" WINDLASS_LANE("26", "27", "1") WINDLASS_FETCH \
  "ldp q30, q31, [%[at], #96]\n" WINDLASS_LANE("28", "29", "2")                \
  "ldp q24, q25, [%[at], #128]!\n"                                             \
  WINDLASS_ROWS_0("30", "31", "3") "ldp q16, q17, [%[x]], #32\n"               \
  WINDLASS_ROWS_2("30", "31", "3") "ldp q18, q19, [%[x]], #32\n"               \
  WINDLASS_ROWS_4("30", "31", "3") "ldp q20, q21, [%[x_b]], #32\n"             \
  WINDLASS_ROWS_6("30", "31", "3") "ldp q22, q23, [%[x_b]], #32\n"

// The last 16 inputs. Only scales are loaded ahead: those of the weights lie in v26 and v27.
#define WINDLASS_LAST                                                                      \
  "ldp q26, q27, [%[at], #32]\n" WINDLASS_LANE("24", "25", "0")                            \
  "ldp q28, q29, [%[at], #64]\n" WINDLASS_LANE("26", "27", "1") WINDLASS_FETCH             \
  "ldp q30, q31, [%[at], #96]\n" WINDLASS_LANE("28", "29", "2")                            \
  "ldp q26, q27, [%[scales]]\n ldr q28, [%[x_scales]]\n ldr q29, [%[x_scales], %[next]]\n" \
  WINDLASS_LANE("30", "31", "3")

#define WINDLASS_START(A, B) "ldr q" A ", [%[start]]\n ldr q" B ", [%[start]]\n"
#define WINDLASS_READ(T, U) "ldp q" T ", q" U ", [%[shifts]]\n"
#define WINDLASS_SCALE(A, B, T, U, OFFSET)                                  \
  "fmla v" T ".4s, v" A ".4s, v26.4s\n fmla v" U ".4s, v" B ".4s, v27.4s\n" \
  "ldp q" A ", q" B ", [%[out], #" OFFSET "]\n"
#define WINDLASS_ADD(A, B, T, U, SCALE, LANE, OFFSET)   \
  "fmla v" A ".4s, v" T ".4s, v" SCALE ".s[" LANE "]\n" \
  "fmla v" B ".4s, v" U ".4s, v" SCALE ".s[" LANE "]\n" \
  "stp q" A ", q" B ", [%[out], #" OFFSET "]\n" WINDLASS_START(A, B)
// Adds the sums of a panel to `out`, as in block_neon.h, and starts new ones. Four rows are
// interleaved, since each operation depends on the one before.
#define WINDLASS_END(A, B, C, D, E, F, G, H, SCALE, OFFSET, NEXT, THIRD, LAST)    \
  WINDLASS_READ("16", "17") WINDLASS_READ("18", "19") WINDLASS_READ("20", "21")   \
  WINDLASS_READ("22", "23")                                                       \
  WINDLASS_SCALE(A, B, "16", "17", OFFSET) WINDLASS_SCALE(C, D, "18", "19", NEXT) \
  WINDLASS_SCALE(E, F, "20", "21", THIRD) WINDLASS_SCALE(G, H, "22", "23", LAST)  \
  WINDLASS_ADD(A, B, "16", "17", SCALE, "0", OFFSET)                              \
  WINDLASS_ADD(C, D, "18", "19", SCALE, "1", NEXT)                                \
  WINDLASS_ADD(E, F, "20", "21", SCALE, "2", THIRD)                               \
  WINDLASS_ADD(G, H, "22", "23", SCALE, "3", LAST)

// Adds 16 * `sixteens` inputs to out[row][output] for `pairs` pairs of panels, at least one of
// each. The arrays of two panels lie `next` bytes apart; `shifts` are the scales times -kSumStart,
// which must be exact.
inline void multiply_64(const uint8_t* codes, const float* scales, const float* shifts,
                        int sixteens, const int8_t* x, const float* x_scales, size_t next,
                        int pairs, float* out) {
  const uint8_t* at = codes;
  const int8_t* x_b = x + next;
  const size_t ahead = 2 * next, skipped = ahead - static_cast<size_t>(sixteens) * 64;
  int left;
  __asm__ volatile(
      WINDLASS_START("0", "1") WINDLASS_START("2", "3") WINDLASS_START("4", "5")
      WINDLASS_START("6", "7") WINDLASS_START("8", "9") WINDLASS_START("10", "11")
      WINDLASS_START("12", "13") WINDLASS_START("14", "15")
      "1: ldp q24, q25, [%[at]]\n"
      "ldp q16, q17, [%[x]], #32\n ldp q18, q19, [%[x]], #32\n"
      "ldp q20, q21, [%[x_b]], #32\n ldp q22, q23, [%[x_b]], #32\n"
      "subs %w[left], %w[sixteens], #1\n"
      "b.eq 3f\n"
      "2:\n" WINDLASS_16
      "subs %w[left], %w[left], #1\n"
      "b.ne 2b\n"
      "3:\n" WINDLASS_LAST
      WINDLASS_END("0", "1", "2", "3", "4", "5", "6", "7", "28", "0", "32", "64", "96")
      WINDLASS_END("8", "9", "10", "11", "12", "13", "14", "15", "29", "128", "160", "192", "224")
      "mov %[at], %[codes]\n add %[out], %[out], #256\n"
      "add %[x], %[x], %[skipped]\n add %[x_b], %[x_b], %[skipped]\n"
      "add %[x_scales], %[x_scales], %[ahead]\n"
      "subs %w[pairs], %w[pairs], #1\n"
      "b.ne 1b\n"
      : [at] "+&r"(at), [x] "+&r"(x), [x_b] "+&r"(x_b), [x_scales] "+&r"(x_scales),
        [out] "+&r"(out), [pairs] "+&r"(pairs), [left] "=&r"(left)
      : [codes] "r"(codes), [start] "r"(kStarts), [scales] "r"(scales), [shifts] "r"(shifts),
        [sixteens] "r"(sixteens), [next] "r"(next), [ahead] "r"(ahead), [skipped] "r"(skipped)
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11",
        "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24",
        "v25", "v26", "v27", "v28", "v29", "v30", "v31");
}

#undef WINDLASS_END
#undef WINDLASS_ADD
#undef WINDLASS_SCALE
#undef WINDLASS_READ
#undef WINDLASS_START
#undef WINDLASS_LAST
#undef WINDLASS_16
#undef WINDLASS_FETCH
#undef WINDLASS_LANE
#undef WINDLASS_ROWS_6
#undef WINDLASS_ROWS_4
#undef WINDLASS_ROWS_2
#undef WINDLASS_ROWS_0
#undef WINDLASS_ROW

#else

constexpr bool kHasMultiply64 = false;
void multiply_64(const uint8_t*, const float*, const float*, int, const int8_t*, const float*,
                 size_t, int, float*);

#endif

}  // namespace windlass
