// Reads a buffer as fast as this machine can: the sum of its 32-bit integers, in several streams per thread, with the widest loads.

#include "../native.h"

namespace {

constexpr int64_t STREAMS = 4;          // like the adjacent panels of a matmul with one row
constexpr int64_t PIECE = 1 << 16;      // elements read in this number of streams at once

#define TILE "read/tile.inc"
#include "../isas.inc"
#undef TILE

ffi::Error Read(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> x, ffi::ResultBuffer<ffi::S32> total) {
  if (total->element_count() != 1) return ffi::Error::InvalidArgument("tilewright_read: expected one result");
  const auto total_of = ON_BEST_ISA(total_of);
  std::atomic<uint32_t> sum{0};
  native::share(pool, x.element_count(), PIECE, true, [&](int64_t begin, int64_t end) { sum += total_of(x.typed_data(), begin, end); });
  *total->typed_data() = static_cast<int32_t>(sum.load());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightRead, Read,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::Buffer<ffi::S32>>());

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
