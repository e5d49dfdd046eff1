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

#define TILE "rms_norm/tile.inc"
#include "../isas.inc"
#undef TILE

ffi::Error RmsNorm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> out, float eps) {
  const bool bfloat16 = x.element_type() == ffi::BF16;
  if ((!bfloat16 && x.element_type() != ffi::F32) || weight.element_type() != x.element_type() || out->element_type() != x.element_type())
    return ffi::Error::InvalidArgument("tilewright_rms_norm: expected input, weight and output in one type, float32 or bfloat16");
  const auto dims = x.dimensions();
  if (dims.size() == 0 || weight.element_count() != static_cast<size_t>(dims.back()) || out->element_count() != x.element_count())
    return ffi::Error::InvalidArgument("tilewright_rms_norm: shapes do not fit");
  if (x.element_count() == 0) return ffi::Error::Success();
  const Call call{static_cast<int64_t>(x.element_count()) / dims.back(), dims.back(), eps, x.untyped_data(), weight.untyped_data(), out->untyped_data()};
  const auto kernel = bfloat16 ? ON_BEST_ISA(run<uint16_t>) : ON_BEST_ISA(run<float>);
  native::share(pool, call.rows, 1, call.rows * call.h >= (1 << 15), [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightRmsNorm, RmsNorm,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<float>("eps"));

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
