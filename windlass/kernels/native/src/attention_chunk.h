// Attention of some queries over one chunk of keys: scores, softmax, weighted values.
//
// Up to 4 lines at a time. A line is one query of one head; attention.cpp selects them.

#pragma once

#include <limits>

#include "kv.h"

namespace windlass {

constexpr int kChunkKeys = 128;  // keys
constexpr int kMaxDim = 640;  // of latents; heads have up to 256
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Keys and values of one chunk: in their pages, or converted to float32.
struct KVChunk {
  int first, count;  // positions
  int hidden;  // how many of the first are behind the window of all queries
  bool f16;  // float16 in the pages; else float32
  float soft_cap;  // 0: none
  const void* next;  // first key after the chunk, or null
  const void* keys[kChunkKeys];
  const void* values[kChunkKeys];
  float key_scales[kChunkKeys];
  float value_scales[kChunkKeys];
  float* scratch;  // kScratch floats
};

constexpr int kScratch = 2 * kChunkKeys * kMaxDim;

// Stands for a key or value behind the window, whose page may belong to another request.
alignas(64) inline constexpr float kZeros[kMaxDim] = {};

// The keys of a chunk that a line may attend to.
struct VisibleRange {
  int begin, end;
};

// Readers of 8 features of a key or value. load_f16 converts float16 exactly; the cheaper
// load_f16_fast does not: a key or value beyond the range of float16 is stored as infinity and must
// stay infinite.
struct F32Reader {
  static F32x8 at(const void* row, int d) { return load(static_cast<const float*>(row) + d); }
  static constexpr int bytes = 4;
};
struct F16Reader {
  static F32x8 at(const void* row, int d) {
    return load_f16(static_cast<const uint16_t*>(row) + d);
  }
  static constexpr int bytes = 2;
};

inline size_t bytes_of(Type type) { return type == kTypeF32 ? 4 : type == kTypeInt8 ? 1 : 2; }

inline void convert(Type type, const void* from, int count, float* out) {
  const uint16_t* f16 = static_cast<const uint16_t*>(from);
  const int8_t* codes = static_cast<const int8_t*>(from);
  for (int i = 0; i < count; i += kLanes) {
    store(out + i, type == kTypeF16    ? load_f16(f16 + i)
                   : type == kTypeBf16 ? load_bf16(f16 + i)
                                        : load_int8(codes + i));
  }
}

// Reads contiguous positions of one page.
inline void read_run(const Pages& kv, const void* pages, size_t index, int count, bool in_place,
                     float* scratch, const void** out) {
  const size_t each = static_cast<size_t>(kv.dim) * bytes_of(kv.type);
  const uint8_t* first = static_cast<const uint8_t*>(pages) + index * each;
  if (in_place) {
    for (int k = 0; k < count; ++k) out[k] = first + static_cast<size_t>(k) * each;
    return;
  }
  convert(kv.type, first, count * kv.dim, scratch);
  for (int k = 0; k < count; ++k) out[k] = scratch + k * kv.dim;
}

// Reads the chunk's keys and values of one head. With few queries float16 stays in its pages.
// `unscaled`: the scales are not used.
inline void read_chunk(const Pages& kv, const WindlassStep& step, float scale, int slot, int head,
                       bool few, bool unscaled, KVChunk& chunk) {
  chunk.f16 = kv.type == kTypeF16 && few;
  const bool in_place = kv.type == kTypeF32 || chunk.f16;
  float* values_scratch = chunk.scratch + kChunkKeys * kv.dim;
  for (int k = 0; k < chunk.hidden; ++k) {
    chunk.keys[k] = chunk.values[k] = kZeros;
    chunk.key_scales[k] = chunk.value_scales[k] = 0.0f;
  }
  for (int k = chunk.hidden, run; k < chunk.count; k += run) {
    const int position = chunk.first + k;
    run = std::min(kv.page_size - position % kv.page_size, chunk.count - k);
    const size_t index = kv.head_index(step, slot, position, head);
    read_run(kv, kv.keys, index, run, in_place, chunk.scratch + k * kv.dim, chunk.keys + k);
    read_run(kv, kv.values, index, run, in_place, values_scratch + k * kv.dim, chunk.values + k);
    if (unscaled) continue;
    for (int i = 0; i < run; ++i) {
      const size_t at = index + static_cast<size_t>(i);
      chunk.key_scales[k + i] = kv.key_scales ? scale * kv.key_scales[at] : scale;
      chunk.value_scales[k + i] = kv.value_scales ? kv.value_scales[at] : 1.0f;
    }
  }
  for (int k = chunk.count; !unscaled && k < kChunkKeys; ++k) {
    chunk.key_scales[k] = chunk.value_scales[k] = 0.0f;
  }
  // Where values are read in pairs, an odd last value gets a partner with weight 0.
  if (chunk.count % 2) chunk.values[chunk.count] = chunk.values[chunk.count - 1];
}

// Number of keys to prefetch: pages are scattered, and hardware prefetchers do not follow.
constexpr int kKeysAhead = 16;

inline void prefetch(const void* first, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const uint8_t*>(first) + i);
}

