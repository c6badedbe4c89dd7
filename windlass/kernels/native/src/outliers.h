// Outliers: inputs so much larger than the others of their block that they would make its scale too
// coarse. They are left out of the block and multiplied in float32.

#pragma once

#include <algorithm>

#include "simd.h"
#include "weight.h"

namespace windlass {

struct Outlier {
  int32_t input;  // in the weight's column order
  int32_t group;
  float x;
};

// The outliers of one row, sorted by input.
struct Outliers {
  const Outlier* list;
  int count;
};

constexpr size_t kCountBytes = 16;  // before the list
inline size_t outlier_bytes(int max_outliers) {
  return (kCountBytes + static_cast<size_t>(max_outliers + 1) * sizeof(Outlier) + 15) / 16 * 16;
}
inline Outliers row_outliers(const uint8_t* memory) {
  return {reinterpret_cast<const Outlier*>(memory + kCountBytes),
          *reinterpret_cast<const int32_t*>(memory)};
}

// Writes the outliers of a row. The list ends with a sentinel past all inputs, so that readers need
// no count.
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
  void end_at(int32_t column_index) {
    *count = column_index;
    list[column_index].input = INT32_MAX;
  }
};

// Outliers of several panels by input, so that a weight is unpacked once for all of them. A column
// is an input at which some row has an outlier. A quad holds the values of a panel's 4 rows there,
// zero where the input is no outlier of the row: multiplying 4 rows takes no longer than finding
// the one row, and often several rows have the same outlier.
struct OutlierColumn {
  int32_t input, group;
};
struct OutlierColumns {
  const OutlierColumn* list;
  // Panels are sorted by their number of quads, which helps the branch predictor at the end of
  // each. Panel panel_order[i] has quads [quad_starts[i], quad_starts[i + 1]).
  const int32_t* panel_order;
  const int32_t* quad_starts;
  const int32_t* quad_columns;
  const float* quads;  // [quads][4]
  int count;
  bool by_column;  // false: rows seldom share outlier inputs, and row by row is faster
};

// Bytes for `rows` rows (whole panels) with at most `max_outliers` outliers each.
size_t column_bytes(const Weight& w, int max_outliers, int rows);
// Gathers the first `count` of these rows. The memory begins with the OutlierColumns.
void gather_columns(const Weight& w, const uint8_t* outliers, int max_outliers, int count, int rows,
                    uint8_t* memory);

namespace tile {

// Adds to out[row][output] the outliers before input `end` of `rows` rows, row by row. `at` is the
// next outlier of each row.
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

// Adds to out[row][output] the outliers of `panels` panels from input `begin` to `end`: unpacks the
// weights of some inputs, then goes through the panels. `at` is the next quad of each panel. Each
// row adds its outliers in the same order, with zeros between.
template <class WeightOf>
inline void multiply_columns(const OutlierColumns& x, int begin, int end, int panels, int32_t* at,
                             const WeightOf& weight_of, float* out) {
  constexpr int max_columns = 512;
  alignas(64) float weights[max_columns * kTile];
  const auto before = [](const OutlierColumn& c, int input) { return c.input < input; };
  const auto column_index = [&](int input) {
    if (x.count == 0 || input <= x.list[0].input) return 0;
    if (input > x.list[x.count - 1].input) return x.count;
    return static_cast<int>(std::lower_bound(x.list, x.list + x.count, input, before) - x.list);
  };
  const int stop = column_index(end);
  for (int first = column_index(begin), last; first < stop; first = last) {
    last = std::min(first + max_columns, stop);
    for (int c = first; c < last; ++c) store(weights + (c - first) * kTile, weight_of(x.list[c]));
    for (int i = 0; i < panels; ++i) {
      const int32_t* const all = x.quad_columns + x.quad_starts[i + 1];
      const int32_t* const begun = x.quad_columns + at[i];
      const int32_t* const done = last == x.count ? all : std::lower_bound(begun, all, last);
      float* sums = out + x.panel_order[i] * kPanelRows * kTile;
      Floats acc[kPanelRows];
      for (int m = 0; m < kPanelRows; ++m) acc[m] = load(sums + m * kTile);
      const float* inputs = x.quads + at[i] * kPanelRows;
      for (const int32_t* column = begun; column < done; ++column, inputs += kPanelRows) {
        const Floats weight = load(weights + (*column - first) * kTile);
        const Quad four = load_quad(inputs);
        unrolled<kPanelRows>([&](auto m) WINDLASS_INLINED {
          acc[m] = fma_lane<m>(acc[m], weight, four);
        });
      }
      for (int m = 0; m < kPanelRows; ++m) store(sums + m * kTile, acc[m]);
      at[i] = static_cast<int32_t>(done - x.quad_columns);
    }
  }
}

}  // namespace tile

}  // namespace windlass
