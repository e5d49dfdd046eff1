// Matmuls with packed weights on CPUs: y = x @ W; y = silu(x @ G) * (x @ U) in one call; and each row's largest output or outputs with their
// indices, without storing the outputs. Rows may be normalised first, and a term added to the outputs. Rows may be in groups, each with its own
// matrix. tile.inc describes the layout of weights; amx.inc is the variant for machines with a tile unit.
//
// Built for several instruction sets, of which the machine's best is chosen at run time. Threads divide the panels of outputs.

#include "../blocks.h"
#include "../native.h"

#include <cmath>
#include <limits>
#include <mutex>
#include <type_traits>

namespace {

enum Output { SUMS, GATED, ARGMAX, TOP };

// The largest output so far in each of 16 lanes, and its panel.
struct Best {
  float value[16];
  int32_t panel[16];
};

struct Call {
  int64_t m, n;               // rows, outputs
  int64_t k, k_padded;        // inputs, and inputs rounded up to the format's multiple
  int64_t panels;             // panels of 16 outputs; with gate and up, twice as many
  int64_t panel_size;         // elements of a panel; for blocks, bytes
  Output output;
  bool narrow_x, narrow_out;  // whether x and norm, and out and add, are bfloat16; else they are float32
  const void* x;              // [m, k]
  const void* norm;           // [k], weight of a norm applied first, or null
  float eps;                  // epsilon of that norm
  void* rows;                 // [m, k_padded]: x in the type of the matmul; with weights in blocks, [m, k_padded / 32] of `Rounded`
  const void* w;
  const void* add;            // [m, n], or null
  void* out;                  // [m, n]
  Best* best;                 // [pieces, m], for ARGMAX
  const uint32_t* masks;      // [m, words], for ARGMAX: a bit per allowed output; or null
  int64_t words;              // words of a row's mask
  int64_t piece;              // panels per piece, for ARGMAX and TOP
  int64_t top;                // number of largest outputs, for TOP
  float* top_values;          // [pieces, m, top], for TOP: in descending order, from minus infinity
  int32_t* top_indices;       // [pieces, m, top], for TOP: NOWHERE for empty entries
};

constexpr int32_t NOWHERE = std::numeric_limits<int32_t>::max();

// A matrix [rows, size] among several that are side by side.
struct Part {
  void* data;
  int64_t size;
};

// a @ b of two unpacked matrices, each float32 or bfloat16, and possibly stored transposed. Instead of b, or of the result, there can be several
// matrices that are side by side as stored.
struct Product {
  int64_t m, n, k;            // rows, columns, inputs
  const void *a, *b;
  bool a_narrow, b_narrow;    // whether they are bfloat16
  bool a_transposed, b_transposed;
  bool bfloat16;              // float32 operands are rounded to bfloat16
  const void* add;            // [m, n] in the result's type, or null
  void* out;                  // [m, n]
  bool narrow_out;            // whether out is bfloat16
  std::vector<Part> b_parts;  // if there are several, with sizes that are multiples of 32
  std::vector<Part> out_parts;
};

// Gate and up values side by side in rows of 2 n.
struct Gate {
  int64_t rows, n;
  const void* x;
  const void* due;  // gradient [rows, n], or null
  void* out;        // [rows, n]; with a gradient, the shape of x
};

constexpr int64_t LARGE = 1 << 24;  // multiply-adds of a matmul that is worth waiting for all threads
constexpr int64_t GRAIN = 2;  // panels that stay together in one thread: with 4, the 36 panels of a small matrix divide into three pieces

inline Best* best_of(const Call& call, int64_t begin, int64_t row) { return call.best + begin / call.piece * call.m + row; }

// Bits of a panel's 16 outputs in a row's mask.
inline uint32_t panel_mask(const Call& call, int64_t row, int64_t panel) {
  return (call.masks[row * call.words + panel / 2] >> (panel % 2 * 16)) & 0xFFFF;
}

inline int64_t top_of(const Call& call, int64_t begin, int64_t row) { return (begin / call.piece * call.m + row) * call.top; }

// Inserts an output that is larger than a list's last one, behind all that are equal or larger.
inline void insert(float* values, int32_t* indices, int64_t count, float value, int32_t index) {
  int64_t at = count - 1;
  for (; at > 0 && values[at - 1] < value; --at) values[at] = values[at - 1], indices[at] = indices[at - 1];
  values[at] = value, indices[at] = index;
}

typedef void (*Body)(const Call&, int64_t begin, int64_t end);
typedef void (*Packing)(const Call&, const Product&, uint16_t* panels, int64_t begin, int64_t end);
struct Kernel {
  int64_t size;  // bytes of an element of `rows`
  int64_t held;  // inputs per element
  Body prepare;  // over rows: fills `rows`
  Body run;      // over panels
  Body prepare_transposed = nullptr;  // with dot products of bfloat16 pairs, as is the next
  Packing pack = nullptr;
  int64_t row_size(int64_t inputs) const { return inputs / held * size; }
};

namespace plain {
#define VECTORS 2
#define BF16_DOT 0
#define INT8_DOT 0
#include "tile.inc"
#include "product.inc"
#undef VECTORS
}  // namespace plain

#if defined(__x86_64__)
TARGET("avx2,fma")
namespace avx2 {
#define VECTORS 4
#undef INT8_DOT
#define INT8_DOT 256
#include "tile.inc"
#include "product.inc"
#undef VECTORS
}  // namespace avx2
TARGET_END

TARGET("avx512f,avx512bw,avx512vl,avx512dq,fma")
namespace avx512 {
#define VECTORS 8
#undef INT8_DOT
#define INT8_DOT 0  // without AVX-512-VNNI, AVX2's products are used
#include "tile.inc"
#include "product.inc"
#undef VECTORS
}  // namespace avx512
TARGET_END

TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma")
namespace avx512dot {
#define VECTORS 8
#undef BF16_DOT
#define BF16_DOT 1
#undef INT8_DOT
#define INT8_DOT 512
#include "tile.inc"
#include "amx.inc"
#undef VECTORS
}  // namespace avx512dot
TARGET_END
#endif

enum Weights : int { FLOAT32, BFLOAT16, BLOCKS };  // from BLOCKS on, block formats (see ../blocks.h)

#define KERNEL(isa, format, run) Kernel{sizeof(isa::format::X), isa::format::HELD, isa::prepare<isa::format>, isa::run<isa::format>}
#define PAIRS_KERNEL(isa, run) \
  Kernel{sizeof(isa::BFloat16::X), 1, isa::prepare<isa::BFloat16>, isa::run, isa::prepare_transposed, isa::pack_panels}
#if defined(__x86_64__)
#define BLOCKS_KERNEL(isa, format)                                                                                         \
  (isa == native::AMX ? KERNEL(avx512dot, format, run_block_tiles) : isa >= native::AVX512_VNNI ? KERNEL(avx512dot, format, run) \
   : isa >= native::AVX2 ? KERNEL(avx2, format, run) : KERNEL(plain, format, run))
#else
#define BLOCKS_KERNEL(isa, format) KERNEL(plain, format, run)
#endif

const blocks::Form& form_of(Weights weights) { return blocks::forms[weights - BLOCKS]; }

// Combines parts that this machine has, for example 8-bit products of AVX-512-VNNI without AVX-512-BF16.
Kernel kernel_for(Weights weights) {
  const native::Isa isa = native::isa();
  switch (weights - BLOCKS) {
#define FORM_KERNEL(form) \
  case blocks::form: return BLOCKS_KERNEL(isa, Blocks<blocks::form>)
    FORM_KERNEL(Q4_0);
    FORM_KERNEL(Q4_1);
    FORM_KERNEL(Q5_0);
    FORM_KERNEL(Q5_1);
    FORM_KERNEL(Q8_0);
    FORM_KERNEL(Q4_K);
    FORM_KERNEL(Q5_K);
    FORM_KERNEL(Q6_K);
    FORM_KERNEL(Q4_Z);
  }
#if defined(__x86_64__)
  if (weights == BFLOAT16 && isa == native::AMX) return PAIRS_KERNEL(avx512dot, run_tiles);
  if (weights == BFLOAT16 && isa == native::AVX512_BF16) return PAIRS_KERNEL(avx512dot, run<avx512dot::BFloat16>);
  if (isa >= native::AVX512) {
    if (weights == BFLOAT16) return KERNEL(avx512, BFloat16, run);
    return Kernel{sizeof(float), 1, avx512::prepare<avx512::Float32>, avx512::run_float32};
  }
  if (isa == native::AVX2) {
    if (weights == BFLOAT16) return KERNEL(avx2, BFloat16, run);
    return KERNEL(avx2, Float32, run);
  }
#endif
  if (weights == BFLOAT16) return KERNEL(plain, BFloat16, run);
  return KERNEL(plain, Float32, run);
}

// Below some 10 microseconds of work a second thread costs more than it gains.
bool worth_sharing(const Call& call) { return call.panels * call.k_padded * 16 * std::max<int64_t>(1, call.m / 4) >= (1 << 16); }

// Computes all outputs of prepared rows, some hundred rows at a time, which stay in the L2 cache while panels pass.
void run_blocks(ffi::ThreadPool& pool, const Call& call, const Kernel& kernel) {
  constexpr int64_t BLOCK = 256;
  const int64_t blocks = (call.m + BLOCK - 1) / BLOCK, block = ((call.m + blocks - 1) / blocks + 31) / 32 * 32;
  const int64_t wanted = std::max<int64_t>(1, 4 * pool.num_threads() / blocks), size = call.narrow_out ? 2 : 4;
  const int64_t run = ((call.panels + wanted - 1) / wanted + GRAIN - 1) / GRAIN * GRAIN, runs = (call.panels + run - 1) / run;
  native::share_in_pool(pool, blocks * runs, 1, worth_sharing(call), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / runs * block, panel = i % runs * run;
      if (row >= call.m) continue;
      Call part = call;
      part.m = std::min(block, call.m - row);
      part.rows = static_cast<char*>(call.rows) + row * kernel.row_size(call.k_padded);
      part.out = static_cast<char*>(call.out) + row * call.n * size;
      if (call.add != nullptr) part.add = static_cast<const char*>(call.add) + row * call.n * size;
      kernel.run(part, panel, std::min(call.panels, panel + run));
    }
  });
}

