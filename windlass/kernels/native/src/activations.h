// Activation functions of rows.

#pragma once

#include <cstdint>

namespace windlass {

// Functions of a gate and an up output. Clamped: gate * sigmoid(alpha * gate) * (up + 1), with gate
// limited to `limit` from above and up to [-limit, limit].
enum Gate : int32_t { kGateSilu = 0, kGateGeluTanh, kGateClamped };

struct GateFunction {
  Gate kind;
  float alpha, limit;
};

// `out` may be `gates`.
void gated(const GateFunction& function, const float* gates, const float* up, int width, float* out);

}  // namespace windlass
