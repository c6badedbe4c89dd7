// Checks every command but GEMMs against definition.h, over odd sizes, in exactly sized memory, so
// that sanitisers detect every read and write past an end.

#pragma once

#include <algorithm>
#include <utility>

#include "api.h"
#include "definition.h"

namespace selftest {

constexpr double kEps = 1e-5;
constexpr double kClose = 2e-5;  // for values around 1

inline Floats random_floats(size_t count) {
  Floats out(count);
  unsigned state = 12345;
  for (float& x : out) {
    state = state * 1664525u + 1013904223u;
    x = static_cast<float>(state >> 8) / 16777216.0f - 0.5f;
  }
  return out;
}

inline void run(WindlassPool* pool, WindlassCommand& command, const WindlassStep& step) {
  if (windlass_run(pool, &command, 1, &step) != 0) std::exit(2);
}

// The tensors of all operations on rows.
struct Rows {
  size_t rows, width;
  Floats x, residual, out, scales, weight, table;
  std::vector<int32_t> picked, largest;

  Rows(int count, int wide)
      : rows(static_cast<size_t>(count)),
        width(static_cast<size_t>(wide)),
        x(random_floats(2 * rows * width)),
        residual(random_floats(rows * width)),
        out(rows * width),
        scales(rows),
        weight(random_floats(width)),
        table(random_floats(3 * width)),
        picked(rows, 1),
        largest(rows) {}

  double in(size_t row, size_t i) const { return x[row * width + i]; }
};

inline void check_norm(const Rows& r, const Floats& stream, const char* what) {
  for (size_t row = 0; row < r.rows; ++row) {
    const auto first = stream.begin() + static_cast<std::ptrdiff_t>(row * r.width);
    const Doubles wide(first, first + static_cast<std::ptrdiff_t>(r.width));
    const Doubles wanted = normalised(wide.data(), r.weight, kEps);
    for (size_t i = 0; i < r.width; ++i) {
      expect(what, r.out[row * r.width + i], wanted[i], kClose * (1.0 + std::fabs(wanted[i])));
    }
  }
}

inline void check_row(const Rows& r, int op, size_t row) {
  size_t peak = 0;
  for (size_t i = 0; i < r.width; ++i) {
    const double found = r.out[row * r.width + i];
    const float* gates = r.x.data() + row * 2 * r.width;
    peak = r.in(row, i) > r.in(row, peak) ? i : peak;
    if (op == windlass::kSiluMul) {
      expect("silu", found, silu(gates[i]) * gates[r.width + i], kClose);
    } else if (op == windlass::kQuantise) {
      expect("quantised", found * r.scales[row], r.in(row, i), 0.5001 * r.scales[row]);
      expect("code", found, std::nearbyint(found), 0.0);
    } else if (op == windlass::kEmbed) {
      expect("embedded", found, r.table[r.width + i], 0.0);
    } else if (op == windlass::kGather) {
      expect("gathered", found, r.in(r.rows - 1, i), 0.0);
    }
  }
  if (op == windlass::kArgmax) expect("largest", r.largest[row], static_cast<double>(peak), 0.0);
}

inline void run_rows(WindlassPool* pool, Rows& r, int op) {
  WindlassStep step{};
  step.ids = step.sampled = r.picked.data();
  WindlassCommand c{};
  c.op = op;
  c.rows = static_cast<int32_t>(r.rows);
  c.sizes[0] = static_cast<int32_t>(r.width);
  c.scalars[0] = static_cast<float>(kEps);
  c.step_tensors[0] = op == windlass::kEmbed ? r.out.data() : r.x.data();
  c.step_tensors[1] = op == windlass::kAddNorm ? r.residual.data() : r.out.data();
  c.step_tensors[2] = op == windlass::kAddNorm ? r.out.data() : r.scales.data();
  c.model_tensors[0] = op == windlass::kEmbed      ? r.table.data()
                       : op == windlass::kQuantise ? nullptr
                                                   : r.weight.data();
  if (op == windlass::kArgmax) c.step_tensors[1] = r.largest.data();
  run(pool, c, step);
}

inline void check_rows(WindlassPool* pool, int rows, int width) {
  Rows r(rows, width);
  for (int op : {windlass::kNorm, windlass::kAddNorm, windlass::kSiluMul, windlass::kQuantise,
                 windlass::kEmbed, windlass::kGather, windlass::kArgmax}) {
    if (op == windlass::kGather) r.picked.assign(r.picked.size(), rows - 1);
    Floats summed = r.residual;
    for (size_t i = 0; i < summed.size(); ++i) summed[i] += r.x[i];
    run_rows(pool, r, op);
    if (op == windlass::kNorm) check_norm(r, r.x, "norm");
    if (op == windlass::kAddNorm) check_norm(r, summed, "norm of a sum");
    for (size_t row = 0; row < r.rows; ++row) check_row(r, op, row);
  }
}

// Two parts; slot 1 has both with different ranks, slot 2 only the second.
inline void check_lora(WindlassPool* pool, int rows, int width, int outputs) {
  const int max_rank = 7;
  const size_t in = static_cast<size_t>(width), out = static_cast<size_t>(outputs);
  const size_t ranks_of = static_cast<size_t>(max_rank), all = 2 * out;
  const std::vector<int32_t> ranks = {0, 0, 7, 3, 0, 1};
  const std::vector<int32_t> shape = {width, 2, max_rank, 2, outputs, outputs};
  const Floats down = random_floats(3 * 2 * ranks_of * in), up = random_floats(3 * ranks_of * all);
  const Floats x = random_floats(static_cast<size_t>(rows) * in), before = random_floats(static_cast<size_t>(rows) * all);
  Floats y = before;
  std::vector<int32_t> slots;
  for (int row = 0; row < rows; ++row) slots.push_back(row % 3);
  WindlassStep step{};
  step.adapters = slots.data();
  WindlassCommand c{};
  c.op = windlass::kLora;
  c.rows = rows;
  c.step_tensors[0] = const_cast<float*>(x.data());
  c.step_tensors[1] = y.data();
  c.model_tensors[0] = down.data(), c.model_tensors[1] = up.data();
  c.model_tensors[2] = ranks.data(), c.model_tensors[3] = shape.data();
  run(pool, c, step);
  for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
    const size_t slot = static_cast<size_t>(slots[row]);
    for (size_t i = 0; i < all; ++i) {
      const size_t part = i / out;
      double wanted = before[row * all + i];
      for (size_t r = 0; r < static_cast<size_t>(ranks[slot * 2 + part]); ++r) {
        double low = 0;
        const float* line = down.data() + ((slot * 2 + part) * ranks_of + r) * in;
        for (size_t k = 0; k < in; ++k) low += double(line[k]) * double(x[row * in + k]);
        wanted += low * double(up[(slot * all + part * out) * ranks_of + r * out + i % out]);
      }
      expect("adapter", y[row * all + i], wanted, kClose * (1.0 + std::fabs(wanted)));
    }
  }
}

