// Portable backend: the same vectors as plain arrays. Defines the results of the other backends.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace windlass {

constexpr const char* kSimdName = "portable";

struct F32x8 {
  float v[8];
};
struct I32x8 {
  int32_t v[8];
};
struct Codes32 {
  int8_t v[32];
};
struct Inputs16 {
  const int8_t* p;
};
struct Quad {
  const float* p;
};
struct QuadInt {
  const int32_t* p;
};

template <class Body>
inline F32x8 each(Body&& body) {
  F32x8 out;
  for (int i = 0; i < 8; ++i) out.v[i] = body(i);
  return out;
}

inline float f16_to_f32(uint16_t h) {
  const int exponent = (h >> 10) & 31;
  const int fraction = h & 1023;
  float value;
  if (exponent == 31) {
    value = fraction ? NAN : INFINITY;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    value = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  }
  return h & 0x8000 ? -value : value;
}

inline F32x8 zero() { return F32x8{}; }
inline F32x8 splat(float x) {
  return each([&](int) { return x; });
}
inline F32x8 load(const float* p) {
  return each([&](int i) { return p[i]; });
}
constexpr float kF16Unit = 1.0f;
inline F32x8 load_f16_fast(const uint16_t* p) {
  return each([&](int i) { return f16_to_f32(p[i]); });
}
inline void store(float* p, F32x8 x) { std::memcpy(p, x.v, sizeof x.v); }
inline F32x8 add(F32x8 x, F32x8 y) {
  return each([&](int i) { return x.v[i] + y.v[i]; });
}
inline F32x8 mul(F32x8 x, F32x8 y) {
  return each([&](int i) { return x.v[i] * y.v[i]; });
}
inline F32x8 fma(F32x8 acc, F32x8 x, F32x8 y) {
  return each([&](int i) { return acc.v[i] + x.v[i] * y.v[i]; });
}

inline F32x8 sub(F32x8 x, F32x8 y) {
  return each([&](int i) { return x.v[i] - y.v[i]; });
}
inline F32x8 divide(F32x8 x, F32x8 y) {
  return each([&](int i) { return x.v[i] / y.v[i]; });
}
inline F32x8 divide_or_zero(F32x8 x, F32x8 y) {
  return each([&](int i) { return y.v[i] > 0.0f ? x.v[i] / y.v[i] : 0.0f; });
}
inline F32x8 ceil_12_bits(F32x8 x) {
  return each([&](int i) {
    uint32_t bits;
    float up;
    std::memcpy(&bits, x.v + i, 4);
    bits = (bits + 0xfff) & ~uint32_t{0xfff};
    std::memcpy(&up, &bits, 4);
    return up;
  });
}
inline F32x8 absolute(F32x8 x) {
  return each([&](int i) { return std::fabs(x.v[i]); });
}
inline F32x8 maximum(F32x8 x, F32x8 y) {
  return each([&](int i) { return x.v[i] > y.v[i] || std::isnan(x.v[i]) ? x.v[i] : y.v[i]; });
}
inline F32x8 clamp_min(F32x8 x, F32x8 bound) {
  return each([&](int i) { return x.v[i] < bound.v[i] ? bound.v[i] : x.v[i]; });
}
inline F32x8 maximum_abs(F32x8 x, F32x8 y) { return maximum(x, y); }
inline F32x8 exp2_int(F32x8 shifted) {
  return each([&](int i) {
    uint32_t bits;
    std::memcpy(&bits, shifted.v + i, 4);
    bits = (bits << 23) + 0x3f800000;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
  });
}
inline void store_sums4(float* p, F32x8 x, F32x8 y, F32x8 z, F32x8 w) {
  const auto total = [](const float* v) {
    return (v[0] + v[4] + (v[1] + v[5])) + (v[2] + v[6] + (v[3] + v[7]));
  };
  p[0] = total(x.v);
  p[1] = total(y.v);
  p[2] = total(z.v);
  p[3] = total(w.v);
}
inline void store_interleaved4(float* p, F32x8 x, F32x8 y, F32x8 z, F32x8 w) {
  float rows[4][8];
  store(rows[0], x);
  store(rows[1], y);
  store(rows[2], z);
  store(rows[3], w);
  for (int i = 0; i < 32; ++i) p[i] = rows[i % 4][i / 4];
}
inline F32x8 load_f16(const uint16_t* p) { return load_f16_fast(p); }
inline uint16_t f32_to_f16(float x) {
  const float size = std::fabs(x);
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (!(size < 65520.0f)) return static_cast<uint16_t>(sign | (std::isnan(x) ? 0x7e00 : 0x7c00));
  if (size == 0.0f) return sign;  // frexp returns exponent 0 for 0, as for 0.5
  int exponent;
  std::frexp(size, &exponent);
  // A float16 has 11 bits of fraction, and its smallest step is 2^-24.
  const int step = exponent - 11 < -24 ? -24 : exponent - 11;
  const int fraction = static_cast<int>(std::nearbyint(std::ldexp(size, -step)));
  return static_cast<uint16_t>(sign | (fraction + (step + 24) * 1024));
}
inline void store_f16(uint16_t* p, F32x8 x) {
  for (int i = 0; i < 8; ++i) p[i] = f32_to_f16(x.v[i]);
}
inline F32x8 load_bf16(const uint16_t* p) {
  return each([&](int i) {
    const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
  });
}
inline F32x8 load_int8(const int8_t* p) {
  return each([&](int i) { return static_cast<float>(p[i]); });
}

