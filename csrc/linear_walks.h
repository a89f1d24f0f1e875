// Weights of a panel one input after another, unpacked in registers: one `Walk` per type. Layout: linear.h.
#pragma once

#include <utility>

#include "linear.h"
#include "simd.h"

namespace slip::SLIP_ISA {
namespace {

constexpr int kChunk = 192;  // inputs unpacked at once: 192 x 32 floats = 24 KiB

template <int N> struct Vectors { f32x16 v[N]; };

template <int N, class F> SLIP_INLINE void repeat(F&& f) {
  [&]<int... K>(std::integer_sequence<int, K...>) SLIP_LAMBDA {
    (f(std::integral_constant<int, K>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

// Field number K of B bits as a float.
template <int B, bool SIGNED, int K> SLIP_INLINE f32x16 field(i32x16 u) {
  constexpr int low = B * K;
  if constexpr (B == 4 && SIGNED) return nibble_signed<low>(u);
  else if constexpr (B == 4) return nibble<low>(u);
  else if constexpr (SIGNED && low + B == 32) return to_f32(sar<32 - B>(u));
  else if constexpr (SIGNED) return to_f32(sar<32 - B>(shl<32 - B - low>(u)));
  else if constexpr (low + B == 32) return to_f32(shr<low>(u));
  else if constexpr (low == 0) return to_f32(iand(u, ibcast((1 << B) - 1)));
  else return to_f32(iand(shr<low>(u), ibcast((1 << B) - 1)));
}

// Where a walk reads: words and halves of a panel, or of its upper 16 outputs; and `ahead` of the words, to prefetch.
template <bool PREFETCH> struct Cursor {
  static constexpr bool kPrefetch = PREFETCH;
  const uint8_t *words, *halves, *next;
};
template <bool PREFETCH> SLIP_INLINE Cursor<PREFETCH> cursor(const Packed& w, int64_t panel, int tile, size_t ahead) {
  const uint8_t* p = w.data + static_cast<size_t>(panel) * w.panel_bytes() + 64 * tile;
  return {p, p - 32 * tile, p + ahead};
}

// Bytes of prefetch. Of two panels side by side the first one's end is followed by what the second has read already:
// where panels are small look at the same place of the next two.
SLIP_INLINE size_t ahead_of(const Packed& w, int panels) {
  constexpr size_t most = 131072, plain = 8192, quantised = 4096;
  if (panels == 2 && 2 * w.panel_bytes() <= most) return 2 * w.panel_bytes();
  return panels == 2 || w.type <= Type::BF16 ? plain : quantised;
}

// One line of words: vector t belongs to panel t / 2.
template <int N> struct Words { i32x16 v[N]; };
template <int N, class C> SLIP_INLINE Words<N> words(const C* p, size_t offset) {
  Words<N> r;
  SLIP_UNROLL for (int t = 0; t < N; t++) r.v[t] = iload(p[t / 2].words + offset + 64 * (t % 2));
  if constexpr (C::kPrefetch)
    SLIP_UNROLL for (int t = 0; t < N; t++) prefetch(p[t / 2].next + offset + 64 * (t % 2));
  return r;
}
template <int N, class C> SLIP_INLINE Vectors<N> halves(const C* p, size_t offset) {
  Vectors<N> r;
  SLIP_UNROLL for (int t = 0; t < N; t++)
    r.v[t] = load_f16(reinterpret_cast<const uint16_t*>(p[t / 2].halves + offset + 32 * (t % 2)));
  if constexpr (C::kPrefetch)
    SLIP_UNROLL for (int t = 0; t < N; t += 2) prefetch(p[t / 2].next + offset);
  return r;
}

template <int N, bool MIN> struct Scale {
  Vectors<N> d, m;
  SLIP_INLINE f32x16 apply(f32x16 q, int t) const { return MIN ? fma(q, d.v[t], m.v[t]) : mul(q, d.v[t]); }
};

// Calls f(i, w) for the fields of one line of words.
template <int B, bool SIGNED, int COUNT, int N, bool MIN, class F>
SLIP_INLINE void emit(const Words<N>& u, const Scale<N, MIN>& s, int64_t i, F&& f) {
  repeat<COUNT>([&](auto k) SLIP_LAMBDA {
    Vectors<N> w;
    SLIP_UNROLL for (int t = 0; t < N; t++) w.v[t] = s.apply(field<B, SIGNED, decltype(k)::value>(u.v[t]), t);
    f(i + decltype(k)::value, w);
  });
}
// ... and for the one field put together from left-over bits.
template <int B, bool SIGNED, int N, bool MIN, class F>
SLIP_INLINE void emit_rest(const Words<N>& u, const Scale<N, MIN>& s, int64_t i, F&& f) {
  Vectors<N> w;
  SLIP_UNROLL for (int t = 0; t < N; t++) w.v[t] = s.apply(field<B, SIGNED, 0>(u.v[t]), t);
  f(i, w);
}

constexpr size_t field_bytes(int bits, int inputs) { return static_cast<size_t>(bits) * inputs * kPanel / 8; }

// 32 inputs of 4, 5 or 8 bits with one scale.
template <int B, bool SIGNED, int N, bool MIN, class C, class F>
SLIP_INLINE void fields32(const C* p, size_t offset, const Scale<N, MIN>& s, int64_t i, F&& f) {
  if constexpr (B == 5) {
    Words<N> top[5], first, second;
    for (int k = 0; k < 5; k++) {
      const Words<N> u = words<N>(p, offset + 128 * k);
      SLIP_UNROLL for (int t = 0; t < N; t++) top[k].v[t] = shr<30>(u.v[t]);
      emit<5, SIGNED, 6>(u, s, i + 6 * k, f);
    }
    SLIP_UNROLL for (int t = 0; t < N; t++) {
      const i32x16 low = ior(top[0].v[t], shl<2>(top[1].v[t])), high = ior(top[2].v[t], shl<2>(top[3].v[t]));
      first.v[t] = ior(low, shl<4>(iand(top[4].v[t], ibcast(1))));
      second.v[t] = ior(high, shl<4>(shr<1>(top[4].v[t])));
    }
    emit_rest<5, SIGNED>(first, s, i + 30, f);
    emit_rest<5, SIGNED>(second, s, i + 31, f);
  } else {
    for (int k = 0; k < B; k++) emit<B, SIGNED, 32 / B>(words<N>(p, offset + 128 * k), s, i + 32 / B * k, f);
  }
}

// 16 signed inputs of 6 bits with one scale.
template <int N, class C, class F>
SLIP_INLINE void fields16(const C* p, size_t offset, const Scale<N, false>& s, int64_t i, F&& f) {
  Words<N> top[3], rest;
  for (int k = 0; k < 3; k++) {
    const Words<N> u = words<N>(p, offset + 128 * k);
    SLIP_UNROLL for (int t = 0; t < N; t++) top[k].v[t] = shr<30>(u.v[t]);
    emit<6, true, 5>(u, s, i + 5 * k, f);
  }
  SLIP_UNROLL for (int t = 0; t < N; t++)
    rest.v[t] = ior(top[0].v[t], ior(shl<2>(top[1].v[t]), shl<4>(top[2].v[t])));
  emit_rest<6, true>(rest, s, i + 15, f);
}

// A type's `walk<N>(p, begin, end, f)` calls f(i, w) for begin <= i < end in order, where w holds the weights of input i
// for the N / 2 panels that p points to. begin is a multiple of kChunk.
struct WalkF32 {
  template <int N, class C, class F> static SLIP_INLINE void walk(const C* p, int64_t begin, int64_t end, F&& f) {
    _Pragma("GCC unroll 4") for (int64_t i = begin; i < end; i++) {
      const Words<N> u = words<N>(p, 128 * static_cast<size_t>(i));
      Vectors<N> w;
      SLIP_UNROLL for (int t = 0; t < N; t++) w.v[t] = as_f32(u.v[t]);
      f(i, w);
    }
  }
};

struct WalkF16 {
  template <int N, class C, class F> static SLIP_INLINE void walk(const C* p, int64_t begin, int64_t end, F&& f) {
    _Pragma("GCC unroll 4") for (int64_t i = begin; i < end; i++) f(i, halves<N>(p, 64 * static_cast<size_t>(i)));
  }
};

struct WalkBF16 {
  template <int N, class C, class F> static SLIP_INLINE void walk(const C* p, int64_t begin, int64_t end, F&& f) {
    int64_t i = begin;
    _Pragma("GCC unroll 2") for (; i + 1 < end; i += 2) {
      const Words<N> u = words<N>(p, 64 * static_cast<size_t>(i));
      f(i, low(u));
      Vectors<N> w;
      SLIP_UNROLL for (int t = 0; t < N; t++) w.v[t] = as_f32(iand(u.v[t], ibcast(static_cast<int32_t>(0xffff0000u))));
      f(i + 1, w);
    }
    if (i < end) f(i, low(words<N>(p, 64 * static_cast<size_t>(i))));
  }
  template <int N> static SLIP_INLINE Vectors<N> low(const Words<N>& u) {
    Vectors<N> w;
    SLIP_UNROLL for (int t = 0; t < N; t++) w.v[t] = as_f32(shl<16>(u.v[t]));
    return w;
  }
};

// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
template <int B, bool MIN> struct WalkQ {
  template <int N, class C, class F> static SLIP_INLINE void walk(const C* p, int64_t begin, int64_t end, F&& f) {
    constexpr size_t head = MIN ? 128 : 64, block = head + field_bytes(B, 32);
    for (int64_t i = begin; i < end; i += 32) {
      const size_t at = static_cast<size_t>(i / 32) * block;
      Scale<N, MIN> s;
      s.d = halves<N>(p, at);
      if constexpr (MIN) s.m = halves<N>(p, at + 64);
      fields32<B, !MIN>(p, at + head, s, i, f);
    }
  }
};

// Q4_K, Q5_K. d*scale and dmin*min are exact; d*q - dmin*min = fma(q, d, -(dmin*min)) since d*q is exact too.
template <int B> struct WalkK {
  template <int N, class C, class F> static SLIP_INLINE void walk(const C* p, int64_t begin, int64_t end, F&& f) {
    constexpr size_t fields = field_bytes(B, 32), part = 128 + 2 * fields, block = 128 + 4 * part;
    for (int64_t i = begin; i < end; i += 64) {
      const size_t base = static_cast<size_t>(i / 256) * block, at = base + 128 + static_cast<size_t>(i % 256 / 64) * part;
      const Words<N> scales = words<N>(p, at);
      const Vectors<N> d = halves<N>(p, base), m = halves<N>(p, base + 64);
      repeat<2>([&](auto half) SLIP_LAMBDA {
        constexpr int h = decltype(half)::value;
        Scale<N, true> s;
        SLIP_UNROLL for (int t = 0; t < N; t++) {
          s.d.v[t] = mul(d.v[t], field<8, false, 2 * h>(scales.v[t]));
          s.m.v[t] = mul(neg(m.v[t]), field<8, false, 2 * h + 1>(scales.v[t]));
        }
        fields32<B, false>(p, at + 128 + h * fields, s, i + 32 * h, f);
      });
    }
  }
};

struct WalkQ6K {
  template <int N, class C, class F> static SLIP_INLINE void walk(const C* p, int64_t begin, int64_t end, F&& f) {
    constexpr size_t part = 128 + field_bytes(6, 64), block = 64 + 4 * part;
    for (int64_t i = begin; i < end; i += 64) {
      const size_t base = static_cast<size_t>(i / 256) * block, at = base + 64 + static_cast<size_t>(i % 256 / 64) * part;
      Words<N> scales = words<N>(p, at);
      const Vectors<N> d = halves<N>(p, base);
      for (int k = 0; k < 4; k++) {
        Scale<N, false> s;
        SLIP_UNROLL for (int t = 0; t < N; t++) {
          s.d.v[t] = mul(d.v[t], field<8, true, 0>(scales.v[t]));
          scales.v[t] = shr<8>(scales.v[t]);
        }
        fields16(p, at + 128 + k * field_bytes(6, 16), s, i + 16 * k, f);
      }
    }
  }
};

}  // namespace
}  // namespace slip::SLIP_ISA
