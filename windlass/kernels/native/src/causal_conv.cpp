// The causal convolution before the recurrence of a layer.

#include "recurrent.h"

namespace windlass {

namespace {

constexpr int kChannels = 64;  // that one task computes
constexpr int kMaxConv = 8;

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

}  // namespace windlass
