// NEON: 8 rows (two panels) by 4 outputs, the inner loop of GEMMs with many rows.
//
// Reads codes as packed; the sums are bit-identical to those of few_rows_neon.h. v0-v7: int32
// accumulators; v8-v15: rows of x; v24-v27: weights; v16-v23: float accumulators; v28: weight
// scales; v29-v30: scales of x.

#pragma once

#include "few_rows_neon.h"

namespace windlass {

// Scales of one group for 4 outputs of a tile; `shifts` as in multiply_4, twice for loads of two vectors.
struct HalfScales {
  float scales[4], shifts[8], offsets[4];
};

// Scales of one group of a tile.
class GroupScales {
 public:
  const HalfScales* half(int first_output) const { return halves_ + first_output / 4; }
  tile::Floats scales() const;
  void set(tile::Floats scales, tile::Floats offsets);

 private:
  HalfScales halves_[2];
};

#if defined(WINDLASS_NEON)

inline F32x8 GroupScales::scales() const {
  return {vld1q_f32(halves_[0].scales), vld1q_f32(halves_[1].scales)};
}
inline void GroupScales::set(F32x8 scales, F32x8 offsets) {
  const F32x8 shifts = mul(scales, splat(-kSumStart));
  const auto set_half = [](HalfScales& half, float32x4_t scale, float32x4_t shift, float32x4_t offset) {
    vst1q_f32(half.scales, scale);
    vst1q_f32(half.shifts, shift);
    vst1q_f32(half.shifts + 4, shift);
    vst1q_f32(half.offsets, offset);
  };
  set_half(halves_[0], scales.a, shifts.a, offsets.a);
  set_half(halves_[1], scales.b, shifts.b, offsets.b);
}

#define WINDLASS_DOT(SUM, W, X, LANE) \
  "sdot v" SUM ".4s, v" W ".16b, v" X ".4b[" LANE "]\n"
#define WINDLASS_DOTS_2(A, B, W, X, Y, LANE) WINDLASS_DOT(A, W, X, LANE) WINDLASS_DOT(B, W, Y, LANE)
#define WINDLASS_DOTS(W, LANE)                                                                \
  WINDLASS_DOTS_2("0", "1", W, "8", "9", LANE) WINDLASS_DOTS_2("2", "3", W, "10", "11", LANE) \
  WINDLASS_DOTS_2("4", "5", W, "12", "13", LANE) WINDLASS_DOTS_2("6", "7", W, "14", "15", LANE)

// Codes of 4 outputs: nibbles are split, signed ones if there are no offsets; bytes are only
// loaded.
#define WINDLASS_SPLIT(LOW, HIGH, OFFSET) \
  "ushr v" HIGH ".16b, v" LOW ".16b, #4\n and v" LOW ".16b, v" LOW ".16b, v31.16b\n"
#define WINDLASS_SPLIT_SIGNED(LOW, HIGH, OFFSET) \
  "and v" HIGH ".16b, v" LOW ".16b, v31.16b\n shl v" LOW ".16b, v" LOW ".16b, #4\n"
#define WINDLASS_BYTES(LOW, HIGH, OFFSET) "ldr q" HIGH ", [%[" OFFSET "]\n"

// Loads are spread between dot products: a run of loads would delay them.
#define WINDLASS_HALF(A, B, X, Y, FROM) \
  WINDLASS_DOTS_2(A, B, "27", X, Y, "3") "ldp q" X ", q" Y ", [%[" FROM "]\n"
#define WINDLASS_END(A, X) WINDLASS_DOT(A, "27", X, "3") "ldr q" X ", [%[scales], #16]\n"
// As in block_neon.h. Dot products with a longer latency would delay these, so they come all at
// once, with the loads for the next block between them.
#define WINDLASS_SCALE(A, X) \
  "fmla v" X ".4s, v" A ".4s, v28.4s\n ldr q" A ", [%[start]]\n"
#define WINDLASS_ADD(X, Y, S, L0, L1, OUT_A, OUT_B, FROM) \
  "fmla v" OUT_A ".4s, v" X ".4s, v" S ".s[" L0 "]\n"     \
  "fmla v" OUT_B ".4s, v" Y ".4s, v" S ".s[" L1 "]\n"     \
  "ldp q" X ", q" Y ", [%[" FROM "]\n"

// Codes are split 6 to 8 dot products before their use, which hides the latency.
#define WINDLASS_BLOCK(SPLIT, SECOND, THIRD, ALL)                                             \
  SPLIT("25", "27", "codes], #96") WINDLASS_DOTS("24", "0")                                   \
  "ldr q24, [%[codes], #" SECOND "]\n" WINDLASS_DOTS("25", "1")                               \
  "ldr q25, [%[codes], #" THIRD "]\n" WINDLASS_DOTS("26", "2")                                \
  SPLIT("24", "26", "codes], #192")                                                           \
  WINDLASS_HALF("0", "1", "8", "9", "x], #64") WINDLASS_HALF("2", "3", "10", "11", "x], #96") \
  WINDLASS_HALF("4", "5", "12", "13", "x_b], #64")                                            \
  WINDLASS_HALF("6", "7", "14", "15", "x_b], #96")                                            \
  SPLIT("25", "27", "codes], #224") WINDLASS_DOTS("24", "0")                                  \
  "add %[codes], %[codes], #" ALL "\n"                                                        \
  "cmp %[codes], %[last]\n csel %[at], %[codes], %[last], lo\n"                               \
  "ldr q24, [%[at]]\n" WINDLASS_DOTS("25", "1") "ldr q25, [%[at], #32]\n"                     \
  "ldr q29, [%[x_scales]], #16\n ldr q30, [%[x_scales_b]], #16\n" WINDLASS_DOTS("26", "2")    \
  WINDLASS_END("0", "8") WINDLASS_END("1", "9") WINDLASS_END("2", "10")                       \
  WINDLASS_END("3", "11") WINDLASS_END("4", "12") WINDLASS_END("5", "13")                     \
  WINDLASS_END("6", "14") WINDLASS_END("7", "15")                                             \
  "add %[x], %[x], #128\n add %[x_b], %[x_b], #128\n"                                         \
  WINDLASS_SCALE("0", "8") WINDLASS_SCALE("1", "9") WINDLASS_SCALE("2", "10")                 \
  WINDLASS_SCALE("3", "11") WINDLASS_SCALE("4", "12") WINDLASS_SCALE("5", "13")               \
  WINDLASS_SCALE("6", "14") WINDLASS_SCALE("7", "15")                                         \
  WINDLASS_ADD("8", "9", "29", "0", "1", "16", "17", "x]")                                    \
  SPLIT("24", "26", "at], #64")                                                               \
  WINDLASS_ADD("10", "11", "29", "2", "3", "18", "19", "x], #32")                             \
  WINDLASS_ADD("12", "13", "30", "0", "1", "20", "21", "x_b]")                                \
  WINDLASS_ADD("14", "15", "30", "2", "3", "22", "23", "x_b], #32")

#define WINDLASS_OFFSETS                                                              \
  "ldr q27, [%[scales], #48]\n ldr q29, [%[sums]], #16\n ldr q30, [%[sums_b]], #16\n" \
  "fmla v16.4s, v27.4s, v29.s[0]\n fmla v17.4s, v27.4s, v29.s[1]\n"                   \
  "fmla v18.4s, v27.4s, v29.s[2]\n fmla v19.4s, v27.4s, v29.s[3]\n"                   \
  "fmla v20.4s, v27.4s, v30.s[0]\n fmla v21.4s, v27.4s, v30.s[1]\n"                   \
  "fmla v22.4s, v27.4s, v30.s[2]\n fmla v23.4s, v27.4s, v30.s[3]\n"

#define WINDLASS_LOOP(MASK, SPLIT, BLOCK, OFFSETS_PART)                                     \
  __asm__ volatile(                                                                         \
      "movi v31.16b, #" MASK "\n ldr q24, [%[at]]\n ldr q25, [%[at], #32]\n"                \
      SPLIT("24", "26", "at], #64")                                                         \
      "ldr q16, [%[out]]\n ldr q17, [%[out], #32]\n"                                        \
      "ldr q18, [%[out], #64]\n ldr q19, [%[out], #96]\n"                                   \
      "ldr q20, [%[out], #128]\n ldr q21, [%[out], #160]\n"                                 \
      "ldr q22, [%[out], #192]\n ldr q23, [%[out], #224]\n"                                 \
      "ldr q0, [%[start]]\n ldr q1, [%[start]]\n ldr q2, [%[start]]\n ldr q3, [%[start]]\n" \
      "ldr q4, [%[start]]\n ldr q5, [%[start]]\n ldr q6, [%[start]]\n ldr q7, [%[start]]\n" \
      "ldp q8, q9, [%[x]]\n ldp q10, q11, [%[x], #32]\n"                                    \
      "ldp q12, q13, [%[x_b]]\n ldp q14, q15, [%[x_b], #32]\n"                              \
      "1: ldr q28, [%[scales]]\n"                                                           \
      "mov %w[left], %w[blocks]\n"                                                          \
      "2: prfm pldl1keep, [%[ahead]]\n prfm pldl1keep, [%[ahead], #64]\n"                   \
      "add %[ahead], %[ahead], %[step]\n" BLOCK                                             \
      "subs %w[left], %w[left], #1\n"                                                       \
      "b.ne 2b\n" OFFSETS_PART "add %[scales], %[scales], #128\n"                           \
      "subs %w[groups], %w[groups], #1\n"                                                   \
      "b.ne 1b\n"                                                                           \
      "str q16, [%[out]]\n str q17, [%[out], #32]\n"                                        \
      "str q18, [%[out], #64]\n str q19, [%[out], #96]\n"                                   \
      "str q20, [%[out], #128]\n str q21, [%[out], #160]\n"                                 \
      "str q22, [%[out], #192]\n str q23, [%[out], #224]\n"                                 \
      : [codes] "+&r"(codes), [x] "+&r"(x), [x_scales] "+&r"(x_scales), [sums] "+&r"(sums), \
        [x_b] "+&r"(x_b), [x_scales_b] "+&r"(x_scales_b), [sums_b] "+&r"(sums_b),           \
        [scales] "+&r"(scales), [groups] "+&r"(groups), [left] "=&r"(left),                 \
        [at] "+&r"(at), [ahead] "+&r"(ahead)                                                \
      : [blocks] "r"(blocks), [start] "r"(kStarts), [out] "r"(out), [last] "r"(last),       \
        [step] "r"(step)                                                                    \
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",  \
        "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", \
        "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")

// Adds to out[row][output], for 8 rows and the first 4 of 8 outputs, `groups` groups of `blocks`
// blocks of 32 inputs, at least one of each. `scales` are those of one GroupScales per group. The
// arrays of the second panel lie `next` bytes after those of the first. `ahead` is prefetched:
// `step` bytes per block, of which 128 are requested.
template <bool NIBBLES, bool OFFSETS>
inline void multiply_8(const uint8_t* codes, const HalfScales* scales, int groups, int blocks,
                       const int8_t* x, const float* x_scales, const float* sums, size_t next,
                       const uint8_t* ahead, int64_t step, float* out) {
  const auto* x_b = x + next;
  const auto* x_scales_b = x_scales + next / sizeof(float);
  const auto* sums_b = sums + next / sizeof(float);
  const uint8_t* last = codes + (static_cast<size_t>(groups) * blocks - 1) * (NIBBLES ? 128 : 256);
  const uint8_t* at = codes;
  int left;
  if constexpr (NIBBLES && OFFSETS) {
    WINDLASS_LOOP("15", WINDLASS_SPLIT, WINDLASS_BLOCK(WINDLASS_SPLIT, "64", "96", "128"),
                  WINDLASS_OFFSETS);
  } else if constexpr (NIBBLES) {
    WINDLASS_LOOP("240", WINDLASS_SPLIT_SIGNED,
                  WINDLASS_BLOCK(WINDLASS_SPLIT_SIGNED, "64", "96", "128"), "");
  } else if constexpr (OFFSETS) {
    WINDLASS_LOOP("0", WINDLASS_BYTES, WINDLASS_BLOCK(WINDLASS_BYTES, "128", "160", "256"),
                  WINDLASS_OFFSETS);
  } else {
    WINDLASS_LOOP("0", WINDLASS_BYTES, WINDLASS_BLOCK(WINDLASS_BYTES, "128", "160", "256"), "");
  }
}

#undef WINDLASS_LOOP
#undef WINDLASS_OFFSETS
#undef WINDLASS_ADD
#undef WINDLASS_SCALE
#undef WINDLASS_BLOCK
#undef WINDLASS_END
#undef WINDLASS_HALF
#undef WINDLASS_BYTES
#undef WINDLASS_SPLIT_SIGNED
#undef WINDLASS_SPLIT
#undef WINDLASS_DOTS
#undef WINDLASS_DOTS_2
#undef WINDLASS_DOT

#else

template <bool NIBBLES, bool OFFSETS>
void multiply_8(const uint8_t*, const HalfScales*, int, int, const int8_t*, const float*, const float*,
                size_t, const uint8_t*, int64_t, float*);

#endif

}  // namespace windlass
