// Sparse denoising attention on CPUs, of a window of queries over a whole sequence: exact for some queries, an update of the previous context by
// changed values for the others, with the sums that measure each context's change. See reference.py.

#include "../native.h"

#include <cmath>

namespace {

enum Kind : int32_t { IDLE = -2, EXACT = -1, CARRIED = 0 };

struct Call {
  int64_t batch, window, positions, n, heads, d, changes;
  const void *q, *k, *v, *change, *before;  // [batch, window, n, d], [batch, positions, heads, d], [batch, changes, positions, heads, d]
  const int32_t *lengths, *kinds;           // [batch], [batch, window]
  void* out;                                // like before, [batch, window, n d]
  float* sums;                              // [batch, n, window, 3]: per head
};

#define TILE "sparse_attention/tile.inc"
#include "../isas.inc"
#undef TILE

using Any = ffi::AnyBuffer;

ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument("tilewright_window_attention: " + what); }

ffi::Error SparseAttention(ffi::ThreadPool pool, Any q, Any k, Any v, Any changes, ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> kinds, Any before,
                           ffi::Result<Any> out, ffi::ResultBuffer<ffi::F32> sums) {
  const auto type = q.element_type();
  for (const Any& each : {k, v, changes, before, *out})
    if ((type != ffi::F32 && type != ffi::BF16) || each.element_type() != type) return wrong("expected all in one type, float32 or bfloat16");
  const auto qs = q.dimensions(), ks = k.dimensions(), cs = changes.dimensions();
  if (qs.size() != 4 || ks.size() != 4 || cs.size() != 5) return wrong("shapes do not fit");
  Call call = {qs[0], qs[1], ks[1], qs[2], ks[2], qs[3], cs[1], q.untyped_data(), k.untyped_data(), v.untyped_data(), changes.untyped_data(),
               before.untyped_data(), lengths.typed_data(), kinds.typed_data(), out->untyped_data(), nullptr};
  const auto counts = [](const Any& each, int64_t count) { return static_cast<int64_t>(each.element_count()) == count; };
  const int64_t keys = call.batch * call.positions * call.heads * call.d, queries = call.batch * call.window;
  if (call.d == 0 || call.d % 16 != 0 || call.heads == 0 || call.n % call.heads != 0 || !counts(k, keys) || !counts(v, keys) ||
      !counts(changes, keys * call.changes) || cs[2] != call.positions || !counts(before, queries * call.n * call.d) ||
      !counts(*out, queries * call.n * call.d) || static_cast<int64_t>(lengths.element_count()) != call.batch ||
      static_cast<int64_t>(kinds.element_count()) != queries || static_cast<int64_t>(sums->element_count()) != queries * 3)
    return wrong("shapes do not fit");
  for (int64_t b = 0; b < call.batch; ++b)
    if (call.lengths[b] < 0 || call.lengths[b] > call.positions) return wrong("a length is out of range");
  for (int64_t i = 0; i < queries; ++i)
    if (call.kinds[i] < IDLE || call.kinds[i] >= CARRIED + call.changes) return wrong("a kind is out of range");
  const int64_t items = call.batch * call.n, together = call.batch * call.heads >= pool.num_threads() ? call.n / call.heads : 1;
  call.sums = static_cast<float*>(native::scratch<1>(queries * call.n * 3 * sizeof(float) + 64));
  const auto run = type == ffi::BF16 ? ON_BEST_ISA(attend<uint16_t>) : ON_BEST_ISA(attend<float>);
  native::share(pool, items, together, items * call.window * call.positions * call.d >= (1 << 17), [&](int64_t begin, int64_t end) { run(call, begin, end); });
  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t i = 0; i < call.window * 3; ++i) {
      float sum = 0;
      for (int64_t n = 0; n < call.n; ++n) sum += call.sums[(b * call.n + n) * call.window * 3 + i];
      sums->typed_data()[b * call.window * 3 + i] = sum;
    }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightWindowAttention, SparseAttention,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>().Arg<Any>().Ret<Any>().Ret<ffi::Buffer<ffi::F32>>());

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
