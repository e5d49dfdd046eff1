// The CPU kernels as a program of its own, to be built with sanitizers: odd shapes, in buffers that end where the data ends, against
// plain loops in double. Which instruction set it runs is chosen as ever (TILEWRIGHT_CPU_ISA). Prints the name of that, and what is wrong.

#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <mutex>
#include <random>
#include <thread>
#include <tuple>

#include "../../src/tilewright/kernels/blocks.h"
#include "../../src/tilewright/kernels/native.h"
#include "../../src/tilewright/kernels/pages.h"

namespace linear {
#include "../../src/tilewright/kernels/linear/cpu.cc"
}  // namespace linear

namespace attention {
#define TilewrightIsa TilewrightAttentionIsa
#include "../../src/tilewright/kernels/attention/cpu.cc"
}  // namespace attention

namespace rms_norm {
#undef TilewrightIsa
#define TilewrightIsa TilewrightNormIsa
#include "../../src/tilewright/kernels/rms_norm/cpu.cc"
}  // namespace rms_norm

namespace self_attention {
#undef TilewrightIsa
#define TilewrightIsa TilewrightSelfIsa
#include "../../src/tilewright/kernels/self_attention/cpu.cc"
}  // namespace self_attention

namespace gather_reduce {
#undef TilewrightIsa
#define TilewrightIsa TilewrightGatherIsa
#include "../../src/tilewright/kernels/gather_reduce/cpu.cc"
}  // namespace gather_reduce

namespace writing {
#undef TilewrightIsa
#define TilewrightIsa TilewrightWriteIsa
#include "../../src/tilewright/kernels/write/cpu.cc"
}  // namespace writing

namespace gathering {
#undef TilewrightIsa
#define TilewrightIsa TilewrightGatherRowsIsa
#include "../../src/tilewright/kernels/gather_rows/cpu.cc"
}  // namespace gathering

namespace reading {
#undef TilewrightIsa
#define TilewrightIsa TilewrightReadIsa
#include "../../src/tilewright/kernels/read/cpu.cc"
}  // namespace reading

namespace dots {
#undef TilewrightIsa
#define TilewrightIsa TilewrightDotIsa
#include "../../src/tilewright/kernels/dot/cpu.cc"
}  // namespace dots

namespace scattering {
#undef TilewrightIsa
#define TilewrightIsa TilewrightScatterRowsIsa
#include "../../src/tilewright/kernels/scatter_rows/cpu.cc"
}  // namespace scattering

namespace sparse_attention {
#undef TilewrightIsa
#define TilewrightIsa TilewrightWindowIsa
#include "../../src/tilewright/kernels/sparse_attention/cpu.cc"
}  // namespace sparse_attention

namespace {

std::mt19937 generator(0);
int failures = 0;

void check(bool holds, const char* what, int64_t rows, int64_t inputs, int64_t outputs) {
  if (holds || ++failures > 20) return;
  std::printf("%s: wrong with %d rows, %d inputs, %d outputs\n", what, (int)rows, (int)inputs, (int)outputs);
}

float normal() { return std::normal_distribution<float>()(generator); }

// Memory of exactly so many elements. 64-byte aligned, as weights are, or not.
template <class T>
struct Exact {
  int64_t count;
  T* data;
  explicit Exact(int64_t count, bool aligned = false) : count(count) {
    void* memory = nullptr;
    const size_t bytes = count * sizeof(T);
    if (aligned ? posix_memalign(&memory, 64, bytes) != 0 : (memory = std::malloc(bytes)) == nullptr) std::abort();
    data = static_cast<T*>(memory);
    std::memset(data, 0xFF, bytes);  // NaN: what is read before it is written spoils the result
  }
  Exact(const Exact&) = delete;
  ~Exact() { std::free(data); }
  T& operator[](int64_t i) { return data[i]; }
};

float widen(uint16_t x) { return linear::plain::widen(x); }
uint16_t narrow(float x) { return linear::plain::round_bits(x) >> 16; }

// XLA's side of the interface: buffers, and a pool of three threads that are started when there is work.
struct Buffer {
  std::vector<int64_t> dims;
  XLA_FFI_Buffer buffer{};
  template <class T>
  Buffer(XLA_FFI_DataType type, Exact<T>& data, std::vector<int64_t> shape) : dims(std::move(shape)) {
    buffer.dtype = type;
    buffer.data = data.data;
    buffer.rank = dims.size();
    buffer.dims = dims.data();
  }
  template <class Typed> Typed as() const { return Typed(&buffer); }
};

std::mutex starting;
std::vector<std::thread> started;

XLA_FFI_Error* num_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = 3;
  return nullptr;
}

XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  std::lock_guard<std::mutex> lock(starting);
  started.emplace_back(args->task, args->data);
  return nullptr;
}

ffi::ThreadPool pool() {
  static XLA_FFI_Api api = [] {
    XLA_FFI_Api made{};
    made.XLA_FFI_ThreadPool_NumThreads = num_threads;
    made.XLA_FFI_ThreadPool_Schedule = schedule;
    return made;
  }();
  static ffi::DiagnosticEngine diagnostic;
  return *ffi::CtxDecoding<ffi::ThreadPool>::Decode(&api, nullptr, diagnostic);
}

// Threads that found nothing left to do may still be running when a call returns.
void join() {
  for (std::thread& thread : started) thread.join();
  started.clear();
}

using linear::Weights;
using Any = ffi::AnyBuffer;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using U32 = ffi::Buffer<ffi::U32>;

constexpr Weights EIGHT_BITS = static_cast<Weights>(linear::BLOCKS + blocks::Q8_0);

// A matrix [inputs, outputs] (with `gated`, two of them side by side in turns of 16 outputs), packed as tile.inc says, and its values.
struct Matrix {
  Weights format;
  int64_t inputs, outputs, panels, padded;
  bool gated;
  Exact<uint8_t> packed;
  std::vector<double> values[2];

  static int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
  static int64_t multiple(Weights format) { return format == linear::FLOAT32 ? 1 : format == linear::BFLOAT16 ? 32 : linear::form_of(format).inputs(); }
  // Bytes of a panel of so many inputs, and its size as the kernel counts it: in elements, or in bytes of blocks.
  static int64_t bytes(Weights format, int64_t padded) {
    if (format >= linear::BLOCKS) return padded / linear::form_of(format).inputs() * linear::form_of(format).size();
    return padded * (format == linear::FLOAT32 ? 64 : 32);
  }
  int64_t panel_size() const { return format >= linear::BLOCKS ? bytes(format, padded) : padded * 16; }

  Matrix(Weights format, int64_t inputs, int64_t outputs, bool gated)
      : format(format), inputs(inputs), outputs(outputs), panels((outputs + 15) / 16 * (gated ? 2 : 1)), padded(round_up(inputs, multiple(format))),
        gated(gated), packed(panels * bytes(format, padded), true) {
    std::memset(packed.data, 0, packed.count);
    if (format == EIGHT_BITS)
      for (int64_t i = 0; i < packed.count; ++i) {
        const int64_t at = i % blocks::forms[blocks::Q8_0].size(), head = blocks::forms[blocks::Q8_0].head();
        packed[i] = at >= head ? 128 : at % 2 == 1 ? 0x20 : 37 * at % 256;  // no weight, and scales near 0.01
      }
    for (int which = 0; which < (gated ? 2 : 1); ++which) {
      values[which].resize(inputs * outputs);
      for (int64_t k = 0; k < inputs; ++k)
        for (int64_t n = 0; n < outputs; ++n) values[which][k * outputs + n] = put(gated ? n / 16 * 2 + which : n / 16, k, n % 16);
    }
  }

  // Places one random weight, and says what it is worth.
  double put(int64_t panel, int64_t k, int64_t lane) {
    uint8_t* own = packed.data + panel * bytes(format, padded);
    if (format == linear::FLOAT32) return reinterpret_cast<float*>(own)[k * 16 + lane] = normal();
    if (format == linear::BFLOAT16) return widen(reinterpret_cast<uint16_t*>(own)[(k / 2 * 16 + lane) * 2 + k % 2] = narrow(normal()));
    const blocks::Form& form = blocks::forms[blocks::Q8_0];
    const int64_t group = k / form.inputs(), block = k % form.inputs() / 32;
    own[group * form.size() + form.head() + block * form.integers() + k % 32 / 4 * 64 + lane * 4 + k % 4] = std::uniform_int_distribution<int>(1, 255)(generator);
    const blocks::Weight weight = blocks::weight_at(form, own, lane, k);
    return weight.whole * double(weight.scale);
  }
};

// What the kernel makes of x beside weights in blocks, in double: with `fine`, blocks with outliers have 16 bits.
std::vector<double> in_blocks(Exact<float>& x, int64_t rows, int64_t inputs, bool fine) {
  std::vector<double> values(rows * inputs);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t k = 0; k < inputs; ++k) squares += double(x[row * inputs + k]) * x[row * inputs + k];
    for (int64_t block = 0; block < inputs; block += 32) {
      const int64_t end = std::min(inputs, block + 32);
      float largest = 0;
      for (int64_t k = block; k < end; ++k) largest = std::max(largest, std::abs(x[row * inputs + k]));
      const bool more = fine && largest > 3 * std::sqrt(squares / inputs);
      for (int64_t k = block; k < end; ++k) {
        const float units = std::min(x[row * inputs + k] * (127.0f / largest), 127.0f), whole = std::nearbyint(units);
        const float rest = more ? std::clamp(std::nearbyint((units - whole) * 256), -127.0f, 127.0f) / 256 : 0;
        values[row * inputs + k] = (double(whole) + rest) * double(largest / 127.0f);
      }
    }
  }
  return values;
}