// Computes a piece of the panels. With masks, panels without an allowed output are neither read nor multiplied.
void run_piece(const Call& call, const Kernel& kernel, int64_t begin, int64_t end) {
  if (call.masks == nullptr) return kernel.run(call, begin, end);
  const auto wanted = [&](int64_t panel) {
    for (int64_t row = 0; row < call.m; ++row)
      if (panel_mask(call, row, panel) != 0) return true;
    return false;
  };
  for (int64_t panel = begin; panel < end;) {
    const int64_t first = panel;
    while (panel < end && wanted(panel)) ++panel;
    if (panel > first) kernel.run(call, first, panel);
    while (panel < end && !wanted(panel)) ++panel;
  }
}

void compute(ffi::ThreadPool& pool, Call& call, Weights weights) {
  call.panel_size = weights >= BLOCKS ? call.k_padded / form_of(weights).inputs() * form_of(weights).size() : call.k_padded * 16;
  const Kernel kernel = kernel_for(weights);
  const bool fits = weights == (call.narrow_x ? BFLOAT16 : FLOAT32) && kernel.size == (call.narrow_x ? 2 : 4);
  const bool as_it_is = fits && call.norm == nullptr && call.k == call.k_padded;
  if (as_it_is) {
    call.rows = const_cast<void*>(call.x);
  } else {
    call.rows = native::scratch<1>(call.m * kernel.row_size(call.k_padded) + 64);
    native::share(pool, call.m, 16, call.m * call.k >= (1 << 16), [&](int64_t begin, int64_t end) { kernel.prepare(call, begin, end); });
  }
  if (call.output != ARGMAX && call.output != TOP) {
    constexpr int64_t FEW = 1024;  // rows that all pass before the next panels
    if (call.m > FEW) return run_blocks(pool, call, kernel);
    return native::share(pool, call.panels, GRAIN, worth_sharing(call), [&](int64_t begin, int64_t end) { kernel.run(call, begin, end); });
  }
  const int64_t pieces = (call.panels + call.piece - 1) / call.piece;
  native::share(pool, pieces, 1, worth_sharing(call), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) run_piece(call, kernel, p * call.piece, std::min(call.panels, (p + 1) * call.piece));
  });
}

