// Rounds rows of prompts, and notes what stands out of them. Plain loops that compilers vectorise.

#include "prompt_panels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "panels.h"
#include "simd.h"

namespace windlass {

namespace {

// An input is an outlier from so many times the root mean square of its stretch on, and then from so
// many times that of the others: where one number is as large as all others together, those would
// have few steps left. In a small language model that is one input in 130; docs/cpu.md has what it
// costs and gives.
constexpr float kOutlier = 4.0f;
constexpr float kOutlierOfRest = 4.5f;
// At most one in kOutlier squared can be, and then one in kOutlierOfRest squared.
constexpr int kMostOutliers = kStretch / 16 + kStretch / 20 + 1;

// From where on an input is an outlier; where one is no number, none is.
float outlier_limit(const float* x, int count, float times) {
  F32x8 first = zero(), second = zero();
  for (int i = 0; i < count; i += 16) {
    const F32x8 a = load(x + i), b = load(x + i + 8);
    first = fma(first, a, a);
    second = fma(second, b, b);
  }
  float lanes[8], sum = 0.0f;
  store(lanes, add(first, second));
  for (float lane : lanes) sum += lane;
  // The bits of NaN are more than those of any number.
  return sum > 1e-30f ? times * std::sqrt(sum / static_cast<float>(count)) : NAN;
}

// Zeros instead of outliers, which are marked. Returns the largest magnitude of the others.
float take_out(const float* x, int count, float limit, float* out, uint8_t* marks) {
  int32_t most = 0, limit_bits;
  std::memcpy(&limit_bits, &limit, 4);
  for (int i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    const int32_t size = bits & 0x7fffffff;  // as whole numbers magnitudes keep their order
    const bool out_of_line = size > limit_bits;
    marks[i] |= out_of_line;
    bits = out_of_line ? 0 : bits;
    std::memcpy(out + i, &bits, 4);
    most = std::max(most, out_of_line ? 0 : size);
  }
  float peak;
  std::memcpy(&peak, &most, 4);
  return peak;
}

float without_outliers(const float* x, int count, float* out, uint8_t* marks) {
  std::memset(marks, 0, static_cast<size_t>(count));
  const float first = outlier_limit(x, count, kOutlier);
  const float peak = take_out(x, count, first, out, marks);
  const float then = outlier_limit(out, count, kOutlierOfRest);
  return peak > then ? take_out(out, count, then, out, marks) : peak;
}

// Nearest, ties to even; returns the sum of the codes.
int32_t round_codes(const float* x, int count, float inverse, int8_t* codes) {
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) {
    // Adding 1.5 * 2^23 leaves the rounded number in the low bits.
    const float shifted = x[i] * inverse + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    codes[i] = static_cast<int8_t>(bits);
    if (kUnsignedCodes) sum += codes[i];
  }
  return sum;
}

// Appends the marked inputs of a stretch that begins at `first`.
void list_outliers(const float* x, const uint8_t* marks, int first, int count, int group,
                   OutlierSink& sink) {
  for (int i = 0; i < count; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, marks + i, 8);
    if (eight == 0) continue;
    for (int k = i; k < i + 8; ++k) {
      if (marks[k]) sink.add({first + k, (first + k) / group, x[k]});
    }
  }
}

}  // namespace

int most_prompt_outliers(const Weight& w) { return num_stretches(w) * kMostOutliers; }

// NaN or infinity in x become a scale of NaN or infinity, so that the product shows them.
void fill_prompt_panel(const Weight& w, const float* x, int rows, uint8_t* memory,
                       uint8_t* outliers) {
  const PromptPanel panel = PromptSizes(w).panel(memory);
  int8_t* codes = const_cast<int8_t*>(panel.codes);
  float* scales = const_cast<float*>(panel.scales);
  int32_t* centre = const_cast<int32_t*>(panel.centre);
  const int padded = padded_in(w);
  for (int m = 0; m < rows; ++m, outliers += outlier_bytes(most_prompt_outliers(w))) {
    const float* row = x + static_cast<size_t>(m) * static_cast<size_t>(w.num_in);
    OutlierSink sink(outliers);
    for (int first = 0, s = 0; first < padded; first += kStretch, ++s) {
      const int count = std::min(kStretch, padded - first);
      float spare[kStretch], inputs[kStretch];
      uint8_t marks[kStretch];
      int8_t rounded[kStretch];
      const float* from = inputs_of(w, row, first, count, spare);
      const float peak = without_outliers(from, count, inputs, marks);
      list_outliers(from, marks, first, count, w.group, sink);
      const float inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
      const int32_t sum = round_codes(inputs, count, inverse, rounded);
      int8_t* to = codes + static_cast<size_t>(first) * kPanel + kRun * m;
      for (int i = 0; i < count; i += kRun) std::memcpy(to + i * kPanel, rounded + i, kRun);
      scales[s * kPanel + m] = peak / 127.0f;
      centre[s * kPanel + m] = -128 * sum;
    }
  }
}

}  // namespace windlass
