// Attention on CPUs, of a few queries over a range of cached keys and over block keys of the block; and the steps before it: queries and keys of a
// joined projection are normalised and rotated, and keys and values are written into the cache. Only keys that some query sees are read, whatever
// the cache's capacity. A cache is contiguous per row, or paged. Its keys and values have the queries' type, or are 8-bit integers with a scale per
// entry (see paged/quantise.py).

#include "../native.h"
#include "../pages.h"

#include <cmath>
#include <utility>

namespace {

struct Call {
  int64_t batch, t, n, d;      // rows of the batch, queries per row, query heads, head size
  int64_t heads, own;          // key heads, block keys
  native::Cache cache;
  const void* q;
  const void *k, *v, *own_k, *own_v;
  const float *k_scale, *v_scale;  // scales of a cache with 8-bit entries; else null
  const int32_t* lengths;      // [batch, t]: end of each query's range of visible cached keys
  const int32_t* firsts;       // [batch, t]: start of that range; null for 0
  const uint32_t* bits;        // [batch, t, words]: mask of the block keys per query, the lowest bit first; null if all are visible
  int64_t words;
  void* out;
  float scale;
  int64_t piece, pieces;       // rows of a key head that are computed together, and pieces per key head

  // Number of leading cached keys that none of row b's queries [begin, end) sees.
  int64_t skipped(int64_t b, int64_t begin, int64_t end) const {
    if (firsts == nullptr) return 0;
    int32_t most = 0, least = INT32_MAX;
    for (int64_t i = b * t + begin; i < b * t + end; ++i) {
      most = std::max(most, lengths[i]);
      if (firsts[i] < lengths[i]) least = std::min(least, firsts[i]);
    }
    return std::min(most, least);
  }
};

// Queries, keys and values side by side, [batch, t, n + 2 heads, d], and their destinations.
struct Projection {
  int64_t batch, t, n, d, heads;
  native::Cache cache;         // layout of k and v
  const void* qkv;
  const void *q_norm, *k_norm;  // [d], or null
  float eps;
  int64_t half;                // rotated pairs of a head's entries
  const float *cos, *sin;      // [batch, t, half]
  const int32_t *start, *count;  // [batch]: first entry to write, and number of entries; null: all from entry 0
  void* q;                     // [batch, t, n, d]
  void *k, *v;
  float *k_scale = nullptr, *v_scale = nullptr;  // for k and v in 8 bits
};

#define TILE "attention/tile.inc"
#include "../isas.inc"
#undef TILE

#if defined(__x86_64__)
TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
namespace tiles {
#define VECTORS 8
#include "tile.inc"
#include "amx.inc"
#undef VECTORS
}  // namespace tiles
TARGET_END
#endif

// The attention kernel of one type, and the number of rows that it takes at a time.
struct Kernel {
  void (*run)(const Call&, int64_t, int64_t);
  int64_t rows;
};

Kernel kernel_for(bool bfloat16, bool eight_bits) {
#if defined(__x86_64__)
  if (bfloat16 && native::isa() == native::AMX) return {eight_bits ? tiles::run_tiles<int8_t> : tiles::run_tiles<uint16_t>, 16};
#endif
  if (eight_bits) return {bfloat16 ? ON_BEST_ISA(run<uint16_t, int8_t>) : ON_BEST_ISA(run<float, int8_t>), 8};
  return {bfloat16 ? ON_BEST_ISA(run<uint16_t, uint16_t>) : ON_BEST_ISA(run<float, float>), 8};
}

ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument("tilewright_attention: " + what); }

using Table = const ffi::Buffer<ffi::S32>*;  // page table; null for a contiguous cache

// Returns whether k has the batch's entries. If a row has several pages, they must hold whole panels of 16 keys.
bool has_rows(Table table, int64_t batch, const ffi::AnyBuffer& k) {
  const auto dims = k.dimensions();
  return table == nullptr ? dims[0] == batch : native::fits_rows(table, batch) && dims[2] > 0 && (dims[2] % 16 == 0 || table->dimensions()[1] == 1);
}

bool is_float(ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16; }