bool is_float(const ffi::AnyBuffer& x) { return x.element_type() == ffi::F32 || x.element_type() == ffi::BF16; }

// Sets the input, the packed weights from panel `first` on, and the norm of a call. Returns a description of a mismatch, or null.
const char* describe(Call& call, Weights& weights, const ffi::AnyBuffer& x, const ffi::AnyBuffer& w, const ffi::AnyBuffer& norm, int64_t first) {
  const ffi::DataType type = w.element_type();
  const auto shape = w.dimensions(), dims = x.dimensions();
  if (type == ffi::F32) weights = FLOAT32;
  else if (type == ffi::BF16) weights = BFLOAT16;
  else weights = static_cast<Weights>(BLOCKS + (type == ffi::U8 && shape.size() == 3 ? blocks::form_of(shape[2]) : blocks::FORMS));
  if (weights == BLOCKS + blocks::FORMS || shape.size() != (weights == BFLOAT16 ? 4 : 3)) return "tilewright_linear: these are no packed weights";
  const bool in_blocks = weights >= BLOCKS;
  const int64_t inputs = in_blocks ? form_of(weights).inputs() : weights == BFLOAT16 ? 2 : 1, whole = weights == BFLOAT16 ? 32 : inputs;
  if (!is_float(x) || dims.size() == 0 || norm.element_type() != x.element_type())
    return "tilewright_linear: expected input and norm in one type, float32 or bfloat16";
  call.k = dims.back();
  call.m = x.element_count() / std::max<int64_t>(call.k, 1);
  call.narrow_x = x.element_type() == ffi::BF16;
  call.x = x.untyped_data();
  call.norm = norm.element_count() == 0 ? nullptr : norm.untyped_data();
  call.panels = (call.n + 15) / 16 * (call.output == GATED ? 2 : 1);
  call.k_padded = shape[1] * inputs;
  const int64_t panel_bytes = shape[1] * (in_blocks ? form_of(weights).size() : 64);
  if (first < 0 || first + call.panels > shape[0] || call.k_padded != (call.k + whole - 1) / whole * whole ||
      w.size_bytes() != static_cast<size_t>(shape[0] * panel_bytes) || (call.norm != nullptr && norm.element_count() != static_cast<size_t>(call.k)))
    return "tilewright_linear: packed weights or norm do not fit the input and output";
  if (reinterpret_cast<uintptr_t>(w.untyped_data()) % 64 != 0) return "tilewright_linear: weights are not aligned";
  call.w = static_cast<const char*>(w.untyped_data()) + first * panel_bytes;
  return nullptr;
}