// What the kernel makes of x in the format, in double.
std::vector<double> seen(Weights format, Exact<float>& x, int64_t rows, int64_t inputs) {
  if (format == EIGHT_BITS) return in_blocks(x, rows, inputs, true);
  std::vector<double> values(rows * inputs);
  for (int64_t i = 0; i < x.count; ++i) values[i] = format == linear::FLOAT32 ? x[i] : widen(narrow(x[i]));
  return values;
}

// One output and a bound on its float32 error.
std::pair<double, double> expect(const std::vector<double>& x, const Matrix& w, int which, int64_t row, int64_t n) {
  double sum = 0, size = 0;
  for (int64_t k = 0; k < w.inputs; ++k) {
    const double product = x[row * w.inputs + k] * w.values[which][k * w.outputs + n];
    sum += product;
    size += std::abs(product);
  }
  return {sum, (w.inputs + 4) * 0x1p-24 * size};
}

void compare(const char* what, const std::vector<double>& x, const Matrix& w, Exact<float>& y, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t n = 0; n < w.outputs; ++n) {
      auto [expected, bound] = expect(x, w, 0, row, n);
      if (w.gated) {
        const auto [up, up_bound] = expect(x, w, 1, row, n);
        const double silu = expected / (1 + std::exp(-expected));
        bound = 1.1 * bound * (std::abs(up) + up_bound) + std::abs(silu) * up_bound + 0x1p-20 * std::abs(silu * up) + 1e-30;
        expected = silu * up;
      }
      const bool close = std::abs(y[row * w.outputs + n] - expected) <= bound;
      check(close, what, rows, w.inputs, w.outputs);
      if (!close) return;
    }
}

// The kernel itself, with rows and results in memory of their exact size; all panels at once, and in pieces for argmax.
void run_kernel(int64_t rows, const Matrix& w, Exact<float>& x, Exact<float>& y, Exact<linear::Best>* best, int64_t piece) {
  linear::Call call{};
  call.m = rows, call.n = w.outputs, call.k = w.inputs, call.k_padded = w.padded;
  call.panels = w.panels, call.panel_size = w.panel_size(), call.piece = piece;
  call.output = w.gated ? linear::GATED : best != nullptr ? linear::ARGMAX : linear::SUMS;
  call.x = x.data, call.w = w.packed.data, call.out = y.data;
  const linear::Kernel kernel = linear::kernel_for(w.format);
  Exact<uint8_t> converted(w.format == linear::FLOAT32 ? 0 : rows * kernel.row_size(w.padded));
  call.rows = w.format == linear::FLOAT32 ? static_cast<void*>(x.data) : converted.data;
  if (best != nullptr) call.best = best->data;
  if (w.format != linear::FLOAT32) kernel.prepare(call, 0, rows);
  for (int64_t begin = 0; begin < w.panels; begin += piece) kernel.run(call, begin, std::min(w.panels, begin + piece));
}

void check_linear(Weights format, int64_t rows, int64_t inputs, int64_t outputs, bool gated, bool through_xla) {
  const Matrix w(format, inputs, outputs, gated);
  Exact<float> x(rows * inputs), y(rows * outputs);
  for (int64_t i = 0; i < x.count; ++i) x[i] = normal();
  const std::vector<double> values = seen(format, x, rows, inputs);
  if (!through_xla) {
    run_kernel(rows, w, x, y, nullptr, w.panels);
    return compare(gated ? "gated" : "linear", values, w, y, rows);
  }
  auto& m = const_cast<Matrix&>(w);
  std::vector<int64_t> shape{w.panels, w.padded, 16};
  if (format == linear::BFLOAT16) shape = {w.panels, w.padded / 2, 16, 2};
  if (format == EIGHT_BITS) shape = {w.panels, w.padded / linear::form_of(format).inputs(), linear::form_of(format).size()};
  const Buffer xb(XLA_FFI_DataType_F32, x, {rows, inputs}), yb(XLA_FFI_DataType_F32, y, {rows, outputs});
  const Buffer wb(format == linear::FLOAT32 ? XLA_FFI_DataType_F32 : format == linear::BFLOAT16 ? XLA_FFI_DataType_BF16 : XLA_FFI_DataType_U8, m.packed, shape);
  Exact<float> none(0);
  Exact<int32_t> uncounted(0), half(1);
  half[0] = rows / 2;
  const Buffer nothing(XLA_FFI_DataType_F32, none, {0}), all(XLA_FFI_DataType_S32, uncounted, {0}), some(XLA_FFI_DataType_S32, half, {});
  const auto call = [&](const Buffer& norm, const Buffer& add, const Buffer& to, int64_t first) {
    const ffi::Error done = linear::Linear(pool(), xb.as<Any>(), wb.as<Any>(), norm.as<Any>(), add.as<Any>(), all.as<S32>(),
                                           to.as<Any>(), gated, 1e-6f, first);
    check(done.success(), done.message().c_str(), rows, inputs, outputs);
  };
  call(nothing, nothing, yb, 0);
  compare(gated ? "gated, shared" : "linear, shared", values, w, y, rows);
  // Of a counted number of rows the others need not even be there: nothing is read or written behind the last that counts.
  Exact<float> first_rows(half[0] * inputs), first_out(half[0] * outputs);
  std::memcpy(first_rows.data, x.data, first_rows.count * sizeof(float));
  const Buffer fb(XLA_FFI_DataType_F32, first_rows, {rows, inputs}), fo(XLA_FFI_DataType_F32, first_out, {rows, outputs});
  const ffi::Error counted = linear::Linear(pool(), fb.as<Any>(), wb.as<Any>(), nothing.as<Any>(), nothing.as<Any>(),
                                            some.as<S32>(), fo.as<Any>(), gated, 1e-6f, 0);
  check(counted.success(), counted.message().c_str(), rows, inputs, outputs);
  for (int64_t i = 0; i < first_out.count; ++i) check(first_out[i] == y[i], "counted", rows, inputs, outputs);
  if (gated) return;
  Exact<int32_t> found(rows);
  Exact<float> most(rows);
  const Buffer index(XLA_FFI_DataType_S32, found, {rows}), value(XLA_FFI_DataType_F32, most, {rows});
  Exact<uint32_t> unmasked(0), masks(rows * ((outputs + 31) / 32));
  const Buffer free(XLA_FFI_DataType_U32, unmasked, {0}), masked(XLA_FFI_DataType_U32, masks, {rows, (outputs + 31) / 32});
  linear::Argmax(pool(), xb.as<Any>(), wb.as<Any>(), nothing.as<Any>(), free.as<U32>(), index.as<S32>(),
                 value.as<F32>(), outputs, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    const float* largest = std::max_element(&y[row * outputs], &y[row * outputs] + outputs);
    check(found[row] == largest - &y[row * outputs] && most[row] == *largest, "argmax", rows, inputs, outputs);
  }
  // Under masks that allow one output in three of a row, in every other word.
  for (int64_t i = 0; i < masks.count; ++i) masks[i] = i % 2 ? 0 : 0x49249249;
  linear::Argmax(pool(), xb.as<Any>(), wb.as<Any>(), nothing.as<Any>(), masked.as<U32>(), index.as<S32>(),
                 value.as<F32>(), outputs, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t first = -1;
    for (int64_t n = 0; n < outputs; ++n)
      if (masks[row * ((outputs + 31) / 32) + n / 32] >> (n % 32) & 1 && (first < 0 || y[row * outputs + n] > y[row * outputs + first])) first = n;
    check(first < 0 ? found[row] == 0 && std::isinf(most[row]) : found[row] == first && most[row] == y[row * outputs + first], "masked argmax", rows,
          inputs, outputs);
  }
  const int64_t top = std::min<int64_t>(outputs, 16);
  Exact<int32_t> places(rows * top);
  Exact<float> best(rows * top);
  const Buffer pb(XLA_FFI_DataType_S32, places, {rows, top}), vb(XLA_FFI_DataType_F32, best, {rows, top});
  linear::TopK(pool(), xb.as<Any>(), wb.as<Any>(), nothing.as<Any>(), pb.as<S32>(), vb.as<F32>(), outputs);
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<int64_t> order(outputs);
    for (int64_t n = 0; n < outputs; ++n) order[n] = n;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return y[row * outputs + a] > y[row * outputs + b]; });
    for (int64_t i = row * top; i < (row + 1) * top; ++i)
      check(places[i] == order[i - row * top] && best[i] == y[row * outputs + places[i]], "top", rows, inputs, outputs);
  }
  // Outputs from the second panel on, with something added; then after a norm, whose result an earlier one has to give as well.
  const int64_t rest = outputs - 16;
  Exact<float> add(rows * rest), part(rows * rest), weight(inputs), normed(rows * inputs), apart(rows * outputs), together(rows * outputs);
  for (int64_t i = 0; i < add.count; ++i) add[i] = normal();
  for (int64_t i = 0; i < inputs; ++i) weight[i] = normal();
  const Buffer ab(XLA_FFI_DataType_F32, add, {rows, rest}), rb(XLA_FFI_DataType_F32, part, {rows, rest});
  call(nothing, ab, rb, 1);
  for (int64_t i = 0; i < part.count; ++i) check(part[i] == y[i / rest * outputs + 16 + i % rest] + add[i], "part", rows, inputs, outputs);
  const Buffer wn(XLA_FFI_DataType_F32, weight, {inputs}), nb(XLA_FFI_DataType_F32, normed, {rows, inputs});
  const Buffer one(XLA_FFI_DataType_F32, apart, {rows, outputs}), other(XLA_FFI_DataType_F32, together, {rows, outputs});
  rms_norm::RmsNorm(pool(), xb.as<Any>(), wn.as<Any>(), nb.as<Any>(), 1e-6f);
  linear::Linear(pool(), nb.as<Any>(), wb.as<Any>(), nothing.as<Any>(), nothing.as<Any>(), all.as<S32>(), one.as<Any>(), false, 0.0f, 0);
  call(wn, nothing, other, 0);
  for (int64_t i = 0; i < apart.count; ++i) check(apart[i] == together[i], "norm first", rows, inputs, outputs);
}

