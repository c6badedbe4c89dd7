// Rounds rows of prompts, and gathers what stands out of them. Plain loops that compilers vectorise.

#include "prompt_panels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

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

struct RowOutlier {
  int32_t input;  // in the weight's order
  float x;
};

size_t most_outliers(const Weight& w) {
  return static_cast<size_t>(num_stretches(w)) * kMostOutliers;
}

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
void list_outliers(const float* x, const uint8_t* marks, int first, int count, RowOutlier* list,
                   int32_t& found) {
  for (int i = 0; i < count; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, marks + i, 8);
    if (eight == 0) continue;
    for (int k = i; k < i + 8; ++k) {
      if (marks[k]) list[found++] = {first + k, x[k]};
    }
  }
}

}  // namespace

size_t prompt_row_bytes(const Weight& w) {
  return (kCountBytes + most_outliers(w) * sizeof(RowOutlier) + 15) / 16 * 16;
}

// NaN or infinity in x become a scale of NaN or infinity, so that the product shows them.
void fill_prompt_panel(const Weight& w, const float* x, int rows, uint8_t* memory,
                       uint8_t* outliers) {
  const PromptPanel panel = PromptSizes(w).panel(memory);
  int8_t* codes = const_cast<int8_t*>(panel.codes);
  float* scales = const_cast<float*>(panel.scales);
  int32_t* centre = const_cast<int32_t*>(panel.centre);
  const int padded = padded_in(w);
  for (int m = 0; m < rows; ++m, outliers += prompt_row_bytes(w)) {
    const float* row = x + static_cast<size_t>(m) * static_cast<size_t>(w.num_in);
    RowOutlier* list = reinterpret_cast<RowOutlier*>(outliers + kCountBytes);
    int32_t found = 0;
    for (int first = 0, s = 0; first < padded; first += kStretch, ++s) {
      const int count = std::min(kStretch, padded - first);
      float spare[kStretch], inputs[kStretch];
      uint8_t marks[kStretch];
      int8_t rounded[kStretch];
      const float* from = inputs_of(w, row, first, count, spare);
      const float peak = without_outliers(from, count, inputs, marks);
      list_outliers(from, marks, first, count, list, found);
      const float inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
      const int32_t sum = round_codes(inputs, count, inverse, rounded);
      int8_t* to = codes + static_cast<size_t>(first) * kPanel + kRun * m;
      for (int i = 0; i < count; i += kRun) std::memcpy(to + i * kPanel, rounded + i, kRun);
      scales[s * kPanel + m] = peak / 127.0f;
      centre[s * kPanel + m] = -128 * sum;
    }
    *reinterpret_cast<int32_t*>(outliers) = found;
  }
}

namespace {

size_t entries_at(const Weight& w) {
  return static_cast<size_t>(padded_in(w)) * sizeof(PromptColumn);
}
size_t ends_at(const Weight& w, int rows) {
  return entries_at(w) + static_cast<size_t>(rows) * most_outliers(w) * sizeof(PromptEntry);
}

}  // namespace

size_t prompt_outlier_bytes(const Weight& w, int rows) {
  const size_t ends = static_cast<size_t>(num_stretches(w)) * sizeof(PromptEnd);
  return (ends_at(w, rows) + ends + 63) / 64 * 64;
}

PromptOutliers prompt_outliers(const Weight& w, int most, const uint8_t* memory) {
  return {reinterpret_cast<const PromptColumn*>(memory),
          reinterpret_cast<const PromptEntry*>(memory + entries_at(w)),
          reinterpret_cast<const PromptEnd*>(memory + ends_at(w, most))};
}

// Counted by input, then put where those before leave off. Each row's stay in order.
void gather_outliers(const Weight& w, const uint8_t* by_row, int rows, int most, uint8_t* memory) {
  const PromptOutliers out = prompt_outliers(w, most, memory);
  PromptColumn* columns = const_cast<PromptColumn*>(out.columns);
  PromptEntry* entries = const_cast<PromptEntry*>(out.entries);
  const size_t next_row = prompt_row_bytes(w);
  const auto each = [&](const auto& body) {
    for (int m = 0; m < rows; ++m) {
      const uint8_t* row = by_row + static_cast<size_t>(m) * next_row;
      const RowOutlier* list = reinterpret_cast<const RowOutlier*>(row + kCountBytes);
      const int32_t count = *reinterpret_cast<const int32_t*>(row);
      for (const RowOutlier* o = list; o < list + count; ++o) body(m, *o);
    }
  };
  struct Place {
    int32_t next;
    uint16_t column;
  };
  std::vector<Place> places(static_cast<size_t>(padded_in(w)));
  each([&](int, const RowOutlier& o) { ++places[static_cast<size_t>(o.input)].next; });
  int32_t num_columns = 0, num_entries = 0, first = 0;
  for (int k = 0; k < padded_in(w); ++k) {
    if (k % kStretch == 0) first = num_columns;
    Place& place = places[static_cast<size_t>(k)];
    if (place.next > 0) {
      place.column = static_cast<uint16_t>((num_columns - first) * kTile);
      columns[num_columns++] = {static_cast<uint32_t>(k), static_cast<uint32_t>(k / w.group)};
      num_entries += place.next;
      place.next = num_entries - place.next;
    }
    const_cast<PromptEnd*>(out.ends)[k / kStretch] = {num_columns, num_entries};
  }
  each([&](int m, const RowOutlier& o) {
    Place& place = places[static_cast<size_t>(o.input)];
    entries[place.next++] = {static_cast<uint16_t>(m * kTile), place.column, o.x};
  });
}

}  // namespace windlass