ffi::Error Linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer norm, ffi::AnyBuffer add, ffi::Buffer<ffi::S32> count,
                  ffi::Result<ffi::AnyBuffer> y, bool gated, float eps, int64_t first) {
  Call call{};
  Weights weights;
  call.output = gated ? GATED : SUMS;
  call.eps = eps;
  if (y->dimensions().size() == 0) return ffi::Error::InvalidArgument("tilewright_linear: the output has another shape");
  call.n = y->dimensions().back();
  if (const char* problem = describe(call, weights, x, w, norm, first); problem != nullptr) return ffi::Error::InvalidArgument(problem);
  if (y->element_count() != static_cast<size_t>(call.m * call.n)) return ffi::Error::InvalidArgument("tilewright_linear: the output has another shape");
  if (!is_float(*y) || add.element_type() != y->element_type() || (add.element_count() != 0 && add.element_count() != y->element_count()))
    return ffi::Error::InvalidArgument("tilewright_linear: expected an output in float32 or bfloat16, and what is added to it like it");
  call.narrow_out = y->element_type() == ffi::BF16;
  call.out = y->untyped_data();
  native::on_huge_pages(call.out, y->size_bytes());
  call.add = add.element_count() == 0 ? nullptr : add.untyped_data();
  if (count.element_count() > 1) return ffi::Error::InvalidArgument("tilewright_linear: expected one number of rows, or none");
  if (count.element_count() == 1) call.m = std::clamp<int64_t>(count.typed_data()[0], 0, call.m);
  if (call.m > 0) compute(pool, call, weights);
  return ffi::Error::Success();
}

