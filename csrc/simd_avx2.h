// AVX2 with FMA and F16C: two ymm registers.
#pragma once

#include <immintrin.h>

namespace slip::SLIP_ISA {
namespace {

constexpr int kRegisters = 16, kRegistersPerVector = 2;

struct f32x16 { __m256 l, h; };
struct i32x16 { __m256i l, h; };
struct mask16 { __m256 l, h; };

SLIP_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SLIP_INLINE void store(float* p, f32x16 a) { _mm256_storeu_ps(p, a.l); _mm256_storeu_ps(p + 8, a.h); }
SLIP_INLINE f32x16 bcast(float a) { const __m256 b = _mm256_set1_ps(a); return {b, b}; }
SLIP_INLINE f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
SLIP_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.l, b.l), _mm256_add_ps(a.h, b.h)}; }
SLIP_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.l, b.l), _mm256_sub_ps(a.h, b.h)}; }
SLIP_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.l, b.l), _mm256_mul_ps(a.h, b.h)}; }
SLIP_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.l, b.l), _mm256_div_ps(a.h, b.h)}; }
SLIP_INLINE f32x16 sqrt(f32x16 a) { return {_mm256_sqrt_ps(a.l), _mm256_sqrt_ps(a.h)}; }
SLIP_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.l, b.l, c.l), _mm256_fmadd_ps(a.h, b.h, c.h)};
}
SLIP_INLINE f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fnmadd_ps(a.l, b.l, c.l), _mm256_fnmadd_ps(a.h, b.h, c.h)};
}
SLIP_INLINE f32x16 vmax(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.l, b.l), _mm256_max_ps(a.h, b.h)}; }
SLIP_INLINE f32x16 vmin(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.l, b.l), _mm256_min_ps(a.h, b.h)}; }
SLIP_INLINE f32x16 neg(f32x16 a) {
  const __m256 s = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(a.l, s), _mm256_xor_ps(a.h, s)};
}
SLIP_INLINE mask16 gt(f32x16 a, f32x16 b) {
  return {_mm256_cmp_ps(a.l, b.l, _CMP_GT_OQ), _mm256_cmp_ps(a.h, b.h, _CMP_GT_OQ)};
}
SLIP_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) {
  return {_mm256_blendv_ps(b.l, a.l, m.l), _mm256_blendv_ps(b.h, a.h, m.h)};
}

SLIP_INLINE i32x16 iload(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
SLIP_INLINE i32x16 ibcast(int32_t a) { const __m256i b = _mm256_set1_epi32(a); return {b, b}; }
SLIP_INLINE i32x16 iand(i32x16 a, i32x16 b) { return {_mm256_and_si256(a.l, b.l), _mm256_and_si256(a.h, b.h)}; }
SLIP_INLINE i32x16 ior(i32x16 a, i32x16 b) { return {_mm256_or_si256(a.l, b.l), _mm256_or_si256(a.h, b.h)}; }
template <int N> SLIP_INLINE i32x16 shl(i32x16 a) { return {_mm256_slli_epi32(a.l, N), _mm256_slli_epi32(a.h, N)}; }
template <int N> SLIP_INLINE i32x16 shr(i32x16 a) { return {_mm256_srli_epi32(a.l, N), _mm256_srli_epi32(a.h, N)}; }
template <int N> SLIP_INLINE i32x16 sar(i32x16 a) { return {_mm256_srai_epi32(a.l, N), _mm256_srai_epi32(a.h, N)}; }

SLIP_INLINE f32x16 to_f32(i32x16 a) { return {_mm256_cvtepi32_ps(a.l), _mm256_cvtepi32_ps(a.h)}; }
SLIP_INLINE f32x16 as_f32(i32x16 a) { return {_mm256_castsi256_ps(a.l), _mm256_castsi256_ps(a.h)}; }
SLIP_INLINE i32x16 as_i32(f32x16 a) { return {_mm256_castps_si256(a.l), _mm256_castps_si256(a.h)}; }
SLIP_INLINE f32x16 load_f16(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
template <int S> SLIP_INLINE f32x16 nibble(i32x16 a) {
  if constexpr (S == 28) return to_f32(shr<28>(a));
  return to_f32(iand(S ? shr<S>(a) : a, ibcast(15)));
}
template <int S> SLIP_INLINE f32x16 nibble_signed(i32x16 a) {
  return to_f32(sar<28>(S < 28 ? shl<28 - S>(a) : a));
}

SLIP_INLINE float reduce_add(f32x16 a) {
  const __m256 e = _mm256_add_ps(a.l, a.h);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
SLIP_INLINE float reduce_max(f32x16 a) {
  const __m256 e = _mm256_max_ps(a.l, a.h);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

SLIP_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace
}  // namespace slip::SLIP_ISA
