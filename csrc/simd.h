// Sixteen fp32 lanes with the same operations, in the same order, on every instruction set.
//
// f32x16: load, store, bcast, zero, add, sub, mul, div, sqrt, fma(a, b, c) = a*b + c with one rounding,
//         fnma(a, b, c) = c - a*b with one rounding, vmax / vmin (a > b ? a : b, so the second operand on NaN),
//         neg, select(gt(a, b), p, q), reduce_add (fixed tree), reduce_max.
// i32x16: iload, ibcast, iand, ior, shl<N>, shr<N> (logical), sar<N> (arithmetic).
// Between: to_f32 (exact below 2^24), as_f32 / as_i32 (bits), load_f16, nibble<S> and
//         nibble_signed<S> (the four bits from S on, as a float).
// Loads and stores need no alignment. mask16 is whatever the set compares into.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(SLIP_SIMD_GENERIC)  // loops over arrays: inlining everything costs minutes of compilation for nothing
#define SLIP_INLINE inline
#define SLIP_LAMBDA
#define SLIP_UNROLL
#else
#define SLIP_INLINE inline __attribute__((always_inline))
#define SLIP_LAMBDA __attribute__((always_inline))
#define SLIP_UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(SLIP_SIMD_AVX512)
#include "simd_avx512.h"
#elif defined(SLIP_SIMD_AVX2)
#include "simd_avx2.h"
#elif defined(SLIP_SIMD_NEON)
#include "simd_neon.h"
#elif defined(SLIP_SIMD_GENERIC)
#include "simd_generic.h"
#else
#error "define one SLIP_SIMD_* before including simd.h"
#endif
