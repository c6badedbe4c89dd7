// Checks every kind of GEMM over odd shapes against its definition, in exactly sized memory, so that
// sanitisers detect every read and write past an end. Exits with 1 and a message on a difference.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "amx.h"
#include "api.h"
#include "selftest_special.h"

namespace {

std::mt19937 generator(1234);

int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }
float normal() { return std::normal_distribution<float>()(generator); }

// A heavy-tailed distribution: outliers in many blocks. Cheap, for emulators.
float heavy() {
  const int drawn = static_cast<int>(generator() >> 12) - (1 << 19);
  return 1.0e5f / static_cast<float>(drawn >= 0 ? drawn + 20000 : drawn - 20000);
}

// Powers of two from 2^-6 to 2^-3, either sign: float16 values that need no conversion.
uint16_t random_f16(float& value) {
  const int exponent = pick(-6, -3);
  const bool negative = pick(0, 1) != 0;
  value = std::ldexp(negative ? -1.0f : 1.0f, exponent);
  return static_cast<uint16_t>((negative ? 0x8000 : 0) | (exponent + 15) << 10);
}

bool has_bytes(int kind) { return kind == windlass::kInt8 || kind == windlass::kInt6; }
bool may_have_offsets(int kind) { return kind == windlass::kInt4 || has_bytes(kind); }

struct Case {
  WindlassWeight weight{};
  std::vector<uint8_t> codes, packed;
  std::vector<uint16_t> f16, offsets;
  std::vector<int8_t> codebook, sub_scales;
  std::vector<float> floats, table, dense;  // dense: the dequantised weight, in the stored order
  std::vector<int32_t> perm;
};

float decode(Case& c, int n, int k, const std::vector<float>& scales,
             const std::vector<float>& offset_values) {
  const WindlassWeight& w = c.weight;
  const size_t at = static_cast<size_t>(n) * static_cast<size_t>(w.num_in) + static_cast<size_t>(k);
  const size_t group = static_cast<size_t>(n * (w.num_in / w.group) + k / w.group);
  const int nibble = at / 2 < c.codes.size() ? (at % 2 ? c.codes[at / 2] >> 4 : c.codes[at / 2] & 15) : 0;
  switch (w.kind) {
    case 0:
      return static_cast<float>(w.has_offsets ? nibble : nibble - 8) * scales[group] + offset_values[group];
    case 1:
    case windlass::kInt6:
      return static_cast<float>(static_cast<int8_t>(c.codes[at])) * scales[group] + offset_values[group];
    case windlass::kCodebook4:
      return c.codebook[static_cast<size_t>(nibble)] * scales[group];
    default:
      return c.table[static_cast<size_t>(nibble)] * scales[group];
  }
}

void make_coded(Case& c) {
  WindlassWeight& w = c.weight;
  const size_t count = static_cast<size_t>(w.num_out) * static_cast<size_t>(w.num_in);
  const size_t groups = static_cast<size_t>(w.num_out) * static_cast<size_t>(w.num_in / w.group);
  c.codes.resize(has_bytes(w.kind) ? count : count / 2);
  const bool six_bits = w.kind == windlass::kInt6;
  for (uint8_t& code : c.codes) {
    code = static_cast<uint8_t>(six_bits ? pick(-32, 31) : pick(0, 255));
  }
  std::vector<float> scales(groups), offset_values(groups, 0.0f);
  for (size_t g = 0; g < groups; ++g) {
    // Two groups share a scale, and each has its own sub-scale.
    const bool shared = w.super_group > 0 && g % 2 == 1;
    scales[g] = shared ? scales[g - 1] : 0.0f;
    if (!shared) c.f16.push_back(random_f16(scales[g]));
    if (w.has_offsets) c.offsets.push_back(random_f16(offset_values[g]));
  }
  for (size_t g = 0; g < groups && w.super_group > 0; ++g) {
    c.sub_scales.push_back(static_cast<int8_t>(pick(-31, 31)));
    scales[g] *= c.sub_scales.back();
  }
  c.floats = scales;
  for (int i = 0; i < 16; ++i) {
    c.table.push_back(normal());
    c.codebook.push_back(static_cast<int8_t>(pick(-127, 127)));
  }
  for (int n = 0; n < w.num_out; ++n) {
    for (int k = 0; k < w.num_in; ++k) c.dense.push_back(decode(c, n, k, scales, offset_values));
  }
}

