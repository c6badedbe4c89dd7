// The linear command: rearranges or quantises x, with an optional RMSNorm, then runs the GEMM.

#include <new>
#include <system_error>

#include "api.h"
#include "gemm_inputs.h"
#include "prompt_tokens.h"

namespace windlass {

namespace {

// Some rows of a linear command.
struct LinearRows {
  const Run& run;
  const Weight& w;
  int first, count;

  // Returns `rows` rows of x from `row` on, normalised if the command has kNormFirst.
  const float* inputs(int row, int rows) const {
    const float* x = row_of(run.step_tensor(0), first + row, w.num_in);
    if (!(run.size(2) & kNormFirst)) return x;
    float* normed = row_of(run.step_tensor(2), first + row, w.num_in);
    for (int m = 0; m < rows; ++m) {
      rms_norm(row_of(x, m, w.num_in), run.model_tensor<float>(2), w.num_in, run.command.scalars[0],
               row_of(normed, m, w.num_in));
    }
    return normed;
  }

  GemmArgs gemm() const {
    const int flags = run.size(2);
    GemmArgs job{run.pool, w};
    job.stride = run.size(0);
    job.y = row_of(run.step_tensor(1), first, job.stride) + run.size(1);
    job.add = (flags & kAddToY) != 0;
    job.bias = run.model_tensor<float>(1);
    if (flags & kGated) job.active = row_of(run.step_tensor(3), first, w.num_out / 2);
    return job;
  }
};

bool run_rows(const LinearRows& rows, bool is_prompt) {
  const Run& run = rows.run;
  const float* scales = run.size(2) & kQuantisedInputs ? run.step_tensor(4) + rows.first : nullptr;
  const GemmInputs inputs(rows.w, rows.count, is_prompt, scales != nullptr);
  uint8_t* memory = run.pool.buffer(inputs.bytes);
  if (memory == nullptr) return false;
  run.pool.each(inputs.panels, 1, [&](int begin, int end) {
    for (int p = begin; p < end; ++p) {
      const int first = inputs.first_row(p);
      inputs.fill(p, rows.inputs(first, inputs.num_rows(p)), scales ? scales + first : nullptr,
                  memory);
    }
  });
  run.pool.each(inputs.num_gathered(), 1, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) inputs.gather(i, memory);
  });
  inputs.multiply(rows.gemm(), memory);
  return true;
}

}  // namespace

// Splits rows into runs of prompt rows and others: mostly there is at most one of each.
bool run_linear(const Run& run) {
  const Weight& w = *run.model_tensor<Weight>(0);
  PromptTokens prompts(run, (run.size(2) & kStepRows) && has_prompt_gemm(w));
  for (int row = 0, end; row < run.rows; row = end) {
    const bool is_prompt = prompts.has(row);
    for (end = row + 1; end < run.rows && prompts.has(end) == is_prompt;) ++end;
    const LinearRows rows{run, w, row, end - row};
    if (!run_rows(rows, is_prompt)) return false;
  }
  return true;
}

}  // namespace windlass

extern "C" {

const char* windlass_simd(void) {
  if (!windlass::kHasAmx || windlass::amx_allowed()) return windlass::kSimdName;
  return "AVX-512 VNNI and BF16 (the system does not allow AMX)";
}

int32_t windlass_has_prompt_gemm(const WindlassWeight* w) { return windlass::has_prompt_gemm(*w) ? 1 : 0; }

int32_t windlass_reads_nonfinite(int32_t kind) {
  if (kind == windlass::kF16) return windlass::kF16Unit == 1.0f ? 1 : 0;
  return kind != windlass::kBf16 || !windlass::kSplitsInputs ? 1 : 0;
}

WindlassPool* windlass_pool_new(int32_t threads, int32_t spin_us) {
  try {
    return new WindlassPool{{threads, spin_us}};
  } catch (const std::system_error&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void windlass_pool_free(WindlassPool* pool) { delete pool; }

int32_t windlass_pool_bind(WindlassPool* pool, int32_t thread, const int32_t* cpus, int32_t count) {
  return pool->pool.bind(thread, cpus, count);
}

}  // extern "C"
