// Causal attention over pages, for rows of one token and for chunks behind a prefix.
//
// Keys are taken in parts that begin at fixed positions. What a query gets out of a part, and the
// order in which parts are joined, depend on its position alone: not on the queries beside it, on
// how a prompt is cut, or on how many threads share the parts.

#include <cmath>
#include <cstring>
#include <vector>

#include "part_halves.h"

namespace windlass {

namespace {

constexpr int kMostLines = 64;

// Some queries of one row: all heads that share a kv head. A line is one query of one head.
struct Task {
  int row;
  int first, count;            // queries, counted from the row's first
  int first_part, last_part;  // of the keys
  float* partial;              // where the result goes if the task has only some of the parts
};

// What the keys seen so far give a line: peak and sum of the exponentials, and the mixed values.
struct Lines {
  bool begun[kMostLines] = {};  // whether a key was seen; the rest is not set before
  float peak[kMostLines];
  float sum[kMostLines];
  alignas(64) float mixed[kMostLines * kMostDim];
};

struct Job {
  const Run& run;
  Pages kv;
  int window;  // 0: none
  float scale;

  bool in_halves() const { return kHasHalfMath && kv.type == kTypeHalf; }
  int lines(const Task& t) const { return t.count * kv.group(); }
  const WindlassRow& row(const Task& t) const { return run.step.rows[t.row]; }
  float* query(int which, const Task& t, int head, int line) const {
    const int token = row(t).first + t.first + line / kv.group();
    const int q_head = head * kv.group() + line % kv.group();
    return row_of(run.moving(which), token, kv.num_q * kv.dim) + q_head * kv.dim;
  }
};

// Joins what another part gave a line, which is all there is unless the line has `begun`. Both have seen
// at least one key, but a peak is -infinity where all scores are.
void join(bool begun, float& peak, float& sum, float* mixed, float other_peak, float other_sum,
          const float* other, int dim) {
  if (!begun) {
    peak = other_peak;
    sum = other_sum;
    std::memcpy(mixed, other, static_cast<size_t>(dim) * 4);
    return;
  }
  const float most = other_peak > peak ? other_peak : peak;
  const float own = peak == most ? 1.0f : exponential(peak - most);
  const float others = other_peak == most ? 1.0f : exponential(other_peak - most);
  peak = most;
  sum = sum * own + other_sum * others;
  const F32x8 a = splat(own), b = splat(others);
  for (int d = 0; d < dim; d += kLanes) {
    store(mixed + d, fma(mul(load(mixed + d), a), load(other + d), b));
  }
}

Sight sight_of(const Job& job, const Part& part, int position) {
  const int from = job.window > 0 ? std::max(0, position - job.window + 1) : 0;
  return {std::clamp(from - part.first, 0, part.count),
          std::clamp(position + 1 - part.first, 0, part.count)};
}

// What is likely to be read after part p: the next part's first key, or the next head's.
const void* next_key(const Job& job, const Task& task, int head, int p) {
  const Pages& kv = job.kv;
  const bool ends = p + 1 == task.last_part;
  if (ends && head + 1 == kv.num_kv) return nullptr;
  const int position = (ends ? task.first_part : p + 1) * kPart;
  const size_t place = kv.place(job.run.step, job.row(task).slot, position, head + (ends ? 1 : 0));
  const size_t each = static_cast<size_t>(kv.dim) * bytes_of(kv.type);
  return static_cast<const uint8_t*>(kv.keys) + place * each;
}

// The queries of a task in halves, and what their gemm are to be multiplied by.
struct HalfQueries {
  alignas(64) uint16_t lines[kMostLines * kMostDim];
  float factors[kMostLines];
};

// Lines [line, line + COUNT) over one part.
template <int COUNT>
void attend_lines(const Part& part, const HalfQueries& q, int dim, int line, const Sight* sights,
                  float* peak, float* sum, float* mixed) {
  attend_halves<COUNT>(part, dim, q.lines + line * dim, q.factors + line, sights, line == 0, peak,
                       sum, mixed);
}

void attend_lines(const Part& part, const HalfQueries& q, int dim, int line, int count,
                  const Sight* sights, float* peak, float* sum, float* mixed) {
  const auto of_count = count == 1   ? attend_lines<1>
                        : count == 2 ? attend_lines<2>
                        : count == 3 ? attend_lines<3>
                                     : attend_lines<4>;
  of_count(part, q, dim, line, sights, peak, sum, mixed);
}

// All lines of a task over its parts.
void attend(const Job& job, const Task& task, int head, Lines& out) {
  const WindlassRow& row = job.row(task);
  const int count = job.lines(task), dim = job.kv.dim, group = job.kv.group();
  HalfQueries in_halves;
  for (int i = 0; job.in_halves() && i < count; ++i) {
    const float* query = job.query(0, task, head, i);
    in_halves.factors[i] = job.scale * write_halves(query, dim, in_halves.lines + i * dim);
  }
  const int start = row.start + task.first;
  Part part;
  for (int p = task.first_part; p < task.last_part; ++p) {
    part.first = p * kPart;
    part.count = std::min(kPart, start + task.count - part.first);
    part.next = next_key(job, task, head, p);
    read_part(job.kv, job.run.step, job.scale, row.slot, head,
              job.in_halves() || count <= 4, job.in_halves(), part);
    for (int line = 0; line < count; line += 4) {
      const int some = std::min(4, count - line);
      const float* queries[4];
      Sight sights[4];
      float peak[4], sum[4];
      alignas(64) float mixed[4 * kMostDim];
      for (int m = 0; m < some; ++m) {
        const int i = line + m;
        sights[m] = sight_of(job, part, start + i / group);
        if (!job.in_halves()) queries[m] = job.query(0, task, head, i);
      }
      if (job.in_halves()) {
        attend_lines(part, in_halves, dim, line, some, sights, peak, sum, mixed);
      } else {
        const auto attend_some = part.halves ? attend_4<Halves> : attend_4<Floats>;
        attend_some(part, dim, queries, sights, some, line == 0, peak, sum, mixed);
      }
      for (int m = 0; m < some; ++m) {
        if (sights[m].begin >= sights[m].end) continue;
        const int i = line + m;
        join(out.begun[i], out.peak[i], out.sum[i], out.mixed + i * dim, peak[m], sum[m],
             mixed + m * dim, dim);
        out.begun[i] = true;
      }
    }
  }
}

void write(const Job& job, const float* mixed, float sum, float* out) {
  const int dim = job.kv.dim;
  for (int d = 0; d < dim; d += kLanes) store(out + d, divide(load(mixed + d), splat(sum)));
}

void finish(const Job& job, const Task& task, int head, const Lines& lines) {
  for (int i = 0; i < job.lines(task); ++i) {
    write(job, lines.mixed + i * job.kv.dim, lines.sum[i], job.query(1, task, head, i));
  }
}

// A partial result is, for each line, peak, sum and mixed values.
size_t partial_floats(const Job& job) {
  return static_cast<size_t>(job.kv.group()) * static_cast<size_t>(job.kv.dim + 2);
}

void keep(const Job& job, const Lines& lines, float* to) {
  const int dim = job.kv.dim;
  for (int i = 0; i < job.kv.group(); ++i, to += dim + 2) {
    to[0] = lines.peak[i];
    to[1] = lines.sum[i];
    std::memcpy(to + 2, lines.mixed + i * dim, static_cast<size_t>(dim) * 4);
  }
}

// The parts of one row and head, one after another.
void join_partials(const Job& job, const Task& whole, int head, const float* from) {
  const int dim = job.kv.dim;
  const size_t next = partial_floats(job) * static_cast<size_t>(job.kv.num_kv);
  for (int i = 0; i < job.kv.group(); ++i) {
    float peak = 0.0f, sum = 0.0f;
    alignas(64) float mixed[kMostDim];
    const float* at = from + static_cast<size_t>(i) * static_cast<size_t>(dim + 2);
    for (int p = whole.first_part; p < whole.last_part; ++p, at += next) {
      join(p > whole.first_part, peak, sum, mixed, at[0], at[1], at + 2, dim);
    }
    write(job, mixed, sum, job.query(1, whole, head, i));
  }
}

struct Plan {
  std::vector<Task> tasks;    // for each kv head
  std::vector<Task> divided;  // rows whose parts are tasks of their own; `partial` is the first's
};

// Chunks become tiles; contexts of single tokens are divided where there is little else to do.
bool make_plan(const Job& job, Plan& plan) {
  const WindlassStep& step = job.run.step;
  const int tile = std::max(1, std::min(16, kMostLines / job.kv.group()));
  const bool divide = step.num_rows * job.kv.num_kv < 4 * job.run.pool.threads();
  size_t partials = 0;
  for (int r = 0; r < step.num_rows; ++r) {
    const WindlassRow& row = step.rows[r];
    for (int first = 0; first < row.count; first += tile) {
      const int count = std::min(tile, row.count - first);
      const int start = row.start + first;
      const int low = job.window > 0 ? std::max(0, start - job.window + 1) / kPart : 0;
      const Task task{r, first, count, low, (start + count - 1) / kPart + 1, nullptr};
      const int parts = task.last_part - task.first_part;
      if (!divide || row.count > 1 || parts == 1) {
        plan.tasks.push_back(task);
      } else {
        plan.divided.push_back(task);
        partials += static_cast<size_t>(parts);
      }
    }
  }
  if (plan.divided.empty()) return true;
  const size_t each = partial_floats(job) * static_cast<size_t>(job.kv.num_kv);
  float* room = reinterpret_cast<float*>(job.run.pool.buffer(partials * each * sizeof(float)));
  if (room == nullptr) return false;
  for (Task& whole : plan.divided) {
    whole.partial = room;
    for (int p = whole.first_part; p < whole.last_part; ++p, room += each) {
      plan.tasks.push_back({whole.row, whole.first, whole.count, p, p + 1, room});
    }
  }
  return true;
}

}  // namespace

bool run_attend(const Run& run) {
  const Job job{run, pages_of(run, 0), run.size(5), run.command.numbers[0]};
  Plan plan;
  if (!make_plan(job, plan)) return false;
  const int heads = job.kv.num_kv;
  const auto place = [&](int head) { return partial_floats(job) * static_cast<size_t>(head); };
  const int tasks = static_cast<int>(plan.tasks.size());
  const int chunk = tasks < 4 * run.pool.threads() ? 1 : heads;
  run.pool.each(tasks * heads, chunk, [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const Task& task = plan.tasks[static_cast<size_t>(i / heads)];
      Lines lines;
      attend(job, task, i % heads, lines);
      if (task.partial == nullptr) {
        finish(job, task, i % heads, lines);
      } else {
        keep(job, lines, task.partial + place(i % heads));
      }
    }
  });
  for (const Task& whole : plan.divided) {
    for (int head = 0; head < heads; ++head) {
      join_partials(job, whole, head, whole.partial + place(head));
    }
  }
  return true;
}

}  // namespace windlass
