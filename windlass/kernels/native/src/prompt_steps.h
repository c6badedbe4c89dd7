// int4 codes of a tile to int8 ones, each output's in its own steps.

#pragma once

#include <cstring>

#include "simd.h"

namespace windlass::tile {

constexpr uint8_t kSigns = 0x88;  // makes codes of signed nibbles, and the other way round

// Code c of an output becomes (c * factor + start) / 256, rounded down; factor and start are rounded
// to whole numbers, and the result lies in -127 to 127. Where codes have no sign, 128 is added.
#if defined(WINDLASS_NEON) && !defined(WINDLASS_I8MM)

class Steps {
 public:
  Steps(Floats factors, Floats starts) {
    spread(whole(factors), factor_);
    spread(whole(starts), start_);
  }

  // 16 inputs: see weight.h.
  template <bool SIGNED>
  void unpack(const uint8_t* from, uint8_t* to) const {
    for (int i = 0; i < 4; ++i) {
      uint8x16_t both = vld1q_u8(from + 16 * i);
      if constexpr (SIGNED) both = veorq_u8(both, vdupq_n_u8(kSigns));
      vst1q_u8(to + 16 * i, made(vandq_u8(both, vdupq_n_u8(15)), i % 2 * 2));
      vst1q_u8(to + 64 + 16 * i, made(vshrq_n_u8(both, 4), i % 2 * 2));
    }
  }

 private:
  static uint16x8_t whole(Floats x) {
    const uint32x4_t a = vreinterpretq_u32_s32(vcvtnq_s32_f32(x.a));
    const uint32x4_t b = vreinterpretq_u32_s32(vcvtnq_s32_f32(x.b));
    return vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b));
  }
  // Each number four times, as the codes of an output lie.
  static void spread(uint16x8_t x, uint16x8_t* out) {
    const uint16x8_t low = vzip1q_u16(x, x), high = vzip2q_u16(x, x);
    out[0] = vzip1q_u16(low, low);
    out[1] = vzip2q_u16(low, low);
    out[2] = vzip1q_u16(high, high);
    out[3] = vzip2q_u16(high, high);
  }
  uint8x16_t made(uint8x16_t codes, int i) const {
    const uint16x8_t a = vmlaq_u16(start_[i], vmovl_u8(vget_low_u8(codes)), factor_[i]);
    const uint16x8_t b = vmlaq_u16(start_[i + 1], vmovl_high_u8(codes), factor_[i + 1]);
    return vuzp2q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
  }

  uint16x8_t factor_[4], start_[4];
};

#else

class Steps {
 public:
  Steps(Floats factors, Floats starts) {
    spread(factors, 0, factor_);
    spread(starts, kUnsignedCodes ? 128 * 256 : 0, start_);
  }

  // 16 inputs: see weight.h.
  template <bool SIGNED>
  void unpack(const uint8_t* from, uint8_t* to) const {
    constexpr int half = 8 * kTile;
    for (int first = 0; first < half; first += kPeriod) {
      for (int j = 0; j < kPeriod; ++j) {
        const uint8_t both = static_cast<uint8_t>(from[first + j] ^ (SIGNED ? kSigns : 0));
        const auto made = [&](int c) {
          return static_cast<uint8_t>(static_cast<uint16_t>(c * factor_[j] + start_[j]) >> 8);
        };
        to[first + j] = made(both & 15);
        to[first + half + j] = made(both >> 4);
      }
    }
  }

 private:
  static constexpr int kPeriod = kTile * kSpan;

  // The nearest whole numbers, each as often as codes of an output lie together.
  static void spread(Floats x, uint32_t more, uint16_t* out) {
    float from[kTile];
    store(from, x);
    for (int r = 0; r < kTile; ++r) {
      // Adding 1.5 * 2^23 leaves the rounded number in the low bits.
      const float shifted = from[r] + 12582912.0f;
      uint32_t bits;
      std::memcpy(&bits, &shifted, 4);
      for (int i = 0; i < kSpan; ++i) out[r * kSpan + i] = static_cast<uint16_t>(bits + more);
    }
  }

  alignas(64) uint16_t factor_[kPeriod], start_[kPeriod];
};

#endif

}  // namespace windlass::tile