// Rows in consecutive groups, each with its own matrix. The panels of all matrices are consecutive, and those of groups without rows are not read.
void compute_groups(ffi::ThreadPool& pool, Call& call, Weights weights, const int32_t* sizes, int64_t groups) {
  constexpr int64_t BLOCK = 256;  // rows that stay in the L2 cache while panels pass
  call.panel_size = weights >= BLOCKS ? call.k_padded / form_of(weights).inputs() * form_of(weights).size() : call.k_padded * 16;
  const Kernel kernel = kernel_for(weights);
  call.rows = native::scratch<1>(call.m * kernel.row_size(call.k_padded) + 64);
  native::share(pool, call.m, 16, call.m * call.k >= (1 << 16), [&](int64_t begin, int64_t end) { kernel.prepare(call, begin, end); });
  std::vector<Call> parts;
  const int64_t panel_bytes = call.panel_size * (weights == FLOAT32 ? 4 : weights == BFLOAT16 ? 2 : 1), out_size = call.narrow_out ? 2 : 4;
  int64_t row = 0;
  for (int64_t group = 0; group < groups; row += sizes[group++]) {
    if (sizes[group] == 0) continue;
    Call part = call;
    part.m = sizes[group];
    part.rows = static_cast<char*>(call.rows) + row * kernel.row_size(call.k_padded);
    part.w = static_cast<const char*>(call.w) + group * call.panels * panel_bytes;
    part.out = static_cast<char*>(call.out) + row * call.n * out_size;
    parts.push_back(part);
  }
  const int64_t each = (call.panels + GRAIN - 1) / GRAIN, count = static_cast<int64_t>(parts.size()) * each;
  call.panels *= static_cast<int64_t>(parts.size());
  native::share(pool, count, 1, worth_sharing(call), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const Call& whole = parts[begin / each];
      const int64_t first = begin % each, last = std::min(each, first + end - begin);
      for (int64_t done = 0; done < whole.m; done += BLOCK) {
        Call part = whole;
        part.m = std::min(BLOCK, whole.m - done);
        part.rows = static_cast<char*>(whole.rows) + done * kernel.row_size(call.k_padded);
        part.out = static_cast<char*>(whole.out) + done * call.n * out_size;
        kernel.run(part, first * GRAIN, std::min(whole.panels, last * GRAIN));
      }
      begin += last - first;
    }
  });
}

ffi::Error Grouped(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer norm, ffi::Buffer<ffi::S32> sizes,
                   ffi::Result<ffi::AnyBuffer> y, bool gated) {
  Call call{};
  Weights weights;
  call.output = gated ? GATED : SUMS;
  if (y->dimensions().size() != 2) return ffi::Error::InvalidArgument("tilewright_grouped_linear: expected a matrix as the output");
  call.n = y->dimensions()[1];
  if (const char* problem = describe(call, weights, x, w, norm, 0); problem != nullptr) return ffi::Error::InvalidArgument(problem);
  const int64_t groups = sizes.element_count();
  if (w.dimensions()[0] != groups * call.panels) return ffi::Error::InvalidArgument("tilewright_grouped_linear: expected a matrix for each group");
  if (!is_float(*y) || y->dimensions()[0] != call.m) return ffi::Error::InvalidArgument("tilewright_grouped_linear: the output has another shape or type");
  call.narrow_out = y->element_type() == ffi::BF16;
  call.out = y->untyped_data();
  int64_t rows = 0;
  for (int64_t group = 0; group < groups; ++group) {
    if (sizes.typed_data()[group] < 0) return ffi::Error::InvalidArgument("tilewright_grouped_linear: a group's size is negative");
    rows += sizes.typed_data()[group];
  }
  if (rows > call.m) return ffi::Error::InvalidArgument("tilewright_grouped_linear: groups have more rows than there are");
  const int64_t row_bytes = call.n * (call.narrow_out ? 2 : 4);
  memset(static_cast<char*>(call.out) + rows * row_bytes, 0, (call.m - rows) * row_bytes);
  call.m = rows;
  if (rows > 0) compute_groups(pool, call, weights, sizes.typed_data(), groups);
  return ffi::Error::Success();
}

// Divides the panels into pieces, each with its own results. Returns the number of pieces.
int64_t cut(Call& call, ffi::ThreadPool& pool) {
  const int64_t each = (call.panels + 4 * pool.num_threads() - 1) / (4 * pool.num_threads());
  call.piece = std::max<int64_t>(GRAIN, (each + GRAIN - 1) / GRAIN * GRAIN);
  return (call.panels + call.piece - 1) / call.piece;
}

