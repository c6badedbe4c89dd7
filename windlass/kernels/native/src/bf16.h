// multiply_bf16: MT rows of bfloat16 by the outputs of one tile, for CPUs with bfloat16
// instructions.
//
// layout.h defines the layout of weights and rows. Two accumulators hide the latency of the
// additions. Their order is the same for all MT, since a row's result must not depend on the batch.

#pragma once

#include "simd.h"

namespace windlass::tile {

#if defined(WINDLASS_BFMMLA)

// bfmmla multiplies two rows of x by two outputs over 4 inputs, with four sums in a register. Rows
// come in pairs, since each row of x is split into two.
template <int MT>
inline void multiply_bf16(const uint16_t* w, const uint16_t* x, int count, float* out) {
  constexpr int pairs = (MT + 1) / 2;
  float32x4_t even[pairs][kTile / 2], odd[pairs][kTile / 2];
  for (int p = 0; p < pairs; ++p) {
    for (int j = 0; j < kTile / 2; ++j) even[p][j] = odd[p][j] = vdupq_n_f32(0);
  }
  const auto four = [](const uint16_t* at) { return vreinterpretq_bf16_u16(vld1q_u16(at)); };
  const auto step = [&](int k, float32x4_t(&sums)[pairs][kTile / 2]) WINDLASS_INLINED {
    bfloat16x8_t weights[kTile / 2];
    for (int j = 0; j < kTile / 2; ++j) weights[j] = four(w + k * kTile + 8 * j);
    for (int p = 0; p < pairs; ++p) {
      const bfloat16x8_t in = four(x + k * kPanelRows + 8 * p);
      for (int j = 0; j < kTile / 2; ++j) sums[p][j] = vbfmmlaq_f32(sums[p][j], in, weights[j]);
    }
  };
  int k = 0;
  for (; k + 8 <= count; k += 8) {
    step(k, even);
    step(k + 4, odd);
  }
  if (k < count) step(k, even);
  for (int p = 0; p < pairs; ++p) {
    for (int j = 0; j < kTile / 2; ++j) {
      const float32x4_t sum = vaddq_f32(even[p][j], odd[p][j]);
      vst1_f32(out + 2 * p * kTile + 2 * j, vget_low_f32(sum));
      vst1_f32(out + (2 * p + 1) * kTile + 2 * j, vget_high_f32(sum));
    }
  }
}

#elif defined(WINDLASS_DPBF16)

template <int MT>
inline void multiply_bf16(const uint16_t* w, const uint16_t* x, int count, float* out) {
  __m512 even[MT], odd[MT];
  for (int m = 0; m < MT; ++m) even[m] = odd[m] = _mm512_setzero_ps();
  const auto step = [&](const uint16_t* weights, const uint16_t* in, __m512(&sums)[MT])
      WINDLASS_INLINED {
    const __m512bh two = (__m512bh)_mm512_loadu_si512(weights);
    for (int m = 0; m < MT; ++m) {
      int32_t pair;
      std::memcpy(&pair, in + m * kBf16Run, 4);
      sums[m] = _mm512_dpbf16_ps(sums[m], two, (__m512bh)_mm512_set1_epi32(pair));
    }
  };
  for (int k = 0; k < count; k += kBf16Run, x += kBf16Run * kPanelRows) {
    for (int i = 0; i < kBf16Run; i += 4, w += 4 * kTile) {
      step(w, x + i, even);
      step(w + 2 * kTile, x + i + 2, odd);
    }
  }
  for (int m = 0; m < MT; ++m) _mm512_storeu_ps(out + m * kTile, _mm512_add_ps(even[m], odd[m]));
}

#else

template <int MT>
inline void multiply_bf16(const uint16_t*, const uint16_t*, int, float*) {}

#endif

}  // namespace windlass::tile
