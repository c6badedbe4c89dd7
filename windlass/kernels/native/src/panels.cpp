// Quantises rows of x to int8, or only rearranges them. Plain loops that compilers vectorise.

#include "panels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "amx.h"
#include "four_rows_neon.h"
#include "simd.h"
#include "vector_math.h"

namespace windlass {

namespace {

constexpr int kMaxBlock = 32;

// The largest input of a block is an outlier if its square exceeds that of the next by this many
// times the mean square of the row. The quantisation error grows with the square of a block's
// largest input, so these blocks lose the most. In a small language model one block in eight has an
// outlier, and taking them out removes three quarters of the KL divergence that quantisation
// causes.
constexpr float kOutlier = 16.0f;

struct QuantisedBlock {
  float step;
  int32_t sum;  // of the codes
};

// Rounds to nearest, ties to even.
WINDLASS_INLINE QuantisedBlock quantise_codes(const float* x, int count, float step, float inverse,
                                              int8_t* codes) {
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) {
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
    const float shifted = x[i] * inverse + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    const int8_t code = static_cast<int8_t>(bits);
    codes[i] = code;
    if constexpr (!kHasSumOfCodes) sum += code;
  }
  if constexpr (kHasSumOfCodes) sum = sum_of_codes(codes, count);
  return {step, sum};
}

// NaN or infinity in x becomes a NaN or infinite scale, so that the GEMM propagates it.
WINDLASS_INLINE QuantisedBlock quantise_with_peak(float peak, int block, const float* x, int8_t* codes) {
  const float inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
  const float step = peak / 127.0f;
  return block == 32 ? quantise_codes(x, 32, step, inverse, codes)
                     : quantise_codes(x, 16, step, inverse, codes);
}

float peak_of_block(int block, const float* x) {
  return block == 32 ? max_abs(x, 32) : max_abs(x, 16);
}

QuantisedBlock quantise_block(int block, const float* x, int8_t* codes) {
  return quantise_with_peak(peak_of_block(block, x), block, x, codes);
}

// Returns the index of the first input with this magnitude. Without a branch or an early exit, and with
// comparisons of integers, so that compilers vectorise it.
template <int COUNT>
int index_of(float peak, const float* x) {
  int32_t wanted;
  std::memcpy(&wanted, &peak, 4);
  int at = COUNT;
  for (int i = 0; i < COUNT; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    at = std::min(at, (bits & 0x7fffffff) == wanted ? i : COUNT);
  }
  return at;
}

// Quantises the residual that the codes of a block leave of x.
QuantisedBlock quantise_residual(int block, const float* x, const int8_t* codes, float step,
                                 int8_t* out) {
  float residual[kMaxBlock];
  for (int i = 0; i < block; ++i) residual[i] = x[i] - static_cast<float>(codes[i]) * step;
  return quantise_block(block, residual, out);
}

// Writes quantised blocks to a panel.
struct PanelSink {
  IntPanel panel;
  int block;
  int blocks_per_group;
  int32_t offset;  // offset of stored weight codes
  float input_gain;  // factor of x in the scales

  PanelSink(const Weight& w, const IntSizes& sizes, uint8_t* memory)
      : panel(sizes.panel(memory)),
        block(block_size(w)),
        blocks_per_group(padded_in(w) / num_groups(w) / block),
        offset(code_offset(w)),
        input_gain(kInputGain / code_gain(w)) {}

  int group(int b) const { return blocks_per_group == 1 ? b : b / blocks_per_group; }

  void add_sum(int b, int m, float inputs) const {
    const_cast<float*>(panel.sums)[group(b) * kPanelRows + m] += inputs;
  }

  void put(int b, int m, const QuantisedBlock& r, const int8_t* from) const {
    int8_t* to = codes(b) + kRun * m;
    for (int i = 0; i < block; i += kRun) std::memcpy(to + i * panel.rows, from + i, kRun);
    const_cast<float*>(panel.scales)[b * kPanelRows + m] = r.step * input_gain;
    const_cast<int32_t*>(panel.correction)[b * kPanelRows + m] = -offset * r.sum;
    add_sum(b, m, r.step * kInputGain * static_cast<float>(r.sum));
  }

