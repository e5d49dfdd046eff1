// Products with weights that were packed once, on CPUs: y = x @ W; y = silu(x @ G) * (x @ U) in one call; and the index of each row's
// largest output, without the outputs. tile.inc says how weights are laid out; amx.inc is the same for machines with a tile unit.
//
// Built for several instruction sets, of which the best that the machine has is taken at run time. Work is split over panels of outputs.

#include "../native.h"

#include <cmath>
#include <limits>

namespace {

enum Output { SUMS, GATED, ARGMAX };

// The largest output so far in each of 16 lanes, and its panel.
struct Best {
  float value[16];
  int32_t panel[16];
};

struct Call {
  int64_t m, n;               // rows, outputs
  int64_t k, k_padded;        // inputs, and inputs rounded up to the format's multiple
  int64_t panels;             // panels of 16 outputs; with gate and up, twice as many
  int64_t panel_size;         // elements of a panel
  Output output;
  const float* x;             // [m, k]
  void* rows;                 // [m, k_padded]: x in the type of the products
  float* row_scales;          // [m], 8-bit only
  const void* w;
  const float* scales;        // [panels * 16], 8-bit only: what a unit of each output's weights stands for
  const int32_t* sums;        // [panels * 16], 8-bit only: each output's sum of weights
  float* out;                 // [m, n]
  Best* best;                 // [pieces, m], for ARGMAX
  int64_t piece;              // panels to a piece, for ARGMAX
};

constexpr int64_t GRAIN = 4;  // panels that stay together in one thread

inline Best* best_of(const Call& call, int64_t begin, int64_t row) { return call.best + begin / call.piece * call.m + row; }

typedef void (*Body)(const Call&, int64_t begin, int64_t end);
typedef void (*Packing)(const Call&, const float* w, bool transposed, uint16_t* panels, int64_t begin, int64_t end);
struct Kernel {
  Body prepare;  // over rows: fills `rows`
  Body run;      // over panels
  Body prepare_transposed = nullptr;  // bfloat16 only, as is the next
  Packing pack = nullptr;
};

namespace plain {
#define REGISTERS 4
#define BF16_DOT 0
#define INT8_DOT 0
#include "tile.inc"
#undef REGISTERS
}  // namespace plain

#if defined(__x86_64__)
TARGET("avx2,fma")
namespace avx2 {
#define REGISTERS 4
#undef INT8_DOT
#define INT8_DOT 256
#include "tile.inc"
#undef REGISTERS
}  // namespace avx2
TARGET_END

TARGET("avx512f,avx512bw,avx512vl,avx512dq,fma")
namespace avx512 {
#define REGISTERS 16
#include "tile.inc"
#undef REGISTERS
}  // namespace avx512
TARGET_END

TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma")
namespace avx512dot {
#define REGISTERS 16
#undef BF16_DOT
#define BF16_DOT 1
#undef INT8_DOT
#define INT8_DOT 512
#include "tile.inc"
#include "amx.inc"
#undef REGISTERS
}  // namespace avx512dot
TARGET_END
#endif

enum Weights { FLOAT32, BFLOAT16, INT8 };

#define KERNEL(isa, format, run) Kernel{isa::prepare<isa::format>, isa::run<isa::format>}
#define BFLOAT16_KERNEL(isa, run) Kernel{isa::prepare<isa::BFloat16>, isa::run<isa::BFloat16>, isa::prepare_transposed, isa::pack_panels}

// Of one instruction set those parts that this machine has: 8-bit products of AVX-512-VNNI without AVX-512-BF16, for one.
Kernel kernel_for(Weights weights) {
  const native::Isa isa = native::isa();
#if defined(__x86_64__)
  if (weights == INT8) {
    if (isa == native::AMX) return KERNEL(avx512dot, Int8, run_tiles);
    if (isa >= native::AVX512_VNNI) return KERNEL(avx512dot, Int8, run);
    if (isa >= native::AVX2) return KERNEL(avx2, Int8, run);
    return KERNEL(plain, Int8, run);
  }
  if (weights == BFLOAT16 && isa == native::AMX) return BFLOAT16_KERNEL(avx512dot, run_tiles);
  if (weights == BFLOAT16 && isa == native::AVX512_BF16) return BFLOAT16_KERNEL(avx512dot, run);
  if (isa >= native::AVX512) {
    if (weights == BFLOAT16) return BFLOAT16_KERNEL(avx512, run);
    return KERNEL(avx512, Float32, run);
  }
  if (isa == native::AVX2) {
    if (weights == BFLOAT16) return BFLOAT16_KERNEL(avx2, run);
    return KERNEL(avx2, Float32, run);
  }
#endif
  if (weights == INT8) return KERNEL(plain, Int8, run);
  if (weights == BFLOAT16) return BFLOAT16_KERNEL(plain, run);
  return KERNEL(plain, Float32, run);
}

// Memory that a thread keeps from call to call: fresh pages cost more than small products.
template <int SLOT>
void* scratch(size_t bytes) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<void, Free> kept;
  static thread_local size_t size = 0;
  if (bytes > size) {
    size = (bytes + 4095) / 4096 * 4096;
    kept.reset(std::aligned_alloc(64, size));
  }
  return kept.get();
}

