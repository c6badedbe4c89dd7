// NEON: 16 rows (four panels) by 4 outputs of int4 weights with offsets and groups of 32 inputs, the inner
// loop of larger GEMMs.
//
// Codes are split once for all rows; with 8 rows at a time (eight_rows_neon.h) that takes one vector
// operation in twelve. Float operations and dot products delay each other where they alternate, and
// there are registers for the sums of one panel only: so the offsets of the previous group are added
// while the first scaled sums are not ready. The sums are bit-identical to those of the other loops.
// v0-v3: int32 accumulators of one panel; v4-v7: its rows of x; v8-v15: weights; v16-v31: float
// accumulators.

#pragma once

#include "eight_rows_neon.h"

namespace windlass {

#if defined(WINDLASS_NEON)

// Two starts of sums, since one instruction loads two vectors, and the mask of low nibbles.
struct LoopConstants {
  alignas(16) int32_t starts[8];
  uint8_t low[16];

  constexpr LoopConstants() : starts(), low() {
    for (int32_t& start : starts) start = kStart;
    for (uint8_t& mask : low) mask = 0x0f;
  }
};
constexpr LoopConstants kLoopConstants;

// Splits the codes of 4 outputs with the mask in v4.
#define WINDLASS_SPLIT(LOW, HIGH) \
  "ushr v" HIGH ".16b, v" LOW ".16b, #4\n and v" LOW ".16b, v" LOW ".16b, v4.16b\n"
#define WINDLASS_CODES                                                                   \
  "ldr q4, [%[constants], #32]\n ldr q8, [%[codes]]\n ldr q9, [%[codes], #32]\n"         \
  "ldr q12, [%[codes], #64]\n ldr q13, [%[codes], #96]\n add %[codes], %[codes], #128\n" \
  WINDLASS_SPLIT("8", "10") WINDLASS_SPLIT("9", "11")                                    \
  WINDLASS_SPLIT("12", "14") WINDLASS_SPLIT("13", "15")

#define WINDLASS_DOTS_2(A, B, W, X, Y, LANE)          \
  "sdot v" A ".4s, v" W ".16b, v" X ".4b[" LANE "]\n" \
  "sdot v" B ".4s, v" W ".16b, v" Y ".4b[" LANE "]\n"
#define WINDLASS_DOTS(W, LANE) \
  WINDLASS_DOTS_2("0", "1", W, "4", "5", LANE) WINDLASS_DOTS_2("2", "3", W, "6", "7", LANE)
#define WINDLASS_LOAD(A, B, X) "ldp q" A ", q" B ", [%[" X "]], #32\n"
#define WINDLASS_ADD_4(A, B, C, D, T, U, V, W, X)                                     \
  "fmla v" A ".4s, v" T ".4s, v" X ".s[0]\n fmla v" B ".4s, v" U ".4s, v" X ".s[1]\n" \
  "fmla v" C ".4s, v" V ".4s, v" X ".s[2]\n fmla v" D ".4s, v" W ".4s, v" X ".s[3]\n"
// Adds the offsets of the previous group to float accumulators A to D.
#define WINDLASS_OFFSETS(SUMS, A, B, C, D)                       \
  "ldr q2, [%[scales], #-80]\n ldr q3, [%[last_sums]" SUMS "]\n" \
  WINDLASS_ADD_4(A, B, C, D, "2", "2", "2", "2", "3")

// One group of a panel, whose arrays lie AT after those of the first. As in eight_rows_neon.h, scales
// times sums are added to the shifts, and the result times the scales of x to the float accumulators.
#define WINDLASS_PANEL(X, AT, A, B, C, D)                                                \
  WINDLASS_LOAD("4", "5", X) WINDLASS_LOAD("6", "7", X)                                  \
  WINDLASS_DOTS("8", "0") WINDLASS_DOTS("9", "1") WINDLASS_DOTS("10", "2")               \
  WINDLASS_DOTS_2("0", "1", "11", "4", "5", "3") WINDLASS_LOAD("4", "5", X)              \
  WINDLASS_DOTS_2("2", "3", "11", "6", "7", "3") WINDLASS_LOAD("6", "7", X)              \
  WINDLASS_DOTS("12", "0") WINDLASS_DOTS("13", "1") WINDLASS_DOTS("14", "2")             \
  WINDLASS_DOTS_2("0", "1", "15", "4", "5", "3") "ldp q4, q5, [%[scales], #16]\n"        \
  WINDLASS_DOTS_2("2", "3", "15", "6", "7", "3")                                         \
  "ldr q6, [%[scales]]\n ldr q7, [%[x_scales]" AT "]\n"                                  \
  "fmla v4.4s, v0.4s, v6.4s\n fmla v5.4s, v1.4s, v6.4s\n ldp q0, q1, [%[scales], #16]\n" \
  "fmla v0.4s, v2.4s, v6.4s\n fmla v1.4s, v3.4s, v6.4s\n"                                \
  WINDLASS_OFFSETS(AT, A, B, C, D) WINDLASS_ADD_4(A, B, C, D, "4", "5", "0", "1", "7")   \
  "ldp q0, q1, [%[constants]]\n ldp q2, q3, [%[constants]]\n"

#define WINDLASS_OUT(MOVE)                                     \
  MOVE " q16, [%[out]]\n " MOVE " q17, [%[out], #32]\n"        \
  MOVE " q18, [%[out], #64]\n " MOVE " q19, [%[out], #96]\n"   \
  MOVE " q20, [%[out], #128]\n " MOVE " q21, [%[out], #160]\n" \
  MOVE " q22, [%[out], #192]\n " MOVE " q23, [%[out], #224]\n" \
  MOVE " q24, [%[out], #256]\n " MOVE " q25, [%[out], #288]\n" \
  MOVE " q26, [%[out], #320]\n " MOVE " q27, [%[out], #352]\n" \
  MOVE " q28, [%[out], #384]\n " MOVE " q29, [%[out], #416]\n" \
  MOVE " q30, [%[out], #448]\n " MOVE " q31, [%[out], #480]\n"

// Like multiply_8, for 16 rows; the panels lie `next` bytes apart. Before `scales` lie other scales, with
// offsets of 0, and `zeros` are 4 zeros of the first panel: both stand for a group before the first.
inline void multiply_16(const uint8_t* codes, const HalfScales* scales, int groups, const int8_t* x,
                        const float* x_scales, const float* sums, const void* zeros, size_t next,
                        const uint8_t* ahead, int64_t step, float* out) {
  const auto *x_b = x + next, *x_c = x + 2 * next, *x_d = x + 3 * next;
  const void* last_sums = zeros;
  __asm__ volatile(
      WINDLASS_OUT("ldr")
      "ldp q0, q1, [%[constants]]\n ldp q2, q3, [%[constants]]\n"
      "1: prfm pldl1keep, [%[ahead]]\n prfm pldl1keep, [%[ahead], #64]\n"
      "add %[ahead], %[ahead], %[step]\n"
      WINDLASS_CODES
      WINDLASS_PANEL("x_a", "", "16", "17", "18", "19")
      WINDLASS_PANEL("x_b", ", %[second]", "20", "21", "22", "23")
      WINDLASS_PANEL("x_c", ", %[third]", "24", "25", "26", "27")
      WINDLASS_PANEL("x_d", ", %[fourth]", "28", "29", "30", "31")
      "mov %[last_sums], %[sums]\n add %[sums], %[sums], #16\n"
      "add %[x_scales], %[x_scales], #16\n add %[scales], %[scales], #128\n"
      "subs %w[groups], %w[groups], #1\n"
      "b.ne 1b\n"
      WINDLASS_OFFSETS("", "16", "17", "18", "19")
      WINDLASS_OFFSETS(", %[second]", "20", "21", "22", "23")
      WINDLASS_OFFSETS(", %[third]", "24", "25", "26", "27")
      WINDLASS_OFFSETS(", %[fourth]", "28", "29", "30", "31")
      WINDLASS_OUT("str")
      : [codes] "+&r"(codes), [x_a] "+&r"(x), [x_b] "+&r"(x_b), [x_c] "+&r"(x_c), [x_d] "+&r"(x_d),
        [x_scales] "+&r"(x_scales), [sums] "+&r"(sums), [last_sums] "+&r"(last_sums),
        [scales] "+&r"(scales), [groups] "+&r"(groups), [ahead] "+&r"(ahead)
      : [constants] "r"(&kLoopConstants), [out] "r"(out), [step] "r"(step), [second] "r"(next),
        [third] "r"(2 * next), [fourth] "r"(3 * next)
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11",
        "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24",
        "v25", "v26", "v27", "v28", "v29", "v30", "v31");
}

#undef WINDLASS_OUT
#undef WINDLASS_PANEL
#undef WINDLASS_OFFSETS
#undef WINDLASS_ADD_4
#undef WINDLASS_LOAD
#undef WINDLASS_DOTS
#undef WINDLASS_DOTS_2
#undef WINDLASS_CODES
#undef WINDLASS_SPLIT

#else

void multiply_16(const uint8_t*, const HalfScales*, int, const int8_t*, const float*, const float*, const void*,
                 size_t, const uint8_t*, int64_t, float*);

#endif

}  // namespace windlass
