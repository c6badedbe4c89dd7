// Gathers the outliers of rows by input.

#include "outliers.h"

#include <new>
#include <numeric>
#include <vector>

namespace windlass {

namespace {

// Where the arrays behind OutlierColumns begin, and end. Quads begin at whole ones.
struct Places {
  size_t list, quads, columns, order, firsts, end;

  Places(const Weight& w, int most, int rows) {
    const size_t panels = static_cast<size_t>(rows / kPanel);
    const size_t most_quads = static_cast<size_t>(most) * static_cast<size_t>(rows);
    list = (sizeof(OutlierColumns) + 15) / 16 * 16;
    quads = list + static_cast<size_t>(padded_in(w)) * sizeof(OutlierColumn);
    columns = quads + most_quads * kPanel * sizeof(float);
    order = columns + most_quads * sizeof(int32_t);
    firsts = order + panels * sizeof(int32_t);
    end = firsts + (panels + 1) * sizeof(int32_t);
  }
};

// Which of some numbers are there, in their order.
class Marks {
 public:
  explicit Marks(int count) : words_(static_cast<size_t>(ceil_div(count, 64))) {}

  void add(int i) { words_[static_cast<size_t>(i / 64)] |= uint64_t{1} << i % 64; }

  // Calls body(i) for all of them, and forgets them.
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

size_t column_bytes(const Weight& w, int most, int rows) {
  return (Places(w, most, rows).end + 15) / 16 * 16;
}

void gather_columns(const Weight& w, const uint8_t* outliers, int most, int count, int rows,
                    uint8_t* memory) {
  const Places at(w, most, rows);
  const auto numbers = [&](size_t place) { return reinterpret_cast<int32_t*>(memory + place); };
  OutlierColumn* const list = reinterpret_cast<OutlierColumn*>(memory + at.list);
  int32_t *const order = numbers(at.order), *const firsts = numbers(at.firsts);
  int32_t* const quad_columns = numbers(at.columns);
  float* const quads = reinterpret_cast<float*>(memory + at.quads);
  const auto each = [&](int begin, int end, const auto& body) {
    for (int m = begin; m < end; ++m) {
      const Outliers row = row_outliers(outliers + static_cast<size_t>(m) * outlier_bytes(most));
      for (int i = 0; i < row.count; ++i) body(m - begin, row.list[i]);
    }
  };
  const auto each_of_panel = [&](int p, const auto& body) {
    each(p * kPanel, std::min((p + 1) * kPanel, count), body);
  };
  Marks marks(padded_in(w));
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
  const int panels = ceil_div(count, kPanel);
  std::vector<int32_t> sizes(static_cast<size_t>(panels));
  for (int p = 0; p < panels; ++p) {
    each_of_panel(p, [&](int, const Outlier& o) { marks.add(o.input); });
    marks.take([&](int) { ++sizes[static_cast<size_t>(p)]; });
  }
  std::iota(order, order + panels, 0);
  std::stable_sort(order, order + panels, [&](int a, int b) {
    return sizes[static_cast<size_t>(a)] < sizes[static_cast<size_t>(b)];
  });
  std::vector<int32_t> quad_of(static_cast<size_t>(num_columns));
  for (int i = 0; i < panels; ++i) {
    firsts[i] = num_quads;
    each_of_panel(order[i], [&](int, const Outlier& o) {
      marks.add(column_of[static_cast<size_t>(o.input)]);
    });
    marks.take([&](int c) {
      quad_columns[num_quads] = c;
      quad_of[static_cast<size_t>(c)] = num_quads++;
    });
    std::fill(quads + firsts[i] * kPanel, quads + num_quads * kPanel, 0.0f);
    each_of_panel(order[i], [&](int m, const Outlier& o) {
      const size_t c = static_cast<size_t>(column_of[static_cast<size_t>(o.input)]);
      quads[quad_of[c] * kPanel + m] = o.x;
    });
  }
  firsts[panels] = num_quads;
  // About the same time: to unpack a weight, to multiply a quad, to do both for a row on its own.
  const bool pay = num_columns + num_quads < num_outliers;
  new (memory) OutlierColumns{list, order, firsts, quad_columns, quads, num_columns, pay};
}

}  // namespace windlass
