// Shared by the integer and float GEMMs: how work is split between threads, and where results go.

#pragma once

#include <algorithm>
#include <cstring>

#include "amx.h"
#include "outliers.h"
#include "run.h"
#include "simd.h"
#include "weight.h"

namespace windlass {

constexpr int kAmxPanels = kAmxRows / kPanelRows;

struct GemmArgs {
  Pool& pool;
  const Weight& w;
  const uint8_t* panels = nullptr;  // rows of x, 4 per panel
  size_t panel_bytes = 0;
  const uint8_t* outliers = nullptr;  // per row, or null: see panels.h
  size_t outlier_bytes = 0;
  // Outliers by input, for every chunk of panels; null below kMinUnpackRows.
  const uint8_t* columns = nullptr;
  size_t column_bytes = 0;
  // All rows in the AMX layout, or null: see amx.h.
  const uint8_t* amx_panels = nullptr;
  int panels_per_chunk = 1;  // panels multiplied with one tile before the next
  int planes = 1;  // panel rows per row of y: 1 or 2
  int rows = 0;  // panel rows
  float gain = 1.0;  // scale of all sums
  float* y = nullptr;
  int stride = 0;  // between rows of y
  bool add = false;
  const float* bias = nullptr;
  float* active = nullptr;  // if set: silu(first half of y) * second half goes here instead of y

  int num_panels() const { return ceil_div(rows, kPanelRows); }
  const uint8_t* panel(int p) const { return panels + static_cast<size_t>(p) * panel_bytes; }
  const uint8_t* row_outliers(int row) const {
    return outliers + static_cast<size_t>(row) * outlier_bytes;
  }
  const OutlierColumns& chunk_columns(int panel) const {
    const size_t chunk = static_cast<size_t>(panel / panels_per_chunk);
    const uint8_t* columns_memory = columns + chunk * column_bytes;
    return *reinterpret_cast<const OutlierColumns*>(columns_memory);
  }
  const uint8_t* amx_panel(int panel) const {
    return amx_panels + static_cast<size_t>(panel / kAmxPanels) * amx_bytes(w);
  }
  const uint8_t* tile(int t) const { return w.data + static_cast<size_t>(t) * tile_bytes(w); }
};

void int_gemm(const GemmArgs& job);
void float_gemm(const GemmArgs& job);
void bf16_gemm(const GemmArgs& job);
void prompt_gemm(const GemmArgs& job);

// From this many rows on, a tile is unpacked once for all of them.
constexpr int kMinUnpackRows = 6;

// Number of panels multiplied with one tile before the next. They stay in the L2 cache while many
// tiles pass; the tile itself stays in L1.
constexpr int kMaxPanels = 128;
inline int choose_panels_per_chunk(int rows, size_t panel_bytes, size_t l2_bytes = 256 << 10,
                                   int max_panels = 32) {
  const int panels = ceil_div(rows, kPanelRows);
  if (rows < kMinUnpackRows) return panels;
  const size_t fitting = l2_bytes / panel_bytes;
  const size_t clamped = std::clamp<size_t>(fitting, 4, static_cast<size_t>(max_panels));
  const int even = ceil_div(panels, ceil_div(panels, static_cast<int>(clamped)));
  return round_up(even, kHasAmx ? kAmxPanels : 2);  // panels are often multiplied in pairs
}

// Where the outputs of a tile go: to y, or to a buffer of the chunk if they are gated.
struct Target {
  float* first;
  int stride;
  int row;  // row that `first` belongs to
};

namespace tile {

// Prefetches the memory of a panel's outputs before they are written: rows lie far apart, and
// hardware prefetchers do not follow.
inline void prefetch_output(const GemmArgs& job, Target to, int panel) {
  if (to.stride == kTile) return;  // buffer of the chunk
  const int rows = kPanelRows / job.planes;
  float* out = row_of(to.first, panel * rows - to.row, to.stride);
  for (int m = 0; m < rows; ++m, out += to.stride) __builtin_prefetch(out, 1);
}

// Writes the sums of some rows of one tile and adds both planes of a row; columns past the end are
// dropped. `outlier_sums`, if given, holds the contribution of outliers.
inline void store_tile(const GemmArgs& job, Target to, int tile, int first_row, int rows,
                       const float* sums, bool add_to, const float* outlier_sums = nullptr) {
  const Floats gain = splat(job.gain);
  const int valid = std::min(kTile, job.w.num_out - tile * kTile);
  const auto sum_of_row = [&](int m) {
    const Floats sum = load(sums + m * kTile);
    return outlier_sums == nullptr ? sum : add(sum, load(outlier_sums + m * kTile));
  };
  // Avoids divisions, which would take as long as the other work.
  float* out = row_of(to.first, (job.planes == 1 ? first_row : first_row / 2) - to.row, to.stride);
  for (int m = 0; m < rows; m += job.planes, out += to.stride) {
    Floats sum = sum_of_row(m);
    if (job.planes == 2) sum = add(sum, sum_of_row(m + 1));
    const Floats value = mul(sum, gain);
    if (valid == kTile) {
      store(out, add_to ? add(load(out), value) : value);
      continue;
    }
    float scratch[kTile];
    store(scratch, value);
    for (int i = 0; i < valid; ++i) out[i] = add_to ? out[i] + scratch[i] : scratch[i];
  }
}

// The same for a full panel of one plane and a full tile, the common case.
inline void store_whole(const GemmArgs& job, Target to, int first_row, const float* sums,
                        bool add_to, const float* outlier_sums) {
  const Floats gain = splat(job.gain);
  float* out = row_of(to.first, first_row - to.row, to.stride);
  Floats value[kPanelRows];
  for (int m = 0; m < kPanelRows; ++m) {
    const Floats sum = load(sums + m * kTile);
    value[m] = mul(outlier_sums == nullptr ? sum : add(sum, load(outlier_sums + m * kTile)), gain);
  }
  for (int m = 0; m < kPanelRows; ++m, out += to.stride) {
    store(out, add_to ? add(load(out), value[m]) : value[m]);
  }
}

}  // namespace tile

// Calls body(constant number of rows, panel) for panels [first, last).
template <class Body>
inline void each_panel(const GemmArgs& job, int first, int last, const Body& body) {
  for (int p = first; p < last; ++p) {
    switch (std::min(kPanelRows, job.rows - p * kPanelRows)) {
      case 1:
        body(std::integral_constant<int, 1>{}, p);
        break;
      case 2:
        body(std::integral_constant<int, 2>{}, p);
        break;
      case 3:
        body(std::integral_constant<int, 3>{}, p);
        break;
      default:
        body(std::integral_constant<int, 4>{}, p);
    }
  }
}

inline void add_bias(const GemmArgs& job, Target to, int tile, int rows) {
  const int width = std::min(kTile, job.w.num_out - tile * kTile);
  for (int m = 0; m < rows; ++m) {
    float* y = row_of(to.first, m, to.stride);
    for (int i = 0; i < width; ++i) y[i] += job.bias[tile * kTile + i];
  }
}

// Up to N adjacent tiles, and the target of the first: those of the next tiles lie `next` floats apart.
struct TileRange {
  int first, count;
  Target to;
  int next;