// A sampled token must pass top-k, top-p and min-p.
inline void check_sample(WindlassPool* pool, int rows, int width) {
  const size_t count = static_cast<size_t>(rows), wide = static_cast<size_t>(width);
  Floats x = random_floats(count * wide);
  for (float& v : x) v *= 20.0f;
  const double kinds[4][4] = {{1.0, 0, 1, 0}, {0.7, 3, 1, 0}, {1.2, 0, 0.8, 0}, {2.0, 0, 1, 0.3}};
  Doubles params;
  std::vector<uint64_t> keys;
  for (size_t row = 0; row < count; ++row) {
    params.insert(params.end(), kinds[row % 4], kinds[row % 4] + 4);
    keys.push_back(0x9E3779B97F4A7C15u * (row + 1) >> 1);
  }
  std::vector<int32_t> out(count, -1);
  WindlassCommand c{};
  c.op = windlass::kSample;
  c.rows = rows;
  c.sizes[0] = width;
  c.step_tensors[0] = x.data(), c.step_tensors[1] = out.data();
  c.model_tensors[0] = params.data(), c.model_tensors[1] = keys.data();
  run(pool, c, WindlassStep{});
  for (size_t row = 0; row < count; ++row) {
    const float* logits = x.data() + row * wide;
    const double* own_params = kinds[row % 4];
    const float peak = *std::max_element(logits, logits + wide);
    const float own = logits[static_cast<size_t>(out[row])];
    size_t better = 0;
    double all = 0, before = 0;
    for (size_t i = 0; i < wide; ++i) {
      const double mass = std::exp(double(logits[i] - peak) / own_params[0]);
      all += mass;
      if (logits[i] > own) better += 1, before += mass;
    }
    if (own_params[1] > 0) expect("top-k", better < own_params[1], 1.0, 0.0);
    if (own_params[2] < 1) expect("top-p", before < own_params[2] * all * 1.0001, 1.0, 0.0);
    const double share = std::exp(double(own - peak) / own_params[0]);
    if (own_params[3] > 0) expect("min-p", share > own_params[3] * 0.9999, 1.0, 0.0);
  }
}

