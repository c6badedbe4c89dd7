// Loops over the vectors of a row of any width.

#pragma once

#include <cstring>

#include "vector_math.h"

namespace windlass {

// The end of a row whose width is no multiple of 8.
struct Tail {
  float v[kLanes] = {};

  Tail(const float* p, int count) { std::memcpy(v, p, static_cast<size_t>(count) * 4); }
};

template <class Body>
inline void each_vector(int width, const Body& body) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i, kLanes);
  if (i < width) body(i, width - i);
}

inline F32x8 load_tail(const float* p, int count) {
  return count == kLanes ? load(p) : load(Tail(p, count).v);
}

inline void store_tail(float* p, F32x8 x, int count) {
  if (count == kLanes) return store(p, x);
  float v[kLanes];
  store(v, x);
  std::memcpy(p, v, static_cast<size_t>(count) * 4);
}

}  // namespace windlass
