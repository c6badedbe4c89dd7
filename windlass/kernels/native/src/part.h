// What some queries get out of one part of the keys: scores, exponentials, mixed values.
//
// Up to 4 lines at a time; a line is one query of one head. attention.cpp says which.

#pragma once

#include <limits>

#include "kv.h"

namespace windlass {

constexpr int kPart = 128;  // keys
constexpr int kMostDim = 256;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Keys and values of one part: in their pages, or converted to floats.
struct Part {
  int first, count;  // positions
  bool halves;       // in their pages, in 16 bits; else floats
  const void* next;  // the key that comes after the part, or null
  const void* keys[kPart];
  const void* values[kPart];
  float key_scales[kPart];
  float value_scales[kPart];
  alignas(64) float room[2 * kPart * kMostDim];
};

// What a line sees of a part.
struct Sight {
  int begin, end;
};

// How 8 features of a key or value are read. Halves are converted by read_half, not by the cheaper
// load_half: a key or value beyond the range of halves is stored as infinity and must stay that.
struct Floats {
  static F32x8 at(const void* row, int d) { return load(static_cast<const float*>(row) + d); }
  static constexpr int bytes = 4;
};
struct Halves {
  static F32x8 at(const void* row, int d) {
    return read_half(static_cast<const uint16_t*>(row) + d);
  }
  static constexpr int bytes = 2;
};

inline size_t bytes_of(Type type) { return type == kTypeFloat ? 4 : type == kTypeInt8 ? 1 : 2; }

inline void convert(Type type, const void* from, int count, float* out) {
  const uint16_t* halves = static_cast<const uint16_t*>(from);
  const int8_t* codes = static_cast<const int8_t*>(from);
  for (int i = 0; i < count; i += kLanes) {
    store(out + i, type == kTypeHalf    ? read_half(halves + i)
                   : type == kTypeBf16 ? read_bf16(halves + i)
                                        : read_int8(codes + i));
  }
}

// Positions of one page, which lie in one run.
inline void read_run(const Pages& kv, const void* pages, size_t place, int count, bool in_place,
                     float* room, const void** out) {
  const size_t each = static_cast<size_t>(kv.dim) * bytes_of(kv.type);
  const uint8_t* first = static_cast<const uint8_t*>(pages) + place * each;
  if (in_place) {
    for (int k = 0; k < count; ++k) out[k] = first + static_cast<size_t>(k) * each;
    return;
  }
  convert(kv.type, first, count * kv.dim, room);
  for (int k = 0; k < count; ++k) out[k] = room + k * kv.dim;
}

// The part's keys and values of one head. With few queries halves are read where they lie. `plain`
// says that nobody looks at their scales.
inline void read_part(const Pages& kv, const WindlassStep& step, float scale, int slot, int head,
                      bool few, bool plain, Part& part) {
  part.halves = kv.type == kTypeHalf && few;
  const bool in_place = kv.type == kTypeFloat || part.halves;
  float* values_room = part.room + kPart * kv.dim;
  for (int k = 0, run; k < part.count; k += run) {
    const int position = part.first + k;
    run = std::min(kv.page - position % kv.page, part.count - k);
    const size_t place = kv.place(step, slot, position, head);
    read_run(kv, kv.keys, place, run, in_place, part.room + k * kv.dim, part.keys + k);
    read_run(kv, kv.values, place, run, in_place, values_room + k * kv.dim, part.values + k);
    if (plain) continue;
    for (int i = 0; i < run; ++i) {
      const size_t at = place + static_cast<size_t>(i);
      part.key_scales[k + i] = kv.key_scales ? scale * kv.key_scales[at] : scale;
      part.value_scales[k + i] = kv.value_scales ? kv.value_scales[at] : 1.0f;
    }
  }
  for (int k = part.count; !plain && k < kPart; ++k) {
    part.key_scales[k] = part.value_scales[k] = 0.0f;
  }
  // Where values are taken in pairs, the last has one that weighs nothing.
  if (part.count % 2) part.values[part.count] = part.values[part.count - 1];
}

// Keys that are asked for before they are needed: pages lie anywhere, and no CPU guesses where.
constexpr int kKeysAhead = 16;

inline void prefetch(const void* first, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const uint8_t*>(first) + i);
}