// Divides the rows of each key head so that all threads have work and scores stay in the L2 cache.
void attend(ffi::ThreadPool& pool, Call& call, bool bfloat16) {  // a scale of 0 stands for d^-1/2
  const int64_t items = call.batch * call.heads, rows = call.heads == 0 ? 0 : call.n / call.heads * call.t;
  if (items * rows == 0) return;
  if (call.scale == 0) call.scale = 1.0f / std::sqrt(static_cast<float>(call.d));
  const int64_t keys = *std::max_element(call.lengths, call.lengths + call.batch * call.t) + call.own, work = items * rows * keys * call.d;
  const bool worth_it = work >= (1 << 16);
  const int64_t wanted = worth_it ? (2 * static_cast<int64_t>(pool.num_threads()) + items - 1) / items : 1;
  const Kernel kernel = kernel_for(bfloat16, call.k_scale != nullptr);
  call.piece = std::min<int64_t>(64, ((rows + wanted - 1) / wanted + kernel.rows - 1) / kernel.rows * kernel.rows);
  call.pieces = (rows + call.piece - 1) / call.piece;
  native::share(pool, items * call.pieces, 1, worth_it, [&](int64_t begin, int64_t end) { kernel.run(call, begin, end); });
}

ffi::Error Attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> pages, ffi::Buffer<ffi::S32> lengths,
                     ffi::Buffer<ffi::S32> firsts, ffi::AnyBuffer own_k, ffi::AnyBuffer own_v, ffi::Buffer<ffi::U32> bits, ffi::Result<ffi::AnyBuffer> out,
                     float scale) {
  const Table table = native::table_of(pages);
  const auto dims = q.dimensions(), cache = k.dimensions(), own = own_k.dimensions();
  const size_t queries = lengths.element_count(), words = own.size() == 4 ? (own[2] + 31) / 32 : 0;
  const ffi::DataType type = q.element_type();
  for (const ffi::AnyBuffer& other : {k, v, own_k, own_v, *out})
    if (!is_float(type) || other.element_type() != type) return wrong("expected all in one type, float32 or bfloat16");
  if (dims.size() != 4 || cache.size() != 4 || own.size() != 4 || dims[3] % 16 != 0 || cache[1] == 0 || dims[2] % cache[1] != 0 || cache[3] != dims[3] ||
      !has_rows(table, dims[0], k) || own[0] != dims[0] || own[1] != cache[1] || own[3] != dims[3] || v.element_count() != k.element_count() ||
      own_v.element_count() != own_k.element_count() || out->element_count() != q.element_count() ||
      queries != static_cast<size_t>(dims[0] * dims[1]) || (firsts.element_count() != 0 && firsts.element_count() != queries) ||
      (bits.element_count() != 0 && bits.element_count() != queries * words))
    return wrong("shapes do not fit");
  Call call{dims[0], dims[1], dims[2], dims[3], cache[1], own[2], {cache, table}, q.untyped_data(), k.untyped_data(), v.untyped_data(),
            own_k.untyped_data(), own_v.untyped_data(), nullptr, nullptr, lengths.typed_data(), firsts.element_count() == 0 ? nullptr : firsts.typed_data(),
            bits.element_count() == 0 ? nullptr : bits.typed_data(), static_cast<int64_t>(words), out->untyped_data(), scale, 0, 0};
  for (int64_t i = 0; i < call.batch * call.t; ++i) {
    if (call.lengths[i] < 0 || call.lengths[i] > call.cache.capacity()) return wrong("a length is out of range: " + std::to_string(call.lengths[i]));
    if (call.firsts != nullptr && call.firsts[i] < 0) return wrong("a first entry is out of range: " + std::to_string(call.firsts[i]));
  }
  for (int64_t b = 0; b < call.batch && call.t > 0; ++b) {
    const int32_t* row = call.lengths + b * call.t;
    if (const std::string what = call.cache.complaint(b, call.skipped(b, 0, call.t), *std::max_element(row, row + call.t)); !what.empty()) return wrong(what);
  }
  attend(pool, call, type == ffi::BF16);
  return ffi::Error::Success();
}

