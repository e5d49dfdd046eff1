// y = x @ W on CPUs, for weights that were packed once (see tile.inc for the layout), and y = silu(x @ G) * (x @ U) in one call.
//
// Built for several instruction sets, of which the best that the machine has is taken at run time. Work is split over panels of outputs.

#include "../native.h"

namespace {

struct Call {
  int64_t m, n;          // rows, outputs
  int64_t k_padded;      // inputs, rounded up to the format's step
  int64_t panels;        // panels of 16 outputs; with gate and up, twice as many
  int64_t panel_size;    // elements of a panel
  const void* w;
  float* out;
  bool gated;
};

typedef void (*Kernel)(const Call&, const void* x, int64_t begin, int64_t end);

namespace plain {
#define REGISTERS 4
#define HAVE_BF16_DOT 0
#include "tile.inc"
#undef REGISTERS
}  // namespace plain

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define REGISTERS 4
#include "tile.inc"
#undef REGISTERS
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
namespace avx512 {
#define REGISTERS 16
#include "tile.inc"
#undef REGISTERS
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
namespace avx512bf16 {
#define REGISTERS 16
#undef HAVE_BF16_DOT
#define HAVE_BF16_DOT 1
#include "tile.inc"
#undef REGISTERS
}  // namespace avx512bf16
#pragma GCC pop_options
#endif

Kernel kernel_for(bool bfloat16) {
  const std::string isa = native::isa();
#if defined(__x86_64__)
  if (isa == "avx512bf16" && bfloat16) return avx512bf16::run<avx512bf16::BFloat16>;
  if (isa == "avx512bf16" || isa == "avx512") return bfloat16 ? avx512::run<avx512::BFloat16> : avx512::run<avx512::Float32>;
  if (isa == "avx2") return bfloat16 ? avx2::run<avx2::BFloat16> : avx2::run<avx2::Float32>;
#endif
  return bfloat16 ? plain::run<plain::BFloat16> : plain::run<plain::Float32>;
}

uint16_t round_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>((bits >> 16) | 64);  // stay a NaN
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

ffi::Error Linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y, bool gated) {
  const bool half = w.element_type() == ffi::BF16;
  const auto shape = w.dimensions();  // float32: [panels, K, 16]; bfloat16: [panels, K / 2, 16, 2]
  const int64_t k = x.dimensions().back();
  Call call;
  call.n = y->dimensions().back();
  call.m = x.element_count() / std::max<int64_t>(k, 1);
  call.panels = shape[0];
  call.k_padded = half ? 2 * shape[1] : shape[1];
  call.panel_size = call.k_padded * 16;
  call.w = w.untyped_data();
  call.out = y->typed_data();
  call.gated = gated;
  const int64_t needed = (call.n + 15) / 16 * (gated ? 2 : 1);
  if (call.panels != needed || call.k_padded < k || call.k_padded > k + 1 || y->element_count() != static_cast<size_t>(call.m * call.n)) {
    return ffi::Error::InvalidArgument("tilewright_linear: packed weights do not fit the input and output");
  }
  if (reinterpret_cast<uintptr_t>(call.w) % 64 != 0) return ffi::Error::InvalidArgument("tilewright_linear: weights are not aligned");
  const void* input = x.untyped_data();
  std::vector<uint16_t> rounded;
  if (half) {
    rounded.assign(call.m * call.k_padded, 0);
    for (int64_t r = 0; r < call.m; ++r)
      for (int64_t c = 0; c < k; ++c) rounded[r * call.k_padded + c] = round_to_bf16(x.typed_data()[r * k + c]);
    input = rounded.data();
  }
  const Kernel kernel = kernel_for(half);
  const int64_t work = call.panels * call.panel_size * std::max<int64_t>(1, call.m / 4);
  // Panels of gate and up stay together; below some 10 microseconds of work a second thread costs more than it brings.
  native::share(pool, call.panels, 2, work >= (1 << 16), [&](int64_t begin, int64_t end) { kernel(call, input, begin, end); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightLinear, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("gated"));

extern "C" const char* TilewrightIsa() { return native::isa(); }
