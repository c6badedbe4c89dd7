// Causal attention over paged KV, for decode rows and for prefill chunks after a prefix.
//
// Keys are processed in chunks that begin at fixed positions. The result of a query over a chunk,
// and the order in which chunks are merged, depend on its position alone: not on the rest of the
// batch, on prefill chunking, or on the number of threads.

#include <cmath>
#include <cstring>
#include <vector>

#include "attention_f16.h"

namespace windlass {

namespace {

constexpr int kMaxLines = 64;

// Some queries of one row, for all heads that share a KV head. A line is one query of one head.
struct Task {
  int row;
  int first, count;  // queries, relative to the row's first
  int first_chunk, last_chunk;  // of the keys
  float* partial;  // output of a task that covers only some chunks
};

// The running softmax of each line: maximum score, sum of exponentials, and accumulated values.
struct SoftmaxState {
  bool begun[kMaxLines] = {};  // whether a key was seen; the other fields are undefined before
  float peak[kMaxLines];
  float sum[kMaxLines];
  alignas(64) float acc[kMaxLines * kMaxDim];
};

struct Job {
  const Run& run;
  Pages kv;
  int window;  // 0: none
  bool chunked;  // a query sees its own chunk of `window` positions
  float scale, soft_cap;  // soft_cap 0: none
  const float* sinks;  // per query head, or null