ffi::Error Argmax(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer norm, ffi::Buffer<ffi::U32> masks,
                  ffi::ResultBuffer<ffi::S32> index, ffi::ResultBuffer<ffi::F32> value, int64_t outputs, float eps) {
  Call call{};
  Weights weights;
  call.output = ARGMAX;
  call.n = outputs;
  call.eps = eps;
  if (const char* problem = describe(call, weights, x, w, norm, 0); problem != nullptr) return ffi::Error::InvalidArgument(problem);
  if (index->element_count() != static_cast<size_t>(call.m) || value->element_count() != static_cast<size_t>(call.m))
    return ffi::Error::InvalidArgument("tilewright_argmax: the output has another shape");
  call.words = (outputs + 31) / 32;
  call.masks = masks.element_count() == 0 ? nullptr : masks.typed_data();
  if (call.masks != nullptr && masks.element_count() != static_cast<size_t>(call.m * call.words))
    return ffi::Error::InvalidArgument("tilewright_argmax: expected a mask for each row, a bit for each output");
  const int64_t pieces = cut(call, pool);
  call.best = static_cast<Best*>(native::scratch<3>(pieces * call.m * sizeof(Best)));
  for (int64_t i = 0; i < pieces * call.m; ++i) {
    std::fill_n(call.best[i].value, 16, -std::numeric_limits<float>::infinity());
    std::fill_n(call.best[i].panel, 16, 0);
  }
  if (call.m > 0) compute(pool, call, weights);
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
    value->typed_data()[row] = largest;
  }
  return ffi::Error::Success();
}

// Merges the lists of all pieces of a row, from the first piece on. If too few outputs are above minus infinity, the first of the other outputs fill
// the list.
void merge(const Call& call, int64_t pieces, int64_t row, int32_t* index, float* value) {
  std::fill_n(value, call.top, -std::numeric_limits<float>::infinity());
  std::fill_n(index, call.top, NOWHERE);
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t from = top_of(call, piece * call.piece, row);
    for (int64_t i = from; i < from + call.top && call.top_values[i] > value[call.top - 1]; ++i)
      insert(value, index, call.top, call.top_values[i], call.top_indices[i]);
  }
  const int64_t found = std::find(index, index + call.top, NOWHERE) - index;
  int32_t next = 0;
  for (int64_t i = found; i < call.top; ++i, ++next) {
    while (std::find(index, index + found, next) != index + found) ++next;
    index[i] = next;
  }
}

ffi::Error TopK(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer norm, ffi::ResultBuffer<ffi::S32> index,
                ffi::ResultBuffer<ffi::F32> value, int64_t outputs) {
  Call call{};
  Weights weights;
  call.output = TOP;
  call.n = outputs;
  if (const char* problem = describe(call, weights, x, w, norm, 0); problem != nullptr) return ffi::Error::InvalidArgument(problem);
  call.top = index->dimensions().size() == 0 ? 0 : index->dimensions().back();
  const auto wanted = static_cast<size_t>(call.m * call.top);
  if (call.top < 1 || call.top > outputs || index->element_count() != wanted || value->element_count() != wanted)
    return ffi::Error::InvalidArgument("tilewright_top_k: the output has another shape");
  const int64_t pieces = cut(call, pool), entries = pieces * call.m * call.top;
  call.top_values = static_cast<float*>(native::scratch<3>(2 * entries * sizeof(float) + 64));
  call.top_indices = reinterpret_cast<int32_t*>(call.top_values + entries);
  std::fill_n(call.top_values, entries, -std::numeric_limits<float>::infinity());
  std::fill_n(call.top_indices, entries, NOWHERE);
  if (call.m > 0) compute(pool, call, weights);
  for (int64_t row = 0; row < call.m; ++row) merge(call, pieces, row, index->typed_data() + row * call.top, value->typed_data() + row * call.top);
  return ffi::Error::Success();
}

// The parts of a matrix, or the matrix itself.
std::vector<Part> parts_of(const std::vector<Part>& parts, const void* whole, int64_t size) {
  return parts.size() > 1 ? parts : std::vector<Part>{{const_cast<void*>(whole), size}};
}