// Below some 10 microseconds of work a second thread costs more than it brings.
bool worth_sharing(const Call& call) { return call.panels * call.panel_size * std::max<int64_t>(1, call.m / 4) >= (1 << 16); }

void compute(ffi::ThreadPool& pool, Call& call, Weights weights, bool transposed = false) {
  static constexpr int64_t size[] = {4, 2, 1};
  call.panel_size = call.k_padded * 16;
  const Kernel kernel = kernel_for(weights);
  if (weights == FLOAT32) {
    call.rows = const_cast<float*>(call.x);
  } else {
    call.rows = scratch<0>(call.m * call.k_padded * size[weights] + 64);
    call.row_scales = static_cast<float*>(scratch<1>(call.m * sizeof(float) + 64));
    const Body prepare = transposed ? kernel.prepare_transposed : kernel.prepare;
    native::share(pool, call.m, 16, call.m * call.k >= (1 << 16), [&](int64_t begin, int64_t end) { prepare(call, begin, end); });
  }
  if (call.output != ARGMAX) {
    native::share(pool, call.panels, GRAIN, worth_sharing(call), [&](int64_t begin, int64_t end) { kernel.run(call, begin, end); });
    return;
  }
  const int64_t pieces = (call.panels + call.piece - 1) / call.piece;
  native::share(pool, pieces, 1, worth_sharing(call), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) kernel.run(call, p * call.piece, std::min(call.panels, (p + 1) * call.piece));
  });
}

// The packed weights of a call, and whether they fit the input.
struct Packed {
  Weights weights;
  const char* problem = nullptr;
};

Packed read_weights(Call& call, const ffi::Buffer<ffi::F32>& x, const ffi::AnyBuffer& w, const ffi::Buffer<ffi::F32>& scales,
                    const ffi::Buffer<ffi::S32>& sums) {
  const ffi::DataType type = w.element_type();
  Packed found{type == ffi::F32 ? FLOAT32 : type == ffi::BF16 ? BFLOAT16 : INT8};
  static constexpr int64_t step[] = {1, 2, 4}, multiple[] = {1, 32, 64};
  static constexpr size_t rank[] = {3, 4, 4};
  const auto shape = w.dimensions();
  if ((found.weights == INT8 && type != ffi::S8) || shape.size() != rank[found.weights]) {
    found.problem = "tilewright_linear: these are no packed weights";
    return found;
  }
  call.k = x.dimensions().back();
  call.m = x.element_count() / std::max<int64_t>(call.k, 1);
  call.x = x.typed_data();
  call.panels = shape[0];
  call.k_padded = shape[1] * step[found.weights];
  call.w = w.untyped_data();
  call.scales = scales.typed_data();
  call.sums = sums.typed_data();
  const int64_t needed = (call.n + 15) / 16 * (call.output == GATED ? 2 : 1);
  const size_t lanes = call.panels * 16;
  if (call.panels != needed || call.k_padded != (call.k + multiple[found.weights] - 1) / multiple[found.weights] * multiple[found.weights] ||
      w.element_count() != lanes * call.k_padded)
    found.problem = "tilewright_linear: packed weights do not fit the input and output";
  else if (found.weights == INT8 && (scales.element_count() != lanes || sums.element_count() != lanes))
    found.problem = "tilewright_linear: there must be a scale and a sum for each output";
  else if (reinterpret_cast<uintptr_t>(call.w) % 64 != 0)
    found.problem = "tilewright_linear: weights are not aligned";
  return found;
}