// Weights in blocks of 32 inputs (see blocks.h), any bits but for scales and minima, which are near 0.01; all in memory of its exact size.
void check_blocks(int which, int64_t rows, int64_t inputs, int64_t outputs) {
  const blocks::Form& form = blocks::forms[which];
  const Weights format = static_cast<Weights>(linear::BLOCKS + which);
  const int64_t padded = Matrix::round_up(inputs, form.inputs()), panels = (outputs + 15) / 16, size = form.size(), groups = padded / form.inputs();
  Exact<uint8_t> w(panels * groups * size, true);
  for (int64_t i = 0; i < w.count; ++i) {
    w[i] = std::uniform_int_distribution<int>(0, 255)(generator);
    if (i % size < form.steps_at() && i % 2 == 1) w[i] = (w[i] & 0x83) | 0x20;
  }
  Exact<float> x(rows * inputs), y(rows * outputs);
  for (int64_t i = 0; i < x.count; ++i) x[i] = normal();
  const linear::Kernel kernel = linear::kernel_for(format);
  Exact<uint8_t> converted(rows * kernel.row_size(padded));
  linear::Call call{};
  call.m = rows, call.n = outputs, call.k = inputs, call.k_padded = padded, call.panels = panels, call.panel_size = groups * size, call.piece = panels;
  call.x = x.data, call.w = w.data, call.rows = converted.data, call.out = y.data;
  kernel.prepare(call, 0, rows);
  kernel.run(call, 0, panels);
  const std::vector<double> values = in_blocks(x, rows, inputs, which == blocks::Q8_0);
  for (int64_t n = 0; n < outputs; ++n) {
    std::vector<double> expected(rows), all(rows);
    for (int64_t k = 0; k < inputs; ++k) {
      const auto [whole, scale, minimum] = blocks::weight_at(form, w.data + n / 16 * groups * size, n % 16, k);
      const double scaled = double(whole) * scale, weight = scaled + minimum, most = std::abs(scaled) + std::abs(minimum);
      for (int64_t row = 0; row < rows; ++row) {
        const double value = values[row * inputs + k];
        expected[row] += value * weight, all[row] += std::abs(value) * most;
      }
    }
    for (int64_t row = 0; row < rows; ++row)
      check(std::abs(y[row * outputs + n] - expected[row]) <= (groups * form.group * 3 + 4) * 0x1p-24 * all[row], "blocks", rows, inputs, outputs);
  }
  // A row alone, and a gate whose up matrix is itself: tiles of rows take another way than single ones.
  Exact<float> alone(outputs), gated(rows * (panels / 2) * 16);
  call.m = 1, call.out = alone.data, call.rows = converted.data + (rows - 1) * kernel.row_size(padded);
  kernel.run(call, 0, panels);
  for (int64_t n = 0; n < outputs; ++n) check(alone[n] == y[(rows - 1) * outputs + n], "row alone", rows, inputs, outputs);
  if (panels < 2) return;
  call.m = rows, call.n = panels / 2 * 16, call.out = gated.data, call.rows = converted.data, call.output = linear::GATED;
  kernel.run(call, 0, panels / 2 * 2);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t n = 0; n < call.n; ++n) {
      const int64_t at = n / 16 * 32 + n % 16;
      if (at + 16 >= outputs) continue;
      const double gate = y[row * outputs + at], expected = gate / (1 + std::exp(-gate)) * y[row * outputs + at + 16];
      check(std::abs(gated[row * call.n + n] - expected) <= 1e-5 * std::abs(expected) + 1e-30, "gated blocks", rows, inputs, outputs);
    }
}

// Products of ones count themselves.
void check_dots(int64_t pieces) {
  Exact<uint32_t> total(1);
  const Buffer tb(XLA_FFI_DataType_U32, total, {});
  dots::CountProducts(pool(), tb.as<ffi::Buffer<ffi::U32>>(), pieces);
  check(native::isa() == native::PLAIN || total[0] == static_cast<uint32_t>(pieces * dots::PIECE), "dots", 1, pieces, 1);
}

// bfloat16 in and out, with a norm and an addition: the sums of the same numbers in float32, rounded.
void check_narrow(Weights format, int64_t rows, int64_t inputs, int64_t outputs) {
  Matrix w(format, inputs, outputs, false);
  Exact<uint16_t> x(rows * inputs), add(rows * outputs), y(rows * outputs);
  Exact<float> wide(rows * inputs), sums(rows * outputs);
  for (int64_t i = 0; i < x.count; ++i) wide[i] = widen(x[i] = narrow(normal()));
  for (int64_t i = 0; i < add.count; ++i) add[i] = narrow(normal());
  linear::Call call{};
  call.m = rows, call.n = outputs, call.k = inputs, call.k_padded = w.padded, call.panels = w.panels;
  call.w = w.packed.data, call.x = wide.data, call.out = sums.data;
  auto p = pool();
  linear::compute(p, call, format);
  call.x = x.data, call.add = add.data, call.out = y.data, call.narrow_x = call.narrow_out = true;
  linear::compute(p, call, format);
  for (int64_t i = 0; i < y.count; ++i) check(y[i] == narrow(sums[i] + widen(add[i])), "bfloat16", rows, inputs, outputs);
}

// Each lane's largest output, piece by piece of four panels, against the outputs.
void check_best(Weights format, int64_t rows, int64_t inputs, int64_t outputs) {
  const Matrix w(format, inputs, outputs, false);
  const int64_t piece = 4, pieces = (w.panels + piece - 1) / piece;
  Exact<float> x(rows * inputs), y(rows * outputs), none(0);
  for (int64_t i = 0; i < x.count; ++i) x[i] = normal();
  Exact<linear::Best> best(pieces * rows);
  for (int64_t i = 0; i < best.count; ++i)
    for (int lane = 0; lane < 16; ++lane) best[i].value[lane] = -INFINITY, best[i].panel[lane] = -1;
  run_kernel(rows, w, x, y, nullptr, w.panels);
  run_kernel(rows, w, x, none, &best, piece);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t p = 0; p < pieces; ++p)
      for (int64_t lane = 0; lane < 16; ++lane) {
        float largest = -INFINITY;
        int64_t panel = -1;
        for (int64_t i = p * piece; i < std::min(w.panels, (p + 1) * piece) && i * 16 + lane < outputs; ++i)
          if (y[row * outputs + i * 16 + lane] > largest) largest = y[row * outputs + i * 16 + lane], panel = i;
        const linear::Best& found = best[p * rows + row];
        check(found.value[lane] == largest && found.panel[lane] == panel, "best", rows, inputs, outputs);
      }
}

template <class T> XLA_FFI_DataType type_of() { return sizeof(T) == 4 ? XLA_FFI_DataType_F32 : XLA_FFI_DataType_BF16; }
template <class T> T stored(float x);
template <> float stored(float x) { return x; }
template <> uint16_t stored(float x) { return narrow(x); }
float worth(float x) { return x; }
float worth(uint16_t x) { return widen(x); }

// Products of two matrices in one type, with something added, that come as they are or rounded to bfloat16.
template <class T>
void check_matmul(int64_t rows, int64_t inputs, int64_t outputs, bool a_transposed, bool b_transposed, bool rounded) {
  Exact<T> a(rows * inputs), b(inputs * outputs), add(rows * outputs), y(rows * outputs);
  for (Exact<T>* x : {&a, &b, &add})
    for (int64_t i = 0; i < x->count; ++i) (*x)[i] = stored<T>(normal());
  const auto type = type_of<T>();
  const Buffer ab(type, a, a_transposed ? std::vector<int64_t>{inputs, rows} : std::vector<int64_t>{rows, inputs});
  const Buffer bb(type, b, b_transposed ? std::vector<int64_t>{outputs, inputs} : std::vector<int64_t>{inputs, outputs});
  const Buffer addb(type, add, {rows, outputs}), yb(type, y, {rows, outputs});
  const ffi::Error done = linear::Matmul(pool(), ab.as<Any>(), bb.as<Any>(), addb.as<Any>(), yb.as<Any>(), a_transposed, b_transposed, rounded);
  check(done.success(), done.message().c_str(), rows, inputs, outputs);
  const auto taken = [&](T x) { return rounded ? double(widen(narrow(worth(x)))) : double(worth(x)); };
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < outputs; ++n) {
      double sum = worth(add[m * outputs + n]), size = std::abs(sum);
      for (int64_t k = 0; k < inputs; ++k) {
        const double product = taken(a[a_transposed ? k * rows + m : m * inputs + k]) * taken(b[b_transposed ? n * inputs + k : k * outputs + n]);
        sum += product, size += std::abs(product);
      }
      const double bound = (inputs + 4) * 0x1p-24 * size + (sizeof(T) == 4 ? 0 : 0x1p-8) * std::abs(sum);
      check(std::abs(worth(y[m * outputs + n]) - sum) <= bound, "matmul", rows, inputs, outputs);
    }
}

template <class T>
void check_gate(int64_t rows, int64_t size) {
  Exact<T> x(rows * 2 * size), due(rows * size), out(rows * size), back(rows * 2 * size), none(0);
  for (Exact<T>* some : {&x, &due})
    for (int64_t i = 0; i < some->count; ++i) (*some)[i] = stored<T>(normal());
  const auto type = type_of<T>();
  const Buffer xb(type, x, {rows, 2 * size}), db(type, due, {rows, size}), ob(type, out, {rows, size}), bb(type, back, {rows, 2 * size}), nothing(type, none, {0});
  check(linear::Gated(pool(), xb.as<Any>(), nothing.as<Any>(), ob.as<Any>()).success(), "gate", rows, size, size);
  check(linear::Gated(pool(), xb.as<Any>(), db.as<Any>(), bb.as<Any>()).success(), "gate", rows, size, size);
  for (int64_t i = 0; i < out.count; ++i) {
    const int64_t at = i / size * 2 * size + i % size;
    const double g = worth(x[at]), u = worth(x[at + size]), share = 1 / (1 + std::exp(-g)), given = worth(due[i]);
    const auto close = [&](T found, double expected) {
      check(std::abs(worth(found) - expected) <= (sizeof(T) == 4 ? 1e-5 : 0x1p-7) * (std::abs(expected) + std::abs(given * u) + 1e-6), "gate", rows, size, size);
    };
    close(out[i], g * share * u);
    close(back[at], given * u * share * (1 + g * (1 - share)));
    close(back[at + size], given * g * share);
  }
}

