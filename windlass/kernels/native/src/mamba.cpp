// Mamba-2: the selective scan.

#include "recurrent.h"

namespace windlass {

namespace {

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
  float decay[kStateTile], dt[kStateTile];
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

}  // namespace

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
  const auto size = static_cast<size_t>(scan.dim * scan.state_size);
  each_head(run, scan.heads, [&](const WindlassRow& row, int head) {
    follow(row, states, static_cast<size_t>(head) * size, size, [&](int token, int count, float* state) {
      scan_tile(scan, head, token, count, state);
    });
  });
  return true;
}

}  // namespace windlass
