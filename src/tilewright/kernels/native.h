// What the CPU kernels share: sharing work with XLA's thread pool, and the choice of an instruction set.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace native {

// Best first. The environment variable TILEWRIGHT_CPU_ISA takes the named one instead, if the machine has it.
inline const char* isa() {
  static const std::string chosen = [] {
    std::vector<std::string> available;
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) available.push_back("avx512bf16");
    if (avx512) available.push_back("avx512");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) available.push_back("avx2");
#endif
    available.push_back("plain");
    const char* wanted = std::getenv("TILEWRIGHT_CPU_ISA");
    for (const std::string& name : available)
      if (wanted == nullptr || name == wanted) return name;
    return available.back();
  }();
  return chosen.c_str();
}

// Runs body(begin, end) over [0, items) in pieces of a multiple of `grain`. The calling thread claims pieces until none is left, and
// threads of the pool help if they are free: a busy pool delays nothing and cannot deadlock.
template <class Body>
void share(ffi::ThreadPool& pool, int64_t items, int64_t grain, bool worth_it, const Body& body) {
  const int64_t threads = pool.num_threads();
  if (threads < 2 || items <= grain || !worth_it) return body(0, items);
  struct State {
    std::atomic<int64_t> next{0}, finished{0};
  };
  auto state = std::make_shared<State>();
  const int64_t each = (items + 2 * threads - 1) / (2 * threads);
  const int64_t piece = (each + grain - 1) / grain * grain;
  const int64_t pieces = (items + piece - 1) / piece;
  auto help = [state, piece, pieces, items, &body] {
    for (int64_t i; (i = state->next.fetch_add(1)) < pieces;) {
      body(i * piece, std::min(items, (i + 1) * piece));
      state->finished.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t t = 1; t < std::min(threads, pieces); ++t) pool.Schedule(std::function<void()>(help));
  help();
  // Whatever is not finished is being computed by a running thread. A helper that starts later finds nothing left and touches only `state`.
  while (state->finished.load(std::memory_order_acquire) < pieces) {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
}

}  // namespace native
