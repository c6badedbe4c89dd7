// The same as part.h for pages of halves, in the CPU's own 16-bit arithmetic where it has one.
//
// Sums of 16 bits stay short: a score's go over 64 features and a mixed value's over 32 keys, and
// are added in 32 bits. Powers of two keep them in range, whatever queries, keys and values are.

#pragma once

#include <cstring>

#include "part.h"

namespace windlass {

#if !defined(WINDLASS_SCALAR) && defined(__aarch64__) && \
    defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)

constexpr bool kHasHalfMath = true;
constexpr int kFeatures = 64;  // of a score that are summed in 16 bits
constexpr int kChain = 32;     // keys of a mixed value

inline float16x8_t halves_at(const void* row, int i) {
  return vld1q_f16(static_cast<const float16_t*>(row) + i);
}

// Rounds x, times a power of two; returns what its gemm are to be multiplied by.
inline float write_halves(const float* x, int dim, uint16_t* out) {
  F32x8 peaks = zero();
  for (int d = 0; d < dim; d += kLanes) {
    const F32x8 v = load(x + d);
    peaks = larger_magnitude(peaks, magnitude(v));
  }
  const float peak = largest_of(peaks);
  // Below 2^-5 each, sums with the largest half stay finite. No power mends what is no number.
  float power = 1.0f;
  if (peak > 0x1p-100f && peak < 0x1p100f) {
    uint32_t bits;
    std::memcpy(&bits, &peak, 4);
    bits &= 0x7f800000;
    std::memcpy(&power, &bits, 4);
    power = 0x1p-6f / power;
  }
  for (int d = 0; d < dim; d += kLanes) write_half(out + d, mul(load(x + d), splat(power)));
  return 1.0f / power;
}

