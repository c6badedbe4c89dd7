// Samples tokens from logits, row by row: temperature, min-p, top-k, top-p, then the argmax of the
// remaining logits plus Gumbel noise. The reference is draw in runner/filters.py.
//
// Noise is computed for few tokens: the remaining ones or, without top-k, top-p and min-p, those
// that may still win. For these filters tokens near the maximum are gathered, and more only if they
// do not suffice.

#include <cmath>
#include <limits>

#include "run.h"
#include "vector_math.h"

namespace windlass {

namespace {

// The columns of draw's params in filters.py.
struct SamplingParams {
  double temperature, top_k, top_p, min_p;

  bool has_filters() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

struct Candidate {
  float x;
  int32_t token;
};

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

inline double mass_of(float x, float peak, float inverse_temperature) {
  if (!(x > kMinusInfinity)) return 0.0;
  return static_cast<double>(exponential((x - peak) * inverse_temperature));
}

// A 32-bit hash of key and token.
inline uint32_t hash(uint64_t key, uint32_t token) {
  uint32_t h = token * 0x9E3779B1u + static_cast<uint32_t>(key);
  h = (h ^ (h >> 16)) * 0x21F0AAADu + static_cast<uint32_t>(key >> 32);
  h = (h ^ (h >> 15)) * 0xD35A2D97u;
  return h ^ (h >> 15);
}

inline double noise(uint64_t key, int token) {
  const double uniform = (hash(key, static_cast<uint32_t>(token)) + 0.5) * 0x1p-32;
  return -std::log(-std::log1p(-uniform));
}

double mass_of_all(const float* x, int count, float peak, float inverse_temperature) {
  double total = 0;
  for (int at = 0; at < count;) {
    const int end = std::min(at + 1024, count);
    F32x8 sum = zero();
    for (; at + kLanes <= end; at += kLanes) {
      sum = add(sum, exponential(mul(sub(load(x + at), splat(peak)), splat(inverse_temperature))));
    }
    total += static_cast<double>(sum_of(sum));
    for (; at < end; ++at) total += mass_of(x[at], peak, inverse_temperature);
  }
  return total;
}

int gather_from(const float* x, int count, float bound, Candidate* to) {
  int found = 0;
  for (int i = 0; i < count; ++i) {
    to[found] = {x[i], i};
    found += x[i] >= bound && x[i] > kMinusInfinity;
  }
  return found;
}

double mass_of(const Candidate* from, int count, float peak, float inverse_temperature) {
  double total = 0;
  for (int i = 0; i < count; ++i) total += mass_of(from[i].x, peak, inverse_temperature);
  return total;
}

inline bool likelier(const Candidate& a, const Candidate& b) {
  return a.x > b.x || (a.x == b.x && a.token < b.token);
}

// Selects the tokens that may be sampled, the likeliest first; returns their number. `candidates`
// has space for the whole row.
int select_candidates(const float* x, int width, float peak, float inverse_temperature,
                      const SamplingParams& params, Candidate* candidates) {
  const float low = params.min_p > 0
                        ? peak + static_cast<float>(std::log(params.min_p)) / inverse_temperature
                        : kMinusInfinity;
  const int max_tokens =
      params.top_k > 0 ? static_cast<int>(std::min<double>(params.top_k, width)) : width;
  // Top-p is a share of all tokens.
  const bool of_all_tokens = max_tokens == width && params.min_p <= 0;
  double total = of_all_tokens ? mass_of_all(x, width, peak, inverse_temperature) : 0;
  int count = 0;
  for (float distance = 8;; distance *= 2) {
    // Beyond this distance a probability underflows float32.
    const float near = peak - distance / inverse_temperature;
    const float bound = distance > 128 || low > near ? low : near;
    count = gather_from(x, width, bound, candidates);
    if (bound == low) break;
    const bool enough =
        of_all_tokens
            ? mass_of(candidates, count, peak, inverse_temperature) >= params.top_p * total
            : count >= max_tokens;
    if (enough) break;
  }
  if (count > max_tokens) {
    std::nth_element(candidates, candidates + max_tokens, candidates + count, likelier);
    count = max_tokens;
  }
  std::sort(candidates, candidates + count, likelier);
  if (params.top_p >= 1) return count;
  if (!of_all_tokens) total = mass_of(candidates, count, peak, inverse_temperature);
  double before = 0;
  for (int i = 0; i < count; ++i) {
    if (i > 0 && before >= params.top_p * total) return i;
    before += mass_of(candidates[i].x, peak, inverse_temperature);
  }
  return count;
}

// The best token so far, with its noise.
struct Leader {
  const float* x;
  float peak, inverse_temperature;
  uint64_t key;
  int token;
  double value;

