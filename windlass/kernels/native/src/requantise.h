// Converts the int4 codes of a tile to int8 codes with one scale per output.

#pragma once

#include <cstring>

#include "simd.h"

namespace windlass::tile {

constexpr int64_t kRequantiseAhead = 4096;  // bytes
constexpr uint8_t kSigns = 0x88;  // converts between unsigned and signed nibbles

// Whether Requantiser::convert leaves codes in registers.
#if defined(WINDLASS_AVX2)
constexpr bool kRequantisesInRegisters = true;
#else
constexpr bool kRequantisesInRegisters = false;
#endif

// Code c of an output becomes floor((c * factor + start) / 256). factor and start are rounded to
// integers, and the result lies in -127 to 127. Where codes are unsigned, 128 is added.
#if defined(WINDLASS_NEON) && !defined(WINDLASS_I8MM)

// Looks up the low and the high nibbles of W in the tables v`FIRST` to v`LAST`. The table offsets
// are reloaded each time, since the load pipes are idle.
#define WINDLASS_LOOK(W, LOW, HIGH, FIRST, LAST)                                \
  "ldr q" LOW ", [%[table_offsets]]\n ldr q" HIGH ", [%[table_offsets]]\n"      \
  "bit v" LOW ".16b, v" W ".16b, v31.16b\n sri v" HIGH ".16b, v" W ".16b, #4\n" \
  "tbl v" LOW ".16b, {v" FIRST ".16b - v" LAST ".16b}, v" LOW ".16b\n"          \
  "tbl v" HIGH ".16b, {v" FIRST ".16b - v" LAST ".16b}, v" HIGH ".16b\n"

// Looks codes up: a table of 16 per output, and four tables for the four outputs of a vector.
class Requantiser {
 public:
  Requantiser() = default;
  Requantiser(Floats factors, Floats starts) : factor_(whole(factors)), start_(whole(starts)) {}

  void convert(const uint8_t*, Codes (&)[4]) const;  // never called: see kRequantisesInRegisters

  // Converts units of 16 inputs, at least one: see weight.h.
  template <bool SIGNED>
  void unpack(const uint8_t* from, int units, uint8_t* to) const {
    uint8x16_t tables[8];
    unrolled<8>([&](auto r) WINDLASS_INLINED { tables[r] = table<SIGNED, r>(); });
    // The four tables of a vector need consecutive registers; compilers would move them there
    // before each lookup.
    register uint8x16_t a __asm__("v20") = tables[0], b __asm__("v21") = tables[1];
    register uint8x16_t c __asm__("v22") = tables[2], d __asm__("v23") = tables[3];
    register uint8x16_t e __asm__("v24") = tables[4], f __asm__("v25") = tables[5];
    register uint8x16_t g __asm__("v26") = tables[6], h __asm__("v27") = tables[7];
    __asm__ volatile(
        "movi v31.16b, #15\n"
        "1: ldp q0, q1, [%[from]]\n ldp q2, q3, [%[from], #32]\n"
        "prfm pldl1keep, [%[from], %[ahead]]\n add %[from], %[from], #64\n"
        WINDLASS_LOOK("0", "4", "16", "20", "23") WINDLASS_LOOK("1", "5", "17", "24", "27")
        "stp q4, q5, [%[to]]\n stp q16, q17, [%[to], #64]\n"
        WINDLASS_LOOK("2", "6", "18", "20", "23") WINDLASS_LOOK("3", "7", "19", "24", "27")
        "stp q6, q7, [%[to], #32]\n stp q18, q19, [%[to], #96]\n"
        "add %[to], %[to], #128\n"
        "subs %w[units], %w[units], #1\n"
        "b.ne 1b\n"
        : [from] "+r"(from), [to] "+r"(to), [units] "+r"(units)
        : [table_offsets] "r"(kTableOffsets), [ahead] "r"(kRequantiseAhead), "w"(a), "w"(b), "w"(c), "w"(d),
          "w"(e), "w"(f), "w"(g), "w"(h)
        : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v16", "v17", "v18",
          "v19", "v31");
  }

