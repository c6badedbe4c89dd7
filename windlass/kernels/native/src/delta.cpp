// The gated delta rule, and the norm and the gate of its outputs.

#include "recurrent.h"

namespace windlass {

namespace {

constexpr int kMaxKey = 256;
constexpr float kUnitEps = 1e-6f;

struct Delta {
  int heads, dim, groups, state_size, width;
  bool tiled;
  float eps;
  const float* x;  // outputs of the projection: gate, ..., beta, dt
  const float* mixed;  // outputs of the convolution: values, keys, queries
  const float* decay;
  const float* dt_bias;
  const float* norm;
  float* out;

  int inner() const { return heads * dim; }
  int channels() const { return inner() + 2 * groups * state_size; }
  int group_of(int head) const { return tiled ? head % groups : head / (heads / groups); }
};

// What the tokens of a tile have for all rows of a head's state.
struct Tokens {
  float beta[kStateTile], decay[kStateTile];
  float keys[kStateTile][kMaxKey], queries[kStateTile][kMaxKey];
};

// out = x / |x| * scale
void unit(const float* x, int count, float scale, float* out) {
  const float factor = scale / std::sqrt(sum_of_squares(x, count) + kUnitEps);
  for (int i = 0; i < count; ++i) out[i] = x[i] * factor;
}

void read_tokens(const Delta& d, int head, int token, int count, Tokens& tokens) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(d.state_size));
  for (int t = 0; t < count; ++t) {
    const float* own = row_of(d.x, token + t, d.width) + d.width - 2 * d.heads + head;
    tokens.beta[t] = 1.0f / (1.0f + std::exp(-own[0]));
    tokens.decay[t] = std::exp(softplus(own[d.heads] + d.dt_bias[head]) * d.decay[head]);
    const float* key = row_of(d.mixed, token + t, d.channels()) + d.inner() + d.group_of(head) * d.state_size;
    unit(key, d.state_size, 1.0f, tokens.keys[t]);
    unit(key + d.groups * d.state_size, d.state_size, scale, tokens.queries[t]);
  }
}

// Rows of a state times a key.
WINDLASS_INLINE void recall(const float* state, int state_size, const float* key, float* values) {
  F32x8 sums[kStateRows];
  for (F32x8& sum : sums) sum = zero();
  for (int n = 0; n < state_size; n += kLanes) {
    const F32x8 k = load(key + n);
    for (int i = 0; i < kStateRows; ++i) sums[i] = fma(sums[i], load(state + i * state_size + n), k);
  }
  store_sums4(values, sums[0], sums[1], sums[2], sums[3]);
}

// Updates rows of a state with one token, and writes their products with its query, and with the next key
// as `recall` does: a state is read once per token.
WINDLASS_INLINE void update(float* state, int state_size, float decay, const float* added,
                            const float* key, const float* query, const float* next_key, float* y,
                            float* values) {
  const F32x8 shrink = splat(decay);
  F32x8 sums[kStateRows], recalled[kStateRows], scaled[kStateRows];
  for (int i = 0; i < kStateRows; ++i) {
    sums[i] = recalled[i] = zero();
    scaled[i] = splat(added[i]);
  }
  for (int n = 0; n < state_size; n += kLanes) {
    const F32x8 k = load(key + n), q = load(query + n), next = load(next_key + n);
    for (int i = 0; i < kStateRows; ++i) {
      float* at = state + i * state_size + n;
      const F32x8 value = fma(mul(load(at), shrink), scaled[i], k);
      store(at, value);
      sums[i] = fma(sums[i], value, q);
      recalled[i] = fma(recalled[i], value, next);
    }
  }
  store_sums4(y, sums[0], sums[1], sums[2], sums[3]);
  store_sums4(values, recalled[0], recalled[1], recalled[2], recalled[3]);
}

// Computes `count` tokens from `token` on, of one head, whose state is in one page.
void delta_tile(const Delta& d, int head, int token, int count, float* state) {
  Tokens tokens;
  read_tokens(d, head, token, count, tokens);
  const auto out_of = [&](int t) { return row_of(d.out, token + t, d.inner()) + head * d.dim; };
  for (int row = 0; row < d.dim; row += kStateRows) {
    float* rows = state + row * d.state_size;
    float known[kStateRows];
    recall(rows, d.state_size, tokens.keys[0], known);
    for (int t = 0; t < count; ++t) {
      const float* v = row_of(d.mixed, token + t, d.channels()) + head * d.dim + row;
      const float beta = tokens.beta[t], decay = tokens.decay[t];
      float added[kStateRows];
      for (int i = 0; i < kStateRows; ++i) added[i] = beta * (v[i] - decay * known[i]);
      const float* next_key = tokens.keys[t + 1 < count ? t + 1 : t];
      update(rows, d.state_size, decay, added, tokens.keys[t], tokens.queries[t], next_key,
             out_of(t) + row, known);
    }
  }
  for (int t = 0; t < count; ++t) {
    rms_norm(out_of(t), d.norm, d.dim, d.eps, out_of(t));
    silu_mul(row_of(d.x, token + t, d.width) + head * d.dim, out_of(t), d.dim, out_of(t));
  }
}

}  // namespace

bool run_delta_rule(const Run& run) {
  const Delta delta{run.size(0),
                    run.size(1),
                    run.size(2),
                    run.size(3),
                    run.size(4),
                    run.size(8) != 0,
                    run.command.scalars[0],
                    run.step_tensor(0),
                    run.step_tensor(1),
                    run.model_tensor<float>(0),
                    run.model_tensor<float>(1),
                    run.model_tensor<float>(2),
                    run.step_tensor(2)};
  const States states = states_of(run, 3, 5);
  const auto size = static_cast<size_t>(delta.dim * delta.state_size);
  each_head(run, delta.heads, [&](const WindlassRow& row, int head) {
    follow(row, states, static_cast<size_t>(head) * size, size, [&](int token, int count, float* state) {
      delta_tile(delta, head, token, count, state);
    });
  });
  return true;
}

}  // namespace windlass
