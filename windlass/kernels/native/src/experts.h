// The experts of one layer. native/experts.py mirrors this struct field by field.

#pragma once

#include "weight.h"

struct WindlassExperts {
  // The expert at index i has rows [i * n, (i + 1) * n) of each weight, a whole number of tiles.
  const WindlassWeight* gate_up;
  const WindlassWeight* down;
  const float* gate_up_bias;  // [local experts][outputs of gate_up], or null
  const float* down_bias;  // [local experts][hidden], or null
  const float* correction_bias;  // [experts], or null: added to scores for the choice only
  const float* expert_scales;  // [experts], or null: of the weights of their results
  // Where `quantised` is set, inputs are quantised to int8 by their own scale, or by the given one.
  const float* gate_up_input_scale;
  const float* down_input_scale;
  const int32_t* expert_map;  // [experts]: indices, or -1 on another rank; null: all are here
  int64_t* load;  // [experts], or null: counts the tokens of each
  int32_t gate_up_quantised, down_quantised;
  int32_t num_experts, num_local, top_k;
  int32_t sigmoid;  // scores; else softmax
  int32_t normalised;
  int32_t num_groups, top_groups;
  int32_t top2;  // a group's score is the sum of its best two, else its maximum
  int32_t activation;  // Activation of activations.h
  int32_t interleaved;  // outputs of gate_up alternate: gate, up, gate, ...
  float scale, alpha, limit;
};
