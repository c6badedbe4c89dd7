// The arguments of a command's function, and the list of these functions.

#pragma once

#include <algorithm>
#include <cstddef>

#include "commands.h"
#include "pool.h"

namespace windlass {

struct Run {
  Pool& pool;
  const WindlassCommand& command;
  const WindlassStep& step;
  int rows;

  int size(int i) const { return command.sizes[i]; }
  float* step_tensor(int i) const { return static_cast<float*>(command.step_tensors[i]); }
  template <class T>
  const T* model_tensor(int i) const {
    return static_cast<const T*>(command.model_tensors[i]);
  }

  // Calls body(row) for all rows, on all threads if there is enough work.
  template <class Body>
  void each_row(int work_per_row, const Body& body) const {
    constexpr int64_t min_parallel_work = 8 << 10;
    const bool serial = static_cast<int64_t>(rows) * work_per_row < min_parallel_work;
    const int grain = serial ? rows : std::max(1, rows / (pool.threads() * 4));
    pool.each(rows, grain, [&](int begin, int end) {
      for (int row = begin; row < end; ++row) body(row);
    });
  }
};

template <class T>
inline T* row_of(T* rows, int row, int width) {
  return rows + static_cast<size_t>(row) * static_cast<size_t>(width);
}

// out = RMSNorm(x) * weight; x may be out.
void rms_norm(const float* x, const float* weight, int width, float eps, float* out);

// out = silu(gates) * up
void silu_mul(const float* gates, const float* up, int width, float* out);

// Quantises to integers from -127 to 127, ties to even, by the row's own scale or a given one, and
// returns the scale. A row that holds NaN gets NaN for its scale: the GEMM reads codes as integers,
// so only the scale can carry it.
float quantise_row(const float* x, const float* given, int width, float* out);

// Returns the index of the largest value, the first of equals; of the first NaN, if there is one.
int argmax_fast(const float* x, int count);

// All return false if memory could not be allocated.
bool run_embed(const Run& run);
bool run_norm(const Run& run);
bool run_add_norm(const Run& run);
bool run_linear(const Run& run);
bool run_quantise(const Run& run);
bool run_silu_mul(const Run& run);
bool run_rope(const Run& run);
bool run_attention(const Run& run);
bool run_gather(const Run& run);
bool run_argmax(const Run& run);
bool run_lora(const Run& run);
bool run_sample(const Run& run);
bool run_experts(const Run& run);
bool run_latent(const Run& run);
bool run_per_head(const Run& run);
bool run_layer_norm(const Run& run);
bool run_add_layer_norm(const Run& run);
bool run_gelu_mul(const Run& run);
bool run_map(const Run& run);
bool run_add(const Run& run);
bool run_sigmoid_gate(const Run& run);
bool run_causal_conv(const Run& run);
bool run_short_conv(const Run& run);
bool run_selective_scan(const Run& run);
bool run_delta_rule(const Run& run);
bool run_split_gates(const Run& run);
bool run_mul_columns(const Run& run);
bool run_sparse_mixer(const Run& run);
bool run_all_reduce(const Run& run);
bool run_all_gather(const Run& run);

}  // namespace windlass