constexpr int kPage = 16, kHeads = 6, kKvHeads = 2, kStride = 20;

// Requests of (start, count), each with its own pages.
struct Requests {
  std::vector<WindlassRow> rows;
  std::vector<int32_t> positions, slots, tables;
  int tokens = 0, blocks = 0;

  explicit Requests(const std::vector<std::pair<int, int>>& shapes) {
    for (auto [start, count] : shapes) {
      const int slot = static_cast<int>(rows.size());
      rows.push_back({tokens, count, start, slot});
      for (int i = 0; i < count; ++i) positions.push_back(start + i), slots.push_back(slot);
      for (int i = 0; i < kStride; ++i) {
        tables.push_back(i * kPage < start + count ? blocks++ : -1);
      }
      tokens += count;
    }
  }

  size_t index(int token, int position, int head, int heads = kKvHeads) const {
    const int slot = slots[static_cast<size_t>(token)];
    const int block = tables[static_cast<size_t>(slot * kStride + position / kPage)];
    return static_cast<size_t>((block * heads + head) * kPage + position % kPage);
  }

  WindlassStep step() const {
    return {tokens,           static_cast<int32_t>(rows.size()), 0, kStride, nullptr,
            positions.data(), slots.data(), tables.data(), rows.data(), nullptr, nullptr};
  }
};

// The options of rope and attention.
struct Variant {
  int window = 0, rotary_dim = 0;
  bool interleaved = false, layer_norm = false, per_head = false, sinks = false;
  float soft_cap = 0.0f;

  int flags() const {
    return (interleaved ? windlass::kInterleaved : 0) | (layer_norm ? windlass::kLayerNorm : 0) |
           (per_head ? windlass::kNormPerHead : 0);
  }
};

struct Pages {
  const Requests& requests;
  int dim;
  Variant variant;
  Stored keys, values;
  Floats qkv, q, out, cos_sin, norm, sinks;

  Pages(const Requests& all, int type, int wide, Variant options)
      : requests(all),
        dim(wide),
        variant(options),
        keys(type, static_cast<size_t>(all.blocks * kKvHeads * kPage), wide),
        values(keys),
        qkv(random_floats(static_cast<size_t>(all.tokens * wide * (kHeads + 2 * kKvHeads)))),
        q(static_cast<size_t>(all.tokens * wide * kHeads)),
        out(q.size()),
        cos_sin(random_floats(static_cast<size_t>(400 * wide))),
        norm(random_floats(static_cast<size_t>(wide * (options.per_head ? kHeads : 1)))),
        sinks(random_floats(kHeads)) {}

  void check_rotated(int token, int head) const {
    const float* x = qkv.data() + (token * (kHeads + 2 * kKvHeads) + head) * dim;
    const int position = requests.positions[static_cast<size_t>(token)];
    Doubles wanted(x, x + dim);
    const bool is_value = head >= kHeads + kKvHeads;
    if (!is_value) {
      const int own = !variant.per_head ? 0 : head < kHeads ? head : head - kHeads;
      const Floats weight(norm.begin() + own * dim, norm.begin() + (own + 1) * dim);
      if (variant.layer_norm) wanted = centred(wanted);
      wanted = rotated(normalised(wanted.data(), weight, kEps),
                       cos_sin.data() + position * variant.rotary_dim,
                       static_cast<size_t>(variant.rotary_dim / 2), variant.interleaved);
    }
    double peak = 0.0;
    for (double number : wanted) peak = std::max(peak, std::fabs(number));
    for (int d = 0; d < dim; ++d) {
      const double number = wanted[static_cast<size_t>(d)];
      if (head < kHeads) {
        expect("query", q[static_cast<size_t>((token * kHeads + head) * dim + d)], number, kClose);
        continue;
      }
      const Stored& pages = is_value ? values : keys;
      const size_t index = requests.index(token, position, (head - kHeads) % kKvHeads);
      expect(is_value ? "value" : "key", pages.at(index, d), number, pages.rounding_error(number, peak));
    }
  }

