// Measures how fast this machine multiplies and adds 8-bit numbers without memory accesses, with the instructions of block-quantised matmuls
// (../linear/blocks.inc).

#include "../native.h"

#include <cmath>
#include <limits>

namespace {

constexpr int64_t PIECE = 1 << 24;  // multiply-adds

#if defined(__x86_64__)
TARGET("avx2")
namespace avx2 {
typedef __m256i V;
constexpr int SUMS = 8;
static inline V dot(const V& sum, V ones) {
  __asm__ volatile("" : "+x"(ones));  // keeps the compiler from hoisting part of the product out of the loop
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(ones, ones), _mm256_set1_epi16(1)));
}
#include "tile.inc"
}  // namespace avx2
TARGET_END

TARGET("avx512f,avx512vnni")
namespace avx512vnni {
typedef __m512i V;
constexpr int SUMS = 16;
static inline V dot(V sum, const V& ones) {  // GCC 12 moves sums between registers if this uses the intrinsic
  __asm__("vpdpbusd %1, %1, %0" : "+v"(sum) : "v"(ones));
  return sum;
}
#include "tile.inc"
}  // namespace avx512vnni
TARGET_END

namespace amx {
inline float widen(uint16_t) { return 0; }  // the tests' emulated tiles multiply bfloat16 too
#include "../tiles.inc"
uint32_t count_piece() {
  alignas(64) uint8_t ones[16][64];
  uint32_t sums[4][16][16], total = 0;
  memset(ones, 1, sizeof ones);
  configure_tiles(16);
  clear<0, 4>();
  Tiles::load<4>(ones, 64);
  Tiles::load<6>(ones, 64);
  for (int64_t turn = 0; turn < PIECE / (4 * 16 * 16 * 64); ++turn)
    Tiles::dot_int8<0, 4, 6>(), Tiles::dot_int8<1, 4, 6>(), Tiles::dot_int8<2, 4, 6>(), Tiles::dot_int8<3, 4, 6>();
  Tiles::store<0>(sums[0], 64), Tiles::store<1>(sums[1], 64), Tiles::store<2>(sums[2], 64), Tiles::store<3>(sums[3], 64);
  Tiles::release();
  for (const auto& tile : sums)
    for (const auto& row : tile)
      for (const uint32_t lane : row) total += lane;
  return total;
}
}  // namespace amx
#endif

ffi::Error CountProducts(ffi::ThreadPool pool, ffi::ResultBuffer<ffi::U32> total, int64_t pieces) {
  if (total->element_count() != 1 || pieces < 0) return ffi::Error::InvalidArgument("tilewright_count_products: expected one result, and pieces");
  uint32_t (*count_piece)() = nullptr;
#if defined(__x86_64__)
  const native::Isa isa = native::isa();
  if (isa >= native::AVX2) count_piece = avx2::count_piece;
  if (isa >= native::AVX512_VNNI) count_piece = avx512vnni::count_piece;
  if (isa == native::AMX) count_piece = amx::count_piece;
#endif
  if (count_piece == nullptr) return ffi::Error(ffi::ErrorCode::kUnimplemented, "tilewright_count_products: no instruction multiplies 8-bit numbers here");
  std::atomic<uint32_t> sum{0};
  native::share(pool, pieces, 1, true, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum += count_piece();
  });
  *total->typed_data() = sum.load();
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightCountProducts, CountProducts,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ret<ffi::Buffer<ffi::U32>>().Attr<int64_t>("pieces"));

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
