// Chooses the experts of a token: see reference_experts.py.

#include "routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "vector_math.h"

namespace windlass {

namespace {

// NaN is greater than any number, as in torch's sort.
bool greater(float x, float y) { return x > y || (std::isnan(x) && !std::isnan(y)); }

// Writes the indices of the `count` greatest values, the lower index first among equals.
void choose(const float* values, int num_values, int count, int32_t* chosen) {
  for (int i = 0, filled = 0; i < num_values; ++i) {
    if (filled == count && !greater(values[i], values[chosen[count - 1]])) continue;
    int at = filled < count ? filled++ : count - 1;
    for (; at > 0 && greater(values[i], values[chosen[at - 1]]); --at) chosen[at] = chosen[at - 1];
    chosen[at] = i;
  }
}

void softmax(float* x, int count) {
  float largest = x[0];
  for (int i = 1; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  float sum = 0.0f;
  for (int i = 0; i < count; i += kLanes) {
    store(x + i, exponential(sub(load(x + i), splat(largest))));
    for (int k = i; k < std::min(i + kLanes, count); ++k) sum += x[k];
  }
  for (int i = 0; i < count; ++i) x[i] /= sum;
}

void sigmoid(float* x, int count) {
  for (int i = 0; i < count; i += kLanes) {
    const F32x8 e = exponential(sub(zero(), clamp_min(load(x + i), splat(-88.0f))));
    store(x + i, divide(splat(1.0f), add(splat(1.0f), e)));
  }
}

// Replaces the ranks of experts outside of the best groups by -infinity.
void limit_to_groups(const WindlassExperts& experts, float* ranks) {
  const int size = experts.num_experts / experts.num_groups;
  float best[kMaxExperts];
  int32_t top[kMaxExperts];
  for (int g = 0; g < experts.num_groups; ++g) {
    const float* group = ranks + g * size;
    choose(group, size, experts.top2 ? 2 : 1, top);
    best[g] = experts.top2 ? group[top[0]] + group[top[1]] : group[top[0]];
  }
  choose(best, experts.num_groups, experts.top_groups, top);
  bool allowed[kMaxExperts] = {};
  for (int i = 0; i < experts.top_groups; ++i) allowed[top[i]] = true;
  for (int e = 0; e < experts.num_experts; ++e) {
    if (!allowed[e / size]) ranks[e] = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace

void route(const WindlassExperts& experts, const float* logits, int32_t* chosen, float* weights) {
  const int count = experts.num_experts;
  float scores[kMaxExperts + kLanes], ranks[kMaxExperts];
  std::copy(logits, logits + count, scores);
  std::fill(scores + count, scores + count + kLanes, logits[0]);  // read by the last vector
  experts.sigmoid ? sigmoid(scores, count) : softmax(scores, count);
  for (int e = 0; e < count; ++e) {
    ranks[e] = experts.correction_bias ? scores[e] + experts.correction_bias[e] : scores[e];
  }
  if (experts.top_groups < experts.num_groups) limit_to_groups(experts, ranks);
  choose(ranks, count, experts.top_k, chosen);
  float sum = 1e-20f;
  for (int k = 0; k < experts.top_k; ++k) sum += weights[k] = scores[chosen[k]];
  for (int k = 0; k < experts.top_k; ++k) {
    weights[k] = (experts.normalised ? weights[k] / sum : weights[k]) * experts.scale;
    if (experts.expert_scales != nullptr) weights[k] *= experts.expert_scales[chosen[k]];
  }
}

}  // namespace windlass
