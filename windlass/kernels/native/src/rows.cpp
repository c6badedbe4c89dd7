// Operations on single rows: embedding, norms, quantisation, copies, argmax.

#include <cmath>
#include <cstring>

#include "row_vectors.h"
#include "run.h"
#include "vector_math.h"
#include "weight.h"

namespace windlass {

namespace {

float scale_of(const Weight& w, const uint16_t* halves, int group, int r) {
  float v[kLanes];
  store(v, load_f16_fast(halves + group * kTile + r / kLanes * kLanes));
  return v[r % kLanes] / kF16Unit * w.gain;
}

int read_int6(const uint8_t* codes, int k, int r) {
  const size_t at = int8_index(k % 16, r);
  const uint8_t* first = codes + int6_index(k) + at % kInt6Vector;
  const auto byte = [&](size_t vector) { return first[vector * kInt6Vector]; };
  if (at < 3 * kInt6Vector) return byte(at / kInt6Vector) & 63;
  return byte(0) >> 6 << 4 | byte(1) >> 6 << 2 | byte(2) >> 6;
}

void read_integer_row(const Weight& w, const uint8_t* tile, int r, float* out) {
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(tile);
  const uint16_t* offsets = scales + num_scales(w) * kTile;
  const int8_t* sub_scales = reinterpret_cast<const int8_t*>(offsets);
  const int per_scale = w.super_group > 0 ? w.super_group / w.group : 1;
  const uint8_t* codes = tile + scale_bytes(w);
  const int offset = code_offset(w);
  for (int g = 0; g < num_groups(w); ++g) {
    float scale = scale_of(w, scales, g / per_scale, r);
    if (w.super_group > 0) scale *= static_cast<float>(sub_scales[g * kTile + r]);
    const float low = w.has_offsets ? scale_of(w, offsets, g, r) : 0.0f;
    for (int k = g * w.group; k < (g + 1) * w.group; ++k) {
      int code;
      if (w.kind == kInt8) {
        const uint8_t byte = codes[int8_index(k, r)];
        code = kUnsignedCodes ? byte : static_cast<int8_t>(byte);
      } else if (w.kind == kInt6) {
        code = read_int6(codes, k, r);
      } else {
        const uint8_t both = codes[nibble_index(k, r)];
        code = k % 16 < 8 ? both & 15 : both >> 4;
        if (has_signed_nibbles(w)) code = (code ^ 8) - 8;
        if (w.kind == kCodebook4) code = w.codebook[code] + offset;
      }
      out[k] = static_cast<float>(code - offset) * scale + low;
    }
  }
}

void read_table_row(const Weight& w, const uint8_t* tile, int r, float* out) {
  const float* scales = reinterpret_cast<const float*>(tile);
  const uint8_t* codes = tile + scale_bytes(w);
  for (int k = 0; k < w.num_in; ++k) {
    const uint8_t both = codes[table_index(k, r)];
    const int code = k % 4 < 2 ? both & 15 : both >> 4;
    out[k] = w.table[code] * scales[k / w.group * kTile + r] * w.gain;
  }
}

template <class Read>
void read_plain_row(const Weight& w, int r, const Read& read, float* out) {
  for (int k = 0; k < w.num_in; ++k) {
    float v[kLanes];
    store(v, read(k * kTile + r / kLanes * kLanes));
    out[k] = v[r % kLanes];
  }
}

void read_bf16_row(const Weight& w, const uint16_t* tile, int r, float* out) {
  for (int k = 0; k < w.num_in; ++k) {
    const uint32_t bits = static_cast<uint32_t>(tile[bf16_index(k, r)]) << 16;
    std::memcpy(out + k, &bits, 4);
  }
}

void read_stored_row(const Weight& w, const uint8_t* tile, int r, float* out) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(tile);
  const float* floats = reinterpret_cast<const float*>(tile);
  switch (w.kind) {
    case kInt4:
    case kInt8:
    case kInt6:
    case kCodebook4:
      return read_integer_row(w, tile, r, out);
    case kTable4:
      return read_table_row(w, tile, r, out);
    case kF16:
      return read_plain_row(w, r, [&](int i) { return load_f16(halves + i); }, out);
    case kBf16:
      return read_bf16_row(w, halves, r, out);
    default:
      return read_plain_row(w, r, [&](int i) { return load(floats + i); }, out);
  }
}

// Dequantises one output of a weight as a row of floats, with inputs in the model's order.
void read_packed_row(const Weight& w, int n, float* out, float* scratch) {
  const uint8_t* tile = w.data + static_cast<size_t>(n / kTile) * tile_bytes(w);
  if (w.perm == nullptr) return read_stored_row(w, tile, n % kTile, out);
  read_stored_row(w, tile, n % kTile, scratch);
  for (int k = 0; k < w.num_in; ++k) out[w.perm[k]] = scratch[k];
}

void read_table(const void* table, Type type, size_t first, int width, float* out) {
  const uint16_t* halves = static_cast<const uint16_t*>(table) + first;
  const float* floats = static_cast<const float*>(table) + first;
  if (type == kTypeF32) {
    std::memcpy(out, floats, static_cast<size_t>(width) * 4);
    return;
  }
  each_vector(width, [&](int i, int count) {
    uint16_t some[kLanes] = {};
    std::memcpy(some, halves + i, static_cast<size_t>(count) * 2);
    store_tail(out + i, type == kTypeF16 ? load_f16(some) : load_bf16(some), count);
  });
}

// Returns the index of the largest of x[0, count), the first of equals; NaN counts as the largest.
int argmax(const float* x, int count) {
  int at = 0;
  for (int i = 0; i < count && !std::isnan(x[at]); ++i) {
    if (x[i] > x[at] || std::isnan(x[i])) at = i;
  }
  return at;
}

}  // namespace