  // Runs rope (with the norms if `normed`) or attention.
  void run(WindlassPool* pool, int op, bool normed = true) {
    const bool rope = op == windlass::kRope, scaled = keys.type == windlass::kTypeInt8;
    WindlassCommand c{};
    c.op = op;
    c.rows = requests.tokens;
    const int sizes[9] = {kHeads, kKvHeads, dim, kPage, keys.type, 0, kKvHeads * kPage,
                          rope ? variant.rotary_dim : variant.window, rope ? variant.flags() : 0};
    std::copy(sizes, sizes + 9, c.sizes);
    c.scalars[0] = rope ? static_cast<float>(kEps) : 0.125f;
    c.scalars[1] = rope ? 0.0f : variant.soft_cap;
    c.step_tensors[0] = rope ? qkv.data() : q.data();
    c.step_tensors[1] = rope ? q.data() : out.data();
    if (rope && variant.rotary_dim > 0) c.model_tensors[0] = cos_sin.data();
    if (!rope && variant.sinks) c.model_tensors[4] = sinks.data();
    if (rope && normed) c.model_tensors[1] = c.model_tensors[2] = norm.data();
    const void* pages[4] = {keys.bytes.data(), values.bytes.data(),
                            scaled ? keys.scales.data() : nullptr,
                            scaled ? values.scales.data() : nullptr};
    std::copy(pages, pages + 4, c.model_tensors + (rope ? 3 : 0));
    selftest::run(pool, c, requests.step());
  }

  Doubles attended_by(int token, int head, const Doubles& all_keys,
                      const Doubles& all_values) const {
    const int position = requests.positions[static_cast<size_t>(token)];
    std::vector<size_t> indices;
    const int first = variant.window > 0 ? std::max(0, position - variant.window + 1) : 0;
    for (int p = first; p <= position; ++p) {
      indices.push_back(requests.index(token, p, head / (kHeads / kKvHeads)));
    }
    return attended(q.data() + index_of(token, head), all_keys, all_values,
                    static_cast<size_t>(dim), indices, 0.125, variant.soft_cap,
                    variant.sinks ? sinks[static_cast<size_t>(head)] : -HUGE_VAL);
  }

  size_t index_of(int token, int head) const {
    return static_cast<size_t>((token * kHeads + head) * dim);
  }

  void check_attended(int token, int head, const Doubles& all_keys,
                      const Doubles& all_values) const {
    const Doubles wanted = attended_by(token, head, all_keys, all_values);
    // float16 pages may be computed in 16-bit arithmetic.
    const double close = keys.type == windlass::kTypeF16 ? 0x1p-10 : kClose * 2;
    for (size_t d = 0; d < wanted.size(); ++d) {
      expect("attention", out[index_of(token, head) + d], wanted[d], close);
    }
  }
};

inline void check_pages(WindlassPool* pool, int type, int dim, Variant variant) {
  const Requests requests({{0, 1}, {130, 1}, {5, 33}, {250, 7}, {0, 20}});
  Pages p(requests, type, dim, variant);
  for (int op : {windlass::kRope, windlass::kAttention}) {
    const bool rope = op == windlass::kRope;
    p.run(pool, op);
    const Doubles keys = p.keys.all(), values = p.values.all();
    for (int token = 0; token < requests.tokens; ++token) {
      for (int head = 0; head < (rope ? kHeads + 2 * kKvHeads : kHeads); ++head) {
        rope ? p.check_rotated(token, head) : p.check_attended(token, head, keys, values);
      }
    }
  }
}