void make_plain(Case& c) {
  WindlassWeight& w = c.weight;
  for (int i = 0; i < w.num_out * w.num_in; ++i) {
    float value;
    c.f16.push_back(random_f16(value));
    if (w.kind == windlass::kBf16) {  // the upper 16 bits of a float
      const uint32_t bits = static_cast<uint32_t>(c.f16.back()) << 16;
      std::memcpy(&value, &bits, 4);
    }
    c.dense.push_back(value);
  }
}

// `extra`: int4, int6 and int8 weights have offsets, codebooks sub-scales.
Case make(WindlassPool* pool, int kind, int num_out, int num_in, int group, bool extra,
          bool ordered) {
  const bool coded = kind <= 2 || kind >= windlass::kCodebook4;
  Case c;
  c.weight.kind = kind;
  c.weight.num_out = num_out;
  c.weight.num_in = num_in;
  c.weight.group = group;
  c.weight.has_offsets = extra && may_have_offsets(kind);
  c.weight.super_group = extra && kind == windlass::kCodebook4 ? 2 * group : 0;
  c.weight.gain = 1.0f;
  coded ? make_coded(c) : make_plain(c);
  c.table.resize(16);
  c.weight.table = c.table.data();
  c.weight.codebook = c.codebook.data();
  if (ordered) {
    for (int k = 0; k < num_in; ++k) c.perm.push_back((k + 5) % num_in);
    c.weight.perm = c.perm.data();
  }
  c.packed.resize(windlass_packed_bytes(&c.weight));
  const void* codes = coded ? static_cast<const void*>(c.codes.data())
                      : kind == 3 || kind == 5 ? static_cast<const void*>(c.f16.data())
                                             : c.dense.data();
  const void* scales = kind == 2 ? static_cast<const void*>(c.floats.data()) : c.f16.data();
  windlass_pack(pool, &c.weight, codes, scales, c.offsets.data(), c.sub_scales.data(),
                c.packed.data());
  c.weight.data = c.packed.data();
  return c;
}

// Returns 1 + x times the weight, where some rows belong to a prompt.
std::vector<float> gemm(WindlassPool* pool, const WindlassWeight& w, const std::vector<float>& x,
                           WindlassPrompt prompt) {
  const size_t rows = x.size() / static_cast<size_t>(w.num_in);
  std::vector<float> y(rows * static_cast<size_t>(w.num_out), 1.0f);
  WindlassCommand command{};
  command.op = windlass::kLinear;
  command.rows = static_cast<int32_t>(rows);
  command.sizes[0] = w.num_out;
  command.sizes[2] = windlass::kAddToY | windlass::kStepRows;
  command.step_tensors[0] = const_cast<float*>(x.data());
  command.step_tensors[1] = y.data();
  command.model_tensors[0] = &w;
  WindlassStep step{};
  step.num_tokens = command.rows;
  step.num_prompts = prompt.last > prompt.first ? 1 : 0;
  step.prompts = &prompt;
  if (windlass_run(pool, &command, 1, &step) != 0) std::exit(2);
  return y;
}