  bool uses_f16() const { return kHasF16Math && kv.type == kTypeF16; }
  int lines(const Task& t) const { return t.count * kv.group(); }
  const WindlassRow& row(const Task& t) const { return run.step.rows[t.row]; }
  int first_visible(int position) const {
    if (window == 0) return 0;
    return chunked ? position - position % window : std::max(0, position - window + 1);
  }
  int query_head(int head, int line) const { return head * kv.group() + line % kv.group(); }
  float* query(int which, const Task& t, int head, int line) const {
    const int token = row(t).first + t.first + line / kv.group();
    return row_of(run.step_tensor(which), token, kv.num_q * kv.dim) + query_head(head, line) * kv.dim;
  }
};

// Merges the result of another chunk into a line, or copies it if the line has not `begun`. Both
// have seen at least one key, but a maximum is -infinity where all scores are.
void merge(bool begun, float& peak, float& sum, float* acc, float other_peak, float other_sum,
           const float* other, int dim) {
  if (!begun) {
    peak = other_peak;
    sum = other_sum;
    std::memcpy(acc, other, static_cast<size_t>(dim) * 4);
    return;
  }
  const float max_peak = other_peak > peak ? other_peak : peak;
  const float own = peak == max_peak ? 1.0f : exponential(peak - max_peak);
  const float others = other_peak == max_peak ? 1.0f : exponential(other_peak - max_peak);
  peak = max_peak;
  sum = sum * own + other_sum * others;
  const F32x8 a = splat(own), b = splat(others);
  for (int d = 0; d < dim; d += kLanes) {
    store(acc + d, fma(mul(load(acc + d), a), load(other + d), b));
  }
}

VisibleRange visible_range(const Job& job, const KVChunk& chunk, int position) {
  return {std::clamp(job.first_visible(position) - chunk.first, 0, chunk.count),
          std::clamp(position + 1 - chunk.first, 0, chunk.count)};
}

// Returns the address that is read after chunk p: the next chunk's first key, or the next head's.
const void* next_key(const Job& job, const Task& task, int head, int p) {
  const Pages& kv = job.kv;
  const bool ends = p + 1 == task.last_chunk;
  if (ends && head + 1 == kv.num_kv) return nullptr;
  const int visible = job.first_visible(job.row(task).start + task.first);
  const int position = std::max((ends ? task.first_chunk : p + 1) * kChunkKeys, visible);
  const size_t index =
      kv.head_index(job.run.step, job.row(task).slot, position, head + (ends ? 1 : 0));
  const size_t each = static_cast<size_t>(kv.dim) * bytes_of(kv.type);
  return static_cast<const uint8_t*>(kv.keys) + index * each;
}

// The queries of a task in float16, and the factors of their scores.
struct F16Queries {
  alignas(64) uint16_t lines[kMaxLines * kMaxDim];
  float factors[kMaxLines];
};

// Lines [line, line + COUNT) over one chunk.
template <int COUNT>
void attend_lines(const KVChunk& chunk, const F16Queries& q, int dim, int line,
                  const VisibleRange* ranges,
                  float* peak, float* sum, float* acc) {
  attend_f16<COUNT>(chunk, dim, q.lines + line * dim, q.factors + line, ranges, line == 0, peak,
                    sum, acc);
}

void attend_lines(const KVChunk& chunk, const F16Queries& q, int dim, int line, int count,
                  const VisibleRange* ranges, float* peak, float* sum, float* acc) {
  const auto of_count = count == 1   ? attend_lines<1>
                        : count == 2 ? attend_lines<2>
                        : count == 3 ? attend_lines<3>
                                     : attend_lines<4>;
  of_count(chunk, q, dim, line, ranges, peak, sum, acc);
}

// All lines of a task over its chunks.
void attend(const Job& job, const Task& task, int head, SoftmaxState& out) {
  const WindlassRow& row = job.row(task);
  const int count = job.lines(task), dim = job.kv.dim, group = job.kv.group();
  F16Queries f16_queries;
  for (int i = 0; job.uses_f16() && i < count; ++i) {
    const float* query = job.query(0, task, head, i);
    f16_queries.factors[i] = job.scale * write_f16_query(query, dim, f16_queries.lines + i * dim);
  }
  const int start = row.start + task.first;
  // Not on the stack: some systems give a thread as little as 512 KiB of it.
  alignas(64) static thread_local float scratch[kScratch];
  KVChunk chunk;
  chunk.soft_cap = job.soft_cap;
  chunk.scratch = scratch;
  for (int p = task.first_chunk; p < task.last_chunk; ++p) {
    chunk.first = p * kChunkKeys;
    chunk.count = std::min(kChunkKeys, start + task.count - chunk.first);
    chunk.hidden = std::clamp(job.first_visible(start) - chunk.first, 0, chunk.count);
    chunk.next = next_key(job, task, head, p);
    read_chunk(job.kv, job.run.step, job.scale, row.slot, head,
               job.uses_f16() || count <= 4, job.uses_f16(), chunk);
    for (int line = 0; line < count; line += 4) {
      const int some = std::min(4, count - line);
      const float* queries[4];
      VisibleRange ranges[4];
      float peak[4], sum[4];
      alignas(64) float acc[4 * kMaxDim];
      for (int m = 0; m < some; ++m) {
        const int i = line + m;
        ranges[m] = visible_range(job, chunk, start + i / group);
        if (!job.uses_f16()) queries[m] = job.query(0, task, head, i);
      }
      if (job.uses_f16()) {
        attend_lines(chunk, f16_queries, dim, line, some, ranges, peak, sum, acc);
      } else {
        const auto attend_some = chunk.f16 ? attend_4<F16Reader> : attend_4<F32Reader>;
        attend_some(chunk, dim, queries, ranges, some, line == 0, peak, sum, acc);
      }
      for (int m = 0; m < some; ++m) {
        if (ranges[m].begin >= ranges[m].end) continue;
        const int i = line + m;
        merge(out.begun[i], out.peak[i], out.sum[i], out.acc + i * dim, peak[m], sum[m],
              acc + m * dim, dim);
        out.begun[i] = true;
      }
    }
  }
}

// Writes the result of a line, after its sink is added to the sum of exponentials.
void write_output(const Job& job, const Task& task, int head, int line, const float* acc,
                  float peak, float sum) {
  const int dim = job.kv.dim;
  float* out = job.query(1, task, head, line);
  if (job.sinks == nullptr) {
    for (int d = 0; d < dim; d += kLanes) store(out + d, divide(load(acc + d), splat(sum)));
    return;
  }
  const float sink = job.sinks[job.query_head(head, line)];
  const float base = exponent_base(sink > peak ? sink : peak);
  const float own = exponential(peak - base);
  const float unit = job.uses_f16() ? kF16SumUnit : 1.0f;
  const F32x8 total = splat(sum * own + unit * exponential(sink - base));
  for (int d = 0; d < dim; d += kLanes) store(out + d, divide(mul(load(acc + d), splat(own)), total));
}

void finish(const Job& job, const Task& task, int head, const SoftmaxState& state) {
  for (int i = 0; i < job.lines(task); ++i) {
    write_output(job, task, head, i, state.acc + i * job.kv.dim, state.peak[i], state.sum[i]);
  }
}

// A partial result holds, per line, maximum, sum and accumulated values.
size_t partial_floats(const Job& job) {
  return static_cast<size_t>(job.kv.group()) * static_cast<size_t>(job.kv.dim + 2);
}

void store_partial(const Job& job, const SoftmaxState& state, float* to) {
  const int dim = job.kv.dim;
  for (int i = 0; i < job.kv.group(); ++i, to += dim + 2) {
    to[0] = state.peak[i];
    to[1] = state.sum[i];
    std::memcpy(to + 2, state.acc + i * dim, static_cast<size_t>(dim) * 4);
  }
}

// Merges the chunks of one row and head in order.
void merge_partials(const Job& job, const Task& whole, int head, const float* from) {
  const int dim = job.kv.dim;
  const size_t next = partial_floats(job) * static_cast<size_t>(job.kv.num_kv);
  for (int i = 0; i < job.kv.group(); ++i) {
    float peak = 0.0f, sum = 0.0f;
    alignas(64) float acc[kMaxDim];
    const float* at = from + static_cast<size_t>(i) * static_cast<size_t>(dim + 2);
    for (int p = whole.first_chunk; p < whole.last_chunk; ++p, at += next) {
      merge(p > whole.first_chunk, peak, sum, acc, at[0], at[1], at + 2, dim);
    }
    write_output(job, whole, head, i, acc, peak, sum);
  }
}

struct Plan {
  std::vector<Task> tasks;  // per KV head
  // Rows whose chunks are tasks of their own; `partial` is that of the first chunk.
  std::vector<Task> divided;
};

// Prefill chunks are tiled; the contexts of single tokens are split where there is little other
// work (split-KV).
bool make_plan(const Job& job, Plan& plan) {
  const WindlassStep& step = job.run.step;
  const int tile = std::max(1, std::min(16, kMaxLines / job.kv.group()));
  const bool divide = step.num_rows * job.kv.num_kv < 4 * job.run.pool.threads();
  size_t partials = 0;
  for (int r = 0; r < step.num_rows; ++r) {
    const WindlassRow& row = step.rows[r];
    for (int first = 0; first < row.count; first += tile) {
      const int count = std::min(tile, row.count - first);
      const int start = row.start + first;
      const int low = job.first_visible(start) / kChunkKeys;
      const Task task{r, first, count, low, (start + count - 1) / kChunkKeys + 1, nullptr};
      const int chunks = task.last_chunk - task.first_chunk;
      if (!divide || row.count > 1 || chunks == 1) {
        plan.tasks.push_back(task);
      } else {
        plan.divided.push_back(task);
        partials += static_cast<size_t>(chunks);
      }
    }
  }
  if (plan.divided.empty()) return true;
  const size_t each = partial_floats(job) * static_cast<size_t>(job.kv.num_kv);
  float* scratch = reinterpret_cast<float*>(job.run.pool.buffer(partials * each * sizeof(float)));
  if (scratch == nullptr) return false;
  for (Task& whole : plan.divided) {
    whole.partial = scratch;
    for (int p = whole.first_chunk; p < whole.last_chunk; ++p, scratch += each) {
      plan.tasks.push_back({whole.row, whole.first, whole.count, p, p + 1, scratch});
    }
  }
  return true;
}

}  // namespace

bool run_attention(const Run& run) {
  const Job job{run,
                kv_pages(run, 0),
                run.size(7),
                run.size(8) != 0,
                run.command.scalars[0],
                run.command.scalars[1],
                run.model_tensor<float>(4)};
  Plan plan;
  if (!make_plan(job, plan)) return false;
  const int heads = job.kv.num_kv;
  const auto partial_offset = [&](int head) {
    return partial_floats(job) * static_cast<size_t>(head);
  };
  const int tasks = static_cast<int>(plan.tasks.size());
  const int grain = tasks < 4 * run.pool.threads() ? 1 : heads;
  run.pool.each(tasks * heads, grain, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const Task& task = plan.tasks[static_cast<size_t>(i / heads)];
      SoftmaxState state;
      attend(job, task, i % heads, state);
      if (task.partial == nullptr) {
        finish(job, task, i % heads, state);
      } else {
        store_partial(job, state, task.partial + partial_offset(i % heads));
      }
    }
  });
  for (const Task& whole : plan.divided) {
    for (int head = 0; head < heads; ++head) {
      merge_partials(job, whole, head, whole.partial + partial_offset(head));
    }
  }
  return true;
}

}  // namespace windlass
