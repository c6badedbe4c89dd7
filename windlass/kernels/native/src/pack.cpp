// Rearranges weights into tiles of outputs, once, when a model is loaded. Loses nothing.

#include <cstring>

#include "api.h"
#include "weight.h"

namespace windlass {

namespace {

// Code of 4 bits that lies two a byte, the first in the low half.
uint8_t nibble(const uint8_t* row, int k) {
  return k % 2 ? row[k / 2] >> 4 : row[k / 2] & 15;
}

template <class T>
void pack_groups(const Weight& w, int tile, const T* values, T* out) {
  const int groups = num_groups(w);
  for (int r = 0; r < kTile; ++r) {
    const int n = tile * kTile + r;
    for (int g = 0; g < groups; ++g) {
      out[g * kTile + r] = n < w.num_out ? values[static_cast<size_t>(n) * groups + g] : T{};
    }
  }
}

void pack_int4_row(const Weight& w, const uint8_t* row, int r, uint8_t* out) {
  // Padding is code 8: around the centre it is zero, and with minima its inputs are zero anyway.
  const auto code = [&](int k) { return k < w.num_in ? nibble(row, k) : uint8_t{8}; };
  const int sign = has_signed_nibbles(w) ? 0x88 : 0;  // less 8: the highest bit turns round
  for (int k = 0; k < padded_in(w); k += 16) {
    for (int i = 0; i < 8; ++i) {
      const int both = code(k + i) | code(k + i + 8) << 4;
      out[nibble_place(k + i, r)] = static_cast<uint8_t>(both ^ sign);
    }
  }
}

void pack_int8_row(const Weight& w, const uint8_t* row, int r, uint8_t* out) {
  const int offset = code_offset(w);
  for (int k = 0; k < w.num_in; ++k) out[int8_place(k, r)] = static_cast<uint8_t>(row[k] + offset);
}

void pack_table_row(const Weight& w, const uint8_t* row, int r, uint8_t* out) {
  const auto code = [&](int k) { return k < w.num_in ? nibble(row, k) : uint8_t{0}; };
  for (int k = 0; k < padded_in(w); k += 4) {
    for (int i = 0; i < 2; ++i) {
      out[table_place(k + i, r)] = static_cast<uint8_t>(code(k + i) | code(k + i + 2) << 4);
    }
  }
}

template <class T>
void pack_plain_row(const Weight& w, const uint8_t* row, int r, int span, uint8_t* out) {
  for (int k = 0; k < w.num_in; ++k) {
    std::memcpy(out + span_place(k, r, span) * sizeof(T), row + k * sizeof(T), sizeof(T));
  }
}

void pack_row(const Weight& w, const uint8_t* row, int r, uint8_t* out) {
  switch (w.kind) {
    case kInt4:
      return pack_int4_row(w, row, r, out);
    case kInt8:
      return pack_int8_row(w, row, r, out);
    case kTable4:
      return pack_table_row(w, row, r, out);
    case kHalf:
      return pack_plain_row<uint16_t>(w, row, r, 1, out);
    case kBrain:
      return pack_plain_row<uint16_t>(w, row, r, kBrainSpan, out);
    default:
      return pack_plain_row<float>(w, row, r, 1, out);
  }
}

size_t row_bytes(const Weight& w) {
  const size_t k = static_cast<size_t>(w.num_in);
  const bool nibbles = w.kind == kInt4 || w.kind == kTable4;
  const bool halves = w.kind == kHalf || w.kind == kBrain;
  return nibbles ? k / 2 : w.kind == kInt8 ? k : halves ? 2 * k : 4 * k;
}

}  // namespace

}  // namespace windlass

using namespace windlass;

extern "C" {

uint64_t windlass_packed_bytes(const WindlassWeight* w) {
  return static_cast<uint64_t>(num_tiles(*w)) * tile_bytes(*w);
}

void windlass_pack(const WindlassWeight* weight, const void* codes, const void* scales,
                   const uint16_t* mins, uint8_t* out) {
  const Weight& w = *weight;
  const uint8_t* rows = static_cast<const uint8_t*>(codes);
  for (int tile = 0; tile < num_tiles(w); ++tile, out += tile_bytes(w)) {
    std::memset(out, 0, tile_bytes(w));
    if (is_integer(w)) {
      uint16_t* halves = reinterpret_cast<uint16_t*>(out);
      pack_groups(w, tile, static_cast<const uint16_t*>(scales), halves);
      if (w.has_mins) pack_groups(w, tile, mins, halves + num_groups(w) * kTile);
    } else if (w.kind == kTable4) {
      pack_groups(w, tile, static_cast<const float*>(scales), reinterpret_cast<float*>(out));
    }
    for (int r = 0; r < kTile && tile * kTile + r < w.num_out; ++r) {
      const size_t n = static_cast<size_t>(tile) * kTile + static_cast<size_t>(r);
      pack_row(w, rows + n * row_bytes(w), r, out + scale_bytes(w));
    }
  }
}

}  // extern "C"
