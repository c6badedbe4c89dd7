// aarch64 with the dot product instructions.

#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "layout.h"

namespace windlass {

#if defined(WINDLASS_I8MM) && defined(WINDLASS_BFMMLA)
constexpr const char* kSimdName = "NEON i8mm and bfloat16";
#elif defined(WINDLASS_I8MM)
constexpr const char* kSimdName = "NEON i8mm";
#elif defined(WINDLASS_BFMMLA)
constexpr const char* kSimdName = "NEON dot product and bfloat16";
#else
constexpr const char* kSimdName = "NEON dot product";
#endif

struct F32x8 {
  float32x4_t a, b;
};
struct I32x8 {
  int32x4_t a, b;
};
struct Codes32 {
  int8x16_t a, b;
};
struct Inputs16 {
  int8x16_t v;
};
struct Quad {
  float32x4_t v;
};
struct QuadInt {
  int32x4_t v;
};

inline F32x8 zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
inline F32x8 splat(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F32x8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
// fcvtl occupies one of the two pipes for two cycles. A shift puts the bits in place; only the
// exponent is too small, by 112 for all values.
constexpr float kF16Unit = 0x1p-112f;
inline F32x8 load_f16_fast(const uint16_t* p) {
  const int16x8_t h = vreinterpretq_s16_u16(vld1q_u16(p));
  const int32x4_t mask = vdupq_n_s32(static_cast<int32_t>(0x8fffffff));
  return {vreinterpretq_f32_s32(vandq_s32(vshll_n_s16(vget_low_s16(h), 13), mask)),
          vreinterpretq_f32_s32(vandq_s32(vshll_high_n_s16(h, 13), mask))};
}
inline void store(float* p, F32x8 x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
}
inline F32x8 add(F32x8 x, F32x8 y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline F32x8 mul(F32x8 x, F32x8 y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline F32x8 fma(F32x8 acc, F32x8 x, F32x8 y) {
  return {vfmaq_f32(acc.a, x.a, y.a), vfmaq_f32(acc.b, x.b, y.b)};
}
// The result of fmla replaces its addend. A constant is loaded each time, since the load pipes are mostly
// idle and a register move takes a vector operation. The unused operands make each load unique.
struct Addend {
  alignas(16) float four[4];

  constexpr explicit Addend(float x) : four{x, x, x, x} {}
  float32x4_t add_product(float32x4_t x, float32x4_t y) const {
    float32x4_t v;
    __asm__("ldr %q0, %1" : "=w"(v) : "m"(four), "w"(x), "w"(y));
    return vfmaq_f32(v, x, y);
  }
};
inline F32x8 fma(const Addend& acc, F32x8 x, F32x8 y) {
  return {acc.add_product(x.a, y.a), acc.add_product(x.b, y.b)};
}

inline F32x8 sub(F32x8 x, F32x8 y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
inline F32x8 divide(F32x8 x, F32x8 y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
inline F32x8 divide_or_zero(F32x8 x, F32x8 y) {
  const auto masked = [](float32x4_t of, float32x4_t by) {
    return vreinterpretq_f32_u32(
        vandq_u32(vcgtq_f32(by, vdupq_n_f32(0)), vreinterpretq_u32_f32(vdivq_f32(of, by))));
  };
  return {masked(x.a, y.a), masked(x.b, y.b)};
}
inline F32x8 ceil_12_bits(F32x8 x) {
  const auto up = [](float32x4_t v) {
    const uint32x4_t bits = vaddq_u32(vreinterpretq_u32_f32(v), vdupq_n_u32(0xfff));
    return vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(~uint32_t{0xfff})));
  };
  return {up(x.a), up(x.b)};
}
inline F32x8 absolute(F32x8 x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
// fmax is NaN where either operand is.
inline F32x8 maximum(F32x8 x, F32x8 y) { return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b)}; }
inline F32x8 clamp_min(F32x8 x, F32x8 bound) { return maximum(x, bound); }
inline F32x8 maximum_abs(F32x8 x, F32x8 y) { return maximum(x, y); }
inline F32x8 exp2_int(F32x8 shifted) {
  const auto four = [](float32x4_t v) {
    const int32x4_t exponent = vshlq_n_s32(vreinterpretq_s32_f32(v), 23);
    return vreinterpretq_f32_s32(vaddq_s32(exponent, vdupq_n_s32(0x3f800000)));
  };
  return {four(shifted.a), four(shifted.b)};
}
inline void store_sums4(float* p, F32x8 x, F32x8 y, F32x8 z, F32x8 w) {
  const float32x4_t xy = vpaddq_f32(vaddq_f32(x.a, x.b), vaddq_f32(y.a, y.b));
  const float32x4_t zw = vpaddq_f32(vaddq_f32(z.a, z.b), vaddq_f32(w.a, w.b));
  vst1q_f32(p, vpaddq_f32(xy, zw));
}
inline void store_interleaved4(float* p, F32x8 x, F32x8 y, F32x8 z, F32x8 w) {
  const float32x4x4_t first = {{x.a, y.a, z.a, w.a}}, second = {{x.b, y.b, z.b, w.b}};
  vst4q_f32(p, first);
  vst4q_f32(p + 16, second);
}
inline F32x8 load_f16(const uint16_t* p) {
  const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
  return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}
inline void store_f16(uint16_t* p, F32x8 x) {
  vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
}
inline F32x8 load_bf16(const uint16_t* p) {
  const uint16x8_t h = vld1q_u16(p);
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
          vreinterpretq_f32_u32(vshll_high_n_u16(h, 16))};
}
inline F32x8 load_int8(const int8_t* p) {
  const int16x8_t h = vmovl_s8(vld1_s8(p));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(h))), vcvtq_f32_s32(vmovl_high_s16(h))};
}