// GEMMs of each head, with weights whose rows belong to inputs, then to outputs.
inline void check_per_head(WindlassPool* pool, int rows) {
  constexpr size_t heads = 3, num_in = 16, num_out = 88;
  const size_t tokens = static_cast<size_t>(rows);
  Floats x = random_floats(tokens * heads * num_in), y(tokens * heads * num_out);
  const Floats weight = random_floats(heads * num_in * num_out);
  for (size_t by_output : {0u, 1u}) {
    WindlassCommand c{};
    c.op = windlass::kPerHead;
    c.rows = rows;
    const size_t sizes[9] = {heads,           num_in,  num_out, heads * num_in,
                             num_in,          heads * num_out,  num_out,
                             num_in * num_out, by_output};
    std::transform(sizes, sizes + 9, c.sizes, [](size_t size) { return static_cast<int32_t>(size); });
    c.step_tensors[0] = x.data();
    c.step_tensors[1] = y.data();
    c.model_tensors[0] = weight.data();
    run(pool, c, WindlassStep{});
    for (size_t token = 0; token < tokens; ++token) {
      for (size_t head = 0; head < heads; ++head) {
        const float* matrix = weight.data() + head * num_in * num_out;
        for (size_t n = 0; n < num_out; ++n) {
          double wanted = 0.0;
          for (size_t k = 0; k < num_in; ++k) {
            const float w = matrix[by_output ? n * num_in + k : k * num_out + n];
            wanted += static_cast<double>(x[(token * heads + head) * num_in + k]) * w;
          }
          expect("per_head", y[(token * heads + head) * num_out + n], wanted, kClose);
        }
      }
    }
  }
}

// Latents in float32 pages: their norm, and the rotation of keys and queries by interleaved pairs.
inline void check_latent(WindlassPool* pool) {
  constexpr int heads = 2, nope = 8, rope = 8, rank = 16, dim = rank + rope;
  constexpr int q_width = heads * (nope + rope), width = q_width + dim;
  const Requests requests({{0, 1}, {130, 1}, {5, 33}});
  const auto rows = static_cast<size_t>(requests.tokens);
  Floats x = random_floats(rows * width), out(rows * heads * dim);
  const Floats norm = random_floats(rank), cos_sin = random_floats(512 * rope);
  Floats pages(static_cast<size_t>(requests.blocks * kPage * dim));
  WindlassCommand c{};
  c.op = windlass::kLatent;
  c.rows = requests.tokens;
  const int sizes[12] = {heads, 1,    dim,  kPage, windlass::kTypeF32, 0,
                         kPage, rope, nope, width, width,              1};
  std::copy(sizes, sizes + 12, c.sizes);
  c.scalars[0] = static_cast<float>(kEps);
  c.step_tensors[0] = c.step_tensors[1] = x.data();
  c.step_tensors[2] = out.data();
  c.model_tensors[0] = cos_sin.data();
  c.model_tensors[1] = norm.data();
  c.model_tensors[2] = c.model_tensors[3] = pages.data();
  run(pool, c, requests.step());
  for (size_t token = 0; token < rows; ++token) {
    const int position = requests.positions[token];
    const float* angles = cos_sin.data() + position * rope;
    const auto check = [&](const float* from, const float* to) {
      for (int i = 0; i < rope / 2; ++i) {
        const double a = from[2 * i], b = from[2 * i + 1];
        const double cosine = angles[i], sine = angles[i + rope / 2];
        expect("latent", to[i], a * cosine - b * sine, kClose);
        expect("latent", to[i + rope / 2], b * cosine + a * sine, kClose);
      }
    };
    const float* row = x.data() + token * width;
    for (int head = 0; head < heads; ++head) {
      check(row + head * (nope + rope) + nope, out.data() + (token * heads + head) * dim + rank);
    }
    const Doubles low(row + q_width, row + q_width + rank);
    const Doubles wanted = normalised(low.data(), norm, kEps);
    const float* written = pages.data() + requests.index(static_cast<int>(token), position, 0, 1) * dim;
    for (size_t i = 0; i < rank; ++i) expect("latent", written[i], wanted[i], 10 * kClose);
    check(row + q_width + rank, written + rank);
  }
}

