// Activation functions of rows.

#pragma once

#include <cstdint>

namespace windlass {

// Functions of a gate and an up output. Clamped: gate * sigmoid(alpha * gate) * (up + 1), with gate
// limited to `limit` from above and up to [-limit, limit]. Relu2: the square of
// max(up, 0), whatever the gate.
enum Gate : int32_t { kGateSilu = 0, kGateGeluTanh, kGateClamped, kGateRelu2 };

struct GateFunction {
  Gate kind;
  float alpha, limit;
};

// `out` may be `gates`.
void gated(const GateFunction& function, const float* gates, const float* up, int width, float* out);

}  // namespace windlass
