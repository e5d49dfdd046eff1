// Copies rows into a table of any type, in place.

#include "../native.h"

namespace {

// A table row is as long as a written row; the table's number of dims does not matter.
ffi::Error ScatterRows(ffi::AnyBuffer table, ffi::Buffer<ffi::S32> index, ffi::AnyBuffer rows, ffi::Result<ffi::AnyBuffer> out) {
  const auto dims = rows.dimensions();
  if (dims.size() != 2 || rows.element_type() != table.element_type() || out->element_type() != table.element_type() ||
      out->element_count() != table.element_count() || static_cast<size_t>(dims[0]) != index.element_count() ||
      (dims[1] == 0 ? table.element_count() != 0 : table.element_count() % dims[1] != 0))
    return ffi::Error::InvalidArgument("tilewright_scatter_rows: shapes or types do not fit");
  const size_t row = dims[1] * ffi::ByteWidth(table.element_type());
  const int64_t places = dims[1] == 0 ? 0 : table.element_count() / dims[1];
  auto* to = static_cast<char*>(out->untyped_data());
  if (to != table.untyped_data()) std::memcpy(to, table.untyped_data(), table.size_bytes());
  for (size_t i = 0; i < index.element_count(); ++i) {
    const int64_t at = index.typed_data()[i];
    if (at >= 0 && at < places) std::memcpy(to + at * row, static_cast<const char*>(rows.untyped_data()) + i * row, row);
  }
  return ffi::Error::Success();
}

// Variant that also returns the previous rows; zeros for dropped rows.
ffi::Error SwapRows(ffi::AnyBuffer table, ffi::Buffer<ffi::S32> index, ffi::AnyBuffer rows, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> old) {
  const auto dims = rows.dimensions();
  if (dims.size() != 2 || static_cast<size_t>(dims[0]) != index.element_count() || old->element_type() != table.element_type() ||
      old->element_count() != rows.element_count() || (dims[1] == 0 ? table.element_count() != 0 : table.element_count() % dims[1] != 0))
    return ffi::Error::InvalidArgument("tilewright_swap_rows: shapes or types do not fit");
  const size_t row = dims[1] * ffi::ByteWidth(table.element_type());
  const int64_t places = dims[1] == 0 ? 0 : table.element_count() / dims[1];
  auto* to = static_cast<char*>(old->untyped_data());
  for (size_t i = 0; i < index.element_count(); ++i, to += row) {
    const int64_t at = index.typed_data()[i];
    if (at >= 0 && at < places) std::memcpy(to, static_cast<const char*>(table.untyped_data()) + at * row, row);
    else std::memset(to, 0, row);
  }
  return ScatterRows(table, index, rows, out);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightSwapRows, SwapRows,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightScatterRows, ScatterRows,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
