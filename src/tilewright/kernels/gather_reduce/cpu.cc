// Gathers and reduces neighbours' features in one pass, on CPUs: rows of a graph in compressed form (offsets, sources), weights per edge, softmax
// attention over a row, and the products for gradients. tile.inc has the loops.
//
// Threads divide the rows by their edges. A row with more than a thread's share is divided by features, so that results are independent of the
// number of threads.

#include "../native.h"

#include <cmath>

namespace {

enum Reduce { SUM, MEAN, MAX, MIN };

struct Call {
  int64_t rows, edges, nodes;    // edges: of all rows; further sources are not read
  int64_t features, heads;
  const int32_t *offsets, *sources;
  const void* x;                 // [nodes, features]
  Reduce reduce;
  const float* weights;          // [edges from first_weight on, heads] or null
  int64_t first_weight;
  void* out;                     // [rows, features]
  const void* rows_x;            // [rows, features]: row vectors for dots
  float* dots;                   // [sources, heads]
  int64_t ahead;                 // prefetch distance in edges
};

struct Attention {
  float slope;
  const float *source_score, *target_score;  // [nodes, heads], [rows, heads]
  float *row_max, *row_sum;                  // [rows, heads]
  const float* facts;                        // [nodes, 3, heads], backward: target score, log-sum-exp, and the term to subtract
  float* grad_score;                         // [rows, heads], backward
};

// Number of vectors of 16 that cover a head's features, and all features.
inline int64_t vectors_of_head(int64_t features) { return (features + 15) / 16; }
inline int64_t vectors(const Call& call) { return call.heads * vectors_of_head(call.features / call.heads); }

struct Kernel {
  uint32_t (*largest)(const Call&, int64_t begin, int64_t end);
  void (*reduce)(const Call&, int64_t first, int64_t stop, int64_t begin, int64_t end);
  void (*dot)(const Call&, int64_t begin, int64_t end);
  void (*soften)(const Call&, const Attention&, float* weights, int64_t begin, int64_t end);
  void (*recall)(const Call&, const Attention&, float* weights, float* slopes, int64_t begin, int64_t end);
  void (*blame)(const Call&, const Attention&, const float* weights, const float* slopes, int64_t begin, int64_t end);
};

#define TILE "gather_reduce/tile.inc"
#include "../isas.inc"
#undef TILE

template <class T>
Kernel best_kernel() {
  return {ON_BEST_ISA(largest), ON_BEST_ISA(reduce<T>), ON_BEST_ISA(dot<T>), ON_BEST_ISA(soften), ON_BEST_ISA(recall), ON_BEST_ISA(blame)};
}

Kernel kernel_for(bool bfloat16) { return bfloat16 ? best_kernel<uint16_t>() : best_kernel<float>(); }

typedef ffi::Buffer<ffi::F32> F32;
typedef ffi::Buffer<ffi::S32> S32;
typedef ffi::ResultBuffer<ffi::F32> F32Result;

ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument("tilewright_gather_reduce: " + what); }

// A graph in compressed form and the features to gather; `rows` and `edges` follow from the offsets, which are checked.
ffi::Error describe(Call& call, const ffi::AnyBuffer& x, const S32& offsets, const S32& sources, int64_t heads) {
  const auto dims = x.dimensions();
  if (x.element_type() != ffi::F32 && x.element_type() != ffi::BF16) return wrong("expected features in float32 or bfloat16");
  if (dims.size() != 2 || offsets.element_count() == 0 || heads < 1 || dims[1] % heads != 0) return wrong("shapes do not fit");
  call.rows = static_cast<int64_t>(offsets.element_count()) - 1, call.nodes = dims[0], call.features = dims[1], call.heads = heads;
  call.offsets = offsets.typed_data(), call.sources = sources.typed_data(), call.x = x.untyped_data();
  const int64_t count = sources.element_count();
  if (call.offsets[0] < 0) return wrong("offset 0 is " + std::to_string(call.offsets[0]));
  const int64_t falls = std::is_sorted_until(call.offsets, call.offsets + call.rows + 1) - call.offsets;
  if (falls <= call.rows) return wrong("offset " + std::to_string(falls) + " is " + std::to_string(call.offsets[falls]) + ", below the one before it");
  call.edges = call.offsets[call.rows] - call.offsets[0];
  if (call.offsets[call.rows] > count)
    return wrong("the last offset is " + std::to_string(call.offsets[call.rows]) + ", but there are " + std::to_string(count) + " sources");
  // Prefetches 8 KB ahead, in steps of 128 features: measured with 16 to 602 features, inside and beyond the cache. Four edges or 32 KB cost up to a
  // tenth.
  const int64_t bytes = std::min<int64_t>(call.features, 128) * (x.element_type() == ffi::BF16 ? 2 : 4);
  call.ahead = std::min<int64_t>(64, 8192 / std::max<int64_t>(bytes, 1));
  return ffi::Error::Success();
}