// A convolution over two tokens and one scan, over states in pages that are zero before the first token.
inline void check_mamba(WindlassPool* pool) {
  constexpr int heads = 2, dim = 8, size = 16, inner = heads * dim, channels = inner + 2 * size;
  constexpr int width = inner + channels + heads, recurrent = inner * size, page = recurrent + channels;
  const Requests requests({{0, 1}, {130, 1}, {5, 33}});
  const auto rows = static_cast<size_t>(requests.tokens);
  Floats x = random_floats(rows * width), mixed(rows * channels), out(rows * inner);
  const Floats weight = random_floats(2 * channels), bias = random_floats(channels);
  const Floats decay(heads, -0.5f), skip = random_floats(heads), dt_bias = random_floats(heads);
  Floats pages(static_cast<size_t>(requests.blocks * page));
  const auto silu = [](double v) { return v / (1.0 + std::exp(-v)); };
  WindlassCommand conv{}, scan{};
  conv.op = windlass::kCausalConv;
  conv.rows = scan.rows = requests.tokens;
  const int conv_sizes[8] = {inner, channels, 2, width, kPage, 0, page, recurrent};
  std::copy(conv_sizes, conv_sizes + 8, conv.sizes);
  conv.step_tensors[0] = scan.step_tensors[0] = x.data();
  conv.step_tensors[1] = scan.step_tensors[1] = mixed.data();
  conv.model_tensors[0] = weight.data();
  conv.model_tensors[1] = bias.data();
  conv.model_tensors[2] = scan.model_tensors[3] = pages.data();
  run(pool, conv, requests.step());
  scan.op = windlass::kSelectiveScan;
  const int scan_sizes[8] = {heads, dim, 1, size, width, kPage, 0, page};
  std::copy(scan_sizes, scan_sizes + 8, scan.sizes);
  scan.step_tensors[2] = out.data();
  scan.model_tensors[0] = decay.data();
  scan.model_tensors[1] = skip.data();
  scan.model_tensors[2] = dt_bias.data();
  run(pool, scan, requests.step());
  for (const WindlassRow& row : requests.rows) {
    Doubles state(recurrent);
    for (int t = 0; t < row.count; ++t) {
      const float* own = x.data() + (row.first + t) * width;
      const float* got = mixed.data() + (row.first + t) * channels;
      for (int i = 0; i < channels; ++i) {
        const double before = t > 0 ? own[inner + i - width] : 0.0;
        const double sum = bias[static_cast<size_t>(i)] + before * weight[static_cast<size_t>(2 * i)] +
                           own[inner + i] * static_cast<double>(weight[static_cast<size_t>(2 * i + 1)]);
        expect("causal_conv", got[i], silu(sum), 10 * kClose);
      }
      for (int d = 0; d < inner; ++d) {
        const auto head = static_cast<size_t>(d / dim);
        const double dt = std::log1p(std::exp(own[width - heads + d / dim] + static_cast<double>(dt_bias[head])));
        double y = skip[head] * static_cast<double>(got[d]);
        for (int n = 0; n < size; ++n) {
          double& at = state[static_cast<size_t>(d * size + n)];
          at = at * std::exp(dt * decay[head]) + dt * got[d] * got[inner + n];
          y += at * got[inner + size + n];
        }
        expect("selective_scan", out[static_cast<size_t>((row.first + t) * inner + d)], y * silu(own[d]), 30 * kClose);
      }
    }
  }
}

// A gated convolution over three tokens, over states in pages that are zero before the first token.
inline void check_short_conv(WindlassPool* pool) {
  constexpr int channels = 72, size = 3, width = 3 * channels, page = channels * (size - 1);
  const Requests requests({{0, 1}, {130, 1}, {5, 33}});
  const auto rows = static_cast<size_t>(requests.tokens);
  Floats x = random_floats(rows * width), out(rows * channels);
  const Floats weight = random_floats(channels * size), bias = random_floats(channels);
  Floats pages(static_cast<size_t>(requests.blocks * page));
  WindlassCommand command{};
  command.op = windlass::kShortConv;
  command.rows = requests.tokens;
  const int sizes[5] = {channels, size, kPage, 0, page};
  std::copy(sizes, sizes + 5, command.sizes);
  command.step_tensors[0] = x.data();
  command.step_tensors[1] = out.data();
  command.model_tensors[0] = weight.data();
  command.model_tensors[1] = bias.data();
  command.model_tensors[2] = pages.data();
  run(pool, command, requests.step());
  for (const WindlassRow& row : requests.rows) {
    for (int t = 0; t < row.count; ++t) {
      for (int i = 0; i < channels; ++i) {
        const float* own = x.data() + (row.first + t) * width + i;
        double sum = bias[static_cast<size_t>(i)];
        for (int ago = 0; ago < std::min(size, t + 1); ++ago) {
          const float* input = own - ago * width;
          sum += static_cast<double>(weight[static_cast<size_t>(i * size + size - 1 - ago)]) * input[0] * input[2 * channels];
        }
        expect("short_conv", out[static_cast<size_t>((row.first + t) * channels + i)], sum * own[channels], 10 * kClose);
      }
    }
  }
}