// The same in two passes, the first of them vectorised.
int argmax_fast(const float* x, int count) {
  constexpr int chunk = 512;
  float max_value = x[0];
  int from = 0;
  for (int begin = 0; begin < count; begin += chunk) {
    const int end = std::min(begin + chunk, count);
    F32x8 best = splat(x[begin]), sums = zero();
    int i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const F32x8 v = load(x + i);
      best = clamp_min(v, best);
      sums = add(sums, v);
    }
    float here = max_of(best), sum = sum_of(sums);
    for (; i < end; ++i) {
      here = x[i] > here ? x[i] : here;
      sum += x[i];
    }
    // The sum is NaN if a value is, or if both infinities occur: then every value is checked.
    if (std::isnan(sum)) {
      const int at = begin + argmax(x + begin, end - begin);
      if (std::isnan(x[at])) return at;
      here = x[at];
    }
    if (here > max_value) {
      max_value = here;
      from = begin;
    }
  }
  return from + argmax(x + from, std::min(chunk, count - from));
}

void rms_norm(const float* x, const float* weight, int width, float eps, float* out) {
  F32x8 even = zero(), odd = zero();
  each_vector(width, [&](int i, int count) {
    const F32x8 v = load_tail(x + i, count);
    F32x8& sum = i / kLanes % 2 ? odd : even;
    sum = fma(sum, v, v);
  });
  const float mean = sum_of(add(even, odd)) / static_cast<float>(width);
  const F32x8 scale = splat(1.0f / std::sqrt(mean + eps));
  each_vector(width, [&](int i, int count) {
    const F32x8 v = mul(load_tail(x + i, count), scale);
    store_tail(out + i, mul(v, load_tail(weight + i, count)), count);
  });
}

bool run_embed(const Run& run) {
  const int width = run.size(0);
  const Type type = static_cast<Type>(run.size(1));
  const Weight* weight = run.model_tensor<Weight>(1);
  const size_t scratch_bytes = static_cast<size_t>(width) * 4 * static_cast<size_t>(run.rows);
  float* scratch = nullptr;
  if (type == kTypePacked && weight->perm != nullptr) {
    scratch = reinterpret_cast<float*>(run.pool.buffer(scratch_bytes));
    if (scratch == nullptr) return false;
  }
  run.each_row(8 * width, [&](int row) {
    const int id = run.step.ids[row] - run.size(2);
    float* out = row_of(run.step_tensor(0), row, width);
    if (run.size(3) > 0 && (id < 0 || id >= run.size(3))) {
      std::fill(out, out + width, 0.0f);  // another rank's token
    } else if (type == kTypePacked) {
      read_packed_row(*weight, id, out, scratch ? row_of(scratch, row, width) : nullptr);
    } else {
      read_table(run.command.model_tensors[0], type,
                 static_cast<size_t>(id) * static_cast<size_t>(width),
                 width, out);
    }
  });
  return true;
}

