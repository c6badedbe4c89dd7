// The thread pool: see pool.h.

#include "pool.h"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>

#include "simd.h"

namespace windlass {

using Clock = std::chrono::steady_clock;

Pool::Pool(int threads, int spin_us)
    : ranges_(new Range[static_cast<size_t>(std::max(threads, 1))]), spin_us_(spin_us) {
  workers_.reserve(static_cast<size_t>(std::max(threads - 1, 0)));
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {  // the system refused a thread: end those that run, or their destructor aborts
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

int Pool::bind(int thread, const int32_t* cpus, int count) {
  if (thread < 1 || thread >= threads() || count < 1) return EINVAL;
#ifdef __linux__
  const int last = *std::max_element(cpus, cpus + count);
  cpu_set_t* set = CPU_ALLOC(last + 1);
  if (set == nullptr) return ENOMEM;
  const size_t bytes = CPU_ALLOC_SIZE(last + 1);
  CPU_ZERO_S(bytes, set);
  for (int i = 0; i < count; ++i) CPU_SET_S(cpus[i], bytes, set);
  const int failed =
      pthread_setaffinity_np(workers_[static_cast<size_t>(thread - 1)].native_handle(), bytes, set);
  CPU_FREE(set);
  return failed;
#else
  (void)cpus;
  return ENOSYS;
#endif
}

uint8_t* Pool::buffer(size_t bytes) {
  constexpr size_t line = 64;
  if (bytes + line > memory_bytes_) {
    memory_.reset();
    memory_.reset(new (std::nothrow) uint8_t[bytes + line]);
    memory_bytes_ = memory_ ? bytes + line : 0;
    if (!memory_) return nullptr;
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(memory_.get());
  return memory_.get() + (line - start % line) % line;
}

void Pool::run(int count, int grain, Function function, const void* body) {
  if (count <= 0) return;
  if (workers_.empty() || count <= grain) {
    function(body, 0, count);
    return;
  }
  function_ = function;
  body_ = body;
  grain_ = grain;
  const int64_t grains = (count + grain - 1) / grain;
  for (int i = 0, begin = 0, end; i < threads(); ++i, begin = end) {
    end = static_cast<int>(std::min<int64_t>(grains * (i + 1) / threads() * grain, count));
    ranges_[i].set(begin, end);
  }
  const uint64_t number = (state_.load(std::memory_order_relaxed) >> 32) + 1;
  state_.store(number << 32 | kOpen);
  if (sleeping_.load() > 0) {
    // The lock closes the gap between a worker's last check of the state and its sleep.
    { std::lock_guard<std::mutex> lock(sleep_mutex_); }
    wake_.notify_all();
  }
  take_work(0);
  state_.fetch_and(~kOpen);
  constexpr int max_spins = 2000;
  for (int i = 0; i < max_spins && !all_left(); ++i) cpu_pause();
  if (all_left()) return;
  // A worker lost its core in the middle of its work. Sleeping leaves it the caller's core.
  std::unique_lock<std::mutex> lock(sleep_mutex_);
  waiting_ = true;
  done_.wait(lock, [&] { return all_left(); });
  waiting_ = false;
}

void Pool::leave_job() {
  state_.fetch_sub(1);
  if (!waiting_) return;
  // The lock closes the gap between the caller's last check of the state and its sleep.
  { std::lock_guard<std::mutex> lock(sleep_mutex_); }
  done_.notify_one();
}

bool Pool::Range::take(int grain, bool from_end, int& begin, int& end) {
  uint64_t ends = ends_.load(std::memory_order_relaxed);
  while (true) {
    const int first = static_cast<int>(ends >> 32), last = static_cast<int>(ends);
    if (first >= last) return false;
    // Shares get smaller, so that all threads finish together with few atomic operations.
    const int share = std::min(std::max(grain, (last - first) / 2), last - first);
    begin = from_end ? last - share : first;
    end = begin + share;
    const uint64_t left = from_end ? joined(first, begin) : joined(end, last);
    if (ends_.compare_exchange_weak(ends, left, std::memory_order_relaxed)) return true;
  }
}

void Pool::take_work(int thread) {
  int begin, end;
  for (int i = 0; i < threads(); ++i) {
    Range& range = ranges_[(thread + i) % threads()];
    while (range.take(grain_, i > 0, begin, end)) function_(body_, begin, end);
  }
}

bool Pool::has_new_job(uint32_t last) const {
  const uint64_t state = state_.load();
  return (state & kOpen) != 0 && static_cast<uint32_t>(state >> 32) != last;
}

bool Pool::enter_job(uint32_t& last) {
  uint64_t state = state_.load(std::memory_order_acquire);
  while ((state & kOpen) != 0 && static_cast<uint32_t>(state >> 32) != last) {
    if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
      last = static_cast<uint32_t>(state >> 32);
      return true;
    }
  }
  return false;
}

void Pool::work(int thread) {
  uint32_t last = 0;
  while (!stop_) {
    const Clock::time_point until = Clock::now() + std::chrono::microseconds(spin_us_);
    while (!has_new_job(last) && !stop_ && Clock::now() < until) {
      for (int i = 0; i < 16 && !has_new_job(last); ++i) cpu_pause();
    }
    if (enter_job(last)) {
      take_work(thread);
      leave_job();
      continue;
    }
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    sleeping_.fetch_add(1);
    wake_.wait(lock, [&] { return stop_ || has_new_job(last); });
    sleeping_.fetch_sub(1);
  }
}

}  // namespace windlass
