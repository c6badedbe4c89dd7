// attention_chunk.h for float16 pages, in the CPU's 16-bit arithmetic where available.
//
// Sums in 16 bits stay short: 64 features of a score, 32 keys of a weighted value; longer sums are
// float32. Powers of two keep all values in range, for any queries, keys and values.

#pragma once

#include <cstring>

#include "attention_chunk.h"

namespace windlass {

#if !defined(WINDLASS_SCALAR) && defined(__aarch64__) && \
    defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)

constexpr bool kHasF16Math = true;
constexpr int kF16Features = 64;  // features of a score summed in 16 bits
constexpr int kF16Keys = 32;  // keys of a weighted value summed in 16 bits
// Sums and accumulated values are multiplied by this: a sum of kF16Keys values stays finite, since each
// is at most the largest float16.
constexpr float kF16SumUnit = 1.0f / kF16Keys;

inline float16x8_t halves_at(const void* row, int i) {
  return vld1q_f16(static_cast<const float16_t*>(row) + i);
}

// Converts x times a power of two to float16; returns the factor that restores its scores.
inline float write_f16_query(const float* x, int dim, uint16_t* out) {
  F32x8 peaks = zero();
  for (int d = 0; d < dim; d += kLanes) {
    const F32x8 v = load(x + d);
    peaks = maximum_abs(peaks, absolute(v));
  }
  const float peak = max_of(peaks);
  // Below 2^-5 each, sums with the largest float16 stay finite. No power of two helps NaN or
  // infinity.
  float power = 1.0f;
  if (peak > 0x1p-100f && peak < 0x1p100f) {
    uint32_t bits;
    std::memcpy(&bits, &peak, 4);
    bits &= 0x7f800000;
    std::memcpy(&power, &bits, 4);
    power = 0x1p-6f / power;
  }
  for (int d = 0; d < dim; d += kLanes) store_f16(out + d, mul(load(x + d), splat(power)));
  return 1.0f / power;
}

