// Rounds rows of x to int8, or only rearranges them. Plain loops that compilers vectorise.

#include "panels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "simd.h"
#include "vector_math.h"

namespace windlass {

namespace {

constexpr int kMostBlock = 32;

// The largest input of a block is an outlier where rounding the others without it pays: its square is
// above that of the next by this many times the mean of the row's squares. What rounding loses grows
// with the square of a block's largest input, so these are the blocks that lose the most. In a small
// language model one in eight has one, and taking it out takes away three quarters of the divergence
// that rounding causes.
constexpr float kOutlier = 16.0f;

struct Rounded {
  float step;
  int32_t sum;  // of the codes
};

// Nearest, ties to even.
Rounded round_codes(const float* x, int count, float step, float inverse, int8_t* codes) {
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
  return {step, sum};
}

// NaN or infinity in x become a scale of NaN or infinity, so that the gemm shows them.
Rounded round_to(float peak, int block, const float* x, int8_t* codes) {
  const float inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
  const float step = peak / 127.0f;
  return block == 32 ? round_codes(x, 32, step, inverse, codes)
                     : round_codes(x, 16, step, inverse, codes);
}

float peak_of_block(int block, const float* x) {
  return block == 32 ? largest_magnitude(x, 32) : largest_magnitude(x, 16);
}

Rounded round_block(int block, const float* x, int8_t* codes) {
  return round_to(peak_of_block(block, x), block, x, codes);
}

// The place of the first input of so large a magnitude. Without a branch or a search, so that
// compilers vectorise it.
int place_of(float peak, const float* x, int count) {
  int at = count;
  for (int i = 0; i < count; ++i) at = std::min(at, std::fabs(x[i]) == peak ? i : count);
  return at;
}

// Rounds what the codes of a block leave of x.
Rounded round_rest(int block, const float* x, const int8_t* codes, float step, int8_t* out) {
  float rest[kMostBlock];
  for (int i = 0; i < block; ++i) rest[i] = x[i] - static_cast<float>(codes[i]) * step;
  return round_block(block, rest, out);
}

// Where rounded blocks go.
struct PanelSink {
  IntPanel panel;
  int block;
  int blocks_per_group;
  int32_t offset;  // of stored codes
  float lift;      // of x where it meets codes

  PanelSink(const Weight& w, const IntSizes& sizes, uint8_t* memory)
      : panel(sizes.panel(memory)),
        block(block_size(w)),
        blocks_per_group(padded_in(w) / num_groups(w) / block),
        offset(code_offset(w)),
        lift(kLift / code_gain(w)) {}

  int group(int b) const { return blocks_per_group == 1 ? b : b / blocks_per_group; }

  void add_sum(int b, int m, float inputs) const {
    const_cast<float*>(panel.sums)[group(b) * kPanel + m] += inputs;
  }

  void put(int b, int m, const Rounded& r, const int8_t* from) const {
    int8_t* to = const_cast<int8_t*>(panel.codes) + b * block * panel.rows + kRun * m;
    for (int i = 0; i < block; i += kRun) std::memcpy(to + i * panel.rows, from + i, kRun);
    const_cast<float*>(panel.scales)[b * kPanel + m] = r.step * lift;
    const_cast<int32_t*>(panel.centre)[b * kPanel + m] = -offset * r.sum;
    add_sum(b, m, r.step * kLift * static_cast<float>(r.sum));
  }
};

}  // namespace

int most_outliers(const Weight& w) { return padded_in(w) / block_size(w); }

void fill_int_panel(const Weight& w, const IntSizes& sizes, const float* x, const float* x_scales,
                    int rows, int planes, uint8_t* memory, uint8_t* outliers) {
  const int block = block_size(w);
  const int num_blocks = padded_in(w) / block;
  const PanelSink panel(w, sizes, memory);
  const size_t next_row = outlier_bytes(most_outliers(w));
  const bool looks = planes == 1 && outliers != nullptr && x_scales == nullptr;
  // Rows that are not there count too.
  std::memset(memory + sizes.codes, 0, 2 * sizes.blocks + sizes.groups);
  for (int m = 0; m < rows; ++m) {
    const float* row = x + static_cast<size_t>(m) * w.num_in;
    alignas(16) uint8_t unused[kCountBytes + sizeof(Outlier)];
    OutlierSink sink(outliers ? outliers + static_cast<size_t>(m) * next_row : unused);
    const float pays = looks ? kOutlier * sum_of_squares(row, w.num_in) / w.num_in : 0.0f;
    for (int b = 0; b < num_blocks; ++b) {
      float spare[kMostBlock];
      int8_t codes[kMostBlock];
      const float* inputs = inputs_of(w, row, b * block, block, spare);
      const float peak = x_scales == nullptr ? peak_of_block(block, inputs) : 0.0f;
      if (looks && peak * peak > pays) {
        const int at = place_of(peak, inputs, block);
        float others[kMostBlock];
        std::memcpy(others, inputs, static_cast<size_t>(block) * sizeof(float));
        others[at] = 0.0f;
        const float next = peak_of_block(block, others);
        if (peak * peak - next * next > pays) {
          sink.add({b * block + at, panel.group(b), inputs[at] * panel.lift});
          panel.put(b, m, round_to(next, block, others, codes), codes);
          panel.add_sum(b, m, inputs[at] * kLift);
          continue;
        }
      }
      const Rounded r = x_scales != nullptr ? round_codes(inputs, block, x_scales[m], 1.0f, codes)
                                            : round_to(peak, block, inputs, codes);
      panel.put(b, m * planes, r, codes);
      if (planes == 2) {
        int8_t rest_codes[kMostBlock];
        const Rounded rest = round_rest(block, inputs, codes, r.step, rest_codes);
        panel.put(b, m * planes + 1, rest, rest_codes);
      }
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

namespace {

// The nearest bfloat16, ties to even, and its value; what is no number stays none.
uint16_t nearest_bf16(float x, float& value) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool number = (bits & 0x7fffffff) <= 0x7f800000;
  bits = number ? (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000 : 0x7fc00000;
  std::memcpy(&value, &bits, 4);
  return static_cast<uint16_t>(bits >> 16);
}

}  // namespace

size_t bf16_panel_bytes(const Weight& w) {
  return static_cast<size_t>(padded_in(w)) * kPanel * sizeof(uint16_t);
}

void fill_bf16_panel(const Weight& w, const float* x, int rows, uint8_t* memory) {
  uint16_t* out = reinterpret_cast<uint16_t*>(memory);
  std::memset(out, 0, bf16_panel_bytes(w));
  for (int m = 0; m < rows; ++m) {
    for (int k = 0; k < w.num_in; ++k) {
      const int from = w.order == nullptr ? k : w.order[k];
      const float input = x[static_cast<size_t>(m) * w.num_in + from];
      uint16_t* place = out + (k / kBf16Run * kPanel + 2 * m) * kBf16Run + k % kBf16Run;
      float near, rest;
      place[0] = nearest_bf16(input, near);
      // Of infinity nothing is left.
      place[kBf16Run] = nearest_bf16(std::isfinite(near) ? input - near : 0.0f, rest);
    }
  }
}

}  // namespace windlass