// Dot products of COUNT lines with 4 keys, KEYS keys at a time.
template <class Row, int COUNT, int KEYS>
WINDLASS_INLINE void score_4(const void* const* keys, int dim, const float* const* queries,
                             F32x8 (&sums)[COUNT][4]) {
  unrolled<4 / KEYS>([&](auto chunk) WINDLASS_INLINED {
    constexpr int first = chunk * KEYS;
    F32x8 own[COUNT][KEYS];
    for (int m = 0; m < COUNT; ++m) {
      for (int i = 0; i < KEYS; ++i) own[m][i] = zero();
    }
    for (int d = 0; d < dim; d += kLanes) {
      F32x8 key[KEYS];
      for (int i = 0; i < KEYS; ++i) key[i] = Row::at(keys[first + i], d);
      for (int m = 0; m < COUNT; ++m) {
        const F32x8 q = load(queries[m] + d);
        for (int i = 0; i < KEYS; ++i) own[m][i] = fma(own[m][i], q, key[i]);
      }
    }
    for (int m = 0; m < COUNT; ++m) {
      for (int i = 0; i < KEYS; ++i) sums[m][first + i] = own[m][i];
    }
  });
}

// Dot products of COUNT lines with all keys of a chunk. `with_prefetch` also prefetches the chunk's
// values.
template <class Row, int COUNT>
void score(const KVChunk& chunk, int dim, const float* const* queries, bool with_prefetch,
           float (*scores)[kChunkKeys]) {
  const int last = chunk.count - 1;
  for (int k = 0; k < chunk.count; k += 4) {
    const void* keys[4];
    for (int i = 0; i < 4; ++i) keys[i] = chunk.keys[std::min(k + i, last)];
    if (with_prefetch) {  // four positions of one page are contiguous
      prefetch(chunk.keys[std::min(k + kKeysAhead, last)], 4 * dim * Row::bytes);
      prefetch(chunk.values[k], 4 * dim * Row::bytes);
    }
    F32x8 sums[COUNT][4];
    score_4<Row, COUNT, COUNT == 3 ? 2 : 4>(keys, dim, queries, sums);
    for (int m = 0; m < COUNT; ++m) {
      store_sums4(scores[m] + k, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
    }
  }
}

template <class Row>
void score_lines(const KVChunk& chunk, int dim, const float* const* queries, int count,
                 bool with_prefetch,
                 float (*scores)[kChunkKeys]) {
  if (count == 1) return score<Row, 1>(chunk, dim, queries, with_prefetch, scores);
  if (count == 3) return score<Row, 3>(chunk, dim, queries, with_prefetch, scores);
  score<Row, 2>(chunk, dim, queries, with_prefetch, scores);
  if (count == 4) score<Row, 2>(chunk, dim, queries + 2, false, scores + 2);
}

// Maximum and sum of a softmax over one chunk.
struct SoftmaxStats {
  float peak, sum;
};

// The value subtracted from all scores: their maximum, or 0 where all of them are -infinity, since
// -infinity - -infinity is NaN.
inline float exponent_base(float peak) { return peak == kMinusInfinity ? 0.0f : peak; }

// Replaces scores by cap * tanh(score / cap).
inline void limit_scores(float cap, int count, float* scores) {
  const F32x8 own = splat(cap), inverse = splat(1.0f / cap);
  for (int k = 0; k < count; k += kLanes) {
    store(scores + k, mul(own, hyperbolic_tangent(mul(load(scores + k), inverse))));
  }
}

inline SoftmaxStats softmax(const KVChunk& chunk, VisibleRange range, float* scores) {
  const int padded = (chunk.count + kLanes - 1) / kLanes * kLanes;
  F32x8 peaks = splat(kMinusInfinity);
  for (int k = 0; k < padded; k += kLanes) {
    store(scores + k, mul(load(scores + k), load(chunk.key_scales + k)));
  }
  if (chunk.soft_cap > 0.0f) limit_scores(chunk.soft_cap, padded, scores);
  const auto fill_unseen = [&](float value) {
    std::fill(scores, scores + range.begin, value);
    std::fill(scores + range.end, scores + padded, value);
  };
  fill_unseen(kMinusInfinity);
  for (int k = 0; k < padded; k += kLanes) peaks = maximum(peaks, load(scores + k));
  const float peak = max_of(peaks);
  peaks = splat(exponent_base(peak));
  for (int k = 0; k < padded; k += kLanes) {
    store(scores + k, exponential(sub(load(scores + k), peaks)));
  }
  fill_unseen(0.0f);
  F32x8 sum = zero();
  for (int k = 0; k < padded; k += kLanes) sum = add(sum, load(scores + k));
  return {peak, sum_of(sum)};
}

// Adds the weighted values of a chunk: COUNT lines, WIDE vectors of features at a time.
template <class Row, int COUNT, int WIDE>
void accumulate(const KVChunk& chunk, int begin, int end, int dim, const float* weights,
                float* acc) {
  for (int d = begin; d < end; d += WIDE * kLanes) {
    F32x8 sums[COUNT][WIDE];
    for (int m = 0; m < COUNT; ++m) {
      for (int i = 0; i < WIDE; ++i) sums[m][i] = zero();
    }
    for (int k = 0; k < chunk.count; ++k) {
      const Quad weight = load_quad(weights + 4 * k);
      F32x8 value[WIDE];
      for (int i = 0; i < WIDE; ++i) value[i] = Row::at(chunk.values[k], d + i * kLanes);
      unrolled<COUNT>([&](auto m) {
        for (int i = 0; i < WIDE; ++i) sums[m][i] = fma_lane<m>(sums[m][i], value[i], weight);
      });
    }
    for (int m = 0; m < COUNT; ++m) {
      for (int i = 0; i < WIDE; ++i) store(acc + m * dim + d + i * kLanes, sums[m][i]);
    }
  }
}

template <class Row, int COUNT>
void accumulate_all(const KVChunk& chunk, int dim, const float* weights, float* acc) {
  constexpr int wide = COUNT > 2 ? 2 : 4;
  const int even = dim / (wide * kLanes) * wide * kLanes;
  accumulate<Row, COUNT, wide>(chunk, 0, even, dim, weights, acc);
  accumulate<Row, COUNT, 1>(chunk, even, dim, dim, weights, acc);
}

template <class Row>
void accumulate_lines(const KVChunk& chunk, int dim, int count, const float* weights, float* acc) {
  switch (count) {
    case 1:
      return accumulate_all<Row, 1>(chunk, dim, weights, acc);
    case 2:
      return accumulate_all<Row, 2>(chunk, dim, weights, acc);
    case 3:
      return accumulate_all<Row, 3>(chunk, dim, weights, acc);
    default:
      return accumulate_all<Row, 4>(chunk, dim, weights, acc);
  }
}

// Attention of up to 4 lines over one chunk: maxima, sums and accumulated values.
template <class Row>
void attend_4(const KVChunk& chunk, int dim, const float* const* queries,
              const VisibleRange* ranges,
              int count, bool first, float* peak, float* sum, float* acc) {
  alignas(64) float scores[4][kChunkKeys];
  alignas(64) float weights[4 * kChunkKeys];
  score_lines<Row>(chunk, dim, queries, count, first, scores);
  if (first && chunk.next != nullptr) prefetch(chunk.next, kKeysAhead * dim * Row::bytes);
  for (int m = 0; m < count; ++m) {
    const SoftmaxStats e = softmax(chunk, ranges[m], scores[m]);
    peak[m] = e.peak;
    sum[m] = e.sum;
  }
  // Unused lines repeat the last one.
  const float* line[4];
  for (int m = 0; m < 4; ++m) line[m] = scores[std::min(m, count - 1)];
  for (int k = 0; k < chunk.count; k += kLanes) {
    const F32x8 scale = load(chunk.value_scales + k);
    const auto weight = [&](int m) { return mul(load(line[m] + k), scale); };
    store_interleaved4(weights + 4 * k, weight(0), weight(1), weight(2), weight(3));
  }
  accumulate_lines<Row>(chunk, dim, count, weights, acc);
}

}  // namespace windlass