inline Quad load_quad(const float* p) { return {vld1q_f32(p)}; }
template <int LANE>
inline F32x8 mul_lane(F32x8 x, Quad q) {
  return {vmulq_laneq_f32(x.a, q.v, LANE), vmulq_laneq_f32(x.b, q.v, LANE)};
}
template <int LANE>
inline F32x8 fma_lane(F32x8 acc, F32x8 x, Quad q) {
  return {vfmaq_laneq_f32(acc.a, x.a, q.v, LANE), vfmaq_laneq_f32(acc.b, x.b, q.v, LANE)};
}

inline Codes32 load_codes(const uint8_t* p) {
  return {vreinterpretq_s8_u8(vld1q_u8(p)), vreinterpretq_s8_u8(vld1q_u8(p + 16))};
}
inline void store_codes(uint8_t* p, Codes32 x) {
  vst1q_u8(p, vreinterpretq_u8_s8(x.a));
  vst1q_u8(p + 16, vreinterpretq_u8_s8(x.b));
}
inline Codes32 low_nibbles(Codes32 x) {
  const int8x16_t mask = vdupq_n_s8(15);
  return {vandq_s8(x.a, mask), vandq_s8(x.b, mask)};
}
inline int8x16_t high_nibbles(int8x16_t x) {
  return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x), 4));
}
inline Codes32 high_nibbles(Codes32 x) { return {high_nibbles(x.a), high_nibbles(x.b)}; }
// 16 times the signed nibbles.
inline Codes32 low_signed(Codes32 x) { return {vshlq_n_s8(x.a, 4), vshlq_n_s8(x.b, 4)}; }
inline Codes32 high_signed(Codes32 x) {
  const int8x16_t mask = vdupq_n_s8(-16);
  return {vandq_s8(x.a, mask), vandq_s8(x.b, mask)};
}
inline Codes32 low_6_bits(Codes32 x) {
  return {vandq_s8(x.a, vdupq_n_s8(63)), vandq_s8(x.b, vdupq_n_s8(63))};
}
inline Codes32 join_top_bits(Codes32 x, Codes32 y, Codes32 z) {
  const auto joined = [](int8x16_t first, int8x16_t second, int8x16_t third) {
    const uint8x16_t two = vsriq_n_u8(vreinterpretq_u8_s8(first), vreinterpretq_u8_s8(second), 2);
    const uint8x16_t three = vsriq_n_u8(two, vreinterpretq_u8_s8(third), 4);
    return vreinterpretq_s8_u8(vshrq_n_u8(three, 2));
  };
  return {joined(x.a, y.a, z.a), joined(x.b, y.b, z.b)};
}
inline Codes32 subtract(Codes32 x, int8_t y) {
  return {vsubq_s8(x.a, vdupq_n_s8(y)), vsubq_s8(x.b, vdupq_n_s8(y))};
}
// Left shifts that bring input i of 16 to the top of a word per output. A table, since computing
// the shift takes half as long as the rest of unpacking a weight.
#if defined(WINDLASS_I8MM)
using Shift = int64_t;
#else
using Shift = int32_t;
#endif
struct ShiftTable {
  alignas(16) Shift nibbles[16][16 / sizeof(Shift)];
  alignas(16) Shift bytes[16][16 / sizeof(Shift)];

