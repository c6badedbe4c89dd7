// What every command's function gets, and the list of them.

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
  float* moving(int i) const { return static_cast<float*>(command.moving[i]); }
  template <class T>
  const T* fixed(int i) const {
    return static_cast<const T*>(command.fixed[i]);
  }

  // Calls body(row) for all rows; threads help where there is enough to do for them.
  template <class Body>
  void each_row(int work_per_row, const Body& body) const {
    constexpr int64_t worth_it = 8 << 10;
    const bool alone = static_cast<int64_t>(rows) * work_per_row < worth_it;
    const int chunk = alone ? rows : std::max(1, rows / (pool.threads() * 4));
    pool.each(rows, chunk, [&](int begin, int end) {
      for (int row = begin; row < end; ++row) body(row);
    });
  }
};

template <class T>
inline T* row_of(T* rows, int row, int width) {
  return rows + static_cast<size_t>(row) * static_cast<size_t>(width);
}

// out = x scaled to unit root mean square, times the weight; x may be out.
void normalise(const float* x, const float* weight, int width, float eps, float* out);

// out = silu(gate) * up
void gate(const float* gates, const float* up, int width, float* out);

// The place of the largest number, the first of equals; of what is no number, if there is any.
int largest_quickly(const float* x, int count);

// All return whether there was memory enough.
bool run_embed(const Run& run);
bool run_norm(const Run& run);
bool run_add_norm(const Run& run);
bool run_linear(const Run& run);
bool run_round(const Run& run);
bool run_silu_mul(const Run& run);
bool run_rope(const Run& run);
bool run_attend(const Run& run);
bool run_gather(const Run& run);
bool run_argmax(const Run& run);
bool run_lora(const Run& run);
bool run_sample(const Run& run);

}  // namespace windlass
