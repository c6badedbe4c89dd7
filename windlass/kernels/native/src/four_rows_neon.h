// NEON: quantises a block of 32 inputs of the 4 rows of a panel at once.

#pragma once

#include "simd.h"

namespace windlass {

#if defined(WINDLASS_NEON)
constexpr bool kQuantisesFourRows = kRun == 16;

// A value for each of 4 rows.
struct FourBlocks {
  float32x4_t step;
  int32x4_t sums;  // of the codes
};

// The largest magnitudes of 32 inputs of 4 rows; NaN where an input is.
WINDLASS_INLINE float32x4_t peaks_of_four_rows(const float* const* rows) {
  const auto peaks_of = [&](int m) WINDLASS_INLINED {
    const auto larger = [&](int i) WINDLASS_INLINED {
      return vmaxq_f32(vabsq_f32(vld1q_f32(rows[m] + i)), vabsq_f32(vld1q_f32(rows[m] + i + 4)));
    };
    return vmaxq_f32(vmaxq_f32(larger(0), larger(8)), vmaxq_f32(larger(16), larger(24)));
  };
  return vpmaxq_f32(vpmaxq_f32(peaks_of(0), peaks_of(1)), vpmaxq_f32(peaks_of(2), peaks_of(3)));
}

// Writes the codes of 4 rows to a panel; bit by bit as quantise_with_peak.
WINDLASS_INLINE FourBlocks quantise_four_rows(const float* const* rows, float32x4_t peaks, int8_t* codes) {
  const float32x4_t most = vdupq_n_f32(127.0f);
  const uint32x4_t is_positive = vcgtq_f32(peaks, vdupq_n_f32(1e-30f));
  const float32x4_t inverse =
      vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(vdivq_f32(most, peaks)), is_positive));
  int32x4_t sums[kPanelRows];
  unrolled<kPanelRows>([&](auto m) WINDLASS_INLINED {
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
    const auto four = [&](int i) WINDLASS_INLINED {
      const float32x4_t scaled = vmulq_laneq_f32(vld1q_f32(rows[m] + i), inverse, m);
      return vreinterpretq_u16_f32(vaddq_f32(scaled, vdupq_n_f32(12582912.0f)));
    };
    const auto sixteen = [&](int i) WINDLASS_INLINED {
      const uint16x8_t low = vuzp1q_u16(four(i), four(i + 4)), high = vuzp1q_u16(four(i + 8), four(i + 12));
      return vreinterpretq_s8_u8(vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)));
    };
    const int8x16_t first = sixteen(0), second = sixteen(16), ones = vdupq_n_s8(1);
    vst1q_s8(codes + kRun * m, first);
    vst1q_s8(codes + kRun * (kPanelRows + m), second);
    sums[m] = vdotq_s32(vdotq_s32(vdupq_n_s32(0), first, ones), second, ones);
  });
  return {vdivq_f32(peaks, most), vpaddq_s32(vpaddq_s32(sums[0], sums[1]), vpaddq_s32(sums[2], sums[3]))};
}

#else
constexpr bool kQuantisesFourRows = false;
#endif

}  // namespace windlass