// One delta rule over states in pages that are zero before the first token.
inline void check_delta(WindlassPool* pool) {
  constexpr int heads = 2, dim = 8, size = 16, inner = heads * dim, channels = inner + 2 * size;
  constexpr int width = inner + channels + 2 * heads, page = inner * size;
  const Requests requests({{0, 1}, {130, 1}, {5, 33}});
  const auto rows = static_cast<size_t>(requests.tokens);
  Floats x = random_floats(rows * width), mixed = random_floats(rows * channels), out(rows * inner);
  const Floats decay(heads, -0.5f), dt_bias = random_floats(heads), norm = random_floats(dim);
  Floats pages(static_cast<size_t>(requests.blocks * page));
  WindlassCommand c{};
  c.op = windlass::kDeltaRule;
  c.rows = requests.tokens;
  const int sizes[9] = {heads, dim, 1, size, width, kPage, 0, page, 0};
  std::copy(sizes, sizes + 9, c.sizes);
  c.scalars[0] = kEps;
  c.step_tensors[0] = x.data();
  c.step_tensors[1] = mixed.data();
  c.step_tensors[2] = out.data();
  c.model_tensors[0] = decay.data();
  c.model_tensors[1] = dt_bias.data();
  c.model_tensors[2] = norm.data();
  c.model_tensors[3] = pages.data();
  run(pool, c, requests.step());
  const auto unit = [](const float* from) {
    double squares = 1e-6;
    for (int n = 0; n < size; ++n) squares += static_cast<double>(from[n]) * from[n];
    Doubles found(from, from + size);
    for (double& each : found) each /= std::sqrt(squares);
    return found;
  };
  for (const WindlassRow& row : requests.rows) {
    Doubles state(page);
    for (int t = 0; t < row.count; ++t) {
      const float* own = x.data() + (row.first + t) * width;
      const float* values = mixed.data() + (row.first + t) * channels;
      const Doubles key = unit(values + inner), query = unit(values + inner + size);
      for (int head = 0; head < heads; ++head) {
        const double beta = 1.0 / (1.0 + std::exp(-static_cast<double>(own[width - 2 * heads + head])));
        const auto at = static_cast<size_t>(head);
        const double dt = std::log1p(std::exp(own[width - heads + head] + static_cast<double>(dt_bias[at])));
        Doubles y(dim);
        for (int d = 0; d < dim; ++d) {
          double* line = state.data() + (head * dim + d) * size;
          double known = 0.0, sum = 0.0;
          for (int n = 0; n < size; ++n) {
            line[n] *= std::exp(dt * decay[at]);
            known += line[n] * key[static_cast<size_t>(n)];
          }
          for (int n = 0; n < size; ++n) {
            line[n] += beta * (values[head * dim + d] - known) * key[static_cast<size_t>(n)];
            sum += line[n] * query[static_cast<size_t>(n)];
          }
          y[static_cast<size_t>(d)] = sum / std::sqrt(static_cast<double>(size));
        }
        const Doubles wanted = normalised(y.data(), norm, kEps);
        for (int d = 0; d < dim; ++d) {
          const int i = head * dim + d;
          const double silu = own[i] / (1.0 + std::exp(-static_cast<double>(own[i])));
          expect("delta_rule", out[static_cast<size_t>((row.first + t) * inner + i)],
                 wanted[static_cast<size_t>(d)] * silu, 50 * kClose);
        }
      }
    }
  }
}

inline void check_operations(WindlassPool* pool) {
  for (int rows : {1, 5, 40}) {
    for (int width : {1, 8, 50, 576}) {
      check_rows(pool, rows, width);
      check_lora(pool, rows, width, width + 3);
      check_sample(pool, rows, width);
    }
  }
  for (int rows : {1, 2, 7}) check_per_head(pool, rows);
  check_latent(pool);
  check_mamba(pool);
  check_delta(pool);
  check_short_conv(pool);
  for (int type : {0, 1, 2, 3}) {
    for (int dim : {8, 40, 64}) {
      for (int window : {0, dim == 8 ? 1 : 100}) check_pages(pool, type, dim, {window, dim});
    }
    check_pages(pool, type, 40, {0, 24, true, true, false, true, 0.0f});
    check_pages(pool, type, 64, {100, 0, false, false, true, false, 0.5f});
    check_pages(pool, type, 80, {7, 32, false, true, true, true, 0.1f});
  }
}

}  // namespace selftest