  void consider(int other) {
    const float logit = (x[other] - peak) * inverse_temperature;
    const double found = static_cast<double>(logit) + noise(key, other);
    if (found > value) token = other, value = found;
  }
};

// A token at distance a below the leader's value wins with a probability below exp(-a), which rules
// out most tokens.
int draw_from_all(const float* x, int width, Leader leader) {
  constexpr int chunk = 64;
  for (int first = 0; first < width; first += chunk) {
    const int count = std::min(chunk, width - first);
    float win_bounds[chunk], uniforms[chunk];
    const F32x8 minus_leader = splat(static_cast<float>(-leader.value));
    for (int i = 0; i + kLanes <= count; i += kLanes) {
      const F32x8 below =
          mul(sub(load(x + first + i), splat(leader.peak)), splat(leader.inverse_temperature));
      store(win_bounds + i, exponential(add(below, minus_leader)));
    }
    for (int i = count / kLanes * kLanes; i < count; ++i) win_bounds[i] = 2.0f;  // always checked
    for (int i = 0; i < count; ++i) {
      const uint32_t h = hash(leader.key, static_cast<uint32_t>(first + i));
      uniforms[i] = static_cast<float>(h) * 0x1p-32f;
    }
    bool any = false;
    for (int i = 0; i < count; ++i) any |= uniforms[i] <= win_bounds[i] * 1.001f;
    for (int i = 0; any && i < count; ++i) {
      if (uniforms[i] <= win_bounds[i] * 1.001f) leader.consider(first + i);
    }
  }
  return leader.token;
}

int draw(const float* x, int width, const SamplingParams& params, uint64_t key,
         Candidate* candidates) {
  const int best = argmax_fast(x, width);
  const float peak = x[best];
  if (params.temperature <= 0 || !std::isfinite(peak)) return best;
  // Finite for the smallest temperatures too: infinity times a distance of 0 from the maximum is
  // NaN.
  const double max_float = std::numeric_limits<float>::max();
  const double inverse = std::min(1.0 / params.temperature, max_float);
  const float inverse_temperature = static_cast<float>(inverse);
  Leader leader{x, peak, inverse_temperature, key, best, noise(key, best)};
  if (!params.has_filters()) return draw_from_all(x, width, leader);
  const int count = select_candidates(x, width, peak, inverse_temperature, params, candidates);
  for (int i = 0; i < count; ++i) leader.consider(candidates[i].token);
  return leader.token;
}

}  // namespace

bool run_sample(const Run& run) {
  const int width = run.size(0);
  const SamplingParams* params = run.model_tensor<SamplingParams>(0);
  const uint64_t* keys = run.model_tensor<uint64_t>(1);
  int32_t* out = static_cast<int32_t*>(run.command.step_tensors[1]);
  const int at_once = std::min(run.pool.threads(), run.rows);
  const size_t each = static_cast<size_t>(width) * sizeof(Candidate);
  uint8_t* memory = run.pool.buffer(each * static_cast<size_t>(at_once));
  if (memory == nullptr) return false;
  for (int first = 0; first < run.rows; first += at_once) {
    run.pool.each(std::min(at_once, run.rows - first), 1, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        auto* candidates = reinterpret_cast<Candidate*>(memory + each * static_cast<size_t>(i));
        const int row = first + i;
        out[row] = draw(row_of(run.step_tensor(0), row, width), width, params[row], keys[row],
                        candidates);
      }
    });
  }
  return true;
}

}  // namespace windlass