// Runs body(first_vector, stop_vector, begin, end) over all rows, in several threads; with `divided`, over parts of a long row's vectors. An edge
// counts as much as a row.
template <class Body>
ffi::Error share_rows(ffi::ThreadPool& pool, const Kernel& kernel, const Call& call, bool divided, const Body& body) {
  const int64_t total = call.rows + call.edges, all = vectors(call), threads = pool.num_threads();
  const int64_t limit = divided && all > 1 ? std::max<int64_t>(4096, total / (4 * threads)) : total;
  std::atomic<bool> bad{false};
  const auto row_at = [&](int64_t work) {
    int64_t low = 0, high = call.rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (call.offsets[middle] - call.offsets[0] + middle < work) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  const auto is_long = [&](int64_t row) { return call.offsets[row + 1] - call.offsets[row] > limit; };
  native::share_in_pool(pool, total, 1, total * call.features >= (1 << 15), [&](int64_t from, int64_t to) {
    const int64_t end = to == total ? call.rows : row_at(to);
    int64_t begin = row_at(from);
    const int64_t first = call.offsets[begin], last = call.offsets[end];
    if (first < last && kernel.largest(call, first, last) >= call.nodes) return bad.store(true);
    for (int64_t row = begin; row < end; ++row)
      if (is_long(row)) {
        if (begin < row) body(0, all, begin, row);
        begin = row + 1;
      }
    if (begin < end) body(0, all, begin, end);
  });
  for (int64_t edge = call.offsets[0]; bad.load(); ++edge)
    if (const int64_t source = call.sources[edge]; source < 0 || source >= call.nodes)
      return wrong("source " + std::to_string(edge) + " is " + std::to_string(source) + ", but there are " + std::to_string(call.nodes) + " nodes");
  for (int64_t row = 0; limit < total && row < call.rows; ++row)
    if (is_long(row)) native::share_in_pool(pool, all, 1, true, [&](int64_t first, int64_t stop) { body(first, stop, row, row + 1); });
  return ffi::Error::Success();
}

// Runs body(begin, end) over the rows in pieces of at most this number of edges, and at least one row.
template <class Body>
void in_tiles(const Call& call, int64_t begin, int64_t end, int64_t edges, const Body& body) {
  for (int64_t row = begin, stop; row < end; row = stop) {
    for (stop = row + 1; stop < end && call.offsets[stop + 1] - call.offsets[row] <= edges;) ++stop;
    body(row, stop);
  }
}

ffi::Error GatherReduce(ffi::ThreadPool pool, ffi::AnyBuffer x, S32 offsets, S32 sources, F32 weights, ffi::Result<ffi::AnyBuffer> out, int32_t reduce) {
  Call call{};
  const auto dims = weights.dimensions();
  const bool weighted = dims.size() == 2;
  if (ffi::Error error = describe(call, x, offsets, sources, weighted ? dims[1] : 1); error.failure()) return error;
  if ((weighted && dims[0] != static_cast<int64_t>(sources.element_count())) || out->element_type() != x.element_type() ||
      static_cast<int64_t>(out->element_count()) != call.rows * call.features || reduce < SUM || reduce > MIN)
    return wrong("shapes or types do not fit");
  call.reduce = static_cast<Reduce>(reduce), call.out = out->untyped_data(), call.weights = weighted ? weights.typed_data() : nullptr;
  if (out->element_count() == 0) return ffi::Error::Success();
  native::on_huge_pages(call.out, out->size_bytes());
  const Kernel kernel = kernel_for(x.element_type() == ffi::BF16);
  return share_rows(pool, kernel, call, true, [&](int64_t first, int64_t stop, int64_t begin, int64_t end) { kernel.reduce(call, first, stop, begin, end); });
}

// [sources, heads]: the dot product of each edge's row and source.
ffi::Error EdgeDot(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer rows, S32 offsets, S32 sources, F32Result out) {
  Call call{};
  const auto dims = out->dimensions();
  if (dims.size() != 2) return wrong("shapes do not fit");
  if (ffi::Error error = describe(call, x, offsets, sources, dims[1]); error.failure()) return error;
  if (rows.element_type() != x.element_type() || static_cast<int64_t>(rows.element_count()) != call.rows * call.features ||
      dims[0] != static_cast<int64_t>(sources.element_count()))
    return wrong("shapes or types do not fit");
  call.rows_x = rows.untyped_data(), call.dots = out->typed_data();
  std::fill(call.dots, call.dots + out->element_count(), 0.0f);
  if (call.features == 0) return ffi::Error::Success();
  const Kernel kernel = kernel_for(x.element_type() == ffi::BF16);
  return share_rows(pool, kernel, call, false, [&](int64_t, int64_t, int64_t begin, int64_t end) { kernel.dot(call, call.offsets[begin], call.offsets[end]); });
}

constexpr int64_t TILE = 1 << 14;  // weights computed at a time, which stay in the L2 cache

ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer x, F32 source_score, F32 target_score, S32 offsets, S32 sources, ffi::Result<ffi::AnyBuffer> out,
                  F32Result row_max, F32Result row_sum, float slope) {
  Call call{};
  const auto dims = source_score.dimensions();
  if (dims.size() != 2) return wrong("shapes do not fit");
  if (ffi::Error error = describe(call, x, offsets, sources, dims[1]); error.failure()) return error;
  const auto scores = static_cast<size_t>(call.rows * call.heads);
  if (dims[0] != call.nodes || target_score.element_count() != scores || row_max->element_count() != scores || row_sum->element_count() != scores ||
      out->element_type() != x.element_type() || static_cast<int64_t>(out->element_count()) != call.rows * call.features)
    return wrong("shapes or types do not fit");
  const Attention attention{slope, source_score.typed_data(), target_score.typed_data(), row_max->typed_data(), row_sum->typed_data(), nullptr, nullptr};
  call.out = out->untyped_data();
  native::on_huge_pages(call.out, out->size_bytes());
  const Kernel kernel = kernel_for(x.element_type() == ffi::BF16);
  return share_rows(pool, kernel, call, false, [&](int64_t first, int64_t stop, int64_t begin, int64_t end) {
    std::vector<float> weights;
    in_tiles(call, begin, end, TILE / call.heads, [&](int64_t row, int64_t after) {
      Call tile = call;
      tile.first_weight = call.offsets[row];
      weights.resize(std::max<size_t>(weights.size(), (call.offsets[after] - tile.first_weight) * call.heads + 16));
      tile.weights = weights.data();
      kernel.soften(tile, attention, weights.data(), row, after);
      if (call.features > 0) kernel.reduce(tile, first, stop, row, after);
    });
  });
}

