// Stands in for the CPU's tile unit where there is none: what Intel's manual (volume 2: LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS,
// TDPBSSD, TDPBSUD) says that the instructions do, one number at a time. Included by tiles.inc instead of the instructions.
//
// It shows that tiles are configured, addressed and put together as the manual asks. It proves nothing about speed, about the operating
// system's consent, or about a chip that departs from its manual.

struct Tiles {
  struct State {
    uint8_t rows[8] = {};
    uint16_t bytes[8] = {};
    alignas(64) uint8_t data[8][16][64];
    bool configured = false;
  };

  static State& state() {
    static thread_local State here;
    return here;
  }

  static void need(bool holds) {
    if (!holds) std::abort();  // the instruction would raise #UD or #GP
  }

  static void configure(const void* layout) {
    const auto* bytes = static_cast<const uint8_t*>(layout);
    need(bytes[0] == 1 && bytes[1] == 0);
    for (int i = 2; i < 16; ++i) need(bytes[i] == 0);
    for (int t = 0; t < 16; ++t) {
      uint16_t width;
      memcpy(&width, bytes + 16 + 2 * t, 2);
      if (t >= 8) {
        need(width == 0 && bytes[48 + t] == 0);
        continue;
      }
      need(width <= 64 && bytes[48 + t] <= 16 && (width == 0) == (bytes[48 + t] == 0));
      state().bytes[t] = width;
      state().rows[t] = bytes[48 + t];
    }
    state().configured = true;
    memset(state().data, 0, sizeof state().data);
  }

  static void release() { state().configured = false; }

  template <int T> static void zero() {
    need(state().configured && state().rows[T] > 0);
    memset(state().data[T], 0, sizeof state().data[T]);
  }

  template <int T> static void load(const void* from, int64_t stride) {
    zero<T>();
    for (int r = 0; r < state().rows[T]; ++r) memcpy(state().data[T][r], static_cast<const uint8_t*>(from) + r * stride, state().bytes[T]);
  }

  template <int T> static void store(void* to, int64_t stride) {
    need(state().configured && state().rows[T] > 0);
    for (int r = 0; r < state().rows[T]; ++r) memcpy(static_cast<uint8_t*>(to) + r * stride, state().data[T][r], state().bytes[T]);
  }

  template <class Number> static Number& at(int tile, int row, int column) {
    return reinterpret_cast<Number*>(state().data[tile][row])[column];
  }

  template <int C, int A, int B> static void check() {
    need(C != A && C != B && A != B && state().configured);
    need(state().rows[C] == state().rows[A] && state().bytes[A] == 4 * state().rows[B] && state().bytes[C] == state().bytes[B]);
  }

  static float flush(float x) { return std::abs(x) < std::numeric_limits<float>::min() ? 0.0f : x; }

  template <int C, int A, int B> static void dot_bfloat16() {
    check<C, A, B>();
    for (int m = 0; m < state().rows[C]; ++m)
      for (int n = 0; n < state().bytes[C] / 4; ++n) {
        float part[2] = {0, 0};
        for (int k = 0; k < state().bytes[A] / 4; ++k)
          for (int i = 0; i < 2; ++i) {
            const float a = flush(widen(at<uint16_t>(A, m, 2 * k + i))), b = flush(widen(at<uint16_t>(B, k, 2 * n + i)));
            part[i] = flush(std::fma(a, b, part[i]));
          }
        at<float>(C, m, n) = flush(flush(at<float>(C, m, n)) + flush(part[0] + part[1]));
      }
  }

  template <class Number, int C, int A, int B> static void dot_bytes() {
    check<C, A, B>();
    for (int m = 0; m < state().rows[C]; ++m)
      for (int n = 0; n < state().bytes[C] / 4; ++n)
        for (int k = 0; k < state().bytes[A]; ++k)
          at<int32_t>(C, m, n) += int32_t{at<int8_t>(A, m, k)} * int32_t{at<Number>(B, k / 4, 4 * n + k % 4)};
  }
  template <int C, int A, int B> static void dot_int8() { dot_bytes<int8_t, C, A, B>(); }
  template <int C, int A, int B> static void dot_int8_unsigned() { dot_bytes<uint8_t, C, A, B>(); }
};
