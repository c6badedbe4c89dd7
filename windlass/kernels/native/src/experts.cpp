// Mixture-of-experts MLPs: routing, both GEMMs of the chosen experts, and the weighted sum.
//
// Tokens are grouped by expert, so that an expert's weights are read once for all of its tokens. Each
// phase is one job of the pool over all groups: its items are panels, or tiles of weights. A row's
// sums never depend on the other rows of its group.

#include "experts.h"

#include <numeric>
#include <vector>

#include "activations.h"
#include "gemm_inputs.h"
#include "prompt_tokens.h"
#include "routing.h"

namespace windlass {

namespace {

// Pairs of a token and one of its experts that are computed together: limits the memory. More pairs
// would not make the GEMMs of an expert faster.
constexpr int kMaxPairs = 8192;

// Some pairs of one expert, all of prompt tokens or all of others.
struct Group {
  int expert;
  bool is_prompt;
  int first, count;  // pairs in the order of groups
};

// A sub-GEMM inside of a job of the pool runs on the calling thread: this pool has no workers.
Pool& calling_thread() {
  static Pool pool(1, 0);
  return pool;
}

// Calls body(i, begin, end) for the items of all groups, of which group i has counts[i].
template <class Body>
void each_item(Pool& pool, const std::vector<int>& counts, int grain, const Body& body) {
  std::vector<int> ends(counts.size());
  std::partial_sum(counts.begin(), counts.end(), ends.begin());
  pool.each(ends.empty() ? 0 : ends.back(), grain, [&](int begin, int end) {
    int i = static_cast<int>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (; begin < end; ++i) {
      const size_t at = static_cast<size_t>(i);
      const int last = std::min(end, ends[at]), start = ends[at] - counts[at];
      if (last > begin) body(at, begin - start, last - start);
      begin = last;
    }
  });
}

// One of the two GEMMs, for all groups.
class GroupedGemm {
 public:
  GroupedGemm(const Weight& w, int num_local, const std::vector<Group>& groups, bool quantised,
              const float* input_scale)
      : w_(w),
        outputs_(w.num_out / num_local),
        groups_(groups),
        quantised_(quantised),
        input_scale_(input_scale) {
    for (const Group& group : groups) {
      inputs_.emplace_back(w, group.count, group.is_prompt, quantised);
      offsets_.push_back(bytes_);
      bytes_ += inputs_.back().bytes;
    }
  }

  // One token: all groups have the same row, which is arranged once.
  void share_inputs() {
    if (inputs_.empty()) return;  // the token's experts are on other ranks
    std::fill(offsets_.begin(), offsets_.end(), size_t{0});
    bytes_ = inputs_[0].bytes;
    shared_ = true;
  }

  size_t bytes() const { return bytes_; }
  int outputs() const { return outputs_; }

  // Arranges the inputs. read(pair, out) returns the address of a pair's row, or writes it to `out`.
  template <class Read>
  void fill(Pool& pool, uint8_t* memory, const Read& read) const {
    std::vector<int> panels(inputs_.size()), chunks(inputs_.size());
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const bool skipped = shared_ && i > 0;
      panels[i] = skipped ? 0 : inputs_[i].panels;
      chunks[i] = skipped ? 0 : inputs_[i].num_gathered();
    }
    each_item(pool, panels, 1, [&](size_t i, int begin, int end) {
      std::vector<float> scratch(static_cast<size_t>(w_.num_in) * kPanelRows);
      for (int p = begin; p < end; ++p) fill_panel(i, p, memory, read, scratch.data());
    });
    each_item(pool, chunks, 1, [&](size_t i, int begin, int end) {
      for (int c = begin; c < end; ++c) inputs_[i].gather(c, memory + offsets_[i]);
    });
  }

  // y: [pairs][outputs]
  void multiply(Pool& pool, const uint8_t* memory, const float* bias, float* y) const {
    const int tiles = outputs_ / kTile;
    const std::vector<int> counts(groups_.size(), tiles);
    const int all = tiles * static_cast<int>(groups_.size());
    const int grain = std::max(1, all / (pool.threads() * 128));
    each_item(pool, counts, grain, [&](size_t i, int begin, int end) {
      const Group& group = groups_[i];
      const int first = group.expert * tiles + begin;
      Weight part = w_;
      part.num_out = (end - begin) * kTile;
      part.data += static_cast<size_t>(first) * tile_bytes(w_);
      GemmArgs job{calling_thread(), part};
      job.stride = outputs_;
      job.y = row_of(y, group.first, outputs_) + begin * kTile;
      if (bias != nullptr) job.bias = bias + static_cast<size_t>(first) * kTile;
      inputs_[i].multiply(job, memory + offsets_[i]);
    });
  }

