// Integer dot products: 1 to 4 rows of x by the outputs of one tile, over one block.
//
// start_dots initialises the sums. add_dots adds 16 inputs of x, with their codes in codes_at(0) to
// codes_at(3): codes of 4 or 6 bits are not negative, those of 8 are if not kUnsignedCodes. join_dots adds several accumulators. row_of_dots returns the sums of a row. Here one instruction multiplies a row by a
// vector of codes; with i8mm (dots_i8mm.h) it multiplies two rows by two outputs.

#pragma once

#include "simd.h"

namespace windlass::tile {

// A dot product waits for the one before it in the same accumulator, so few rows have several
// accumulators each.
constexpr int num_chains(int rows) { return !kManyRegisters || rows > 4 ? 1 : rows == 1 ? 4 : 2; }

}  // namespace windlass::tile

#if defined(WINDLASS_I8MM)
#include "dots_i8mm.h"
#else

namespace windlass::tile {

template <int MT>
using Dots = Sums[MT];

template <int MT>
WINDLASS_INLINE void start_dots(Sums (&dots)[MT]) {
  for (int m = 0; m < MT; ++m) dots[m] = sum_start();
}
template <int MT>
WINDLASS_INLINE void start_dots(Sums (&dots)[MT], QuadInt correction) {
  unrolled<MT>([&](auto m) WINDLASS_INLINED { dots[m] = sum_start<m>(correction); });
}
template <int BITS, int LANE>
WINDLASS_INLINE Sums dot(Sums acc, Codes w, Inputs16 x) {
#if !defined(WINDLASS_WORD_SUMS)
  if constexpr (BITS < 8 || kUnsignedCodes) return dot_unsigned<LANE>(acc, w, x);
#endif
  return dot_signed<LANE>(acc, w, x);
}
template <int BITS, int MT, class At>
WINDLASS_INLINE void add_dots(Sums (&dots)[MT], const At& codes_at, const int8_t* x) {
  Inputs16 in[MT];
  for (int m = 0; m < MT; ++m) in[m] = load_inputs(x + kRun * m);
#if defined(WINDLASS_WORD_SUMS)
  // Sums of products fit into 16 bits: with 4 bits 4 * 2 * 15 * 127 = 15240, which are widened once, and
  // with 6 bits 2 * 2 * 63 * 127 = 32004.
  if constexpr (BITS < 8) {
    const Codes w[4] = {codes_at(0), codes_at(1), codes_at(2), codes_at(3)};
    for (int m = 0; m < MT; ++m) {
      const auto first = add_words(pair_dots<0>(w[0], in[m]), pair_dots<1>(w[1], in[m]));
      const auto second = add_words(pair_dots<2>(w[2], in[m]), pair_dots<3>(w[3], in[m]));
      if constexpr (BITS == 4) dots[m] = add_pairs(dots[m], add_words(first, second));
      if constexpr (BITS == 6) dots[m] = add_pairs(add_pairs(dots[m], first), second);
    }
    return;
  }
#endif
  unrolled<4>([&](auto lane) WINDLASS_INLINED {
    const Codes w = codes_at(lane);
    for (int m = 0; m < MT; ++m) dots[m] = dot<BITS, lane>(dots[m], w, in[m]);
  });
}
template <int MT, int CHAINS>
WINDLASS_INLINE void join_dots(Sums (&dots)[CHAINS][MT]) {
  for (int i = 1; i < CHAINS; ++i) {
    for (int m = 0; m < MT; ++m) dots[0][m] = add(dots[0][m], dots[i][m]);
  }
}
template <int M, int MT>
inline const Sums& row_of_dots(const Sums (&dots)[MT]) {
  return dots[M];
}

}  // namespace windlass::tile

#endif
