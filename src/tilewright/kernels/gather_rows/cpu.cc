// Copies rows out of a table of any type, or out of a packed block-quantised table (see ../blocks.h).

#include "../blocks.h"
#include "../native.h"

namespace {

ffi::Error GatherRows(ffi::AnyBuffer table, ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> out) {
  const auto dims = table.dimensions();
  if (dims.size() != 2 || dims[0] == 0 || out->element_type() != table.element_type() ||
      out->element_count() != index.element_count() * static_cast<size_t>(dims[1]))
    return ffi::Error::InvalidArgument("tilewright_gather_rows: shapes or types do not fit");
  const size_t row = dims[1] * ffi::ByteWidth(table.element_type());
  auto* to = static_cast<char*>(out->untyped_data());
  for (size_t i = 0; i < index.element_count(); ++i) {
    const int64_t from = std::clamp<int64_t>(index.typed_data()[i], 0, dims[0] - 1);  // clamps like XLA's gather
    std::memcpy(to + i * row, static_cast<const char*>(table.untyped_data()) + from * row, row);
  }
  return ffi::Error::Success();
}

void store(float value, float* out) { *out = value; }
void store(float value, uint16_t* out) {  // rounds a finite number to the nearest bfloat16
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  *out = static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

template <class T>
void read_lane(const blocks::Form& form, const uint8_t* panel, int64_t lane, int64_t inputs, T* out) {
  for (int64_t k = 0; k < inputs; ++k) {
    const auto [whole, scale, minimum] = blocks::weight_at(form, panel, lane, k);
    const float scaled = static_cast<float>(whole) * scale;
    store(form.minimum() ? scaled + minimum : scaled, out + k);
  }
}

ffi::Error GatherBlockRows(ffi::Buffer<ffi::U8> panels, ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> out, int64_t rows) {
  const auto dims = panels.dimensions(), shape = out->dimensions();
  const int which = dims.size() == 3 ? blocks::form_of(dims[2]) : blocks::FORMS;
  if (which == blocks::FORMS || shape.size() == 0 || rows < 1 || rows > dims[0] * 16 || shape.back() > dims[1] * blocks::forms[which].inputs() ||
      out->element_count() != index.element_count() * static_cast<size_t>(shape.back()) ||
      (out->element_type() != ffi::F32 && out->element_type() != ffi::BF16))
    return ffi::Error::InvalidArgument("tilewright_gather_block_rows: shapes or types do not fit");
  const blocks::Form& form = blocks::forms[which];
  const int64_t bytes = shape.back() * ffi::ByteWidth(out->element_type());
  auto* to = static_cast<char*>(out->untyped_data());
  for (size_t i = 0; i < index.element_count(); ++i) {
    if (i > 0 && index.typed_data()[i] == index.typed_data()[i - 1]) {  // repeated rows, such as the mask tokens of a drafter's block
      std::memcpy(to + i * bytes, to + (i - 1) * bytes, bytes);
      continue;
    }
    const int64_t from = std::clamp<int64_t>(index.typed_data()[i], 0, rows - 1), at = i * shape.back();
    const uint8_t* panel = panels.typed_data() + from / 16 * dims[1] * dims[2];
    if (out->element_type() == ffi::F32) read_lane(form, panel, from % 16, shape.back(), static_cast<float*>(out->untyped_data()) + at);
    else read_lane(form, panel, from % 16, shape.back(), static_cast<uint16_t*>(out->untyped_data()) + at);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightGatherRows, GatherRows, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightGatherBlockRows, GatherBlockRows,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::U8>>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>().Attr<int64_t>("rows"));

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
