// Every command but products, over odd sizes, in exactly sized memory. Values are compared with the
// plain versions elsewhere; here sanitisers look at reads and writes, and results must be numbers.

#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "api.h"

namespace selftest {

using Floats = std::vector<float>;

inline Floats some(size_t count) {
  Floats out(count);
  unsigned state = 12345;
  for (float& x : out) {
    state = state * 1664525u + 1013904223u;
    x = static_cast<float>(state >> 8) / 16777216.0f - 0.5f;
  }
  return out;
}

inline void run(WindlassPool* pool, WindlassCommand& command, const WindlassStep& step,
                const Floats& out) {
  if (windlass_run(pool, &command, 1, &step) != 0) std::exit(2);
  for (float x : out) {
    if (std::isfinite(x)) continue;
    std::printf("operation %d: no number came out\n", command.op);
    std::exit(1);
  }
}

inline void check_rows(WindlassPool* pool, int rows, int width) {
  const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(width);
  const size_t wide = static_cast<size_t>(width);
  Floats x = some(2 * count), residual = some(count), out(count), scales(static_cast<size_t>(rows));
  const Floats weight = some(wide), table = some(3 * wide);
  std::vector<int32_t> picked(static_cast<size_t>(rows), 1), largest(static_cast<size_t>(rows));
  WindlassStep step{};
  step.ids = step.sampled = picked.data();
  for (int op : {windlass::kNorm, windlass::kAddNorm, windlass::kSiluMul, windlass::kRound,
                 windlass::kEmbed, windlass::kGather, windlass::kArgmax}) {
    WindlassCommand c{};
    c.op = op;
    c.rows = rows;
    c.sizes[0] = width;
    c.numbers[0] = 1e-5f;
    c.moving[0] = op == windlass::kEmbed ? out.data() : x.data();
    c.moving[1] = op == windlass::kAddNorm ? residual.data() : out.data();
    c.moving[2] = op == windlass::kAddNorm ? out.data() : scales.data();
    c.fixed[0] = op == windlass::kEmbed ? table.data() : op == windlass::kRound ? nullptr
                                                                                : weight.data();
    if (op == windlass::kGather) picked.assign(picked.size(), rows - 1);
    if (op == windlass::kArgmax) c.moving[1] = largest.data();
    run(pool, c, step, out);
    if (op == windlass::kEmbed && out[0] != table[wide]) std::exit(1);
  }
}

// Rows of (start, count), each with pages of its own.
inline void check_pages(WindlassPool* pool, int type, int dim, int window) {
  constexpr int page = 16, heads = 6, kv_heads = 2;
  const std::vector<std::pair<int, int>> shapes = {{0, 1}, {130, 1}, {5, 33}, {250, 7}, {0, 20}};
  std::vector<WindlassRow> rows;
  std::vector<int32_t> positions, slots, tables;
  int tokens = 0, blocks = 0;
  constexpr int stride = 20;
  for (auto [start, count] : shapes) {
    const int slot = static_cast<int>(rows.size());
    rows.push_back({tokens, count, start, slot});
    for (int i = 0; i < count; ++i) positions.push_back(start + i), slots.push_back(slot);
    for (int i = 0; i < stride; ++i) tables.push_back(i * page < start + count ? blocks++ : -1);
    tokens += count;
  }
  const size_t places = static_cast<size_t>(blocks) * kv_heads * page;
  const size_t bytes = places * static_cast<size_t>(dim) * (type == 0 ? 4 : type == 3 ? 1 : 2);
  std::vector<uint8_t> keys(bytes), values(bytes);
  Floats key_scales(places, 1.0f), value_scales(places, 1.0f);
  const size_t wide = static_cast<size_t>(dim), all = static_cast<size_t>(tokens) * wide;
  const Floats cos_sin = some(400u * wide), norm = some(wide);
  Floats qkv = some(all * (heads + 2 * kv_heads)), q(all * heads), out(q.size());
  const WindlassStep step{tokens,           static_cast<int32_t>(rows.size()), 0, stride, nullptr,
                          positions.data(), slots.data(), tables.data(), rows.data(), nullptr};
  const void* pages[4] = {keys.data(), values.data(), type == 3 ? key_scales.data() : nullptr,
                          type == 3 ? value_scales.data() : nullptr};
  for (int op : {windlass::kRope, windlass::kAttend}) {
    const bool rope = op == windlass::kRope;
    WindlassCommand c{};
    c.op = op;
    c.rows = tokens;
    const int sizes[6] = {heads, kv_heads, dim, page, type, rope ? dim : window};
    std::copy(sizes, sizes + 6, c.sizes);
    c.numbers[0] = rope ? 1e-5f : 0.125f;
    c.moving[0] = rope ? qkv.data() : q.data();
    c.moving[1] = rope ? q.data() : out.data();
    if (rope) c.fixed[0] = cos_sin.data(), c.fixed[1] = c.fixed[2] = norm.data();
    std::copy(pages, pages + 4, c.fixed + (rope ? 3 : 0));
    run(pool, c, step, rope ? q : out);
  }
}

inline void check_operations(WindlassPool* pool) {
  for (int rows : {1, 5, 40}) {
    for (int width : {1, 8, 50, 576}) check_rows(pool, rows, width);
  }
  for (int type : {0, 1, 2, 3}) {
    for (int dim : {8, 40, 64}) {
      for (int window : {0, 1, 100}) check_pages(pool, type, dim, window);
    }
  }
}

}  // namespace selftest