// Fills all inputs of `place` except its destinations. With `eight_bits`, k and v are 8-bit integers.
ffi::Error describe(Projection& call, const ffi::AnyBuffer& qkv, const ffi::AnyBuffer& q_norm, const ffi::AnyBuffer& k_norm,
                    const ffi::Buffer<ffi::F32>& cos, const ffi::Buffer<ffi::F32>& sin, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, Table table,
                    float eps, bool eight_bits = false) {
  const auto dims = qkv.dimensions(), kept = k.dimensions();
  const ffi::DataType type = qkv.element_type(), held = eight_bits ? ffi::S8 : type;
  if (!is_float(type) || q_norm.element_type() != type || k_norm.element_type() != type || k.element_type() != held || v.element_type() != held)
    return wrong("expected all but the rotation in one type, float32 or bfloat16");
  if (dims.size() != 3 || kept.size() != 4 || cos.dimensions().size() != 3 || !has_rows(table, dims[0], k) ||
      v.element_count() != k.element_count() || kept[3] == 0 || kept[3] % 16 != 0)
    return wrong("shapes do not fit");
  call = {dims[0], dims[1], dims[2] / kept[3] - 2 * kept[1], kept[3], kept[1], {kept, table}, qkv.untyped_data(), nullptr, nullptr, eps,
          cos.dimensions().back(), cos.typed_data(), sin.typed_data(), nullptr, nullptr, nullptr, k.untyped_data(), v.untyped_data()};
  const auto fits = [&](const ffi::AnyBuffer& norm) { return norm.element_count() == 0 || norm.element_count() == static_cast<size_t>(call.d); };
  const auto angles = static_cast<size_t>(call.batch * call.t * call.half);
  if (dims[2] % call.d != 0 || 2 * call.half > call.d || call.n < 0 || (call.heads != 0 && call.n % call.heads != 0) || !fits(q_norm) || !fits(k_norm) ||
      cos.element_count() != angles || sin.element_count() != angles)
    return wrong("shapes do not fit");
  if (q_norm.element_count() != 0) call.q_norm = q_norm.untyped_data();
  if (k_norm.element_count() != 0) call.k_norm = k_norm.untyped_data();
  return ffi::Error::Success();
}

void place(ffi::ThreadPool& pool, const Projection& call, bool bfloat16) {
  const auto in_8_bits = bfloat16 ? ON_BEST_ISA(place<uint16_t, int8_t>) : ON_BEST_ISA(place<float, int8_t>);
  const auto as_they_are = bfloat16 ? ON_BEST_ISA(place<uint16_t, uint16_t>) : ON_BEST_ISA(place<float, float>);
  const auto place = call.k_scale != nullptr ? in_8_bits : as_they_are;
  const int64_t size = call.batch * call.t * (call.n + 2 * call.heads) * call.d;
  native::share(pool, call.batch * call.t, 1, size >= (1 << 15), [&](int64_t begin, int64_t end) { place(call, begin, end); });
}

ffi::Error NormRotate(ffi::ThreadPool pool, ffi::AnyBuffer qkv, ffi::AnyBuffer q_norm, ffi::AnyBuffer k_norm, ffi::Buffer<ffi::F32> cos,
                      ffi::Buffer<ffi::F32> sin, ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> k, ffi::Result<ffi::AnyBuffer> v, float eps) {
  Projection call;
  if (ffi::Error error = describe(call, qkv, q_norm, k_norm, cos, sin, *k, *v, nullptr, eps); error.failure()) return error;
  if (q->element_type() != qkv.element_type() || static_cast<int64_t>(q->element_count()) != call.batch * call.t * call.n * call.d || call.cache.slots != call.t)
    return wrong("shapes or types do not fit");
  call.q = q->untyped_data();
  place(pool, call, qkv.element_type() == ffi::BF16);
  return ffi::Error::Success();
}

// Writes the entries of `call` and computes attention; the handlers below set the destinations.
ffi::Error write_and_attend(ffi::ThreadPool& pool, Projection& call, const ffi::AnyBuffer& qkv, const ffi::Buffer<ffi::S32>& start,
                             const ffi::Buffer<ffi::S32>& count, ffi::Result<ffi::AnyBuffer>& out, const void* k_out, const void* v_out, int64_t window,
                             float scale) {
  const auto rows = static_cast<size_t>(call.batch);
  const bool bfloat16 = qkv.element_type() == ffi::BF16;
  if (start.element_count() != rows || count.element_count() != rows || out->element_type() != qkv.element_type() ||
      static_cast<int64_t>(out->element_count()) != call.batch * call.t * call.n * call.d)
    return wrong("shapes or types do not fit");
  if (k_out != call.k || v_out != call.v) return wrong("the caches are not written in place");
  call.start = start.typed_data(), call.count = count.typed_data();
  auto* lengths = static_cast<int32_t*>(native::scratch<1>(2 * call.batch * call.t * sizeof(int32_t)));
  auto* firsts = window > 0 ? lengths + call.batch * call.t : nullptr;
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t first = call.start[b], kept = call.count[b];
    if (kept < 0 || kept > call.t) return wrong("a count is out of range: " + std::to_string(kept));
    std::string what = kept == 0 ? "" : call.cache.complaint(b, first, first + kept);
    if (what.empty() && kept > 0) what = call.cache.complaint(b, window > 0 ? std::max<int64_t>(0, first + 1 - window) : 0, first);  // these entries are read
    if (!what.empty()) return wrong(what);
    for (int64_t t = 0; t < call.t; ++t) {
      const int64_t seen = t < kept ? first + t + 1 : 0;
      lengths[b * call.t + t] = static_cast<int32_t>(seen);
      if (window > 0) firsts[b * call.t + t] = static_cast<int32_t>(std::max<int64_t>(0, seen - window));
    }
  }
  call.q = native::scratch<2>(call.batch * call.t * call.n * call.d * (bfloat16 ? 2 : 4));
  place(pool, call, bfloat16);
  Call attention{call.batch,   call.t,       call.n, call.d,  call.heads,          0, call.cache, call.q, call.k, call.v, call.k, call.v,
                 call.k_scale, call.v_scale, lengths, firsts, nullptr, 0, out->untyped_data(), scale, 0, 0};
  attend(pool, attention, bfloat16);
  return ffi::Error::Success();
}

