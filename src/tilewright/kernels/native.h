// Common parts of the CPU kernels: sharing work among threads, per-thread scratch memory, and code for several instruction sets.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "helpers.h"
#include "isa.h"
#include "xla/ffi/api/ffi.h"

// Compiles the following functions for an instruction set, until TARGET_END.
#if defined(__clang__)
#define TARGET_PRAGMA(text) _Pragma(#text)
#define TARGET(features) TARGET_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define TARGET_END _Pragma("clang attribute pop")
#else
#define TARGET_PRAGMA(text) _Pragma(#text)
#define TARGET(features) _Pragma("GCC push_options") TARGET_PRAGMA(GCC target(features))
#define TARGET_END _Pragma("GCC pop_options")
#endif

// Selects the variant of a function for the current instruction set, for functions that isas.inc instantiates.
#if defined(__x86_64__)
#define ON_BEST_ISA(...) \
  (native::isa() >= native::AVX512 ? avx512::__VA_ARGS__ : native::isa() == native::AVX2 ? avx2::__VA_ARGS__ : plain::__VA_ARGS__)
#else
#define ON_BEST_ISA(...) plain::__VA_ARGS__
#endif

namespace ffi = xla::ffi;

namespace native {

// Runs body(begin, end) over [0, items) in pieces of a multiple of `grain`, about `pieces` per thread, on as many threads as XLA's pool has. Runs in
// the calling thread alone if sharing is not worth it or the helpers serve another caller.
template <class Body>
void share(ffi::ThreadPool& pool, int64_t items, int64_t grain, bool worth_it, const Body& body, int64_t pieces = 2) {
  const int64_t threads = pool.num_threads();
  if (threads < 2 || items <= grain || !worth_it) return body(0, items);
  struct Work {
    const Body& body;
    int64_t items, piece;
  };
  const int64_t each = (items + pieces * threads - 1) / (pieces * threads), piece = (each + grain - 1) / grain * grain;
  const Work work{body, items, piece};
  const auto run = [](const void* given, int64_t number) {
    const Work& work = *static_cast<const Work*>(given);
    work.body(number * work.piece, std::min(work.items, (number + 1) * work.piece));
  };
  if (!helpers().help(threads - 1, (items + piece - 1) / piece, &work, run)) body(0, items);
}

// Variant on the threads of XLA's pool, for long kernels between XLA's own loops: those threads are awake then, and polling helpers would slow them
// down. The calling thread claims pieces until none is left, so a busy pool causes no delay.
template <class Body>
void share_in_pool(ffi::ThreadPool& pool, int64_t items, int64_t grain, bool worth_it, const Body& body) {
  const int64_t threads = pool.num_threads();
  if (threads < 2 || items <= grain || !worth_it) return body(0, items);
  struct State {
    std::atomic<int64_t> next{0}, finished{0};
  };
  const auto state = std::make_shared<State>();
  const int64_t each = (items + 2 * threads - 1) / (2 * threads), piece = (each + grain - 1) / grain * grain;
  const int64_t pieces = (items + piece - 1) / piece;
  const auto help = [state, piece, pieces, items, &body] {
    for (int64_t i; (i = state->next.fetch_add(1)) < pieces;) {
      body(i * piece, std::min(items, (i + 1) * piece));
      state->finished.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t t = 1; t < std::min(threads, pieces); ++t) pool.Schedule(std::function<void()>(help));
  help();
  // All pieces have been claimed; wait for those that other threads still compute. A helper that starts later finds no piece left and touches only
  // `state`.
  while (state->finished.load(std::memory_order_acquire) < pieces) pause();
}

// Scratch memory that a thread keeps between calls, because fresh pages cost more than small matmuls. Aligned to 64 bytes; one block per SLOT.
template <int SLOT>
void* scratch(size_t bytes) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<void, Free> kept;
  static thread_local size_t size = 0;
  if (bytes > size) {
    size = (bytes + 4095) / 4096 * 4096;
    kept.reset(std::aligned_alloc(64, size));
  }
  return kept.get();
}

// Requests huge pages for a result. The operating system provides memory of this size anew in each call, and in pages of 4 KiB that takes as long as
// the work.
inline void on_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t page = 4096;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page, end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (bytes >= (1 << 25)) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace native
