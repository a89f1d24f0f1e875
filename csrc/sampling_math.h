// Logarithm, exponential and noise in separate multiplications and additions, as in kernels/reference_sampling.py.
// Everything has internal linkage: each translation unit keeps its own copy, made for its own instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace slip {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr double kMaxNoise = 36.8;  // no G is larger
constexpr double kLn2 = 0.6931471805599454;  // rounded up
constexpr int kLanes = 32;

inline __attribute__((always_inline)) uint64_t bits_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline __attribute__((always_inline)) double from_bits(uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The splitmix64 finaliser.
inline __attribute__((always_inline)) uint64_t mix64(uint64_t h) {
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;
  h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
  return h ^ (h >> 31);
}

// Key of position (or step) t of one stream; sampling/noise.py says why in stages.
inline uint64_t noise_key(uint64_t seed, uint64_t t, uint64_t stream) {
  const uint64_t inner = mix64((mix64(seed + kGolden) ^ stream) + kGolden);
  return mix64((inner ^ t) + kGolden);
}

// ((h >> 12) + 0.5) / 2^52, strictly between 0 and 1. The integer becomes a double through the bits of 2^52.
inline __attribute__((always_inline)) double uniform_of(uint64_t h) {
  const double whole = from_bits((h >> 12) | 0x4330000000000000ull) - 4503599627370496.0;
  return (whole + 0.5) * 2.220446049250313080847263336181640625e-16;
}

// Natural logarithm of a positive normal number (the fdlibm method, one path for all).
inline __attribute__((always_inline)) double log_of(double x) {
  const uint64_t base = 0x3FE6A09Eull << 32;
  const uint64_t bits = bits_of(x) + ((0x3FF00000ull - 0x3FE6A09Eull) << 32);
  const double exponent = static_cast<double>(static_cast<int64_t>(bits >> 52)) - 1023.0;
  const double f = from_bits((bits & 0x000FFFFFFFFFFFFFull) + base) - 1.0;
  const double half_square = 0.5 * f * f;
  const double s = f / (2.0 + f);
  const double z = s * s;
  const double w = z * z;
  const double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const double odd = z * (6.666666666666735130e-01 +
                          w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860510658591e-01)));
  return s * (half_square + (odd + even)) + exponent * 1.90821492927058770002e-10 - half_square + f +
         exponent * 6.93147180369123816490e-01;
}

// Taylor factors of exp, degree 12 first.
constexpr double kExpFactor[] = {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
                                 1.0 / 5040.0,      1.0 / 720.0,      1.0 / 120.0,     1.0 / 24.0,     1.0 / 6.0,
                                 0.5,               1.0,              1.0};

// exp of a number <= 0; 0 below -700.
inline __attribute__((always_inline)) double exp_of(double x) {
  const bool inside = x >= -700.0;
  x = inside ? x : 0.0;
  const double shifted = x * 1.44269504088896338700e+00 + 6755399441055744.0;
  const double whole = shifted - 6755399441055744.0;
  const double r = (x - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10;
  double value = kExpFactor[0];
  for (int i = 1; i < 13; i++) value = value * r + kExpFactor[i];
  const double scaled = value * from_bits((bits_of(shifted) + 1023) << 52);
  return inside ? scaled : 0.0;
}

inline __attribute__((always_inline)) uint64_t hash_of(uint64_t key, uint64_t id) { return mix64(key + id * kGolden); }

inline __attribute__((always_inline)) double gumbel_of(uint64_t key, uint64_t id) {
  return -log_of(-log_of(uniform_of(hash_of(key, id))));
}

// At least G, from the exponent of 1 - u alone: -log u >= 1 - u >= 2^e, so G <= -e log 2.
inline __attribute__((always_inline)) double noise_bound(uint64_t h) {
  const double gap = 1.0 - uniform_of(h);
  // 2^e <= gap < 2^(e + 1); the exponent field becomes a double as in uniform_of.
  const double field = from_bits((bits_of(gap) >> 52) | 0x4330000000000000ull) - 4503599627370496.0;
  return (1023.0 - field) * kLn2;
}

}  // namespace
}  // namespace slip