  int8_t* codes(int b) const { return const_cast<int8_t*>(panel.codes) + b * block * panel.rows; }

#if defined(WINDLASS_NEON)
  // Writes all but the codes of block b of 4 rows.
  void put(int b, const FourBlocks& found) const {
    vst1q_f32(const_cast<float*>(panel.scales) + b * kPanelRows, vmulq_n_f32(found.step, input_gain));
    vst1q_s32(const_cast<int32_t*>(panel.correction) + b * kPanelRows, vmulq_n_s32(found.sums, -offset));
    add_sums(b, vmulq_f32(vmulq_n_f32(found.step, kInputGain), vcvtq_f32_s32(found.sums)));
  }

  void add_sums(int b, float32x4_t inputs) const {
    float* const sums = const_cast<float*>(panel.sums) + group(b) * kPanelRows;
    vst1q_f32(sums, vaddq_f32(vld1q_f32(sums), inputs));
  }
#endif
};

}  // namespace

int max_outliers(const Weight& w) { return padded_in(w) / block_size(w); }

namespace {

// Quantises the rows of a panel block by block.
class PanelFiller {
 public:
  PanelFiller(const Weight& w, const IntSizes& sizes, const float* x_scales, int planes, uint8_t* memory)
      : w_(w), panel_(w, sizes, memory), x_scales_(x_scales), planes_(planes) {}

  // Quantises block b of row m. Outliers are looked for if `min_gain` is not infinite.
  void fill(const float* row, int m, int b, float min_gain, OutlierSink& sink) const {
    const int block = panel_.block;
    float scratch[kMaxBlock];
    int8_t codes[kMaxBlock];
    const float* inputs = inputs_of(w_, row, b * block, block, scratch);
    const float peak = x_scales_ == nullptr ? peak_of_block(block, inputs) : 0.0f;
    if (peak * peak > min_gain) {
      float others[kMaxBlock];
      const Split split = without_peak(inputs, peak, others);
      if (peak * peak - split.next * split.next > min_gain) {
        sink.add(outlier(b, split));
        panel_.put(b, m, quantise_with_peak(split.next, block, others, codes), codes);
        panel_.add_sum(b, m, split.x * kInputGain);
        return;
      }
    }
    const QuantisedBlock r = x_scales_ != nullptr
                                 ? quantise_codes(inputs, block, x_scales_[m], 1.0f, codes)
                                 : quantise_with_peak(peak, block, inputs, codes);
    panel_.put(b, m * planes_, r, codes);
    if (planes_ == 2) {
      int8_t residual_codes[kMaxBlock];
      const QuantisedBlock residual = quantise_residual(block, inputs, codes, r.step, residual_codes);
      panel_.put(b, m * planes_ + 1, residual, residual_codes);
    }
  }

#if defined(WINDLASS_NEON)
  // Whether `rows` rows are quantised together.
  bool fills_four_rows(int rows) const {
    return kQuantisesFourRows && rows == kPanelRows && panel_.block == 32 && planes_ == 1 && x_scales_ == nullptr &&
           w_.perm == nullptr && w_.num_in % 32 == 0;
  }

