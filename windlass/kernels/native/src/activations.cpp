// Activation functions, gates made of them, and other element-wise operations.

#include "activations.h"

#include <algorithm>
#include <cmath>

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
  static constexpr Addend magic(12582912.0f), one(1.0f);
  static constexpr Addend coefficients[] = {Addend(1.3399931e-3f), Addend(9.618489e-3f), Addend(5.5503286e-2f),
                                            Addend(2.4022646e-1f), Addend(6.931472e-1f), one};
  const F32x8 bits = splat(1.44269504f), shifted = fma(magic, x, bits);
  const F32x8 r = fma(sub(splat(12582912.0f), shifted), x, bits);
  F32x8 p = splat(1.5345812e-4f);
  for (const Addend& coefficient : coefficients) p = fma(coefficient, p, r);
  return divide(g, fma(one, p, exp2_int(shifted)));
}

WINDLASS_INLINE F32x8 silu(F32x8 x) { return times_sigmoid(x, x); }

// 0.5 * (1 + tanh(u)) is sigmoid(2 * u).
WINDLASS_INLINE F32x8 gelu_tanh(F32x8 x) {
  const F32x8 cubic = mul(mul(mul(x, x), x), splat(0.0713548163f));
  return times_sigmoid(x, fma(cubic, x, splat(1.59576912f)));
}

// x * Phi(x) = max(x, 0) - |x| * Phi(-|x|). The tail Phi(-a) is exp(-a^2 / 2) times a polynomial in
// 1 / (1 + 0.35 a), fitted to a relative error of 4e-8. Results for -infinity are 0.
WINDLASS_INLINE F32x8 gelu(F32x8 x) {
  // Beyond 14 the exponential is 0.
  const F32x8 a = sub(zero(), clamp_min(sub(zero(), absolute(x)), splat(-14.0f)));
  const F32x8 t = divide(splat(1.0f), fma(splat(1.0f), a, splat(0.35f)));
  F32x8 p = fma(splat(1.439773572e-1f), splat(-2.914721623e-2f), t);
  p = fma(splat(-2.557245837e-1f), p, t);
  p = fma(splat(1.591842517e-1f), p, t);
  p = fma(splat(-2.311550484e-2f), p, t);
  p = fma(splat(1.055098244e-1f), p, t);
  p = fma(splat(1.198325610e-1f), p, t);
  p = fma(splat(1.398618902e-1f), p, t);
  p = fma(splat(1.396214043e-1f), p, t);
  const F32x8 tail = mul(mul(p, t), exponential(mul(mul(a, a), splat(-0.5f))));
  return sub(clamp_min(x, zero()), mul(a, tail));
}

WINDLASS_INLINE F32x8 relu2(F32x8 x) {
  const F32x8 positive = clamp_min(x, zero());
  return mul(positive, positive);
}

// NaN stays NaN.
WINDLASS_INLINE F32x8 clamp_max(F32x8 x, float bound) {
  return sub(zero(), clamp_min(sub(zero(), x), splat(-bound)));
}

// Applies a function to all values of the command's rows.
template <class Function>
bool map_rows(const Run& run, const Function& function) {
  const int width = run.size(0);
  run.each_row(4 * width, [&](int row) {
    const float* x = row_of(run.step_tensor(0), row, width);
    float* out = row_of(run.step_tensor(1), row, width);
    each_vector(width, [&](int i, int count) WINDLASS_INLINED {
      store_tail(out + i, function(load_tail(x + i, count)), count);
    });
  });
  return true;
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
  if (function.kind == kGateRelu2) {
    return each_gate(gates, up, width, out, [](F32x8, F32x8 u) WINDLASS_INLINED { return relu2(u); });
  }
  const float limit = function.limit;
  const F32x8 alpha = splat(function.alpha);
  each_gate(gates, up, width, out, [&](F32x8 g, F32x8 u) WINDLASS_INLINED {
    const F32x8 gate = clamp_max(g, limit);
    const F32x8 linear = clamp_min(clamp_max(u, limit), splat(-limit));
    return mul(times_sigmoid(gate, mul(gate, alpha)), add(linear, splat(1.0f)));
  });
}

namespace {

bool gate_rows(const Run& run, const GateFunction& function) {
  const int width = run.size(0);
  run.each_row(8 * width, [&](int row) {
    const float* x = row_of(run.step_tensor(0), row, 2 * width);
    gated(function, x, x + width, width, row_of(run.step_tensor(1), row, width));
  });
  return true;
}

}  // namespace

bool run_silu_mul(const Run& run) { return gate_rows(run, {kGateSilu, 0.0f, 0.0f}); }

bool run_gelu_mul(const Run& run) { return gate_rows(run, {kGateGeluTanh, 0.0f, 0.0f}); }