// A norm for training and its gradient, which is compared with the change of the norm along each input.
template <class T>
void check_normalise(int64_t rows, int64_t size) {
  Exact<float> x(rows * size), weight(size), dx(rows * size), dw(size);
  Exact<T> out(rows * size), due(rows * size);
  for (Exact<float>* some : {&x, &weight})
    for (int64_t i = 0; i < some->count; ++i) (*some)[i] = normal();
  for (int64_t i = 0; i < due.count; ++i) due[i] = stored<T>(normal());
  const auto type = type_of<T>();
  const Buffer xb(XLA_FFI_DataType_F32, x, {rows, size}), wb(XLA_FFI_DataType_F32, weight, {size}), ob(type, out, {rows, size}), db(type, due, {rows, size});
  const Buffer dxb(XLA_FFI_DataType_F32, dx, {rows, size}), dwb(XLA_FFI_DataType_F32, dw, {size});
  check(rms_norm::Normalise(pool(), xb.as<F32>(), wb.as<F32>(), ob.as<Any>(), 1e-6f).success(), "normalise", rows, size, size);
  check(rms_norm::NormaliseGrad(pool(), xb.as<F32>(), wb.as<F32>(), db.as<Any>(), dxb.as<F32>(), dwb.as<F32>(), 1e-6f).success(), "normalise", rows, size, size);
  std::vector<double> weight_due(size), sizes(size);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0, product = 0;
    for (int64_t i = 0; i < size; ++i) {
      const double value = x[row * size + i];
      squares += value * value, product += value * weight[i] * worth(due[row * size + i]);
    }
    const double scale = 1 / std::sqrt(squares / size + 1e-6);
    for (int64_t i = 0; i < size; ++i) {
      const double value = x[row * size + i], given = worth(due[row * size + i]), expected = weight[i] * value * scale;
      check(std::abs(worth(out[row * size + i]) - expected) <= (sizeof(T) == 4 ? 1e-5 : 0x1p-8) * std::abs(expected) + 1e-30, "normalise", rows, size, size);
      const double own = given * weight[i] * scale, shared = value * scale * scale * scale * product / size;
      check(std::abs(dx[row * size + i] - (own - shared)) <= 1e-4 * (std::abs(own) + std::abs(shared) + scale), "normalise, input", rows, size, size);
      weight_due[i] += given * value * scale, sizes[i] += std::abs(given * value * scale);
    }
  }
  for (int64_t i = 0; i < size; ++i) check(std::abs(dw[i] - weight_due[i]) <= 1e-5 * sizes[i] + 1e-30, "normalise, weight", rows, size, size);
}

// Two rows of a batch without norms and rotation; values and the gradient of all three against plain loops. With norms and rotation it only
// has to stay within its buffers: other tests have their gradient.
template <class T>
void check_self_attention(int64_t t, int64_t heads, int64_t group, int64_t d, bool turned) {
  const int64_t b = 2, n = heads * group, width = (n + 2 * heads) * d;
  Exact<T> qkv(b * t * width), out(b * t * n * d), due(b * t * n * d), back(b * t * width);
  Exact<float> cosines(b * t * (d / 2)), sines(b * t * (d / 2)), sums(b * n * t), norm(turned ? d : 0), q_due(norm.count), k_due(norm.count);
  for (Exact<T>* some : {&qkv, &due})
    for (int64_t i = 0; i < some->count; ++i) (*some)[i] = stored<T>(normal());
  for (int64_t i = 0; i < cosines.count; ++i) cosines[i] = turned ? std::cos(i) : 1, sines[i] = turned ? std::sin(i) : 0;
  for (int64_t i = 0; i < norm.count; ++i) norm[i] = normal();
  const auto type = type_of<T>();
  const Buffer xb(type, qkv, {b, t, width}), ob(type, out, {b, t, n * d}), gb(type, due, {b, t, n * d}), rb(type, back, {b, t, width});
  const Buffer cb(XLA_FFI_DataType_F32, cosines, {b, t, d / 2}), sb(XLA_FFI_DataType_F32, sines, {b, t, d / 2}), lb(XLA_FFI_DataType_F32, sums, {b, n, t});
  const Buffer nb(XLA_FFI_DataType_F32, norm, {norm.count}), qb(XLA_FFI_DataType_F32, q_due, {norm.count}), kb(XLA_FFI_DataType_F32, k_due, {norm.count});
  // Of two texts in each row, a query sees its own.
  Exact<int32_t> firsts(b * t);
  for (int64_t i = 0; i < firsts.count; ++i) firsts[i] = i % t < t / 3 ? 0 : t / 3;
  const Buffer fb(XLA_FFI_DataType_S32, firsts, {b, t});
  const ffi::Error ran = self_attention::SelfAttention(pool(), xb.as<Any>(), nb.as<F32>(), nb.as<F32>(), cb.as<F32>(), sb.as<F32>(), fb.as<S32>(), ob.as<Any>(), lb.as<F32>(),
                                                         1e-6f);
  const ffi::Error graded = self_attention::SelfAttentionGrad(pool(), xb.as<Any>(), nb.as<F32>(), nb.as<F32>(), cb.as<F32>(), sb.as<F32>(), fb.as<S32>(), ob.as<Any>(),
                                                                  lb.as<F32>(), gb.as<Any>(), rb.as<Any>(), qb.as<F32>(), kb.as<F32>(), 1e-6f);
  check(ran.success() && graded.success(), "self-attention", t, d, n);
  for (int64_t i = 0; i < back.count; ++i) check(std::isfinite(worth(back[i])), "self-attention, finite", t, d, n);
  if (turned) return;
  const double bound = sizeof(T) == 4 ? 1e-4 : 0x1p-5;
  std::vector<double> expected(b * t * width);
  const auto at = [&](int64_t row, int64_t s, int64_t head, int64_t i) { return ((row * t + s) * (n + 2 * heads) + head) * d + i; };
  for (int64_t row = 0; row < b; ++row)
    for (int64_t head = 0; head < n; ++head)
      for (int64_t q = 0; q < t; ++q) {
        const int64_t key = n + head / group, value = key + heads;
        const int64_t least = firsts[row * t + q];
        std::vector<double> weights(q + 1), products(q + 1);
        double total = 0, shared = 0;
        for (int64_t s = least; s <= q; ++s) {
          double score = 0;
          for (int64_t i = 0; i < d; ++i) score += double(worth(qkv[at(row, q, head, i)])) * worth(qkv[at(row, s, key, i)]);
          total += weights[s] = std::exp(score / std::sqrt(double(d)));
        }
        const int64_t mine = ((row * t + q) * n + head) * d;
        for (int64_t i = 0; i < d; ++i) {
          double sum = 0;
          for (int64_t s = least; s <= q; ++s) sum += weights[s] / total * worth(qkv[at(row, s, value, i)]);
          check(std::abs(worth(out[mine + i]) - sum) < bound, "self-attention", t, d, n);
        }
        for (int64_t s = least; s <= q; ++s) {
          for (int64_t i = 0; i < d; ++i) {
            products[s] += double(worth(due[mine + i])) * worth(qkv[at(row, s, value, i)]);
            expected[at(row, s, value, i)] += weights[s] / total * worth(due[mine + i]);
          }
          shared += weights[s] / total * products[s];
        }
        for (int64_t s = least; s <= q; ++s)
          for (int64_t i = 0; i < d; ++i) {
            const double blame = weights[s] / total * (products[s] - shared) / std::sqrt(double(d));
            expected[at(row, q, head, i)] += blame * worth(qkv[at(row, s, key, i)]);
            expected[at(row, s, key, i)] += blame * worth(qkv[at(row, q, head, i)]);
          }
      }
  for (int64_t i = 0; i < back.count; ++i) check(std::abs(worth(back[i]) - expected[i]) < 4 * bound * (1 + std::abs(expected[i])), "self-attention, gradient", t, d, n);
}

