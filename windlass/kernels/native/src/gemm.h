// What the gemm of whole numbers and of floats share: who computes what, and where it goes.

#pragma once

#include <algorithm>
#include <cstring>

#include "amx.h"
#include "outliers.h"
#include "run.h"
#include "simd.h"
#include "weight.h"

namespace windlass {

constexpr int kSquarePanels = kSquare / kPanel;

struct Product {
  Pool& pool;
  const Weight& w;
  const uint8_t* panels;  // rows of x, 4 at a time
  size_t panel_bytes;
  const uint8_t* outliers = nullptr;  // of the rows, or null: see panels.h
  size_t outlier_bytes = 0;
  // The same by input, for every piece of panels; null below kManyRows.
  const uint8_t* columns = nullptr;
  size_t column_bytes = 0;
  const uint8_t* squares = nullptr;  // the codes of all rows for AMX, or null: see amx.h
  int cut = 1;       // panels that are computed with one tile before the next
  int planes = 1;    // rows of the panels that make one of y: 1 or 2
  int rows = 0;      // of the panels
  float gain = 1.0;  // of all sums
  float* y = nullptr;
  int stride = 0;  // between rows of y
  bool add = false;
  const float* bias = nullptr;
  float* active = nullptr;  // if given: silu of y's first half times the second, instead of y

