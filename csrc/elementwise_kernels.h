// exp, norms, gated activation, rotary positions. Twin: kernels/reference_decoder.py.
#pragma once

#include "ops.h"
#include "simd.h"

namespace slip::SLIP_ISA {
namespace {

// n < 16 floats; the other lanes are zero.
SLIP_INLINE f32x16 load_part(const float* p, int n) {
  float lanes[16] = {0};
  for (int i = 0; i < n; i++) lanes[i] = p[i];
  return load(lanes);
}

SLIP_INLINE void store_part(float* p, f32x16 a, int n) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < n; i++) p[i] = lanes[i];
}

// Cephes' expf (Moshier) with fused multiply-adds: at most 1 unit in the last place off, 0 below -87.33654, e^88.37626
// from there on, NaN stays NaN. Adding 1.5 * 2^23 + 127 rounds to a whole number and leaves number + 127, the exponent
// of the power of two, in the lowest bits. Several at once, step by step, since each step waits for the one before.
template <int N> SLIP_INLINE void exp_each(f32x16 (&x)[N]) {
  const f32x16 low = bcast(-87.33654f), high = bcast(88.37626f), shift = bcast(12582912.0f + 127.0f);
  constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  f32x16 shifted[N], rest[N], poly[N];
  SLIP_UNROLL for (int k = 0; k < N; k++) rest[k] = vmax(low, vmin(high, x[k]));
  SLIP_UNROLL for (int k = 0; k < N; k++) shifted[k] = fma(rest[k], bcast(1.44269504f), shift);
  SLIP_UNROLL for (int k = 0; k < N; k++) poly[k] = sub(shifted[k], shift);
  SLIP_UNROLL for (int k = 0; k < N; k++) rest[k] = fma(poly[k], bcast(-0.693359375f), rest[k]);
  SLIP_UNROLL for (int k = 0; k < N; k++) rest[k] = fma(poly[k], bcast(2.12194440e-4f), rest[k]);
  SLIP_UNROLL for (int k = 0; k < N; k++) poly[k] = bcast(1.9875691500e-4f);
  SLIP_UNROLL for (int t = 0; t < 5; t++)
    SLIP_UNROLL for (int k = 0; k < N; k++) poly[k] = fma(poly[k], rest[k], bcast(kTerms[t]));
  SLIP_UNROLL for (int k = 0; k < N; k++) poly[k] = add(fma(poly[k], mul(rest[k], rest[k]), rest[k]), bcast(1.0f));
  SLIP_UNROLL for (int k = 0; k < N; k++) poly[k] = mul(poly[k], as_f32(shl<23>(as_i32(shifted[k]))));
  SLIP_UNROLL for (int k = 0; k < N; k++) x[k] = select(gt(low, x[k]), zero(), poly[k]);
}

SLIP_INLINE f32x16 exp(f32x16 x) {
  f32x16 one[1] = {x};
  exp_each(one);
  return one[0];
}

void exp_all(const float* x, int n, float* out) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, exp(load(x + i)));
  if (i < n) store_part(out + i, exp(load_part(x + i, n - i)), n - i);
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  f32x16 sum = zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const f32x16 v = load(x + i);
    sum = fma(v, v, sum);
  }
  if (i < n) {
    const f32x16 v = load_part(x + i, n - i);
    sum = fma(v, v, sum);
  }
  const float mean = reduce_add(sum) / static_cast<float>(n);
  const f32x16 scale = bcast(1.0f / __builtin_sqrtf(mean + eps));
  for (i = 0; i + 16 <= n; i += 16) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
  for (; i < n; i += 16)
    store_part(out + i, mul(mul(load_part(x + i, n - i), scale), load_part(weight + i, n - i)), n - i);
}

void add_into(const float* x, int n, float* into) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store(into + i, add(load(into + i), load(x + i)));
  for (; i < n; i++) into[i] = into[i] + x[i];
}

SLIP_INLINE f32x16 silu_mul_lanes(f32x16 gate, f32x16 up) {
  return mul(div(gate, add(bcast(1.0f), exp(neg(gate)))), up);
}

void silu_mul(const float* gate, const float* up, int n, float* out) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, silu_mul_lanes(load(gate + i), load(up + i)));
  if (i < n) store_part(out + i, silu_mul_lanes(load_part(gate + i, n - i), load_part(up + i, n - i)), n - i);
}

void rotate(float* x, const float* cos, const float* sin, int half) {
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const f32x16 a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, fnma(b, s, mul(a, c)));
    store(x + half + i, fma(a, s, mul(b, c)));
  }
  if (i < half) {
    const int n = half - i;
    const f32x16 a = load_part(x + i, n), b = load_part(x + half + i, n);
    const f32x16 c = load_part(cos + i, n), s = load_part(sin + i, n);
    store_part(x + i, fnma(b, s, mul(a, c)), n);
    store_part(x + half + i, fma(a, s, mul(b, c)), n);
  }
}

}  // namespace
}  // namespace slip::SLIP_ISA