 private:
  static uint16x8_t whole(Floats x) {
    const uint32x4_t a = vreinterpretq_u32_s32(vcvtnq_s32_f32(x.a));
    const uint32x4_t b = vreinterpretq_u32_s32(vcvtnq_s32_f32(x.b));
    return vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b));
  }
  // The int8 values of output R's 16 codes; for signed nibbles those from 8 on come first.
  template <bool SIGNED, int R>
  uint8x16_t table() const {
    constexpr uint16x8_t kCodes = {0, 1, 2, 3, 4, 5, 6, 7};
    const uint16x8_t low = vmlaq_laneq_u16(vdupq_laneq_u16(start_, R), kCodes, factor_, R);
    const uint16x8_t high = vaddq_u16(low, vdupq_laneq_u16(vshlq_n_u16(factor_, 3), R));
    const uint8x16_t a = vreinterpretq_u8_u16(low), b = vreinterpretq_u8_u16(high);
    return SIGNED ? vuzp2q_u8(b, a) : vuzp2q_u8(a, b);
  }
  // Offsets of the tables of a vector's outputs.
  alignas(16) static constexpr uint8_t kTableOffsets[16] = {0,  0,  0,  0,  16, 16, 16, 16,
                                                      32, 32, 32, 32, 48, 48, 48, 48};

  uint16x8_t factor_, start_;
};

#undef WINDLASS_LOOK

#elif defined(WINDLASS_AVX2)

// Multiplies 16-bit words, since there is no table lookup over several registers.
class Requantiser {
 public:
  Requantiser() = default;
  Requantiser(Floats factors, Floats starts)
      : factor_(round_to_words(factors, 0)),
        start_(round_to_words(starts, kUnsignedCodes ? 128 * 256 : 0)) {}

  // Converts 16 inputs: see weight.h.
  WINDLASS_INLINE void convert(const uint8_t* from, Codes (&out)[4]) const {
    constexpr int wide = sizeof(Codes);
    for (int i = 0; i < 2 * wide; i += 64) __builtin_prefetch(from + kRequantiseAhead + i);
    requantise(load_codes(from), factor_, start_, out[0], out[2]);
    requantise(load_codes(from + wide), factor_, start_, out[1], out[3]);
  }

  // Converts units of 16 inputs.
  template <bool SIGNED>
  WINDLASS_INLINE void unpack(const uint8_t* from, int units, uint8_t* to) const {
    static_assert(!SIGNED);
    constexpr int wide = sizeof(Codes);
    for (; units > 0; --units, from += 2 * wide, to += 4 * wide) {
      Codes codes[4];
      convert(from, codes);
      for (int i = 0; i < 4; ++i) store_codes(to + wide * i, codes[i]);
    }
  }

 private:
  Words factor_, start_;
};

#else

class Requantiser {
 public:
  Requantiser() = default;
  Requantiser(Floats factors, Floats starts) {
    spread(factors, 0, factor_);
    spread(starts, kUnsignedCodes ? 128 * 256 : 0, start_);
  }

  void convert(const uint8_t*, Codes (&)[4]) const;  // never called: see kRequantisesInRegisters

  // Converts units of 16 inputs: see weight.h.
  template <bool SIGNED>
  void unpack(const uint8_t* from, int units, uint8_t* to) const {
    constexpr int half = 8 * kTile;
    for (; units > 0; --units, from += half, to += 2 * half) {
      __builtin_prefetch(from + kRequantiseAhead);
      for (int first = 0; first < half; first += kPeriod) {
        for (int j = 0; j < kPeriod; ++j) {
          const uint8_t both = static_cast<uint8_t>(from[first + j] ^ (SIGNED ? kSigns : 0));
          const auto made = [&](int c) {
            return static_cast<uint8_t>(static_cast<uint16_t>(c * factor_[j] + start_[j]) >> 8);
          };
          to[first + j] = made(both & 15);
          to[first + half + j] = made(both >> 4);
        }
      }
    }
  }

 private:
  static constexpr int kPeriod = kTile * kSpan;

  // Rounds to the nearest integers and repeats each for the kSpan codes of an output.
  static void spread(Floats x, uint32_t more, uint16_t* out) {
    float from[kTile];
    store(from, x);
    for (int r = 0; r < kTile; ++r) {
      // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
      const float shifted = from[r] + 12582912.0f;
      uint32_t bits;
      std::memcpy(&bits, &shifted, 4);
      for (int i = 0; i < kSpan; ++i) out[r * kSpan + i] = static_cast<uint16_t>(bits + more);
    }
  }

  alignas(64) uint16_t factor_[kPeriod], start_[kPeriod];
};

#endif

}  // namespace windlass::tile
