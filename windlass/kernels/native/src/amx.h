// AMX multiplies 16 rows of x by the 16 outputs of a weight tile over 32 bfloat16 inputs in one instruction.
//
// The AMX layout of x is [rows / 16][inputs / 32][16 rows][32]. AMX's integer instructions are not used: the sums
// of every block of 16 or 32 inputs would have to be stored before they are scaled, which takes longer than
// the dot products of AVX-512 VNNI. On other CPUs this header is empty.

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

// Loads and saves tile register TILE. The functions of compilers do not say how much memory they access: GCC moves
// stores past them, or removes the stores.
template <int TILE>
WINDLASS_INLINE void load_tile(const void* from) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t{64}), "i"(TILE) : "memory");
}
template <int TILE>
WINDLASS_INLINE void save_tile(void* to) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t{64}), "i"(TILE) : "memory");
}

// Configures the tile registers of the calling thread as 16 rows of 64 bytes. The destructor restores the
// configuration that it found: other libraries configure a thread once, and expect to find it so. Without one it
// releases the registers, since the kernel saves tiles in use on every context switch.
class AmxTiles {
 public:
  // Multiplications for which a configuration is worth its time, about 100 ns.
  static constexpr int64_t kMinWork = 2 << 20;

  AmxTiles() {
    __asm__ volatile("sttilecfg %0" : "=m"(before_));
    Config config;
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = kAmxRows;
      config.bytes[i] = 64;
    }
    load_config(config);
  }
  ~AmxTiles() {
    if (before_.palette == 0) {
      _tile_release();
    } else {
      load_config(before_);
    }
  }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette = 0, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };

  static void load_config(const Config& config) {
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }

  Config before_;
};

// Adds the sums over `count` inputs, a multiple of 32, of GROUPS groups of 16 rows by TILES weight tiles. Unused
// rows may hold anything. Registers 0 to 3 hold the sums, 4 and 5 the groups, 6 and 7 the weight tiles.
// out[w][g]: [16 rows][16 outputs]. With `starts` the sums start at 0. The order of additions does not
// depend on GROUPS and TILES.
template <int GROUPS, int TILES>
WINDLASS_INLINE void amx_multiply_bf16(const uint16_t* const (&x)[2], const uint16_t* const (&w)[2],
                                       int count, bool starts, float* const (&out)[2][2]) {
  constexpr bool more_rows = GROUPS == 2, two = TILES == 2;
  if (starts) {
    _tile_zero(0);
    if constexpr (more_rows) _tile_zero(1);
    if constexpr (two) _tile_zero(2);
    if constexpr (more_rows && two) _tile_zero(3);
  } else {
    load_tile<0>(out[0][0]);
    if constexpr (more_rows) load_tile<1>(out[0][1]);
    if constexpr (two) load_tile<2>(out[1][0]);
    if constexpr (more_rows && two) load_tile<3>(out[1][1]);
  }
  for (int k = 0; k < count; k += 32) {
    load_tile<6>(w[0] + k * kTile);
    load_tile<4>(x[0] + k * kAmxRows);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (more_rows) {
      load_tile<5>(x[1] + k * kAmxRows);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (two) {
      load_tile<7>(w[1] + k * kTile);
      _tile_dpbf16ps(2, 4, 7);
      if constexpr (more_rows) _tile_dpbf16ps(3, 5, 7);
    }
  }
  save_tile<0>(out[0][0]);
  if constexpr (more_rows) save_tile<1>(out[0][1]);
  if constexpr (two) save_tile<2>(out[1][0]);
  if constexpr (more_rows && two) save_tile<3>(out[1][1]);
}

#else

constexpr bool kHasAmx = false;
inline bool amx_allowed() { return false; }

struct AmxTiles {
  static constexpr int64_t kMinWork = 0;
};

template <int GROUPS, int TILES>
inline void amx_multiply_bf16(const uint16_t* const (&)[2], const uint16_t* const (&)[2], int, bool,
                              float* const (&)[2][2]) {}

#endif

// The AMX layout of x: the inputs of a row, and the bytes of 16 rows.
inline int amx_inputs(const Weight& w) { return round_up(padded_in(w), 32); }
inline size_t amx_bytes(const Weight& w) {
  return static_cast<size_t>(amx_inputs(w)) * kAmxRows * sizeof(uint16_t);
}

}  // namespace windlass
