// Threads of torch's own OpenMP pool: a second pool beside it would fight for the same cores.
// Its functions are handed in at start, so nothing is linked and any OpenMP with GNU's names serves.
#pragma once
#include <atomic>
#include <cstdint>

extern "C" {
typedef void (*ParallelFunction)(void (*)(void*), void*, unsigned, unsigned);
typedef int (*NumberFunction)();
typedef void (*BarrierFunction)();
}

struct Pool {
  ParallelFunction parallel = nullptr;  // GOMP_parallel
  NumberFunction thread_number = nullptr, num_threads = nullptr;
  BarrierFunction barrier = nullptr;  // GOMP_barrier
};
extern Pool pool;

// One thread's view of those that work together.
struct Team {
  int thread, size;
  void barrier() const {
    if (size > 1) pool.barrier();
  }
};

// Tasks are taken one by one, so that a thread that was held up takes fewer.
class Tasks {
  std::atomic<int64_t> next_{0};

 public:
  template <class Function>
  void each(int64_t count, Function function) {
    for (int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < count;)
      function(task);
  }
};

// `function(team)` on `num_threads` threads, all of which have returned afterwards.
template <class Function>
void parallel(int num_threads, Function function) {
  if (num_threads <= 1 || !pool.parallel) return function(Team{0, 1});
  pool.parallel(
      [](void* data) {
        (*static_cast<Function*>(data))(Team{pool.thread_number(), pool.num_threads()});
      },
      &function, num_threads, 0);
}