// Written out because compilers copy sums and lanes between registers on the way.
template <int LANE>
WINDLASS_INLINE void add_lane(float16x8_t& sum, float16x8_t x, float16x8_t weights) {
  __asm__("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(sum) : "w"(x), "x"(weights), "i"(LANE));
}

// Products of lines with 4 keys over all features from `first` to `end`: for each line a vector
// of two sums for each key.
template <int COUNT>
WINDLASS_INLINE void score_some(const float16_t* const* keys, const float16_t* const* queries,
                                int first, int end, float16x8_t* pairs) {
  float16x8_t sums[COUNT][4];
  for (int m = 0; m < COUNT; ++m) {
    for (int i = 0; i < 4; ++i) sums[m][i] = vdupq_n_f16(0);
  }
  for (int d = first; d < end; d += kLanes) {
    float16x8_t key[4];
    for (int i = 0; i < 4; ++i) key[i] = halves_at(keys[i], d);
    for (int m = 0; m < COUNT; ++m) {
      const float16x8_t q = halves_at(queries[m], d);
      for (int i = 0; i < 4; ++i) sums[m][i] = vfmaq_f16(sums[m][i], q, key[i]);
    }
  }
  for (int m = 0; m < COUNT; ++m) {
    pairs[m] = vpaddq_f16(vpaddq_f16(sums[m][0], sums[m][1]), vpaddq_f16(sums[m][2], sums[m][3]));
  }
}

// The same for 64 features and 3 or 4 lines: v16-v31 are sums, and while one half of the others is
// multiplied the other is read.
#define WINDLASS_LINE(OP, A, B, C, D, Q, K0, K1, K2, K3)                                   \
  OP " v" A ".8h, v" Q ".8h, v" K0 ".8h\n" OP " v" B ".8h, v" Q ".8h, v" K1 ".8h\n"       \
  OP " v" C ".8h, v" Q ".8h, v" K2 ".8h\n" OP " v" D ".8h, v" Q ".8h, v" K3 ".8h\n"
#define WINDLASS_READ(AT, K0, K1, K2, K3, Q0, Q1, Q2)                                      \
  "ldr q" K0 ", [%[k0], #" AT "]\n ldr q" Q0 ", [%[q0], #" AT "]\n"                       \
  "ldr q" K1 ", [%[k1], #" AT "]\n ldr q" K2 ", [%[k2], #" AT "]\n"                       \
  "ldr q" K3 ", [%[k3], #" AT "]\n ldr q" Q1 ", [%[q1], #" AT "]\n"                       \
  "ldr q" Q2 ", [%[q2], #" AT "]\n"
#define WINDLASS_STEP_3(OP, AT, K0, K1, K2, K3, Q0, Q1, Q2, Q3)                            \
  WINDLASS_READ(AT, K0, K1, K2, K3, Q0, Q1, Q2)                                            \
  WINDLASS_LINE(OP, "16", "17", "18", "19", Q0, K0, K1, K2, K3)                            \
  WINDLASS_LINE(OP, "20", "21", "22", "23", Q1, K0, K1, K2, K3)                            \
  WINDLASS_LINE(OP, "24", "25", "26", "27", Q2, K0, K1, K2, K3)
#define WINDLASS_STEP_4(OP, AT, K0, K1, K2, K3, Q0, Q1, Q2, Q3)                            \
  WINDLASS_STEP_3(OP, AT, K0, K1, K2, K3, Q0, Q1, Q2, Q3)                                  \
  "ldr q" Q3 ", [%[q3], #" AT "]\n"                                                        \
  WINDLASS_LINE(OP, "28", "29", "30", "31", Q3, K0, K1, K2, K3)
#define WINDLASS_EVEN(STEP, OP, AT) STEP(OP, AT, "0", "1", "2", "3", "4", "5", "6", "7")
#define WINDLASS_ODD(STEP, AT) STEP("fmla", AT, "8", "9", "10", "11", "12", "13", "14", "15")
#define WINDLASS_PAIRS(A, B, C, D, AT)                                                     \
  "faddp v" A ".8h, v" A ".8h, v" B ".8h\n faddp v" C ".8h, v" C ".8h, v" D ".8h\n"       \
  "faddp v" A ".8h, v" A ".8h, v" C ".8h\n str q" A ", [%[out], #" AT "]\n"
#define WINDLASS_SCORE(STEP, LAST_PAIRS)                                                   \
  __asm__ volatile(                                                                        \
      WINDLASS_EVEN(STEP, "fmul", "0") WINDLASS_ODD(STEP, "16")                            \
      WINDLASS_EVEN(STEP, "fmla", "32") WINDLASS_ODD(STEP, "48")                           \
      WINDLASS_EVEN(STEP, "fmla", "64") WINDLASS_ODD(STEP, "80")                           \
      WINDLASS_EVEN(STEP, "fmla", "96") WINDLASS_ODD(STEP, "112")                          \
      WINDLASS_PAIRS("16", "17", "18", "19", "0") WINDLASS_PAIRS("20", "21", "22", "23", "16") \
      WINDLASS_PAIRS("24", "25", "26", "27", "32") LAST_PAIRS                              \
      : : [k0] "r"(keys[0] + first), [k1] "r"(keys[1] + first), [k2] "r"(keys[2] + first), \
          [k3] "r"(keys[3] + first), [q0] "r"(queries[0] + first),                         \
          [q1] "r"(queries[1] + first), [q2] "r"(queries[2] + first),                      \
          [q3] "r"(queries[COUNT - 1] + first), [out] "r"(pairs)                           \
      : "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",       \
        "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21",       \
        "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")

template <int COUNT>
WINDLASS_INLINE void score_64(const float16_t* const* keys, const float16_t* const* queries,
                              int first, float16x8_t* pairs) {
  if constexpr (COUNT == 3) {
    WINDLASS_SCORE(WINDLASS_STEP_3, "");
  } else if constexpr (COUNT == 4) {
    WINDLASS_SCORE(WINDLASS_STEP_4, WINDLASS_PAIRS("28", "29", "30", "31", "48"));
  } else {
    score_some<COUNT>(keys, queries, first, first + kFeatures, pairs);
  }
}

#undef WINDLASS_SCORE
#undef WINDLASS_PAIRS
#undef WINDLASS_ODD
#undef WINDLASS_EVEN
#undef WINDLASS_STEP_4
#undef WINDLASS_STEP_3
#undef WINDLASS_READ
#undef WINDLASS_LINE

template <int COUNT>
void score_halves(const Part& part, int dim, const uint16_t* queries, bool fetch,
                  float (*scores)[kPart]) {
  const int last = part.count - 1;
  const float16_t* lines[COUNT];
  for (int m = 0; m < COUNT; ++m) {
    lines[m] = reinterpret_cast<const float16_t*>(queries + m * dim);
  }
  for (int k = 0; k < part.count; k += 8) {
    const float16_t* keys[8];
    for (int i = 0; i < 8; ++i) {
      keys[i] = static_cast<const float16_t*>(part.keys[std::min(k + i, last)]);
    }
    if (fetch) {
      for (int i = 0; i < 8; i += 4) {  // four that lie in one page are one run
        prefetch(part.keys[std::min(k + i + kKeysAhead, last)], 4 * dim * 2);
        prefetch(part.values[std::min(k + i, last)], 4 * dim * 2);
      }
    }
    for (int first = 0; first < dim; first += kFeatures) {
      float16x8_t pairs[2][COUNT];
      for (int i = 0; i < 2; ++i) {
        if (first + kFeatures <= dim) {
          score_64<COUNT>(keys + 4 * i, lines, first, pairs[i]);
        } else {
          score_some<COUNT>(keys + 4 * i, lines, first, dim, pairs[i]);
        }
      }
      for (int m = 0; m < COUNT; ++m) {
        const float16x8_t all = vpaddq_f16(pairs[0][m], pairs[1][m]);
        const F32x8 sums = {vcvt_f32_f16(vget_low_f16(all)), vcvt_high_f32_f16(all)};
        store(scores[m] + k, first == 0 ? sums : add(load(scores[m] + k), sums));
      }
    }
  }
}

// 2^x to 3e-6 of it for x from -126 to 0; 0 below -127, -infinity included. NaN for NaN.
inline F32x8 power_of_two(F32x8 x) {
  x = at_least(x, splat(-127.0f));
  const F32x8 magic = splat(12582912.0f);
  const F32x8 shifted = add(x, magic);
  const F32x8 r = sub(x, sub(shifted, magic));
  F32x8 p = splat(9.5700882e-3f);
  p = fma(splat(5.5917864e-2f), p, r);
  p = fma(splat(2.4024745e-1f), p, r);
  p = fma(splat(6.9312181e-1f), p, r);
  p = fma(splat(0.99999926f), p, r);
  return mul(p, exp2_int(shifted));
}

// As soften does, of scores that are multiplied by `factor`.
inline Exponentials soften_halves(const Part& part, Sight sight, float factor, float* scores) {
  const int padded = (part.count + kLanes - 1) / kLanes * kLanes;
  const F32x8 scale = splat(factor * 1.44269504f);
  const auto fill_unseen = [&](float value) {
    std::fill(scores, scores + sight.begin, value);
    std::fill(scores + sight.end, scores + padded, value);
  };
  const bool partly = sight.begin > 0 || sight.end < padded;
  if (partly) fill_unseen(factor < 0.0f ? -kNothing : kNothing);
  F32x8 peaks = splat(kNothing);
  for (int k = 0; k < padded; k += kLanes) {
    const F32x8 x = mul(load(scores + k), scale);
    store(scores + k, x);
    peaks = larger(peaks, x);
  }
  const float peak = largest_of(peaks);
  peaks = splat(exponent_base(peak));
  F32x8 sum = zero();
  if (partly) {
    for (int k = 0; k < padded; k += kLanes) {
      store(scores + k, power_of_two(sub(load(scores + k), peaks)));
    }
    fill_unseen(0.0f);
    for (int k = 0; k < padded; k += kLanes) sum = add(sum, load(scores + k));
  } else {
    for (int k = 0; k < padded; k += kLanes) {
      const F32x8 e = power_of_two(sub(load(scores + k), peaks));
      store(scores + k, e);
      sum = add(sum, e);
    }
  }
  return {peak * 0.693147181f, sum_of(sum)};
}

// Values of a part, weighted: COUNT lines, WIDE vectors of their features at a time. Weights are
// [keys][4 lines], zero past the last key.
template <int COUNT, int WIDE>
void mix_halves(const Part& part, int begin, int end, int dim, const uint16_t* weights,
                float* mixed) {
  for (int d = begin; d < end; d += WIDE * kLanes) {
    for (int first = 0; first < part.count; first += kChain) {
      float16x8_t sums[COUNT][WIDE];
      for (int m = 0; m < COUNT; ++m) {
        for (int i = 0; i < WIDE; ++i) sums[m][i] = vdupq_n_f16(0);
      }
      const int last = std::min(first + kChain, part.count);
      for (int k = first; k < last; k += 2) {
        const float16x8_t weight = halves_at(weights, 4 * k);
        unrolled<2>([&](auto key) WINDLASS_INLINED {
          float16x8_t value[WIDE];
          for (int i = 0; i < WIDE; ++i) value[i] = halves_at(part.values[k + key], d + i * kLanes);
          unrolled<COUNT>([&](auto m) WINDLASS_INLINED {
            for (int i = 0; i < WIDE; ++i) {
              add_lane<4 * key + m>(sums[m][i], value[i], weight);
            }
          });
        });
      }
      for (int m = 0; m < COUNT; ++m) {
        for (int i = 0; i < WIDE; ++i) {
          float* to = mixed + m * dim + d + i * kLanes;
          const F32x8 sum = {vcvt_f32_f16(vget_low_f16(sums[m][i])), vcvt_high_f32_f16(sums[m][i])};
          store(to, first == 0 ? sum : add(load(to), sum));
        }
      }
    }
  }
}

template <int COUNT>
void attend_halves(const Part& part, int dim, const uint16_t* queries, const float* factors,
                   const Sight* sights, bool first, float* peak, float* sum, float* mixed) {
  alignas(64) float scores[COUNT][kPart];
  alignas(64) uint16_t weights[4 * kPart];
  score_halves<COUNT>(part, dim, queries, first, scores);
  if (first && part.next != nullptr) prefetch(part.next, kKeysAhead * dim * 2);
  for (int m = 0; m < COUNT; ++m) {
    const Exponentials e = soften_halves(part, sights[m], factors[m], scores[m]);
    peak[m] = e.peak;
    sum[m] = e.sum;
  }
  // A pdl of values stays finite: each is at most the largest half.
  constexpr float lowered = 1.0f / kChain;
  for (int k = 0; k < part.count; k += kLanes) {
    float16x8x4_t lines;
    for (int m = 0; m < 4; ++m) {
      const F32x8 w = mul(load(scores[std::min(m, COUNT - 1)] + k), splat(lowered));
      lines.val[m] = vcvt_high_f16_f32(vcvt_f16_f32(w.a), w.b);
    }
    vst4q_f16(reinterpret_cast<float16_t*>(weights) + 4 * k, lines);
  }
  constexpr int wide = 4;
  const int even = dim / (wide * kLanes) * wide * kLanes;
  mix_halves<COUNT, wide>(part, 0, even, dim, weights, mixed);
  mix_halves<COUNT, 1>(part, even, dim, dim, weights, mixed);
  for (int m = 0; m < COUNT; ++m) sum[m] *= lowered;
}

#else

constexpr bool kHasHalfMath = false;
inline float write_halves(const float*, int, uint16_t*) { return 1.0f; }
template <int COUNT>
void attend_halves(const Part&, int, const uint16_t*, const float*, const Sight*, bool, float*,
                   float*, float*) {}

#endif

}  // namespace windlass
