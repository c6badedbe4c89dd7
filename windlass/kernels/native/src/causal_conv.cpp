// The causal convolution before the recurrence of a layer, and the gated one of layers without a recurrence.

#include "recurrent.h"

namespace windlass {

namespace {

constexpr int kChannels = 64;  // that one task computes
constexpr int kMaxConv = 8;

// The channels of one task.
struct Convolution {
  const float* weight;  // [channels][size]
  const float* bias;  // or null
  int size;  // tokens that an output depends on
  int count;  // channels
};

// Computes the channels of all tokens of a row, and writes their states: [channels][size - 1].
// read(token) returns a token's inputs, valid for `size` tokens; finish(token, mixed) gets the outputs.
template <class Read, class Finish>
WINDLASS_INLINE void convolve(const Convolution& c, const WindlassRow& row, const States& states,
                              size_t state_at, const Read& read, const Finish& finish) {
  float before[kMaxConv][kChannels], weights[kMaxConv][kChannels], bias[kChannels];
  const int known = c.size - 1;
  const float* state = row.start > 0 ? states.at(row, row.start - 1) + state_at : nullptr;
  for (int i = 0; i < c.count; ++i) {
    bias[i] = c.bias != nullptr ? c.bias[i] : 0.0f;
    for (int k = 0; k < c.size; ++k) weights[k][i] = c.weight[i * c.size + k];
    for (int k = 0; k < known; ++k) before[k][i] = state != nullptr ? state[i * known + k] : 0.0f;
  }
  const float* inputs[kMaxConv];  // of the last tokens; those before the row come from the state
  for (int k = 0; k < known; ++k) inputs[k] = before[k];
  for (int token = 0; token < row.count; ++token) {
    inputs[known] = read(token);
    float mixed[kChannels];
    for (int i = 0; i < c.count; i += kLanes) {
      F32x8 sum = load(bias + i);
      for (int k = 0; k < c.size; ++k) sum = fma(sum, load(inputs[k] + i), load(weights[k] + i));
      store(mixed + i, sum);
    }
    finish(token, mixed);
    std::copy(inputs + 1, inputs + c.size, inputs);
    const int position = row.start + token;
    if (states.piece_end(row, position) != position + 1) continue;
    float* kept = states.at(row, position) + state_at;
    for (int k = 0; k < known; ++k) {
      for (int i = 0; i < c.count; ++i) kept[i * known + k] = inputs[k][i];
    }
  }
}

// Calls body(row, first channel, convolution) for the channels of all rows, on all threads.
template <class Body>
WINDLASS_INLINE void each_part(const Run& run, int channels, int size, const Body& body) {
  const int tasks = (channels + kChannels - 1) / kChannels;
  const float* weight = run.model_tensor<float>(0);
  const float* bias = run.model_tensor<float>(1);
  run.pool.each(run.step.num_rows * tasks, 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const int channel = i % tasks * kChannels;
      body(run.step.rows[i / tasks], channel,
           Convolution{weight + channel * size, bias != nullptr ? bias + channel : nullptr, size,
                       std::min(kChannels, channels - channel)});
    }
  });
}

}  // namespace

bool run_causal_conv(const Run& run) {
  const int first = run.size(0), channels = run.size(1), size = run.size(2), width = run.size(3);
  const States states = states_of(run, 2, 4);
  const auto state_at = static_cast<size_t>(run.size(7));
  float ones[kChannels];
  std::fill(ones, ones + kChannels, 1.0f);
  each_part(run, channels, size, [&](const WindlassRow& row, int channel, const Convolution& c) {
    const float* x = row_of(run.step_tensor(0), row.first, width) + first + channel;
    float* out = row_of(run.step_tensor(1), row.first, channels) + channel;
    convolve(
        c, row, states, state_at + static_cast<size_t>(channel * (size - 1)),
        [&](int token) { return row_of(x, token, width); },
        [&](int token, const float* mixed) {
          silu_mul(mixed, ones, c.count, row_of(out, token, channels));
        });
  });
  return true;
}

bool run_short_conv(const Run& run) {
  const int channels = run.size(0), size = run.size(1), width = 3 * channels;
  const States states = states_of(run, 2, 2);
  each_part(run, channels, size, [&](const WindlassRow& row, int channel, const Convolution& c) {
    const float* b = row_of(run.step_tensor(0), row.first, width) + channel;
    const float* gate = b + channels;
    const float* x = gate + channels;
    float* out = row_of(run.step_tensor(1), row.first, channels) + channel;
    float inputs[kMaxConv][kChannels];
    const auto multiply = [&](const float* one, const float* other, float* product) {
      for (int i = 0; i < c.count; i += kLanes) store(product + i, mul(load(one + i), load(other + i)));
    };
    convolve(
        c, row, states, static_cast<size_t>(channel * (size - 1)),
        [&](int token) {
          float* product = inputs[token % kMaxConv];
          multiply(row_of(b, token, width), row_of(x, token, width), product);
          return static_cast<const float*>(product);
        },
        [&](int token, const float* mixed) {
          multiply(mixed, row_of(gate, token, width), row_of(out, token, channels));
        });
  });
  return true;
}

}  // namespace windlass
