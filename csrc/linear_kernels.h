// `linear` of one instruction set; included by linear_<isa>.cpp, a unit of its own since it takes long to compile. Layout and law: linear.h.
#pragma once

#include <utility>

#include "linear.h"
#include "simd.h"

namespace slip::SLIP_ISA {
namespace {

// Rows that share one unpacking in registers: up to kPanelRows over whole panels, up to kFusedRows over half panels
// (fewer sums per row, so that more rows fit the registers); more rows go through the L1 buffer in register blocks of
// kMicroRows x kMicroTiles. kPairs: one or two rows walk two panels at once, as more sums in flight hide the latency of fma.
#if defined(SLIP_SIMD_AVX512)
constexpr int kPanelRows = 12, kFusedRows = 12, kMicroTiles = 2, kMicroRows = 12;
constexpr bool kPairs = true;
#elif defined(SLIP_SIMD_GENERIC)
constexpr int kPanelRows = 0, kFusedRows = 0, kMicroTiles = 2, kMicroRows = 1;
constexpr bool kPairs = false;
#else
constexpr int kPanelRows = 2, kFusedRows = 6, kMicroTiles = 1, kMicroRows = 6;
constexpr bool kPairs = false;
#endif
constexpr int kChunk = 128;      // inputs unpacked at once: 128 x 32 floats = 16 KiB
constexpr int kRowBlock = 240;   // rows that share one unpacking through the buffer
constexpr int kExactRows = 8;    // above it, in registers, an odd number of rows computes one row twice

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

// Writes 16 outputs of a row from output `first` on; the last ones of a panel may not exist.
SLIP_INLINE void put(const LinearArgs& a, int64_t row, int64_t first, const f32x16& sum) {
  const int64_t count = a.w.out - first;
  float* y = a.y + row * a.ldy + first;
  const float* bias = a.bias == nullptr ? nullptr : a.bias + first;
  if (count >= 16) {
    store(y, bias == nullptr ? sum : add(sum, load(bias)));
    return;
  }
  float lanes[16];
  store(lanes, sum);
  for (int64_t o = 0; o < count; o++) y[o] = bias == nullptr ? lanes[o] : lanes[o] + bias[o];
}

// ROWS rows, N * 16 outputs from 16-output tile `tile` of a panel on, everything in registers.
template <class W, int N, int ROWS>
__attribute__((noinline)) void fused(const LinearArgs& a, int64_t panel, int tile) {
  constexpr int panels = (N + 1) / 2;
  const size_t ahead = ahead_of(a.w, panels);
  Cursor<true> p[panels];
  for (int k = 0; k < panels; k++) p[k] = cursor<true>(a.w, panel + k, tile, ahead);
  const float* x[ROWS];
  for (int r = 0; r < ROWS; r++) x[r] = a.x + (ROWS <= kExactRows || r < a.m ? r : a.m - 1) * a.ldx;
  f32x16 acc[ROWS][N];
  SLIP_UNROLL for (int r = 0; r < ROWS; r++) SLIP_UNROLL for (int t = 0; t < N; t++) acc[r][t] = zero();
  W::template walk<N>(p, 0, a.w.in, [&](int64_t i, const Vectors<N>& w) SLIP_LAMBDA {
    SLIP_UNROLL for (int r = 0; r < ROWS; r++) {
      const f32x16 xv = bcast(x[r][i]);
      SLIP_UNROLL for (int t = 0; t < N; t++) acc[r][t] = fma(xv, w.v[t], acc[r][t]);
    }
  });
  SLIP_UNROLL for (int r = 0; r < ROWS; r++)
    SLIP_UNROLL for (int t = 0; t < N; t++)
      if (ROWS <= kExactRows || r < a.m) put(a, r, panel * kPanel + 16 * (tile + t), acc[r][t]);
}

// What to prefetch while computing, bytes per input.
struct Ahead {
  const uint8_t* from;
  int64_t step;
};

// acc[ROWS][32] += x[ROWS][n] w[n][32], for TILES * 16 of the 32 columns.
template <int TILES, int ROWS>
void micro(const float* w, const float* x, int64_t ldx, int64_t n, float* out, bool first, Ahead ahead) {
  f32x16 acc[ROWS][TILES];
  SLIP_UNROLL for (int r = 0; r < ROWS; r++)
    SLIP_UNROLL for (int t = 0; t < TILES; t++) acc[r][t] = first ? zero() : load(out + r * kPanel + 16 * t);
  for (int64_t i = 0; i < n; i++) {
    if (ahead.from != nullptr) {
      prefetch(ahead.from + ahead.step * i);
      if (TILES > 1 && ahead.step > 64) prefetch(ahead.from + ahead.step * i + 64);
    }
    f32x16 wv[TILES];
    SLIP_UNROLL for (int t = 0; t < TILES; t++) wv[t] = load(w + kPanel * i + 16 * t);
    SLIP_UNROLL for (int r = 0; r < ROWS; r++) {
      const f32x16 xv = bcast(x[r * ldx + i]);
      SLIP_UNROLL for (int t = 0; t < TILES; t++) acc[r][t] = fma(xv, wv[t], acc[r][t]);
    }
  }
  SLIP_UNROLL for (int r = 0; r < ROWS; r++)
    SLIP_UNROLL for (int t = 0; t < TILES; t++) store(out + r * kPanel + 16 * t, acc[r][t]);
}

using Micro = void (*)(const float*, const float*, int64_t, int64_t, float*, bool, Ahead);
template <int... K> constexpr auto micro_table(std::integer_sequence<int, K...>) {
  struct { Micro rows[sizeof...(K)]; } table = {{micro<kMicroTiles, K + 1>...}};
  return table;
}
constexpr auto kMicro = micro_table(std::make_integer_sequence<int, kMicroRows>{});

// Inputs begin .. end of a panel as floats, out[end - begin][32].
template <class W> __attribute__((noinline)) void unpack_part(const Packed& w, int64_t panel, int64_t begin, int64_t end, float* out) {
  const Cursor<false> p = cursor<false>(w, panel, 0, 0);
  W::template walk<2>(&p, begin, end, [&](int64_t i, const Vectors<2>& v) SLIP_LAMBDA {
    store(out + (i - begin) * kPanel, v.v[0]);
    store(out + (i - begin) * kPanel + 16, v.v[1]);
  });
}

// `rows` <= kRowBlock rows of one panel: unpack a chunk of inputs, use it for all rows, go on.
template <class W> void buffered(const LinearArgs& a, int64_t panel, int64_t row, int64_t rows) {
  alignas(64) float buffer[kChunk * kPanel];
  alignas(64) float acc[kRowBlock * kPanel];
  constexpr bool direct = __is_same(W, WalkF32);
  const uint8_t* p = a.w.data + static_cast<size_t>(panel) * a.w.panel_bytes();
  const int64_t blocks = (rows + kMicroRows - 1) / kMicroRows;
  const int64_t step = a.w.in == 0 ? 0 : static_cast<int64_t>(a.w.panel_bytes()) / a.w.in;
  for (int64_t begin = 0; begin < a.w.in; begin += kChunk) {
    const int64_t end = begin + kChunk < a.w.in ? begin + kChunk : a.w.in;
    const float* w = direct ? reinterpret_cast<const float*>(p) + begin * kPanel : buffer;
    if constexpr (!direct) unpack_part<W>(a.w, panel, begin, end, buffer);
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t r0 = rows * b / blocks, r1 = rows * (b + 1) / blocks;  // even blocks: 13 rows are 7 + 6
      const float* x = a.x + (row + r0) * a.ldx + begin;
      for (int t = 0; t < 2; t += kMicroTiles) {
        // The first block of rows fetches the next chunk, little by little: at once it would stall the unpacking.
        const bool fetch = b == 0 && (direct || t == 0);
        const Ahead ahead = {fetch ? p + step * end + (direct ? 64 * t : 0) : nullptr, step};
        kMicro.rows[r1 - r0 - 1](w + 16 * t, x, a.ldx, end - begin, acc + r0 * kPanel + 16 * t, begin == 0, ahead);
      }
    }
  }
  if (a.w.in == 0)
    for (int64_t k = 0; k < rows * kPanel; k++) acc[k] = 0.0f;
  for (int64_t r = 0; r < rows; r++)
    for (int t = 0; t < 2; t++) put(a, row + r, panel * kPanel + 16 * t, load(acc + r * kPanel + 16 * t));
}

// fp32 panels come straight from memory and need no registers for unpacking: three rows fit where others have two, and half
// panels, which read in pieces, do not pay.
template <class W> constexpr int panel_rows() {
  return __is_same(W, WalkF32) && kPanelRows == 2 ? 3 : kPanelRows;
}
template <class W> constexpr int most_fused_rows() {
  return __is_same(W, WalkF32) ? panel_rows<W>() : kFusedRows;
}

template <class W, int ROWS> void fused_rows(const LinearArgs& a, int64_t panel) {
  if constexpr (ROWS <= most_fused_rows<W>()) {
    if (a.m > ROWS) {
      fused_rows<W, ROWS + (ROWS < kExactRows ? 1 : 2)>(a, panel);
    } else if constexpr (ROWS <= panel_rows<W>()) {
      fused<W, 2, ROWS>(a, panel, 0);
    } else {
      fused<W, 1, ROWS>(a, panel, 0);
      fused<W, 1, ROWS>(a, panel, 1);
    }
  }
}

template <class W> void panels_of(const LinearArgs& a, int64_t begin, int64_t end) {
  if constexpr (kPairs) {
    if (a.m == 1)
      for (; begin + 1 < end; begin += 2) fused<W, 4, 1>(a, begin, 0);
    if (a.m == 2)
      for (; begin + 1 < end; begin += 2) fused<W, 4, 2>(a, begin, 0);
  }
  if (a.m <= most_fused_rows<W>()) {
    for (; begin < end; begin++) fused_rows<W, 1>(a, begin);
    return;
  }
  for (int64_t row = 0; row < a.m; row += kRowBlock)
    for (int64_t panel = begin; panel < end; panel++)
      buffered<W>(a, panel, row, a.m - row < kRowBlock ? a.m - row : kRowBlock);
}

template <class W> void unpack_of(const Packed& w, int64_t panel, float* out) {
  unpack_part<W>(w, panel, 0, w.in, out);
}

#define SLIP_DISPATCH(TYPE, FUNCTION, ...)                          \
  switch (TYPE) {                                                   \
    case Type::F32: FUNCTION<WalkF32>(__VA_ARGS__); break;          \
    case Type::F16: FUNCTION<WalkF16>(__VA_ARGS__); break;          \
    case Type::BF16: FUNCTION<WalkBF16>(__VA_ARGS__); break;        \
    case Type::Q8_0: FUNCTION<WalkQ<8, false>>(__VA_ARGS__); break; \
    case Type::Q4_0: FUNCTION<WalkQ<4, false>>(__VA_ARGS__); break; \
    case Type::Q4_1: FUNCTION<WalkQ<4, true>>(__VA_ARGS__); break;  \
    case Type::Q5_0: FUNCTION<WalkQ<5, false>>(__VA_ARGS__); break; \
    case Type::Q5_1: FUNCTION<WalkQ<5, true>>(__VA_ARGS__); break;  \
    case Type::Q4_K: FUNCTION<WalkK<4>>(__VA_ARGS__); break;        \
    case Type::Q5_K: FUNCTION<WalkK<5>>(__VA_ARGS__); break;        \
    case Type::Q6_K: FUNCTION<WalkQ6K>(__VA_ARGS__); break;         \
  }

void panels(const LinearArgs& a, int64_t begin, int64_t end) { SLIP_DISPATCH(a.w.type, panels_of, a, begin, end) }
void unpack_panel(const Packed& w, int64_t panel, float* out) { SLIP_DISPATCH(w.type, unpack_of, w, panel, out) }

float read(const float* data, size_t count) {
  f32x16 s[4] = {zero(), zero(), zero(), zero()};
  for (size_t i = 0; i + 64 <= count; i += 64) {
    prefetch(data + i + 1024);
    SLIP_UNROLL for (int k = 0; k < 4; k++) s[k] = vmax(s[k], load(data + i + 16 * k));
  }
  return reduce_max(vmax(vmax(s[0], s[1]), vmax(s[2], s[3])));
}

}  // namespace

extern const LinearTable linear_table;
const LinearTable linear_table = {panels, unpack_panel, read};

}  // namespace slip::SLIP_ISA
