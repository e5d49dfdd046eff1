// Threads that help a kernel with its work. A layer's kernels follow each other within microseconds, and to wake a thread takes longer than
// many of them: XLA's pool lets its threads sleep so soon that on two cores a small product often ran on one. These look out for the next
// call for a while before they sleep.

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

// One caller at a time has them.
class Helpers {
 public:
  typedef void (*Run)(const void* body, int64_t piece);

  // Runs run(body, piece) for each of [0, pieces), in the calling thread and in up to `wanted` helpers that are free. A helper that comes late
  // finds nothing left: it delays nobody. Returns false, and has run nothing, if another caller has them.
  bool help(int64_t wanted, int64_t pieces, const void* body, Run run) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    hire(std::min(wanted, pieces - 1));
    // Whoever reads a value of this call reads, behind it, that the call before is closed.
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
    // What is not finished is being computed by a running thread.
    while (finished_.load(std::memory_order_acquire) < pieces - own) pause();
    state_.store(0);
    busy_.store(false, std::memory_order_release);
    return true;
  }

 private:
  static constexpr uint64_t OPEN = uint64_t{1} << 32;
  static constexpr auto AWAKE = std::chrono::microseconds(100);  // without work, before a helper sleeps

  // As many threads as there were ever wanted; fewer where the system grants no more.
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
        std::this_thread::yield();  // somebody else may have better use for this processor
      } else {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.fetch_add(1);
        woken_.wait(lock, [this] { return (state_.load() & OPEN) != 0; });
        asleep_.fetch_sub(1);
        since = std::chrono::steady_clock::now();
      }
    }
  }

  // Takes a piece of the open call, if there is one, and computes it.
  bool work() {
    uint64_t state = state_.load(std::memory_order_acquire);
    while ((state & OPEN) != 0) {
      const int64_t piece = (int64_t)(state & 0xFFFFFFFF);
      const int64_t pieces = pieces_.load(std::memory_order_acquire);
      const void* body = body_.load(std::memory_order_acquire);
      const Run run = run_.load(std::memory_order_acquire);
      if (piece >= pieces) return false;
      // It succeeds only while the call is the one that was read: until this piece is finished it cannot end.
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      run(body, piece);
      finished_.fetch_add(1, std::memory_order_release);
      return true;
    }
    return false;
  }

  // The call's number, whether it is open, and the next piece.
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

// The process's: GCC makes such a variable one for all libraries that have it. It is never destroyed, as its threads are not.
inline Helpers& helpers() {
  static Helpers* const all = new Helpers;
  return *all;
}

}  // namespace native
