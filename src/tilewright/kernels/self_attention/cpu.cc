// Self-attention of whole sequences on CPUs, and its gradient, from a joined projection whose queries and keys are normalised and rotated. A query
// sees the keys from a given first key to its own. The gradient recomputes weights from the log-sum-exp of each query; nothing else is stored.

#include "../native.h"

#include <cmath>

namespace {

struct Call {
  int64_t batch, t, n, heads, d;  // rows of the batch, positions, query heads, key heads, head size
  const void* qkv;                // [batch, t, (n + 2 heads) d]
  const float *q_norm, *k_norm;   // [d], or null
  float eps;
  int64_t half;                   // rotated pairs of a head's entries
  const float *cos, *sin;         // [batch, t, half]
  void* out;                      // [batch, t, n d]
  float* sums;                    // [batch, n, t]: log-sum-exp of a query's scores
  const int32_t* firsts;          // [batch, t]: first visible key of a query; null for all keys
  const void* given;              // backward: gradient of out
  void* result;                   // backward: gradient of qkv
  float* norms_due;               // backward: [batch, heads, 2, d], gradients of both norms per item

  int64_t first(int64_t b, int64_t query) const { return firsts == nullptr ? 0 : firsts[b * t + query]; }
  // First panel of 16 keys of which row b's queries [begin, end) see a key.
  int64_t panel(int64_t b, int64_t begin, int64_t end) const {
    return firsts == nullptr ? 0 : *std::min_element(firsts + b * t + begin, firsts + b * t + end) / 16 * 16;
  }
};

#define TILE "self_attention/tile.inc"
#include "../isas.inc"
#undef TILE

using Any = ffi::AnyBuffer;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument("tilewright_self_attention: " + what); }

// Common setup of forward and backward.
ffi::Error describe(Call& call, const Any& qkv, const F32& q_norm, const F32& k_norm, const F32& cos, const F32& sin, const S32& firsts,
                    const Any& out, const F32& sums, float eps) {
  const auto dims = qkv.dimensions(), outs = out.dimensions(), shape = sums.dimensions();
  if ((qkv.element_type() != ffi::F32 && qkv.element_type() != ffi::BF16) || out.element_type() != qkv.element_type())
    return wrong("expected projection and result in one type, float32 or bfloat16");
  if (dims.size() != 3 || outs.size() != 3 || shape.size() != 3 || shape[1] == 0 || outs[2] % shape[1] != 0) return wrong("shapes do not fit");
  const int64_t d = outs[2] / shape[1], rest = dims[2] - outs[2];
  if (d == 0 || d % 16 != 0 || rest <= 0 || rest % (2 * d) != 0 || shape[1] % (rest / (2 * d)) != 0 || outs[0] != dims[0] || outs[1] != dims[1] ||
      shape[0] != dims[0] || shape[2] != dims[1])
    return wrong("shapes do not fit");
  const auto fits = [&](const F32& norm) { return norm.element_count() == 0 || norm.element_count() == static_cast<size_t>(d); };
  if (cos.dimensions().size() != 3 || 2 * cos.dimensions().back() > d) return wrong("shapes do not fit");
  const int64_t half = cos.dimensions().back();
  const auto angles = static_cast<size_t>(dims[0] * dims[1] * half);
  if (!fits(q_norm) || !fits(k_norm) || cos.element_count() != angles || sin.element_count() != angles ||
      (firsts.element_count() != 0 && firsts.element_count() != static_cast<size_t>(dims[0] * dims[1])))
    return wrong("shapes do not fit");
  for (size_t i = 0; i < firsts.element_count(); ++i)
    if (firsts.typed_data()[i] < 0 || firsts.typed_data()[i] > static_cast<int64_t>(i) % dims[1])
      return wrong("expected the first key of a query from 0 to its own, found " + std::to_string(firsts.typed_data()[i]));
  call = {dims[0], dims[1], shape[1], rest / (2 * d), d, qkv.untyped_data(), q_norm.element_count() == 0 ? nullptr : q_norm.typed_data(),
          k_norm.element_count() == 0 ? nullptr : k_norm.typed_data(), eps, half, cos.typed_data(), sin.typed_data(), out.untyped_data(),
          sums.typed_data(), firsts.element_count() == 0 ? nullptr : firsts.typed_data(), nullptr, nullptr, nullptr};
  return ffi::Error::Success();
}

bool worth_sharing(const Call& call) { return call.batch * call.n * call.t * call.t * call.d >= (1 << 17); }

ffi::Error SelfAttention(ffi::ThreadPool pool, Any qkv, F32 q_norm, F32 k_norm, F32 cos, F32 sin, S32 firsts, ffi::Result<Any> out, ffi::Result<F32> sums,
                         float eps) {
  Call call;
  if (ffi::Error error = describe(call, qkv, q_norm, k_norm, cos, sin, firsts, *out, *sums, eps); error.failure()) return error;
  const auto run = qkv.element_type() == ffi::BF16 ? ON_BEST_ISA(forward<uint16_t>) : ON_BEST_ISA(forward<float>);
  native::share(pool, call.batch * call.heads, 1, worth_sharing(call), [&](int64_t begin, int64_t end) { run(call, begin, end); });
  return ffi::Error::Success();
}

ffi::Error SelfAttentionGrad(ffi::ThreadPool pool, Any qkv, F32 q_norm, F32 k_norm, F32 cos, F32 sin, S32 firsts, Any out, F32 sums, Any given,
                             ffi::Result<Any> result, ffi::Result<F32> q_norm_due, ffi::Result<F32> k_norm_due, float eps) {
  Call call;
  if (ffi::Error error = describe(call, qkv, q_norm, k_norm, cos, sin, firsts, out, sums, eps); error.failure()) return error;
  if (given.element_type() != out.element_type() || given.element_count() != out.element_count() || result->element_type() != qkv.element_type() ||
      result->element_count() != qkv.element_count() || q_norm_due->element_count() != q_norm.element_count() ||
      k_norm_due->element_count() != k_norm.element_count())
    return wrong("shapes or types do not fit");
  call.given = given.untyped_data(), call.result = result->untyped_data();
  const int64_t items = call.batch * call.heads;
  call.norms_due = static_cast<float*>(native::scratch<1>(items * 2 * call.d * sizeof(float) + 64));
  const auto run = qkv.element_type() == ffi::BF16 ? ON_BEST_ISA(backward<uint16_t>) : ON_BEST_ISA(backward<float>);
  native::share(pool, items, 1, worth_sharing(call), [&](int64_t begin, int64_t end) { run(call, begin, end); });
  for (int64_t which = 0; which < 2; ++which) {
    F32& due = which == 0 ? *q_norm_due : *k_norm_due;
    for (size_t c = 0; c < due.element_count(); ++c) {
      float sum = 0;
      for (int64_t i = 0; i < items; ++i) sum += call.norms_due[(i * 2 + which) * call.d + c];
      due.typed_data()[c] = sum;
    }
  }
  return ffi::Error::Success();
}

}  // namespace

#define OPERANDS Ctx<ffi::ThreadPool>().Arg<Any>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>().Arg<S32>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightSelfAttention, SelfAttention, ffi::Ffi::Bind().OPERANDS.Ret<Any>().Ret<F32>().Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightSelfAttentionGrad, SelfAttentionGrad,
                              ffi::Ffi::Bind().OPERANDS.Arg<Any>().Arg<F32>().Arg<Any>().Ret<Any>().Ret<F32>().Ret<F32>().Attr<float>("eps"));

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