 private:
  template <class Read>
  void fill_panel(size_t i, int panel, uint8_t* memory, const Read& read, float* scratch) const {
    const GemmInputs& inputs = inputs_[i];
    const int first = groups_[i].first + inputs.first_row(panel), rows = inputs.num_rows(panel);
    const float* x = scratch;
    float scales[kPanelRows];
    for (int m = 0; m < rows; ++m) {
      float* to = row_of(scratch, m, w_.num_in);
      const float* row = read(first + m, to);
      if (quantised_) {
        scales[m] = quantise_row(row, input_scale_, w_.num_in, to);
      } else if (rows == 1) {
        x = row;
      } else if (row != to) {
        std::memcpy(to, row, static_cast<size_t>(w_.num_in) * sizeof(float));
      }
    }
    inputs.fill(panel, x, quantised_ ? scales : nullptr, memory + offsets_[i]);
  }

  const Weight& w_;
  int outputs_;
  const std::vector<Group>& groups_;
  bool quantised_;
  const float* input_scale_;
  std::vector<GemmInputs> inputs_;
  std::vector<size_t> offsets_;
  size_t bytes_ = 0;
  bool shared_ = false;
};

// Experts of some tokens, and the pairs of token and expert in the order of groups.
struct Routes {
  std::vector<int32_t> chosen;  // [tokens][top_k]
  std::vector<float> weights;  // [tokens][top_k]
  std::vector<int32_t> tokens;  // of each pair
  std::vector<int32_t> pairs;  // [tokens][top_k]; -1: the expert is on another rank
  std::vector<Group> groups;
};

// Counts and writes the chosen experts where it was asked for, and replaces them by their indices.
void leave_choice(const Run& run, const WindlassExperts& experts, int first,
                  std::vector<int32_t>& chosen) {
  int32_t* asked = static_cast<int32_t*>(run.command.step_tensors[3]);
  if (asked != nullptr) {
    std::copy(chosen.begin(), chosen.end(), row_of(asked, first, experts.top_k));
  }
  for (int32_t& expert : chosen) {
    if (experts.load != nullptr) ++experts.load[expert];
    if (experts.expert_map != nullptr) expert = experts.expert_map[expert];
  }
}

Routes find_routes(const Run& run, const WindlassExperts& experts, PromptTokens& prompts, int first,
                   int count) {
  const int top_k = experts.top_k;
  const size_t num_pairs = static_cast<size_t>(count * top_k);
  Routes out{std::vector<int32_t>(num_pairs), std::vector<float>(num_pairs),
             std::vector<int32_t>(num_pairs), std::vector<int32_t>(num_pairs), {}};
  const float* logits = row_of(run.step_tensor(2), first, experts.num_experts);
  const int grain = std::max(1, 4096 / experts.num_experts);
  run.pool.each(count, grain, [&](int begin, int end) {
    for (int t = begin; t < end; ++t) {
      route(experts, row_of(logits, t, experts.num_experts),
            row_of(out.chosen.data(), t, top_k), row_of(out.weights.data(), t, top_k));
    }
  });
  leave_choice(run, experts, first, out.chosen);
  // Counting sort by expert and by kind of token; tokens stay in order.
  std::vector<int> starts(static_cast<size_t>(2 * experts.num_local + 1));
  std::vector<uint8_t> is_prompt(static_cast<size_t>(count));
  const auto key = [&](size_t pair) {
    const size_t token = pair / static_cast<size_t>(top_k);
    return static_cast<size_t>(2 * out.chosen[pair] + is_prompt[token]);
  };
  for (int t = 0; t < count; ++t) is_prompt[static_cast<size_t>(t)] = prompts.has(first + t);
  for (size_t i = 0; i < num_pairs; ++i) {
    if (out.chosen[i] >= 0) ++starts[key(i) + 1];
  }
  for (int k = 0; k < 2 * experts.num_local; ++k) {
    const size_t at = static_cast<size_t>(k);
    if (starts[at + 1] > 0) out.groups.push_back({k / 2, k % 2 != 0, starts[at], starts[at + 1]});
    starts[at + 1] += starts[at];
  }
  out.tokens.resize(static_cast<size_t>(starts.back()));
  for (size_t i = 0; i < num_pairs; ++i) {
    if (out.chosen[i] < 0) {
      out.pairs[i] = -1;
      continue;
    }
    const int pair = starts[key(i)]++;
    out.pairs[i] = pair;
    out.tokens[static_cast<size_t>(pair)] = static_cast<int32_t>(i / static_cast<size_t>(top_k));
  }
  return out;
}

// Applies the activation to a row of gate_up's outputs.
void activate(const WindlassExperts& experts, const float* gate_up, int inner, float* out) {
  const GateFunction function{static_cast<Gate>(experts.activation), experts.alpha, experts.limit};
  if (function.kind == kGateRelu2) return gated(function, gate_up, gate_up, inner, out);
  if (!experts.interleaved) return gated(function, gate_up, gate_up + inner, inner, out);
  constexpr int at_once = 128;
  float gates[at_once], up[at_once];
  for (int begin = 0; begin < inner; begin += at_once) {
    const int count = std::min(at_once, inner - begin);
    for (int i = 0; i < count; ++i) {
      gates[i] = gate_up[2 * (begin + i)];
      up[i] = gate_up[2 * (begin + i) + 1];
    }
    gated(function, gates, up, count, out + begin);
  }
}

// out = sum of weight * y over the experts of a token, in the order of their scores.
void combine(const Routes& routes, int top_k, int token, const float* y, int width, float* out) {
  const int32_t* pairs = row_of(routes.pairs.data(), token, top_k);
  const float* weights = row_of(routes.weights.data(), token, top_k);
  bool is_first = true;
  for (int k = 0; k < top_k; ++k) {
    if (pairs[k] < 0) continue;
    const float* from = row_of(y, pairs[k], width);
    for (int i = 0; i < width; ++i) {
      out[i] = is_first ? weights[k] * from[i] : out[i] + weights[k] * from[i];
    }
    is_first = false;
  }
  if (is_first) std::fill(out, out + width, 0.0f);
}

bool run_tokens(const Run& run, const WindlassExperts& experts, PromptTokens& prompts, int first,
                int count) {
  const int hidden = experts.gate_up->num_in, inner = experts.down->num_in;
  const Routes routes = find_routes(run, experts, prompts, first, count);
  GroupedGemm gate_up(*experts.gate_up, experts.num_local, routes.groups,
                      experts.gate_up_quantised != 0, experts.gate_up_input_scale);
  const GroupedGemm down(*experts.down, experts.num_local, routes.groups,
                         experts.down_quantised != 0, experts.down_input_scale);
  if (count == 1) gate_up.share_inputs();
  const size_t pairs = routes.tokens.size();
  const size_t row_bytes = static_cast<size_t>(std::max(gate_up.outputs(), hidden)) * sizeof(float);
  const size_t panel_bytes = std::max(gate_up.bytes(), down.bytes());
  uint8_t* memory = run.pool.buffer(panel_bytes + pairs * row_bytes);
  if (memory == nullptr) return false;
  float* y = reinterpret_cast<float*>(memory + panel_bytes);
  const float* x = row_of(run.step_tensor(0), first, hidden);
  gate_up.fill(run.pool, memory, [&](int pair, float*) {
    return row_of(x, routes.tokens[static_cast<size_t>(pair)], hidden);
  });
  gate_up.multiply(run.pool, memory, experts.gate_up_bias, y);
  down.fill(run.pool, memory, [&](int pair, float* out) {
    activate(experts, row_of(y, pair, gate_up.outputs()), inner, out);
    return static_cast<const float*>(out);
  });
  down.multiply(run.pool, memory, experts.down_bias, y);
  const int grain = std::max(1, (8 << 10) / (hidden * experts.top_k));
  run.pool.each(count, grain, [&](int begin, int end) {
    for (int t = begin; t < end; ++t) {
      combine(routes, experts.top_k, t, y, hidden, row_of(run.step_tensor(1), first + t, hidden));
    }
  });
  return true;
}

}  // namespace

bool run_experts(const Run& run) {
  const WindlassExperts& experts = *run.model_tensor<WindlassExperts>(0);
  const bool has_prompts = has_prompt_gemm(*experts.gate_up) || has_prompt_gemm(*experts.down);
  PromptTokens prompts(run, (run.size(0) & kStepRows) && has_prompts);
  const int at_once = std::max(1, kMaxPairs / experts.top_k);
  for (int first = 0; first < run.rows; first += at_once) {
    const int count = std::min(at_once, run.rows - first);
    if (!run_tokens(run, experts, prompts, first, count)) return false;
  }
  return true;
}

}  // namespace windlass
