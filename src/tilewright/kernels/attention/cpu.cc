// Attention of a few queries over the first keys of a cache, and over keys of their own, on CPUs. Only keys that some query sees are read,
// whatever the cache's capacity.

#include "../native.h"

#include <cmath>

namespace {

struct Call {
  int64_t batch, t, n, d;      // rows of the batch, queries a row, query heads, head size
  int64_t heads, s, own;       // key heads, capacity of the cache, keys of the queries' own
  float scale;
  const float* q;
  const void *k, *v, *own_k, *own_v;
  const int32_t* lengths;      // [batch, t]: how many of the cache's first keys each query sees
  float* out;
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

ffi::Error Attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> lengths,
                     ffi::AnyBuffer own_k, ffi::AnyBuffer own_v, ffi::ResultBuffer<ffi::F32> out) {
  const auto dims = q.dimensions(), cache = k.dimensions(), own = own_k.dimensions();
  if (dims.size() != 4 || cache.size() != 4 || own.size() != 4 || dims[3] % 16 != 0 || dims[2] % cache[1] != 0 || cache[3] != dims[3] ||
      lengths.element_count() != static_cast<size_t>(dims[0] * dims[1]) || k.element_type() != v.element_type() ||
      k.element_type() != own_k.element_type()) {
    return ffi::Error::InvalidArgument("tilewright_attention: shapes or types do not fit");
  }
  Call call{dims[0], dims[1], dims[2], dims[3], cache[1], cache[2], own[2], 1.0f / std::sqrt(static_cast<float>(dims[3])),
            q.typed_data(), k.untyped_data(), v.untyped_data(), own_k.untyped_data(), own_v.untyped_data(), lengths.typed_data(),
            out->typed_data()};
  for (int64_t i = 0; i < call.batch * call.t; ++i) {
    if (call.lengths[i] < 0 || call.lengths[i] > call.s) return ffi::Error::InvalidArgument("tilewright_attention: a length is out of range");
  }
  const Kernel kernel = kernel_for(k.element_type() == ffi::BF16);
  native::share(pool, call.batch * call.heads, 1, true, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightAttention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