// Matmul by dot products of bfloat16 pairs, with both operands packed as a whole.
void multiply_pairs(ffi::ThreadPool& pool, const Product& product) {
  Call call{};
  call.output = SUMS;
  call.m = product.m, call.n = product.n, call.k = product.k;
  call.k_padded = (call.k + 31) / 32 * 32;
  call.panels = (call.n + 15) / 16;
  call.panel_size = call.k_padded * 16;
  call.x = product.a, call.narrow_x = product.a_narrow;
  call.add = product.add, call.out = product.out, call.narrow_out = product.narrow_out;
  auto* panels = static_cast<uint16_t*>(native::scratch<4>(call.panels * call.panel_size * 2 + 64));
  call.w = panels;
  const Kernel kernel = kernel_for(BFLOAT16);
  int64_t first = 0;
  for (const Part& part : parts_of(product.b_parts, product.b, product.b_transposed ? product.k : product.n)) {
    Call some = call;
    Product source = product;
    source.b = part.data;
    if (product.b_parts.size() > 1) (product.b_transposed ? some.k = some.k_padded = part.size : some.n = part.size);
    const int64_t count = (some.n + 15) / 16;
    uint16_t* to = panels + (product.b_transposed ? first * 16 : first / 16 * call.panel_size);
    native::share(pool, count, 1, count * some.k_padded >= (1 << 12), [&](int64_t begin, int64_t end) { kernel.pack(some, source, to, begin, end); });
    first += part.size;
  }
  call.rows = const_cast<void*>(call.x);
  if (product.a_transposed || !product.a_narrow || call.k != call.k_padded) {
    call.rows = native::scratch<1>(call.m * call.k_padded * 2 + 64);
    const Body prepare = product.a_transposed ? kernel.prepare_transposed : kernel.prepare;
    native::share(pool, call.m, 16, call.m * call.k >= (1 << 16), [&](int64_t begin, int64_t end) { prepare(call, begin, end); });
  }
  for (const Part& part : parts_of(product.out_parts, product.out, product.n)) {
    call.n = part.size, call.panels = (call.n + 15) / 16, call.out = part.data;
    run_blocks(pool, call, kernel);
    call.w = static_cast<const uint16_t*>(call.w) + call.panels * call.panel_size;
  }
}

// Matmul in float32, some hundred inputs at a time: their panels stay in the L1 cache one after the other, and are still in the L3 cache for the
// next rows.
void multiply(ffi::ThreadPool& pool, const Product& product) {
  constexpr int64_t INPUTS = 384, ROWS = 12;  // ROWS: a multiple of every instruction set's tile
  constexpr int64_t PIECES = 4;               // per thread: with fewer, a thread waits longer for the last one
  const int64_t blocks = product.narrow_out ? 1 : std::max<int64_t>(1, (product.k + INPUTS - 1) / INPUTS);
  const int64_t each = (product.k + blocks - 1) / blocks, panels = (product.n + 15) / 16;
  auto* packed = static_cast<float*>(native::scratch<4>(panels * 16 * each * sizeof(float) + 64));
  const auto pack = ON_BEST_ISA(pack_block);
  const auto run = ON_BEST_ISA(multiply_block);
  for (int64_t first = 0; first == 0 || first < product.k; first += each) {
    const int64_t count = std::min(each, product.k - first);
    native::share(pool, panels, 1, panels * count >= (1 << 12), [&](int64_t begin, int64_t end) { pack(product, first, count, begin, end, packed); });
    native::share(pool, product.m, ROWS, product.m * product.n * count >= (1 << 18),
                  [&](int64_t begin, int64_t end) { run(product, first, count, begin, end, packed); }, PIECES);
    if (count == 0) return;
  }
}

// Appends a matrix to parts of `type` with `rows` rows. Returns false if it does not fit.
bool append(std::vector<Part>& parts, const ffi::AnyBuffer& x, ffi::DataType type, int64_t rows) {
  if (x.element_type() != type || x.dimensions().size() != 2 || x.dimensions()[0] != rows) return false;
  parts.push_back({x.untyped_data(), x.dimensions()[1]});
  return true;
}

// Returns the sum of the parts' sizes, or -1 if one of several is no multiple of 32.
int64_t total(const std::vector<Part>& parts) {
  int64_t sum = 0;
  for (const Part& part : parts) {
    if (parts.size() > 1 && part.size % 32 != 0) return -1;
    sum += part.size;
  }
  return sum;
}

