// A packed weight: kTile outputs form a tile, and a tile is contiguous.
//
//   int4, int8   [groups][kTile] float16 scales, [groups][kTile] float16 offsets if any, then codes, 16
//                inputs at a time: for int8 [16 / kSpan][kTile][kSpan] bytes, for int4
//                [8 / kSpan][kTile][kSpan] bytes with inputs 0..7 in the low nibbles and 8..15 in the
//                high ones
//   int6         like int8, but the four vectors of 16 inputs, 4 * kTile codes each, lie in three: a byte
//                has a code of its own vector in its low 6 bits, and 2 bits of the fourth vector above them,
//                the highest 2 in the first vector
//   codebook4    float16 scales: [groups][kTile], or [super-groups][kTile] followed by [groups][kTile]
//                int8 sub-scales; then codes like int4
//   table4       [groups][kTile] float32 scales, then codes, 4 inputs at a time: [2][kTile] bytes with
//                inputs 0, 1 in the low nibbles and 2, 3 in the high ones
//   f16, f32     [inputs][kTile]
//   bf16         [inputs / kBf16Span][kTile][kBf16Span]
//
// Padding outputs and inputs are zeros.

#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace windlass {

enum Kind : int32_t {
  kInt4 = 0,
  kInt8 = 1,
  kTable4 = 2,
  kF16 = 3,
  kF32 = 4,
  kBf16 = 5,
  kCodebook4 = 6,
  kInt6 = 7,
};

}  // namespace windlass

// linear.py mirrors this struct field by field.
struct WindlassWeight {
  int32_t kind;
  int32_t num_out;
  int32_t num_in;
  int32_t group;  // inputs that share a scale; num_in for one scale per output
  int32_t super_group;  // codebook4 with sub-scales: inputs that share a scale, else 0
  int32_t has_offsets;  // int4 without offsets has codes around 8, or signed ones: see layout.h
  int32_t quantise_once;  // int8 and int6: quantise inputs once, like int4, instead of to 15 bits
  float gain;  // scale of all outputs; stored scales are divided by it
  const uint8_t* data;
  const int32_t* perm;  // or null: column k of the weight belongs to input perm[k]
  const float* table;  // kTable4: 16 values
  const int8_t* codebook;  // kCodebook4: 16 values
};

namespace windlass {

using Weight = ::WindlassWeight;

inline int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }
inline int ceil_div(int x, int y) { return (x + y - 1) / y; }
template <class T>
inline const T* skip_bytes(const T* p, size_t bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(p) + bytes);
}

inline bool has_nibbles(const Weight& w) { return w.kind == kInt4 || w.kind == kCodebook4; }
inline bool has_int8_values(const Weight& w) { return w.kind == kInt8 || w.kind == kInt6; }
inline bool is_integer(const Weight& w) { return has_nibbles(w) || has_int8_values(w); }
inline bool has_f16(const Weight& w) { return is_integer(w) || w.kind == kF16; }
inline int num_groups(const Weight& w) { return w.num_in / w.group; }
inline int num_scales(const Weight& w) {
  return w.super_group > 0 ? w.num_in / w.super_group : num_groups(w);
}
inline int num_tiles(const Weight& w) { return ceil_div(w.num_out, kTile); }

// Inputs quantised with one scale: a block never crosses a group.
inline int block_size(const Weight& w) {
  return w.group == w.num_in || w.group % 32 == 0 ? 32 : 16;
}

inline int padded_in(const Weight& w) {
  if (is_integer(w)) return round_up(w.num_in, block_size(w));
  if (w.kind == kBf16) return round_up(w.num_in, kBf16Run);
  return w.kind == kTable4 ? round_up(w.num_in, 4) : w.num_in;
}

// Bytes of a tile before the codes.
inline size_t scale_bytes(const Weight& w) {
  if (is_integer(w)) {
    const size_t sub_scales = static_cast<size_t>(w.super_group > 0 ? num_groups(w) : 0) * kTile;
    return static_cast<size_t>(num_scales(w)) * kTile * (w.has_offsets ? 4 : 2) + sub_scales;
  }
  return w.kind == kTable4 ? static_cast<size_t>(num_groups(w)) * kTile * 4 : 0;
}

// Bytes of the codes of some inputs of a tile.
inline size_t code_bytes(const Weight& w, int inputs) {
  const size_t count = static_cast<size_t>(inputs) * kTile;
  switch (w.kind) {
    case kInt4:
    case kTable4:
    case kCodebook4:
      return count / 2;
    case kInt6:
      return count / 4 * 3;
    case kInt8:
      return count;
    case kF16:
    case kBf16:
      return count * 2;
    default:
      return count * 4;
  }
}

inline size_t tile_bytes(const Weight& w) { return scale_bytes(w) + code_bytes(w, padded_in(w)); }

// Index of input k of output r in the codes of a tile.
inline size_t span_index(int k, int r, int span) {
  return static_cast<size_t>((k / span * kTile + r) * span + k % span);
}
inline size_t int8_index(int k, int r) { return span_index(k, r, kSpan); }
constexpr size_t kInt6Vector = 4 * kTile;  // bytes
inline size_t int6_index(int k) { return static_cast<size_t>(k / 16) * 3 * kInt6Vector; }  // of 16 inputs
inline size_t nibble_index(int k, int r) {
  return static_cast<size_t>(k / 16 * 8 * kTile) + span_index(k % 8, r, kSpan);
}
inline size_t table_index(int k, int r) {
  return static_cast<size_t>((k / 4 * 2 + k % 2) * kTile + r);
}
inline size_t bf16_index(int k, int r) { return span_index(k, r, kBf16Span); }

inline bool has_signed_nibbles(const Weight& w) {
  return kSignedNibbles && w.kind == kInt4 && !w.has_offsets;
}

// Factor of stored codes, divided out of x.
inline float code_gain(const Weight& w) { return has_signed_nibbles(w) ? 16.0f : 1.0f; }

// The offset of stored codes.
inline int code_offset(const Weight& w) {
  if (w.kind == kInt8 || w.kind == kCodebook4) return kUnsignedCodes ? 128 : 0;
  if (w.kind == kInt6) return 32;
  return w.has_offsets || has_signed_nibbles(w) ? 0 : 8;
}

}  // namespace windlass
