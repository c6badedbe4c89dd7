// Sums and concatenates the tensors of ranks on one machine through memory that they share.
//
//   line 0            whether a rank is lost
//   line 1 + r        rank r's number of published chunks
//   then, twice       the ranks' chunks, `capacity` floats each
//
// A rank writes its chunk, publishes its number, waits until all ranks have published that number, and
// reads the chunks of all. Chunks alternate between two places: a rank that publishes chunk n + 1 has read
// chunk n, so chunk n + 2 may replace it. Sums go in the order of the ranks: all ranks get the same bits.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "lost.h"
#include "run.h"
#include "simd.h"

namespace windlass {

namespace {

constexpr size_t kLine = 64;
constexpr int kGrain = 4096;  // floats

class Exchange {
 public:
  // Model tensors: the shared memory. Sizes from `first` on: rank, number of ranks, floats of a chunk.
  Exchange(const Run& run, int first)
      : base_(static_cast<uint8_t*>(const_cast<void*>(run.command.model_tensors[0]))),
        rank_(run.size(first)),
        ranks_(run.size(first + 1)),
        capacity_(run.size(first + 2)),
        number_(published(rank_).load(std::memory_order_relaxed)) {}

  int ranks() const { return ranks_; }
  int capacity() const { return capacity_; }

  // Where this rank writes its next chunk.
  float* next() {
    ++number_;
    return chunk(rank_);
  }

  // A rank's chunk, after publish().
  float* chunk(int rank) const {
    const size_t half = (number_ % 2) * static_cast<size_t>(ranks_) + static_cast<size_t>(rank);
    float* first = reinterpret_cast<float*>(base_ + kLine * (1 + static_cast<size_t>(ranks_)));
    return first + half * static_cast<size_t>(capacity_);
  }

  // Publishes this rank's chunk, and waits for those of all ranks.
  void publish() {
    published(rank_).store(number_, std::memory_order_release);
    for (int rank = 0; rank < ranks_; ++rank) wait_for(published(rank));
  }

 private:
  using Counter = std::atomic<uint64_t>;

  Counter& line(int index) const {
    return *reinterpret_cast<Counter*>(base_ + kLine * static_cast<size_t>(index));
  }
  Counter& published(int rank) const { return line(1 + rank); }

  // Spins, since ranks are rarely far apart, then leaves the core to others.
  void wait_for(const Counter& other) const {
    constexpr int spins = 4000, yields = 200;
    for (int i = 0; other.load(std::memory_order_acquire) < number_; ++i) {
      if (i < spins) {
        cpu_pause();
        continue;
      }
      if (line(0).load(std::memory_order_relaxed) != 0) throw LostRank();
      if (i < spins + yields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }

  uint8_t* base_;
  int rank_, ranks_, capacity_;
  uint64_t number_;
};

void add_to(float* sum, const float* x, int count) {
  for (int i = 0; i < count; ++i) sum[i] += x[i];
}

}  // namespace

// sizes: width, rank, number of ranks, floats of a chunk
bool run_all_reduce(const Run& run) {
  Exchange exchange(run, 1);
  const int64_t total = static_cast<int64_t>(run.rows) * run.size(0);
  for (int64_t at = 0; at < total; at += exchange.capacity()) {
    const int count = static_cast<int>(std::min<int64_t>(exchange.capacity(), total - at));
    std::memcpy(exchange.next(), run.step_tensor(0) + at, static_cast<size_t>(count) * 4);
    exchange.publish();
    float* out = run.step_tensor(1) + at;
    run.pool.each(count, kGrain, [&](int begin, int end) {
      std::memcpy(out + begin, exchange.chunk(0) + begin, static_cast<size_t>(end - begin) * 4);
      for (int rank = 1; rank < exchange.ranks(); ++rank) {
        add_to(out + begin, exchange.chunk(rank) + begin, end - begin);
      }
    });
  }
  return true;
}

// model_tensors: shared memory, the ranks' widths; sizes: sum of the widths, rank, number of ranks, floats
// of a chunk
bool run_all_gather(const Run& run) {
  const int total = run.size(0);
  const int32_t* widths = run.model_tensor<int32_t>(1);
  Exchange exchange(run, 1);
  const int own = widths[run.size(1)];
  int widest = 0;
  for (int rank = 0; rank < exchange.ranks(); ++rank) widest = std::max(widest, widths[rank]);
  const int most = exchange.capacity() / widest;  // rows of a chunk
  for (int row = 0; row < run.rows; row += most) {
    const int rows = std::min(most, run.rows - row);
    const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(own);
    std::memcpy(exchange.next(), row_of(run.step_tensor(0), row, own), count * 4);
    exchange.publish();
    run.pool.each(rows, std::max(1, kGrain / total), [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        float* out = row_of(run.step_tensor(1), row + i, total);
        for (int rank = 0; rank < exchange.ranks(); ++rank) {
          const int width = widths[rank];
          std::memcpy(out, row_of(exchange.chunk(rank), i, width), static_cast<size_t>(width) * 4);
          out += width;
        }
      }
    });
  }
  return true;
}

}  // namespace windlass