// Products of COUNT lines with 4 keys, KEYS of them at a time.
template <class Row, int COUNT, int KEYS>
WINDLASS_INLINE void score_4(const void* const* keys, int dim, const float* const* queries,
                             F32x8 (&sums)[COUNT][4]) {
  unrolled<4 / KEYS>([&](auto part) WINDLASS_INLINED {
    constexpr int first = part * KEYS;
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

// Products of COUNT lines with all keys of a part. With `fetch` the part's values are on their way
// then.
template <class Row, int COUNT>
void score(const Part& part, int dim, const float* const* queries, bool fetch,
           float (*scores)[kPart]) {
  const int last = part.count - 1;
  for (int k = 0; k < part.count; k += 4) {
    const void* keys[4];
    for (int i = 0; i < 4; ++i) keys[i] = part.keys[std::min(k + i, last)];
    if (fetch) {  // four that lie in one page are one run
      prefetch(part.keys[std::min(k + kKeysAhead, last)], 4 * dim * Row::bytes);
      prefetch(part.values[k], 4 * dim * Row::bytes);
    }
    F32x8 sums[COUNT][4];
    score_4<Row, COUNT, COUNT == 3 ? 2 : 4>(keys, dim, queries, sums);
    for (int m = 0; m < COUNT; ++m) {
      store_sums4(scores[m] + k, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
    }
  }
}

template <class Row>
void score_lines(const Part& part, int dim, const float* const* queries, int count, bool fetch,
                 float (*scores)[kPart]) {
  if (count == 1) return score<Row, 1>(part, dim, queries, fetch, scores);
  if (count == 3) return score<Row, 3>(part, dim, queries, fetch, scores);
  score<Row, 2>(part, dim, queries, fetch, scores);
  if (count == 4) score<Row, 2>(part, dim, queries + 2, false, scores + 2);
}

// Scores to exponentials, zero where nothing is seen; returns peak and sum.
struct Exponentials {
  float peak, sum;
};

// What scores are compared with: their peak. Where all of them are -infinity they weigh nothing, but
// -infinity less itself would be NaN.
inline float exponent_base(float peak) { return peak == kNothing ? 0.0f : peak; }

inline Exponentials soften(const Part& part, Sight sight, float* scores) {
  const int padded = (part.count + kLanes - 1) / kLanes * kLanes;
  F32x8 peaks = splat(kNothing);
  for (int k = 0; k < padded; k += kLanes) {
    store(scores + k, mul(load(scores + k), load(part.key_scales + k)));
  }
  const auto fill_unseen = [&](float value) {
    std::fill(scores, scores + sight.begin, value);
    std::fill(scores + sight.end, scores + padded, value);
  };
  fill_unseen(kNothing);
  for (int k = 0; k < padded; k += kLanes) peaks = larger(peaks, load(scores + k));
  const float peak = largest_of(peaks);
  peaks = splat(exponent_base(peak));
  for (int k = 0; k < padded; k += kLanes) {
    store(scores + k, exponential(sub(load(scores + k), peaks)));
  }
  fill_unseen(0.0f);
  F32x8 sum = zero();
  for (int k = 0; k < padded; k += kLanes) sum = add(sum, load(scores + k));
  return {peak, sum_of(sum)};
}

// Values of a part, weighted: COUNT lines, WIDE vectors of their features at a time.
template <class Row, int COUNT, int WIDE>
void mix(const Part& part, int begin, int end, int dim, const float* weights, float* mixed) {
  for (int d = begin; d < end; d += WIDE * kLanes) {
    F32x8 sums[COUNT][WIDE];
    for (int m = 0; m < COUNT; ++m) {
      for (int i = 0; i < WIDE; ++i) sums[m][i] = zero();
    }
    for (int k = 0; k < part.count; ++k) {
      const Quad weight = load_quad(weights + 4 * k);
      F32x8 value[WIDE];
      for (int i = 0; i < WIDE; ++i) value[i] = Row::at(part.values[k], d + i * kLanes);
      unrolled<COUNT>([&](auto m) {
        for (int i = 0; i < WIDE; ++i) sums[m][i] = fma_lane<m>(sums[m][i], value[i], weight);
      });
    }
    for (int m = 0; m < COUNT; ++m) {
      for (int i = 0; i < WIDE; ++i) store(mixed + m * dim + d + i * kLanes, sums[m][i]);
    }
  }
}

template <class Row, int COUNT>
void mix_all(const Part& part, int dim, const float* weights, float* mixed) {
  constexpr int wide = COUNT > 2 ? 2 : 4;
  const int even = dim / (wide * kLanes) * wide * kLanes;
  mix<Row, COUNT, wide>(part, 0, even, dim, weights, mixed);
  mix<Row, COUNT, 1>(part, even, dim, dim, weights, mixed);
}

template <class Row>
void mix_lines(const Part& part, int dim, int count, const float* weights, float* mixed) {
  switch (count) {
    case 1:
      return mix_all<Row, 1>(part, dim, weights, mixed);
    case 2:
      return mix_all<Row, 2>(part, dim, weights, mixed);
    case 3:
      return mix_all<Row, 3>(part, dim, weights, mixed);
    default:
      return mix_all<Row, 4>(part, dim, weights, mixed);
  }
}

// Up to 4 lines over one part: peaks, sums and mixed values.
template <class Row>
void attend_4(const Part& part, int dim, const float* const* queries, const Sight* sights,
              int count, bool first, float* peak, float* sum, float* mixed) {
  alignas(64) float scores[4][kPart];
  alignas(64) float weights[4 * kPart];
  score_lines<Row>(part, dim, queries, count, first, scores);
  if (first && part.next != nullptr) prefetch(part.next, kKeysAhead * dim * Row::bytes);
  for (int m = 0; m < count; ++m) {
    const Exponentials e = soften(part, sights[m], scores[m]);
    peak[m] = e.peak;
    sum[m] = e.sum;
  }
  // Lines that are not there repeat one that is.
  const float* line[4];
  for (int m = 0; m < 4; ++m) line[m] = scores[std::min(m, count - 1)];
  for (int k = 0; k < part.count; k += kLanes) {
    const F32x8 scale = load(part.value_scales + k);
    const auto weight = [&](int m) { return mul(load(line[m] + k), scale); };
    store_interleaved4(weights + 4 * k, weight(0), weight(1), weight(2), weight(3));
  }
  mix_lines<Row>(part, dim, count, weights, mixed);
}

}  // namespace windlass
