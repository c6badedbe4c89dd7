// Thread pool that runs one job at a time; the calling thread works too.
//
// A worker spins for a while after a job, because the next one follows soon, then sleeps. The
// caller never waits for a worker that has not started: on a busy machine it does the work itself.
// If a worker that has started takes long, the caller sleeps, which frees its core for the worker.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace windlass {

class Pool {
 public:
  Pool(int threads, int spin_us);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Lets a worker run on some CPUs only. Returns 0 or an errno.
  int bind(int thread, const int32_t* cpus, int count);

  // Held during a whole operation: jobs and the buffer belong to one caller at a time.
  std::mutex& mutex() { return mutex_; }

  // Calls body(begin, end) until [0, count) is done, at least `grain` items at a time.
  template <class Body>
  void each(int count, int grain, const Body& body) {
    run(count, grain, [](const void* b, int begin, int end) {
      (*static_cast<const Body*>(b))(begin, end);
    }, &body);
  }

  // Memory for one operation, valid until the next one; null if the allocation fails.
  uint8_t* buffer(size_t bytes);

 private:
  using Function = void (*)(const void* body, int begin, int end);

  void run(int count, int grain, Function function, const void* body);
  // The remaining items of a thread's share. The owner takes from the front, so that its prefetched
  // data is used; idle threads steal from the back.
  class Range {
   public:
    void set(int begin, int end) { ends_.store(joined(begin, end), std::memory_order_relaxed); }
    bool take(int grain, bool from_end, int& begin, int& end);

   private:
    static uint64_t joined(int begin, int end) {
      return static_cast<uint64_t>(begin) << 32 | static_cast<uint32_t>(end);
    }
    alignas(64) std::atomic<uint64_t> ends_{0};
  };

  void stop();
  void work(int thread);
  void take_work(int thread);
  bool enter_job(uint32_t& last);
  void leave_job();
  bool all_left() const { return static_cast<uint32_t>(state_.load()) == 0; }
  bool has_new_job(uint32_t last) const;

  // The job's number in the upper half, kOpen while workers may start, and below it the number of
  // workers that have started.
  static constexpr uint64_t kOpen = uint64_t{1} << 31;

  std::mutex mutex_;
  std::unique_ptr<uint8_t[]> memory_;
  size_t memory_bytes_ = 0;

  Function function_ = nullptr;
  const void* body_ = nullptr;
  int grain_ = 1;
  std::unique_ptr<Range[]> ranges_;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<bool> waiting_{false};  // the caller sleeps until all workers have left its job
  std::condition_variable done_;
  int spin_us_;
  std::vector<std::thread> workers_;
};

}  // namespace windlass

// The pool as an opaque C type.
struct WindlassPool {
  windlass::Pool pool;
};
