// AMX multiplies up to 16 rows of x by the 16 outputs of a weight tile in one instruction.
//
// The AMX layout of x is [rows / 16][inputs / width][16 rows][width]. The width is what one
// instruction takes: a block of int8 codes, or 32 bfloat16 values. On other CPUs this header is
// empty.

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

constexpr int kAmxRows = 16;  // rows of an AMX tile

#if defined(WINDLASS_AMX)

constexpr bool kHasAmx = true;

// Linux gives a process the AMX state only after a request.
inline bool amx_allowed() {
  constexpr int ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool allowed = syscall(SYS_arch_prctl, ask, tile_data) == 0;
  return allowed;
}

// Configures the tile registers for `rows` rows of x by 16 outputs over `bytes` bytes of each:
// register 0 holds the sums, 1 holds x, 2 the weights. The destructor releases them, since the
// kernel saves tiles in use on every context switch.
class AmxTiles {
 public:
  AmxTiles(int rows, int bytes) {
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
    // Compilers do not know that these instructions read more than the first bytes of their
    // operands.
    __asm__ volatile("" ::"r"(&shape) : "memory");
    _tile_loadconfig(&shape);
  }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

  // Writes the sums over one block, [16 rows][16 outputs].
  void multiply_codes(const int8_t* x, const uint8_t* w, int block, int32_t* out) const {
    _tile_zero(0);
    _tile_loadd(1, x, block);
    _tile_loadd(2, w, 64);
    _tile_dpbsud(0, 1, 2);
    _tile_stored(0, out, 64);
  }

  // Writes the sums over all inputs, [16 rows][16 outputs].
  void multiply_bf16(const uint16_t* x, const uint16_t* w, int count, float* out) const {
    _tile_zero(0);
    for (int k = 0; k < count; k += kBf16Run) {
      _tile_loadd(1, x + k * kAmxRows, 64);
      _tile_loadd(2, w + k * kTile, 64);
      _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, out, 64);
  }
};

#else

constexpr bool kHasAmx = false;
inline bool amx_allowed() { return false; }

class AmxTiles {
 public:
  AmxTiles(int, int) {}
  void multiply_codes(const int8_t*, const uint8_t*, int, int32_t*) const {}
  void multiply_bf16(const uint16_t*, const uint16_t*, int, float*) const {}
};

#endif

// Contiguous bytes of one row of x: in a panel, and in the AMX layout.
inline int run_bytes(const Weight& w) { return is_integer(w) ? kRun : kBf16Run * 2; }
inline int amx_run_bytes(const Weight& w) { return is_integer(w) ? block_size(w) : kBf16Run * 2; }
inline size_t amx_bytes(const Weight& w) {
  return static_cast<size_t>(padded_in(w)) * kAmxRows * (is_integer(w) ? 1 : 2);
}

// Copies one panel to its position in the AMX layout.
inline void copy_to_amx(const Weight& w, const uint8_t* panel, int index, uint8_t* amx_panel) {
  const int narrow = run_bytes(w), wide = amx_run_bytes(w);
  const int bytes = static_cast<int>(amx_bytes(w)) / kAmxRows;
  for (int at = 0; at < bytes; at += narrow) {
    for (int m = 0; m < kPanelRows; ++m, panel += narrow) {
      const int row = index * kPanelRows + m;
      std::memcpy(amx_panel + at / wide * wide * kAmxRows + row * wide + at % wide, panel,
                  static_cast<size_t>(narrow));
    }
  }
}

}  // namespace windlass
