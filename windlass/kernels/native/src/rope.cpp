// RoPE: rotates queries and keys by their position, and writes keys and values, or latents, to their
// pages.

#include <cmath>
#include <cstring>

#include "kv.h"

namespace windlass {

namespace {

constexpr int kMaxDim = 640;

// Rounds to nearest, ties to even; NaN stays NaN.
uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (std::isnan(x)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void write_codes(const float* x, int dim, int8_t* codes, float* scale) {
  const float peak = max_abs(x, dim);
  if (!std::isfinite(peak)) {  // no code can represent it, so the scale does
    std::memset(codes, 0, static_cast<size_t>(dim));
    *scale = peak;
    return;
  }
  const float step = std::max(peak / 127.0f, 1e-30f);
  for (int i = 0; i < dim; ++i) codes[i] = static_cast<int8_t>(std::nearbyint(x[i] / step));
  *scale = step;
}

void write_head(const Pages& kv, const float* x, void* pages, float* scales, size_t index) {
  const size_t at = index * static_cast<size_t>(kv.dim);
  switch (kv.type) {
    case kTypeF16:
      for (int i = 0; i < kv.dim; i += kLanes) {
        store_f16(static_cast<uint16_t*>(pages) + at + i, load(x + i));
      }
      return;
    case kTypeBf16:
      for (int i = 0; i < kv.dim; ++i) static_cast<uint16_t*>(pages)[at + i] = to_bf16(x[i]);
      return;
    case kTypeInt8:
      return write_codes(x, kv.dim, static_cast<int8_t*>(pages) + at, scales + index);
    default:
      std::memcpy(static_cast<float*>(pages) + at, x, static_cast<size_t>(kv.dim) * 4);
  }
}

// Rotates pairs (i, i + half); features beyond them are copied.
void rotate(const float* x, const float* cos_sin, int half, int dim, float* out) {
  const float* cosine = cos_sin;
  const float* sine = cos_sin + half;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    out[i] = a * cosine[i] - b * sine[i];
    out[i + half] = b * cosine[i] + a * sine[i];
  }
  std::memcpy(out + 2 * half, x + 2 * half, static_cast<size_t>(dim - 2 * half) * 4);
}

// Rotates pairs (2 i, 2 i + 1) or (i, i + half). The first features of all pairs come first.
void rotate_pairs(const float* x, const float* cos_sin, int half, bool interleaved, float* out) {
  const int next = interleaved ? 2 : 1, second = interleaved ? 1 : half;
  for (int i = 0; i < half; ++i) {
    const float a = x[i * next], b = x[i * next + second];
    out[i] = a * cos_sin[i] - b * cos_sin[half + i];
    out[i + half] = b * cos_sin[i] + a * cos_sin[half + i];
  }
}

// Rotates pairs (2i, 2i + 1); features beyond them are copied.
void rotate_interleaved(const float* x, const float* cos_sin, int half, int dim, float* out) {
  for (int i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1], cosine = cos_sin[i], sine = cos_sin[half + i];
    out[2 * i] = a * cosine - b * sine;
    out[2 * i + 1] = b * cosine + a * sine;
  }
  std::memcpy(out + 2 * half, x + 2 * half, static_cast<size_t>(dim - 2 * half) * 4);
}

// out = x - its mean
void centre(const float* x, int dim, float* out) {
  F32x8 sums = zero();
  for (int i = 0; i < dim; i += kLanes) sums = add(sums, load(x + i));
  const F32x8 mean = splat(sum_of(sums) / static_cast<float>(dim));
  for (int i = 0; i < dim; i += kLanes) store(out + i, sub(load(x + i), mean));
}

// The norm of q or of k; no weights: none.
struct HeadNorm {
  const float* weights;
  int flags;
  float eps;

  // Returns x, or its norm in `normed`.
  const float* apply(const float* x, int head, int dim, float* normed) const {
    if (weights == nullptr) return x;
    const float* weight = flags & kNormPerHead ? weights + head * dim : weights;
    if (flags & kLayerNorm) {
      centre(x, dim, normed);
      x = normed;
    }
    rms_norm(x, weight, dim, eps, normed);
    return normed;
  }
};

}  // namespace

bool run_rope(const Run& run) {
  const Pages kv = kv_pages(run, 3);
  const int rotary_dim = run.size(7), flags = run.size(8), dim = kv.dim;
  const int heads = kv.num_q + 2 * kv.num_kv;
  const float eps = run.command.scalars[0];
  const HeadNorm q_norm{run.model_tensor<float>(1), flags, eps};
  const HeadNorm k_norm{run.model_tensor<float>(2), flags, eps};
  const auto turn = flags & kInterleaved ? rotate_interleaved : rotate;
  run.each_row(4 * heads * dim, [&](int token) {
    const int position = run.step.positions[token], slot = run.step.slots[token];
    const float* cos_sin = row_of(run.model_tensor<float>(0), position, rotary_dim);
    const float* x = row_of(run.step_tensor(0), token, heads * dim);
    float* out = row_of(run.step_tensor(1), token, kv.num_q * dim);
    for (int head = 0; head < kv.num_q + kv.num_kv; ++head, x += dim) {
      const bool is_query = head < kv.num_q;
      const int own = is_query ? head : head - kv.num_q;
      float normed[kMaxDim], rotated[kMaxDim];
      const float* from = (is_query ? q_norm : k_norm).apply(x, own, dim, normed);
      turn(from, cos_sin, rotary_dim / 2, dim, is_query ? out + head * dim : rotated);
      if (is_query) continue;
      const size_t index = kv.head_index(run.step, slot, position, own);
      write_head(kv, rotated, kv.keys, kv.key_scales, index);
    }
    for (int head = 0; head < kv.num_kv; ++head, x += dim) {
      write_head(kv, x, kv.values, kv.value_scales, kv.head_index(run.step, slot, position, head));
    }
  });
  return true;
}

bool run_latent(const Run& run) {
  const Pages kv = kv_pages(run, 2);
  const int rope_dim = run.size(7), nope_dim = run.size(8), rank = kv.dim - rope_dim;
  const int width = run.size(9), q_width = run.size(10), half = rope_dim / 2;
  const bool interleaved = run.size(11) != 0;
  run.each_row(4 * (kv.dim + kv.num_q * rope_dim), [&](int token) {
    const int position = run.step.positions[token], slot = run.step.slots[token];
    const float* cos_sin = row_of(run.model_tensor<float>(0), position, rope_dim);
    const float* latent = row_of(run.step_tensor(0), token, width) + width - kv.dim;
    float vector[kMaxDim];
    rms_norm(latent, run.model_tensor<float>(1), rank, run.command.scalars[0], vector);
    rotate_pairs(latent + rank, cos_sin, half, interleaved, vector + rank);
    write_head(kv, vector, kv.keys, kv.key_scales, kv.head_index(run.step, slot, position, 0));
    const float* q = row_of(run.step_tensor(1), token, q_width) + nope_dim;
    float* out = row_of(run.step_tensor(2), token, kv.num_q * kv.dim) + rank;
    for (int head = 0; head < kv.num_q; ++head, q += nope_dim + rope_dim, out += kv.dim) {
      rotate_pairs(q, cos_sin, half, interleaved, out);
    }
  });
  return true;
}

}  // namespace windlass
