// The two loops of NEON in which batches spend their time: one row by 8 outputs, and 8 rows by 4.
//
// Both take nibbles as they are packed. Written out for the same reason as multiply_4 in
// block_neon.h, whose sums they give to the bit.

#pragma once

#include "simd.h"

namespace windlass {

#if defined(WINDLASS_NEON)

// With i8mm codes lie otherwise.
constexpr bool kHasRowLoops = kSpan == 4;

// ---- one row: v0-v1 are sums of whole numbers, v16-v17 the sums --------------------------------

// 4 inputs of the low halves and 4 of the high ones.
#define WINDLASS_SPLIT(PLACE, A, B, LOW_A, LOW_B)                                        \
  "ldp q" A ", q" B ", [%[codes], #" PLACE "]\n"                                         \
  "and v" LOW_A ".16b, v" A ".16b, v31.16b\n and v" LOW_B ".16b, v" B ".16b, v31.16b\n"  \
  "ushr v" A ".16b, v" A ".16b, #4\n ushr v" B ".16b, v" B ".16b, #4\n"
#define WINDLASS_DOTS(X, LANE, NEXT, A, B, LOW_A, LOW_B)                                 \
  "sdot v0.4s, v" LOW_A ".16b, v" X ".4b[" LANE "]\n"                                    \
  "sdot v1.4s, v" LOW_B ".16b, v" X ".4b[" LANE "]\n"                                    \
  "sdot v0.4s, v" A ".16b, v" X ".4b[" NEXT "]\n"                                        \
  "sdot v1.4s, v" B ".16b, v" X ".4b[" NEXT "]\n"

// Codes are split some products before they are multiplied. A panel has 4 rows.
#define WINDLASS_BLOCK_32                                                                \
  WINDLASS_SPLIT("0", "8", "9", "18", "19") WINDLASS_SPLIT("32", "10", "11", "20", "21") \
  "ldr q6, [%[x]], #64\n" WINDLASS_DOTS("6", "0", "2", "8", "9", "18", "19")             \
  WINDLASS_SPLIT("64", "8", "9", "18", "19")                                             \
  WINDLASS_DOTS("6", "1", "3", "10", "11", "20", "21")                                   \
  WINDLASS_SPLIT("96", "10", "11", "20", "21")                                           \
  "ldr q7, [%[x]], #64\n" WINDLASS_DOTS("7", "0", "2", "8", "9", "18", "19")             \
  WINDLASS_DOTS("7", "1", "3", "10", "11", "20", "21") "add %[codes], %[codes], #128\n"
#define WINDLASS_BLOCK_16                                                                \
  WINDLASS_SPLIT("0", "8", "9", "18", "19") WINDLASS_SPLIT("32", "10", "11", "20", "21") \
  "ldr q6, [%[x]], #64\n" WINDLASS_DOTS("6", "0", "2", "8", "9", "18", "19")             \
  WINDLASS_DOTS("6", "1", "3", "10", "11", "20", "21") "add %[codes], %[codes], #64\n"

#define WINDLASS_FROM_START "ldr q0, [%[start]]\n ldr q1, [%[start]]\n"
#define WINDLASS_FROM_CENTRE                              \
  "ld1r {v1.4s}, [%[centre]]\n add %[centre], %[centre], #16\n" \
  "add v0.4s, v1.4s, v30.4s\n add v1.4s, v1.4s, v30.4s\n"

// Halves to floats, as load_half does it.
#define WINDLASS_HALVES(FROM, A, B)                                                \
  "ldr q" B ", [%[" FROM "]], #16\n"                                               \
  "sshll v" A ".4s, v" B ".4h, #13\n sshll2 v" B ".4s, v" B ".8h, #13\n"           \
  "bic v" A ".4s, #0x70, lsl #24\n bic v" B ".4s, #0x70, lsl #24\n"

#define WINDLASS_ADD_MINS                                          \
  WINDLASS_HALVES("mins", "4", "5") "ldr q14, [%[sums]], #16\n"    \
  "fmla v16.4s, v4.4s, v14.s[0]\n fmla v17.4s, v5.4s, v14.s[0]\n"

// What memory is asked for before it is needed, scales and minima with the codes: much more would
// wait for lines that are on their way already.
constexpr int kBytesAhead = 2048;

#define WINDLASS_LOOP(FROM, BLOCK, MINS_PART)                                               \
  __asm__ volatile(                                                                         \
      "movi v31.16b, #15\n ldr q30, [%[start]]\n"                                           \
      "ldp q16, q17, [%[out]]\n"                                                            \
      "1:\n" WINDLASS_HALVES("scales", "2", "3")                                            \
      "prfm pldl1keep, [%[ahead]]\n prfm pldl1keep, [%[ahead], #64]\n"                      \
      "prfm pldl1keep, [%[ahead], #128]\n add %[ahead], %[ahead], %[step]\n"                \
      "mov %w[left], %w[blocks]\n"                                                          \
      "2:\n" FROM BLOCK                                                                     \
      "ldr q15, [%[x_scales]], #16\n"                                                       \
      "fsub v0.4s, v0.4s, v30.4s\n fsub v1.4s, v1.4s, v30.4s\n"                             \
      "fmul v0.4s, v0.4s, v2.4s\n fmul v1.4s, v1.4s, v3.4s\n"                               \
      "subs %w[left], %w[left], #1\n"                                                       \
      "fmla v16.4s, v0.4s, v15.s[0]\n fmla v17.4s, v1.4s, v15.s[0]\n"                       \
      "b.ne 2b\n" MINS_PART                                                                 \
      "subs %w[groups], %w[groups], #1\n"                                                   \
      "b.ne 1b\n"                                                                           \
      "stp q16, q17, [%[out]]\n"                                                            \
      : [codes] "+r"(codes), [x] "+r"(x), [x_scales] "+r"(x_scales), [sums] "+r"(sums),     \
        [centre] "+r"(centre), [scales] "+r"(scales), [mins] "+r"(mins),                    \
        [groups] "+r"(groups), [left] "=&r"(left), [ahead] "+r"(ahead)                      \
      : [blocks] "r"(blocks), [start] "r"(kStarts), [out] "r"(out), [step] "r"(step)        \
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",  \
        "v11", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v30", "v31")

// Adds to out[output] `groups` groups of `blocks` blocks, at least one of each.
template <int BLOCK, bool MINS>
inline void multiply_1(const uint8_t* codes, const uint16_t* scales, const uint16_t* mins,
                       int groups, int blocks, const int8_t* x, const float* x_scales,
                       const int32_t* centre, const float* sums, float* out) {
  const uint8_t* ahead = codes + kBytesAhead;
  const int64_t step = blocks * BLOCK * 4 + (MINS ? 32 : 16);
  int left;
  if constexpr (BLOCK == 32 && MINS) {
    WINDLASS_LOOP(WINDLASS_FROM_START, WINDLASS_BLOCK_32, WINDLASS_ADD_MINS);
  } else if constexpr (BLOCK == 32) {
    WINDLASS_LOOP(WINDLASS_FROM_CENTRE, WINDLASS_BLOCK_32, "");
  } else if constexpr (MINS) {
    WINDLASS_LOOP(WINDLASS_FROM_START, WINDLASS_BLOCK_16, WINDLASS_ADD_MINS);
  } else {
    WINDLASS_LOOP(WINDLASS_FROM_CENTRE, WINDLASS_BLOCK_16, "");
  }
}

#undef WINDLASS_LOOP
#undef WINDLASS_ADD_MINS
#undef WINDLASS_HALVES
#undef WINDLASS_FROM_CENTRE
#undef WINDLASS_FROM_START
#undef WINDLASS_BLOCK_16
#undef WINDLASS_BLOCK_32
#undef WINDLASS_DOTS
#undef WINDLASS_SPLIT

// ---- 8 rows: two panels ------------------------------------------------------------------------
//
// v0-v7 are sums of whole numbers, v8-v15 rows of x, v24-v27 weights, v16-v23 the sums, v28 the
// weights' scales, v29-v30 those of x.

#define WINDLASS_DOT(SUM, W, X, LANE) \
  "sdot v" SUM ".4s, v" W ".16b, v" X ".4b[" LANE "]\n"
#define WINDLASS_DOTS_2(A, B, W, X, Y, LANE) WINDLASS_DOT(A, W, X, LANE) WINDLASS_DOT(B, W, Y, LANE)
#define WINDLASS_DOTS(W, LANE)                                                                \
  WINDLASS_DOTS_2("0", "1", W, "8", "9", LANE) WINDLASS_DOTS_2("2", "3", W, "10", "11", LANE) \
  WINDLASS_DOTS_2("4", "5", W, "12", "13", LANE) WINDLASS_DOTS_2("6", "7", W, "14", "15", LANE)

// Reading is spread between products: where many reads follow one another no product is begun.
#define WINDLASS_FIRST(A, B, X, Y, FROM)                                                      \
  "ldp q" X ", q" Y ", [%[" FROM "]\n ldr q" A ", [%[start]]\n ldr q" B ", [%[start]]\n"      \
  WINDLASS_DOTS_2(A, B, "24", X, Y, "0")
#define WINDLASS_LAST(A, B, X, Y, FROM)                                                       \
  WINDLASS_DOTS_2(A, B, "27", X, Y, "3") "ldp q" X ", q" Y ", [%[" FROM "]\n"
#define WINDLASS_END(A, X)                                                                    \
  WINDLASS_DOT(A, "27", X, "3") "ldr q" X ", [%[shifts]]\n"

#define WINDLASS_SPLIT(LOW, HIGH, PLACE)                                                      \
  "ldr q" LOW ", [%[codes], #" PLACE "]\n"                                                    \
  "ushr v" HIGH ".16b, v" LOW ".16b, #4\n and v" LOW ".16b, v" LOW ".16b, v31.16b\n"
#define WINDLASS_BLOCK                                                                        \
  WINDLASS_SPLIT("24", "26", "0")                                                             \
  WINDLASS_FIRST("0", "1", "8", "9", "x]") WINDLASS_FIRST("2", "3", "10", "11", "x], #32")    \
  WINDLASS_FIRST("4", "5", "12", "13", "x_b]")                                                \
  WINDLASS_FIRST("6", "7", "14", "15", "x_b], #32")                                           \
  WINDLASS_SPLIT("25", "27", "32") WINDLASS_DOTS("25", "1") WINDLASS_DOTS("26", "2")          \
  WINDLASS_LAST("0", "1", "8", "9", "x], #64") WINDLASS_LAST("2", "3", "10", "11", "x], #96") \
  WINDLASS_LAST("4", "5", "12", "13", "x_b], #64")                                            \
  WINDLASS_LAST("6", "7", "14", "15", "x_b], #96")                                            \
  WINDLASS_SPLIT("24", "26", "64") WINDLASS_DOTS("24", "0")                                   \
  WINDLASS_SPLIT("25", "27", "96") WINDLASS_DOTS("25", "1") WINDLASS_DOTS("26", "2")          \
  WINDLASS_END("0", "8") WINDLASS_END("1", "9") WINDLASS_END("2", "10")                       \
  WINDLASS_END("3", "11") WINDLASS_END("4", "12") WINDLASS_END("5", "13")                     \
  WINDLASS_END("6", "14") WINDLASS_END("7", "15")                                             \
  "add %[codes], %[codes], #128\n"

// As in block_neon.h.
#define WINDLASS_SCALE(A, B, X, Y)                                                            \
  "fmla v" X ".4s, v" A ".4s, v28.4s\n fmla v" Y ".4s, v" B ".4s, v28.4s\n"
#define WINDLASS_ADD(X, Y, S, L0, L1, OUT_A, OUT_B)                                           \
  "fmla v" OUT_A ".4s, v" X ".4s, v" S ".s[" L0 "]\n"                                         \
  "fmla v" OUT_B ".4s, v" Y ".4s, v" S ".s[" L1 "]\n"

#define WINDLASS_MINS                                                                         \
  "ldr q27, [%[mins]], #32\n ldr q29, [%[sums]], #16\n ldr q30, [%[sums_b]], #16\n"           \
  "fmla v16.4s, v27.4s, v29.s[0]\n fmla v17.4s, v27.4s, v29.s[1]\n"                           \
  "fmla v18.4s, v27.4s, v29.s[2]\n fmla v19.4s, v27.4s, v29.s[3]\n"                           \
  "fmla v20.4s, v27.4s, v30.s[0]\n fmla v21.4s, v27.4s, v30.s[1]\n"                           \
  "fmla v22.4s, v27.4s, v30.s[2]\n fmla v23.4s, v27.4s, v30.s[3]\n"

// Adds to out[row][output], for 8 rows and the first 4 of 8 outputs, `groups` groups of `blocks`
// blocks of nibbles with minima, at least one of each. The second panel's arrays lie `next` bytes
// after the first's; shifts are those of multiply_4. `ahead` will be needed soon: 160 bytes for a
// block, what 8 outputs take with scales and minima.
inline void multiply_8(const uint8_t* codes, const float* scales, const float* shifts,
                       const float* mins, int groups, int blocks, const int8_t* x,
                       const float* x_scales, const float* sums, size_t next,
                       const uint8_t* ahead, float* out) {
  const auto* x_b = x + next;
  const auto* x_scales_b = x_scales + next / sizeof(float);
  const auto* sums_b = sums + next / sizeof(float);
  int left;
  __asm__ volatile(
      "movi v31.16b, #15\n"
      "ldr q16, [%[out]]\n ldr q17, [%[out], #32]\n"
      "ldr q18, [%[out], #64]\n ldr q19, [%[out], #96]\n"
      "ldr q20, [%[out], #128]\n ldr q21, [%[out], #160]\n"
      "ldr q22, [%[out], #192]\n ldr q23, [%[out], #224]\n"
      "1: ldr q28, [%[scales]], #32\n"
      "mov %w[left], %w[blocks]\n"
      "2:\n"
      "prfm pldl1keep, [%[ahead]]\n prfm pldl1keep, [%[ahead], #64]\n"
      "prfm pldl1keep, [%[ahead], #128]\n add %[ahead], %[ahead], #160\n"
      WINDLASS_BLOCK
      "add %[x], %[x], #128\n add %[x_b], %[x_b], #128\n"
      "ldr q29, [%[x_scales]], #16\n ldr q30, [%[x_scales_b]], #16\n"
      WINDLASS_SCALE("0", "1", "8", "9") WINDLASS_SCALE("2", "3", "10", "11")
      WINDLASS_SCALE("4", "5", "12", "13") WINDLASS_SCALE("6", "7", "14", "15")
      WINDLASS_ADD("8", "9", "29", "0", "1", "16", "17")
      WINDLASS_ADD("10", "11", "29", "2", "3", "18", "19")
      WINDLASS_ADD("12", "13", "30", "0", "1", "20", "21")
      WINDLASS_ADD("14", "15", "30", "2", "3", "22", "23")
      "subs %w[left], %w[left], #1\n"
      "b.ne 2b\n" WINDLASS_MINS
      "add %[shifts], %[shifts], #32\n"
      "subs %w[groups], %w[groups], #1\n"
      "b.ne 1b\n"
      "str q16, [%[out]]\n str q17, [%[out], #32]\n"
      "str q18, [%[out], #64]\n str q19, [%[out], #96]\n"
      "str q20, [%[out], #128]\n str q21, [%[out], #160]\n"
      "str q22, [%[out], #192]\n str q23, [%[out], #224]\n"
      : [codes] "+r"(codes), [x] "+r"(x), [x_scales] "+r"(x_scales), [sums] "+r"(sums),
        [x_b] "+r"(x_b), [x_scales_b] "+r"(x_scales_b), [sums_b] "+r"(sums_b),
        [scales] "+r"(scales), [mins] "+r"(mins), [groups] "+r"(groups), [left] "=&r"(left),
        [shifts] "+r"(shifts), [ahead] "+r"(ahead)
      : [blocks] "r"(blocks), [start] "r"(kStarts), [out] "r"(out)
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",
        "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22",
        "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31");
}

#undef WINDLASS_MINS
#undef WINDLASS_ADD
#undef WINDLASS_SCALE
#undef WINDLASS_BLOCK
#undef WINDLASS_SPLIT
#undef WINDLASS_END
#undef WINDLASS_LAST
#undef WINDLASS_FIRST
#undef WINDLASS_DOTS
#undef WINDLASS_DOTS_2
#undef WINDLASS_DOT

#else

constexpr bool kHasRowLoops = false;
constexpr int kBytesAhead = 0;
template <int BLOCK, bool MINS>
void multiply_1(const uint8_t*, const uint16_t*, const uint16_t*, int, int, const int8_t*,
                const float*, const int32_t*, const float*, float*);
void multiply_8(const uint8_t*, const float*, const float*, const float*, int, int, const int8_t*,
                const float*, const float*, size_t, const uint8_t*, float*);

#endif

}  // namespace windlass
