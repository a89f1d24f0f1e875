// Any CPU: sixteen floats in an array. Slow where fma is a library call, equal everywhere.
#pragma once

#include <cmath>
#include <cstring>

namespace slip::SLIP_ISA {
namespace {

constexpr int kRegisters = 16, kRegistersPerVector = 4;

struct f32x16 { float v[16]; };
struct i32x16 { uint32_t v[16]; };
struct mask16 { bool m[16]; };

#define SLIP_EACH(RESULT, EXPRESSION) \
  RESULT r; \
  for (int i = 0; i < 16; i++) r.v[i] = EXPRESSION; \
  return r

SLIP_INLINE f32x16 load(const float* p) { f32x16 r; std::memcpy(r.v, p, 64); return r; }
SLIP_INLINE void store(float* p, const f32x16& a) { std::memcpy(p, a.v, 64); }
SLIP_INLINE f32x16 bcast(float a) { SLIP_EACH(f32x16, a); }
SLIP_INLINE f32x16 zero() { return bcast(0.0f); }
SLIP_INLINE f32x16 add(const f32x16& a, const f32x16& b) { SLIP_EACH(f32x16, a.v[i] + b.v[i]); }
SLIP_INLINE f32x16 sub(const f32x16& a, const f32x16& b) { SLIP_EACH(f32x16, a.v[i] - b.v[i]); }
SLIP_INLINE f32x16 mul(const f32x16& a, const f32x16& b) { SLIP_EACH(f32x16, a.v[i] * b.v[i]); }
SLIP_INLINE f32x16 div(const f32x16& a, const f32x16& b) { SLIP_EACH(f32x16, a.v[i] / b.v[i]); }
SLIP_INLINE f32x16 sqrt(const f32x16& a) { SLIP_EACH(f32x16, __builtin_sqrtf(a.v[i])); }
SLIP_INLINE f32x16 fma(const f32x16& a, const f32x16& b, const f32x16& c) {
  SLIP_EACH(f32x16, __builtin_fmaf(a.v[i], b.v[i], c.v[i]));
}
SLIP_INLINE f32x16 fnma(const f32x16& a, const f32x16& b, const f32x16& c) {
  SLIP_EACH(f32x16, __builtin_fmaf(-a.v[i], b.v[i], c.v[i]));
}
SLIP_INLINE f32x16 vmax(const f32x16& a, const f32x16& b) { SLIP_EACH(f32x16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
SLIP_INLINE f32x16 vmin(const f32x16& a, const f32x16& b) { SLIP_EACH(f32x16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
SLIP_INLINE f32x16 neg(const f32x16& a) { SLIP_EACH(f32x16, -a.v[i]); }
SLIP_INLINE mask16 gt(const f32x16& a, const f32x16& b) {
  mask16 r;
  for (int i = 0; i < 16; i++) r.m[i] = a.v[i] > b.v[i];
  return r;
}
SLIP_INLINE f32x16 select(const mask16& m, const f32x16& a, const f32x16& b) {
  SLIP_EACH(f32x16, m.m[i] ? a.v[i] : b.v[i]);
}

SLIP_INLINE i32x16 iload(const void* p) { i32x16 r; std::memcpy(r.v, p, 64); return r; }
SLIP_INLINE i32x16 ibcast(int32_t a) { SLIP_EACH(i32x16, static_cast<uint32_t>(a)); }
SLIP_INLINE i32x16 iand(const i32x16& a, const i32x16& b) { SLIP_EACH(i32x16, a.v[i] & b.v[i]); }
SLIP_INLINE i32x16 ior(const i32x16& a, const i32x16& b) { SLIP_EACH(i32x16, a.v[i] | b.v[i]); }
template <int N> SLIP_INLINE i32x16 shl(const i32x16& a) { SLIP_EACH(i32x16, a.v[i] << N); }
template <int N> SLIP_INLINE i32x16 shr(const i32x16& a) { SLIP_EACH(i32x16, a.v[i] >> N); }
template <int N> SLIP_INLINE i32x16 sar(const i32x16& a) {
  SLIP_EACH(i32x16, static_cast<uint32_t>(static_cast<int32_t>(a.v[i]) >> N));
}

SLIP_INLINE f32x16 to_f32(const i32x16& a) { SLIP_EACH(f32x16, static_cast<float>(static_cast<int32_t>(a.v[i]))); }
// Out of range gives the same value as the vector conversions of x86.
SLIP_INLINE f32x16 as_f32(const i32x16& a) { f32x16 r; std::memcpy(r.v, a.v, 64); return r; }
SLIP_INLINE i32x16 as_i32(const f32x16& a) { i32x16 r; std::memcpy(r.v, a.v, 64); return r; }
SLIP_INLINE float f16_to_f32(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
  uint32_t bits;
  float f;
  if (rest >= 0x7c00) {  // infinity; a NaN becomes quiet, as in hardware
    bits = 0x7f800000u | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000u : 0u);
  } else if (rest >= 0x400) {
    bits = (rest << 13) + (112u << 23);
  } else {
    f = static_cast<float>(rest) * 0x1p-24f;
    std::memcpy(&bits, &f, 4);
  }
  bits |= sign;
  std::memcpy(&f, &bits, 4);
  return f;
}
SLIP_INLINE f32x16 load_f16(const uint16_t* p) { SLIP_EACH(f32x16, f16_to_f32(p[i])); }
template <int S> SLIP_INLINE f32x16 nibble(const i32x16& a) {
  SLIP_EACH(f32x16, static_cast<float>(a.v[i] >> S & 15));
}
template <int S> SLIP_INLINE f32x16 nibble_signed(const i32x16& a) {
  SLIP_EACH(f32x16, static_cast<float>(static_cast<int32_t>(a.v[i] << (28 - S)) >> 28));
}

SLIP_INLINE float reduce_add(f32x16 a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a.v[i] = a.v[i] + a.v[i + half];
  return a.v[0];
}
SLIP_INLINE float reduce_max(f32x16 a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}

SLIP_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

#undef SLIP_EACH

}  // namespace
}  // namespace slip::SLIP_ISA