// A row's result must not depend on the batch.
void check_alone(WindlassPool* pool, const Case& c, const std::vector<float>& x,
                 const std::vector<float>& y, int first, int rows, WindlassPrompt prompt) {
  const WindlassWeight& w = c.weight;
  const std::vector<float> some(x.begin() + first * w.num_in,
                                x.begin() + (first + rows) * w.num_in);
  const WindlassPrompt own{std::clamp(prompt.first - first, 0, rows),
                           std::clamp(prompt.last - first, 0, rows)};
  const std::vector<float> found = gemm(pool, w, some, own);
  if (std::equal(found.begin(), found.end(), y.begin() + first * w.num_out)) return;
  std::printf("kind %d, %d x %d, group %d: rows %d to %d differ in a batch\n", w.kind, w.num_out,
              w.num_in, w.group, first, first + rows);
  std::exit(1);
}

void check(WindlassPool* pool, const Case& c, int rows, WindlassPrompt prompt = {0, 0}) {
  const WindlassWeight& w = c.weight;
  const size_t num_in = static_cast<size_t>(w.num_in), num_out = static_cast<size_t>(w.num_out);
  std::vector<float> x(static_cast<size_t>(rows) * num_in);
  for (float& value : x) value = heavy();
  if (rows == 14) {  // rows share outliers
    for (size_t i = 7; i < x.size(); i += 32) x[i] *= 8.0f;
  }
  const std::vector<float> y = gemm(pool, w, x, prompt);
  if (rows > 4) {
    check_alone(pool, c, x, y, 3, 1, prompt);
    check_alone(pool, c, x, y, 1, 3, prompt);
  }
  for (size_t m = 0; m < static_cast<size_t>(rows); ++m) {
    for (size_t n = 0; n < num_out; ++n) {
      double sum = 1.0, size = 1.0;
      for (size_t k = 0; k < num_in; ++k) {
        const size_t from = c.perm.empty() ? k : static_cast<size_t>(c.perm[k]);
        const double part = static_cast<double>(x[m * num_in + from]) * c.dense[n * num_in + k];
        sum += part;
        size += std::fabs(part);
      }
      const double found = y[m * num_out + n];
      const bool rounds = w.kind <= 1 || w.kind >= windlass::kCodebook4;
      const double allowed = (rounds ? 0.03 : 1e-5) * size;
      if (!(std::fabs(found - sum) <= allowed)) {
        std::printf("kind %d, %d x %d, group %d, offsets %d, rows %d: %g instead of %g\n", w.kind,
                    w.num_out, w.num_in, w.group, w.has_offsets, rows, found, sum);
        std::exit(1);
      }
    }
  }
}

// NaN or infinity in a row of x makes all its outputs not finite, and changes no other row.
void check_special_gemm(WindlassPool* pool, const Case& c, int rows, WindlassPrompt prompt) {
  const WindlassWeight& w = c.weight;
  const size_t num_in = static_cast<size_t>(w.num_in), num_out = static_cast<size_t>(w.num_out);
  std::vector<float> x(static_cast<size_t>(rows) * num_in);
  for (float& value : x) value = heavy();
  const std::vector<float> clean = gemm(pool, w, x, prompt);
  const size_t bad = static_cast<size_t>(rows) / 2, index = bad * num_in + num_in / 3;
  for (float value : selftest::special_values()) {
    const float before = std::exchange(x[index], value);
    const std::vector<float> y = gemm(pool, w, x, prompt);
    x[index] = before;
    for (size_t m = 0; m < static_cast<size_t>(rows); ++m) {
      const float* found = y.data() + m * num_out;
      if (m != bad) selftest::expect_equal("GEMM", found, clean.data() + m * num_out, num_out);
      for (size_t n = 0; m == bad && n < num_out; ++n) {
        selftest::expect("GEMM is finite", std::isfinite(found[n]), std::isfinite(value), 0.0);
      }
    }
  }
}

