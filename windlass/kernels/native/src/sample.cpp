// Tokens drawn from logits, row by row: temperature, min-p, top-k, top-p, then the largest of what is
// left plus noise. The definition is draw in runner/filters.py.
//
// Noise is computed for few tokens: those that are left, or where none was ruled out, those that may
// still win. For cuts, tokens near the best are gathered, and more only where these do not suffice.

#include <cmath>
#include <limits>

#include "run.h"
#include "vector_math.h"

namespace windlass {

namespace {

// As draw in filters.py has them.
struct Wish {
  double temperature, top_k, top_p, min_p;

  bool cuts() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

struct Candidate {
  float x;
  int32_t token;
};

constexpr float kNever = -std::numeric_limits<float>::infinity();

inline double mass_of(float x, float peak, float inverse_temperature) {
  return x > kNever ? static_cast<double>(exponential((x - peak) * inverse_temperature)) : 0.0;
}

// A number of 32 bits for each key and token.
inline uint32_t hashed(uint64_t key, uint32_t token) {
  uint32_t h = token * 0x9E3779B1u + static_cast<uint32_t>(key);
  h = (h ^ (h >> 16)) * 0x21F0AAADu + static_cast<uint32_t>(key >> 32);
  h = (h ^ (h >> 15)) * 0xD35A2D97u;
  return h ^ (h >> 15);
}

inline double noise(uint64_t key, int token) {
  const double chance = (hashed(key, static_cast<uint32_t>(token)) + 0.5) * 0x1p-32;
  return -std::log(-std::log1p(-chance));
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
    found += x[i] >= bound && x[i] > kNever;
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

// The tokens that may be drawn, the likeliest first; returns how many. `room` is for the whole row.
int keep(const float* x, int width, float peak, float inverse_temperature, const Wish& wish, Candidate* room) {
  const float low = wish.min_p > 0
                        ? peak + static_cast<float>(std::log(wish.min_p)) / inverse_temperature
                        : kNever;
  const int most = wish.top_k > 0 ? static_cast<int>(std::min<double>(wish.top_k, width)) : width;
  const bool by_all = most == width && wish.min_p <= 0;  // top-p is a share of all tokens
  double total = by_all ? mass_of_all(x, width, peak, inverse_temperature) : 0;
  int count = 0;
  for (float reach = 8;; reach *= 2) {
    // Farther away nothing has a mass that a float can hold.
    const float bound = reach > 128 || low > peak - reach / inverse_temperature ? low : peak - reach / inverse_temperature;
    count = gather_from(x, width, bound, room);
    if (bound == low) break;
    if (by_all ? mass_of(room, count, peak, inverse_temperature) >= wish.top_p * total : count >= most) break;
  }
  if (count > most) {
    std::nth_element(room, room + most, room + count, likelier);
    count = most;
  }
  std::sort(room, room + count, likelier);
  if (wish.top_p >= 1) return count;
  if (!by_all) total = mass_of(room, count, peak, inverse_temperature);
  double before = 0;
  for (int i = 0; i < count; ++i) {
    if (i > 0 && before >= wish.top_p * total) return i;
    before += mass_of(room[i].x, peak, inverse_temperature);
  }
  return count;
}

// The best so far, with its noise.
struct Leader {
  const float* x;
  float peak, inverse_temperature;
  uint64_t key;
  int token;
  double value;

  void meet(int other) {
    const double found = static_cast<double>((x[other] - peak) * inverse_temperature) + noise(key, other);
    if (found > value) token = other, value = found;
  }
};

// A token a below the leader's value wins with a chance below exp(-a): most are told by that alone.
int draw_from_all(const float* x, int width, Leader leader) {
  constexpr int stretch = 64;
  for (int first = 0; first < width; first += stretch) {
    const int count = std::min(stretch, width - first);
    float most[stretch], chances[stretch];
    const F32x8 behind = splat(static_cast<float>(-leader.value));
    for (int i = 0; i + kLanes <= count; i += kLanes) {
      const F32x8 below = mul(sub(load(x + first + i), splat(leader.peak)), splat(leader.inverse_temperature));
      store(most + i, exponential(add(below, behind)));
    }
    for (int i = count / kLanes * kLanes; i < count; ++i) most[i] = 2.0f;  // looked at in any case
    for (int i = 0; i < count; ++i) {
      const uint32_t h = hashed(leader.key, static_cast<uint32_t>(first + i));
      chances[i] = static_cast<float>(h) * 0x1p-32f;
    }
    bool any = false;
    for (int i = 0; i < count; ++i) any |= chances[i] <= most[i] * 1.001f;
    for (int i = 0; any && i < count; ++i) {
      if (chances[i] <= most[i] * 1.001f) leader.meet(first + i);
    }
  }
  return leader.token;
}

int draw(const float* x, int width, const Wish& wish, uint64_t key, Candidate* room) {
  const int best = largest_quickly(x, width);
  const float peak = x[best];
  if (wish.temperature <= 0 || !std::isfinite(peak)) return best;
  // Finite for the smallest temperatures too: infinity times a distance of 0 from the peak is NaN.
  const double most = std::numeric_limits<float>::max();
  const float inverse_temperature = static_cast<float>(std::min(1.0 / wish.temperature, most));
  Leader leader{x, peak, inverse_temperature, key, best, noise(key, best)};
  if (!wish.cuts()) return draw_from_all(x, width, leader);
  const int count = keep(x, width, peak, inverse_temperature, wish, room);
  for (int i = 0; i < count; ++i) leader.meet(room[i].token);
  return leader.token;
}

}  // namespace

bool run_sample(const Run& run) {
  const int width = run.size(0);
  const Wish* wishes = run.fixed<Wish>(0);
  const uint64_t* keys = run.fixed<uint64_t>(1);
  int32_t* out = static_cast<int32_t*>(run.command.moving[1]);
  const int at_once = std::min(run.pool.threads(), run.rows);
  const size_t each = static_cast<size_t>(width) * sizeof(Candidate);
  uint8_t* memory = run.pool.buffer(each * static_cast<size_t>(at_once));
  if (memory == nullptr) return false;
  for (int first = 0; first < run.rows; first += at_once) {
    run.pool.each(std::min(at_once, run.rows - first), 1, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        auto* room = reinterpret_cast<Candidate*>(memory + each * static_cast<size_t>(i));
        const int row = first + i;
        out[row] = draw(row_of(run.moving(0), row, width), width, wishes[row], keys[row], room);
      }
    });
  }
  return true;
}

}  // namespace windlass
