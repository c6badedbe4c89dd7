// Quantises prompt rows and finds their outliers. Plain loops that compilers vectorise.

#include "prompt_panels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "panels.h"
#include "simd.h"
#include "vector_math.h"

namespace windlass {

namespace {

// An input is an outlier above kOutlier times the root mean square of its prompt block, and then
// above kOutlierOfOthers times that of the remaining inputs: where one value is as large as all
// others together, the others would have few steps left. In a small language model one input in 130
// is an outlier; docs/cpu.md lists cost and benefit.
constexpr float kOutlier = 4.0f;
constexpr float kOutlierOfOthers = 4.5f;
// At most one input in kOutlier squared can be one, then one in kOutlierOfOthers squared.
constexpr int kMaxOutliers = kPromptBlock / 16 + kPromptBlock / 20 + 1;

// Returns the outlier threshold; NaN in the block disables outliers.
float outlier_limit(float squares, int count, float times) {
  if (squares > 1e-30f) return times * std::sqrt(squares / static_cast<float>(count));
  const uint32_t bits = 0x7fffffff;  // above the bits of any number
  float none;
  std::memcpy(&none, &bits, 4);
  return none;
}

// Marks all inputs but outliers by the highest bit; returns the largest magnitude of the marked
// inputs.
float mark(const float* x, int count, float limit, uint8_t* marks) {
  uint32_t past, max_bits = 0;
  std::memcpy(&past, &limit, 4);
  ++past;
  for (int i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    // Magnitudes compare like their bits. Those up to the limit wrap around, above all others.
    const uint32_t size = (bits & 0x7fffffff) - past;
    marks[i] = static_cast<uint8_t>(size >> 24);
    max_bits = std::max(max_bits, size);
  }
  max_bits += past;
  float peak;
  std::memcpy(&peak, &max_bits, 4);
  return peak;
}

// The indices of a block's outliers, sorted.
struct OutlierIndices {
  int count = 0;
  uint8_t list[kMaxOutliers];
  static_assert(kPromptBlock <= 256);

  void find(const uint8_t* marks, int inputs) {
    constexpr uint64_t highest = 0x8080808080808080;
    count = 0;
    for (int i = 0; i < inputs; i += 16) {
      uint64_t eight[2];
      std::memcpy(eight, marks + i, 16);
      if ((eight[0] & eight[1] & highest) == highest) continue;
      for (int half = 0; half < 2; ++half) {
        for (uint64_t left = ~eight[half] & highest; left != 0; left &= left - 1) {
          list[count++] = static_cast<uint8_t>(i + 8 * half + index_of(left));
        }
      }
    }
  }

 private:
  // Returns the index of the first byte that is not zero.
  static int index_of(uint64_t bytes) {
    constexpr bool swapped = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__;
    return (swapped ? __builtin_clzll(bytes) : __builtin_ctzll(bytes)) / 8;
  }
};

// Finds outliers among the remaining inputs; returns the largest magnitude of the others.
float take_second_pass(const float* x, int count, float peak, uint8_t* marks,
                       OutlierIndices& outliers) {
  float others[kPromptBlock];
  uint8_t more[kPromptBlock];
  std::memcpy(others, x, static_cast<size_t>(count) * sizeof(float));
  for (int i = 0; i < outliers.count; ++i) others[outliers.list[i]] = 0.0f;
  const float limit = outlier_limit(sum_of_squares(others, count), count, kOutlierOfOthers);
  if (!(peak > limit)) return peak;
  peak = mark(others, count, limit, more);
  for (int i = 0; i < count; ++i) marks[i] &= more[i];
  outliers.find(marks, count);
  return peak;
}

// Returns the largest magnitude of the inputs that are no outliers.
float find_outliers_of(const float* x, int count, OutlierIndices& outliers) {
  uint8_t marks[kPromptBlock];
  const float squares = sum_of_squares(x, count);
  const float peak = mark(x, count, outlier_limit(squares, count, kOutlier), marks);
  outliers.find(marks, count);
  float others = squares;
  for (int i = 0; i < outliers.count; ++i) others -= x[outliers.list[i]] * x[outliers.list[i]];
  // The second threshold, less a margin for the rounding of the subtraction: mostly no input is
  // near it.
  constexpr float nearly = 0.98f * kOutlierOfOthers * kOutlierOfOthers;
  const bool none = others > squares / 64 && peak * peak * static_cast<float>(count) < nearly * others;
  return none || outliers.count == 0 ? peak : take_second_pass(x, count, peak, marks, outliers);
}

// Rounds to nearest, ties to even; returns the sum of the codes.
int32_t quantise_codes(const float* x, int count, float inverse, int8_t* codes) {
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) {
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
    const float shifted = x[i] * inverse + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    codes[i] = static_cast<int8_t>(bits);
    if (kUnsignedCodes) sum += codes[i];
  }
  return sum;
}

}  // namespace

int max_prompt_outliers(const Weight& w) { return num_prompt_blocks(w) * kMaxOutliers; }

// NaN or infinity in x becomes a NaN or infinite scale, so that the GEMM propagates it.
void fill_prompt_panel(const Weight& w, const float* x, int rows, uint8_t* memory,
                       uint8_t* outliers) {
  const PromptPanel panel = PromptSizes(w).panel(memory);
  int8_t* codes = const_cast<int8_t*>(panel.codes);
  float* scales = const_cast<float*>(panel.scales);
  int32_t* correction = const_cast<int32_t*>(panel.correction);
  const int padded = padded_in(w);
  for (int m = 0; m < rows; ++m, outliers += outlier_bytes(max_prompt_outliers(w))) {
    const float* row = x + static_cast<size_t>(m) * static_cast<size_t>(w.num_in);
    OutlierSink sink(outliers);
    for (int first = 0, s = 0; first < padded; first += kPromptBlock, ++s) {
      const int count = std::min(kPromptBlock, padded - first);
      float scratch[kPromptBlock];
      int8_t quantised[kPromptBlock];
      OutlierIndices outlier_indices;
      const float* from = inputs_of(w, row, first, count, scratch);
      const float peak = find_outliers_of(from, count, outlier_indices);
      const float inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
      int32_t sum = quantise_codes(from, count, inverse, quantised);
      for (int i = 0; i < outlier_indices.count; ++i) {
        const int at = outlier_indices.list[i];
        sink.add({first + at, (first + at) / w.group, from[at]});
        if (kUnsignedCodes) sum -= quantised[at];
        quantised[at] = 0;
      }
      int8_t* to = codes + static_cast<size_t>(first) * kPanelRows + kRun * m;
      for (int i = 0; i < count; i += kRun) std::memcpy(to + i * kPanelRows, quantised + i, kRun);
      scales[s * kPanelRows + m] = peak / 127.0f;
      correction[s * kPanelRows + m] = -128 * sum;
    }
  }
}

}  // namespace windlass