  Target target(int i) const { return {to.first + i * next, to.stride, to.row}; }
};

// Calls body(session, tiles, first panel, last panel) for the whole GEMM on all threads, with up to N
// tiles at a time. A thread constructs a Session before it starts. Gated outputs are computed several
// tiles at a time: with few rows enough tiles that gate and up are read in long runs; with many rows two
// tiles, which fill a cache line, since more would be evicted before the second half.
template <class Session, int N, class Body>
inline void each_tiles(const GemmArgs& job, const Body& body) {
  const bool is_gated = job.active != nullptr;
  const int half = job.w.num_out / 2;
  const int tiles = num_tiles(job.w) / (is_gated ? 2 : 1);
  const int panels = job.num_panels();
  const int panels_per_chunk = job.panels_per_chunk;
  const int chunks = tiles * ceil_div(panels, panels_per_chunk);
  const int64_t work = static_cast<int64_t>(job.rows) * job.w.num_in * job.w.num_out;
  // Smaller work is done before another thread has started. The last shares are small, so that
  // threads finish together.
  const int min_grain = std::max(1, chunks / (job.pool.threads() * 128));
  const int64_t work_per_chunk = work / chunks;
  const int session = static_cast<int>(std::min<int64_t>(8, Session::kMinWork / std::max<int64_t>(1, work_per_chunk)));
  const int grain = work < (64 << 10) ? chunks : round_up(std::max(min_grain, session), N);
  const int tiles_at_once = job.rows < kMinUnpackRows ? 16 : 2;
  job.pool.each(chunks, grain, [&](int begin, int end) {
    constexpr int buffer_size = 2 * kMaxPanels * kPanelRows * kTile;
    alignas(64) float gates[buffer_size], up[buffer_size];
    Session session;
    for (int i = begin, count; i < end; i += count) {
      const int tile = i % tiles, first = i / tiles * panels_per_chunk;
      const int last = std::min(first + panels_per_chunk, panels);
      const int row = first * kPanelRows / job.planes;
      const int rows = std::min(last * kPanelRows, job.rows) / job.planes - row;
      count = std::min(end - i, tiles - tile);
      if (is_gated) count = std::min(count, tiles_at_once - tile % tiles_at_once);
      const auto compute = [&](int from, Target to, int next) {
        for (int t = from; t < from + count; t += N) {
          const TileRange at{t, std::min(N, from + count - t), to, next};
          body(session, at, first, last);
          for (int n = 0; n < at.count; ++n) {
            if (job.bias != nullptr) add_bias(job, at.target(n), t + n, rows);
          }
          to.first += N * next;
        }
      };
      if (!is_gated) {
        compute(tile, {row_of(job.y, row, job.stride) + tile * kTile, job.stride, row}, kTile);
        continue;
      }
      const int size = rows * kTile;
      compute(tile, {gates, kTile, row}, size);
      compute(tiles + tile, {up, kTile, row}, size);
      silu_mul(gates, up, count * size, gates);
      const auto copy_rows = [&](auto num_tiles) {
        float* out = row_of(job.active, row, half) + tile * kTile;
        const float* from = gates;
        for (int m = 0; m < rows; ++m, out += half, from += kTile) {
          for (int t = 0; t < num_tiles; ++t) {
            std::memcpy(out + t * kTile, from + t * size, kTile * sizeof(float));
          }
        }
      };
      count == 2 ? copy_rows(std::integral_constant<int, 2>{}) : copy_rows(count);
    }
  });
}

struct NoSession {
  static constexpr int64_t kMinWork = 0;
};

// Calls body(tile, first panel, last panel, target) for the whole GEMM on all threads.
template <class Body>
inline void each_chunk(const GemmArgs& job, const Body& body) {
  each_tiles<NoSession, 1>(job, [&](NoSession, const TileRange& tile, int first, int last) WINDLASS_INLINED {
    body(tile.first, first, last, tile.to);
  });
}

}  // namespace windlass
