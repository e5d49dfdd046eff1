// Copies each row's new entries to their positions in a contiguous or paged cache, in place.

#include "../native.h"
#include "../pages.h"

namespace {

ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument("tilewright_write: " + what); }

ffi::Error Write(ffi::AnyBuffer cache, ffi::AnyBuffer added, ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::S32> count, ffi::Buffer<ffi::S32> pages,
                 ffi::Result<ffi::AnyBuffer> out) {
  const ffi::Buffer<ffi::S32>* table = native::table_of(pages);
  const auto held = cache.dimensions(), fresh = added.dimensions();
  if (held.size() != 4 || fresh.size() != 4 || fresh[1] != held[1] || fresh[3] != held[3] || (table == nullptr && fresh[0] != held[0]) ||
      !native::fits_rows(table, fresh[0]) || added.element_type() != cache.element_type() ||
      start.element_count() != static_cast<size_t>(fresh[0]) || count.element_count() != static_cast<size_t>(fresh[0]))
    return wrong("shapes or types do not fit");
  if (out->untyped_data() != cache.untyped_data()) return wrong("the cache is not written in place");
  const native::Cache places(held, table);
  const int64_t t = fresh[2], size = held[3] * ffi::ByteWidth(cache.element_type());
  for (int64_t b = 0; b < fresh[0]; ++b) {
    const int64_t first = start.typed_data()[b], kept = count.typed_data()[b];
    if (kept < 0 || kept > t) return wrong("a count is out of range: " + std::to_string(kept));
    if (kept == 0) continue;
    if (const std::string what = places.complaint(b, first, first + kept); !what.empty()) return wrong(what);
    places.each_run(b, first, first + kept, [&](int64_t entry, int64_t run, int64_t place) {
      for (int64_t h = 0; h < places.heads; ++h)
        std::memcpy(static_cast<char*>(out->untyped_data()) + (place + h * places.slots) * size,
                    static_cast<const char*>(added.untyped_data()) + ((b * places.heads + h) * t + entry - first) * size, run * size);
    });
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(TilewrightWrite, Write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