ffi::Error Linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::S32> sums,
                  ffi::ResultBuffer<ffi::F32> y, bool gated) {
  Call call{};
  call.output = gated ? GATED : SUMS;
  call.n = y->dimensions().back();
  call.out = y->typed_data();
  const Packed packed = read_weights(call, x, w, scales, sums);
  if (packed.problem != nullptr) return ffi::Error::InvalidArgument(packed.problem);
  if (y->element_count() != static_cast<size_t>(call.m * call.n)) return ffi::Error::InvalidArgument("tilewright_linear: the output has another shape");
  if (call.m > 0) compute(pool, call, packed.weights);
  return ffi::Error::Success();
}

ffi::Error Argmax(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::S32> sums,
                  ffi::ResultBuffer<ffi::S32> index, int64_t outputs) {
  Call call{};
  call.output = ARGMAX;
  call.n = outputs;
  const Packed packed = read_weights(call, x, w, scales, sums);
  if (packed.problem != nullptr) return ffi::Error::InvalidArgument(packed.problem);
  if (index->element_count() != static_cast<size_t>(call.m)) return ffi::Error::InvalidArgument("tilewright_argmax: the output has another shape");
  const int64_t each = (call.panels + 4 * pool.num_threads() - 1) / (4 * pool.num_threads());
  call.piece = std::max<int64_t>(GRAIN, (each + GRAIN - 1) / GRAIN * GRAIN);
  const int64_t pieces = (call.panels + call.piece - 1) / call.piece;
  call.best = static_cast<Best*>(scratch<2>(pieces * call.m * sizeof(Best)));
  for (int64_t i = 0; i < pieces * call.m; ++i) {
    std::fill_n(call.best[i].value, 16, -std::numeric_limits<float>::infinity());
    std::fill_n(call.best[i].panel, 16, 0);
  }
  if (call.m > 0) compute(pool, call, packed.weights);
  for (int64_t row = 0; row < call.m; ++row) {
    float largest = -std::numeric_limits<float>::infinity();
    int64_t first = std::numeric_limits<int64_t>::max();
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const Best& best = call.best[piece * call.m + row];
      for (int lane = 0; lane < 16; ++lane) {
        const int64_t at = best.panel[lane] * int64_t{16} + lane;
        if (best.value[lane] > largest || (best.value[lane] == largest && at < first)) largest = best.value[lane], first = at;
      }
    }
    index->typed_data()[row] = static_cast<int32_t>(std::min(first, call.n - 1));
  }
  return ffi::Error::Success();
}

// a @ b for two float32 matrices, either of which may lie transposed in memory; products of bfloat16, float32 sums.
ffi::Error Matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> a, ffi::Buffer<ffi::F32> b, ffi::ResultBuffer<ffi::F32> y, bool a_transposed,
                  bool b_transposed) {
  const auto left = a.dimensions(), right = b.dimensions(), out = y->dimensions();
  if (left.size() != 2 || right.size() != 2 || out.size() != 2) return ffi::Error::InvalidArgument("tilewright_matmul: expected matrices");
  Call call{};
  call.output = SUMS;
  call.m = left[a_transposed ? 1 : 0];
  call.k = left[a_transposed ? 0 : 1];
  call.n = right[b_transposed ? 0 : 1];
  if (right[b_transposed ? 1 : 0] != call.k || out[0] != call.m || out[1] != call.n)
    return ffi::Error::InvalidArgument("tilewright_matmul: shapes do not fit");
  call.k_padded = (call.k + 31) / 32 * 32;
  call.panels = (call.n + 15) / 16;
  call.panel_size = call.k_padded * 16;
  call.x = a.typed_data();
  call.out = y->typed_data();
  if (y->element_count() == 0) return ffi::Error::Success();
  auto* panels = static_cast<uint16_t*>(scratch<3>(call.panels * call.panel_size * 2 + 64));
  call.w = panels;
  const Packing pack = kernel_for(BFLOAT16).pack;
  const bool worth_it = call.panels * call.panel_size >= (1 << 16);
  native::share(pool, call.panels, 1, worth_it, [&](int64_t begin, int64_t end) { pack(call, b.typed_data(), b_transposed, panels, begin, end); });
  compute(pool, call, BFLOAT16, a_transposed);
  return ffi::Error::Success();
}

}  // namespace

#define WEIGHTS Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::F32>>().Arg<ffi::Buffer<ffi::S32>>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightLinear, Linear,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().WEIGHTS.Ret<ffi::Buffer<ffi::F32>>().Attr<bool>("gated"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightArgmax, Argmax,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().WEIGHTS.Ret<ffi::Buffer<ffi::S32>>().Attr<int64_t>("outputs"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightMatmul, Matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("a_transposed")
                                  .Attr<bool>("b_transposed"));

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
