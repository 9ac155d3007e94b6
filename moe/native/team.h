// Threads that help the caller with its tasks for as long as a core is free for them.
//
// Tasks are taken one by one, and nobody waits for a helper that has taken none: on a machine with
// more to do than cores, a thread that does not run costs nothing. (OpenMP waits for each at every
// barrier.) Helpers look for more for some microseconds and then sleep.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>
#include <thread>

class Team {
  // One round of tasks; whoever has taken a task of it may read it.
  std::atomic<void (*)(void*, int64_t)> function_{nullptr};
  std::atomic<void*> data_{nullptr};
  std::atomic<uint64_t> count_{0};
  std::atomic<int> num_helpers_{0};
  // The round, and the next of its tasks, as one number: a task is taken only if its round still is
  // the current one.
  std::atomic<uint64_t> ticket_{CLOSED};
  std::atomic<uint64_t> num_done_{0};
  // Changes when there is something to wake up for.
  std::atomic<uint32_t> bell_{0};
  std::atomic<int> num_asleep_{0};
  int num_started_ = 0;
  std::mutex caller_;

  static constexpr int INDEX_BITS = 24;
  static constexpr uint64_t CLOSED = (uint64_t(1) << INDEX_BITS) - 1;
  static constexpr int64_t MAX_TASKS = CLOSED - 1;
  // Pauses of some 10 ns each: longer than between two calls of one step, shorter than between two
  // steps of which somebody else wants to hear the result.
  static constexpr int LOOKS = 4000;
  static constexpr int64_t ROWS_AT_ONCE = 8;

  bool take_one() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    const uint64_t index = ticket & CLOSED;
    auto function = function_.load(std::memory_order_relaxed);
    void* data = data_.load(std::memory_order_relaxed);
    if (index >= count_.load(std::memory_order_relaxed)) return false;
    std::atomic_thread_fence(std::memory_order_acquire);
    if (ticket_.compare_exchange_strong(ticket, ticket + 1, std::memory_order_acq_rel)) {
      function(data, int64_t(index));
      num_done_.fetch_add(1, std::memory_order_release);
    }
    return true;
  }

  void help(int number) {
    for (int looks = 0;;) {
      if (number < num_helpers_.load(std::memory_order_relaxed) && take_one()) {
        looks = 0;
      } else if (++looks < LOOKS) {
        __builtin_ia32_pause();
      } else {
        sleep();
        looks = 0;
      }
    }
  }

  void sleep() {
    const uint32_t bell = bell_.load();
    const uint64_t ticket = ticket_.load();
    num_asleep_.fetch_add(1);
    // Whatever begins after these looks rings the bell, and then the call returns at once.
    if ((ticket & CLOSED) >= count_.load() && ticket == ticket_.load())
      syscall(SYS_futex, &bell_, FUTEX_WAIT_PRIVATE, bell, nullptr, nullptr, 0);
    num_asleep_.fetch_sub(1);
  }

  void start(int num_helpers) {
    for (; num_started_ < num_helpers; num_started_++)
      std::thread([this, number = num_started_] {
        pthread_setname_np(pthread_self(), "moed-helper");
        help(number);
      }).detach();
  }

  void round(int num_helpers, int64_t count, void (*function)(void*, int64_t), void* data) {
    start(num_helpers);
    const uint64_t number = (ticket_.load(std::memory_order_relaxed) >> INDEX_BITS) + 1;
    // Nobody takes a task while what tasks are is being written.
    ticket_.store(number << INDEX_BITS | CLOSED, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    function_.store(function, std::memory_order_relaxed);
    data_.store(data, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    num_helpers_.store(num_helpers, std::memory_order_relaxed);
    num_done_.store(0, std::memory_order_relaxed);
    ticket_.store((number + 1) << INDEX_BITS);
    bell_.fetch_add(1);
    if (num_asleep_.load())
      syscall(SYS_futex, &bell_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    while (take_one()) {
    }
    // A helper that lost its core in the middle of a task gets this one.
    for (int looks = 0; num_done_.load(std::memory_order_acquire) < uint64_t(count); looks++)
      looks < LOOKS ? __builtin_ia32_pause() : (void)sched_yield();
  }

 public:
  // `function(task)` for each of `count` tasks, on up to `num_threads` threads; all are done
  // afterwards. Who calls while another thread's tasks are under way works alone.
  template <class Function>
  void each(int num_threads, int64_t count, Function function) {
    if (num_threads > 1 && count > 1 && count <= MAX_TASKS) {
      std::unique_lock<std::mutex> lock(caller_, std::try_to_lock);
      if (lock)
        return round(
            num_threads - 1, count,
            [](void* data, int64_t task) { (*static_cast<Function*>(data))(task); }, &function);
    }
    for (int64_t task = 0; task < count; task++) function(task);
  }

  // The same for what is done to a row in less time than it takes to take a task.
  template <class Function>
  void each_row(int num_threads, int64_t num_rows, Function function) {
    each(num_threads, (num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, [&](int64_t task) {
      const int64_t first = task * ROWS_AT_ONCE;
      for (int64_t row = first; row < std::min(num_rows, first + ROWS_AT_ONCE); row++) function(row);
    });
  }
};

// Never destroyed: helpers may outlast what ends a process.
inline Team& team() {
  static Team* const one = new Team;
  return *one;
}