// One row of the batch and one key head with `group` query heads.
template <class T>
void check_attention(int64_t queries, int64_t group, int64_t size, int64_t capacity, int64_t own) {
  Exact<T> q(queries * group * size), out(queries * group * size), k(capacity * size), v(capacity * size), own_k(own * size), own_v(own * size);
  Exact<int32_t> lengths(queries), firsts(queries);
  Exact<uint32_t> bits(queries * ((own + 31) / 32));
  for (Exact<T>* keys : {&q, &k, &v, &own_k, &own_v})
    for (int64_t i = 0; i < keys->count; ++i) (*keys)[i] = stored<T>(normal());
  for (int64_t t = 0; t < queries; ++t) lengths[t] = std::uniform_int_distribution<int>(0, capacity)(generator), firsts[t] = std::uniform_int_distribution<int>(0, lengths[t])(generator);
  for (int64_t i = 0; i < bits.count; ++i) bits[i] = generator();
  const auto type = type_of<T>();
  const Buffer qb(type, q, {1, queries, group, size}), kb(type, k, {1, 1, capacity, size}), vb(type, v, {1, 1, capacity, size});
  const Buffer lb(XLA_FFI_DataType_S32, lengths, {1, queries}), okb(type, own_k, {1, 1, own, size}), ovb(type, own_v, {1, 1, own, size});
  const Buffer ob(type, out, {1, queries, group, size}), fb(XLA_FFI_DataType_S32, firsts, {1, queries}), mb(XLA_FFI_DataType_U32, bits, {1, queries, (own + 31) / 32});
  Exact<int32_t> no_table(0);
  const Buffer nb(XLA_FFI_DataType_S32, no_table, {0});
  const ffi::Error done = attention::Attention(pool(), qb.as<Any>(), kb.as<Any>(), vb.as<Any>(), nb.as<S32>(), lb.as<S32>(), fb.as<S32>(), okb.as<Any>(), ovb.as<Any>(),
                                               mb.as<U32>(), ob.as<Any>(), 0);
  check(done.success(), done.message().c_str(), queries, size, capacity);
  for (int64_t row = 0; row < queries * group; ++row) {
    const int64_t query = row / group, seen = lengths[query], keys = seen + own;
    const auto denied = [&](int64_t s) {
      return s < seen ? s < firsts[query] : (bits[query * ((own + 31) / 32) + (s - seen) / 32] >> (s - seen) % 32 & 1) == 0;
    };
    std::vector<double> weights(keys), sums(size);
    double total = 0;
    for (int64_t s = 0; s < keys; ++s) {
      const T* key = s < seen ? &k[s * size] : &own_k[(s - seen) * size];
      double score = 0;
      for (int64_t i = 0; i < size; ++i) score += double(worth(q[row * size + i])) * worth(key[i]);
      total += weights[s] = denied(s) ? 0 : std::exp(score / std::sqrt(double(size)));
    }
    for (int64_t s = 0; s < keys; ++s)
      for (int64_t i = 0; i < size; ++i) if (!denied(s)) sums[i] += weights[s] / total * worth(s < seen ? v[s * size + i] : own_v[(s - seen) * size + i]);
    const double bound = sizeof(T) == 4 ? 1e-4 : 0x1p-6;
    for (int64_t i = 0; i < size; ++i) check(std::abs(worth(out[row * size + i]) - sums[i]) < bound, "attention", queries, size, capacity);
  }
}

// Two rows of the batch, of which the first sees `seen` positions and the second all, and queries of all kinds in turn.
template <class T>
void check_window(int64_t window, int64_t positions, int64_t heads, int64_t group, int64_t d, int64_t seen) {
  const int64_t b = 2, n = heads * group, changes = 2;
  Exact<T> q(b * window * n * d), k(b * positions * heads * d), v(k.count), change(b * changes * positions * heads * d), before(q.count), out(q.count);
  Exact<float> sums(b * window * 3);
  Exact<int32_t> lengths(b), kinds(b * window);
  for (Exact<T>* x : {&q, &k, &v, &before})
    for (int64_t i = 0; i < x->count; ++i) (*x)[i] = stored<T>(normal());
  for (int64_t i = 0; i < change.count; ++i) change[i] = stored<T>(i / (heads * d) % 3 == 0 ? normal() : 0.0f);
  lengths[0] = seen, lengths[1] = positions;
  for (int64_t i = 0; i < kinds.count; ++i) kinds[i] = i % 4 - 2;
  const auto type = type_of<T>();
  const Buffer qb(type, q, {b, window, n, d}), kb(type, k, {b, positions, heads, d}), vb(type, v, {b, positions, heads, d});
  const Buffer cb(type, change, {b, changes, positions, heads, d}), pb(type, before, {b, window, n * d}), ob(type, out, {b, window, n * d});
  const Buffer lb(XLA_FFI_DataType_S32, lengths, {b}), ib(XLA_FFI_DataType_S32, kinds, {b, window}), sb(XLA_FFI_DataType_F32, sums, {b, window, 3});
  const ffi::Error done = sparse_attention::SparseAttention(pool(), qb.as<Any>(), kb.as<Any>(), vb.as<Any>(), cb.as<Any>(), lb.as<S32>(), ib.as<S32>(),
                                                            pb.as<Any>(), ob.as<Any>(), sb.as<F32>());
  check(done.success(), done.message().c_str(), window, positions, d);
  for (int64_t i = 0; i < b * window; ++i) {
    const int64_t row = i / window, kind = kinds[i];
    double statistics[3] = {}, size = 0;
    for (int64_t head = 0; head < n; ++head) {
      const auto at = [&](int64_t s, int64_t f) { return ((row * positions + s) * heads + head / group) * d + f; };
      std::vector<double> weights(lengths[row]);
      double total = 0;
      for (int64_t s = 0; s < lengths[row]; ++s) {
        double score = 0;
        for (int64_t f = 0; f < d; ++f) score += double(worth(q[(i * n + head) * d + f])) * worth(k[at(s, f)]);
        total += weights[s] = std::exp(score / std::sqrt(double(d)));
      }
      for (int64_t f = 0; f < d; ++f) {
        const int64_t own = (i * n + head) * d + f;
        const double old = worth(before[own]);
        double sum = kind == -1 ? 0 : old;
        for (int64_t s = 0; kind != -2 && s < lengths[row]; ++s)
          sum += weights[s] / total * (kind == -1 ? worth(v[at(s, f)]) : worth(change[at(s, f) + (row * (changes - 1) + kind) * positions * heads * d]));
        check(std::abs(worth(out[own]) - sum) < (sizeof(T) == 4 ? 1e-4 : 0x1p-5), "window", window, positions, d);
        statistics[0] += old * sum, statistics[1] += old * old, statistics[2] += sum * sum, size += old * old + sum * sum;
      }
    }
    for (int64_t j = 0; j < 3; ++j) check(std::abs(sums[i * 3 + j] - statistics[j]) <= 1e-4 * size + 1e-4, "window, sums", window, positions, d);
  }
}

// Rows at the table's ends, and rows that have no place.
template <class T>
void check_put(int64_t places, int64_t size) {
  Exact<T> table(places * size), before(table.count), rows(4 * size);
  Exact<int32_t> index(4);
  for (int64_t i = 0; i < table.count; ++i) before[i] = table[i] = static_cast<T>(i % 251);
  for (int64_t i = 0; i < rows.count; ++i) rows[i] = static_cast<T>(255 - i % 3);
  index[0] = -1, index[1] = static_cast<int32_t>(places - 1), index[2] = static_cast<int32_t>(places), index[3] = places > 1 ? 0 : -7;
  const auto type = type_of<T>();
  const Buffer tb(type, table, {places, size}), ib(XLA_FFI_DataType_S32, index, {4}), rb(type, rows, {4, size});
  check(scattering::ScatterRows(tb.as<Any>(), ib.as<S32>(), rb.as<Any>(), tb.as<Any>()).success(), "scatter_rows", places, size, 4);
  for (int64_t i = 0; i < table.count; ++i) {
    const int64_t row = i / size == places - 1 ? 1 : i / size == 0 ? 3 : -1;
    check(table[i] == (row < 0 ? before[i] : rows[row * size + i % size]), "scatter_rows", places, size, 4);
  }
}

// Caches [2, heads, capacity, size] in pages of 16 entries in memory of their exact size, in reverse order and with a spare page in front; and
// the table, whose rows end with what each of them needs.
template <class T>
struct Paged {
  int64_t heads, capacity, size, width;
  Exact<T> data;
  Exact<int32_t> table;
  Paged(Exact<T>& cache, int64_t heads, int64_t capacity, int64_t size, const int64_t (&needed)[2])
      : heads(heads), capacity(capacity), size(size), width((capacity + 15) / 16), data((2 * width + 1) * heads * 16 * size), table(2 * width) {
    for (int64_t i = 0; i < 2 * width; ++i) table[i] = static_cast<int32_t>(i % width * 16 < needed[i / width] ? 2 * width - i : -1);
    for (int64_t i = 0; i < cache.count; ++i)
      if (T* entry = at(i)) *entry = cache[i];
  }
  // Where the caches' element i lies; null where there is no page for it.
  T* at(int64_t i) {
    const int64_t row = i / (heads * capacity * size), head = i / (capacity * size) % heads, entry = i / size % capacity;
    const int64_t page = table[row * width + entry / 16];
    return page < 0 ? nullptr : &data[((page * heads + head) * 16 + entry % 16) * size + i % size];
  }
  std::vector<int64_t> dims() const { return {2 * width + 1, heads, 16, size}; }
};

