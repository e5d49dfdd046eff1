// Copies rows out of a table, whatever its type.

#include "../native.h"

namespace {

ffi::Error Take(ffi::AnyBuffer table, ffi::Buffer<ffi::S32> index, ffi::Result<ffi::AnyBuffer> out) {
  const auto dims = table.dimensions();
  if (dims.size() != 2 || dims[0] == 0 || out->element_type() != table.element_type() ||
      out->element_count() != index.element_count() * static_cast<size_t>(dims[1]))
    return ffi::Error::InvalidArgument("tilewright_take: shapes or types do not fit");
  const size_t row = dims[1] * ffi::ByteWidth(table.element_type());
  auto* to = static_cast<char*>(out->untyped_data());
  for (size_t i = 0; i < index.element_count(); ++i) {
    const int64_t from = std::clamp<int64_t>(index.typed_data()[i], 0, dims[0] - 1);  // as XLA's gather
    std::memcpy(to + i * row, static_cast<const char*>(table.untyped_data()) + from * row, row);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightTake, Take, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Ret<ffi::AnyBuffer>());

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
