// Vector functions of operations other than GEMMs: exponentials, sums over lanes.

#pragma once

#include <cmath>
#include <cstring>

#include "simd.h"

namespace windlass {

constexpr int kLanes = 8;

inline float sum_of(F32x8 x) {
  float out[4];
  store_sums4(out, x, x, x, x);
  return out[0];
}

inline float max_of(F32x8 x) {
  float v[kLanes];
  store(v, x);
  float max_value = v[0];
  for (int i = 1; i < kLanes; ++i) max_value = v[i] > max_value || std::isnan(v[i]) ? v[i] : max_value;
  return max_value;
}

// Returns the largest |x|, or NaN if there is one. Compares integers, since compilers do not
// vectorise a maximum of floats: magnitudes compare like their bits, and NaN is above infinity.
inline float max_abs(const float* x, int count) {
  int32_t max_value = 0;
  for (int i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    max_value = bits > max_value ? bits : max_value;
  }
  float largest;
  std::memcpy(&largest, &max_value, 4);
  return largest;
}

// exp(x) = (1 + fraction) * power.
struct Exponential {
  F32x8 fraction, power;
};

// For x between -88 and 88.
WINDLASS_INLINE Exponential split_exponential(F32x8 x) {
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const F32x8 magic = splat(12582912.0f);
  const F32x8 shifted = fma(magic, x, splat(1.44269504f));
  const F32x8 n = sub(shifted, magic);
  F32x8 r = fma(x, n, splat(-0.693359375f));
  r = fma(r, n, splat(2.12194440e-4f));
  F32x8 p = splat(1.9875691500e-4f);
  p = fma(splat(1.3981999507e-3f), p, r);
  p = fma(splat(8.3334519073e-3f), p, r);
  p = fma(splat(4.1665795894e-2f), p, r);
  p = fma(splat(1.6666665459e-1f), p, r);
  p = fma(splat(0.5f), p, r);
  return {fma(r, p, mul(r, r)), exp2_int(shifted)};
}

// Within 2 units of the last place for x between -87 and 88; 0 below -88, -infinity included. NaN
// for NaN.
inline F32x8 exponential(F32x8 x) {
  const Exponential e = split_exponential(clamp_min(x, splat(-88.0f)));
  // Multiplies instead of adding to the exponent bits: that would turn a NaN with payload bits into
  // a number.
  return mul(add(e.fraction, splat(1.0f)), e.power);
}

// Within 4 units of the last place; NaN for NaN. With m = exp(2x) - 1, which has no cancellation in
// this form, it is m / (m + 2).
inline F32x8 hyperbolic_tangent(F32x8 x) {
  const F32x8 bound = splat(-10.0f);  // the result is 1 from 9.1 on
  x = sub(zero(), clamp_min(sub(zero(), clamp_min(x, bound)), bound));
  const Exponential e = split_exponential(add(x, x));
  const F32x8 m = fma(sub(e.power, splat(1.0f)), e.fraction, e.power);
  return divide(m, add(m, splat(2.0f)));
}

inline float exponential(float x) {
  float out[kLanes];
  store(out, exponential(splat(x)));
  return out[0];
}

// Four accumulators hide the latency of the additions.
inline float sum_of_squares(const float* x, int count) {
  F32x8 sums[4] = {zero(), zero(), zero(), zero()};
  const auto add_8 = [&](F32x8& sum, int i) { sum = fma(sum, load(x + i), load(x + i)); };
  int i = 0;
  for (; i + 32 <= count; i += 32) {
    for (int k = 0; k < 4; ++k) add_8(sums[k], i + 8 * k);
  }
  for (; i + 16 <= count; i += 16) {
    for (int k = 0; k < 2; ++k) add_8(sums[k], i + 8 * k);
  }
  float total = sum_of(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  for (; i < count; ++i) total += x[i] * x[i];
  return total;
}

}  // namespace windlass
