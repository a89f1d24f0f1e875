// AArch64 NEON: four q registers.
#pragma once

#include <arm_neon.h>

namespace slip::SLIP_ISA {
namespace {

constexpr int kRegisters = 32, kRegistersPerVector = 4;

struct f32x16 { float32x4_t v[4]; };
struct i32x16 { int32x4_t v[4]; };
struct mask16 { uint32x4_t v[4]; };

#define SLIP_EACH(RESULT, EXPRESSION) \
  RESULT r; \
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) r.v[i] = EXPRESSION; \
  return r

SLIP_INLINE f32x16 load(const float* p) { SLIP_EACH(f32x16, vld1q_f32(p + 4 * i)); }
SLIP_INLINE void store(float* p, f32x16 a) {
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
SLIP_INLINE f32x16 bcast(float a) { SLIP_EACH(f32x16, vdupq_n_f32(a)); }
SLIP_INLINE f32x16 zero() { return bcast(0.0f); }
SLIP_INLINE f32x16 add(f32x16 a, f32x16 b) { SLIP_EACH(f32x16, vaddq_f32(a.v[i], b.v[i])); }
SLIP_INLINE f32x16 sub(f32x16 a, f32x16 b) { SLIP_EACH(f32x16, vsubq_f32(a.v[i], b.v[i])); }
SLIP_INLINE f32x16 mul(f32x16 a, f32x16 b) { SLIP_EACH(f32x16, vmulq_f32(a.v[i], b.v[i])); }
SLIP_INLINE f32x16 div(f32x16 a, f32x16 b) { SLIP_EACH(f32x16, vdivq_f32(a.v[i], b.v[i])); }
SLIP_INLINE f32x16 sqrt(f32x16 a) { SLIP_EACH(f32x16, vsqrtq_f32(a.v[i])); }
SLIP_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { SLIP_EACH(f32x16, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
SLIP_INLINE f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) { SLIP_EACH(f32x16, vfmsq_f32(c.v[i], a.v[i], b.v[i])); }
// Compare and select, not fmax: the second operand wins on NaN, as on x86.
SLIP_INLINE f32x16 vmax(f32x16 a, f32x16 b) {
  SLIP_EACH(f32x16, vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]));
}
SLIP_INLINE f32x16 vmin(f32x16 a, f32x16 b) {
  SLIP_EACH(f32x16, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]));
}
SLIP_INLINE f32x16 neg(f32x16 a) { SLIP_EACH(f32x16, vnegq_f32(a.v[i])); }
SLIP_INLINE mask16 gt(f32x16 a, f32x16 b) { SLIP_EACH(mask16, vcgtq_f32(a.v[i], b.v[i])); }
SLIP_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { SLIP_EACH(f32x16, vbslq_f32(m.v[i], a.v[i], b.v[i])); }

SLIP_INLINE i32x16 iload(const void* p) { SLIP_EACH(i32x16, vld1q_s32(static_cast<const int32_t*>(p) + 4 * i)); }
SLIP_INLINE i32x16 ibcast(int32_t a) { SLIP_EACH(i32x16, vdupq_n_s32(a)); }
SLIP_INLINE i32x16 iand(i32x16 a, i32x16 b) { SLIP_EACH(i32x16, vandq_s32(a.v[i], b.v[i])); }
SLIP_INLINE i32x16 ior(i32x16 a, i32x16 b) { SLIP_EACH(i32x16, vorrq_s32(a.v[i], b.v[i])); }
template <int N> SLIP_INLINE i32x16 shl(i32x16 a) { SLIP_EACH(i32x16, vshlq_n_s32(a.v[i], N)); }
template <int N> SLIP_INLINE i32x16 shr(i32x16 a) {
  if constexpr (N == 0) return a;
  else { SLIP_EACH(i32x16, vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), N))); }
}
template <int N> SLIP_INLINE i32x16 sar(i32x16 a) {
  if constexpr (N == 0) return a;
  else { SLIP_EACH(i32x16, vshrq_n_s32(a.v[i], N)); }
}

SLIP_INLINE f32x16 to_f32(i32x16 a) { SLIP_EACH(f32x16, vcvtq_f32_s32(a.v[i])); }
// Out of range (and NaN) gives 0x80000000, as the vector conversions of x86 do.
SLIP_INLINE f32x16 as_f32(i32x16 a) { SLIP_EACH(f32x16, vreinterpretq_f32_s32(a.v[i])); }
SLIP_INLINE i32x16 as_i32(f32x16 a) { SLIP_EACH(i32x16, vreinterpretq_s32_f32(a.v[i])); }
SLIP_INLINE f32x16 load_f16(const uint16_t* p) {
  SLIP_EACH(f32x16, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
template <int S> SLIP_INLINE f32x16 nibble(i32x16 a) { return to_f32(iand(shr<S>(a), ibcast(15))); }
template <int S> SLIP_INLINE f32x16 nibble_signed(i32x16 a) { return to_f32(sar<28>(shl<28 - S>(a))); }

SLIP_INLINE float reduce_add(f32x16 a) {
  const float32x4_t q = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
SLIP_INLINE float reduce_max(f32x16 a) {
  float lanes[16];
  store(lanes, a);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

SLIP_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

#undef SLIP_EACH

}  // namespace
}  // namespace slip::SLIP_ISA