  constexpr ShiftTable() : nibbles(), bytes() {
    for (int i = 0; i < 16; ++i) {
      for (Shift& up : nibbles[i]) up = 28 - i % kSpan * 8 - i / 8 * 4;
      for (Shift& up : bytes[i]) up = 24 - i % kSpan * 8;
    }
  }
};
constexpr ShiftTable kShifts;

// Codes from p on, shifted; lower bits hold other codes.
inline uint32x4x2_t shifted_codes(const uint8_t* p, const Shift* up) {
#if defined(WINDLASS_I8MM)
  const int64x2_t by = vld1q_s64(up);
  const auto two = [&](int pair) {
    return vreinterpretq_u32_u64(vshlq_u64(vreinterpretq_u64_u8(vld1q_u8(p + 16 * pair)), by));
  };
  return {{vuzp1q_u32(two(0), two(1)), vuzp1q_u32(two(2), two(3))}};
#else
  const int32x4_t by = vld1q_s32(up);
  return {{vshlq_u32(vreinterpretq_u32_u8(vld1q_u8(p)), by),
           vshlq_u32(vreinterpretq_u32_u8(vld1q_u8(p + 16)), by)}};
#endif
}
inline uint32x4x2_t top_nibbles(const uint8_t* p, int i) {
  const uint32x4_t mask = vdupq_n_u32(0xf0000000);
  const uint32x4x2_t c = shifted_codes(p + i % 8 / kSpan * kSpan * 8, kShifts.nibbles[i]);
  return {{vandq_u32(c.val[0], mask), vandq_u32(c.val[1], mask)}};
}
inline F32x8 nibbles_at(const uint8_t* p, int i) {
  const uint32x4x2_t c = top_nibbles(p, i);
  return {vcvtq_n_f32_u32(c.val[0], 28), vcvtq_n_f32_u32(c.val[1], 28)};
}
inline F32x8 signed_nibbles_at(const uint8_t* p, int i) {
  const uint32x4x2_t c = top_nibbles(p, i);
  return {vcvtq_n_f32_s32(vreinterpretq_s32_u32(c.val[0]), 24),
          vcvtq_n_f32_s32(vreinterpretq_s32_u32(c.val[1]), 24)};
}
inline F32x8 bytes_at(const uint8_t* p, int i) {
  const uint32x4x2_t c = shifted_codes(p + i / kSpan * kSpan * 8, kShifts.bytes[i]);
  const auto one = [](uint32x4_t v) {
    return vcvtq_f32_s32(vshrq_n_s32(vreinterpretq_s32_u32(v), 24));
  };
  return {one(c.val[0]), one(c.val[1])};
}
inline Inputs16 load_inputs(const int8_t* p) { return {vld1q_s8(p)}; }

constexpr bool kHasSumOfCodes = true;
// `count` is a multiple of 16.
inline int32_t sum_of_codes(const int8_t* p, int count) {
  int32x4_t sum = vdupq_n_s32(0);
  for (int i = 0; i < count; i += 16) sum = vdotq_s32(sum, vld1q_s8(p + i), vdupq_n_s8(1));
  return vaddvq_s32(sum);
}