// Assembly, because compilers copy accumulators and lanes between registers.
template <int LANE>
WINDLASS_INLINE void add_lane(float16x8_t& sum, float16x8_t x, float16x8_t weights) {
  __asm__("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(sum) : "w"(x), "x"(weights), "i"(LANE));
}

// Dot products of lines with 4 keys over features [first, end): per line a vector of two sums per
// key.
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

// The same for 64 features and 3 or 4 lines: v16-v31 are accumulators; the other registers are
// double-buffered.
#define WINDLASS_LINE(OP, A, B, C, D, Q, K0, K1, K2, K3)                            \
  OP " v" A ".8h, v" Q ".8h, v" K0 ".8h\n" OP " v" B ".8h, v" Q ".8h, v" K1 ".8h\n" \
  OP " v" C ".8h, v" Q ".8h, v" K2 ".8h\n" OP " v" D ".8h, v" Q ".8h, v" K3 ".8h\n"
#define WINDLASS_READ(AT, K0, K1, K2, K3, Q0, Q1, Q2)               \
  "ldr q" K0 ", [%[k0], #" AT "]\n ldr q" Q0 ", [%[q0], #" AT "]\n" \
  "ldr q" K1 ", [%[k1], #" AT "]\n ldr q" K2 ", [%[k2], #" AT "]\n" \
  "ldr q" K3 ", [%[k3], #" AT "]\n ldr q" Q1 ", [%[q1], #" AT "]\n" \
  "ldr q" Q2 ", [%[q2], #" AT "]\n"
#define WINDLASS_STEP_3(OP, AT, K0, K1, K2, K3, Q0, Q1, Q2, Q3) \
  WINDLASS_READ(AT, K0, K1, K2, K3, Q0, Q1, Q2)                 \
  WINDLASS_LINE(OP, "16", "17", "18", "19", Q0, K0, K1, K2, K3) \
  WINDLASS_LINE(OP, "20", "21", "22", "23", Q1, K0, K1, K2, K3) \
  WINDLASS_LINE(OP, "24", "25", "26", "27", Q2, K0, K1, K2, K3)
#define WINDLASS_STEP_4(OP, AT, K0, K1, K2, K3, Q0, Q1, Q2, Q3) \
  WINDLASS_STEP_3(OP, AT, K0, K1, K2, K3, Q0, Q1, Q2, Q3)       \
  "ldr q" Q3 ", [%[q3], #" AT "]\n"                             \
  WINDLASS_LINE(OP, "28", "29", "30", "31", Q3, K0, K1, K2, K3)
#define WINDLASS_EVEN(STEP, OP, AT) STEP(OP, AT, "0", "1", "2", "3", "4", "5", "6", "7")
#define WINDLASS_ODD(STEP, AT) STEP("fmla", AT, "8", "9", "10", "11", "12", "13", "14", "15")
#define WINDLASS_PAIRS(A, B, C, D, AT)                                              \
  "faddp v" A ".8h, v" A ".8h, v" B ".8h\n faddp v" C ".8h, v" C ".8h, v" D ".8h\n" \
  "faddp v" A ".8h, v" A ".8h, v" C ".8h\n str q" A ", [%[out], #" AT "]\n"
#define WINDLASS_SCORE(STEP, LAST_PAIRS)                                                       \
  __asm__ volatile(                                                                            \
      WINDLASS_EVEN(STEP, "fmul", "0") WINDLASS_ODD(STEP, "16")                                \
      WINDLASS_EVEN(STEP, "fmla", "32") WINDLASS_ODD(STEP, "48")                               \
      WINDLASS_EVEN(STEP, "fmla", "64") WINDLASS_ODD(STEP, "80")                               \
      WINDLASS_EVEN(STEP, "fmla", "96") WINDLASS_ODD(STEP, "112")                              \
      WINDLASS_PAIRS("16", "17", "18", "19", "0") WINDLASS_PAIRS("20", "21", "22", "23", "16") \
      WINDLASS_PAIRS("24", "25", "26", "27", "32") LAST_PAIRS                                  \
      : : [k0] "r"(keys[0] + first), [k1] "r"(keys[1] + first), [k2] "r"(keys[2] + first),     \
          [k3] "r"(keys[3] + first), [q0] "r"(queries[0] + first),                             \
          [q1] "r"(queries[1] + first), [q2] "r"(queries[2] + first),                          \
          [q3] "r"(queries[COUNT - 1] + first), [out] "r"(pairs)                               \
      : "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",           \
        "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21",           \
        "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")

template <int COUNT>
WINDLASS_INLINE void score_64(const float16_t* const* keys, const float16_t* const* queries,
                              int first, float16x8_t* pairs) {
  if constexpr (COUNT == 3) {
    WINDLASS_SCORE(WINDLASS_STEP_3, "");
  } else if constexpr (COUNT == 4) {
    WINDLASS_SCORE(WINDLASS_STEP_4, WINDLASS_PAIRS("28", "29", "30", "31", "48"));
  } else {
    score_some<COUNT>(keys, queries, first, first + kF16Features, pairs);
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
void score_f16(const KVChunk& chunk, int dim, const uint16_t* queries, bool with_prefetch,
               float (*scores)[kChunkKeys]) {
  const int last = chunk.count - 1;
  const float16_t* lines[COUNT];
  for (int m = 0; m < COUNT; ++m) {
    lines[m] = reinterpret_cast<const float16_t*>(queries + m * dim);
  }
  for (int k = 0; k < chunk.count; k += 8) {
    const float16_t* keys[8];
    for (int i = 0; i < 8; ++i) {
      keys[i] = static_cast<const float16_t*>(chunk.keys[std::min(k + i, last)]);
    }
    if (with_prefetch) {
      for (int i = 0; i < 8; i += 4) {  // four positions of one page are contiguous
        prefetch(chunk.keys[std::min(k + i + kKeysAhead, last)], 4 * dim * 2);
        prefetch(chunk.values[std::min(k + i, last)], 4 * dim * 2);
      }
    }
    for (int first = 0; first < dim; first += kF16Features) {
      float16x8_t pairs[2][COUNT];
      for (int i = 0; i < 2; ++i) {
        if (first + kF16Features <= dim) {
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

// 2^x with a relative error of 3e-6 for x from -126 to 0; 0 below -127, -infinity included. NaN for
// NaN.
inline F32x8 power_of_two(F32x8 x) {
  x = clamp_min(x, splat(-127.0f));
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

// Like softmax, for scores multiplied by `factor`.
inline SoftmaxStats softmax_f16(const KVChunk& chunk, VisibleRange range, float factor,
                                float* scores) {
  const int padded = (chunk.count + kLanes - 1) / kLanes * kLanes;
  if (chunk.soft_cap > 0.0f) {
    for (int k = 0; k < padded; k += kLanes) store(scores + k, mul(load(scores + k), splat(factor)));
    limit_scores(chunk.soft_cap, padded, scores);
    factor = 1.0f;
  }
  const F32x8 scale = splat(factor * 1.44269504f);
  const auto fill_unseen = [&](float value) {
    std::fill(scores, scores + range.begin, value);
    std::fill(scores + range.end, scores + padded, value);
  };
  const bool partly = range.begin > 0 || range.end < padded;
  if (partly) fill_unseen(factor < 0.0f ? -kMinusInfinity : kMinusInfinity);
  F32x8 peaks = splat(kMinusInfinity);
  for (int k = 0; k < padded; k += kLanes) {
    const F32x8 x = mul(load(scores + k), scale);
    store(scores + k, x);
    peaks = maximum(peaks, x);
  }
  const float peak = max_of(peaks);
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

// Adds the weighted values of a chunk: COUNT lines, WIDE vectors of features at a time. Weights are
// [keys][4 lines], zero past the last key.
template <int COUNT, int WIDE>
void accumulate_f16(const KVChunk& chunk, int begin, int end, int dim, const uint16_t* weights,
                    float* acc) {
  for (int d = begin; d < end; d += WIDE * kLanes) {
    for (int first = 0; first < chunk.count; first += kF16Keys) {
      float16x8_t sums[COUNT][WIDE];
      for (int m = 0; m < COUNT; ++m) {
        for (int i = 0; i < WIDE; ++i) sums[m][i] = vdupq_n_f16(0);
      }
      const int last = std::min(first + kF16Keys, chunk.count);
      for (int k = first; k < last; k += 2) {
        const float16x8_t weight = halves_at(weights, 4 * k);
        unrolled<2>([&](auto key) WINDLASS_INLINED {
          float16x8_t value[WIDE];
          for (int i = 0; i < WIDE; ++i) value[i] = halves_at(chunk.values[k + key],
                                                              d + i * kLanes);
          unrolled<COUNT>([&](auto m) WINDLASS_INLINED {
            for (int i = 0; i < WIDE; ++i) {
              add_lane<4 * key + m>(sums[m][i], value[i], weight);
            }
          });
        });
      }
      for (int m = 0; m < COUNT; ++m) {
        for (int i = 0; i < WIDE; ++i) {
          float* to = acc + m * dim + d + i * kLanes;
          const F32x8 sum = {vcvt_f32_f16(vget_low_f16(sums[m][i])), vcvt_high_f32_f16(sums[m][i])};
          store(to, first == 0 ? sum : add(load(to), sum));
        }
      }
    }
  }
}

template <int COUNT>
void attend_f16(const KVChunk& chunk, int dim, const uint16_t* queries, const float* factors,
                const VisibleRange* ranges, bool first, float* peak, float* sum, float* acc) {
  alignas(64) float scores[COUNT][kChunkKeys];
  alignas(64) uint16_t weights[4 * kChunkKeys];
  score_f16<COUNT>(chunk, dim, queries, first, scores);
  if (first && chunk.next != nullptr) prefetch(chunk.next, kKeysAhead * dim * 2);
  for (int m = 0; m < COUNT; ++m) {
    const SoftmaxStats e = softmax_f16(chunk, ranges[m], factors[m], scores[m]);
    peak[m] = e.peak;
    sum[m] = e.sum;
  }
  for (int k = 0; k < chunk.count; k += kLanes) {
    float16x8x4_t lines;
    for (int m = 0; m < 4; ++m) {
      const F32x8 w = mul(load(scores[std::min(m, COUNT - 1)] + k), splat(kF16SumUnit));
      lines.val[m] = vcvt_high_f16_f32(vcvt_f16_f32(w.a), w.b);
    }
    vst4q_f16(reinterpret_cast<float16_t*>(weights) + 4 * k, lines);
  }
  constexpr int wide = 4;
  const int even = dim / (wide * kLanes) * wide * kLanes;
  accumulate_f16<COUNT, wide>(chunk, 0, even, dim, weights, acc);
  accumulate_f16<COUNT, 1>(chunk, even, dim, dim, weights, acc);
  for (int m = 0; m < COUNT; ++m) sum[m] *= kF16SumUnit;
}

#else

constexpr bool kHasF16Math = false;
constexpr float kF16SumUnit = 1.0f;
inline float write_f16_query(const float*, int, uint16_t*) { return 1.0f; }
template <int COUNT>
void attend_f16(const KVChunk&, int, const uint16_t*, const float*, const VisibleRange*, bool,
                float*,
                float*, float*) {}

#endif

}  // namespace windlass
