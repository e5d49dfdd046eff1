// Instruction sets of the kernels, and detection of those that this machine has.

#pragma once

#include <cstdlib>
#include <cstring>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace native {

// Instruction sets in ascending order: each one includes those before it.
enum Isa { PLAIN, AVX2, AVX512, AVX512_VNNI, AVX512_BF16, AMX };
constexpr const char* isa_names[] = {"plain", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx"};

// AMX: tiles of 16 rows of 64 bytes, for products of bfloat16 or 8-bit numbers. The operating system must permit the use of tile registers.
inline bool amx_granted() {
#if defined(TILEWRIGHT_AMX_TILES)
  return true;  // the tests' emulation replaces the tile unit
#elif defined(__x86_64__) && defined(__linux__)
  unsigned a, b, c, d;
  constexpr unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & wanted) != wanted) return false;
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
  return false;
#endif
}

inline Isa best_isa() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return PLAIN;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl"))
    return AVX2;
  if (!__builtin_cpu_supports("avx512vnni")) return AVX512;
  if (!__builtin_cpu_supports("avx512bf16")) return AVX512_VNNI;
  return amx_granted() ? AMX : AVX512_BF16;
#else
  return PLAIN;
#endif
}

#if defined(TILEWRIGHT_ISA)
constexpr Isa named(std::string_view name) {
  int found = PLAIN;
  for (int i = PLAIN; i <= AMX; ++i)
    if (isa_names[i] == name) found = i;
  return static_cast<Isa>(found);
}

// The instruction set that the library is compiled for; code for others is left out. Before loading the library, its user checks with `isa.cc` that
// the machine has this instruction set, which also requests permission for the tile registers.
constexpr Isa compiled_for = named(TILEWRIGHT_ISA);
constexpr Isa isa() { return compiled_for; }
#else
// The machine's best instruction set, or the one named by the environment variable TILEWRIGHT_CPU_ISA if the machine has it.
inline Isa isa() {
  static const Isa chosen = [] {
    const Isa best = best_isa();
    const char* wanted = std::getenv("TILEWRIGHT_CPU_ISA");
    for (int i = PLAIN; wanted != nullptr && i < best; ++i)
      if (std::strcmp(wanted, isa_names[i]) == 0) return static_cast<Isa>(i);
    return best;
  }();
  return chosen;
}
#endif

}  // namespace native
