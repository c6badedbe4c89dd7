// The experts of one layer. native/experts.py mirrors this struct field by field.

#pragma once

#include "weight.h"

struct WindlassExperts {
  // Expert e has rows [e * n, (e + 1) * n) of each weight, a whole number of tiles.
  const WindlassWeight* gate_up;
  const WindlassWeight* down;
  const float* gate_up_bias;  // [experts][2 * inner], or null
  const float* down_bias;  // [experts][hidden], or null
  const float* correction_bias;  // [experts], or null: added to scores for the choice only
  // Where `quantised` is set, inputs are quantised to int8 by their own scale, or by the given one.
  const float* gate_up_input_scale;
  const float* down_input_scale;
  int32_t gate_up_quantised, down_quantised;
  int32_t num_experts, top_k;
  int32_t sigmoid;  // scores; else softmax
  int32_t normalised;
  int32_t num_groups, top_groups;
  int32_t top2;  // a group's score is the sum of its best two, else its maximum
  int32_t activation;  // Activation of activations.h
  int32_t interleaved;  // outputs of gate_up alternate: gate, up, gate, ...
  float scale, alpha, limit;
};
