// NEON: GEMMs of 13 to 16 rows of int4 weights with offsets and groups of 32 inputs, as of short prompts.
//
// A tile takes as long as a few hundred instructions here, so all that is the same for every tile is computed
// before the first one, and the outliers of a row are added where its sums are stored.

#pragma once

#include "gemm.h"
#include "int_tile.h"
#include "int_unpack.h"
#include "panels.h"
#include "sixteen_rows_neon.h"

namespace windlass::tile {

#if defined(WINDLASS_NEON)

constexpr int kShortRows = 4 * kPanelRows;
constexpr int kMaxGroups = kMaxInputs / 32;
constexpr int kMaxShortOutliers = kShortRows * kMaxGroups;

// Stores two vectors. Compilers store them one by one.
inline void store_two(float* p, float32x4_t x, float32x4_t y) {
  __asm__("stp %q1, %q2, %0" : "=Q"(*reinterpret_cast<float(*)[8]>(p)) : "w"(x), "w"(y));
}

// Keeps a constant in a register: compilers load it again in each iteration.
template <class Vector>
inline Vector kept(Vector x) {
  __asm__("" : "+w"(x));
  return x;
}

// Reads the scales and offsets of all groups of a tile.
inline void read_all_scales(const IntTile<uint16_t>& tile, GroupScales* out) {
  const float32x4_t start = kept(vdupq_n_f32(-kSumStart));
  const int32x4_t mask = kept(vdupq_n_s32(static_cast<int32_t>(0x8fffffff)));
  // As load_f16_fast.
  const auto four = [&](int32x4_t bits) WINDLASS_INLINED { return vreinterpretq_f32_s32(vandq_s32(bits, mask)); };
  const auto read = [&](const int16_t* scales, const int16_t* offsets, GroupScales* to) WINDLASS_INLINED {
    const int16x8_t scale = vld1q_s16(scales), offset = vld1q_s16(offsets);
    const float32x4_t low = four(vshll_n_s16(vget_low_s16(scale), 13)), high = four(vshll_high_n_s16(scale, 13));
    // As GroupScales::set.
    __asm__("stp %q1, %q2, [%7]\n stp %q2, %q3, [%7, #32]\n stp %q4, %q5, [%7, #64]\n stp %q5, %q6, [%7, #96]"
            : "=m"(*to)
            : "w"(low), "w"(vmulq_f32(low, start)), "w"(four(vshll_n_s16(vget_low_s16(offset), 13))), "w"(high),
              "w"(vmulq_f32(high, start)), "w"(four(vshll_high_n_s16(offset, 13))), "r"(to));
  };
  const auto *scales = reinterpret_cast<const int16_t*>(tile.scales),
             *offsets = reinterpret_cast<const int16_t*>(tile.offsets);
  int left = tile.groups;
  for (; left >= 2; left -= 2, scales += 2 * kTile, offsets += 2 * kTile, out += 2) {
    read(scales, offsets, out);
    read(scales + kTile, offsets + kTile, out + 1);
  }
  if (left == 1) read(scales, offsets, out);
}

// The outliers of all rows, with the places of their weights in a tile.
class ShortOutliers {
 public:
  explicit ShortOutliers(const GemmArgs& job) : columns_(job.chunk_columns(0)), rows_(job.rows) {
    int count = 0;
    if (columns_.by_column) {
      for (; count < columns_.count; ++count) places_[count] = place(columns_.list[count].input, 0.0f);
      ends_[0] = count;
      return;
    }
    for (int m = 0; m < rows_; ++m) {
      const Outliers row = row_outliers(job.row_outliers(m));
      for (int i = 0; i < row.count; ++i) places_[count++] = place(row.list[i].input, row.list[i].x);
      ends_[m] = count;
    }
  }

  // Writes the sums of a tile with those of the outliers, times `gain`, or adds them to what is there.
  template <bool ADDS>
  void store_rows(const uint8_t* codes, const GroupScales* scales, const float* sums, F32x8 gain, float* out,
                  ptrdiff_t stride) const {
    if (columns_.by_column) return store_panels<ADDS>(codes, scales, sums, gain, out, stride);
    const uint32x4_t mask = kept(vdupq_n_u32(kTopNibbles));
    const Place* at = places_;
    for (int m = 0; m < rows_; ++m, sums += kTile, out += stride) {
      float32x4_t first = vdupq_n_f32(0), second = vdupq_n_f32(0);
      for (const Place* const end = places_ + ends_[m]; at != end; ++at) {
        const F32x8 weight = weight_of(codes, scales, *at, mask);
        first = vfmaq_n_f32(first, weight.a, at->x);
        second = vfmaq_n_f32(second, weight.b, at->x);
      }
      store_row<ADDS>(sums, first, second, gain, out);
    }
  }

 private:
  static constexpr uint32_t kTopNibbles = 0xf0000000;

  // Offsets in bytes: of the codes in a tile, of the scales in GroupScales, of the shift in kShifts that
  // selects the codes of an input.
  struct Place {
    uint32_t code, scale, shift;
    float x;
  };

  static Place place(int input, float x) {
    const uint32_t k = static_cast<uint32_t>(input);
    return {k / 16 * 8 * kTile + k % 8 / kSpan * kSpan * kTile, k / 32 * static_cast<uint32_t>(sizeof(GroupScales)),
            k % 16 * 16, x};
  }

