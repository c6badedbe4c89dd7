// Pages of keys and values: where a token's head lies, and in which type.

#pragma once

#include "run.h"
#include "vector_math.h"

namespace windlass {

struct Pages {
  int num_q, num_kv, dim, page;  // page: positions in one
  Type type;
  void* keys;
  void* values;
  float* key_scales;  // of codes: one for each position and head
  float* value_scales;

  int group() const { return num_q / num_kv; }

  // The number of a position's head among all of them.
  size_t place(const WindlassStep& step, int slot, int position, int head) const {
    const size_t line = static_cast<size_t>(slot) * static_cast<size_t>(step.table_stride);
    const int block = step.tables[line + static_cast<size_t>(position / page)];
    return (static_cast<size_t>(block) * static_cast<size_t>(num_kv) + static_cast<size_t>(head)) *
               static_cast<size_t>(page) +
           static_cast<size_t>(position % page);
  }
};

inline Pages pages_of(const Run& run, int first_fixed) {
  const auto at = [&](int i) { return const_cast<void*>(run.command.fixed[first_fixed + i]); };
  return {run.size(0),
          run.size(1),
          run.size(2),
          run.size(3),
          static_cast<Type>(run.size(4)),
          at(0),
          at(1),
          static_cast<float*>(at(2)),
          static_cast<float*>(at(3))};
}

}  // namespace windlass
