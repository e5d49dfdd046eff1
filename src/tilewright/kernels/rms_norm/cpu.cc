// RMSNorm of rows on CPUs, in the type of the input, with sums in float32.

#include "../native.h"

#include <cmath>

namespace {

struct Call {
  int64_t rows, h;
  float eps;
  const void *x, *weight;
  void* out;
  const void* due;    // backward only: gradient of the result
  float* weight_due;  // backward only: [stretches, h], partial gradients of the weight
};

constexpr int64_t ROWS = 64;  // rows per partial sum of the weight's gradient, independent of the number of threads

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
  const Call call{static_cast<int64_t>(x.element_count()) / dims.back(), dims.back(), eps, x.untyped_data(), weight.untyped_data(), out->untyped_data(),
                  nullptr, nullptr};
  const auto kernel = bfloat16 ? ON_BEST_ISA(run<uint16_t>) : ON_BEST_ISA(run<float>);
  native::share(pool, call.rows, 1, call.rows * call.h >= (1 << 15), [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  return ffi::Error::Success();
}

// For training: float32 input and weight, a result of either type.
ffi::Error Normalise(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight, ffi::Result<ffi::AnyBuffer> out, float eps) {
  const bool bfloat16 = out->element_type() == ffi::BF16;
  if (!bfloat16 && out->element_type() != ffi::F32) return ffi::Error::InvalidArgument("tilewright_normalise: expected a result in float32 or bfloat16");
  const auto dims = x.dimensions();
  if (dims.size() == 0 || weight.element_count() != static_cast<size_t>(dims.back()) || out->element_count() != x.element_count())
    return ffi::Error::InvalidArgument("tilewright_normalise: shapes do not fit");
  if (x.element_count() == 0) return ffi::Error::Success();
  const Call call{static_cast<int64_t>(x.element_count()) / dims.back(), dims.back(), eps, x.untyped_data(), weight.untyped_data(), out->untyped_data(),
                  nullptr, nullptr};
  const auto kernel = bfloat16 ? ON_BEST_ISA(forward<uint16_t>) : ON_BEST_ISA(forward<float>);
  native::share(pool, call.rows, 1, call.rows * call.h >= (1 << 15), [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  return ffi::Error::Success();
}

ffi::Error NormaliseGrad(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight, ffi::AnyBuffer due, ffi::ResultBuffer<ffi::F32> out,
                         ffi::ResultBuffer<ffi::F32> weight_due, float eps) {
  const bool bfloat16 = due.element_type() == ffi::BF16;
  if (!bfloat16 && due.element_type() != ffi::F32) return ffi::Error::InvalidArgument("tilewright_normalise: expected a gradient in float32 or bfloat16");
  const auto dims = x.dimensions();
  if (dims.size() == 0 || weight.element_count() != static_cast<size_t>(dims.back()) || out->element_count() != x.element_count() ||
      due.element_count() != x.element_count() || weight_due->element_count() != weight.element_count())
    return ffi::Error::InvalidArgument("tilewright_normalise: shapes do not fit");
  const int64_t h = dims.back(), rows = h == 0 ? 0 : static_cast<int64_t>(x.element_count()) / h, stretches = (rows + ROWS - 1) / ROWS;
  auto* sums = static_cast<float*>(native::scratch<0>(stretches * h * sizeof(float) + 64));
  const Call call{rows, h, eps, x.untyped_data(), weight.untyped_data(), out->untyped_data(), due.untyped_data(), sums};
  const auto kernel = bfloat16 ? ON_BEST_ISA(backward<uint16_t>) : ON_BEST_ISA(backward<float>);
  native::share(pool, stretches, 1, rows * h >= (1 << 15), [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  std::fill(weight_due->typed_data(), weight_due->typed_data() + h, 0.0f);
  for (int64_t stretch = 0; stretch < stretches; ++stretch)
    for (int64_t i = 0; i < h; ++i) weight_due->typed_data()[i] += sums[stretch * h + i];
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightRmsNorm, RmsNorm,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    TilewrightNormalise, Normalise,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::AnyBuffer>().Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightNormaliseGrad, NormaliseGrad,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("eps"));

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