ffi::Error AttendProjected(ffi::ThreadPool pool, ffi::AnyBuffer qkv, ffi::AnyBuffer q_norm, ffi::AnyBuffer k_norm, ffi::Buffer<ffi::F32> cos,
                           ffi::Buffer<ffi::F32> sin, ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::S32> count, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::Buffer<ffi::S32> table, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> k_out,
                           ffi::Result<ffi::AnyBuffer> v_out, float eps, int64_t window, float scale) {
  Projection call;
  if (ffi::Error error = describe(call, qkv, q_norm, k_norm, cos, sin, k, v, native::table_of(table), eps); error.failure()) return error;
  return write_and_attend(pool, call, qkv, start, count, out, k_out->untyped_data(), v_out->untyped_data(), window, scale);
}

// Variant for 8-bit keys and values, whose scales [pages, heads, slots] are updated in place too.
ffi::Error QuantisedAttendProjected(ffi::ThreadPool pool, ffi::AnyBuffer qkv, ffi::AnyBuffer q_norm, ffi::AnyBuffer k_norm, ffi::Buffer<ffi::F32> cos,
                                 ffi::Buffer<ffi::F32> sin, ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::S32> count, ffi::AnyBuffer k,
                                 ffi::Buffer<ffi::F32> k_scale, ffi::AnyBuffer v, ffi::Buffer<ffi::F32> v_scale, ffi::Buffer<ffi::S32> table,
                                 ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::Buffer<ffi::F32>> k_scale_out,
                                 ffi::Result<ffi::AnyBuffer> v_out, ffi::Result<ffi::Buffer<ffi::F32>> v_scale_out, float eps, int64_t window,
                                 float scale) {
  Projection call;
  if (ffi::Error error = describe(call, qkv, q_norm, k_norm, cos, sin, k, v, &table, eps, true); error.failure()) return error;
  const size_t vectors = k.element_count() / call.d;
  if (k_scale.element_count() != vectors || v_scale.element_count() != vectors) return wrong("expected a scale for each vector in 8 bits");
  if (k_scale_out->untyped_data() != k_scale.untyped_data() || v_scale_out->untyped_data() != v_scale.untyped_data())
    return wrong("the scales are not written in place");
  call.k_scale = k_scale.typed_data(), call.v_scale = v_scale.typed_data();
  return write_and_attend(pool, call, qkv, start, count, out, k_out->untyped_data(), v_out->untyped_data(), window, scale);
}

}  // namespace

using Any = ffi::AnyBuffer;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using U32 = ffi::Buffer<ffi::U32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightAttention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<S32>().Arg<S32>().Arg<S32>()
                                  .Arg<Any>().Arg<Any>().Arg<U32>().Ret<Any>().Attr<float>("scale"));

#define PROJECTION Ctx<ffi::ThreadPool>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<F32>().Arg<F32>()
#define PLACED Ret<Any>().Ret<Any>().Ret<Any>().Attr<float>("eps")
#define SEEN Attr<int64_t>("window").Attr<float>("scale")

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightNormRotate, NormRotate, ffi::Ffi::Bind().PROJECTION.PLACED);
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightAttendProjected, AttendProjected,
                              ffi::Ffi::Bind().PROJECTION.Arg<S32>().Arg<S32>().Arg<Any>().Arg<Any>().Arg<S32>().PLACED.SEEN);

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightQuantisedAttendProjected, QuantisedAttendProjected,
                              ffi::Ffi::Bind()
                                  .PROJECTION.Arg<S32>().Arg<S32>().Arg<Any>().Arg<F32>().Arg<Any>().Arg<F32>().Arg<S32>()
                                  .Ret<Any>().Ret<Any>().Ret<F32>().Ret<Any>().Ret<F32>().Attr<float>("eps").SEEN);

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
