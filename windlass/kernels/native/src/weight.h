// A packed weight: kTile outputs make a tile, and a tile lies in one piece.
//
//   int4, int8   [groups][kTile] half scales, [groups][kTile] half minima if any, then codes, 16
//                inputs at a time: for int8 [16 / kSpan][kTile][kSpan] bytes, for int4
//                [8 / kSpan][kTile][kSpan] bytes with inputs 0..7 in the low halves and 8..15 in
//                the high ones
//   codebook4    half scales: [groups][kTile], or [super-groups][kTile] followed by [groups][kTile]
//                int8 sub-scales; then codes as those of int4
//   table4       [groups][kTile] float scales, then codes, 4 inputs at a time: [2][kTile] bytes
//                with inputs 0, 1 in the low halves and 2, 3 in the high ones
//   half, float  [inputs][kTile]
//   bf16        (bfloat16) [inputs / kBf16Span][kTile][kBf16Span]
//
// Outputs and inputs past the end are zeros.

#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace windlass {

enum Kind : int32_t {
  kInt4 = 0,
  kInt8 = 1,
  kTable4 = 2,
  kHalf = 3,
  kFloat = 4,
  kBf16 = 5,
  kCodebook4 = 6,
};

}  // namespace windlass

// Mirrored field by field in linear.py.
struct WindlassWeight {
  int32_t kind;
  int32_t num_out;
  int32_t num_in;
  int32_t group;     // inputs that share a scale; num_in when all do
  int32_t super_group;  // codebook4 with sub-scales: inputs that share a scale, else 0
  int32_t has_mins;  // int4 without them has codes around 8, or signed ones: see layout.h
  int32_t round_once;  // int8: inputs are rounded as for int4, instead of to 15 bits
  float gain;        // of all outputs; scales are stored divided by it
  const uint8_t* data;
  const int32_t* order;  // or null: column k of the weight belongs to input order[k]
  const float* table;    // of kTable4: 16 values
  const int8_t* codebook;  // of kCodebook4: 16 values
};

namespace windlass {

using Weight = ::WindlassWeight;

inline int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }
inline int ceil_div(int x, int y) { return (x + y - 1) / y; }

inline bool has_nibbles(const Weight& w) { return w.kind == kInt4 || w.kind == kCodebook4; }
inline bool is_integer(const Weight& w) { return has_nibbles(w) || w.kind == kInt8; }
inline bool has_halves(const Weight& w) { return is_integer(w) || w.kind == kHalf; }
inline int num_groups(const Weight& w) { return w.num_in / w.group; }
inline int num_scales(const Weight& w) {
  return w.super_group > 0 ? w.num_in / w.super_group : num_groups(w);
}
inline int num_tiles(const Weight& w) { return ceil_div(w.num_out, kTile); }

// Inputs that are rounded with one scale: a block never crosses a group.
inline int block_size(const Weight& w) {
  return w.group == w.num_in || w.group % 32 == 0 ? 32 : 16;
}

inline int padded_in(const Weight& w) {
  if (is_integer(w)) return round_up(w.num_in, block_size(w));
  if (w.kind == kBf16) return round_up(w.num_in, kBf16Run);
  return w.kind == kTable4 ? round_up(w.num_in, 4) : w.num_in;
}

// What one group of 8 outputs takes before the codes.
inline size_t scale_bytes(const Weight& w) {
  if (is_integer(w)) {
    const size_t sub_scales = static_cast<size_t>(w.super_group > 0 ? num_groups(w) : 0) * kTile;
    return static_cast<size_t>(num_scales(w)) * kTile * (w.has_mins ? 4 : 2) + sub_scales;
  }
  return w.kind == kTable4 ? static_cast<size_t>(num_groups(w)) * kTile * 4 : 0;
}

inline size_t code_bytes(const Weight& w) {
  const size_t count = static_cast<size_t>(padded_in(w)) * kTile;
  switch (w.kind) {
    case kInt4:
    case kTable4:
    case kCodebook4:
      return count / 2;
    case kInt8:
      return count;
    case kHalf:
    case kBf16:
      return count * 2;
    default:
      return count * 4;
  }
}

inline size_t tile_bytes(const Weight& w) { return scale_bytes(w) + code_bytes(w); }

// Where input k of output r of a tile lies, counted from its codes.
inline size_t span_place(int k, int r, int span) {
  return static_cast<size_t>((k / span * kTile + r) * span + k % span);
}
inline size_t int8_place(int k, int r) { return span_place(k, r, kSpan); }
inline size_t nibble_place(int k, int r) {
  return static_cast<size_t>(k / 16 * 8 * kTile) + span_place(k % 8, r, kSpan);
}
inline size_t table_place(int k, int r) {
  return static_cast<size_t>((k / 4 * 2 + k % 2) * kTile + r);
}
inline size_t bf16_place(int k, int r) { return span_place(k, r, kBf16Span); }

inline bool has_signed_nibbles(const Weight& w) {
  return kSignedNibbles && w.kind == kInt4 && !w.has_mins;
}

// What codes are multiplied by where they meet x.
inline float code_gain(const Weight& w) { return has_signed_nibbles(w) ? 16.0f : 1.0f; }

// What is to be taken away from a stored code.
inline int code_offset(const Weight& w) {
  if (w.kind == kInt8 || w.kind == kCodebook4) return kUnsignedCodes ? 128 : 0;
  return w.has_mins || has_signed_nibbles(w) ? 0 : 8;
}

}  // namespace windlass
