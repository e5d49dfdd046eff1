// Helper threads for kernels. A layer's kernels follow one another within microseconds, and waking a thread takes longer than many of them. XLA's
// pool puts its threads to sleep so early that small matmuls often ran on one of two cores. These helpers poll for the next call for a while before
// they sleep.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace native {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Serves one caller at a time.
class Helpers {
 public:
  typedef void (*Run)(const void* body, int64_t piece);

  // Runs run(body, piece) for each of [0, pieces), in the calling thread and in up to `wanted` idle helpers. A helper that starts late finds no
  // piece left and delays nothing. Returns false without running anything if another caller is active.
  bool help(int64_t wanted, int64_t pieces, const void* body, Run run) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    hire(std::min(wanted, pieces - 1));
    // A thread that reads a value of this call also observes that the previous call is closed.
    body_.store(body, std::memory_order_release);
    run_.store(run, std::memory_order_release);
    pieces_.store(pieces, std::memory_order_release);
    finished_.store(0, std::memory_order_relaxed);
    call_ = (call_ + 1) & 0x7FFFFFFF;
    const uint64_t opened = call_ << 33 | OPEN;
    state_.store(opened);
    if (asleep_.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      woken_.notify_all();
    }
    int64_t own = 0;
    for (int64_t piece; (piece = (int64_t)(state_.fetch_add(1, std::memory_order_acq_rel) - opened)) < pieces; ++own) run(body, piece);
    // All pieces have been claimed; wait for those that other threads still compute.
    while (finished_.load(std::memory_order_acquire) < pieces - own) pause();
    state_.store(0);
    busy_.store(false, std::memory_order_release);
    return true;
  }

 private:
  static constexpr uint64_t OPEN = uint64_t{1} << 32;
  static constexpr auto AWAKE = std::chrono::microseconds(100);  // idle time before a helper sleeps

  // Starts as many threads as were ever wanted, or as many as the system permits.
  void hire(int64_t wanted) {
    try {
      for (; hired_ < wanted; ++hired_) std::thread([this] { watch(); }).detach();
    } catch (const std::system_error&) {
      return;
    }
  }

  void watch() {
    auto since = std::chrono::steady_clock::now();
    for (int64_t turn = 1;; ++turn) {
      if (work()) {
        since = std::chrono::steady_clock::now();
      } else if (turn % 64 != 0) {
        pause();
      } else if (std::chrono::steady_clock::now() - since < AWAKE) {
        std::this_thread::yield();  // let another thread use this processor
      } else {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.fetch_add(1);
        woken_.wait(lock, [this] { return (state_.load() & OPEN) != 0; });
        asleep_.fetch_sub(1);
        since = std::chrono::steady_clock::now();
      }
    }
  }

  // Claims and computes a piece of the open call, if there is one.
  bool work() {
    uint64_t state = state_.load(std::memory_order_acquire);
    while ((state & OPEN) != 0) {
      const int64_t piece = (int64_t)(state & 0xFFFFFFFF);
      const int64_t pieces = pieces_.load(std::memory_order_acquire);
      const void* body = body_.load(std::memory_order_acquire);
      const Run run = run_.load(std::memory_order_acquire);
      if (piece >= pieces) return false;
      // Succeeds only if the call that was read is still open, and keeps it from ending until this piece is finished.
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      run(body, piece);
      finished_.fetch_add(1, std::memory_order_release);
      return true;
    }
    return false;
  }

  // The call's number, an open flag, and the next piece.
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> finished_{0};
  alignas(64) std::atomic<const void*> body_{nullptr};
  std::atomic<Run> run_{nullptr};
  std::atomic<int64_t> pieces_{0};
  alignas(64) std::atomic<bool> busy_{false};
  std::atomic<int> asleep_{0};
  uint64_t call_ = 0;
  int64_t hired_ = 0;
  std::mutex mutex_;
  std::condition_variable woken_;
};

// One instance per process: GCC shares this static variable among all libraries. It is never destroyed, because its threads never end.
inline Helpers& helpers() {
  static Helpers* const all = new Helpers;
  return *all;
}

}  // namespace native