inline Quad load_quad(const float* p) { return {p}; }
template <int LANE>
inline F32x8 mul_lane(F32x8 x, Quad q) {
  return each([&](int i) { return x.v[i] * q.p[LANE]; });
}
template <int LANE>
inline F32x8 fma_lane(F32x8 acc, F32x8 x, Quad q) {
  return each([&](int i) { return acc.v[i] + x.v[i] * q.p[LANE]; });
}

inline Codes32 load_codes(const uint8_t* p) {
  Codes32 out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
inline void store_codes(uint8_t* p, Codes32 x) { std::memcpy(p, x.v, sizeof x.v); }
inline Codes32 low_nibbles(Codes32 x) {
  for (int8_t& code : x.v) code = static_cast<int8_t>(code & 15);
  return x;
}
inline Codes32 high_nibbles(Codes32 x) {
  for (int8_t& code : x.v) code = static_cast<int8_t>(static_cast<uint8_t>(code) >> 4);
  return x;
}
inline Codes32 low_6_bits(Codes32 x) {
  for (int8_t& code : x.v) code = static_cast<int8_t>(code & 63);
  return x;
}
inline Codes32 join_top_bits(Codes32 x, Codes32 y, Codes32 z) {
  for (int i = 0; i < 32; ++i) {
    x.v[i] = static_cast<int8_t>((x.v[i] >> 6 & 3) << 4 | (y.v[i] >> 6 & 3) << 2 | (z.v[i] >> 6 & 3));
  }
  return x;
}
inline Codes32 subtract(Codes32 x, int8_t y) {
  for (int8_t& code : x.v) code = static_cast<int8_t>(code - y);
  return x;
}
inline F32x8 nibbles_at(const uint8_t* p, int i) {
  p += i % 8 / 4 * 32 + i % 4;
  return each([&](int r) { return static_cast<float>(p[4 * r] >> i / 8 * 4 & 15); });
}
inline F32x8 bytes_at(const uint8_t* p, int i) {
  p += i / 4 * 32 + i % 4;
  return each([&](int r) { return static_cast<float>(static_cast<int8_t>(p[4 * r])); });
}
inline Inputs16 load_inputs(const int8_t* p) { return {p}; }

inline I32x8 sum_start() { return I32x8{}; }
inline QuadInt load_quad(const int32_t* p) { return {p}; }
template <int LANE>
inline I32x8 sum_start(QuadInt q) {
  I32x8 out;
  for (int32_t& sum : out.v) sum = q.p[LANE];
  return out;
}
inline F32x8 sum_finish(I32x8 x) {
  return each([&](int i) { return static_cast<float>(x.v[i]); });
}

template <int LANE>
inline I32x8 dot_signed(I32x8 acc, Codes32 w, Inputs16 x) {
  for (int i = 0; i < 32; ++i) acc.v[i / 4] += w.v[i] * x.p[4 * LANE + i % 4];
  return acc;
}
template <int LANE>
inline I32x8 dot_unsigned(I32x8 acc, Codes32 w, Inputs16 x) {
  return dot_signed<LANE>(acc, w, x);
}

// The 16 values of nibbles.
struct Codebook {
  const int8_t* p;
};
inline Codebook load_codebook(const int8_t* p) { return {p}; }
inline Codes32 look_up(Codebook book, Codes32 x) {
  for (int8_t& code : x.v) code = book.p[code];
  return x;
}

struct Table16 {
  const float* p;
};
inline Table16 load_table(const float* p) { return {p}; }
// 16 bytes hold 4 inputs of 8 outputs: two in the low nibbles, two in the high ones.
inline void lookup32(const Table16& table, const uint8_t* codes, F32x8 scale, float* out) {
  for (int i = 0; i < 16; ++i) {
    out[i] = table.p[codes[i] & 15] * scale.v[i % 8];
    out[16 + i] = table.p[codes[i] >> 4] * scale.v[i % 8];
  }
}

// block_neon.h has these for NEON.
constexpr bool kHasMultiply4 = false;
constexpr float kSumStart = 0.0f;
template <bool OFFSETS>
inline void multiply_4(const uint8_t*, const float*, const float*, const float*, int, int,
                       const int8_t*, const float*, const float*, float*) {}

inline void cpu_pause() {}

}  // namespace windlass