bool run_map(const Run& run) {
  const float constant = run.command.scalars[0];
  switch (run.size(1)) {
    case kMapGelu:
      return map_rows(run, [](F32x8 x) WINDLASS_INLINED { return gelu(x); });
    case kMapGeluTanh:
      return map_rows(run, [](F32x8 x) WINDLASS_INLINED { return gelu_tanh(x); });
    case kMapRelu2:
      return map_rows(run, [](F32x8 x) WINDLASS_INLINED { return relu2(x); });
    case kMapSilu:
      return map_rows(run, [](F32x8 x) WINDLASS_INLINED { return silu(x); });
    case kMapScale:
      return map_rows(run, [&](F32x8 x) WINDLASS_INLINED { return mul(x, splat(constant)); });
    case kMapSoftCap:
      return map_rows(run, [&](F32x8 x) WINDLASS_INLINED {
        return mul(hyperbolic_tangent(divide(x, splat(constant))), splat(constant));
      });
    default:
      return false;
  }
}

bool run_add(const Run& run) {
  const int width = run.size(0);
  run.each_row(2 * width, [&](int row) {
    const float *x = row_of(run.step_tensor(0), row, width),
                *y = row_of(run.step_tensor(1), row, width);
    float* out = row_of(run.step_tensor(2), row, width);
    for (int i = 0; i < width; ++i) out[i] = x[i] + y[i];
  });
  return true;
}

bool run_sigmoid_gate(const Run& run) {
  const int width = run.size(0), gates = run.size(1);
  const bool largest = run.size(2) != 0;
  run.each_row(2 * width, [&](int row) {
    const float* x = row_of(run.step_tensor(0), row, width);
    float* out = row_of(run.step_tensor(2), row, width);
    const float* own = row_of(run.step_tensor(1), row, gates);
    if (gates == 1 || largest) {
      const F32x8 gate = times_sigmoid(splat(1.0f), splat(*std::max_element(own, own + gates)));
      each_vector(width, [&](int i, int count) WINDLASS_INLINED {
        store_tail(out + i, mul(load_tail(x + i, count), gate), count);
      });
      return;
    }
    each_vector(width, [&](int i, int count) WINDLASS_INLINED {
      store_tail(out + i, times_sigmoid(load_tail(x + i, count), load_tail(own + i, count)), count);
    });
  });
  return true;
}

// x times some columns of y.
bool run_mul_columns(const Run& run) {
  const int width = run.size(0), stride = run.size(1), first = run.size(2);
  run.each_row(2 * width, [&](int row) {
    const float *x = row_of(run.step_tensor(0), row, width),
                *y = row_of(run.step_tensor(1), row, stride) + first;
    float* out = row_of(run.step_tensor(2), row, width);
    for (int i = 0; i < width; ++i) out[i] = x[i] * y[i];
  });
  return true;
}

bool run_split_gates(const Run& run) {
  const int heads = run.size(0), dim = run.size(1), rest = run.size(2), inner = heads * dim;
  const auto bytes = [](int count) { return static_cast<size_t>(count) * 4; };
  run.each_row(2 * inner + rest, [&](int row) {
    const float* x = row_of(run.step_tensor(0), row, 2 * inner + rest);
    float *out = row_of(run.step_tensor(1), row, inner + rest),
          *gates = row_of(run.step_tensor(2), row, inner);
    for (int head = 0; head < heads; ++head) {
      std::memcpy(out + head * dim, x + 2 * head * dim, bytes(dim));
      std::memcpy(gates + head * dim, x + (2 * head + 1) * dim, bytes(dim));
    }
    std::memcpy(out + inner, x + 2 * inner, bytes(rest));
  });
  return true;
}

bool run_sparse_mixer(const Run& run) {
  const int width = run.size(0);
  const float jitter = run.command.scalars[0], limit = run.command.scalars[1];
  run.each_row(4 * width, [&](int row) {
    const float* scores = row_of(run.step_tensor(0), row, width);
    float* out = row_of(run.step_tensor(1), row, width);
    std::fill(out, out + width, -limit);
    int first = -1;
    for (int turn = 0; turn < 2; ++turn) {
      int best = first == 0 ? 1 : 0;
      for (int i = best + 1; i < width; ++i) {
        if (i != first && scores[i] > scores[best]) best = i;
      }
      const float top = scores[best];
      float rest = 0.0f;  // the other candidates' share, relative to the chosen expert's
      for (int i = 0; i < width; ++i) {
        const float scale = std::max(std::fabs(scores[i]), top);
        const bool far = (top - scores[i]) / scale > 2.0f * jitter;
        if (i != best && i != first && !far) rest += std::exp(scores[i] - top);
      }
      out[best] = std::min(-std::log(rest), limit);
      first = best;
    }
  });
  return true;
}

}  // namespace windlass
