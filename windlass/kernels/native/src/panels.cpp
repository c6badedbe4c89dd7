// Rounds rows of x to int8, or only rearranges them. Plain loops that compilers vectorise.

#include "panels.h"

#include <cstring>

#include "simd.h"

namespace windlass {

namespace {

constexpr int kMostBlock = 32;

struct Rounded {
  float scale;
  int32_t sum;  // of the codes
};

// The largest magnitude; NaN if there is one.
float peak_of(const float* x, int count) {
  int32_t most = 0;
  for (int i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;  // as whole numbers magnitudes keep their order
    most = bits > most ? bits : most;
  }
  float peak;
  std::memcpy(&peak, &most, 4);
  return peak;
}

// Nearest, ties to even; returns the sum of the codes.
int32_t round_codes(const float* x, int count, float inverse, int8_t* codes) {
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) {
    // Adding 1.5 * 2^23 leaves the rounded number in the low bits.
    const float shifted = x[i] * inverse + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    const int8_t code = static_cast<int8_t>(bits);
    codes[i] = code;
    sum += code;
  }
  return sum;
}

// NaN or infinity in x become a scale of NaN or infinity, so that the product shows them.
template <int BLOCK>
Rounded round_block(const float* x, const float* given, int8_t* codes) {
  if (given != nullptr) return {*given * kLift, round_codes(x, BLOCK, 1.0f, codes)};
  const float peak = peak_of(x, BLOCK);
  const float inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
  return {peak / 127.0f * kLift, round_codes(x, BLOCK, inverse, codes)};
}

// One block of one row, in the weight's order, with zeros past the end.
const float* block_inputs(const Weight& w, const float* row, int first, int block, float* spare) {
  if (w.order == nullptr && first + block <= w.num_in) return row + first;
  for (int i = 0; i < block; ++i) {
    const int k = first + i;
    spare[i] = k >= w.num_in ? 0.0f : row[w.order == nullptr ? k : w.order[k]];
  }
  return spare;
}

struct IntSizes {
  size_t codes, blocks, groups;  // bytes of each array
};

IntSizes int_sizes(const Weight& w) {
  const size_t padded = static_cast<size_t>(padded_in(w));
  return {padded * kPanel, padded / block_size(w) * kPanel * 4,
          static_cast<size_t>(num_groups(w)) * kPanel * 4};
}

}  // namespace

size_t int_panel_bytes(const Weight& w) {
  const IntSizes sizes = int_sizes(w);
  return sizes.codes + 2 * sizes.blocks + sizes.groups;
}

IntPanel int_panel(const Weight& w, const uint8_t* memory) {
  const IntSizes sizes = int_sizes(w);
  const uint8_t* scales = memory + sizes.codes;
  const uint8_t* centre = scales + sizes.blocks;
  return {reinterpret_cast<const int8_t*>(memory), reinterpret_cast<const float*>(scales),
          reinterpret_cast<const int32_t*>(centre),
          reinterpret_cast<const float*>(centre + sizes.blocks)};
}

void fill_int_panel(const Weight& w, const float* x, const float* x_scales, int rows,
                    uint8_t* memory) {
  const IntPanel panel = int_panel(w, memory);
  int8_t* codes = const_cast<int8_t*>(panel.codes);
  float* scales = const_cast<float*>(panel.scales);
  int32_t* centre = const_cast<int32_t*>(panel.centre);
  float* sums = const_cast<float*>(panel.sums);
  const int block = block_size(w);
  const int blocks_per_group = padded_in(w) / num_groups(w) / block;
  const IntSizes sizes = int_sizes(w);
  std::memset(scales, 0, 2 * sizes.blocks + sizes.groups);  // rows that are not there count too
  for (int m = 0; m < rows; ++m) {
    const float* row = x + static_cast<size_t>(m) * w.num_in;
    const float* given = x_scales == nullptr ? nullptr : x_scales + m;
    for (int b = 0; b < padded_in(w) / block; ++b) {
      float spare[kMostBlock];
      int8_t rounded[kMostBlock];
      const float* inputs = block_inputs(w, row, b * block, block, spare);
      const Rounded r = block == 32 ? round_block<32>(inputs, given, rounded)
                                    : round_block<16>(inputs, given, rounded);
      for (int i = 0; i < block; i += 16) {
        std::memcpy(codes + (static_cast<size_t>(b) * block + i) * kPanel + 16 * m, rounded + i, 16);
      }
      scales[b * kPanel + m] = r.scale;
      centre[b * kPanel + m] = -8 * r.sum;
      sums[b / blocks_per_group * kPanel + m] += r.scale * static_cast<float>(r.sum);
    }
  }
}

size_t float_panel_bytes(const Weight& w) {
  return static_cast<size_t>(padded_in(w)) * kPanel * sizeof(float);
}

void fill_float_panel(const Weight& w, const float* x, int rows, uint8_t* memory) {
  float* out = reinterpret_cast<float*>(memory);
  std::memset(out, 0, float_panel_bytes(w));
  const float lift = has_halves(w) ? kLift : 1.0f;
  for (int k = 0; k < w.num_in; ++k) {
    const int from = w.order == nullptr ? k : w.order[k];
    for (int m = 0; m < rows; ++m) {
      out[k * kPanel + m] = x[static_cast<size_t>(m) * w.num_in + from] * lift;
    }
  }
}

}  // namespace windlass
