// Gathers the outliers of rows by input.

#include "outliers.h"

#include <new>
#include <numeric>
#include <vector>

namespace windlass {

namespace {

// Offsets of the arrays after OutlierColumns. Quads are aligned to 16 bytes.
struct ColumnLayout {
  size_t list, quads, columns, panel_order, quad_starts, end;

  ColumnLayout(const Weight& w, int max_outliers, int rows) {
    const size_t panels = static_cast<size_t>(rows / kPanelRows);
    const size_t max_quads = static_cast<size_t>(max_outliers) * static_cast<size_t>(rows);
    list = (sizeof(OutlierColumns) + 15) / 16 * 16;
    quads = list + static_cast<size_t>(padded_in(w)) * sizeof(OutlierColumn);
    columns = quads + max_quads * kPanelRows * sizeof(float);
    panel_order = columns + max_quads * sizeof(int32_t);
    quad_starts = panel_order + panels * sizeof(int32_t);
    end = quad_starts + (panels + 1) * sizeof(int32_t);
  }
};

// A set of integers, iterated in order.
class BitSet {
 public:
  explicit BitSet(int count) : words_(static_cast<size_t>(ceil_div(count, 64))) {}

  void add(int i) { words_[static_cast<size_t>(i / 64)] |= uint64_t{1} << i % 64; }

  // Calls body(i) for all elements, and clears the set.
  template <class Body>
  void take(const Body& body) {
    for (size_t w = 0; w < words_.size(); ++w) {
      for (uint64_t left = words_[w]; left != 0; left &= left - 1) {
        body(static_cast<int>(w) * 64 + __builtin_ctzll(left));
      }
      words_[w] = 0;
    }
  }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace

size_t column_bytes(const Weight& w, int max_outliers, int rows) {
  return (ColumnLayout(w, max_outliers, rows).end + 15) / 16 * 16;
}

void gather_columns(const Weight& w, const uint8_t* outliers, int max_outliers, int count, int rows,
                    uint8_t* memory) {
  const ColumnLayout at(w, max_outliers, rows);
  const auto ints = [&](size_t offset) { return reinterpret_cast<int32_t*>(memory + offset); };
  OutlierColumn* const list = reinterpret_cast<OutlierColumn*>(memory + at.list);
  int32_t *const panel_order = ints(at.panel_order), *const quad_starts = ints(at.quad_starts);
  int32_t* const quad_columns = ints(at.columns);
  float* const quads = reinterpret_cast<float*>(memory + at.quads);
  const auto each = [&](int begin, int end, const auto& body) {
    for (int m = begin; m < end; ++m) {
      const Outliers row = row_outliers(outliers + static_cast<size_t>(m) * outlier_bytes(max_outliers));
      for (int i = 0; i < row.count; ++i) body(m - begin, row.list[i]);
    }
  };
  const auto each_of_panel = [&](int p, const auto& body) {
    each(p * kPanelRows, std::min((p + 1) * kPanelRows, count), body);
  };
  BitSet marks(padded_in(w));
  std::vector<int32_t> column_of(static_cast<size_t>(padded_in(w)));
  int32_t num_columns = 0, num_quads = 0, num_outliers = 0;
  each(0, count, [&](int, const Outlier& o) {
    marks.add(o.input);
    ++num_outliers;
  });
  marks.take([&](int input) {
    column_of[static_cast<size_t>(input)] = num_columns;
    list[num_columns++] = {input, input / w.group};
  });
  const int panels = ceil_div(count, kPanelRows);
  std::vector<int32_t> sizes(static_cast<size_t>(panels));
  for (int p = 0; p < panels; ++p) {
    each_of_panel(p, [&](int, const Outlier& o) { marks.add(o.input); });
    marks.take([&](int) { ++sizes[static_cast<size_t>(p)]; });
  }
  std::iota(panel_order, panel_order + panels, 0);
  std::stable_sort(panel_order, panel_order + panels, [&](int a, int b) {
    return sizes[static_cast<size_t>(a)] < sizes[static_cast<size_t>(b)];
  });
  std::vector<int32_t> quad_of(static_cast<size_t>(num_columns));
  for (int i = 0; i < panels; ++i) {
    quad_starts[i] = num_quads;
    each_of_panel(panel_order[i], [&](int, const Outlier& o) {
      marks.add(column_of[static_cast<size_t>(o.input)]);
    });
    marks.take([&](int c) {
      quad_columns[num_quads] = c;
      quad_of[static_cast<size_t>(c)] = num_quads++;
    });
    std::fill(quads + quad_starts[i] * kPanelRows, quads + num_quads * kPanelRows, 0.0f);
    each_of_panel(panel_order[i], [&](int m, const Outlier& o) {
      const size_t c = static_cast<size_t>(column_of[static_cast<size_t>(o.input)]);
      quads[quad_of[c] * kPanelRows + m] = o.x;
    });
  }
  quad_starts[panels] = num_quads;
  // These take about the same time: unpacking a weight, multiplying a quad, both for a single row.
  const bool by_column = num_columns + num_quads < num_outliers;
  new (memory) OutlierColumns{list, panel_order, quad_starts, quad_columns, quads, num_columns, by_column};
}

}  // namespace windlass