// Norm, rotation and cache in one call are the same as one after the other: two rows of the batch, of which the second keeps only one entry.
template <class T>
void check_append(int64_t queries, int64_t heads, int64_t group, int64_t size, int64_t capacity) {
  const int64_t all = heads * (group + 2);
  Exact<T> qkv(2 * queries * all * size), norm(size), q(2 * queries * heads * group * size), out(q.count), own_k(2 * heads * queries * size), own_v(own_k.count);
  Exact<T> k(2 * heads * capacity * size), v(k.count), before(k.count), none(0);
  Exact<float> cosines(queries * size), sines(queries * size);
  Exact<int32_t> start(2), count(2);
  for (Exact<T>* x : {&qkv, &norm, &k, &v})
    for (int64_t i = 0; i < x->count; ++i) (*x)[i] = stored<T>(normal());
  std::memcpy(before.data, k.data, k.count * sizeof(T));
  for (int64_t i = 0; i < cosines.count; ++i) cosines[i] = std::cos(i), sines[i] = std::sin(i);
  start[0] = capacity - queries, start[1] = 0, count[0] = queries, count[1] = 1;
  const int64_t needed[2] = {capacity, 1};
  Paged<T> k_pages(k, heads, capacity, size, needed), v_pages(v, heads, capacity, size, needed), apart(k, heads, capacity, size, needed);
  const auto type = type_of<T>();
  const Buffer all_b(type, qkv, {2, queries, all * size}), nb(type, norm, {size}), nothing(type, none, {0}), qb(type, q, {2, queries, heads * group, size});
  const Buffer ob(type, out, {2, queries, heads * group * size}), kb(type, k, {2, heads, capacity, size}), vb(type, v, {2, heads, capacity, size});
  const Buffer okb(type, own_k, {2, heads, queries, size}), ovb(type, own_v, {2, heads, queries, size});
  const Buffer cb(XLA_FFI_DataType_F32, cosines, {2, queries, size / 2}), sb(XLA_FFI_DataType_F32, sines, {2, queries, size / 2});
  const Buffer first(XLA_FFI_DataType_S32, start, {2}), kept(XLA_FFI_DataType_S32, count, {2});
  Exact<int32_t> no_firsts(0);
  Exact<uint32_t> no_bits(0);
  const Buffer no_s32(XLA_FFI_DataType_S32, no_firsts, {0}), no_u32(XLA_FFI_DataType_U32, no_bits, {0});
  const ffi::Error rotated = attention::NormRotate(pool(), all_b.as<Any>(), nb.as<Any>(), nothing.as<Any>(), cb.as<F32>(), sb.as<F32>(), qb.as<Any>(),
                                                   okb.as<Any>(), ovb.as<Any>(), 1e-6f);
  const ffi::Error done =
      attention::AttendProjected(pool(), all_b.as<Any>(), nb.as<Any>(), nothing.as<Any>(), cb.as<F32>(), sb.as<F32>(), first.as<S32>(), kept.as<S32>(),
                              kb.as<Any>(), vb.as<Any>(), no_s32.as<S32>(), ob.as<Any>(), kb.as<Any>(), vb.as<Any>(), 1e-6f, 0, 0);
  check(rotated.success() && done.success(), "append", queries, size, capacity);
  for (int64_t i = 0; i < k.count; ++i) {
    const int64_t row = i / (heads * capacity * size), head = i / (capacity * size), t = i / size % capacity - start[row];
    const T expected = t >= 0 && t < count[row] ? own_k[(head * queries + t) * size + i % size] : before[i];
    check(k[i] == expected, "appended", queries, size, capacity);
  }
  Exact<int32_t> lengths(2 * queries);
  Exact<T> plain(q.count);
  for (int64_t i = 0; i < lengths.count; ++i) lengths[i] = i % queries < count[i / queries] ? start[i / queries] + i % queries + 1 : 0;
  const Buffer lb(XLA_FFI_DataType_S32, lengths, {2, queries}), pb(type, plain, {2, queries, heads * group, size}), empty(type, none, {2, heads, 0, size});
  attention::Attention(pool(), qb.as<Any>(), kb.as<Any>(), vb.as<Any>(), no_s32.as<S32>(), lb.as<S32>(), no_s32.as<S32>(), empty.as<Any>(), empty.as<Any>(), no_u32.as<U32>(), pb.as<Any>(), 0);
  for (int64_t i = 0; i < out.count; ++i) check(out[i] == plain[i], "attended", queries, size, capacity);
  // The same in pages, together and one after the other.
  Exact<T> paged(out.count), alone(out.count);
  const Buffer table(XLA_FFI_DataType_S32, k_pages.table, {2, k_pages.width}), to(type, paged, {2, queries, heads * group * size});
  const Buffer kp(type, k_pages.data, k_pages.dims()), vp(type, v_pages.data, k_pages.dims()), ap(type, apart.data, k_pages.dims());
  const Buffer one(type, alone, {2, queries, heads * group, size});
  const ffi::Error appended =
      attention::AttendProjected(pool(), all_b.as<Any>(), nb.as<Any>(), nothing.as<Any>(), cb.as<F32>(), sb.as<F32>(), first.as<S32>(), kept.as<S32>(),
                                   kp.as<Any>(), vp.as<Any>(), table.as<S32>(), to.as<Any>(), kp.as<Any>(), vp.as<Any>(), 1e-6f,
                                   capacity, 0);  // a window over all of it
  const ffi::Error attended =
      attention::Attention(pool(), qb.as<Any>(), kp.as<Any>(), vp.as<Any>(), table.as<S32>(), lb.as<S32>(), no_s32.as<S32>(), empty.as<Any>(),
                                empty.as<Any>(), no_u32.as<U32>(), one.as<Any>(), 0);
  const ffi::Error copied = writing::Write(ap.as<Any>(), okb.as<Any>(), first.as<S32>(), kept.as<S32>(), table.as<S32>(), ap.as<Any>());
  check(appended.success() && attended.success() && copied.success(), "pages", queries, size, capacity);
  for (int64_t i = 0; i < out.count; ++i) check(paged[i] == out[i] && alone[i] == out[i], "attended in pages", queries, size, capacity);
  for (int64_t i = 0; i < k.count; ++i)
    if (k_pages.at(i) != nullptr) check(*k_pages.at(i) == k[i] && *v_pages.at(i) == v[i] && *apart.at(i) == k[i], "appended in pages", queries, size, capacity);
  k_pages.table[0] = -1;
  check(writing::Write(ap.as<Any>(), okb.as<Any>(), first.as<S32>(), kept.as<S32>(), table.as<S32>(), ap.as<Any>()).success() == (start[0] >= 16),
        "a page that is not there", queries, size, capacity);
}

// Keys and values in 8 bits: what is written is its vector within half a step, and what comes out is attention over what is held. One row of the
// batch, whose pages lie in reverse.
template <class T>
void check_eight_bits(int64_t queries, int64_t heads, int64_t group, int64_t size, int64_t pages, int64_t window) {
  const int64_t all = heads * (group + 2), capacity = pages * 16, first_new = capacity - queries;
  Exact<T> qkv(queries * all * size), q(queries * heads * group * size), out(q.count), own_k(heads * queries * size), own_v(own_k.count), none(0);
  Exact<int8_t> k(heads * capacity * size), v(k.count);
  Exact<float> k_scale(heads * capacity), v_scale(k_scale.count), cosines(queries * size / 2), sines(cosines.count);
  Exact<int32_t> start(1), count(1), table(pages);
  for (int64_t i = 0; i < qkv.count; ++i) qkv[i] = stored<T>(normal());
  for (int64_t i = 0; i < k.count; ++i) k[i] = (int8_t)(i * 37 % 255 - 127), v[i] = (int8_t)(i * 91 % 255 - 127);
  for (int64_t i = 0; i < k_scale.count; ++i) k_scale[i] = 0.002f + 0.0001f * (i % 17), v_scale[i] = 0.005f + 0.0002f * (i % 13);
  for (int64_t i = 0; i < cosines.count; ++i) cosines[i] = std::cos(i), sines[i] = std::sin(i);
  for (int64_t i = 0; i < pages; ++i) table[i] = pages - 1 - i;
  start[0] = first_new, count[0] = queries;
  const auto type = type_of<T>();
  const std::vector<int64_t> held{pages, heads, 16, size}, scales{pages, heads, 16};
  const Buffer all_b(type, qkv, {1, queries, all * size}), nothing(type, none, {0}), qb(type, q, {1, queries, heads * group, size});
  const Buffer okb(type, own_k, {1, heads, queries, size}), ovb(type, own_v, {1, heads, queries, size}), ob(type, out, {1, queries, heads * group * size});
  const Buffer cb(XLA_FFI_DataType_F32, cosines, {1, queries, size / 2}), sb(XLA_FFI_DataType_F32, sines, {1, queries, size / 2});
  const Buffer kb(XLA_FFI_DataType_S8, k, held), vb(XLA_FFI_DataType_S8, v, held), ksb(XLA_FFI_DataType_F32, k_scale, scales), vsb(XLA_FFI_DataType_F32, v_scale, scales);
  const Buffer first(XLA_FFI_DataType_S32, start, {1}), kept(XLA_FFI_DataType_S32, count, {1}), tb(XLA_FFI_DataType_S32, table, {1, pages});
  const ffi::Error rotated = attention::NormRotate(pool(), all_b.as<Any>(), nothing.as<Any>(), nothing.as<Any>(), cb.as<F32>(), sb.as<F32>(), qb.as<Any>(),
                                                   okb.as<Any>(), ovb.as<Any>(), 1e-6f);
  const ffi::Error done = attention::QuantisedAttendProjected(
      pool(), all_b.as<Any>(), nothing.as<Any>(), nothing.as<Any>(), cb.as<F32>(), sb.as<F32>(), first.as<S32>(), kept.as<S32>(), kb.as<Any>(), ksb.as<F32>(),
      vb.as<Any>(), vsb.as<F32>(), tb.as<S32>(), ob.as<Any>(), kb.as<Any>(), ksb.as<F32>(), vb.as<Any>(), vsb.as<F32>(), 1e-6f,
      window, 0);
  check(rotated.success() && done.success(), "8 bits", queries, size, pages);
  const auto at = [&](int64_t head, int64_t s) { return (table[s / 16] * heads + head) * 16 + s % 16; };
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t t = 0; t < queries; ++t)
      for (const auto& [own, values, by] : {std::tuple<Exact<T>&, Exact<int8_t>&, Exact<float>&>{own_k, k, k_scale}, {own_v, v, v_scale}}) {
        const int64_t place = at(head, first_new + t);
        for (int64_t i = 0; i < size; ++i) {
          const double lost = worth(own[(head * queries + t) * size + i]) - double(by[place]) * values[place * size + i];
          check(std::abs(lost) <= 0.5001 * by[place], "in 8 bits", queries, size, pages);
        }
      }
  for (int64_t row = 0; row < queries * heads * group; ++row) {
    const int64_t head = row % (heads * group) / group, seen = first_new + row / (heads * group) + 1, from = window == 0 ? 0 : std::max<int64_t>(0, seen - window);
    std::vector<double> weights(seen), sums(size);
    double total = 0;
    for (int64_t s = from; s < seen; ++s) {
      double score = 0;
      for (int64_t i = 0; i < size; ++i) score += double(worth(q[row * size + i])) * k_scale[at(head, s)] * k[at(head, s) * size + i];
      total += weights[s] = std::exp(score / std::sqrt(double(size)));
    }
    for (int64_t s = from; s < seen; ++s)
      for (int64_t i = 0; i < size; ++i) sums[i] += weights[s] / total * v_scale[at(head, s)] * v[at(head, s) * size + i];
    const double bound = sizeof(T) == 4 ? 1e-4 : 0x1p-6;
    for (int64_t i = 0; i < size; ++i) check(std::abs(worth(out[row * size + i]) - sums[i]) < bound, "attended in 8 bits", queries, size, pages);
  }
}

