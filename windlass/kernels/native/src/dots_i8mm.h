// dots.h with smmla: two rows of x by two outputs over 8 inputs, four sums in a register.

#pragma once

#include "simd.h"

namespace windlass::tile {

template <int MT>
struct Dots {
  static constexpr int kPairs = (MT + 1) / 2;
  int32x4_t sums[kPairs][kTile / 2];  // two rows by two outputs, row-major
};

template <int MT>
WINDLASS_INLINE void start_dots(Dots<MT>& dots) {
  for (auto& pair : dots.sums) {
    for (int32x4_t& four : pair) four = read_start();
  }
}
template <int MT>
WINDLASS_INLINE void start_dots(Dots<MT>& dots, QuadInt correction) {
  const int32x4_t first[2] = {vzip1q_s32(correction.v, correction.v), vzip2q_s32(correction.v, correction.v)};
  for (int p = 0; p < Dots<MT>::kPairs; ++p) {
    for (int32x4_t& four : dots.sums[p]) four = first[p];
  }
}
template <int BITS, int MT, class At>
WINDLASS_INLINE void add_dots(Dots<MT>& dots, const At& codes_at, const int8_t* x) {
  for (int half = 0; half < 2; ++half) {
    const Codes w[2] = {codes_at(2 * half), codes_at(2 * half + 1)};
    for (int p = 0; p < Dots<MT>::kPairs; ++p) {
      const int8x16_t in = vld1q_s8(x + kRun * (half * kPanelRows + 2 * p));
      int32x4_t(&sums)[kTile / 2] = dots.sums[p];
      for (int i = 0; i < 2; ++i) {
        const Codes& codes = w[i];
        sums[2 * i] = vmmlaq_s32(sums[2 * i], in, codes.a);
        sums[2 * i + 1] = vmmlaq_s32(sums[2 * i + 1], in, codes.b);
      }
    }
  }
}
template <int M, int MT>
WINDLASS_INLINE Sums row_of_dots(const Dots<MT>& dots) {
  const auto enter_job = [](int32x4_t x, int32x4_t y) {
    const int64x2_t a = vreinterpretq_s64_s32(x), b = vreinterpretq_s64_s32(y);
    return vreinterpretq_s32_s64(M % 2 ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
  };
  const auto& pair = dots.sums[M / 2];
  return {enter_job(pair[0], pair[1]), enter_job(pair[2], pair[3])};
}

}  // namespace windlass::tile
