// NEON: one row or 4 rows by 8 outputs, the inner loops of small batches.
//
// Both read nibbles as packed. Assembly for the same reason as multiply_4 in block_neon.h; the sums
// are bit-identical to it.

#pragma once

#include "one_row_neon.h"
#include "simd.h"

namespace windlass {

#if defined(WINDLASS_NEON)

// With i8mm the layout of codes differs.
constexpr bool kHasRowLoops = kSpan == 4;

// ---- one row -----------------------------------------------------------------------------------
//
// For groups of several blocks, or of 16 inputs. Most groups have one block of 32 inputs: see
// one_row_neon.h.
//
// v0-v1: int32 accumulators; v22-v23: those of the previous block; v2-v3: its scales, v15: that of
// x; v4-v5: offsets of the previous group, v14: the sum of x; v16-v17: float accumulators.

// The float operations of the previous block are spread between the dot products of this one.
#define WINDLASS_SUBTRACT \
  "fsub v22.4s, v0.4s, v30.4s\n fsub v23.4s, v1.4s, v30.4s\n"
#define WINDLASS_SCALE "fmul v22.4s, v22.4s, v2.4s\n fmul v23.4s, v23.4s, v3.4s\n"
#define WINDLASS_ADD "fmla v16.4s, v22.4s, v15.s[0]\n fmla v17.4s, v23.4s, v15.s[0]\n"
#define WINDLASS_ADD_OFFSETS "fmla v16.4s, v4.4s, v14.s[0]\n fmla v17.4s, v5.4s, v14.s[0]\n"

// Converts float16 to float32 like load_f16_fast.
#define WINDLASS_HALVES(FROM, A, B)  \
  "ldr q" B ", [%[" FROM "]], #16\n" \
  "sshll v" A ".4s, v" B ".4h, #13\n sshll2 v" B ".4s, v" B ".8h, #13\n"
#define WINDLASS_CLEAR(A, B) "bic v" A ".4s, #0x70, lsl #24\n bic v" B ".4s, #0x70, lsl #24\n"
#define WINDLASS_NEXT_OFFSETS                                                        \
  WINDLASS_ADD_OFFSETS WINDLASS_HALVES("offsets", "4", "5") WINDLASS_CLEAR("4", "5") \
  "ldr q14, [%[sums]], #16\n"

// Codes are split several dot products before their use.
#define WINDLASS_BLOCK_32(SPLIT, SCALES, CLEAR, OFFSETS_PART)                              \
  SPLIT("0", "8", "9", "18", "19") WINDLASS_SUBTRACT                                       \
  "ldr q0, [%[start]]\n ldr q1, [%[start]]\n" SPLIT("32", "10", "11", "20", "21")          \
  "ld1 {v6.16b}, [%[x]], %[next_run]\n"                                                    \
  WINDLASS_DOTS("0", "1", "6", "0", "2", "8", "9", "18", "19")                             \
  WINDLASS_SCALE SPLIT("64", "8", "9", "18", "19")                                         \
  WINDLASS_DOTS("0", "1", "6", "1", "3", "10", "11", "20", "21")                           \
  WINDLASS_ADD "ldr q15, [%[x_scales]], #16\n" SPLIT("96", "10", "11", "20", "21")         \
  "ld1 {v7.16b}, [%[x]], %[next_run]\n"                                                    \
  WINDLASS_DOTS("0", "1", "7", "0", "2", "8", "9", "18", "19")                             \
  SCALES WINDLASS_DOTS("0", "1", "7", "1", "3", "10", "11", "20", "21") CLEAR OFFSETS_PART \
  "add %[codes], %[codes], #128\n"
#define WINDLASS_BLOCK_16(SPLIT, SCALES, CLEAR, OFFSETS_PART)                     \
  SPLIT("0", "8", "9", "18", "19") WINDLASS_SUBTRACT                              \
  "ldr q0, [%[start]]\n ldr q1, [%[start]]\n" SPLIT("32", "10", "11", "20", "21") \
  "ld1 {v6.16b}, [%[x]], %[next_run]\n"                                           \
  WINDLASS_DOTS("0", "1", "6", "0", "2", "8", "9", "18", "19")                    \
  WINDLASS_SCALE WINDLASS_DOTS("0", "1", "6", "1", "3", "10", "11", "20", "21")   \
  WINDLASS_ADD "ldr q15, [%[x_scales]], #16\n" SCALES CLEAR OFFSETS_PART          \
  "add %[codes], %[codes], #64\n"

// Prefetches codes, scales and offsets: near ones into L1, later ones into L2.
#define WINDLASS_FETCH                                                     \
  "prfm pldl1keep, [%[ahead]]\n prfm pldl1keep, [%[ahead], #64]\n"         \
  "prfm pldl1keep, [%[ahead], #128]\n prfm pldl2keep, [%[ahead], #3072]\n" \
  "prfm pldl2keep, [%[ahead], #3136]\n add %[ahead], %[ahead], %[step]\n"
constexpr int kBytesAhead = 512;

#define WINDLASS_LOOP(MASK, BLOCK, SPLIT, NEXT_OFFSETS, LAST_OFFSETS)                           \
  __asm__ volatile(                                                                             \
      "movi v31.16b, #" MASK "\n ldr q30, [%[start]]\n ldp q16, q17, [%[out]]\n"                \
      "ldr q0, [%[start]]\n ldr q1, [%[start]]\n movi v2.4s, #0\n movi v3.4s, #0\n"             \
      "movi v15.4s, #0\n movi v4.4s, #0\n movi v5.4s, #0\n movi v14.4s, #0\n"                   \
      "1:\n" WINDLASS_FETCH                                                                     \
      BLOCK(SPLIT, WINDLASS_HALVES("scales", "2", "3"), WINDLASS_CLEAR("2", "3"), NEXT_OFFSETS) \
      "subs %w[left], %w[blocks], #1\n"                                                         \
      "b.eq 3f\n"                                                                               \
      "2:\n" WINDLASS_FETCH BLOCK(SPLIT, "", "", "")                                            \
      "subs %w[left], %w[left], #1\n"                                                           \
      "b.ne 2b\n"                                                                               \
      "3: subs %w[groups], %w[groups], #1\n"                                                    \
      "b.ne 1b\n" WINDLASS_SUBTRACT WINDLASS_SCALE WINDLASS_ADD LAST_OFFSETS                    \
      "stp q16, q17, [%[out]]\n"                                                                \
      : [codes] "+&r"(codes), [x] "+&r"(x), [x_scales] "+&r"(x_scales), [sums] "+&r"(sums),     \
        [scales] "+&r"(scales), [offsets] "+&r"(offsets), [groups] "+&r"(groups),               \
        [left] "=&r"(left), [ahead] "+&r"(ahead)                                                \
      : [blocks] "r"(blocks), [start] "r"(kStarts), [out] "r"(out), [step] "r"(step),           \
        [next_run] "r"(next_run)                                                                \
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",      \
        "v11", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v30",     \
        "v31")
#define WINDLASS_WITH_OFFSETS(BLOCK) \
  WINDLASS_LOOP("15", BLOCK, WINDLASS_SPLIT, WINDLASS_NEXT_OFFSETS, WINDLASS_ADD_OFFSETS)
#define WINDLASS_WITHOUT_OFFSETS(BLOCK) WINDLASS_LOOP("240", BLOCK, WINDLASS_SPLIT_SIGNED, "", "")

// Adds `groups` groups of `blocks` blocks to out[output], at least one of each.
template <int BLOCK, bool OFFSETS>
inline void multiply_1(const uint8_t* codes, const uint16_t* scales, const uint16_t* offsets,
                       int groups, int blocks, const int8_t* x, int64_t next_run,
                       const float* x_scales, const float* sums, float* out) {
  if (BLOCK == 32 && blocks == 1) {
    return multiply_groups<OFFSETS>(codes, scales, offsets, groups, x, next_run, x_scales, sums,
                                    out);
  }
  const uint8_t* ahead = codes + kBytesAhead;
  const int64_t step = BLOCK * 4 + (OFFSETS ? 32 : 16) / blocks;
  int left;
  if constexpr (BLOCK == 32 && OFFSETS) {
    WINDLASS_WITH_OFFSETS(WINDLASS_BLOCK_32);
  } else if constexpr (BLOCK == 32) {
    WINDLASS_WITHOUT_OFFSETS(WINDLASS_BLOCK_32);
  } else if constexpr (OFFSETS) {
    WINDLASS_WITH_OFFSETS(WINDLASS_BLOCK_16);
  } else {
    WINDLASS_WITHOUT_OFFSETS(WINDLASS_BLOCK_16);
  }
}

#undef WINDLASS_WITHOUT_OFFSETS
#undef WINDLASS_WITH_OFFSETS
#undef WINDLASS_LOOP
#undef WINDLASS_FETCH
#undef WINDLASS_BLOCK_16
#undef WINDLASS_BLOCK_32
#undef WINDLASS_NEXT_OFFSETS
#undef WINDLASS_CLEAR
#undef WINDLASS_HALVES
#undef WINDLASS_ADD_OFFSETS
#undef WINDLASS_ADD
#undef WINDLASS_SCALE
#undef WINDLASS_SUBTRACT
#undef WINDLASS_DOTS
#undef WINDLASS_SPLIT_SIGNED
#undef WINDLASS_SPLIT

// ---- 4 rows ------------------------------------------------------------------------------------
//
// v0-v7: int32 accumulators, two per row; v8-v11: rows of x; v24-v31: weights; v16-v23: float
// accumulators; v12-v13: weight scales; v14: scales of x.

#define WINDLASS_DOTS(W, V, LANE)                                                         \
  "sdot v0.4s, v" W ".16b, v8.4b[" LANE "]\n sdot v1.4s, v" V ".16b, v8.4b[" LANE "]\n"   \
  "sdot v2.4s, v" W ".16b, v9.4b[" LANE "]\n sdot v3.4s, v" V ".16b, v9.4b[" LANE "]\n"   \
  "sdot v4.4s, v" W ".16b, v10.4b[" LANE "]\n sdot v5.4s, v" V ".16b, v10.4b[" LANE "]\n" \
  "sdot v6.4s, v" W ".16b, v11.4b[" LANE "]\n sdot v7.4s, v" V ".16b, v11.4b[" LANE "]\n"
#define WINDLASS_SPLIT(LOW, HIGH) \
  "ushr v" HIGH ".16b, v" LOW ".16b, #4\n and v" LOW ".16b, v" LOW ".16b, v15.16b\n"
#define WINDLASS_SPLIT_SIGNED(LOW, HIGH) \
  "and v" HIGH ".16b, v" LOW ".16b, v15.16b\n shl v" LOW ".16b, v" LOW ".16b, #4\n"

#define WINDLASS_SCALE(A, T, S) "fmla v" T ".4s, v" A ".4s, v" S ".4s\n ldr q" A ", [%[start]]\n"
#define WINDLASS_ADD(A, B, T, U, LANE) \
  "fmla v" A ".4s, v" T ".4s, v14.s[" LANE "]\n fmla v" B ".4s, v" U ".4s, v14.s[" LANE "]\n"

// Loads are spread, codes are split several dot products before their use, and float operations
// come all at once, as for 8 rows.
#define WINDLASS_BLOCK(SPLIT)                                                                \
  SPLIT("26", "30") SPLIT("27", "31") WINDLASS_DOTS("24", "25", "0")                         \
  "ldp q24, q25, [%[codes], #64]\n" WINDLASS_DOTS("26", "27", "1")                           \
  "ldp q26, q27, [%[codes], #96]\n" WINDLASS_DOTS("28", "29", "2")                           \
  SPLIT("24", "28") SPLIT("25", "29") WINDLASS_DOTS("30", "31", "3")                         \
  "ldp q8, q9, [%[x], #64]\n ldp q10, q11, [%[x], #96]\n"                                    \
  SPLIT("26", "30") SPLIT("27", "31") WINDLASS_DOTS("24", "25", "0")                         \
  WINDLASS_DOTS("26", "27", "1")                                                             \
  "add %[x], %[x], #128\n add %[codes], %[codes], #128\n"                                    \
  "cmp %[codes], %[last]\n csel %[at], %[codes], %[last], lo\n"                              \
  "ldp q24, q25, [%[room]]\n ldp q26, q27, [%[room]]\n"                                      \
  WINDLASS_DOTS("28", "29", "2") "ldr q14, [%[x_scales]], #16\n"                             \
  WINDLASS_DOTS("30", "31", "3")                                                             \
  "ldp q8, q9, [%[room]]\n ldp q10, q11, [%[room]]\n"                                        \
  WINDLASS_SCALE("0", "24", "12") WINDLASS_SCALE("1", "25", "13")                            \
  WINDLASS_SCALE("2", "26", "12") WINDLASS_SCALE("3", "27", "13")                            \
  WINDLASS_SCALE("4", "8", "12") WINDLASS_SCALE("5", "9", "13")                              \
  WINDLASS_SCALE("6", "10", "12") WINDLASS_SCALE("7", "11", "13")                            \
  WINDLASS_ADD("16", "17", "24", "25", "0") WINDLASS_ADD("18", "19", "26", "27", "1")        \
  "ldp q24, q25, [%[at]]\n ldp q26, q27, [%[at], #32]\n" SPLIT("24", "28") SPLIT("25", "29") \
  WINDLASS_ADD("20", "21", "8", "9", "2") WINDLASS_ADD("22", "23", "10", "11", "3")          \
  "ldp q8, q9, [%[x]]\n ldp q10, q11, [%[x], #32]\n"

// Converts float16 to float32 like load_f16_fast.
#define WINDLASS_HALVES(FROM, A, B)                                      \
  "ldr q" B ", [%[" FROM "]], #16\n"                                     \
  "sshll v" A ".4s, v" B ".4h, #13\n sshll2 v" B ".4s, v" B ".8h, #13\n" \
  "bic v" A ".4s, #0x70, lsl #24\n bic v" B ".4s, #0x70, lsl #24\n"
#define WINDLASS_OFFSETS                                             \
  WINDLASS_HALVES("offsets", "30", "31") "ldr q14, [%[sums]], #16\n" \
  "fmla v16.4s, v30.4s, v14.s[0]\n fmla v17.4s, v31.4s, v14.s[0]\n"  \
  "fmla v18.4s, v30.4s, v14.s[1]\n fmla v19.4s, v31.4s, v14.s[1]\n"  \
  "fmla v20.4s, v30.4s, v14.s[2]\n fmla v21.4s, v31.4s, v14.s[2]\n"  \
  "fmla v22.4s, v30.4s, v14.s[3]\n fmla v23.4s, v31.4s, v14.s[3]\n"

#define WINDLASS_LOOP(MASK, SPLIT, OFFSETS_PART)                                            \
  __asm__ volatile(                                                                         \
      "movi v15.16b, #" MASK "\n ldp q24, q25, [%[codes]]\n"                                \
      "ldp q26, q27, [%[codes], #32]\n" SPLIT("24", "28") SPLIT("25", "29")                 \
      "ldp q16, q17, [%[out]]\n ldp q18, q19, [%[out], #32]\n"                              \
      "ldp q20, q21, [%[out], #64]\n ldp q22, q23, [%[out], #96]\n"                         \
      "ldr q0, [%[start]]\n ldr q1, [%[start]]\n ldr q2, [%[start]]\n ldr q3, [%[start]]\n" \
      "ldr q4, [%[start]]\n ldr q5, [%[start]]\n ldr q6, [%[start]]\n ldr q7, [%[start]]\n" \
      "ldp q8, q9, [%[x]]\n ldp q10, q11, [%[x], #32]\n"                                    \
      "1:\n" WINDLASS_HALVES("scales", "12", "13") "ldp q30, q31, [%[room], #32]\n"         \
      "fmul v30.4s, v30.4s, v12.4s\n fmul v31.4s, v31.4s, v13.4s\n"                         \
      "stp q30, q31, [%[room]]\n"                                                           \
      "mov %w[left], %w[blocks]\n"                                                          \
      "2: prfm pldl1keep, [%[ahead]]\n prfm pldl1keep, [%[ahead], #64]\n"                   \
      "prfm pldl1keep, [%[ahead], #128]\n add %[ahead], %[ahead], %[step]\n"                \
      WINDLASS_BLOCK(SPLIT)                                                                 \
      "subs %w[left], %w[left], #1\n"                                                       \
      "b.ne 2b\n" OFFSETS_PART                                                              \
      "subs %w[groups], %w[groups], #1\n"                                                   \
      "b.ne 1b\n"                                                                           \
      "stp q16, q17, [%[out]]\n stp q18, q19, [%[out], #32]\n"                              \
      "stp q20, q21, [%[out], #64]\n stp q22, q23, [%[out], #96]\n"                         \
      : [codes] "+&r"(codes), [x] "+&r"(x), [x_scales] "+&r"(x_scales), [sums] "+&r"(sums), \
        [scales] "+&r"(scales), [offsets] "+&r"(offsets), [groups] "+&r"(groups),           \
        [left] "=&r"(left), [at] "=&r"(at), [ahead] "+&r"(ahead)                            \
      : [blocks] "r"(blocks), [start] "r"(kStarts), [out] "r"(out), [room] "r"(room),       \
        [last] "r"(last), [step] "r"(step)                                                  \
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",  \
        "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", \
        "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")

// Adds `groups` groups of `blocks` blocks of 32 inputs to out[row][output] of a panel, at least one
// of each.
template <bool OFFSETS>
inline void multiply_panel(const uint8_t* codes, const uint16_t* scales, const uint16_t* offsets,
                           int groups, int blocks, const int8_t* x, const float* x_scales,
                           const float* sums, float* out) {
  const uint8_t* last = codes + (static_cast<size_t>(groups) * blocks - 1) * 128;
  const uint8_t* ahead = codes + 2 * kBytesAhead;
  const int64_t step = 128 + (OFFSETS ? 32 : 16) / blocks;
  // The scales times -kSumStart, and -kSumStart itself.
  alignas(16) float room[16];
  for (int i = 8; i < 16; ++i) room[i] = -kSumStart;
  const uint8_t* at;
  int left;
  if constexpr (OFFSETS) {
    WINDLASS_LOOP("15", WINDLASS_SPLIT, WINDLASS_OFFSETS);
  } else {
    WINDLASS_LOOP("240", WINDLASS_SPLIT_SIGNED, "");
  }
}

#undef WINDLASS_LOOP
#undef WINDLASS_OFFSETS
#undef WINDLASS_HALVES
#undef WINDLASS_BLOCK
#undef WINDLASS_ADD
#undef WINDLASS_SCALE
#undef WINDLASS_SPLIT_SIGNED
#undef WINDLASS_SPLIT
#undef WINDLASS_DOTS

#else

constexpr bool kHasRowLoops = false;
template <int BLOCK, bool OFFSETS>
void multiply_1(const uint8_t*, const uint16_t*, const uint16_t*, int, int, const int8_t*, int64_t,
                const float*, const float*, float*);
template <bool OFFSETS>
void multiply_panel(const uint8_t*, const uint16_t*, const uint16_t*, int, int, const int8_t*,
                    const float*, const float*, float*);

#endif

}  // namespace windlass
