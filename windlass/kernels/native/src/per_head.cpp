// GEMMs with a float32 weight of each head: the projections that MLA absorbs into queries and outputs.

#include "run.h"
#include "vector_math.h"

namespace windlass {

namespace {

constexpr int kTokensAtOnce = 4;

// The inputs and outputs of some tokens for one head.
struct Lines {
  const float* x[kTokensAtOnce];
  float* y[kTokensAtOnce];
};

// Outputs [n, n + 8 VECTORS) of COUNT tokens; a row of the weight belongs to an input.
template <int COUNT, int VECTORS>
WINDLASS_INLINE void add_rows(const Lines& lines, const float* weight, int num_in, int num_out,
                              int n) {
  F32x8 sums[COUNT][VECTORS];
  for (int m = 0; m < COUNT; ++m) {
    for (int v = 0; v < VECTORS; ++v) sums[m][v] = zero();
  }
  for (int k = 0; k < num_in; ++k) {
    const float* row = row_of(weight, k, num_out) + n;
    F32x8 loaded[VECTORS];
    for (int v = 0; v < VECTORS; ++v) loaded[v] = load(row + v * kLanes);
    for (int m = 0; m < COUNT; ++m) {
      const F32x8 x = splat(lines.x[m][k]);
      for (int v = 0; v < VECTORS; ++v) sums[m][v] = fma(sums[m][v], x, loaded[v]);
    }
  }
  for (int m = 0; m < COUNT; ++m) {
    for (int v = 0; v < VECTORS; ++v) store(lines.y[m] + n + v * kLanes, sums[m][v]);
  }
}

template <int COUNT>
void rows_are_inputs(const Lines& lines, const float* weight, int num_in, int num_out) {
  constexpr int vectors = COUNT == 1 ? 8 : COUNT == 2 ? 4 : 2;
  int n = 0;
  for (; n + vectors * kLanes <= num_out; n += vectors * kLanes) {
    add_rows<COUNT, vectors>(lines, weight, num_in, num_out, n);
  }
  for (; n < num_out; n += kLanes) add_rows<COUNT, 1>(lines, weight, num_in, num_out, n);
}

// A row of the weight belongs to an output; four rows at a time.
template <int COUNT>
void rows_are_outputs(const Lines& lines, const float* weight, int num_in, int num_out) {
  for (int n = 0; n < num_out; n += 4) {
    const float* rows = row_of(weight, n, num_in);
    for (int m = 0; m < COUNT; ++m) {
      F32x8 sums[4] = {zero(), zero(), zero(), zero()};
      for (int k = 0; k < num_in; k += kLanes) {
        const F32x8 x = load(lines.x[m] + k);
        for (int i = 0; i < 4; ++i) sums[i] = fma(sums[i], x, load(row_of(rows, i, num_in) + k));
      }
      store_sums4(lines.y[m] + n, sums[0], sums[1], sums[2], sums[3]);
    }
  }
}

}  // namespace

bool run_per_head(const Run& run) {
  const int heads = run.size(0), num_in = run.size(1), num_out = run.size(2);
  const int x_row = run.size(3), x_head = run.size(4), y_row = run.size(5), y_head = run.size(6);
  const bool outputs = run.size(8) != 0;
  const int blocks = (run.rows + kTokensAtOnce - 1) / kTokensAtOnce;
  constexpr decltype(&rows_are_inputs<1>) kernels[2][kTokensAtOnce] = {
      {rows_are_inputs<1>, rows_are_inputs<2>, rows_are_inputs<3>, rows_are_inputs<4>},
      {rows_are_outputs<1>, rows_are_outputs<2>, rows_are_outputs<3>, rows_are_outputs<4>}};
  run.pool.each(heads * blocks, 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const int head = i / blocks, first = i % blocks * kTokensAtOnce;
      const int count = std::min(kTokensAtOnce, run.rows - first);
      Lines lines{};
      for (int m = 0; m < count; ++m) {
        lines.x[m] = row_of(run.step_tensor(0), first + m, x_row) + head * x_head;
        lines.y[m] = row_of(run.step_tensor(1), first + m, y_row) + head * y_head;
      }
      const float* weight = row_of(run.model_tensor<float>(0), head, run.size(7));
      kernels[outputs][count - 1](lines, weight, num_in, num_out);
    }
  });
  return true;
}

}  // namespace windlass
