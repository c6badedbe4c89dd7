// Inputs that outweigh those beside them: rounded together with them they would make the step too
// coarse, so they are left out and multiplied as they are.

#pragma once

#include <algorithm>

#include "simd.h"
#include "weight.h"

namespace windlass {

struct Outlier {
  int32_t input;  // in the weight's order
  int32_t group;
  float x;
};

// Those of one row, in the order of the inputs.
struct Outliers {
  const Outlier* list;
  int count;
};

constexpr size_t kCountBytes = 16;  // before the list
inline size_t outlier_bytes(int most) {
  return (kCountBytes + static_cast<size_t>(most + 1) * sizeof(Outlier) + 15) / 16 * 16;
}
inline Outliers row_outliers(const uint8_t* memory) {
  return {reinterpret_cast<const Outlier*>(memory + kCountBytes),
          *reinterpret_cast<const int32_t*>(memory)};
}

// Where the outliers of a row go. The list ends with one past all inputs, so that nobody who looks for
// an input has to count.
struct OutlierSink {
  int32_t* count;
  Outlier* list;

  explicit OutlierSink(uint8_t* memory)
      : count(reinterpret_cast<int32_t*>(memory)),
        list(reinterpret_cast<Outlier*>(memory + kCountBytes)) {
    end_at(0);
  }
  void add(Outlier one) {
    list[*count] = one;
    end_at(*count + 1);
  }

 private:
  void end_at(int32_t place) {
    *count = place;
    list[place].input = INT32_MAX;
  }
};

// Outliers of some panels by input, so that a weight is unpacked once for all of them. A column is
// an input at which some row has one; a quad is what the 4 rows of a panel have there, zero where it
// is no outlier of a row: 4 rows meet a weight in the time that finding the one that has it would
// take, and often others have it too.
struct OutlierColumn {
  int32_t input, group;
};
struct OutlierColumns {
  const OutlierColumn* list;
  // Panels come in the order of how many quads they have, so that the CPU guesses right where each
  // ends. The i-th is order[i], and has quads [firsts[i], firsts[i + 1]).
  const int32_t* order;
  const int32_t* firsts;
  const int32_t* quad_columns;
  const float* quads;  // [quads][4]
  int count;
  bool pay;  // else rows seldom have outliers at the same inputs, and each on its own is faster
};

// For `rows` rows, which are whole panels, with `most` outliers each at most.
size_t column_bytes(const Weight& w, int most, int rows);
// Of the first `count` of these rows. The memory begins with the OutlierColumns.
void gather_columns(const Weight& w, const uint8_t* outliers, int most, int count, int rows,
                    uint8_t* memory);

namespace tile {

// Adds to out[row][output] what the outliers of `rows` rows before input `end` contribute, row by row.
// `at` is how far each has come.
template <class WeightOf>
inline void multiply_rows(const uint8_t* outliers, size_t row_bytes, int rows, int end, int32_t* at,
                          const WeightOf& weight_of, float* out) {
  for (int m = 0; m < rows; ++m, outliers += row_bytes, out += kTile) {
    const Outliers x = row_outliers(outliers);
    const Outlier* o = x.list + at[m];
    Floats acc = load(out);
    for (; o->input < end; ++o) acc = fma(acc, weight_of(*o), splat(o->x));
    store(out, acc);
    at[m] = static_cast<int32_t>(o - x.list);
  }
}

// Adds to out[row][output] what the outliers of `panels` panels from input `begin` to `end`
// contribute: the weights of some inputs, then panel by panel those that have outliers there. `at` is
// how far each has come. Each row's sum goes through its outliers in the same order, with zeros
// between.
template <class WeightOf>
inline void multiply_columns(const OutlierColumns& x, int begin, int end, int panels, int32_t* at,
                             const WeightOf& weight_of, float* out) {
  constexpr int most = 512;
  alignas(64) float weights[most * kTile];
  const auto before = [](const OutlierColumn& c, int input) { return c.input < input; };
  const auto place = [&](int input) {
    if (x.count == 0 || input <= x.list[0].input) return 0;
    if (input > x.list[x.count - 1].input) return x.count;
    return static_cast<int>(std::lower_bound(x.list, x.list + x.count, input, before) - x.list);
  };
  const int stop = place(end);
  for (int first = place(begin), last; first < stop; first = last) {
    last = std::min(first + most, stop);
    for (int c = first; c < last; ++c) store(weights + (c - first) * kTile, weight_of(x.list[c]));
    for (int i = 0; i < panels; ++i) {
      const int32_t* const all = x.quad_columns + x.firsts[i + 1];
      const int32_t* const begun = x.quad_columns + at[i];
      const int32_t* const done = last == x.count ? all : std::lower_bound(begun, all, last);
      float* sums = out + x.order[i] * kPanel * kTile;
      Floats acc[kPanel];
      for (int m = 0; m < kPanel; ++m) acc[m] = load(sums + m * kTile);
      const float* inputs = x.quads + at[i] * kPanel;
      for (const int32_t* column = begun; column < done; ++column, inputs += kPanel) {
        const Floats weight = load(weights + (*column - first) * kTile);
        const Quad four = load_quad(inputs);
        unrolled<kPanel>([&](auto m) WINDLASS_INLINED {
          acc[m] = fma_lane<m>(acc[m], weight, four);
        });
      }
      for (int m = 0; m < kPanel; ++m) store(sums + m * kTile, acc[m]);
      at[i] = static_cast<int32_t>(done - x.quad_columns);
    }
  }
}

}  // namespace tile

}  // namespace windlass