template <class T>
void check_rms_norm(int64_t rows, int64_t size) {
  Exact<T> x(rows * size), weight(size), out(rows * size);
  for (int64_t i = 0; i < x.count; ++i) x[i] = stored<T>(normal());
  for (int64_t i = 0; i < size; ++i) weight[i] = stored<T>(normal());
  const auto type = type_of<T>();
  const Buffer xb(type, x, {rows, size}), wb(type, weight, {size}), ob(type, out, {rows, size});
  const ffi::Error done = rms_norm::RmsNorm(pool(), xb.as<Any>(), wb.as<Any>(), ob.as<Any>(), 1e-6f);
  check(done.success(), done.message().c_str(), rows, size, size);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += double(worth(x[row * size + i])) * worth(x[row * size + i]);
    for (int64_t i = 0; i < size; ++i) {
      const double expected = worth(weight[i]) * (worth(x[row * size + i]) / std::sqrt(squares / size + 1e-6));
      check(std::abs(worth(out[row * size + i]) - expected) <= std::abs(expected) * (sizeof(T) == 4 ? 1e-5 : 0x1p-6), "norm", rows, size, size);
    }
  }
}

void check_read(int64_t count) {
  Exact<int32_t> x(count), total(1);
  uint32_t expected = 0;
  for (int64_t i = 0; i < count; ++i) expected += static_cast<uint32_t>(x[i] = static_cast<int32_t>(generator()));
  const Buffer xb(XLA_FFI_DataType_S32, x, {count}), tb(XLA_FFI_DataType_S32, total, {});
  reading::Read(pool(), xb.as<S32>(), tb.as<S32>());
  check(static_cast<uint32_t>(total[0]) == expected, "read", 1, count, 1);
}

// Every row's entries at its own place, to the very end of the cache, and rows of a table, its last one among them.
template <class T>
void check_moves(int64_t batch, int64_t heads, int64_t slots, int64_t added, int64_t size) {
  const auto type = sizeof(T) == 4 ? XLA_FFI_DataType_F32 : XLA_FFI_DataType_BF16;
  Exact<T> cache(batch * heads * slots * size), fresh(batch * heads * added * size), taken(batch * size);
  Exact<int32_t> start(batch), count(batch), index(batch);
  for (int64_t i = 0; i < batch * heads * slots * size; ++i) cache[i] = static_cast<T>(i % 251);
  for (int64_t i = 0; i < batch * heads * added * size; ++i) fresh[i] = static_cast<T>(255);
  for (int64_t b = 0; b < batch; ++b) count[b] = static_cast<int32_t>(b % (added + 1)), start[b] = static_cast<int32_t>(slots - count[b]);
  for (int64_t b = 0; b < batch; ++b) index[b] = static_cast<int32_t>(batch * heads * slots - 1 - b);
  const Buffer cb(type, cache, {batch, heads, slots, size}), fb(type, fresh, {batch, heads, added, size}), sb(XLA_FFI_DataType_S32, start, {batch}),
      nb(XLA_FFI_DataType_S32, count, {batch}), table(type, cache, {batch * heads * slots, size}), ib(XLA_FFI_DataType_S32, index, {batch}),
      tb(type, taken, {batch, size});
  Exact<int32_t> no_table(0);
  const Buffer none(XLA_FFI_DataType_S32, no_table, {0});
  check(writing::Write(cb.as<Any>(), fb.as<Any>(), sb.as<S32>(), nb.as<S32>(), none.as<S32>(), cb.as<Any>()).success(), "append", batch, slots, added);
  for (int64_t i = 0; i < batch * heads * slots * size; ++i) {
    const int64_t slot = i / size % slots, b = i / (size * slots * heads);
    check(cache[i] == static_cast<T>(slot >= start[b] ? 255 : i % 251), "append", batch, slots, added);
  }
  check(gathering::GatherRows(table.as<Any>(), ib.as<S32>(), tb.as<Any>()).success(), "gather_rows", batch, slots, size);
  for (int64_t i = 0; i < batch * size; ++i) check(taken[i] == cache[index[i / size] * size + i % size], "gather_rows", batch, slots, size);
}

// A graph with an empty row, a long one and sources beyond the last offset; its transposed, and where each edge is there.
struct Graph {
  int64_t rows, nodes, edges;
  Exact<int32_t> offsets, sources, back_offsets, back_sources;
  Graph(int64_t rows, int64_t nodes, int64_t edges)
      : rows(rows), nodes(nodes), edges(edges), offsets(rows + 1), sources(edges), back_offsets(nodes + 1), back_sources(edges) {
    for (int64_t r = 0; r <= rows; ++r) offsets[r] = static_cast<int32_t>(r < 2 ? 0 : edges / 2 + (edges - edges / 2) * (r - 1) / std::max<int64_t>(rows - 1, 1));
    offsets[rows] = static_cast<int32_t>(edges);
    for (int64_t e = 0; e < edges; ++e) sources[e] = std::uniform_int_distribution<int>(0, nodes - 1)(generator);
    int64_t at = 0;
    for (int64_t n = 0; n < nodes; ++n) {
      back_offsets[n] = static_cast<int32_t>(at);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t e = offsets[r]; e < offsets[r + 1]; ++e)
          if (sources[e] == n) back_sources[at++] = static_cast<int32_t>(r);
    }
    back_offsets[nodes] = static_cast<int32_t>(at);
  }
};

