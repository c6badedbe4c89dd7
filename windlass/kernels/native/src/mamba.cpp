// Mamba-2: the causal convolution and the selective scan, over states in pages.
//
// A state is updated where it is kept, in the page of the block that a token is in; at the start of a
// block it is copied from the page before. So the page of every full block has the state at its end.
// Tokens are computed in order, so results do not depend on how a prompt is cut into steps.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "run.h"
#include "vector_math.h"

namespace windlass {

namespace {

constexpr int kChannels = 64;  // of the convolution, that one task computes
constexpr int kMaxConv = 8;
constexpr int kTile = 16;  // tokens whose B and C stay in the first-level cache
constexpr int kStateRows = 4;  // that are updated together

// The pages of one layer: where a row's state is at some position.
struct States {
  float* pages;
  int page_size;  // positions
  size_t table;  // offset of the layer's block tables
  size_t stride;  // floats from one page to the next
  const WindlassStep& step;

  float* at(const WindlassRow& row, int position) const {
    const size_t line = table + static_cast<size_t>(row.slot) * static_cast<size_t>(step.table_stride);
    const int block = step.tables[line + static_cast<size_t>(position / page_size)];
    return pages + static_cast<size_t>(block) * stride;
  }

  // The position after `position` where its block ends, or the row.
  int piece_end(const WindlassRow& row, int position) const {
    return std::min(row.start + row.count, (position / page_size + 1) * page_size);
  }
};

States states_of(const Run& run, int tensor, int size) {
  return {static_cast<float*>(const_cast<void*>(run.command.model_tensors[tensor])), run.size(size),
          static_cast<size_t>(run.size(size + 1)), static_cast<size_t>(run.size(size + 2)), run.step};
}

struct Convolution {
  const float* x;  // of the first channel, in the first token of the row
  int width;  // floats from one token to the next
  const float* weight;  // [channels][size]
  const float* bias;  // or null
  int size;  // tokens that an output depends on
};

// Writes `count` channels of all tokens of a row, and their states: [channels][size - 1].
void convolve(const Convolution& c, const WindlassRow& row, const States& states, size_t state_at,
              int count, float* out, int out_width) {
  float ones[kChannels], before[kMaxConv][kChannels], weights[kMaxConv][kChannels], bias[kChannels];
  const int known = c.size - 1;
  const float* state = row.start > 0 ? states.at(row, row.start - 1) + state_at : nullptr;
  for (int i = 0; i < count; ++i) {
    ones[i] = 1.0f;
    bias[i] = c.bias != nullptr ? c.bias[i] : 0.0f;
    for (int k = 0; k < c.size; ++k) weights[k][i] = c.weight[i * c.size + k];
    for (int k = 0; k < known; ++k) before[k][i] = state != nullptr ? state[i * known + k] : 0.0f;
  }
  // Inputs by token; those before the row come from the state.
  const auto input = [&](int token) {
    return token < 0 ? before[token + known] : row_of(c.x, token, c.width);
  };
  for (int token = 0; token < row.count; ++token) {
    float mixed[kChannels];
    for (int i = 0; i < count; i += kLanes) {
      F32x8 sum = load(bias + i);
      for (int k = 0; k < c.size; ++k) {
        sum = fma(sum, load(input(token + k - known) + i), load(weights[k] + i));
      }
      store(mixed + i, sum);
    }
    silu_mul(mixed, ones, count, row_of(out, token, out_width));
    const int position = row.start + token;
    if (states.piece_end(row, position) != position + 1) continue;
    float* kept = states.at(row, position) + state_at;
    for (int k = 0; k < known; ++k) {
      const float* last = input(token + 1 + k - known);
      for (int i = 0; i < count; ++i) kept[i * known + k] = last[i];
    }
  }
}

struct Scan {
  int heads, dim, groups, state_size, width;
  const float* x;  // outputs of the projection: gate, ..., dt
  const float* mixed;  // outputs of the convolution: inputs of the heads, B, C
  const float* decay;
  const float* skip;
  const float* dt_bias;
  float* out;

