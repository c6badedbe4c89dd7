// NEON: one row by 8 outputs, 4 groups of 32 inputs at a time: the inner loop of decoding.
//
// Reads nibbles as packed. Float and integer operations delay each other where they alternate, so
// the float operations of 4 groups come all at once. The sums are bit-identical to those of
// multiply_1.

#pragma once

#include "simd.h"

namespace windlass {

#if defined(WINDLASS_NEON)

// v0-v5 and v12-v13: int32 accumulators, two per group; v22-v29: group scales; v8-v11 and v18-v21:
// codes; v6-v7: x; v16-v17: float accumulators.

// Shared by all loops of one row; the others, in few_rows_neon.h, undefine these macros. Codes of 8
// inputs: 4 in the low nibbles and 4 in the high ones.
#define WINDLASS_SPLIT(OFFSET, A, B, LOW_A, LOW_B)                                      \
  "ldp q" A ", q" B ", [%[codes], #" OFFSET "]\n"                                       \
  "and v" LOW_A ".16b, v" A ".16b, v31.16b\n and v" LOW_B ".16b, v" B ".16b, v31.16b\n" \
  "ushr v" A ".16b, v" A ".16b, #4\n ushr v" B ".16b, v" B ".16b, #4\n"
// The same for signed nibbles.
#define WINDLASS_SPLIT_SIGNED(OFFSET, A, B, LOW_A, LOW_B)                     \
  "ldp q" A ", q" B ", [%[codes], #" OFFSET "]\n"                             \
  "shl v" LOW_A ".16b, v" A ".16b, #4\n shl v" LOW_B ".16b, v" B ".16b, #4\n" \
  "and v" A ".16b, v" A ".16b, v31.16b\n and v" B ".16b, v" B ".16b, v31.16b\n"
#define WINDLASS_DOTS(S, T, X, LANE, NEXT, A, B, LOW_A, LOW_B) \
  "sdot v" S ".4s, v" LOW_A ".16b, v" X ".4b[" LANE "]\n"      \
  "sdot v" T ".4s, v" LOW_B ".16b, v" X ".4b[" LANE "]\n"      \
  "sdot v" S ".4s, v" A ".16b, v" X ".4b[" NEXT "]\n"          \
  "sdot v" T ".4s, v" B ".16b, v" X ".4b[" NEXT "]\n"

// Converts float16 to float32 like load_f16_fast.
#define WINDLASS_HALVES(FROM, I, A, B)                                   \
  "ldr q" B ", [%[" FROM "], #16*" I "]\n"                               \
  "sshll v" A ".4s, v" B ".4h, #13\n sshll2 v" B ".4s, v" B ".8h, #13\n" \
  "bic v" A ".4s, #0x70, lsl #24\n bic v" B ".4s, #0x70, lsl #24\n"

// Prefetches a cache line into L1, and a later one into L2.
#define WINDLASS_FETCH(LINE)                     \
  "prfm pldl1keep, [%[ahead], #64*(" LINE ")]\n" \
  "prfm pldl2keep, [%[ahead], #64*(" LINE ")+3072]\n"
constexpr int kGroupsAhead = 1024;

// Codes are split several dot products before their use.
#define WINDLASS_GROUP(SPLIT, I, S, T, A, B)                                             \
  WINDLASS_HALVES("scales", I, A, B) "ldr q" S ", [%[start]]\n ldr q" T ", [%[start]]\n" \
  SPLIT("128*" I, "8", "9", "18", "19") SPLIT("128*" I "+32", "10", "11", "20", "21")    \
  WINDLASS_FETCH("2*" I) "ld1 {v6.16b}, [%[x]], %[next_run]\n"                           \
  WINDLASS_DOTS(S, T, "6", "0", "2", "8", "9", "18", "19")                               \
  SPLIT("128*" I "+64", "8", "9", "18", "19")                                            \
  WINDLASS_DOTS(S, T, "6", "1", "3", "10", "11", "20", "21")                             \
  SPLIT("128*" I "+96", "10", "11", "20", "21")                                          \
  WINDLASS_FETCH("2*" I "+1") "ld1 {v7.16b}, [%[x]], %[next_run]\n"                      \
  WINDLASS_DOTS(S, T, "7", "0", "2", "8", "9", "18", "19")                               \
  WINDLASS_DOTS(S, T, "7", "1", "3", "10", "11", "20", "21")

#define WINDLASS_SUBTRACT(S, T) \
  "fsub v" S ".4s, v" S ".4s, v30.4s\n fsub v" T ".4s, v" T ".4s, v30.4s\n"
#define WINDLASS_SCALE(S, T, A, B) \
  "fmul v" S ".4s, v" S ".4s, v" A ".4s\n fmul v" T ".4s, v" T ".4s, v" B ".4s\n"
#define WINDLASS_ADD(S, T, X) \
  "fmla v16.4s, v" S ".4s, v" X ".s[0]\n fmla v17.4s, v" T ".4s, v" X ".s[0]\n"
#define WINDLASS_OFFSETS(I, A, B, X) \
  WINDLASS_HALVES("offsets", I, A, B) "ldr q" X ", [%[sums], #16*" I "]\n"
#define WINDLASS_NOTHING(...)

// The float operations of 4 groups, and of one of the remaining groups.
#define WINDLASS_ENDS_OF_4(OFFSETS, ADD_OFFSETS)                              \
  "ldp q14, q15, [%[x_scales]]\n ldp q6, q7, [%[x_scales], #32]\n"            \
  WINDLASS_SUBTRACT("0", "1") WINDLASS_SUBTRACT("2", "3")                     \
  WINDLASS_SUBTRACT("4", "5") WINDLASS_SUBTRACT("12", "13")                   \
  WINDLASS_SCALE("0", "1", "24", "25") WINDLASS_SCALE("2", "3", "26", "27")   \
  WINDLASS_SCALE("4", "5", "28", "29") WINDLASS_SCALE("12", "13", "22", "23") \
  OFFSETS("0", "24", "25", "8") OFFSETS("1", "26", "27", "9")                 \
  OFFSETS("2", "28", "29", "10") OFFSETS("3", "22", "23", "11")               \
  WINDLASS_ADD("0", "1", "14") ADD_OFFSETS("24", "25", "8")                   \
  WINDLASS_ADD("2", "3", "15") ADD_OFFSETS("26", "27", "9")                   \
  WINDLASS_ADD("4", "5", "6") ADD_OFFSETS("28", "29", "10")                   \
  WINDLASS_ADD("12", "13", "7") ADD_OFFSETS("22", "23", "11")
#define WINDLASS_ENDS_OF_1(OFFSETS, ADD_OFFSETS)                     \
  "ldr q14, [%[x_scales]]\n" WINDLASS_SUBTRACT("0", "1")             \
  WINDLASS_SCALE("0", "1", "24", "25") OFFSETS("0", "24", "25", "8") \
  WINDLASS_ADD("0", "1", "14") ADD_OFFSETS("24", "25", "8")
#define WINDLASS_MOVE_ON(GROUPS)                                                            \
  "add %[codes], %[codes], #128*" GROUPS "\n"                                               \
  "add %[scales], %[scales], #16*" GROUPS "\n add %[offsets], %[offsets], #16*" GROUPS "\n" \
  "add %[x_scales], %[x_scales], #16*" GROUPS "\n add %[sums], %[sums], #16*" GROUPS "\n"

#define WINDLASS_LOOP(MASK, SPLIT, LAST_FETCH, OFFSETS, ADD_OFFSETS)                     \
  __asm__ volatile(                                                                      \
      "movi v31.16b, #" MASK "\n ldr q30, [%[start]]\n ldp q16, q17, [%[out]]\n"         \
      "subs %w[groups], %w[groups], #4\n"                                                \
      "b.lt 2f\n"                                                                        \
      "1:\n" WINDLASS_GROUP(SPLIT, "0", "0", "1", "24", "25")                            \
      WINDLASS_GROUP(SPLIT, "1", "2", "3", "26", "27")                                   \
      WINDLASS_GROUP(SPLIT, "2", "4", "5", "28", "29")                                   \
      WINDLASS_GROUP(SPLIT, "3", "12", "13", "22", "23")                                 \
      WINDLASS_FETCH("8") LAST_FETCH                                                     \
      WINDLASS_ENDS_OF_4(OFFSETS, ADD_OFFSETS) WINDLASS_MOVE_ON("4")                     \
      "add %[ahead], %[ahead], %[step]\n subs %w[groups], %w[groups], #4\n"              \
      "b.ge 1b\n"                                                                        \
      "2: adds %w[groups], %w[groups], #4\n"                                             \
      "b.eq 4f\n"                                                                        \
      "3:\n" WINDLASS_GROUP(SPLIT, "0", "0", "1", "24", "25")                            \
      WINDLASS_ENDS_OF_1(OFFSETS, ADD_OFFSETS) WINDLASS_MOVE_ON("1")                     \
      "add %[ahead], %[ahead], #128\n subs %w[groups], %w[groups], #1\n"                 \
      "b.ne 3b\n"                                                                        \
      "4: stp q16, q17, [%[out]]\n"                                                      \
      : [codes] "+&r"(codes), [x] "+&r"(x), [x_scales] "+&r"(x_scales),                  \
        [sums] "+&r"(sums), [scales] "+&r"(scales), [offsets] "+&r"(offsets),            \
        [groups] "+&r"(groups), [ahead] "+&r"(ahead)                                     \
      : [start] "r"(kStarts), [out] "r"(out), [step] "r"(step), [next_run] "r"(next_run) \
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9",      \
        "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20",     \
        "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")

// Adds groups of one block of 32 inputs to out[output], at least one.
template <bool OFFSETS>
inline void multiply_groups(const uint8_t* codes, const uint16_t* scales, const uint16_t* offsets,
                            int groups, const int8_t* x, int64_t next_run,
                            const float* x_scales, const float* sums, float* out) {
  const uint8_t* ahead = codes + kGroupsAhead;
  constexpr int64_t step = 4 * (128 + (OFFSETS ? 32 : 16));
  if constexpr (OFFSETS) {
    WINDLASS_LOOP("15", WINDLASS_SPLIT, WINDLASS_FETCH("9"), WINDLASS_OFFSETS, WINDLASS_ADD);
  } else {
    WINDLASS_LOOP("240", WINDLASS_SPLIT_SIGNED, "", WINDLASS_NOTHING, WINDLASS_NOTHING);
  }
}

#undef WINDLASS_LOOP
#undef WINDLASS_MOVE_ON
#undef WINDLASS_ENDS_OF_1
#undef WINDLASS_ENDS_OF_4
#undef WINDLASS_NOTHING
#undef WINDLASS_OFFSETS
#undef WINDLASS_ADD
#undef WINDLASS_SCALE
#undef WINDLASS_SUBTRACT
#undef WINDLASS_GROUP
#undef WINDLASS_FETCH
#undef WINDLASS_HALVES

#endif

}  // namespace windlass
