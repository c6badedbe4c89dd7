// Rounds rows of prompts, and notes what stands out of them. Plain loops that compilers vectorise.

#include "prompt_panels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "panels.h"
#include "simd.h"
#include "vector_math.h"

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
float outlier_limit(float squares, int count, float times) {
  if (squares > 1e-30f) return times * std::sqrt(squares / static_cast<float>(count));
  const uint32_t bits = 0x7fffffff;  // more than those of any number
  float none;
  std::memcpy(&none, &bits, 4);
  return none;
}

// Marks all inputs but outliers, by the highest bit; returns the largest magnitude of what is marked.
float mark(const float* x, int count, float limit, uint8_t* marks) {
  uint32_t past, most = 0;
  std::memcpy(&past, &limit, 4);
  ++past;
  for (int i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    // As whole numbers magnitudes keep their order. Those up to the limit wrap, and then are more
    // than all others.
    const uint32_t size = (bits & 0x7fffffff) - past;
    marks[i] = static_cast<uint8_t>(size >> 24);
    most = std::max(most, size);
  }
  most += past;
  float peak;
  std::memcpy(&peak, &most, 4);
  return peak;
}

// The places of a stretch's outliers, in their order.
struct Places {
  int count = 0;
  uint8_t list[kMostOutliers];
  static_assert(kStretch <= 256);

  void find(const uint8_t* marks, int inputs) {
    constexpr uint64_t highest = 0x8080808080808080;
    count = 0;
    for (int i = 0; i < inputs; i += 16) {
      uint64_t eight[2];
      std::memcpy(eight, marks + i, 16);
      if ((eight[0] & eight[1] & highest) == highest) continue;
      for (int half = 0; half < 2; ++half) {
        for (uint64_t left = ~eight[half] & highest; left != 0; left &= left - 1) {
          list[count++] = static_cast<uint8_t>(i + 8 * half + place_of(left));
        }
      }
    }
  }

 private:
  // Which byte is the first that is not zero.
  static int place_of(uint64_t bytes) {
    constexpr bool swapped = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__;
    return (swapped ? __builtin_clzll(bytes) : __builtin_ctzll(bytes)) / 8;
  }
};

// Takes out of the others what stands out of them; returns the largest magnitude of the rest.
float take_more(const float* x, int count, float peak, uint8_t* marks, Places& outliers) {
  float rest[kStretch];
  uint8_t more[kStretch];
  std::memcpy(rest, x, static_cast<size_t>(count) * sizeof(float));
  for (int i = 0; i < outliers.count; ++i) rest[outliers.list[i]] = 0.0f;
  const float limit = outlier_limit(sum_of_squares(rest, count), count, kOutlierOfRest);
  if (!(peak > limit)) return peak;
  peak = mark(rest, count, limit, more);
  for (int i = 0; i < count; ++i) marks[i] &= more[i];
  outliers.find(marks, count);
  return peak;
}

// Returns the largest magnitude of what is no outlier.
float take_outliers(const float* x, int count, Places& outliers) {
  uint8_t marks[kStretch];
  const float squares = sum_of_squares(x, count);
  const float peak = mark(x, count, outlier_limit(squares, count, kOutlier), marks);
  outliers.find(marks, count);
  float rest = squares;
  for (int i = 0; i < outliers.count; ++i) rest -= x[outliers.list[i]] * x[outliers.list[i]];
  // The second limit, but for what subtraction lost: most often nothing is near it.
  constexpr float nearly = 0.98f * kOutlierOfRest * kOutlierOfRest;
  const bool none = rest > squares / 64 && peak * peak * static_cast<float>(count) < nearly * rest;
  return none || outliers.count == 0 ? peak : take_more(x, count, peak, marks, outliers);
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

}  // namespace

int most_prompt_outliers(const Weight& w) { return num_stretches(w) * kMostOutliers; }

// NaN or infinity in x become a scale of NaN or infinity, so that the gemm shows them.
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
      float spare[kStretch];
      int8_t rounded[kStretch];
      Places places;
      const float* from = inputs_of(w, row, first, count, spare);
      const float peak = take_outliers(from, count, places);
      const float inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
      int32_t sum = round_codes(from, count, inverse, rounded);
      for (int i = 0; i < places.count; ++i) {
        const int at = places.list[i];
        sink.add({first + at, (first + at) / w.group, from[at]});
        if (kUnsignedCodes) sum -= rounded[at];
        rounded[at] = 0;
      }
      int8_t* to = codes + static_cast<size_t>(first) * kPanel + kRun * m;
      for (int i = 0; i < count; i += kRun) std::memcpy(to + i * kPanel, rounded + i, kRun);
      scales[s * kPanel + m] = peak / 127.0f;
      centre[s * kPanel + m] = -128 * sum;
    }
  }
}

}  // namespace windlass
