// y = x @ W by oneDNN behind the same FFI call as the package's own kernel: x and y float32, W float32 or bfloat16 and packed once by oneDNN,
// work done by oneDNN's own threads (OpenMP). Only compare.py uses it.

#include <chrono>
#include <map>
#include <mutex>
#include <tuple>

#include "native.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace {

using dnnl::matmul;
using dnnl::memory;

const dnnl::engine& engine() {
  static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

struct Shape {
  int64_t rows, inputs, outputs;
  bool half;
};

memory::data_type type_of(bool half) { return half ? memory::data_type::bf16 : memory::data_type::f32; }

matmul::primitive_desc describe(const Shape& s, const memory::desc& weights) {
  const memory::desc x({s.rows, s.inputs}, type_of(s.half), memory::format_tag::ab);
  const memory::desc y({s.rows, s.outputs}, memory::data_type::f32, memory::format_tag::ab);
  return matmul::primitive_desc(engine(), x, weights, y);
}

memory::desc any_layout(const Shape& s) { return memory::desc({s.inputs, s.outputs}, type_of(s.half), memory::format_tag::any); }

// The layout that oneDNN wants for W when x has so many rows.
memory::desc layout(Shape s) { return describe(s, any_layout(s)).weights_desc(); }

struct Kept {
  matmul::primitive_desc description;
  matmul run;
};

// The primitive for `s.rows` rows over weights packed for `packed_for` rows; made once and kept.
const Kept& primitive(const Shape& s, int64_t packed_for) {
  static std::mutex guard;
  static std::map<std::tuple<int64_t, int64_t, int64_t, bool, int64_t>, Kept> all;
  const std::lock_guard<std::mutex> lock(guard);
  const auto key = std::make_tuple(s.rows, s.inputs, s.outputs, s.half, packed_for);
  const auto found = all.find(key);
  if (found != all.end()) return found->second;
  const auto description = describe(s, layout({packed_for, s.inputs, s.outputs, s.half}));
  return all.emplace(key, Kept{description, matmul(description)}).first->second;
}

__attribute__((target("avx512f,avx512bf16"))) void round_to_bf16(const float* x, uint16_t* out, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + 16 <= end; i += 16) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i)));
  const __mmask16 rest = static_cast<__mmask16>((1u << (end - i)) - 1);
  alignas(32) uint16_t last[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(last), (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(rest, x + i)));
  memcpy(out + i, last, 2 * (end - i));
}

ffi::Error Linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y, int64_t packed_for, bool half) {
  const Shape s{x.dimensions()[0], x.dimensions()[1], y->dimensions()[1], half};
  try {
    const Kept& kept = primitive(s, packed_for);
    void* input = x.untyped_data();
    static thread_local std::vector<uint16_t> rounded;
    if (half) {
      const int64_t count = s.rows * s.inputs;
      rounded.resize(count);
      uint16_t* out = rounded.data();
      native::share(pool, count, 64, count >= (1 << 16), [&](int64_t begin, int64_t end) { round_to_bf16(x.typed_data(), out, begin, end); });
      input = out;
    }
    dnnl::stream stream(engine());
    kept.run.execute(stream, {{DNNL_ARG_SRC, memory(kept.description.src_desc(), engine(), input)},
                              {DNNL_ARG_WEIGHTS, memory(kept.description.weights_desc(), engine(), w.untyped_data())},
                              {DNNL_ARG_DST, memory(kept.description.dst_desc(), engine(), y->untyped_data())}});
    stream.wait();
  } catch (const dnnl::error& error) {
    return ffi::Error::Internal(std::string("oneDNN: ") + error.what());
  }
  return ffi::Error::Success();
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(OnednnLinear, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("packed_for")
                                  .Attr<bool>("half"));

extern "C" {

// "3.7.2, isa 0x...": the library's version and the instruction set that it takes (dnnl_cpu_isa_t).
void OnednnVersion(char* out, int64_t size) {
  const dnnl_version_t* v = dnnl_version();
  snprintf(out, size, "%d.%d.%d, isa 0x%x", v->major, v->minor, v->patch, static_cast<int>(dnnl_get_effective_cpu_isa()));
}

int64_t OnednnPackedBytes(int64_t rows, int64_t inputs, int64_t outputs, bool half) {
  return static_cast<int64_t>(layout({rows, inputs, outputs, half}).get_size());
}

bool OnednnSameLayout(int64_t rows, int64_t other, int64_t inputs, int64_t outputs, bool half) {
  return layout({rows, inputs, outputs, half}) == layout({other, inputs, outputs, half});
}

// Reorders a plain [inputs, outputs] matrix into the layout for `rows` rows.
void OnednnPack(int64_t rows, int64_t inputs, int64_t outputs, bool half, void* plain, void* packed) {
  dnnl::stream stream(engine());
  memory from({{inputs, outputs}, type_of(half), memory::format_tag::ab}, engine(), plain);
  memory to(layout({rows, inputs, outputs, half}), engine(), packed);
  dnnl::reorder(from, to).execute(stream, from, to);
  stream.wait();
}

// The implementation's name and the blocks of its layout, innermost last, a = inputs, b = outputs: "brg:avx512_core_bf16 8a64b2a".
void OnednnDescribe(int64_t rows, int64_t packed_for, int64_t inputs, int64_t outputs, bool half, char* out, int64_t size) {
  const auto& description = primitive({rows, inputs, outputs, half}, packed_for).description;
  std::string blocks;
  const auto desc = description.weights_desc();
  const auto sizes = desc.get_inner_blks();
  const auto dims = desc.get_inner_idxs();
  for (size_t i = 0; i < sizes.size(); ++i) blocks += std::to_string(sizes[i]) + static_cast<char>('a' + dims[i]);
  snprintf(out, size, "%s %s", description.impl_info_str(), blocks.c_str());
}

// Seconds to make a primitive: the first time (it is generated) and with oneDNN's own primitive cache.
void OnednnSetup(int64_t rows, int64_t inputs, int64_t outputs, bool half, double* first, double* again) {
  const Shape s{rows, inputs, outputs, half};
  const int repeats = 200;
  for (int i = 0; i <= repeats; ++i) {
    if (i == 1) *again = seconds();
    const double start = seconds();
    const matmul made(describe(s, any_layout(s)));
    if (i == 0) *first = seconds() - start;
  }
  *again = (seconds() - *again) / repeats;
}
}