ffi::Error Matmul(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer add, ffi::RemainingArgs more_b, ffi::Result<ffi::AnyBuffer> y,
                  ffi::RemainingRets more_y, bool a_transposed, bool b_transposed, bool bfloat16) {
  const auto left = a.dimensions(), right = b.dimensions(), out = y->dimensions();
  const auto unfit = [](const char* what) { return ffi::Error::InvalidArgument(std::string("tilewright_matmul: ") + what); };
  if (left.size() != 2 || right.size() != 2 || out.size() != 2) return unfit("expected matrices");
  if (!is_float(a) || !is_float(b) || !is_float(*y) || add.element_type() != y->element_type())
    return unfit("expected matrices in float32 or bfloat16, and what is added like the result");
  std::vector<Part> b_parts, out_parts;
  append(b_parts, b, b.element_type(), right[0]);
  append(out_parts, *y, y->element_type(), out[0]);
  for (size_t i = 0; i < more_b.size(); ++i) {
    const auto part = more_b.get<ffi::AnyBuffer>(i);
    if (!part.has_value() || !append(b_parts, *part, b.element_type(), right[0])) return unfit("parts of a matrix differ in type or rows");
  }
  for (size_t i = 0; i < more_y.size(); ++i) {
    auto part = more_y.get<ffi::AnyBuffer>(i);
    if (!part.has_value() || !append(out_parts, **part, y->element_type(), out[0])) return unfit("parts of the result differ in type or rows");
  }
  const int64_t columns = total(b_parts), outputs = total(out_parts);
  const Product product{left[a_transposed ? 1 : 0], b_transposed ? right[0] : columns, left[a_transposed ? 0 : 1], a.untyped_data(), b.untyped_data(),
                        a.element_type() == ffi::BF16, b.element_type() == ffi::BF16, a_transposed, b_transposed, bfloat16,
                        add.element_count() == 0 ? nullptr : add.untyped_data(), y->untyped_data(), y->element_type() == ffi::BF16, b_parts, out_parts};
  if (columns < 0 || outputs < 0) return unfit("expected parts whose columns are multiples of 32");
  if ((b_transposed ? columns : right[0]) != product.k || out[0] != product.m || outputs != product.n ||
      (add.element_count() != 0 && (add.element_count() != y->element_count() || out_parts.size() > 1)))
    return unfit("shapes do not fit");
  if (product.m == 0 || product.n == 0) return ffi::Error::Success();
  if (bfloat16 && kernel_for(BFLOAT16).pack != nullptr) {
    multiply_pairs(pool, product);  // on the pool's threads, which a lock would put to sleep
    return ffi::Error::Success();
  }
  // XLA runs independent products at the same time. One after the other, each on all helpers, they share no caches and leave no thread idle.
  static std::mutex one_at_a_time;
  std::unique_lock<std::mutex> lock(one_at_a_time, std::defer_lock);
  if (product.m * product.n >= LARGE / std::max<int64_t>(product.k, 1)) lock.lock();
  multiply(pool, product);
  return ffi::Error::Success();
}

ffi::Error Gated(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer due, ffi::Result<ffi::AnyBuffer> out) {
  const auto dims = x.dimensions();
  const bool back = due.element_count() != 0;
  if (!is_float(x) || due.element_type() != x.element_type() || out->element_type() != x.element_type())
    return ffi::Error::InvalidArgument("tilewright_gate: expected all in one type, float32 or bfloat16");
  if (dims.size() != 2 || dims[1] % 2 != 0 || (back && due.element_count() * 2 != x.element_count()) ||
      out->element_count() * (back ? 1 : 2) != x.element_count())
    return ffi::Error::InvalidArgument("tilewright_gate: shapes do not fit");
  const Gate call{dims[0], dims[1] / 2, x.untyped_data(), back ? due.untyped_data() : nullptr, out->untyped_data()};
  const auto run = x.element_type() == ffi::BF16 ? ON_BEST_ISA(gate<uint16_t>) : ON_BEST_ISA(gate<float>);
  native::share(pool, call.rows, 1, call.rows * call.n >= (1 << 15), [&](int64_t begin, int64_t end) { run(call, begin, end); });
  return ffi::Error::Success();
}

}  // namespace

#define ROWS_AND_WEIGHTS Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightLinear, Linear,
                              ffi::Ffi::Bind()
                                  .ROWS_AND_WEIGHTS.Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("gated")
                                  .Attr<float>("eps")
                                  .Attr<int64_t>("first"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightGroupedLinear, Grouped,
                              ffi::Ffi::Bind().ROWS_AND_WEIGHTS.Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>().Attr<bool>("gated"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightArgmax, Argmax,
                              ffi::Ffi::Bind()
                                  .ROWS_AND_WEIGHTS.Arg<ffi::Buffer<ffi::U32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("outputs")
                                  .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightTopK, TopK,
                              ffi::Ffi::Bind().ROWS_AND_WEIGHTS.Ret<ffi::Buffer<ffi::S32>>().Ret<ffi::Buffer<ffi::F32>>().Attr<int64_t>("outputs"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightMatmul, Matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<bool>("a_transposed")
                                  .Attr<bool>("b_transposed")
                                  .Attr<bool>("bfloat16"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightGate, Gated,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