// Sums start at 1.5 * 2^23 as float bits: up to 2^22 they are floats already, and one subtraction,
// which runs on both pipes, replaces the conversion, which does not.
constexpr int32_t kStart = 0x4B400000;
constexpr float kSumStart = 12582912.0f;
alignas(16) constexpr int32_t kStarts[4] = {kStart, kStart, kStart, kStart};
// Loaded each time on purpose: the load pipes are idle, and a register move would cost a dot
// product.
inline int32x4_t read_start() {
  int32x4_t v;
  __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(kStarts));
  return v;
}
inline I32x8 sum_start() { return {read_start(), read_start()}; }
inline QuadInt load_quad(const int32_t* p) {
  return {vaddq_s32(vld1q_s32(p), vdupq_n_s32(kStart))};
}
template <int LANE>
inline I32x8 sum_start(QuadInt q) {
  const int32x4_t v = vdupq_laneq_s32(q.v, LANE);
  return {v, v};
}
inline F32x8 sum_finish(I32x8 x) {
  const float32x4_t start = vdupq_n_f32(kSumStart);
  return {vsubq_f32(vreinterpretq_f32_s32(x.a), start),
          vsubq_f32(vreinterpretq_f32_s32(x.b), start)};
}

template <int LANE>
inline I32x8 dot_signed(I32x8 acc, Codes32 w, Inputs16 x) {
  return {vdotq_laneq_s32(acc.a, w.a, x.v, LANE), vdotq_laneq_s32(acc.b, w.b, x.v, LANE)};
}
template <int LANE>
inline I32x8 dot_unsigned(I32x8 acc, Codes32 w, Inputs16 x) {
  return dot_signed<LANE>(acc, w, x);
}

// The 16 values of nibbles.
struct Codebook {
  int8x16_t v;
};
inline Codebook load_codebook(const int8_t* p) { return {vld1q_s8(p)}; }
inline Codes32 look_up(Codebook book, Codes32 x) {
  return {vqtbl1q_s8(book.v, vreinterpretq_u8_s8(x.a)),
          vqtbl1q_s8(book.v, vreinterpretq_u8_s8(x.b))};
}

// A table of 16 floats, as its four byte planes.
struct Table16 {
  uint8x16_t planes[4];
};
inline Table16 load_table(const float* p) {
  const uint8x16x4_t split = vld4q_u8(reinterpret_cast<const uint8_t*>(p));
  return {{split.val[0], split.val[1], split.val[2], split.val[3]}};
}
// 16 bytes hold 4 inputs of 8 outputs: two in the low nibbles, two in the high ones.
inline void lookup32(const Table16& table, const uint8_t* codes, F32x8 scale, float* out) {
  const uint8x16_t bytes = vld1q_u8(codes);
  const uint8x16_t halves[2] = {vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8(bytes, 4)};
  for (int i = 0; i < 2; ++i) {
    uint8x16_t p[4];
    for (int j = 0; j < 4; ++j) p[j] = vqtbl1q_u8(table.planes[j], halves[i]);
    const uint16x8_t l0 = vreinterpretq_u16_u8(vzip1q_u8(p[0], p[1]));
    const uint16x8_t l1 = vreinterpretq_u16_u8(vzip2q_u8(p[0], p[1]));
    const uint16x8_t h0 = vreinterpretq_u16_u8(vzip1q_u8(p[2], p[3]));
    const uint16x8_t h1 = vreinterpretq_u16_u8(vzip2q_u8(p[2], p[3]));
    const F32x8 first = {vreinterpretq_f32_u16(vzip1q_u16(l0, h0)),
                         vreinterpretq_f32_u16(vzip2q_u16(l0, h0))};
    const F32x8 second = {vreinterpretq_f32_u16(vzip1q_u16(l1, h1)),
                          vreinterpretq_f32_u16(vzip2q_u16(l1, h1))};
    store(out + 16 * i, mul(first, scale));
    store(out + 16 * i + 8, mul(second, scale));
  }
}

inline void cpu_pause() { __asm__ volatile("isb" ::: "memory"); }

}  // namespace windlass
