// What adapters add to a gemm: y += up[slot] @ (down[slot] @ x), for rows of mixed adapters.
// Their matrices are floats, or codes with a scale for each rank.

#include "run.h"
#include "vector_math.h"

namespace windlass {

namespace {

constexpr int kMostParts = 3;
constexpr int kColumns = 512;  // outputs that one piece of work covers
constexpr int kRows = 8;       // and rows
constexpr int kRanks = 4;      // that are computed at once

WINDLASS_INLINE F32x8 weights_at(const float* p) { return load(p); }
WINDLASS_INLINE F32x8 weights_at(const int8_t* p) { return read_int8(p); }

// A layer's adapters, as commands.h says; parts stand side by side in y.
template <class T>
struct Adapters {
  const T* down;
  const T* up;
  const int32_t* ranks;
  const float* scales;
  int num_in, parts, most, rank_stride;
  int sizes[kMostParts];
  int num_out = 0;

  explicit Adapters(const Run& run)
      : down(run.fixed<T>(0)),
        up(run.fixed<T>(1)),
        ranks(run.fixed<int32_t>(2)),
        scales(run.fixed<float>(4)) {
    const int32_t* shape = run.fixed<int32_t>(3);
    num_in = shape[0], parts = shape[1], most = shape[2], rank_stride = shape[3];
    for (int p = 0; p < parts; ++p) num_out += sizes[p] = shape[4 + p];
  }

  size_t place(int slot, int part) const {
    return static_cast<size_t>(slot) * static_cast<size_t>(rank_stride) + static_cast<size_t>(part);
  }
  int rank(int slot, int part) const { return ranks[place(slot, part)]; }
  // Of its ranks, or nothing.
  const float* scales_of(int slot, int part) const {
    return scales == nullptr ? nullptr : scales + place(slot, part) * static_cast<size_t>(most);
  }
  const T* down_of(int slot, int part) const {
    const size_t matrix = static_cast<size_t>(most) * static_cast<size_t>(num_in);
    return down + static_cast<size_t>(slot * parts + part) * matrix;
  }
  // [ranks][size of the part], of which `first` outputs of other parts come before.
  const T* up_of(int slot, int first) const {
    const size_t rows = static_cast<size_t>(most);
    return up + (static_cast<size_t>(slot) * static_cast<size_t>(num_out) +
                 static_cast<size_t>(first)) * rows;
  }
};

// Rows of a step that have the same adapter, one or two: they share what is read of it.
struct Together {
  int first, count;
};

// low[t][r] = down[r] . x[t] for some ranks r
template <int RANKS, int COUNT, class T>
void dots(const T* down, int width, const float* x, float* low, int low_stride) {
  F32x8 sums[RANKS][COUNT];
  for (auto& own : sums) {
    for (F32x8& sum : own) sum = zero();
  }
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    F32x8 values[COUNT];
    for (int t = 0; t < COUNT; ++t) values[t] = load(row_of(x, t, width) + i);
    for (int r = 0; r < RANKS; ++r) {
      const F32x8 weight = weights_at(row_of(down, r, width) + i);
      for (int t = 0; t < COUNT; ++t) sums[r][t] = fma(sums[r][t], weight, values[t]);
    }
  }
  for (int t = 0; t < COUNT; ++t) {
    for (int r = 0; r < RANKS; ++r) {
      float sum = sum_of(sums[r][t]);
      for (int k = i; k < width; ++k) {
        sum += static_cast<float>(row_of(down, r, width)[k]) * row_of(x, t, width)[k];
      }
      row_of(low, t, low_stride)[r] = sum;
    }
  }
}

template <int COUNT, class T>
void shrink(const T* down, const float* scales, int ranks, int width, const float* x, float* low,
            int low_stride) {
  int r = 0;
  for (; r + kRanks <= ranks; r += kRanks) {
    dots<kRanks, COUNT>(row_of(down, r, width), width, x, low + r, low_stride);
  }
  for (; r < ranks; ++r) dots<1, COUNT>(row_of(down, r, width), width, x, low + r, low_stride);
  if (scales == nullptr) return;
  for (int t = 0; t < COUNT; ++t) {
    for (r = 0; r < ranks; ++r) row_of(low, t, low_stride)[r] *= scales[r];
  }
}

// y[t][begin, end) += low[t] @ up for some ranks, of outputs of one part
template <int RANKS, int COUNT, class T>
void spread(const T* up, int size, const float* low, int low_stride, int begin, int end,
            float* y, int y_stride) {
  int i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    F32x8 sums[COUNT];
    for (int t = 0; t < COUNT; ++t) sums[t] = load(row_of(y, t, y_stride) + i);
    for (int r = 0; r < RANKS; ++r) {
      const F32x8 weight = weights_at(row_of(up, r, size) + i);
      for (int t = 0; t < COUNT; ++t) {
        sums[t] = fma(sums[t], weight, splat(row_of(low, t, low_stride)[r]));
      }
    }
    for (int t = 0; t < COUNT; ++t) store(row_of(y, t, y_stride) + i, sums[t]);
  }
  for (; i < end; ++i) {
    for (int t = 0; t < COUNT; ++t) {
      float& sum = row_of(y, t, y_stride)[i];
      for (int r = 0; r < RANKS; ++r) {
        sum += row_of(low, t, low_stride)[r] * static_cast<float>(row_of(up, r, size)[i]);
      }
    }
  }
}