void check_special_gemms(WindlassPool* pool) {
  for (int kind = 0; kind <= windlass::kInt6; ++kind) {
    const bool has_extra = kind <= 1 || kind >= windlass::kCodebook4;
    for (int extra = 0; extra <= (has_extra ? 1 : 0); ++extra) {
      const Case c = make(pool, kind, 13, 256, 32, extra != 0, extra == 1);
      for (int rows : {1, 2, 4, 7, 19}) {
        check_special_gemm(pool, c, rows, {0, 0});
        if (kind == 0) check_special_gemm(pool, c, rows, {0, rows});
      }
    }
  }
}

#if defined(WINDLASS_AMX)

// A GEMM leaves the AMX registers of the calling thread as it found them.
void check_tile_configuration(WindlassPool* pool) {
  struct alignas(64) Config {
    uint8_t bytes[64] = {};
  };
  Config mine, found;
  mine.bytes[0] = 1;  // the palette
  mine.bytes[16] = 32, mine.bytes[48] = 3;  // 3 rows of 32 bytes
  const Case c = make(pool, windlass::kBf16, 33, 96, 96, false, false);
  const std::vector<float> x(static_cast<size_t>(7 * c.weight.num_in), 1.0f);
  __asm__ volatile("ldtilecfg %0" ::"m"(mine));
  gemm(pool, c.weight, x, {0, 0});
  __asm__ volatile("sttilecfg %0" : "=m"(found));
  _tile_release();
  gemm(pool, c.weight, x, {0, 0});
  Config none, after;
  __asm__ volatile("sttilecfg %0" : "=m"(after));
  if (std::memcmp(&mine, &found, 64) == 0 && std::memcmp(&none, &after, 64) == 0) return;
  std::printf("a GEMM changed the configuration of AMX tiles\n");
  std::exit(1);
}

#endif

}  // namespace

// With the argument "gemms" only GEMMs, with fewer rows, on one thread: not all emulators order
// memory as a CPU does. With "special" only special values, on one thread too.
int main(int argc, char** argv) {
  const bool all = argc == 1;
  if (argc > 1 && std::strcmp(argv[1], "special") == 0) {
    WindlassPool* pool = windlass_pool_new(1, 20);
    selftest::check_special(pool);
    check_special_gemms(pool);
    windlass_pool_free(pool);
    std::printf("%s: special values agree\n", windlass_simd());
    return 0;
  }
  WindlassPool* pool = windlass_pool_new(all ? 2 : 1, 20);
  const int shapes[][3] = {{1, 32, 32},   {8, 64, 16},  {13, 96, 32},     {9, 48, 48},
                           {17, 160, 16}, {3, 50, 50},  {5, 2304, 2304},  {11, 2304, 128},
                           {4, 4352, 64}, {30, 96, 48}, {16, 96, 32}};
  for (const auto& shape : shapes) {
    for (int kind = 0; kind <= windlass::kInt6; ++kind) {
      if (kind == 2 && shape[2] % 4) continue;
      const bool two_levels = kind == windlass::kCodebook4 && shape[1] / shape[2] % 2 == 0;
      for (int extra = 0; extra <= (may_have_offsets(kind) || two_levels ? 1 : 0); ++extra) {
        const Case c = make(pool, kind, shape[0], shape[1], shape[2], extra != 0, extra == 1);
        const bool small = shape[1] < 200;
        check(pool, c, 6);
        if (small || all) check(pool, c, 16);
        if (kind == 0) {
          check(pool, c, 6, {2, 5});
          check(pool, c, 9, {0, 9});
          if (small || all) check(pool, c, 27, {3, 24});
        }
        for (int rows : {1, 2, 3, 4, 11, 14, 43}) {
          if (small) check(pool, c, rows);
        }
      }
    }
  }
  if (all) {
#if defined(WINDLASS_AMX)
    if (windlass::amx_allowed()) check_tile_configuration(pool);
#endif
    selftest::check_operations(pool);
    selftest::check_special(pool);
    check_special_gemms(pool);
  }
  windlass_pool_free(pool);
  std::printf("%s: all GEMMs agree\n", windlass_simd());
  return 0;
}
