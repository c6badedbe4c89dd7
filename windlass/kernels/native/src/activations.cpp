// Activation functions: SiLU, GELU, and gates made of them.

#include "activations.h"

#include "row_vectors.h"
#include "run.h"

namespace windlass {

namespace {

// Returns x * sigmoid(u). The exponential takes fewer operations than that of vector_math.h:
// relative error 1e-7, plus 2e-8 per unit of u.
WINDLASS_INLINE F32x8 times_sigmoid(F32x8 g, F32x8 u) {
  // exp2_int covers n from -127 (exp(x) = 0) to 128 (exp(x) = infinity).
  const F32x8 x = clamp_min(sub(zero(), clamp_min(u, splat(-89.0f))), splat(-88.0f));
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const F32x8 magic = splat(12582912.0f), bits = splat(1.44269504f);
  const F32x8 shifted = fma(magic, x, bits);
  const F32x8 r = fma(sub(magic, shifted), x, bits);
  F32x8 p = fma(splat(1.3399931e-3f), splat(1.5345812e-4f), r);
  p = fma(splat(9.618489e-3f), p, r);
  p = fma(splat(5.5503286e-2f), p, r);
  p = fma(splat(2.4022646e-1f), p, r);
  p = fma(splat(6.931472e-1f), p, r);
  p = fma(splat(1.0f), p, r);
  return divide(g, fma(splat(1.0f), p, exp2_int(shifted)));
}

WINDLASS_INLINE F32x8 silu(F32x8 x) { return times_sigmoid(x, x); }

// 0.5 * (1 + tanh(u)) is sigmoid(2 * u).
WINDLASS_INLINE F32x8 gelu_tanh(F32x8 x) {
  const F32x8 cubic = mul(mul(mul(x, x), x), splat(0.0713548163f));
  return times_sigmoid(x, fma(cubic, x, splat(1.59576912f)));
}

// NaN stays NaN.
WINDLASS_INLINE F32x8 clamp_max(F32x8 x, float bound) {
  return sub(zero(), clamp_min(sub(zero(), x), splat(-bound)));
}

// Two vectors at a time: each is a long dependency chain.
template <class Function>
inline void each_gate(const float* gates, const float* up, int width, float* out,
                      const Function& function) {
  int i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    const F32x8 first = function(load(gates + i), load(up + i));
    const F32x8 second = function(load(gates + i + kLanes), load(up + i + kLanes));
    store(out + i, first);
    store(out + i + kLanes, second);
  }
  each_vector(width - i, [&](int k, int count) {
    const F32x8 some = function(load_tail(gates + i + k, count), load_tail(up + i + k, count));
    store_tail(out + i + k, some, count);
  });
}

}  // namespace

void silu_mul(const float* gates, const float* up, int width, float* out) {
  each_gate(gates, up, width, out,
            [](F32x8 g, F32x8 u) WINDLASS_INLINED { return mul(silu(g), u); });
}

void gated(const GateFunction& function, const float* gates, const float* up, int width,
           float* out) {
  if (function.kind == kGateSilu) return silu_mul(gates, up, width, out);
  if (function.kind == kGateGeluTanh) {
    return each_gate(gates, up, width, out,
                     [](F32x8 g, F32x8 u) WINDLASS_INLINED { return mul(gelu_tanh(g), u); });
  }
  const float limit = function.limit;
  const F32x8 alpha = splat(function.alpha);
  each_gate(gates, up, width, out, [&](F32x8 g, F32x8 u) WINDLASS_INLINED {
    const F32x8 gate = clamp_max(g, limit);
    const F32x8 linear = clamp_min(clamp_max(u, limit), splat(-limit));
    return mul(times_sigmoid(gate, mul(gate, alpha)), add(linear, splat(1.0f)));
  });
}

bool run_silu_mul(const Run& run) {
  const int width = run.size(0);
  run.each_row(8 * width, [&](int row) {
    const float* x = row_of(run.step_tensor(0), row, 2 * width);
    silu_mul(x, x + width, width, row_of(run.step_tensor(1), row, width));
  });
  return true;
}

}  // namespace windlass
