// 8 rows by 8 outputs for NEON, over a stretch: the loop in which prompts spend their time.
//
// Written out for the same reason as multiply_4 in block_neon.h. v0-v15 are sums of whole numbers,
// v16-v23 rows of x, v24-v31 weights.

#pragma once

#include "simd.h"

namespace windlass {

#if defined(WINDLASS_NEON)

// With i8mm codes lie otherwise, and two rows are multiplied at a time: see dots_i8mm.h.
constexpr bool kHasMultiply64 = kSpan == 4;

#define WINDLASS_ROW(A, B, W, V, X, LANE)                   \
  "sdot v" A ".4s, v" W ".16b, v" X ".4b[" LANE "]\n"       \
  "sdot v" B ".4s, v" V ".16b, v" X ".4b[" LANE "]\n"
#define WINDLASS_ROWS_0(W, V, LANE) \
  WINDLASS_ROW("0", "1", W, V, "16", LANE) WINDLASS_ROW("2", "3", W, V, "17", LANE)
#define WINDLASS_ROWS_2(W, V, LANE) \
  WINDLASS_ROW("4", "5", W, V, "18", LANE) WINDLASS_ROW("6", "7", W, V, "19", LANE)
#define WINDLASS_ROWS_4(W, V, LANE) \
  WINDLASS_ROW("8", "9", W, V, "20", LANE) WINDLASS_ROW("10", "11", W, V, "21", LANE)
#define WINDLASS_ROWS_6(W, V, LANE) \
  WINDLASS_ROW("12", "13", W, V, "22", LANE) WINDLASS_ROW("14", "15", W, V, "23", LANE)
#define WINDLASS_LANE(W, V, LANE)                                 \
  WINDLASS_ROWS_0(W, V, LANE) WINDLASS_ROWS_2(W, V, LANE)         \
  WINDLASS_ROWS_4(W, V, LANE) WINDLASS_ROWS_6(W, V, LANE)

// 16 inputs. Reading is spread between products, and goes on with the next inputs.
#define WINDLASS_16                                                                     \
  "ldp q26, q27, [%[codes], #32]\n" WINDLASS_LANE("24", "25", "0")                      \
  "ldp q28, q29, [%[codes], #64]\n" WINDLASS_LANE("26", "27", "1")                      \
  "ldp q30, q31, [%[codes], #96]\n" WINDLASS_LANE("28", "29", "2")                      \
  "ldp q24, q25, [%[codes], #128]!\n"                                                   \
  WINDLASS_ROWS_0("30", "31", "3") "ldp q16, q17, [%[x]], #32\n"                        \
  WINDLASS_ROWS_2("30", "31", "3") "ldp q18, q19, [%[x]], #32\n"                        \
  WINDLASS_ROWS_4("30", "31", "3") "ldp q20, q21, [%[x_b]], #32\n"                      \
  WINDLASS_ROWS_6("30", "31", "3") "ldp q22, q23, [%[x_b]], #32\n"

#define WINDLASS_START(A, B) "ldr q" A ", [%[start]]\n ldr q" B ", [%[start]]\n"
// As in block_neon.h; the weights' scales lie in v26 and v27.
#define WINDLASS_END(A, B, SCALE, LANE, PLACE)                                          \
  "ldp q16, q17, [%[shifts]]\n ldp q18, q19, [%[out], #" PLACE "]\n"                    \
  "fmla v16.4s, v" A ".4s, v26.4s\n fmla v17.4s, v" B ".4s, v27.4s\n"                   \
  "fmla v18.4s, v16.4s, v" SCALE ".s[" LANE "]\n"                                       \
  "fmla v19.4s, v17.4s, v" SCALE ".s[" LANE "]\n"                                       \
  "stp q18, q19, [%[out], #" PLACE "]\n"

// Adds to out[row][output] 16 * `sixteens` inputs, at least 16. The second panel's arrays lie `next`
// bytes after the first's; `shifts` are the scales times -kSumStart, which must be exact.
inline void multiply_64(const uint8_t* codes, const float* scales, const float* shifts,
                        int sixteens, const int8_t* x, const float* x_scales, size_t next,
                        float* out) {
  const int8_t* x_b = x + next;
  const float* x_scales_b = x_scales + next / sizeof(float);
  __asm__ volatile(
      WINDLASS_START("0", "1") WINDLASS_START("2", "3") WINDLASS_START("4", "5")
      WINDLASS_START("6", "7") WINDLASS_START("8", "9") WINDLASS_START("10", "11")
      WINDLASS_START("12", "13") WINDLASS_START("14", "15")
      "ldp q24, q25, [%[codes]]\n"
      "ldp q16, q17, [%[x]], #32\n ldp q18, q19, [%[x]], #32\n"
      "ldp q20, q21, [%[x_b]], #32\n ldp q22, q23, [%[x_b]], #32\n"
      "1:\n" WINDLASS_16
      "subs %w[left], %w[left], #1\n"
      "b.ne 1b\n"
      "ldp q26, q27, [%[scales]]\n ldr q28, [%[x_scales]]\n ldr q29, [%[x_scales_b]]\n"
      WINDLASS_END("0", "1", "28", "0", "0") WINDLASS_END("2", "3", "28", "1", "32")
      WINDLASS_END("4", "5", "28", "2", "64") WINDLASS_END("6", "7", "28", "3", "96")
      WINDLASS_END("8", "9", "29", "0", "128")
      WINDLASS_END("10", "11", "29", "1", "160")
      WINDLASS_END("12", "13", "29", "2", "192")
      WINDLASS_END("14", "15", "29", "3", "224")
      : [codes] "+r"(codes), [x] "+r"(x), [x_b] "+r"(x_b), [left] "+r"(sixteens)
      : [start] "r"(kStarts), [out] "r"(out), [scales] "r"(scales), [shifts] "r"(shifts),
        [x_scales] "r"(x_scales), [x_scales_b] "r"(x_scales_b)
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11",
        "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24",
        "v25", "v26", "v27", "v28", "v29", "v30", "v31");
}

#undef WINDLASS_END
#undef WINDLASS_START
#undef WINDLASS_16
#undef WINDLASS_LANE
#undef WINDLASS_ROWS_6
#undef WINDLASS_ROWS_4
#undef WINDLASS_ROWS_2
#undef WINDLASS_ROWS_0
#undef WINDLASS_ROW

#else

constexpr bool kHasMultiply64 = false;
void multiply_64(const uint8_t*, const float*, const float*, int, const int8_t*, const float*,
                 size_t, float*);

#endif

}  // namespace windlass
