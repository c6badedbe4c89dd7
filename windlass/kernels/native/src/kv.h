// Pages of the KV cache: address of a token's head, and storage type.

#pragma once

#include "run.h"
#include "vector_math.h"

namespace windlass {

struct Pages {
  int num_q, num_kv, dim, page_size;  // page_size: positions per page
  Type type;
  void* keys;
  void* values;
  float* key_scales;  // int8 pages: one per position and head
  float* value_scales;
  size_t table;  // offset of the layer's block tables in those of the step
  size_t stride;  // from a page to the next, in vectors of `dim` numbers

  int group() const { return num_q / num_kv; }

  // Returns the index of a position's head among all heads of the cache.
  size_t head_index(const WindlassStep& step, int slot, int position, int head) const {
    const size_t line = table + static_cast<size_t>(slot) * static_cast<size_t>(step.table_stride);
    const int block = step.tables[line + static_cast<size_t>(position / page_size)];
    return static_cast<size_t>(block) * stride +
           static_cast<size_t>(head * page_size + position % page_size);
  }
};

inline Pages kv_pages(const Run& run, int first_tensor) {
  const auto at = [&](int i) { return const_cast<void*>(run.command.model_tensors[first_tensor + i]); };
  return {run.size(0),
          run.size(1),
          run.size(2),
          run.size(3),
          static_cast<Type>(run.size(4)),
          at(0),
          at(1),
          static_cast<float*>(at(2)),
          static_cast<float*>(at(3)),
          static_cast<size_t>(run.size(5)),
          static_cast<size_t>(run.size(6))};
}

}  // namespace windlass
