// Packs weights into tiles of outputs when a model is loaded. Lossless.

#include <algorithm>
#include <cstring>
#include <mutex>

#include "api.h"
#include "pool.h"
#include "weight.h"

namespace windlass {

namespace {

constexpr int kTilesAtOnce = 4;

// Returns the k-th 4-bit code; the first of two lies in the low nibble.
uint8_t nibble(const uint8_t* row, int k) {
  return k % 2 ? row[k / 2] >> 4 : row[k / 2] & 15;
}

// Puts a zero byte after each byte of a word.
uint64_t spread_bytes(uint32_t word) {
  uint64_t wide = word;
  wide = (wide | wide << 16) & 0x0000ffff0000ffff;
  return (wide | wide << 8) & 0x00ff00ff00ff00ff;
}

// Puts codes 0..7 of 16 into the low nibbles of 8 bytes and 8..15 into the high ones.
uint64_t interleave(const uint8_t* row) {
  uint32_t first, second;
  std::memcpy(&first, row, 4);
  std::memcpy(&second, row + 4, 4);
  const uint32_t even = (first & 0x0f0f0f0f) | (second & 0x0f0f0f0f) << 4;
  const uint32_t odd = (first >> 4 & 0x0f0f0f0f) | (second & 0xf0f0f0f0);
  return spread_bytes(even) | spread_bytes(odd) << 8;
}

template <class T>
void pack_groups(const Weight& w, int tile, int groups, const T* values, T* out) {
  for (int r = 0; r < kTile; ++r) {
    const int n = tile * kTile + r;
    for (int g = 0; g < groups; ++g) {
      out[g * kTile + r] = n < w.num_out ? values[static_cast<size_t>(n) * groups + g] : T{};
    }
  }
}

void pack_int4_row(const Weight& w, const uint8_t* row, int r, uint8_t* out) {
  const uint64_t sign = has_signed_nibbles(w) ? 0x8888888888888888 : 0;  // minus 8: flips one bit
  for (int k = 0; k < padded_in(w); k += 16) {
    // Padding is code 8: zero for signed codes, and elsewhere its inputs are zero.
    uint8_t last[8] = {0x88, 0x88, 0x88, 0x88, 0x88, 0x88, 0x88, 0x88};
    const uint8_t* from = row + k / 2;
    if (k + 16 > w.num_in) {
      std::memcpy(last, from, static_cast<size_t>(std::max(w.num_in - k, 0)) / 2);
      from = last;
    }
    const uint64_t both = interleave(from) ^ sign;
    uint8_t bytes[8];
    std::memcpy(bytes, &both, 8);
    for (int i = 0; i < 8; i += kSpan) std::memcpy(out + nibble_index(k + i, r), bytes + i, kSpan);
  }
}

void pack_int8_row(const Weight& w, const uint8_t* row, int r, uint8_t* out) {
  const int offset = code_offset(w), whole = w.num_in / kSpan * kSpan;
  const auto put = [&](int k, int count) {
    uint8_t codes[kSpan];
    for (int i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(row[k + i] + offset);
    std::memcpy(out + int8_index(k, r), codes, static_cast<size_t>(count));
  };
  for (int k = 0; k < whole; k += kSpan) put(k, kSpan);
  put(whole, w.num_in - whole);
}

// Puts 4 of 16 inputs, which int8_index finds at `at`, among their codes.
void put_int6(uint32_t four, size_t at, uint8_t* out) {
  const auto add = [&](size_t vector, uint32_t bits) {
    uint8_t* to = out + vector * kInt6Vector + at % kInt6Vector;
    uint32_t codes;
    std::memcpy(&codes, to, 4);
    codes |= bits;
    std::memcpy(to, &codes, 4);
  };
  if (at < 3 * kInt6Vector) return add(at / kInt6Vector, four);
  for (size_t i = 0; i < 3; ++i) add(i, four << (2 + 2 * i) & 0xc0c0c0c0);
}

void pack_int6_row(const Weight& w, const uint8_t* row, int r, uint8_t* out) {
  for (int k = 0; k < w.num_in; k += 4) {
    uint32_t four = 0;
    std::memcpy(&four, row + k, static_cast<size_t>(std::min(4, w.num_in - k)));
    four = (four & 0x3f3f3f3f) ^ 0x20202020;  // plus 32
    put_int6(four, int8_index(k % 16, r), out + int6_index(k));
  }
}

void pack_table_row(const Weight& w, const uint8_t* row, int r, uint8_t* out) {
  const auto code = [&](int k) { return k < w.num_in ? nibble(row, k) : uint8_t{0}; };
  for (int k = 0; k < padded_in(w); k += 4) {
    for (int i = 0; i < 2; ++i) {
      out[table_index(k + i, r)] = static_cast<uint8_t>(code(k + i) | code(k + i + 2) << 4);
    }
  }
}

template <class T>
void pack_plain_row(const Weight& w, const uint8_t* row, int r, int span, uint8_t* out) {
  for (int k = 0; k < w.num_in; ++k) {
    std::memcpy(out + span_index(k, r, span) * sizeof(T), row + k * sizeof(T), sizeof(T));
  }
}

void pack_row(const Weight& w, const uint8_t* row, int r, uint8_t* out) {
  switch (w.kind) {
    case kInt4:
    case kCodebook4:
      return pack_int4_row(w, row, r, out);
    case kInt8:
      return pack_int8_row(w, row, r, out);
    case kInt6:
      return pack_int6_row(w, row, r, out);
    case kTable4:
      return pack_table_row(w, row, r, out);
    case kF16:
      return pack_plain_row<uint16_t>(w, row, r, 1, out);
    case kBf16:
      return pack_plain_row<uint16_t>(w, row, r, kBf16Span, out);
    default:
      return pack_plain_row<float>(w, row, r, 1, out);
  }
}

struct Scales {
  const void* scales;
  const uint16_t* offsets;
  const int8_t* sub_scales;
};

size_t row_bytes(const Weight& w) {
  const size_t k = static_cast<size_t>(w.num_in);
  const bool nibbles = has_nibbles(w) || w.kind == kTable4;
  const bool halves = w.kind == kF16 || w.kind == kBf16;
  return nibbles ? k / 2 : has_int8_values(w) ? k : halves ? 2 * k : 4 * k;
}

void pack_tile(const Weight& w, int tile, const uint8_t* rows, const Scales& from, uint8_t* out) {
  std::memset(out, 0, tile_bytes(w));
  if (is_integer(w)) {
    uint16_t* halves = reinterpret_cast<uint16_t*>(out);
    const int count = num_scales(w), groups = num_groups(w);
    pack_groups(w, tile, count, static_cast<const uint16_t*>(from.scales), halves);
    halves += count * kTile;
    if (w.has_offsets) pack_groups(w, tile, groups, from.offsets, halves);
    if (w.super_group > 0) {
      pack_groups(w, tile, groups, from.sub_scales, reinterpret_cast<int8_t*>(halves));
    }
  } else if (w.kind == kTable4) {
    const float* floats = static_cast<const float*>(from.scales);
    pack_groups(w, tile, num_groups(w), floats, reinterpret_cast<float*>(out));
  }
  for (int r = 0; r < kTile && tile * kTile + r < w.num_out; ++r) {
    const size_t n = static_cast<size_t>(tile) * kTile + static_cast<size_t>(r);
    pack_row(w, rows + n * row_bytes(w), r, out + scale_bytes(w));
  }
}

}  // namespace

}  // namespace windlass

using namespace windlass;

extern "C" {

uint64_t windlass_packed_bytes(const WindlassWeight* w) {
  return static_cast<uint64_t>(num_tiles(*w)) * tile_bytes(*w);
}

void windlass_pack(WindlassPool* pool, const WindlassWeight* weight, const void* codes,
                   const void* scales, const uint16_t* offsets, const int8_t* sub_scales,
                   uint8_t* out) {
  const Scales from{scales, offsets, sub_scales};
  const std::lock_guard<std::mutex> lock(pool->pool.mutex());
  pool->pool.each(num_tiles(*weight), kTilesAtOnce, [&](int begin, int end) {
    for (int tile = begin; tile < end; ++tile) {
      pack_tile(*weight, tile, static_cast<const uint8_t*>(codes), from,
                out + static_cast<size_t>(tile) * tile_bytes(*weight));
    }
  });
}

}  // extern "C"
