// What adapters add to a product: y += up[slot] @ (down[slot] @ x), for rows of mixed adapters.

#include "run.h"
#include "vector_math.h"

namespace windlass {

namespace {

constexpr int kMostParts = 3;
constexpr int kColumns = 512;  // outputs that one piece of work covers

// A layer's adapters, as commands.h says; parts stand side by side in y.
struct Adapters {
  const float* down;
  const float* up;
  const int32_t* ranks;
  int num_in, parts, most, rank_stride;
  int sizes[kMostParts];
  int num_out = 0;

  explicit Adapters(const Run& run)
      : down(run.fixed<float>(0)), up(run.fixed<float>(1)), ranks(run.fixed<int32_t>(2)) {
    const int32_t* shape = run.fixed<int32_t>(3);
    num_in = shape[0], parts = shape[1], most = shape[2], rank_stride = shape[3];
    for (int p = 0; p < parts; ++p) num_out += sizes[p] = shape[4 + p];
  }

  int rank(int slot, int part) const {
    return ranks[static_cast<size_t>(slot) * static_cast<size_t>(rank_stride) +
                 static_cast<size_t>(part)];
  }
  const float* down_of(int slot, int part) const {
    const size_t matrix = static_cast<size_t>(most) * static_cast<size_t>(num_in);
    return down + static_cast<size_t>(slot * parts + part) * matrix;
  }
  // [ranks][size of the part], of which `first` outputs of other parts come before.
  const float* up_of(int slot, int first) const {
    const size_t rows = static_cast<size_t>(most);
    return up + (static_cast<size_t>(slot) * static_cast<size_t>(num_out) +
                 static_cast<size_t>(first)) * rows;
  }
};

// out[r] = down[r] . x for four rows, which share what is read of x.
void dots4(const float* down, int width, const float* x, float* out) {
  F32x8 sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const F32x8 value = load(x + i);
    for (int r = 0; r < 4; ++r) sums[r] = fma(sums[r], load(row_of(down, r, width) + i), value);
  }
  store_sums4(out, sums[0], sums[1], sums[2], sums[3]);
  for (; i < width; ++i) {
    for (int r = 0; r < 4; ++r) out[r] += row_of(down, r, width)[i] * x[i];
  }
}

float dot(const float* row, int width, const float* x) {
  F32x8 sum = zero();
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) sum = fma(sum, load(row + i), load(x + i));
  float out = sum_of(sum);
  for (; i < width; ++i) out += row[i] * x[i];
  return out;
}

void shrink(const float* down, int rank, int width, const float* x, float* low) {
  int r = 0;
  for (; r + 4 <= rank; r += 4) dots4(row_of(down, r, width), width, x, low + r);
  for (; r < rank; ++r) low[r] = dot(row_of(down, r, width), width, x);
}

// y[begin, end) += low @ up, of outputs of one part
void expand(const float* up, int rank, int size, const float* low, int begin, int end, float* y) {
  int i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    F32x8 sum = load(y + i);
    for (int r = 0; r < rank; ++r) sum = fma(sum, load(row_of(up, r, size) + i), splat(low[r]));
    store(y + i, sum);
  }
  for (; i < end; ++i) {
    for (int r = 0; r < rank; ++r) y[i] += low[r] * row_of(up, r, size)[i];
  }
}

}  // namespace

bool run_lora(const Run& run) {
  const Adapters all(run);
  const WindlassStep& step = run.step;
  const bool sampled = run.command.rows == kSampled;
  const auto slot_of = [&](int row) { return step.adapters[sampled ? step.sampled[row] : row]; };
  const size_t lows = static_cast<size_t>(run.rows) * static_cast<size_t>(all.parts * all.most);
  float* low = reinterpret_cast<float*>(run.pool.buffer(lows * sizeof(float)));
  if (low == nullptr) return false;
  run.each_row(all.parts * all.most * all.num_in / 4, [&](int row) {
    const int slot = slot_of(row);
    if (slot == 0) return;
    for (int part = 0; part < all.parts; ++part) {
      shrink(all.down_of(slot, part), all.rank(slot, part), all.num_in,
             row_of(run.moving(0), row, all.num_in), row_of(low, row * all.parts + part, all.most));
    }
  });
  const int tiles = (all.num_out + kColumns - 1) / kColumns;
  run.pool.each(run.rows * tiles, 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const int row = i / tiles, slot = slot_of(row);
      if (slot == 0) continue;
      const int from = i % tiles * kColumns, to = std::min(all.num_out, from + kColumns);
      float* y = row_of(run.moving(1), row, all.num_out);
      for (int part = 0, first = 0; part < all.parts; first += all.sizes[part++]) {
        const int size = all.sizes[part];
        const int left = std::max(from, first) - first, right = std::min(to, first + size) - first;
        if (left >= right) continue;
        expand(all.up_of(slot, first), all.rank(slot, part), size,
               row_of(low, row * all.parts + part, all.most), left, right, y + first);
      }
    }
  });
  return true;
}

}  // namespace windlass
