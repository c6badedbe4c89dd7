// AMX: up to 16 rows of x by the 16 outputs of a tile of weights in one instruction.
//
// Rows of x lie in squares for it: [rows / 16][inputs / width][16 rows][width], the width being what
// one instruction takes, a block of whole numbers or 32 of bfloat16. Elsewhere all this is empty.

#pragma once

#include <cstring>

#include "simd.h"
#include "weight.h"

#if defined(WINDLASS_AMX)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace windlass {

constexpr int kSquare = 16;  // rows

#if defined(WINDLASS_AMX)

constexpr bool kHasAmx = true;

// Linux gives a process the memory that this state takes only where it is asked to.
inline bool amx_allowed() {
  constexpr int ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool allowed = syscall(SYS_arch_prctl, ask, tile_data) == 0;
  return allowed;
}

// Registers as `rows` rows of x by 16 outputs over `bytes` bytes of each: 0 has the sums, 1 x and 2
// weights. Given back at the end, since the system saves what is in use.
class Squares {
 public:
  Squares(int rows, int bytes) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, unused[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    const int each[3][2] = {{rows, 64}, {rows, bytes}, {bytes / 4, 64}};
    for (int i = 0; i < 3; ++i) {
      shape.rows[i] = static_cast<uint8_t>(each[i][0]);
      shape.bytes[i] = static_cast<uint16_t>(each[i][1]);
    }
    // Compilers do not know that these instructions read more than the first bytes of anything.
    __asm__ volatile("" ::"r"(&shape) : "memory");
    _tile_loadconfig(&shape);
  }
  ~Squares() { _tile_release(); }
  Squares(const Squares&) = delete;
  Squares& operator=(const Squares&) = delete;

  // The sums over one block, [16 rows][16 outputs].
  void multiply_codes(const int8_t* x, const uint8_t* w, int block, int32_t* out) const {
    _tile_zero(0);
    _tile_loadd(1, x, block);
    _tile_loadd(2, w, 64);
    _tile_dpbsud(0, 1, 2);
    _tile_stored(0, out, 64);
  }

  // The sums over all inputs, [16 rows][16 outputs].
  void multiply_bf16(const uint16_t* x, const uint16_t* w, int count, float* out) const {
    _tile_zero(0);
    for (int k = 0; k < count; k += kBf16Run) {
      _tile_loadd(1, x + k * kSquare, 64);
      _tile_loadd(2, w + k * kTile, 64);
      _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, out, 64);
  }
};

#else

constexpr bool kHasAmx = false;
inline bool amx_allowed() { return false; }

class Squares {
 public:
  Squares(int, int) {}
  void multiply_codes(const int8_t*, const uint8_t*, int, int32_t*) const {}
  void multiply_bf16(const uint16_t*, const uint16_t*, int, float*) const {}
};

#endif

// Bytes of the inputs of one row that lie side by side in a panel, and in a square.
inline int run_bytes(const Weight& w) { return is_integer(w) ? kRun : kBf16Run * 2; }
inline int square_run(const Weight& w) { return is_integer(w) ? block_size(w) : kBf16Run * 2; }
inline size_t square_bytes(const Weight& w) {
  return static_cast<size_t>(padded_in(w)) * kSquare * (is_integer(w) ? 1 : 2);
}

// Copies one panel to its place in a square.
inline void copy_to_square(const Weight& w, const uint8_t* panel, int place, uint8_t* square) {
  const int narrow = run_bytes(w), wide = square_run(w);
  const int bytes = static_cast<int>(square_bytes(w)) / kSquare;
  for (int at = 0; at < bytes; at += narrow) {
    for (int m = 0; m < kPanel; ++m, panel += narrow) {
      const int row = place * kPanel + m;
      std::memcpy(square + at / wide * wide * kSquare + row * wide + at % wide, panel,
                  static_cast<size_t>(narrow));
    }
  }
}

}  // namespace windlass
