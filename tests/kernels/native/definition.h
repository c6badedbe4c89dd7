// Reference implementations in double precision of all operations but GEMMs, for selftest_ops.h.
// selftest.cpp defines the GEMMs.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "commands.h"

namespace selftest {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

inline void expect(const char* what, double found, double wanted, double tolerance) {
  if (std::fabs(found - wanted) <= tolerance) return;
  std::printf("%s: %g instead of %g\n", what, found, wanted);
  std::exit(1);
}

inline Doubles normalised(const double* x, const Floats& weight, double eps) {
  double squares = 0.0;
  for (size_t i = 0; i < weight.size(); ++i) squares += x[i] * x[i];
  const double scale = 1.0 / std::sqrt(squares / static_cast<double>(weight.size()) + eps);
  Doubles out(weight.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = x[i] * scale * weight[i];
  return out;
}

inline double silu(double x) { return x / (1.0 + std::exp(-x)); }

inline Doubles centred(Doubles x) {
  double mean = 0.0;
  for (double number : x) mean += number / static_cast<double>(x.size());
  for (double& number : x) number -= mean;
  return x;
}

// Rotates pairs (i, i + half), or (2i, 2i + 1), by an angle given by its cosine and sine.
inline Doubles rotated(const Doubles& x, const float* cos_sin, size_t half, bool interleaved) {
  Doubles out = x;
  for (size_t i = 0; i < half; ++i) {
    const double cosine = cos_sin[i], sine = cos_sin[half + i];
    const size_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : half + i;
    out[first] = x[first] * cosine - x[second] * sine;
    out[second] = x[second] * cosine + x[first] * sine;
  }
  return out;
}

inline double f16_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31  ? (fraction ? NAN : HUGE_VAL)
                      : exponent == 0 ? std::ldexp(fraction, -24)
                                      : std::ldexp(fraction + 1024, exponent - 25);
  return bits & 0x8000 ? -size : size;
}

// Pages of keys or of values, filled with values of moderate size.
struct Stored {
  int type, dim;
  std::vector<uint8_t> bytes;
  Floats scales;

  Stored(int kind, size_t num_heads, int width)
      : type(kind),
        dim(width),
        bytes(num_heads * static_cast<size_t>(width) * static_cast<size_t>(size())),
        scales(num_heads, 1.0f / 64) {
    unsigned state = 999;
    for (size_t i = 0; i < bytes.size(); i += static_cast<size_t>(size())) {
      state = state * 1664525u + 1013904223u;
      const unsigned drawn = state >> 12;
      const float number = static_cast<float>(drawn & 255) / 128.0f - 1.0f;
      const uint32_t sign = drawn & 1 ? 0x8000 : 0;
      const uint16_t half = static_cast<uint16_t>(sign | (0x2c00 + drawn % 0x1000));
      const uint16_t bf16 = static_cast<uint16_t>(sign | (0x3d00 + drawn % 0x200));
      const int8_t code = static_cast<int8_t>(drawn);
      const void* from[] = {&number, &half, &bf16, &code};
      std::memcpy(bytes.data() + i, from[type], static_cast<size_t>(size()));
    }
  }

  int size() const { return type == windlass::kTypeF32 ? 4 : type == windlass::kTypeInt8 ? 1 : 2; }

  double at(size_t index, int d) const {
    const size_t i = index * static_cast<size_t>(dim) + static_cast<size_t>(d);
    const uint8_t* p = bytes.data() + i * static_cast<size_t>(size());
    uint16_t bits = 0;
    if (size() == 2) std::memcpy(&bits, p, 2);
    if (type == windlass::kTypeF16) return f16_value(bits);
    if (type == windlass::kTypeInt8) return static_cast<int8_t>(*p) * double{scales[index]};
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float number;
    std::memcpy(&number, type == windlass::kTypeBf16 ? static_cast<const void*>(&wide) : p, 4);
    return number;
  }

  Doubles all() const {
    Doubles out;
    for (size_t index = 0; index < scales.size(); ++index) {
      for (int d = 0; d < dim; ++d) out.push_back(at(index, d));
    }
    return out;
  }

  // The rounding error of a stored value, where `peak` is the largest magnitude of its head.
  double rounding_error(double x, double peak) const {
    const double relative[] = {1e-5, 1.0 / 2047, 1.0 / 255, 1e-5};
    return relative[type] * std::fabs(x) + (type == windlass::kTypeInt8 ? peak / 253 : 1e-6);
  }
};

// Attention of one query over the keys at `indices`, in order of position. A cap of 0 is none, a sink
// of -infinity too.
inline Doubles attended(const float* query, const Doubles& keys, const Doubles& values, size_t dim,
                        const std::vector<size_t>& indices, double scale, double cap,
                        double sink) {
  Doubles weights;
  double peak = sink, sum = 0.0;
  for (size_t index : indices) {
    const double* key = keys.data() + index * dim;
    double score = 0.0;
    for (size_t d = 0; d < dim; ++d) score += query[d] * key[d];
    score *= scale;
    weights.push_back(cap > 0.0 ? cap * std::tanh(score / cap) : score);
    peak = std::max(peak, weights.back());
  }
  for (double& weight : weights) sum += weight = std::exp(weight - peak);
  if (sink > -HUGE_VAL) sum += std::exp(sink - peak);
  Doubles out(dim);
  for (size_t k = 0; k < indices.size(); ++k) {
    const double* value = values.data() + indices[k] * dim;
    for (size_t d = 0; d < dim; ++d) out[d] += weights[k] / sum * value[d];
  }
  return out;
}

}  // namespace selftest
