// How weights in blocks of 32 inputs lie in memory, in each form: those of llama.cpp's files, and 4 bits with a zero point. linear/blocks.py
// packs them, linear/blocks.inc multiplies them.
//
// A panel has 16 outputs, and in it some blocks lie together as a group. A group begins with its head, for each of the 16 outputs side by
// side: scales [n][16] in half precision, minima likewise, then steps [n][16] and lows [n][16] of int8, and what is missing to a multiple of
// 64 bytes. The integers of each block follow, `bits` registers of 64 bytes, in which four bytes of each output lie side by side. 8 bits:
// register g has inputs 4 g to 4 g + 3. Fewer: the low halves of the first four registers have the low four bits of inputs 0 to 15, the high
// halves those of 16 to 31; the bits above follow, those of inputs 4 g to 4 g + 3 at bit (bits - 4) g of the bytes of these registers.
//
// A weight is (integer - offset) * scale + minimum. A scale is multiplied by its step and a minimum by its low, where there are some; without
// minima, lows are times the scale. One scale or minimum of a group serves all of its blocks; two steps of a block serve 16 inputs each.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace blocks {

struct Form {
  int bits, group;                  // of an integer; blocks that lie together
  int scales, minima, steps, lows;  // of a group
  constexpr bool minimum() const { return minima + lows > 0; }
  constexpr int offset() const { return minimum() ? 0 : 1 << (bits - 1); }
  constexpr int parts() const { return steps > group ? steps / group : 1; }  // scales of a block
  constexpr int64_t minima_at() const { return 32 * scales; }                // bytes
  constexpr int64_t steps_at() const { return 32 * (scales + minima); }
  constexpr int64_t lows_at() const { return steps_at() + 16 * steps; }
  constexpr int64_t head() const { return (lows_at() + 16 * lows + 63) / 64 * 64; }
  constexpr int64_t integers() const { return 64 * bits; }  // of a block
  constexpr int64_t size() const { return head() + group * integers(); }
  constexpr int64_t inputs() const { return 32 * group; }
};

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, Q4_Z, FORMS };
constexpr Form forms[FORMS] = {
    {4, 2, 2, 0, 0, 0}, {4, 2, 2, 2, 0, 0}, {5, 2, 2, 0, 0, 0},  {5, 2, 2, 2, 0, 0}, {8, 2, 2, 0, 0, 0},
    {4, 8, 1, 1, 8, 8}, {5, 8, 1, 1, 8, 8}, {6, 8, 1, 0, 16, 0}, {4, 4, 4, 0, 0, 4},
};

// Which form has groups of so many bytes; FORMS if none does.
inline int form_of(int64_t size) {
  int form = 0;
  while (form < FORMS && forms[form].size() != size) ++form;
  return form;
}

// A finite number in half precision.
inline float from_half(const uint8_t* x) {
  uint16_t bits;
  std::memcpy(&bits, x, 2);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24) : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

// What a lane of a panel has for one input.
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
