// Indices of a mask's true elements, in order.

#include "../native.h"

namespace {

ffi::Error Nonzero(ffi::Buffer<ffi::PRED> mask, ffi::ResultBuffer<ffi::S32> index, ffi::ResultBuffer<ffi::S32> count) {
  if (index->element_count() != mask.element_count() || count->element_count() != 1)
    return ffi::Error::InvalidArgument("tilewright_nonzero: shapes do not fit");
  int32_t* to = index->typed_data();
  int32_t found = 0;
  for (size_t i = 0; i < mask.element_count(); ++i)
    if (mask.typed_data()[i]) to[found++] = static_cast<int32_t>(i);
  std::fill(to + found, to + mask.element_count(), 0);
  *count->typed_data() = found;
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightNonzero, Nonzero,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::PRED>>().Ret<ffi::Buffer<ffi::S32>>().Ret<ffi::Buffer<ffi::S32>>());

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
