// States of recurrent layers in pages.
//
// A state is updated where it is kept, in the page of the block that a token is in; at the start of a
// block it is copied from the page before. So the page of every full block has the state at its end.
// Tokens are computed in order, so results do not depend on how a prompt is cut into steps.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "run.h"
#include "vector_math.h"

namespace windlass {

constexpr int kStateTile = 16;  // tokens whose keys and queries stay in the first-level cache
constexpr int kStateRows = 4;  // that are updated together

// The pages of one layer: where a row's state is at some position.
struct States {
  float* pages;
  int page_size;  // positions
  size_t table;  // offset of the layer's block tables
  size_t stride;  // floats from one page to the next
  const WindlassStep& step;

  float* at(const WindlassRow& row, int position) const {
    const size_t line = table + static_cast<size_t>(row.slot) * static_cast<size_t>(step.table_stride);
    const int block = step.tables[line + static_cast<size_t>(position / page_size)];
    return pages + static_cast<size_t>(block) * stride;
  }

  // The position after `position` where its block ends, or the row.
  int piece_end(const WindlassRow& row, int position) const {
    return std::min(row.start + row.count, (position / page_size + 1) * page_size);
  }
};

inline States states_of(const Run& run, int tensor, int size) {
  return {static_cast<float*>(const_cast<void*>(run.command.model_tensors[tensor])), run.size(size),
          static_cast<size_t>(run.size(size + 1)), static_cast<size_t>(run.size(size + 2)), run.step};
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Calls advance(token, count, state) for tiles of a row's tokens, in order; `state` is that of one head,
// [dim][state size], at `state_at` of a page.
template <class Advance>
inline void follow(const WindlassRow& row, const States& states, size_t state_at, size_t state_size,
                   const Advance& advance) {
  const int end = row.start + row.count;
  for (int begin = row.start; begin < end;) {
    const int stop = states.piece_end(row, begin);
    float* state = states.at(row, begin) + state_at;
    if (begin == 0) {
      std::memset(state, 0, state_size * 4);
    } else if (begin % states.page_size == 0) {
      std::memcpy(state, states.at(row, begin - 1) + state_at, state_size * 4);
    }
    for (; begin < stop; begin += std::min(kStateTile, stop - begin)) {
      advance(row.first + begin - row.start, std::min(kStateTile, stop - begin), state);
    }
  }
}

// Calls body(row, head) for the heads of all rows, on all threads.
template <class Body>
inline void each_head(const Run& run, int heads, const Body& body) {
  run.pool.each(run.step.num_rows * heads, 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) body(run.step.rows[i / heads], i % heads);
  });
}

}  // namespace windlass
