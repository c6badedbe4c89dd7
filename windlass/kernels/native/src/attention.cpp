// Causal attention over pages, for rows of one token and for chunks behind a prefix.
//
// Keys are taken in parts that begin at fixed positions. What a query gets out of a part, and the
// order in which parts are joined, depend on its position alone: not on the queries beside it, on
// how a prompt is cut, or on how many threads share the parts.

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kv.h"

namespace windlass {

namespace {

constexpr int kPart = 128;  // keys
constexpr int kMostLines = 64;
constexpr int kMostDim = 256;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Some queries of one row: all heads that share a kv head. A line is one query of one head.
struct Task {
  int row;
  int first, count;            // queries, counted from the row's first
  int first_part, last_part;  // of the keys
  float* partial;              // where the result goes if the task has only some of the parts
};

// What the keys seen so far give a line: peak and sum of the exponentials, and the mixed values.
struct Lines {
  float peak[kMostLines];
  float sum[kMostLines];
  alignas(64) float mixed[kMostLines * kMostDim];
};

struct Job {
  const Run& run;
  Pages kv;
  int window;  // 0: none
  float scale;

  int lines(const Task& t) const { return t.count * kv.group(); }
  const WindlassRow& row(const Task& t) const { return run.step.rows[t.row]; }
  float* query(int which, const Task& t, int head, int line) const {
    const int token = row(t).first + t.first + line / kv.group();
    const int q_head = head * kv.group() + line % kv.group();
    return row_of(run.moving(which), token, kv.num_q * kv.dim) + q_head * kv.dim;
  }
};

// Keys and values of one part, as floats: in their pages, or converted.
struct Part {
  int first, count;  // positions
  const float* keys[kPart];
  const float* values[kPart];
  float key_scales[kPart];
  float value_scales[kPart];
  alignas(64) float room[2 * kPart * kMostDim];
};

// What a line sees of a part.
struct Sight {
  int begin, end;
};

// Positions of one page, which lie in one run.
void read_run(const Pages& kv, const void* pages, size_t place, int count, float* room,
              const float** out) {
  const int dim = kv.dim;
  const size_t at = place * static_cast<size_t>(dim);
  if (kv.type == kTypeFloat) {
    const float* first = static_cast<const float*>(pages) + at;
    for (int k = 0; k < count; ++k) out[k] = first + k * dim;
    return;
  }
  const uint16_t* halves = static_cast<const uint16_t*>(pages) + at;
  const int8_t* codes = static_cast<const int8_t*>(pages) + at;
  for (int i = 0; i < count * dim; i += kLanes) {
    store(room + i, kv.type == kTypeHalf    ? read_half(halves + i)
                    : kv.type == kTypeBrain ? read_brain(halves + i)
                                            : read_int8(codes + i));
  }
  for (int k = 0; k < count; ++k) out[k] = room + k * dim;
}

void read_part(const Job& job, int slot, int head, Part& part) {
  const Pages& kv = job.kv;
  float* values_room = part.room + kPart * kv.dim;
  for (int k = 0, run; k < part.count; k += run) {
    const int position = part.first + k;
    run = std::min(kv.page - position % kv.page, part.count - k);
    const size_t place = kv.place(job.run.step, slot, position, head);
    read_run(kv, kv.keys, place, run, part.room + k * kv.dim, part.keys + k);
    read_run(kv, kv.values, place, run, values_room + k * kv.dim, part.values + k);
    for (int i = 0; i < run; ++i) {
      const size_t at = place + static_cast<size_t>(i);
      part.key_scales[k + i] = kv.key_scales ? job.scale * kv.key_scales[at] : job.scale;
      part.value_scales[k + i] = kv.value_scales ? kv.value_scales[at] : 1.0f;
    }
  }
  for (int k = part.count; k < kPart; ++k) part.key_scales[k] = part.value_scales[k] = 0.0f;
}

// Products of COUNT lines with all keys of a part.
template <int COUNT>
void score(const Part& part, int dim, const float* const* queries, float (*scores)[kPart]) {
  const int last = part.count - 1;
  for (int k = 0; k < part.count; k += 4) {
    const float* keys[4];
    for (int i = 0; i < 4; ++i) keys[i] = part.keys[std::min(k + i, last)];
    F32x8 sums[COUNT][4];
    for (int m = 0; m < COUNT; ++m) {
      for (int i = 0; i < 4; ++i) sums[m][i] = zero();
    }
    for (int d = 0; d < dim; d += kLanes) {
      F32x8 key[4];
      for (int i = 0; i < 4; ++i) key[i] = load(keys[i] + d);
      for (int m = 0; m < COUNT; ++m) {
        const F32x8 q = load(queries[m] + d);
        for (int i = 0; i < 4; ++i) sums[m][i] = fma(sums[m][i], q, key[i]);
      }
    }
    for (int m = 0; m < COUNT; ++m) {
      store_sums4(scores[m] + k, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
    }
  }
}

// Scores to exponentials, zero where nothing is seen; returns peak and sum.
struct Exponentials {
  float peak, sum;
};

Exponentials soften(const Part& part, Sight sight, float* scores) {
  const int padded = (part.count + kLanes - 1) / kLanes * kLanes;
  F32x8 peaks = splat(kNothing);
  for (int k = 0; k < padded; k += kLanes) {
    store(scores + k, mul(load(scores + k), load(part.key_scales + k)));
  }
  const auto fill_unseen = [&](float value) {
    std::fill(scores, scores + sight.begin, value);
    std::fill(scores + sight.end, scores + padded, value);
  };
  fill_unseen(kNothing);
  for (int k = 0; k < padded; k += kLanes) peaks = larger(peaks, load(scores + k));
  const float peak = largest_of(peaks);
  peaks = splat(peak);
  for (int k = 0; k < padded; k += kLanes) {
    store(scores + k, exponential(sub(load(scores + k), peaks)));
  }
  fill_unseen(0.0f);
  F32x8 sum = zero();
  for (int k = 0; k < padded; k += kLanes) sum = add(sum, load(scores + k));
  return {peak, sum_of(sum)};
}

// Values of a part, weighted: COUNT lines, WIDE vectors of their features at a time.
template <int COUNT, int WIDE>
void mix(const Part& part, int begin, int end, int dim, const float* weights, float* mixed) {
  for (int d = begin; d < end; d += WIDE * kLanes) {
    F32x8 sums[COUNT][WIDE];
    for (int m = 0; m < COUNT; ++m) {
      for (int i = 0; i < WIDE; ++i) sums[m][i] = zero();
    }
    for (int k = 0; k < part.count; ++k) {
      const Quad weight = load_quad(weights + 4 * k);
      F32x8 value[WIDE];
      for (int i = 0; i < WIDE; ++i) value[i] = load(part.values[k] + d + i * kLanes);
      unrolled<COUNT>([&](auto m) {
        for (int i = 0; i < WIDE; ++i) sums[m][i] = fma_lane<m>(sums[m][i], value[i], weight);
      });
    }
    for (int m = 0; m < COUNT; ++m) {
      for (int i = 0; i < WIDE; ++i) store(mixed + m * dim + d + i * kLanes, sums[m][i]);
    }
  }
}

template <int COUNT>
void mix_all(const Part& part, int dim, const float* weights, float* mixed) {
  constexpr int wide = COUNT > 2 ? 2 : 4;
  const int even = dim / (wide * kLanes) * wide * kLanes;
  mix<COUNT, wide>(part, 0, even, dim, weights, mixed);
  mix<COUNT, 1>(part, even, dim, dim, weights, mixed);
}

// Up to 4 lines over one part: peaks, sums and mixed values.
void attend_4(const Part& part, int dim, const float* const* queries, const Sight* sights,
              int count, float* peak, float* sum, float* mixed) {
  alignas(64) float scores[4][kPart];
  alignas(64) float weights[4 * kPart];
  count > 1 ? score<2>(part, dim, queries, scores) : score<1>(part, dim, queries, scores);
  if (count == 3) score<1>(part, dim, queries + 2, scores + 2);
  if (count == 4) score<2>(part, dim, queries + 2, scores + 2);
  for (int m = 0; m < count; ++m) {
    const Exponentials e = soften(part, sights[m], scores[m]);
    peak[m] = e.peak;
    sum[m] = e.sum;
  }
  // Lines that are not there repeat one that is.
  const float* line[4];
  for (int m = 0; m < 4; ++m) line[m] = scores[std::min(m, count - 1)];
  for (int k = 0; k < part.count; k += kLanes) {
    const F32x8 scale = load(part.value_scales + k);
    const auto weight = [&](int m) { return mul(load(line[m] + k), scale); };
    store_interleaved4(weights + 4 * k, weight(0), weight(1), weight(2), weight(3));
  }
  switch (count) {
    case 1:
      return mix_all<1>(part, dim, weights, mixed);
    case 2:
      return mix_all<2>(part, dim, weights, mixed);
    case 3:
      return mix_all<3>(part, dim, weights, mixed);
    default:
      return mix_all<4>(part, dim, weights, mixed);
  }
}

// Joins what another part gave a line; one that saw nothing changes nothing.
void join(float& peak, float& sum, float* mixed, float other_peak, float other_sum,
          const float* other, int dim) {
  if (other_peak == kNothing) return;
  if (peak == kNothing) {
    peak = other_peak;
    sum = other_sum;
    std::memcpy(mixed, other, static_cast<size_t>(dim) * 4);
    return;
  }
  const float most = other_peak > peak ? other_peak : peak;
  const float own = exponential(peak - most), others = exponential(other_peak - most);
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

// All lines of a task over its parts.
void attend(const Job& job, const Task& task, int head, Lines& out) {
  const WindlassRow& row = job.row(task);
  const int count = job.lines(task), dim = job.kv.dim, group = job.kv.group();
  const int start = row.start + task.first;
  for (int i = 0; i < count; ++i) out.peak[i] = kNothing;
  Part part;
  for (int p = task.first_part; p < task.last_part; ++p) {
    part.first = p * kPart;
    part.count = std::min(kPart, start + task.count - part.first);
    read_part(job, row.slot, head, part);
    for (int line = 0; line < count; line += 4) {
      const int some = std::min(4, count - line);
      const float* queries[4];
      Sight sights[4];
      float peak[4], sum[4];
      alignas(64) float mixed[4 * kMostDim];
      for (int m = 0; m < 4; ++m) {
        const int i = line + std::min(m, some - 1);
        queries[m] = job.query(0, task, head, i);
        sights[m] = sight_of(job, part, start + i / group);
      }
      attend_4(part, dim, queries, sights, some, peak, sum, mixed);
      for (int m = 0; m < some; ++m) {
        const bool seen = sights[m].begin < sights[m].end;
        join(out.peak[line + m], out.sum[line + m], out.mixed + (line + m) * dim,
             seen ? peak[m] : kNothing, sum[m], mixed + m * dim, dim);
      }
    }
  }
}

void write(const float* mixed, float sum, int dim, float* out) {
  const F32x8 total = splat(sum);
  for (int d = 0; d < dim; d += kLanes) store(out + d, divide(load(mixed + d), total));
}

void finish(const Job& job, const Task& task, int head, const Lines& lines) {
  for (int i = 0; i < job.lines(task); ++i) {
    write(lines.mixed + i * job.kv.dim, lines.sum[i], job.kv.dim, job.query(1, task, head, i));
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
    float peak = kNothing, sum = 0.0f;
    alignas(64) float mixed[kMostDim];
    const float* at = from + static_cast<size_t>(i) * static_cast<size_t>(dim + 2);
    for (int p = whole.first_part; p < whole.last_part; ++p, at += next) {
      join(peak, sum, mixed, at[0], at[1], at + 2, dim);
    }
    write(mixed, sum, dim, job.query(1, whole, head, i));
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
  run.pool.each(static_cast<int>(plan.tasks.size()) * heads, 1, [&](int begin, int end) {
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