  int inner() const { return heads * dim; }
  int channels() const { return inner() + 2 * groups * state_size; }
};

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Updates rows of a head's state with one token, and writes their products with C.
WINDLASS_INLINE void update(float* state, int state_size, float decay, const float* inputs,
                            const float* b, const float* c, float* y) {
  const F32x8 shrink = splat(decay);
  F32x8 sums[kStateRows], scaled[kStateRows];
  for (int i = 0; i < kStateRows; ++i) {
    sums[i] = zero();
    scaled[i] = splat(inputs[i]);
  }
  for (int n = 0; n < state_size; n += kLanes) {
    const F32x8 own = load(b + n), read = load(c + n);
    for (int i = 0; i < kStateRows; ++i) {
      float* at = state + i * state_size + n;
      const F32x8 value = fma(mul(load(at), shrink), scaled[i], own);
      store(at, value);
      sums[i] = fma(sums[i], value, read);
    }
  }
  store_sums4(y, sums[0], sums[1], sums[2], sums[3]);
}

// Computes `count` tokens from `token` on, of one head, whose state is in one page.
void scan_tile(const Scan& s, int head, int token, int count, float* state) {
  float decay[kTile], dt[kTile];
  const int group = head / (s.heads / s.groups);
  for (int t = 0; t < count; ++t) {
    const float raw = row_of(s.x, token + t, s.width)[s.width - s.heads + head];
    dt[t] = softplus(raw + s.dt_bias[head]);
    decay[t] = std::exp(dt[t] * s.decay[head]);
  }
  for (int d = 0; d < s.dim; d += kStateRows) {
    for (int t = 0; t < count; ++t) {
      const float* mixed = row_of(s.mixed, token + t, s.channels());
      const float* x = mixed + head * s.dim + d;
      const float* b = mixed + s.inner() + group * s.state_size;
      float inputs[kStateRows], y[kStateRows];
      for (int i = 0; i < kStateRows; ++i) inputs[i] = x[i] * dt[t];
      update(state + d * s.state_size, s.state_size, decay[t], inputs, b,
             b + s.groups * s.state_size, y);
      float* out = row_of(s.out, token + t, s.inner()) + head * s.dim + d;
      for (int i = 0; i < kStateRows; ++i) out[i] = y[i] + s.skip[head] * x[i];
    }
  }
  for (int t = 0; t < count; ++t) {
    float* out = row_of(s.out, token + t, s.inner()) + head * s.dim;
    silu_mul(row_of(s.x, token + t, s.width) + head * s.dim, out, s.dim, out);
  }
}

void scan_row(const Scan& s, const WindlassRow& row, const States& states, int head) {
  const auto head_size = static_cast<size_t>(s.dim * s.state_size);
  const size_t state_at = static_cast<size_t>(head) * head_size;
  const int end = row.start + row.count;
  for (int begin = row.start; begin < end;) {
    const int stop = states.piece_end(row, begin);
    float* state = states.at(row, begin) + state_at;
    if (begin == 0) {
      std::memset(state, 0, head_size * 4);
    } else if (begin % states.page_size == 0) {
      std::memcpy(state, states.at(row, begin - 1) + state_at, head_size * 4);
    }
    for (; begin < stop; begin += std::min(kTile, stop - begin)) {
      const int token = row.first + begin - row.start;
      scan_tile(s, head, token, std::min(kTile, stop - begin), state);
    }
  }
}

}  // namespace

bool run_causal_conv(const Run& run) {
  const int first = run.size(0), channels = run.size(1), width = run.size(3);
  const States states = states_of(run, 2, 4);
  const auto state_at = static_cast<size_t>(run.size(7));
  const int tasks = (channels + kChannels - 1) / kChannels;
  run.pool.each(run.step.num_rows * tasks, 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const WindlassRow& row = run.step.rows[i / tasks];
      const int channel = i % tasks * kChannels, size = run.size(2);
      const float* bias = run.model_tensor<float>(1);
      const Convolution c{row_of(run.step_tensor(0), row.first, width) + first + channel, width,
                          run.model_tensor<float>(0) + channel * size,
                          bias != nullptr ? bias + channel : nullptr, size};
      convolve(c, row, states, state_at + static_cast<size_t>(channel * (size - 1)),
               std::min(kChannels, channels - channel),
               row_of(run.step_tensor(1), row.first, channels) + channel, channels);
    }
  });
  return true;
}

bool run_selective_scan(const Run& run) {
  const Scan scan{run.size(0),
                  run.size(1),
                  run.size(2),
                  run.size(3),
                  run.size(4),
                  run.step_tensor(0),
                  run.step_tensor(1),
                  run.model_tensor<float>(0),
                  run.model_tensor<float>(1),
                  run.model_tensor<float>(2),
                  run.step_tensor(2)};
  const States states = states_of(run, 3, 5);
  run.pool.each(run.step.num_rows * scan.heads, 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      scan_row(scan, run.step.rows[i / scan.heads], states, i % scan.heads);
    }
  });
  return true;
}

}  // namespace windlass