  // As weight_at.
  static WINDLASS_INLINE F32x8 weight_of(const uint8_t* codes, const GroupScales* scales, const Place& at,
                                         uint32x4_t mask) {
    const uint8_t* const code = codes + at.code;
    const float* const scale = skip_bytes(reinterpret_cast<const float*>(scales), at.scale);
    const int32x4_t up = vld1q_s32(skip_bytes(reinterpret_cast<const int32_t*>(kShifts.nibbles), at.shift));
    const auto four = [&](int i) WINDLASS_INLINED {
      const uint32x4_t shifted = vshlq_u32(vreinterpretq_u32_u8(vld1q_u8(code + 16 * i)), up);
      return vmulq_f32(vcvtq_n_f32_u32(vandq_u32(shifted, mask), 28), vld1q_f32(scale + 16 * i));
    };
    return {four(0), four(1)};
  }

  template <bool ADDS>
  static WINDLASS_INLINE void store_row(const float* sums, float32x4_t first, float32x4_t second, F32x8 gain,
                                        float* out) {
    first = vmulq_f32(vaddq_f32(vld1q_f32(sums), first), gain.a);
    second = vmulq_f32(vaddq_f32(vld1q_f32(sums + 4), second), gain.b);
    if (ADDS) first = vaddq_f32(vld1q_f32(out), first), second = vaddq_f32(vld1q_f32(out + 4), second);
    store_two(out, first, second);
  }

  template <bool ADDS>
  void store_panels(const uint8_t* codes, const GroupScales* scales, const float* sums, F32x8 gain, float* out,
                    ptrdiff_t stride) const {
    alignas(64) float weights[kMaxShortOutliers * kTile];
    const uint32x4_t mask = kept(vdupq_n_u32(kTopNibbles));
    float* to = weights;
    for (const Place *at = places_, *const end = at + ends_[0]; at != end; ++at, to += kTile) {
      const F32x8 weight = weight_of(codes, scales, *at, mask);
      store_two(to, weight.a, weight.b);
    }
    const int32_t* column = columns_.quad_columns;
    const float* inputs = columns_.quads;
    for (int i = 0; i < kShortRows / kPanelRows; ++i) {
      float32x4_t first[kPanelRows], second[kPanelRows];
      const int32_t* const end = columns_.quad_columns + columns_.quad_starts[i + 1];
      const auto add_quad = [&](auto starts) WINDLASS_INLINED {
        const float* const weight = weights + static_cast<ptrdiff_t>(*column++) * kTile;
        const float32x4_t low = vld1q_f32(weight), high = vld1q_f32(weight + 4), four = vld1q_f32(inputs);
        inputs += kPanelRows;
        unrolled<kPanelRows>([&](auto m) WINDLASS_INLINED {
          first[m] = starts ? vmulq_laneq_f32(low, four, m) : vfmaq_laneq_f32(first[m], low, four, m);
          second[m] = starts ? vmulq_laneq_f32(high, four, m) : vfmaq_laneq_f32(second[m], high, four, m);
        });
      };
      if (column != end) {
        add_quad(std::true_type{});
        while (column != end) add_quad(std::false_type{});
      } else {
        for (int m = 0; m < kPanelRows; ++m) first[m] = second[m] = vdupq_n_f32(0);
      }
      const int row = columns_.panel_order[i] * kPanelRows, count = rows_ - row;
      const float* from = sums + row * kTile;
      float* target = out + row * stride;
      unrolled<kPanelRows>([&](auto m) WINDLASS_INLINED {
        if (m >= count) return;
        store_row<ADDS>(from + m * kTile, first[m], second[m], gain, target);
        target += stride;
      });
    }
  }

  const OutlierColumns columns_;
  const int rows_;
  int ends_[kShortRows];
  Place places_[kMaxShortOutliers];
};

inline bool is_short_prompt(const GemmArgs& job) {
  return job.num_panels() == kShortRows / kPanelRows && job.panels_per_chunk >= job.num_panels() &&
         job.columns != nullptr && job.planes == 1 && job.w.group == 32 && job.w.num_out % kTile == 0 &&
         job.w.num_in <= kMaxInputs;
}

inline void short_prompt_gemm(const GemmArgs& job) {
  const IntSizes sizes(job.w, job.rows);
  const Tiles tiles(job.w);
  const IntPanel x = sizes.panel(job.panel(0));
  const ShortOutliers outliers(job);
  const int64_t step = static_cast<int64_t>(tiles.bytes) / (2 * tiles.groups);
  each_chunk(job, [&](int t, int, int, Target to) {
    const F32x8 gain = splat(job.gain);
    const IntTile<uint16_t> tile = tiles.at(t);
    alignas(64) GroupScales all_scales[1 + kMaxGroups];
    alignas(64) float sums[kShortRows * kTile];
    // Compilers call memset for more bytes at once.
    for (int i = 0; i < kShortRows * kTile; i += 64) std::memset(sums + i, 0, 256);
    all_scales[0].set(zero(), zero());
    const GroupScales* const scales = all_scales + 1;
    read_all_scales(tile, all_scales + 1);
    const uint8_t* ahead = tiles.data + tiles.bytes * static_cast<size_t>(t + 1);
    for (int i = 0; i < kTile; i += 4, ahead += step * tiles.groups) {
      // int4 weights with offsets have a correction of 0.
      multiply_16(tile.codes + kSpan * i, scales[0].half(i), tiles.groups, x.codes, x.scales, x.sums, x.correction,
                  job.panel_bytes, ahead, step, sums + i);
    }
    float* const out = to.first - static_cast<ptrdiff_t>(to.row) * to.stride;
    job.add ? outliers.store_rows<true>(tile.codes, scales, sums, gain, out, to.stride)
            : outliers.store_rows<false>(tile.codes, scales, sums, gain, out, to.stride);
  });
}

#else

bool is_short_prompt(const GemmArgs&);  // never called
void short_prompt_gemm(const GemmArgs&);

#endif

}  // namespace windlass::tile
