// Where a cache's entries lie: in one block of memory for each row of a batch, or in pages that a table gives to the rows.

#pragma once

#include "native.h"

namespace native {

// Keys or values [pages, heads, slots, d].
struct Cache {
  int64_t heads, slots, pages;
  const int32_t* table;  // [batch, width]: each row's pages in their order, negative where it has none; null: row b has page b and no other
  int64_t width;

  Cache() = default;
  template <class Dimensions>
  Cache(const Dimensions& dims, const ffi::Buffer<ffi::S32>* given)
      : heads(dims[1]), slots(dims[2]), pages(dims[0]), table(given == nullptr ? nullptr : given->typed_data()),
        width(given == nullptr ? 1 : given->dimensions()[1]) {}

  int64_t capacity() const { return width * slots; }

  // Row b's entry, of the first head, counted in entries from the beginning of the memory; head h's is h * slots further on.
  int64_t at(int64_t b, int64_t entry) const {
    if (table == nullptr) return b * heads * slots + entry;
    return table[b * width + entry / slots] * heads * slots + entry % slots;
  }

  // What is wrong with row b's entries [first, end); nothing if it is empty.
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

  // Calls run(entry, count, place) for each run of row b's entries [first, end) that follow one another in memory: `count` of them from `entry`
  // on, whose first lies at `place` (see `at`).
  template <class Run>
  inline __attribute__((always_inline)) void each_run(int64_t b, int64_t first, int64_t end, const Run& run) const {
    for (int64_t entry = first; entry < end;) {
      const int64_t count = std::min(slots - entry % slots, end - entry);
      run(entry, count, at(b, entry));
      entry += count;
    }
  }
};

// Whether a table [batch, width] gives pages to so many rows, if there is one.
inline bool fits_rows(const ffi::Buffer<ffi::S32>* table, int64_t batch) {
  return table == nullptr || (table->dimensions().size() == 2 && table->dimensions()[0] == batch);
}

}  // namespace native
