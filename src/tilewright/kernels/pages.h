// Layout of a KV cache: contiguous rows, or pages assigned to rows by a page table.

#pragma once

#include "native.h"

namespace native {

// Keys or values [pages, heads, slots, d].
struct Cache {
  int64_t heads, slots, pages;
  const int32_t* table;  // page table [batch, width]: each row's pages in order, negative where it has none; null: row b has page b alone
  int64_t width;

  Cache() = default;
  template <class Dimensions>
  Cache(const Dimensions& dims, const ffi::Buffer<ffi::S32>* given)
      : heads(dims[1]), slots(dims[2]), pages(dims[0]), table(given == nullptr ? nullptr : given->typed_data()),
        width(given == nullptr ? 1 : given->dimensions()[1]) {}

  int64_t capacity() const { return width * slots; }

  // Index of row b's entry for the first head, in entries from the start of memory; head h follows at h * slots.
  int64_t at(int64_t b, int64_t entry) const {
    if (table == nullptr) return b * heads * slots + entry;
    return table[b * width + entry / slots] * heads * slots + entry % slots;
  }

  // Describes an invalid range of entries [first, end) of row b; empty if the range is valid.
  std::string complaint(int64_t b, int64_t first, int64_t end) const {
    if (first < 0 || end > capacity())
      return std::to_string(end - first) + " entries from " + std::to_string(first) + " on do not fit a cache of " + std::to_string(capacity());
    for (int64_t i = first / std::max<int64_t>(slots, 1); table != nullptr && i * slots < end; ++i) {
      const int64_t page = table[b * width + i];
      if (page < 0) return "row " + std::to_string(b) + " has no page for its entry " + std::to_string(std::max(first, i * slots));
      if (page >= pages) return "row " + std::to_string(b) + " names page " + std::to_string(page) + " of " + std::to_string(pages);
    }
    return "";
  }

  // Calls run(entry, count, place) for each contiguous run of row b's entries [first, end): `count` entries from `entry` on, the first at `place`
  // (see `at`).
  template <class Run>
  inline __attribute__((always_inline)) void each_run(int64_t b, int64_t first, int64_t end, const Run& run) const {
    for (int64_t entry = first; entry < end;) {
      const int64_t count = std::min(slots - entry % slots, end - entry);
      run(entry, count, at(b, entry));
      entry += count;
    }
  }
};

// Returns the page table [batch, width]; null for a contiguous cache, whose operand is an empty list.
inline const ffi::Buffer<ffi::S32>* table_of(const ffi::Buffer<ffi::S32>& given) { return given.dimensions().size() == 2 ? &given : nullptr; }

// Returns whether a page table, if given, has this number of rows.
inline bool fits_rows(const ffi::Buffer<ffi::S32>* table, int64_t batch) {
  return table == nullptr || (table->dimensions().size() == 2 && table->dimensions()[0] == batch);
}

}  // namespace native