  // The same for block b of 4 rows.
  void fill_four_rows(const float* x, int b, const float* min_gains, OutlierSink* sinks) const {
    const float* rows[kPanelRows];
    for (int m = 0; m < kPanelRows; ++m) rows[m] = x + static_cast<size_t>(m) * static_cast<size_t>(w_.num_in) + b * 32;
    float32x4_t peaks = peaks_of_four_rows(rows);
    const uint32x4_t large = vcgtq_f32(vmulq_f32(peaks, peaks), vld1q_f32(min_gains));
    if (vmaxvq_u32(large) == 0) return panel_.put(b, quantise_four_rows(rows, peaks, panel_.codes(b)));
    alignas(16) float others[kPanelRows][32], lanes[kPanelRows], taken[kPanelRows] = {};
    uint32_t is_large[kPanelRows];
    vst1q_f32(lanes, peaks);
    vst1q_u32(is_large, large);
    for (int m = 0; m < kPanelRows; ++m) {
      if (!is_large[m]) continue;
      const Split split = without_peak(rows[m], lanes[m], others[m]);
      if (!(lanes[m] * lanes[m] - split.next * split.next > min_gains[m])) continue;
      sinks[m].add(outlier(b, split));
      rows[m] = others[m];
      lanes[m] = split.next;
      taken[m] = split.x * kInputGain;
    }
    peaks = vld1q_f32(lanes);
    panel_.put(b, quantise_four_rows(rows, peaks, panel_.codes(b)));
    panel_.add_sums(b, vld1q_f32(taken));
  }
#else
  bool fills_four_rows(int) const { return false; }
  void fill_four_rows(const float*, int, const float*, OutlierSink*) const {}
#endif

 private:
  struct Split {
    int at;  // the input with the largest magnitude
    float x;
    float next;  // the largest magnitude of the others
  };

  // Copies a block with a zero in place of its largest input.
  Split without_peak(const float* inputs, float peak, float* others) const {
    const int block = panel_.block;
    const int at = block == 32 ? index_of<32>(peak, inputs) : index_of<16>(peak, inputs);
    std::memcpy(others, inputs, static_cast<size_t>(block) * sizeof(float));
    others[at] = 0.0f;
    return {at, inputs[at], peak_of_block(block, others)};
  }

  Outlier outlier(int b, const Split& split) const {
    return {b * panel_.block + split.at, panel_.group(b), split.x * panel_.input_gain};
  }

  const Weight& w_;
  const PanelSink panel_;
  const float* x_scales_;
  const int planes_;
};

}  // namespace

void fill_int_panel(const Weight& w, const IntSizes& sizes, const float* x, const float* x_scales,
                    int rows, int planes, uint8_t* memory, uint8_t* outliers) {
  const int num_blocks = padded_in(w) / block_size(w);
  const PanelFiller filler(w, sizes, x_scales, planes, memory);
  const size_t next_row = outlier_bytes(max_outliers(w)), width = static_cast<size_t>(w.num_in);
  const bool find_outliers = planes == 1 && outliers != nullptr && x_scales == nullptr;
  // Missing rows are zeros.
  std::memset(memory + sizes.codes, 0, 2 * sizes.blocks + sizes.groups);
  alignas(16) uint8_t unused[kCountBytes + sizeof(Outlier)];
  const auto sink_of = [&](int m) {
    return OutlierSink(outliers ? outliers + static_cast<size_t>(m) * next_row : unused);
  };
  const auto min_gain_of = [&](int m) {
    return find_outliers ? kOutlier * sum_of_squares(x + static_cast<size_t>(m) * width, w.num_in) / w.num_in
                         : INFINITY;
  };
  if (filler.fills_four_rows(rows)) {
    OutlierSink sinks[] = {sink_of(0), sink_of(1), sink_of(2), sink_of(3)};
    const float min_gains[] = {min_gain_of(0), min_gain_of(1), min_gain_of(2), min_gain_of(3)};
    for (int b = 0; b < num_blocks; ++b) filler.fill_four_rows(x, b, min_gains, sinks);
    return;
  }
  for (int m = 0; m < rows; ++m) {
    OutlierSink sink = sink_of(m);
    const float min_gain = min_gain_of(m);
    for (int b = 0; b < num_blocks; ++b) filler.fill(x + static_cast<size_t>(m) * width, m, b, min_gain, sink);
  }
}

size_t float_panel_bytes(const Weight& w) {
  return static_cast<size_t>(padded_in(w)) * kPanelRows * sizeof(float);
}

