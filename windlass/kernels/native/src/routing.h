// Chooses the experts of a token, and their weights.

#pragma once

#include "experts.h"

namespace windlass {

constexpr int kMaxExperts = 1024;

// Writes top_k experts and their weights. The choice is valid for any logits: NaN counts as the
// largest.
void route(const WindlassExperts& experts, const float* logits, int32_t* chosen, float* weights);

}  // namespace windlass