template <class T>
void check_graph(int64_t rows, int64_t nodes, int64_t edges, int64_t heads, int64_t each) {
  Graph g(rows, nodes, edges);
  const int64_t features = heads * each;
  Exact<T> x(nodes * features), out(rows * features), dx(nodes * features);
  Exact<float> weights(edges * heads), dots(edges * heads), source(nodes * heads), target(rows * heads), most(rows * heads), total(rows * heads);
  Exact<float> facts(rows * 3 * heads), due(nodes * heads), due_edges(edges * heads), none(0);
  for (int64_t i = 0; i < x.count; ++i) x[i] = stored<T>(normal());
  for (Exact<float>* y : {&weights, &source, &target})
    for (int64_t i = 0; i < y->count; ++i) (*y)[i] = normal();
  const auto type = type_of<T>();
  const Buffer xb(type, x, {nodes, features}), ob(type, out, {rows, features}), offsets(XLA_FFI_DataType_S32, g.offsets, {rows + 1});
  const Buffer sources(XLA_FFI_DataType_S32, g.sources, {edges}), wb(XLA_FFI_DataType_F32, weights, {edges, heads}), nothing(XLA_FFI_DataType_F32, none, {0});
  const auto compare = [&](const char* what, const Exact<float>* w, const Exact<T>& found, int32_t reduce) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t f = 0; f < features; ++f) {
        const int64_t count = g.offsets[r + 1] - g.offsets[r];
        double sum = 0, size = 0, extreme = reduce == gather_reduce::MAX ? -INFINITY : INFINITY;
        for (int64_t e = g.offsets[r]; e < g.offsets[r + 1]; ++e) {
          const double message = (w == nullptr ? 1 : double(w->data[e * heads + f / each])) * worth(x[g.sources[e] * features + f]);
          sum += message, size += std::abs(message), extreme = reduce == gather_reduce::MAX ? std::max(extreme, message) : std::min(extreme, message);
        }
        if (reduce == gather_reduce::MEAN && count > 0) sum /= count, size /= count;
        if (reduce == gather_reduce::MAX || reduce == gather_reduce::MIN) sum = count == 0 ? 0 : extreme;
        const double bound = (count + 4) * 0x1p-24 * size + (sizeof(T) == 4 ? 0 : 0x1p-8) * std::abs(sum) + 1e-30;
        check(std::abs(worth(found.data[r * features + f]) - sum) <= bound, what, rows, edges, features);
      }
  };
  for (const int32_t reduce : {gather_reduce::SUM, gather_reduce::MEAN, gather_reduce::MAX, gather_reduce::MIN})
    for (const bool weighted : {false, true}) {
      const ffi::Error done = gather_reduce::GatherReduce(pool(), xb.as<Any>(), offsets.as<S32>(), sources.as<S32>(), (weighted ? wb : nothing).as<F32>(), ob.as<Any>(), reduce);
      check(done.success(), done.message().c_str(), rows, edges, features);
      compare("gather", weighted ? &weights : nullptr, out, reduce);
    }
  // The sum for each row is what its edges are multiplied with, and then what is due to the attention's result.
  const Buffer db(XLA_FFI_DataType_F32, dots, {edges, heads}), sb(XLA_FFI_DataType_F32, source, {nodes, heads}), tb(XLA_FFI_DataType_F32, target, {rows, heads});
  const Buffer mb(XLA_FFI_DataType_F32, most, {rows, heads}), lb(XLA_FFI_DataType_F32, total, {rows, heads}), fb(XLA_FFI_DataType_F32, facts, {rows, 3 * heads});
  check(gather_reduce::EdgeDot(pool(), xb.as<Any>(), ob.as<Any>(), offsets.as<S32>(), sources.as<S32>(), db.as<F32>()).success(), "dot", rows, edges, features);
  const auto row_of = [&](int64_t e) { return std::upper_bound(&g.offsets[0], &g.offsets[0] + rows + 1, int32_t(e)) - &g.offsets[0] - 1; };
  const auto dot = [&](int64_t row, int64_t node, int64_t h, double& size) {
    double sum = 0;
    for (int64_t f = h * each; f < (h + 1) * each; ++f) {
      const double product = double(worth(out[row * features + f])) * worth(x[node * features + f]);
      sum += product, size += std::abs(product);
    }
    return sum;
  };
  for (int64_t i = 0; i < edges * heads; ++i) {
    double size = 0;
    const double sum = dot(row_of(i / heads), g.sources[i / heads], i % heads, size);
    check(std::abs(dots[i] - sum) <= (each + 4) * 0x1p-24 * size + 1e-30, "dot", rows, edges, features);
  }
  const float slope = 0.2f;
  const auto score = [&](int64_t row, int64_t node, int64_t h) {
    const double sum = double(target[row * heads + h]) + source[node * heads + h];
    return sum > 0 ? sum : slope * sum;
  };
  const ffi::Error attended = gather_reduce::Attend(pool(), xb.as<Any>(), sb.as<F32>(), tb.as<F32>(), offsets.as<S32>(), sources.as<S32>(), ob.as<Any>(),
                                                    mb.as<F32>(), lb.as<F32>(), slope);
  check(attended.success(), attended.message().c_str(), rows, edges, features);
  for (int64_t i = 0; i < edges * heads; ++i) {
    const int64_t r = row_of(i / heads), h = i % heads;
    weights[i] = static_cast<float>(std::exp(score(r, g.sources[i / heads], h) - most[r * heads + h]) / total[r * heads + h]);
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t f = 0; f < features; ++f) {
      double sum = 0, size = 0;
      for (int64_t e = g.offsets[r]; e < g.offsets[r + 1]; ++e) {
        const double message = double(weights[e * heads + f / each]) * worth(x[g.sources[e] * features + f]);
        sum += message, size += std::abs(message);
      }
      check(std::abs(worth(out[r * features + f]) - sum) <= (sizeof(T) == 4 ? 1e-5 : 0x1p-7) * size + 1e-30, "attend", rows, edges, features);
    }
  // Backward: what is due to features and scores, from the transposed graph.
  for (int64_t i = 0; i < rows * heads; ++i) {
    const int64_t r = i / heads, h = i % heads;
    facts[(r * 3 + 0) * heads + h] = target[i], facts[(r * 3 + 1) * heads + h] = most[i] + std::log(total[i]), facts[(r * 3 + 2) * heads + h] = 0.5f;
  }
  const Buffer dxb(type, dx, {nodes, features}), dueb(XLA_FFI_DataType_F32, due, {nodes, heads}), deb(XLA_FFI_DataType_F32, due_edges, {edges, heads});
  const Buffer back_offsets(XLA_FFI_DataType_S32, g.back_offsets, {nodes + 1}), back_sources(XLA_FFI_DataType_S32, g.back_sources, {edges});
  const ffi::Error graded = gather_reduce::AttendGrad(pool(), ob.as<Any>(), xb.as<Any>(), sb.as<F32>(), fb.as<F32>(), back_offsets.as<S32>(),
                                                      back_sources.as<S32>(), dxb.as<Any>(), dueb.as<F32>(), deb.as<F32>(), slope);
  check(graded.success(), graded.message().c_str(), rows, edges, features);
  for (int64_t n = 0; n < nodes; ++n) {
    std::vector<double> sums(features), sizes(features), blame(heads), blame_sizes(heads);
    for (int64_t e = g.back_offsets[n]; e < g.back_offsets[n + 1]; ++e)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t r = g.back_sources[e];
        const double weight = std::exp(score(r, n, h) - most[r * heads + h]) / total[r * heads + h];
        double size = 0;
        const double product = dot(r, n, h, size), leaks = double(target[r * heads + h]) + source[n * heads + h] > 0 ? 1.0 : double(slope);
        const double expected = weight * (product - 0.5) * leaks;
        check(std::abs(due_edges[e * heads + h] - expected) <= 1e-5 * weight * (size + 1) + 1e-30, "blame", rows, edges, features);
        blame[h] += expected, blame_sizes[h] += weight * (size + 1);
        for (int64_t f = h * each; f < (h + 1) * each; ++f) {
          const double message = weight * worth(out[r * features + f]);
          sums[f] += message, sizes[f] += std::abs(message);
        }
      }
    for (int64_t h = 0; h < heads; ++h) check(std::abs(due[n * heads + h] - blame[h]) <= 1e-5 * blame_sizes[h] + 1e-30, "due", rows, edges, features);
    for (int64_t f = 0; f < features; ++f)
      check(std::abs(worth(dx[n * features + f]) - sums[f]) <= (sizeof(T) == 4 ? 1e-5 : 0x1p-7) * sizes[f] + 1e-30, "gradient", rows, edges, features);
  }
}

}  // namespace

int main() {
  const std::pair<int64_t, int64_t> shapes[] = {{1, 1}, {33, 17}, {64, 64}, {65, 130}, {31, 80}};
  for (const Weights format : {linear::FLOAT32, linear::BFLOAT16, EIGHT_BITS})
    for (int64_t rows = 1; rows <= 40; ++rows)
      for (int i = 0; i < 5; ++i) {
        if (i >= 2 && (rows + i) % 3 != 0) continue;  // the large ones, in turn
        const auto& [inputs, outputs] = shapes[i];
        check_linear(format, rows, inputs, outputs, false, false);
        check_linear(format, rows, inputs, outputs, true, false);
        check_best(format, rows, inputs, outputs);
      }
  for (int form = 0; form < blocks::FORMS; ++form)
    for (const int64_t rows : {1, 2, 7, 15, 24, 48})
      for (const auto& [inputs, outputs] : shapes) check_blocks(form, rows, inputs, outputs);
  for (const Weights format : {linear::FLOAT32, linear::BFLOAT16, EIGHT_BITS})
    for (const int64_t rows : {1, 2, 37})
      for (const bool gated : {false, true}) check_linear(format, rows, 129, 1001 / rows + 37, gated, true), join();
  for (const Weights format : {linear::FLOAT32, linear::BFLOAT16, EIGHT_BITS})
    for (const int64_t rows : {1, 19})
      for (const auto& [inputs, outputs] : shapes) check_narrow(format, rows, inputs, outputs), join();
  for (int way = 0; way < 4; ++way)
    for (const int64_t rows : {1, 16, 37})
      for (const auto& [inputs, outputs] : {shapes[0], shapes[1], shapes[3], std::pair<int64_t, int64_t>{401, 19}}) {
        for (const bool rounded : {false, true}) check_matmul<float>(rows, inputs, outputs, way & 1, way & 2, rounded), join();
        check_matmul<uint16_t>(rows, inputs, outputs, way & 1, way & 2, true), join();
      }
  for (const int64_t size : {1, 17, 64})
    for (const int64_t rows : {1, 5, 70}) {
      check_gate<float>(rows, size), check_gate<uint16_t>(rows, size), join();
      check_normalise<float>(rows, size), check_normalise<uint16_t>(rows, size), join();
    }
  for (const int64_t t : {1, 15, 61})
    for (const bool turned : {false, true}) {
      check_self_attention<float>(t, 1, 3, 16, turned), check_self_attention<float>(t, 2, 1, 48, turned), join();
      check_self_attention<uint16_t>(t, 1, 2, 64, turned), join();
    }
  for (const int64_t queries : {1, 3, 16})
    for (const int64_t size : {16, 48}) {
      check_attention<float>(queries, 2, size, 37, queries), join();
      check_attention<uint16_t>(queries, 3, size, 16, 0), join();
    }
  for (const int64_t window : {1, 5, 101})
    for (const auto& [positions, seen] : {std::pair<int64_t, int64_t>{1, 0}, {37, 0}, {16, 16}, {45, 7}}) {
      check_window<float>(window, positions, 2, 1, 48, seen), check_window<float>(window, positions, 1, 3, 16, seen), join();
      check_window<uint16_t>(window, positions, 2, 2, 64, seen), join();
    }
  for (const int64_t places : {1, 2, 37})
    for (const int64_t size : {1, 48}) check_put<float>(places, size), check_put<uint16_t>(places, size);
  for (const int64_t queries : {1, 5, 21})
    for (const int64_t size : {16, 48, 64}) {
      check_append<float>(queries, 1, 5, size, 37), join();
      check_append<uint16_t>(queries, 2, 2, size, 21), join();
      for (int64_t window : {0, 5, 20}) check_eight_bits<float>(queries, 2, 2, size, 3, window), check_eight_bits<uint16_t>(queries, 1, 3, size, 2, window), join();
    }
  for (const int64_t batch : {1, 5})
    for (const int64_t size : {1, 48}) check_moves<float>(batch, 2, 7, 4, size), check_moves<uint16_t>(batch, 1, 16, 16, size);
  for (const int64_t count : {1, 65536, 400000}) check_read(count), join();
  for (const int64_t pieces : {0, 1, 3}) check_dots(pieces), join();
  for (const auto& [rows, nodes, edges] : {std::array<int64_t, 3>{1, 1, 0}, {1, 3, 7}, {9, 5, 40}, {40, 30, 1500}})
    for (const auto& [heads, each] : {std::pair<int64_t, int64_t>{1, 1}, {1, 16}, {1, 33}, {3, 5}, {2, 24}, {1, 150}})
      check_graph<float>(rows, nodes, edges, heads, each), check_graph<uint16_t>(rows, nodes, edges, heads, each), join();
  for (const int64_t size : {1, 17, 64, 1001})
    for (const int64_t rows : {1, 5, 40}) check_rms_norm<float>(rows, size), check_rms_norm<uint16_t>(rows, size), join();
  std::printf("%s\n", native::isa_names[native::isa()]);
  return failures == 0 ? 0 : 1;
}
