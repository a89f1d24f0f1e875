// AVX-512 (F, BW, VL, DQ): one zmm register.
#pragma once

#include <immintrin.h>

namespace slip::SLIP_ISA {
namespace {

constexpr int kRegisters = 32, kRegistersPerVector = 1;

struct f32x16 { __m512 v; };
struct i32x16 { __m512i v; };
struct mask16 { __mmask16 m; };

SLIP_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
SLIP_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
SLIP_INLINE f32x16 bcast(float a) { return {_mm512_set1_ps(a)}; }
SLIP_INLINE f32x16 zero() { return {_mm512_setzero_ps()}; }
SLIP_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
SLIP_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
SLIP_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
SLIP_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
SLIP_INLINE f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
SLIP_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
SLIP_INLINE f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
SLIP_INLINE f32x16 vmax(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
SLIP_INLINE f32x16 vmin(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
SLIP_INLINE f32x16 neg(f32x16 a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
SLIP_INLINE mask16 gt(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
SLIP_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { return {_mm512_mask_blend_ps(m.m, b.v, a.v)}; }

SLIP_INLINE i32x16 iload(const void* p) { return {_mm512_loadu_si512(p)}; }
SLIP_INLINE i32x16 ibcast(int32_t a) { return {_mm512_set1_epi32(a)}; }
SLIP_INLINE i32x16 iand(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
SLIP_INLINE i32x16 ior(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N> SLIP_INLINE i32x16 shl(i32x16 a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> SLIP_INLINE i32x16 shr(i32x16 a) { return {_mm512_srli_epi32(a.v, N)}; }
template <int N> SLIP_INLINE i32x16 sar(i32x16 a) { return {_mm512_srai_epi32(a.v, N)}; }

SLIP_INLINE f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
SLIP_INLINE f32x16 as_f32(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
SLIP_INLINE i32x16 as_i32(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
SLIP_INLINE f32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// A permute reads the low four bits of each index only: the table saves a mask and a conversion.
template <int S> SLIP_INLINE f32x16 nibble(i32x16 a) {
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_permutexvar_ps(S ? _mm512_srli_epi32(a.v, S) : a.v, table)};
}
template <int S> SLIP_INLINE f32x16 nibble_signed(i32x16 a) {
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return {_mm512_permutexvar_ps(S ? _mm512_srli_epi32(a.v, S) : a.v, table)};
}

// Tree of every backend: lanes i and i+8, then i and i+4, then i and i+2, then i and i+1.
SLIP_INLINE float reduce_add(f32x16 a) {
  const __m256 e = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
SLIP_INLINE float reduce_max(f32x16 a) {
  const __m256 e = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

SLIP_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace
}  // namespace slip::SLIP_ISA
