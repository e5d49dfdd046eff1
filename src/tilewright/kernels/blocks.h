// Memory layout of weights in blocks of 32 inputs, for each format: those of llama.cpp's files, and 4 bits with zero points. linear/blocks.py packs
// them, linear/blocks.inc multiplies them.
//
// A panel has 16 outputs, and consecutive blocks form a group (super-block). A group begins with its head, with values of the 16 outputs side by
// side: scales [n][16] in half precision, minima likewise, steps [n][16] and lows [n][16] as int8, padded to a multiple of 64 bytes. The integers of
// each block follow, in `bits` registers of 64 bytes, in which four bytes of each output are adjacent. With 8 bits, register g has inputs 4 g to 4 g
// + 3. With fewer bits, the low nibbles of the first four registers have the low four bits of inputs 0 to 15, the high nibbles those of inputs 16 to
// 31; higher bits follow, those of inputs 4 g to 4 g + 3 at bit (bits - 4) g of the bytes of these registers.
//
// A weight is (integer - offset) * scale + minimum. If present, steps multiply scales and lows multiply minima; without minima, lows multiply the
// scale. A single scale or minimum of a group applies to all its blocks; two steps per block apply to 16 inputs each.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace blocks {

struct Form {
  int bits, group;                  // bits of an integer; blocks per group
  int scales, minima, steps, lows;  // numbers per group
  constexpr bool minimum() const { return minima + lows > 0; }
  constexpr int offset() const { return minimum() ? 0 : 1 << (bits - 1); }
  constexpr int parts() const { return steps > group ? steps / group : 1; }  // scales per block
  constexpr int64_t minima_at() const { return 32 * scales; }                // bytes
  constexpr int64_t steps_at() const { return 32 * (scales + minima); }
  constexpr int64_t lows_at() const { return steps_at() + 16 * steps; }
  constexpr int64_t head() const { return (lows_at() + 16 * lows + 63) / 64 * 64; }
  constexpr int64_t integers() const { return 64 * bits; }  // bytes per block
  constexpr int64_t size() const { return head() + group * integers(); }
  constexpr int64_t inputs() const { return 32 * group; }
};

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, Q4_Z, FORMS };
constexpr Form forms[FORMS] = {
    {4, 2, 2, 0, 0, 0}, {4, 2, 2, 2, 0, 0}, {5, 2, 2, 0, 0, 0},  {5, 2, 2, 2, 0, 0}, {8, 2, 2, 0, 0, 0},
    {4, 8, 1, 1, 8, 8}, {5, 8, 1, 1, 8, 8}, {6, 8, 1, 0, 16, 0}, {4, 4, 4, 0, 0, 4},
};

// Returns the format whose groups have this number of bytes; FORMS if none does.
inline int form_of(int64_t size) {
  int form = 0;
  while (form < FORMS && forms[form].size() != size) ++form;
  return form;
}

// Converts a finite half-precision number.
inline float from_half(const uint8_t* x) {
  uint16_t bits;
  std::memcpy(&bits, x, 2);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24) : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

// Dequantisation of one weight: (integer - offset), scale and minimum.
struct Weight {
  int whole;
  float scale, minimum;
};
inline Weight weight_at(const Form& form, const uint8_t* panel, int64_t lane, int64_t input) {
  const int64_t block = input / 32, index = block % form.group, i = input % 32, g = i / 4;
  const uint8_t* head = panel + block / form.group * form.size();
  const uint8_t* own = head + form.head() + index * form.integers() + lane * 4 + i % 4;
  int unit = own[form.bits == 8 ? g * 64 : g % 4 * 64];
  if (form.bits < 8) {
    const int above = form.bits - 4;
    unit = i < 16 ? unit & 15 : unit >> 4;
    if (above > 0) unit |= (own[256 + g * above / 8 * 64] >> g * above % 8 & ((1 << above) - 1)) << 4;
  }
  const auto half = [&](int64_t at, int count) { return from_half(head + at + ((count == 1 ? 0 : index) * 16 + lane) * 2); };
  const auto byte = [&](int64_t at, int64_t n) { return static_cast<float>(static_cast<int8_t>(head[at + n * 16 + lane])); };
  const float scale = half(0, form.scales);
  float minimum = form.minima > 0 ? half(form.minima_at(), form.minima) : form.lows > 0 ? scale : 0.0f;
  if (form.lows > 0) minimum *= byte(form.lows_at(), index);
  return {unit - form.offset(), form.steps > 0 ? scale * byte(form.steps_at(), index * form.parts() + i * form.parts() / 32) : scale, minimum};
}

}  // namespace blocks