// Few ranks at a time: y stays in the nearest cache, and each rank is read from end to end.
template <int COUNT, class T>
void expand(const T* up, int ranks, int size, const float* low, int low_stride, int begin,
            int end, float* y, int y_stride) {
  int r = 0;
  for (; r + kRanks <= ranks; r += kRanks) {
    spread<kRanks, COUNT>(row_of(up, r, size), size, low + r, low_stride, begin, end, y, y_stride);
  }
  for (; r < ranks; ++r) {
    spread<1, COUNT>(row_of(up, r, size), size, low + r, low_stride, begin, end, y, y_stride);
  }
}

// The work of one command: rows' inputs brought down to `low`, then on to y.
template <class T>
struct Work {
  const Run& run;
  const Adapters<T> all;
  float* low;
  int low_stride;

  int slot(int row) const {
    const WindlassStep& step = run.step;
    return step.adapters[run.command.rows == kSampled ? step.sampled[row] : row];
  }

  // Calls body(slot, rows) for what of rows [begin, end) has an adapter.
  template <class Body>
  void each(int begin, int end, const Body& body) const {
    for (int row = begin; row < end;) {
      const int own = slot(row);
      const int count = row + 1 < end && slot(row + 1) == own ? 2 : 1;
      if (own != 0) body(own, Together{row, count});
      row += count;
    }
  }

  void shrink_part(int own, Together rows, int part) const {
    const float* x = row_of(run.moving(0), rows.first, all.num_in);
    float* to = row_of(low, rows.first, low_stride) + part * all.most;
    const auto go = rows.count == 2 ? shrink<2, T> : shrink<1, T>;
    go(all.down_of(own, part), all.scales_of(own, part), all.rank(own, part), all.num_in, x, to,
       low_stride);
  }

  void expand_columns(int own, Together rows, int from, int to) const {
    float* y = row_of(run.moving(1), rows.first, all.num_out);
    const float* lows = row_of(low, rows.first, low_stride);
    const auto go = rows.count == 2 ? expand<2, T> : expand<1, T>;
    for (int part = 0, first = 0; part < all.parts; first += all.sizes[part++]) {
      const int size = all.sizes[part];
      const int left = std::max(from, first) - first, right = std::min(to, first + size) - first;
      if (left >= right) continue;
      go(all.up_of(own, first), all.rank(own, part), size, lows + part * all.most, low_stride, left,
         right, y + first, all.num_out);
    }
  }
};

template <class T>
bool run_as(const Run& run) {
  const Adapters<T> all(run);
  const int low_stride = all.parts * all.most;
  const size_t lows = static_cast<size_t>(run.rows) * static_cast<size_t>(low_stride);
  float* low = reinterpret_cast<float*>(run.pool.buffer(lows * sizeof(float)));
  if (low == nullptr) return false;
  const Work<T> work{run, all, low, low_stride};
  // Pieces are of a few rows that lie together, so that those of one adapter stay so.
  const int pieces = (run.rows + kRows - 1) / kRows;
  run.pool.each(pieces * all.parts, 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const int first = i / all.parts * kRows;
      work.each(first, std::min(run.rows, first + kRows),
                [&](int own, Together rows) { work.shrink_part(own, rows, i % all.parts); });
    }
  });
  const int tiles = (all.num_out + kColumns - 1) / kColumns;
  run.pool.each(pieces * tiles, 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const int first = i / tiles * kRows, from = i % tiles * kColumns;
      work.each(first, std::min(run.rows, first + kRows), [&](int own, Together rows) {
        work.expand_columns(own, rows, from, std::min(all.num_out, from + kColumns));
      });
    }
  });
  return true;
}

}  // namespace

bool run_lora(const Run& run) {
  return run.fixed<float>(4) == nullptr ? run_as<float>(run) : run_as<int8_t>(run);
}

}  // namespace windlass