void fill_float_panel(const Weight& w, const float* x, int rows, uint8_t* memory) {
  float* out = reinterpret_cast<float*>(memory);
  std::memset(out, 0, float_panel_bytes(w));
  const float input_gain = has_f16(w) ? kInputGain : 1.0f;
  for (int k = 0; k < w.num_in; ++k) {
    const int from = w.perm == nullptr ? k : w.perm[k];
    for (int m = 0; m < rows; ++m) {
      out[k * kPanelRows + m] = x[static_cast<size_t>(m) * w.num_in + from] * input_gain;
    }
  }
}

namespace {

// Returns the nearest bfloat16, ties to even, and its value; NaN stays NaN, and numbers stay finite.
uint16_t nearest_bf16(float x, float& value) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool number = (bits & 0x7fffffff) <= 0x7f800000;
  const bool finite = (bits & 0x7f800000) != 0x7f800000;
  bits = number ? (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000 : 0x7fc00000;
  if (finite && (bits & 0x7f800000) == 0x7f800000) bits -= 0x10000;
  std::memcpy(&value, &bits, 4);
  return static_cast<uint16_t>(bits >> 16);
}

}  // namespace

size_t bf16_panel_bytes(const Weight& w) {
  return static_cast<size_t>(padded_in(w)) * kPanelRows * sizeof(uint16_t);
}

void fill_bf16_panel(const Weight& w, const float* x, int rows, uint8_t* memory) {
  uint16_t* out = reinterpret_cast<uint16_t*>(memory);
  std::memset(out, 0, bf16_panel_bytes(w));
  for (int m = 0; m < rows; ++m) {
    for (int k = 0; k < w.num_in; ++k) {
      const int from = w.perm == nullptr ? k : w.perm[k];
      const float input = x[static_cast<size_t>(m) * w.num_in + from];
      uint16_t* target = out + (k / kBf16Run * kPanelRows + 2 * m) * kBf16Run + k % kBf16Run;
      float near, residual;
      target[0] = nearest_bf16(input, near);
      // The residual of infinity is 0.
      target[kBf16Run] = nearest_bf16(std::isfinite(near) ? input - near : 0.0f, residual);
    }
  }
}

#if defined(WINDLASS_AMX)

namespace {

// Rounds 16 values to the nearest bfloat16; values beyond its range stay finite.
WINDLASS_INLINE __m256i round_16(__m512 x) {
  const __m512 largest = _mm512_castsi512_ps(_mm512_set1_epi32(0x7f7f0000));
  const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
  const __m512 low = _mm512_mask_min_ps(x, finite, x, largest);
  return (__m256i)_mm512_cvtneps_pbh(_mm512_mask_max_ps(x, finite, low, -largest));
}

}  // namespace

void fill_amx_panel(const Weight& w, const float* x, int rows, int planes, int index, uint8_t* memory) {
  constexpr int wide = 32;
  uint16_t* out = reinterpret_cast<uint16_t*>(memory) + index * kPanelRows * wide;
  const int padded = amx_inputs(w);
  for (int m = 0; m < rows; ++m, x += w.num_in, out += planes * wide) {
    for (int k = 0; k < padded; k += wide) {
      float scratch[wide];
      const float* from = inputs_of(w, x, k, wide, scratch);
      for (int i = 0; i < wide; i += 16) {
        uint16_t* const to = out + k * kAmxRows + i;
        const __m512 input = _mm512_loadu_ps(from + i);
        const __m256i near = round_16(input);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), near);
        if (planes == 1) continue;
        const __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(near), 16));
        // The residual of NaN and infinity is 0.
        const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(value), _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
        const __m256i residual = round_16(_mm512_maskz_sub_ps(finite, input, value));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + wide), residual);
      }
    }
  }
}

#else

void fill_amx_panel(const Weight&, const float*, int, int, int, uint8_t*) {}

#endif

}  // namespace windlass
