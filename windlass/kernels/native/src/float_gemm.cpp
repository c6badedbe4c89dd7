// GEMMs of float32, 16-bit and 4-bit table weights with unquantised activations, in float32.
//
// Table codes, and 16-bit weights when there are many rows, are first unpacked to float32 in the L1
// cache.

#include "gemm.h"

namespace windlass {

namespace tile {
namespace {

constexpr int kMaxInputs = 4096 / kTile;  // of an unpacked tile: 16 KiB of floats

// MT rows by the outputs of a tile, over `count` inputs. Two accumulators hide the latency of the
// additions. Their order is the same for all MT, so that a row's result does not depend on the
// batch.
template <int MT, class Value>
inline void multiply(const Value* w, const float* x, int count, float* out) {
  Floats even[MT], odd[MT];
  for (int m = 0; m < MT; ++m) even[m] = odd[m] = zero();
  const auto step = [&](int k, Floats(&sums)[MT]) {
    const Floats weight = load_scales(w + k * kTile);
    const Quad in = load_quad(x + k * kPanelRows);
    unrolled<MT>([&](auto m) { sums[m] = fma_lane<m>(sums[m], weight, in); });
  };
  int k = 0;
  for (; k + 2 <= count; k += 2) {
    step(k, even);
    step(k + 1, odd);
  }
  if (k < count) step(k, even);
  for (int m = 0; m < MT; ++m) store(out + m * kTile, add(even[m], odd[m]));
}

template <class Value>
void multiply_panels(const GemmArgs& job, Target to, int t, int first, int last, const Value* w,
                     int begin, int end) {
  each_panel(job, first, last, [&](auto rows, int p) {
    const float* x = reinterpret_cast<const float*>(job.panel(p));
    alignas(64) float sums[kPanelRows * kTile];
    multiply<rows>(w, x + static_cast<size_t>(begin) * kPanelRows, end - begin, sums);
    store_tile(job, to, t, p * kPanelRows, rows, sums, job.add || begin > 0);
  });
}

template <class Value>
void unpack_halves(const Value* from, int count, float* out) {
  for (int k = 0; k < count; ++k) store(out + k * kTile, load_scales(from + k * kTile));
}

void unpack_table(const Weight& w, const uint8_t* tile, int begin, int end, float* out) {
  const Table16 table = load_table(w.table);
  const float* scales = reinterpret_cast<const float*>(tile);
  const uint8_t* codes = tile + scale_bytes(w) + static_cast<size_t>(begin) * kTile / 2;
  for (int k = begin; k < end; k += 4, codes += 2 * kTile, out += 4 * kTile) {
    lookup32(table, codes, load(scales + k / w.group * kTile), out);
  }
}

}  // namespace
}  // namespace tile

void float_gemm(const GemmArgs& job) {
  using namespace tile;
  const int count = padded_in(job.w);
  const bool direct = job.rows < kMinUnpackRows;
  each_chunk(job, [&](int t, int first, int last, Target to) {
    const uint8_t* tile = job.tile(t);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(tile);
    const Bf16* bf16 = reinterpret_cast<const Bf16*>(tile);
    const float* floats = reinterpret_cast<const float*>(tile);
    alignas(64) float scratch[kMaxInputs * kTile];
    for (int begin = 0; begin < count; begin += kMaxInputs) {
      const int end = std::min(begin + kMaxInputs, count);
      if (job.w.kind == kF32) {
        multiply_panels(job, to, t, first, last, floats + begin * kTile, begin, end);
        continue;
      }
      if (direct && job.w.kind == kF16) {
        multiply_panels(job, to, t, first, last, halves + begin * kTile, begin, end);
        continue;
      }
      if (direct && job.w.kind == kBf16) {
        multiply_panels(job, to, t, first, last, bf16 + begin * kTile, begin, end);
        continue;
      }
      if (job.w.kind == kF16) {
        unpack_halves(halves + begin * kTile, end - begin, scratch);
      } else if (job.w.kind == kBf16) {
        unpack_halves(bf16 + begin * kTile, end - begin, scratch);
      } else {
        unpack_table(job.w, tile, begin, end, scratch);
      }
      multiply_panels(job, to, t, first, last, static_cast<const float*>(scratch), begin, end);
    }
  });
}

}  // namespace windlass
