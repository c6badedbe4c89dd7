// Threads that compute pieces of one job at a time, together with the thread that asks.
//
// A worker spins for a while after a job, because the next one comes soon, and then sleeps. Nobody
// waits for a worker that has not begun: on a busy machine the caller does its pieces itself. For one
// that has begun the caller sleeps, if it takes long: its core is then free for it.

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

  // Held for a whole operation: jobs and the buffer belong to one caller at a time.
  std::mutex& mutex() { return mutex_; }

  // Calls body(begin, end) until [0, count) is done, at least `chunk` at a time.
  template <class Body>
  void each(int count, int chunk, const Body& body) {
    run(count, chunk, [](const void* b, int begin, int end) {
      (*static_cast<const Body*>(b))(begin, end);
    }, &body);
  }

  // Memory for one operation, valid until the next; null when there is none.
  uint8_t* buffer(size_t bytes);

 private:
  using Piece = void (*)(const void* body, int begin, int end);

  void run(int count, int chunk, Piece piece, const void* body);
  // What is left of a thread's part of a job. The thread goes on where it stopped, so that what it
  // read ahead is what it needs; others, who have nothing left of their own, take from the end.
  class Range {
   public:
    void set(int begin, int end) { ends_.store(joined(begin, end), std::memory_order_relaxed); }
    bool take(int chunk, bool from_end, int& begin, int& end);

   private:
    static uint64_t joined(int begin, int end) {
      return static_cast<uint64_t>(begin) << 32 | static_cast<uint32_t>(end);
    }
    alignas(64) std::atomic<uint64_t> ends_{0};
  };

  void work(int thread);
  void take_pieces(int thread);
  bool join(uint32_t& last);
  void leave();
  bool all_left() const { return static_cast<uint32_t>(state_.load()) == 0; }
  bool is_new(uint32_t last) const;

  // State is the job's number in the upper half, kOpen while workers may begin, and below it how
  // many have begun.
  static constexpr uint64_t kOpen = uint64_t{1} << 31;

  std::mutex mutex_;
  std::unique_ptr<uint8_t[]> memory_;
  size_t memory_bytes_ = 0;

  Piece piece_ = nullptr;
  const void* body_ = nullptr;
  int chunk_ = 1;
  std::unique_ptr<Range[]> ranges_;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<bool> waiting_{false};  // the caller sleeps until workers have left its job
  std::condition_variable done_;
  int spin_us_;
  std::vector<std::thread> workers_;
};

}  // namespace windlass

// The pool as C sees it.
struct WindlassPool {
  windlass::Pool pool;
};