namespace {

// `bias` may be null.
void layer_norm(const float* x, const float* weight, const float* bias, int width, float eps,
                float* out) {
  F32x8 even = zero(), odd = zero();
  const auto mean_of_sums = [&] { return sum_of(add(even, odd)) / static_cast<float>(width); };
  each_vector(width, [&](int i, int count) {
    F32x8& sum = i / kLanes % 2 ? odd : even;
    sum = add(sum, load_tail(x + i, count));
  });
  const F32x8 mean = splat(mean_of_sums());
  even = odd = zero();
  each_vector(width, [&](int i, int count) {
    store_tail(out + i, sub(load_tail(x + i, count), mean), count);
    const F32x8 v = load_tail(out + i, count);  // zeros after the end of the row
    F32x8& sum = i / kLanes % 2 ? odd : even;
    sum = fma(sum, v, v);
  });
  const F32x8 scale = splat(1.0f / std::sqrt(mean_of_sums() + eps));
  each_vector(width, [&](int i, int count) {
    const F32x8 v = mul(mul(load_tail(out + i, count), scale), load_tail(weight + i, count));
    store_tail(out + i, bias == nullptr ? v : add(v, load_tail(bias + i, count)), count);
  });
}

}  // namespace

bool run_layer_norm(const Run& run) {
  const int width = run.size(0);
  run.each_row(2 * width, [&](int row) {
    layer_norm(row_of(run.step_tensor(0), row, width), run.model_tensor<float>(0),
               run.model_tensor<float>(1), width, run.command.scalars[0],
               row_of(run.step_tensor(1), row, width));
  });
  return true;
}

bool run_add_layer_norm(const Run& run) {
  const int width = run.size(0);
  run.each_row(3 * width, [&](int row) {
    const float* x = row_of(run.step_tensor(0), row, width);
    float* residual = row_of(run.step_tensor(1), row, width);
    for (int i = 0; i < width; ++i) residual[i] = residual[i] + x[i];
    layer_norm(residual, run.model_tensor<float>(0), run.model_tensor<float>(1), width,
               run.command.scalars[0], row_of(run.step_tensor(2), row, width));
  });
  return true;
}

bool run_norm(const Run& run) {
  const int width = run.size(0), stride = run.size(1) > 0 ? run.size(1) : width;
  const int column = run.size(2), groups = std::max(1, run.size(3));
  run.each_row(groups * width, [&](int row) {
    for (int at = 0; at < groups * width; at += width) {
      rms_norm(row_of(run.step_tensor(0), row, stride) + column + at,
               run.model_tensor<float>(0) + at, width, run.command.scalars[0],
               row_of(run.step_tensor(1), row, stride) + column + at);
    }
  });
  return true;
}

bool run_add_norm(const Run& run) {
  const int width = run.size(0);
  run.each_row(2 * width, [&](int row) {
    const float* x = row_of(run.step_tensor(0), row, width);
    float* residual = row_of(run.step_tensor(1), row, width);
    for (int i = 0; i < width; ++i) residual[i] = residual[i] + x[i];
    rms_norm(residual, run.model_tensor<float>(0), width, run.command.scalars[0],
             row_of(run.step_tensor(2), row, width));
  });
  return true;
}

float quantise_row(const float* x, const float* given, int width, float* out) {
  const float peak = max_abs(x, width);
  float scale = given != nullptr ? *given : std::max(peak / 127.0f, 0x1p-126f);
  if (std::isnan(peak)) scale = peak;
  for (int i = 0; i < width; ++i) {
    out[i] = std::nearbyint(std::clamp(x[i] / scale, -127.0f, 127.0f));
  }
  return scale;
}

bool run_quantise(const Run& run) {
  const int width = run.size(0);
  run.each_row(4 * width, [&](int row) {
    run.step_tensor(2)[row] =
        quantise_row(row_of(run.step_tensor(0), row, width), run.model_tensor<float>(0), width,
                     row_of(run.step_tensor(1), row, width));
  });
  return true;
}

bool run_gather(const Run& run) {
  const int width = run.size(0);
  run.each_row(width, [&](int row) {
    std::memcpy(row_of(run.step_tensor(1), row, width),
                row_of(run.step_tensor(0), run.step.sampled[row], width),
                static_cast<size_t>(width) * 4);
  });
  return true;
}

bool run_argmax(const Run& run) {
  const int width = run.size(0);
  int32_t* out = static_cast<int32_t*>(run.command.step_tensors[1]);
  run.each_row(width, [&](int row) {
    out[row] = argmax_fast(row_of(run.step_tensor(0), row, width), width);
  });
  return true;
}

}  // namespace windlass
