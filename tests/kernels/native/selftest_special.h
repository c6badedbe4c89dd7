// Checks NaN, infinities, -0.0, subnormals and values beyond float16 against the definitions: NaN for
// NaN, infinity for infinity, close elsewhere, and no other row changes. The values are those of
// test_special_values.py, for CPUs that only an emulator runs.

#pragma once

#include <limits>

#include "selftest_ops.h"

namespace selftest {

inline std::vector<float> special_values() {
  // NaN, NaN with all payload bits, negative NaN, the infinities, -0.0, 1e-40, 70000.
  const uint32_t bits[] = {0x7fc00000, 0x7fffffff, 0xffc00000, 0x7f800000,
                           0xff800000, 0x80000000, 0x000116c2, 0x4788b800};
  std::vector<float> out(std::size(bits));
  std::memcpy(out.data(), bits, sizeof bits);
  return out;
}

// `lossy`: NaN may replace infinity.
inline void expect_special(const char* what, double found, double wanted, double tolerance,
                           bool lossy = false) {
  if (lossy && !std::isfinite(wanted) && !std::isfinite(found)) return;
  if (std::isnan(wanted) ? std::isnan(found) : found == wanted) return;
  if (!std::isfinite(wanted)) tolerance = -1.0;
  expect(what, found, wanted, tolerance);
}

inline void expect_equal(const char* what, const float* found, const float* wanted, size_t count) {
  if (std::memcmp(found, wanted, count * sizeof(float)) == 0) return;
  std::printf("%s: a special value changed another row\n", what);
  std::exit(1);
}

inline size_t best_of(const float* x, size_t width) {
  size_t best = 0;
  for (size_t i = 0; i < width && !std::isnan(x[best]); ++i) {
    if (x[i] > x[best] || std::isnan(x[i])) best = i;
  }
  return best;
}

inline void check_special_row(const Rows& r, int op, size_t row) {
  const float* x = r.x.data() + row * r.width;
  const float* gates = r.x.data() + row * 2 * r.width;
  const Doubles wide(x, x + r.width), normed = normalised(wide.data(), r.weight, kEps);
  bool finite = true;
  for (size_t i = 0; i < r.width; ++i) finite &= std::isfinite(x[i]);
  for (size_t i = 0; i < r.width; ++i) {
    const double found = r.out[row * r.width + i];
    if (op == windlass::kNorm) {
      expect_special("norm", found, normed[i], kClose * (1.0 + std::fabs(normed[i])));
    } else if (op == windlass::kSiluMul) {
      const double wanted = silu(gates[i]) * gates[r.width + i];
      expect_special("silu", found, wanted, kClose * (1.0 + std::fabs(wanted)));
    } else if (op == windlass::kQuantise && finite) {
      expect("rounded", found * r.scales[row], x[i], 0.5001 * r.scales[row]);
    }
  }
  if (op == windlass::kQuantise) expect("scale", std::isfinite(r.scales[row]), finite, 0.0);
  if (op == windlass::kArgmax) {
    expect("largest", r.largest[row], static_cast<double>(best_of(x, r.width)), 0.0);
  }
}

inline void check_special_rows(WindlassPool* pool, float value) {
  for (size_t index : {size_t{0}, size_t{103}, size_t{349}}) {
    Rows r(5, 70);
    r.x[index] = value;
    for (int op : {windlass::kNorm, windlass::kSiluMul, windlass::kQuantise, windlass::kArgmax}) {
      run_rows(pool, r, op);
      for (size_t row = 0; row < r.rows; ++row) check_special_row(r, op, row);
    }
  }
}

// A special value in a query head, the key head or the value head of one token.
inline void check_special_pages(WindlassPool* pool, int type, float value, int head) {
  const Requests requests({{130, 1}, {250, 7}, {5, 3}});
  const int dim = 24, token = 4, heads = kHeads + 2 * kKvHeads;
  const bool halves = type == windlass::kTypeF16;
  Pages p(requests, type, dim, {0, dim});
  p.run(pool, windlass::kRope, false);
  p.run(pool, windlass::kAttention);
  const Floats clean = p.out;
  p.qkv[static_cast<size_t>((token * heads + head) * dim + 5)] = value;
  p.run(pool, windlass::kRope, false);
  p.run(pool, windlass::kAttention);
  const Doubles keys = p.keys.all(), values = p.values.all();
  for (int t = 0; t < requests.tokens; ++t) {
    const bool own = requests.slots[static_cast<size_t>(t)] == 1;
    for (int h = 0; h < kHeads; ++h) {
      const size_t at = p.index_of(t, h);
      if (!own) expect_equal("attention", p.out.data() + at, clean.data() + at, dim);
      // Values that a query must not see are multiplied by 0, which turns infinity into NaN.
      if (!own || t < token) continue;
      const Doubles wanted = p.attended_by(t, h, keys, values);
      // Large 16-bit scores are too coarse to compare.
      for (size_t d = 0; d < wanted.size(); ++d) {
        const double tolerance = halves ? 1e30 : kClose * (2.0 + std::fabs(wanted[d]));
        expect_special("attention", p.out[at + d], wanted[d], tolerance, halves);
      }
    }
  }
}

inline void check_special(WindlassPool* pool) {
  for (float value : special_values()) {
    check_special_rows(pool, value);
    for (int type : {0, 1, 2, 3}) {
      for (int head : {3, kHeads + 1, kHeads + kKvHeads}) check_special_pages(pool, type, value, head);
    }
  }
}

}  // namespace selftest
