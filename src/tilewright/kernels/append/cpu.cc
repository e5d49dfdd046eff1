// Copies each row's new entries to its own place in a cache, which is written where it is.

#include "../native.h"

namespace {

ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument("tilewright_append: " + what); }

ffi::Error Append(ffi::AnyBuffer cache, ffi::AnyBuffer added, ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::S32> count, ffi::Result<ffi::AnyBuffer> out) {
  const auto held = cache.dimensions(), fresh = added.dimensions();
  if (held.size() != 4 || fresh.size() != 4 || fresh[0] != held[0] || fresh[1] != held[1] || fresh[3] != held[3] ||
      added.element_type() != cache.element_type() || start.element_count() != static_cast<size_t>(held[0]) ||
      count.element_count() != static_cast<size_t>(held[0]))
    return wrong("shapes or types do not fit");
  if (out->untyped_data() != cache.untyped_data()) return wrong("the cache is not written in place");
  const int64_t heads = held[1], slots = held[2], t = fresh[2], entry = held[3] * ffi::ByteWidth(cache.element_type());
  for (int64_t b = 0; b < held[0]; ++b) {
    const int64_t first = start.typed_data()[b], kept = count.typed_data()[b];
    if (kept < 0 || kept > t) return wrong("a count is out of range: " + std::to_string(kept));
    if (kept == 0) continue;
    if (first < 0 || first + kept > slots)
      return wrong(std::to_string(kept) + " entries from " + std::to_string(first) + " on do not fit a cache of " + std::to_string(slots));
    for (int64_t h = b * heads; h < (b + 1) * heads; ++h)
      std::memcpy(static_cast<char*>(out->untyped_data()) + (h * slots + first) * entry, static_cast<const char*>(added.untyped_data()) + h * t * entry,
                  kept * entry);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightAppend, Append,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
