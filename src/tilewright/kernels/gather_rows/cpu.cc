// Copies rows out of a table, whatever its type; or out of one whose transpose is packed in blocks for products (see ../linear/blocks.inc).

#include "../native.h"

#include <cmath>

namespace {

ffi::Error GatherRows(ffi::AnyBuffer table, ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> out) {
  const auto dims = table.dimensions();
  if (dims.size() != 2 || dims[0] == 0 || out->element_type() != table.element_type() ||
      out->element_count() != index.element_count() * static_cast<size_t>(dims[1]))
    return ffi::Error::InvalidArgument("tilewright_gather_rows: shapes or types do not fit");
  const size_t row = dims[1] * ffi::ByteWidth(table.element_type());
  auto* to = static_cast<char*>(out->untyped_data());
  for (size_t i = 0; i < index.element_count(); ++i) {
    const int64_t from = std::clamp<int64_t>(index.typed_data()[i], 0, dims[0] - 1);  // as XLA's gather
    std::memcpy(to + i * row, static_cast<const char*>(table.untyped_data()) + from * row, row);
  }
  return ffi::Error::Success();
}

// A finite number in half precision.
float from_half(const uint8_t* x) {
  uint16_t bits;
  std::memcpy(&bits, x, 2);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24) : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

void store(float value, float* out) { *out = value; }
void store(float value, uint16_t* out) {  // the nearest bfloat16 of a finite number
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  *out = static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// One output's weights: those of a lane of a panel. Pairs of blocks take `size` bytes, which tell the format.
template <class T>
void read_lane(const uint8_t* panel, int64_t lane, int64_t size, int64_t inputs, T* out) {
  const bool eight = size == 1088, minimum = size == 640;
  const int64_t halves = minimum ? 128 : 64, integers = (size - halves) / 2;
  for (int64_t k = 0; k < inputs; ++k) {
    const int64_t block = k / 32, half = block % 2, at = k % (eight ? 32 : 16);
    const uint8_t* pair = panel + block / 2 * size;
    const uint8_t byte = pair[halves + half * integers + at / 4 * 64 + lane * 4 + at % 4];
    const int whole = eight ? byte - 128 : (k % 32 < 16 ? byte & 15 : byte >> 4) - (minimum ? 0 : 8);
    const float scaled = static_cast<float>(whole) * from_half(pair + (half * 16 + lane) * 2);
    store(minimum ? scaled + from_half(pair + 64 + (half * 16 + lane) * 2) : scaled, out + k);
  }
}

ffi::Error GatherBlockRows(ffi::Buffer<ffi::U8> panels, ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> out, int64_t rows) {
  const auto dims = panels.dimensions(), shape = out->dimensions();
  if (dims.size() != 3 || shape.size() == 0 || rows < 1 || rows > dims[0] * 16 || (dims[2] != 576 && dims[2] != 640 && dims[2] != 1088) ||
      shape.back() > dims[1] * 64 || out->element_count() != index.element_count() * static_cast<size_t>(shape.back()) ||
      (out->element_type() != ffi::F32 && out->element_type() != ffi::BF16))
    return ffi::Error::InvalidArgument("tilewright_gather_block_rows: shapes or types do not fit");
  for (size_t i = 0; i < index.element_count(); ++i) {
    const int64_t from = std::clamp<int64_t>(index.typed_data()[i], 0, rows - 1), at = i * shape.back();
    const uint8_t* panel = panels.typed_data() + from / 16 * dims[1] * dims[2];
    if (out->element_type() == ffi::F32) read_lane(panel, from % 16, dims[2], shape.back(), static_cast<float*>(out->untyped_data()) + at);
    else read_lane(panel, from % 16, dims[2], shape.back(), static_cast<uint16_t*>(out->untyped_data()) + at);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightGatherRows, GatherRows, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightGatherBlockRows, GatherBlockRows,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::U8>>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>().Attr<int64_t>("rows"));

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