// Backward, over the transposed graph: its rows are the nodes that were sources, and its sources the reduced rows.
ffi::Error AttendGrad(ffi::ThreadPool pool, ffi::AnyBuffer dy, ffi::AnyBuffer x, F32 source_score, F32 facts, S32 offsets, S32 targets,
                      ffi::Result<ffi::AnyBuffer> dx, F32Result grad_score, F32Result grad_edges, float slope) {
  Call call{};
  const auto dims = source_score.dimensions();
  if (dims.size() != 2) return wrong("shapes do not fit");
  if (ffi::Error error = describe(call, dy, offsets, targets, dims[1]); error.failure()) return error;
  if (dims[0] != call.rows || grad_score->element_count() != source_score.element_count() ||
      static_cast<int64_t>(facts.element_count()) != call.nodes * 3 * call.heads || x.element_type() != dy.element_type() ||
      static_cast<int64_t>(x.element_count()) != call.rows * call.features || dx->element_type() != x.element_type() ||
      dx->element_count() != x.element_count() || grad_edges->element_count() != targets.element_count() * call.heads)
    return wrong("shapes or types do not fit");
  const Attention attention{slope, source_score.typed_data(), nullptr, nullptr, nullptr, facts.typed_data(), grad_score->typed_data()};
  call.rows_x = x.untyped_data(), call.dots = grad_edges->typed_data(), call.out = dx->untyped_data();
  native::on_huge_pages(call.out, dx->size_bytes());
  std::fill(call.dots, call.dots + call.offsets[0] * call.heads, 0.0f);
  std::fill(call.dots + call.offsets[call.rows] * call.heads, call.dots + grad_edges->element_count(), 0.0f);
  const Kernel kernel = kernel_for(x.element_type() == ffi::BF16);
  // A tile's features are gathered twice, the second time from the L2 cache.
  const int64_t edges = std::max<int64_t>(1, std::min<int64_t>(TILE / call.heads, (1 << 18) / std::max<int64_t>(1, call.features * 4)));
  return share_rows(pool, kernel, call, false, [&](int64_t first, int64_t stop, int64_t begin, int64_t end) {
    std::vector<float> weights, slopes;
    in_tiles(call, begin, end, edges, [&](int64_t row, int64_t after) {
      Call tile = call;
      tile.first_weight = call.offsets[row];
      weights.resize(std::max<size_t>(weights.size(), (call.offsets[after] - tile.first_weight) * call.heads + 16));
      slopes.resize(weights.size());
      tile.weights = weights.data();
      kernel.recall(tile, attention, weights.data(), slopes.data(), row, after);
      if (call.features > 0) {
        kernel.dot(tile, call.offsets[row], call.offsets[after]);
        kernel.reduce(tile, first, stop, row, after);
      }
      kernel.blame(tile, attention, weights.data(), slopes.data(), row, after);
    });
  });
}

}  // namespace

#define GRAPH Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightGatherReduce, GatherReduce,
                              ffi::Ffi::Bind().GRAPH.Arg<S32>().Arg<S32>().Arg<F32>().Ret<ffi::AnyBuffer>().Attr<int32_t>("reduce"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightEdgeDot, EdgeDot, ffi::Ffi::Bind().GRAPH.Arg<ffi::AnyBuffer>().Arg<S32>().Arg<S32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    TilewrightAttend, Attend,
    ffi::Ffi::Bind().GRAPH.Arg<F32>().Arg<F32>().Arg<S32>().Arg<S32>().Ret<ffi::AnyBuffer>().Ret<F32>().Ret<F32>().Attr<float>("slope"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightAttendGrad, AttendGrad,
                              ffi::Ffi::Bind()
                                  .GRAPH.Arg<ffi::AnyBuffer>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<float>("slope"));

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
