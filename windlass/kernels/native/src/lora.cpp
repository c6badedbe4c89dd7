// LoRA: y += up[slot] @ (down[slot] @ x), for rows of different adapters. The matrices are float32,
// or int8 codes with a scale per rank.

#include "run.h"
#include "vector_math.h"

namespace windlass {

namespace {

constexpr int kMaxParts = 3;
constexpr int kColumns = 512;  // outputs per work item
constexpr int kRows = 8;  // rows per work item
constexpr int kRanks = 4;  // ranks computed at once

WINDLASS_INLINE F32x8 weights_at(const float* p) { return load(p); }
WINDLASS_INLINE F32x8 weights_at(const int8_t* p) { return load_int8(p); }

// The adapters of a layer, as commands.h defines them; the outputs of the parts are concatenated in
// y.
template <class T>
struct Adapters {
  const T* down;
  const T* up;
  const int32_t* ranks;
  const float* scales;
  int num_in, parts, max_rank, rank_stride;
  int sizes[kMaxParts];
  int num_out = 0;

  explicit Adapters(const Run& run)
      : down(run.model_tensor<T>(0)),
        up(run.model_tensor<T>(1)),
        ranks(run.model_tensor<int32_t>(2)),
        scales(run.model_tensor<float>(4)) {
    const int32_t* shape = run.model_tensor<int32_t>(3);
    num_in = shape[0], parts = shape[1], max_rank = shape[2], rank_stride = shape[3];
    for (int p = 0; p < parts; ++p) num_out += sizes[p] = shape[4 + p];
  }

  size_t index(int slot, int part) const {
    return static_cast<size_t>(slot) * static_cast<size_t>(rank_stride) + static_cast<size_t>(part);
  }
  int rank(int slot, int part) const { return ranks[index(slot, part)]; }
  // Returns the scales of the ranks, or null.
  const float* scales_of(int slot, int part) const {
    return scales == nullptr ? nullptr : scales + index(slot, part) * static_cast<size_t>(max_rank);
  }
  const T* down_of(int slot, int part) const {
    const size_t matrix = static_cast<size_t>(max_rank) * static_cast<size_t>(num_in);
    return down + static_cast<size_t>(slot * parts + part) * matrix;
  }
  // [ranks][outputs of the part]; `first` outputs of other parts come before.
  const T* up_of(int slot, int first) const {
    const size_t rows = static_cast<size_t>(max_rank);
    return up + (static_cast<size_t>(slot) * static_cast<size_t>(num_out) +
                 static_cast<size_t>(first)) * rows;
  }
};

// One or two rows with the same adapter, which share the loads of its weights.
struct RowPair {
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

// y[t][begin, end) += low[t] @ up for some ranks, outputs of one part
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

// A few ranks at a time: y stays in the L1 cache, and each rank is read sequentially.
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

// The state of one command: `low` holds the rows' inputs after `down`.
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

  // Calls body(slot, rows) for the rows in [begin, end) that have an adapter.
  template <class Body>
  void each(int begin, int end, const Body& body) const {
    for (int row = begin; row < end;) {
      const int own = slot(row);
      const int count = row + 1 < end && slot(row + 1) == own ? 2 : 1;
      if (own != 0) body(own, RowPair{row, count});
      row += count;
    }
  }

  void shrink_part(int own, RowPair rows, int part) const {
    const float* x = row_of(run.step_tensor(0), rows.first, all.num_in);
    float* to = row_of(low, rows.first, low_stride) + part * all.max_rank;
    const auto kernel = rows.count == 2 ? shrink<2, T> : shrink<1, T>;
    kernel(all.down_of(own, part), all.scales_of(own, part), all.rank(own, part), all.num_in, x, to,
           low_stride);
  }

  void expand_columns(int own, RowPair rows, int from, int to) const {
    float* y = row_of(run.step_tensor(1), rows.first, all.num_out);
    const float* lows = row_of(low, rows.first, low_stride);
    const auto kernel = rows.count == 2 ? expand<2, T> : expand<1, T>;
    for (int part = 0, first = 0; part < all.parts; first += all.sizes[part++]) {
      const int size = all.sizes[part];
      const int left = std::max(from, first) - first, right = std::min(to, first + size) - first;
      if (left >= right) continue;
      kernel(all.up_of(own, first), all.rank(own, part), size, lows + part * all.max_rank,
             low_stride, left,
             right, y + first, all.num_out);
    }
  }
};

template <class T>
bool run_as(const Run& run) {
  const Adapters<T> all(run);
  const int low_stride = all.parts * all.max_rank;
  const size_t lows = static_cast<size_t>(run.rows) * static_cast<size_t>(low_stride);
  float* low = reinterpret_cast<float*>(run.pool.buffer(lows * sizeof(float)));
  if (low == nullptr) return false;
  const Work<T> work{run, all, low, low_stride};
  // A work item has a few adjacent rows, so that rows of one adapter stay together.
  const int row_groups = (run.rows + kRows - 1) / kRows;
  run.pool.each(row_groups * all.parts, 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const int first = i / all.parts * kRows;
      work.each(first, std::min(run.rows, first + kRows),
                [&](int own, RowPair rows) { work.shrink_part(own, rows, i % all.parts); });
    }
  });
  const int tiles = (all.num_out + kColumns - 1) / kColumns;
  run.pool.each(row_groups * tiles, 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const int first = i / tiles * kRows, from = i % tiles * kColumns;
      work.each(first, std::min(run.rows, first + kRows), [&](int own, RowPair rows) {
        work.expand_columns(own, rows, from, std::min(all.num_out, from + kColumns));
      });
    }
  });
  return true;
}

}  // namespace

bool run_lora(const Run& run) {
  return run.model_tensor<float>(4) == nullptr ? run_as<float>(run) : run_as<int8_t>(run);
}

}  // namespace windlass
