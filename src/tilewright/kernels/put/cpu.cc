// Copies rows into a table, in place, whatever its type.

#include "../native.h"

namespace {

ffi::Error Put(ffi::AnyBuffer table, ffi::Buffer<ffi::S32> index, ffi::AnyBuffer rows, ffi::Result<ffi::AnyBuffer> out) {
  const auto dims = table.dimensions();
  if (dims.size() != 2 || rows.element_type() != table.element_type() || out->element_type() != table.element_type() ||
      out->element_count() != table.element_count() || rows.element_count() != index.element_count() * static_cast<size_t>(dims[1]))
    return ffi::Error::InvalidArgument("tilewright_put: shapes or types do not fit");
  const size_t row = dims[1] * ffi::ByteWidth(table.element_type());
  auto* to = static_cast<char*>(out->untyped_data());
  if (to != table.untyped_data()) std::memcpy(to, table.untyped_data(), table.size_bytes());
  for (size_t i = 0; i < index.element_count(); ++i) {
    const int64_t at = index.typed_data()[i];
    if (at >= 0 && at < dims[0]) std::memcpy(to + at * row, static_cast<const char*>(rows.untyped_data()) + i * row, row);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightPut, Put,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
