// Sampling of neighbours on the host; reference.py says what the functions compute, with the same results.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../isa.h"

namespace {

constexpr uint64_t golden = 0x9E3779B97F4A7C15u;

uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

int64_t below(uint64_t bits, uint64_t bound) {
  return static_cast<int64_t>(((bits >> 32) * bound + (((bits & 0xFFFFFFFFu) * bound) >> 32)) >> 32);
}

// Rows in flight: their nodes' offsets, then the drawn sources, are on the way to the cache.
constexpr int64_t ahead = 32;

}  // namespace

extern "C" void TilewrightDraw(const int32_t* nodes, int64_t rows, const int64_t* offsets, const int32_t* sources, int64_t fan_out, uint64_t key,
                               const int64_t* starts, int64_t* edges, int32_t* near) {
  for (int64_t begin = 0; begin < rows; begin += ahead) {
    const int64_t end = std::min(rows, begin + ahead);
    for (int64_t row = end; row < std::min(rows, end + ahead); ++row)
      if (nodes[row] >= 0) __builtin_prefetch(offsets + nodes[row]);
    for (int64_t row = begin; row < end; ++row) {
      if (nodes[row] < 0) continue;
      const int64_t first = offsets[nodes[row]], count = offsets[nodes[row] + 1] - first;
      int64_t* const to = edges + starts[row];
      const uint64_t row_key = mixed(key + golden * static_cast<uint64_t>(row + 1));
      for (int64_t step = 0; step < std::min(count, fan_out); ++step) {
        int64_t chosen = step;
        if (count > fan_out) {
          const int64_t top = count - fan_out + step;
          chosen = below(mixed(row_key + golden * static_cast<uint64_t>(step + 1)), static_cast<uint64_t>(top + 1));
          if (std::find(to, to + step, first + chosen) != to + step) chosen = top;
        }
        to[step] = first + chosen;
        __builtin_prefetch(sources + to[step]);
      }
    }
    for (int64_t row = begin; row < end; ++row) {
      if (nodes[row] < 0) continue;
      const int64_t count = std::min(offsets[nodes[row] + 1] - offsets[nodes[row]], fan_out);
      for (int64_t slot = starts[row]; slot < starts[row] + count; ++slot) near[slot] = sources[edges[slot]];
    }
  }
}

// Returns the number of added nodes.
extern "C" int64_t TilewrightRelabel(const int32_t* nodes, int64_t rows, const int32_t* near, int64_t count, int32_t* numbers, int32_t* added) {
  int bits = 4;
  while ((int64_t{1} << bits) < 2 * (rows + count)) ++bits;
  struct Entry {
    int32_t node, row;
  };
  std::vector<Entry> table(size_t{1} << bits, Entry{-1, 0});
  const size_t mask = table.size() - 1;
  const auto find = [&](int32_t node) -> Entry& {
    size_t place = static_cast<size_t>((static_cast<uint64_t>(node) * golden) >> (64 - bits));
    while (table[place].node != node && table[place].node >= 0) place = (place + 1) & mask;
    return table[place];
  };
  for (int64_t row = 0; row < rows; ++row) {
    if (nodes[row] < 0) continue;
    Entry& entry = find(nodes[row]);
    if (entry.node < 0) entry = {nodes[row], static_cast<int32_t>(row)};
  }
  int64_t more = 0;
  for (int64_t i = 0; i < count; ++i) {
    Entry& entry = find(near[i]);
    if (entry.node < 0) {
      entry = {near[i], static_cast<int32_t>(rows + more)};
      added[more++] = near[i];
    }
    numbers[i] = entry.row;
  }
  return more;
}

extern "C" void TilewrightGroup(const int32_t* keys, int64_t count, int64_t groups, int64_t* offsets, int64_t* order) {
  std::fill(offsets, offsets + groups + 1, 0);
  for (int64_t i = 0; i < count; ++i) ++offsets[keys[i] + 1];
  for (int64_t g = 0; g < groups; ++g) offsets[g + 1] += offsets[g];
  for (int64_t i = 0; i < count; ++i) order[offsets[keys[i]]++] = i;
  for (int64_t g = groups; g > 0; --g) offsets[g] = offsets[g - 1];  // each offset has become the next group's
  offsets[0] = 0;
}

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
