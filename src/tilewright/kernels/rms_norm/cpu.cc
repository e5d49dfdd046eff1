// Root-mean-square normalisation of rows on CPUs, in the type of the input, with sums in float32.

#include "../native.h"

#include <cmath>

namespace {

struct Call {
  int64_t rows, h;
  float eps;
  const void *x, *weight;
  void* out;
};

typedef void (*Kernel)(const Call&, int64_t begin, int64_t end);

namespace plain {
#include "tile.inc"
}  // namespace plain

#if defined(__x86_64__)
TARGET("avx2,fma")
namespace avx2 {
#include "tile.inc"
}  // namespace avx2
TARGET_END

TARGET("avx512f,avx512bw,avx512vl,avx512dq,fma")
namespace avx512 {
#include "tile.inc"
}  // namespace avx512
TARGET_END
#endif

Kernel kernel_for(bool bfloat16) {
#if defined(__x86_64__)
  if (native::isa() >= native::AVX512) return bfloat16 ? avx512::run<uint16_t> : avx512::run<float>;
  if (native::isa() == native::AVX2) return bfloat16 ? avx2::run<uint16_t> : avx2::run<float>;
#endif
  return bfloat16 ? plain::run<uint16_t> : plain::run<float>;
}

ffi::Error RmsNorm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> out, float eps) {
  const bool bfloat16 = x.element_type() == ffi::BF16;
  if ((!bfloat16 && x.element_type() != ffi::F32) || weight.element_type() != x.element_type() || out->element_type() != x.element_type())
    return ffi::Error::InvalidArgument("tilewright_rms_norm: expected input, weight and output in one type, float32 or bfloat16");
  const auto dims = x.dimensions();
  if (dims.size() == 0 || weight.element_count() != static_cast<size_t>(dims.back()) || out->element_count() != x.element_count())
    return ffi::Error::InvalidArgument("tilewright_rms_norm: shapes do not fit");
  if (x.element_count() == 0) return ffi::Error::Success();
  const Call call{static_cast<int64_t>(x.element_count()) / dims.back(), dims.back(), eps, x.untyped_data(), weight.untyped_data(), out->untyped_data()};
  const Kernel kernel = kernel_for(bfloat16);
  native::share(pool, call.rows, 1, call.rows * call.h >= (1 << 15), [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightRmsNorm, RmsNorm,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<float>("eps"));

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
