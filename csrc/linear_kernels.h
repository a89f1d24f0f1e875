// `linear` of one instruction set; included by linear_<isa>.cpp, a unit of its own since it takes long to compile. Layout and law: linear.h.
#pragma once

#include <utility>

#include "linear.h"
#include "linear_walks.h"
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
constexpr int kRowBlock = 240;   // rows that share one unpacking through the buffer
constexpr int kExactRows = 8;    // above it, in registers, an odd number of rows computes one row twice

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
  constexpr int64_t kTiles = 2 / kMicroTiles;  // of one block of rows
  const int64_t share = kTiles * blocks < 4 ? kTiles * blocks : 4;  // tiles that fetch
  for (int64_t begin = 0; begin < a.w.in; begin += kChunk) {
    const int64_t end = begin + kChunk < a.w.in ? begin + kChunk : a.w.in;
    const float* w = direct ? reinterpret_cast<const float*>(p) + begin * kPanel : buffer;
    if constexpr (!direct) unpack_part<W>(a.w, panel, begin, end, buffer);
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t r0 = rows * b / blocks, r1 = rows * (b + 1) / blocks;  // even blocks: 13 rows are 7 + 6
      const float* x = a.x + (row + r0) * a.ldx + begin;
      for (int t = 0; t < 2; t += kMicroTiles) {
        // The first tiles fetch the next chunk, in order and little by little: at once it would stall the unpacking.
        const int64_t tile = b * kTiles + t / kMicroTiles;
        const Ahead ahead = {tile < share ? p + step * end + step * (end - begin) * tile / share : nullptr, step / share};
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