  int num_panels() const { return ceil_div(rows, kPanel); }
  const uint8_t* panel(int p) const { return panels + static_cast<size_t>(p) * panel_bytes; }
  const uint8_t* row_outliers(int row) const {
    return outliers + static_cast<size_t>(row) * outlier_bytes;
  }
  const OutlierColumns& piece_columns(int panel) const {
    const uint8_t* piece = columns + static_cast<size_t>(panel / cut) * column_bytes;
    return *reinterpret_cast<const OutlierColumns*>(piece);
  }
  const uint8_t* square(int panel) const {
    return squares + static_cast<size_t>(panel / kSquarePanels) * square_bytes(w);
  }
  const uint8_t* tile(int t) const { return w.data + static_cast<size_t>(t) * tile_bytes(w); }
};

void int_product(const Product& job);
void float_product(const Product& job);
void bf16_gemm_rows(const Product& job);

// From this many rows on a tile is unpacked once for all of them.
constexpr int kManyRows = 6;

// Panels that are computed with one tile before the next. Few enough to stay in the core's second
// cache while many tiles pass by; the tile itself stays in the first.
constexpr int kMostPanels = 128;
inline int panel_cut(int rows, size_t panel_bytes, size_t near_bytes = 256 << 10, int most = 32) {
  const int panels = ceil_div(rows, kPanel);
  if (rows < kManyRows) return panels;
  const size_t fitting = near_bytes / panel_bytes;
  const int cut = static_cast<int>(std::clamp<size_t>(fitting, 4, static_cast<size_t>(most)));
  const int even = ceil_div(panels, ceil_div(panels, cut));
  return round_up(even, kHasAmx ? kSquarePanels : 2);  // panels are often multiplied in pairs
}

// Where a tile's outputs go: to y, or to memory of the piece if they are gated.
struct Target {
  float* first;
  int stride;
  int row;  // that `first` belongs to
};

namespace tile {

// Asks for the place of a panel's outputs, some time before they are written: rows lie far apart,
// and no CPU guesses where.
inline void fetch_target(const Product& job, Target to, int panel) {
  if (to.stride == kTile) return;  // memory of the piece
  const int rows = kPanel / job.planes;
  float* out = row_of(to.first, panel * rows - to.row, to.stride);
  for (int m = 0; m < rows; ++m, out += to.stride) __builtin_prefetch(out, 1);
}

// Writes the sums of some rows of one tile, both planes of a row together; columns past the end are
// dropped. What outliers add to the sums is in `rest`, if given.
inline void store_tile(const Product& job, Target to, int tile, int first_row, int rows,
                       const float* sums, bool add_to, const float* rest = nullptr) {
  const Floats gain = splat(job.gain);
  const int valid = std::min(kTile, job.w.num_out - tile * kTile);
  const auto sum_of_row = [&](int m) {
    const Floats sum = load(sums + m * kTile);
    return rest == nullptr ? sum : add(sum, load(rest + m * kTile));
  };
  // Without divisions, which take as long as the rest.
  float* out = row_of(to.first, (job.planes == 1 ? first_row : first_row / 2) - to.row, to.stride);
  for (int m = 0; m < rows; m += job.planes, out += to.stride) {
    Floats sum = sum_of_row(m);
    if (job.planes == 2) sum = add(sum, sum_of_row(m + 1));
    const Floats value = mul(sum, gain);
    if (valid == kTile) {
      store(out, add_to ? add(load(out), value) : value);
      continue;
    }
    float spare[kTile];
    store(spare, value);
    for (int i = 0; i < valid; ++i) out[i] = add_to ? out[i] + spare[i] : spare[i];
  }
}

// The same for a whole panel of one plane and a tile without an end, as most are.
inline void store_whole(const Product& job, Target to, int first_row, const float* sums,
                        bool add_to, const float* rest) {
  const Floats gain = splat(job.gain);
  float* out = row_of(to.first, first_row - to.row, to.stride);
  Floats value[kPanel];
  for (int m = 0; m < kPanel; ++m) {
    const Floats sum = load(sums + m * kTile);
    value[m] = mul(rest == nullptr ? sum : add(sum, load(rest + m * kTile)), gain);
  }
  for (int m = 0; m < kPanel; ++m, out += to.stride) {
    store(out, add_to ? add(load(out), value[m]) : value[m]);
  }
}

}  // namespace tile

// Calls body(constant number of rows, panel) for panels [first, last).
template <class Body>
inline void each_panel(const Product& job, int first, int last, const Body& body) {
  for (int p = first; p < last; ++p) {
    switch (std::min(kPanel, job.rows - p * kPanel)) {
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

// Calls body(first panel, rows) for squares of the panels [first, last).
template <class Body>
inline void each_square(const Product& job, int first, int last, const Body& body) {
  for (int p = first; p < last; p += kSquarePanels) {
    body(p, std::min(kSquare, std::min(last * kPanel, job.rows) - p * kPanel));
  }
}

inline void add_bias(const Product& job, Target to, int tile, int rows) {
  const int width = std::min(kTile, job.w.num_out - tile * kTile);
  for (int m = 0; m < rows; ++m) {
    float* y = row_of(to.first, m, to.stride);
    for (int i = 0; i < width; ++i) y[i] += job.bias[tile * kTile + i];
  }
}

// Calls body(tile, first panel, last panel, target) for all of the gemm, on all threads. What is
// gated is written some tiles at a time: of few rows so many that gates, and what they are multiplied
// by, are read in long runs; of many two, which is a line of the cache, of which few would still be
// there for the second half.
template <class Body>
inline void each_piece(const Product& job, const Body& body) {
  const bool gated = job.active != nullptr;
  const int half = job.w.num_out / 2;
  const int tiles = num_tiles(job.w) / (gated ? 2 : 1);
  const int panels = job.num_panels();
  const int cut = job.cut;
  const int pieces = tiles * ceil_div(panels, cut);
  const int64_t gemm = static_cast<int64_t>(job.rows) * job.w.num_in * job.w.num_out;
  // Less than this is done before another thread has begun. The last shares are small, since whoever
  // ends first waits.
  const int least = std::max(1, pieces / (job.pool.threads() * 128));
  const int chunk = gemm < (64 << 10) ? pieces : least;
  const int together = job.rows < kManyRows ? 16 : 2;
  job.pool.each(pieces, chunk, [&](int begin, int end) {
    constexpr int most = 2 * kMostPanels * kPanel * kTile;
    alignas(64) float gates[most], up[most];
    for (int i = begin, count; i < end; i += count) {
      const int tile = i % tiles, first = i / tiles * cut;
      const int last = std::min(first + cut, panels);
      const int row = first * kPanel / job.planes;
      const int rows = std::min(last * kPanel, job.rows) / job.planes - row;
      count = std::min(end - i, tiles - tile);
      if (gated) count = std::min(count, together - tile % together);
      const auto compute = [&](int from, Target to, int next) {
        for (int t = from; t < from + count; ++t, to.first += next) {
          body(t, first, last, to);
          if (job.bias != nullptr) add_bias(job, to, t, rows);
        }
      };
      if (!gated) {
        compute(tile, {row_of(job.y, row, job.stride) + tile * kTile, job.stride, row}, kTile);
        continue;
      }
      const int size = rows * kTile;
      compute(tile, {gates, kTile, row}, size);
      compute(tiles + tile, {up, kTile, row}, size);
      gate(gates, up, count * size, gates);
      for (int m = 0; m < rows; ++m) {
        float* out = row_of(job.active, row + m, half) + tile * kTile;
        for (int t = 0; t < count; ++t) {
          std::memcpy(out + t * kTile, gates + t * size + m * kTile, kTile * sizeof(float));
        }
      }
    }
  });
}

}  // namespace windlass
