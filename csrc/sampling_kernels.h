// The sampling kernels of one instruction set; included by isa_impl.h only. Plain loops over lanes: comparisons and
// elementwise arithmetic without contraction are the same in any vector width, so the compiler may vectorise freely.
#include "sampling.h"
#include "sampling_math.h"

namespace slip::SLIP_ISA {
namespace {

constexpr uint32_t kPositiveInfinity = 0x7F800000u, kNegativeInfinity = 0xFF800000u;

inline uint32_t float_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

// All ones when x is NaN or +infinity.
inline uint32_t is_bad(float x) {
  const uint32_t bits = float_bits(x);
  const bool bad = (bits >= kPositiveInfinity && bits <= 0x7FFFFFFFu) || bits > kNegativeInfinity;
  return bad ? ~0u : 0u;
}

int64_t argmax(const float* x, size_t n) {
  constexpr int lanes = 64;
  float top[lanes];
  uint32_t bad[lanes];
  for (int j = 0; j < lanes; j++) top[j] = -__builtin_inff(), bad[j] = 0;
  size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int j = 0; j < lanes; j++) {
      const float value = x[i + j];
      top[j] = value > top[j] ? value : top[j];
      bad[j] |= is_bad(value);
    }
  for (; i < n; i++) {
    top[0] = x[i] > top[0] ? x[i] : top[0];
    bad[0] |= is_bad(x[i]);
  }
  for (int j = 1; j < lanes; j++) {
    top[0] = top[j] > top[0] ? top[j] : top[0];
    bad[0] |= bad[j];
  }
  const float best = top[0];
  if (bad[0] != 0 || best == -__builtin_inff()) return -1;
  for (i = 0; i + lanes <= n; i += lanes) {
    uint32_t hit = 0;
    for (int j = 0; j < lanes; j++) hit |= x[i + j] == best ? 1u : 0u;
    if (hit != 0) break;
  }
  while (!(x[i] == best)) i++;
  return static_cast<int64_t>(i);
}

inline uint32_t scale_block(const float* x, size_t n, double temperature, double* z) {
  uint32_t bad = 0;
  if (temperature > 0.0)
    for (size_t j = 0; j < n; j++) z[j] = static_cast<double>(x[j]) / temperature;
  else
    for (size_t j = 0; j < n; j++) z[j] = static_cast<double>(x[j]);
  for (size_t j = 0; j < n; j++) bad |= is_bad(x[j]);
  return bad;
}

inline double max_of(const double* z, size_t n) {
  constexpr size_t lanes = 16;
  double top[lanes];
  for (size_t j = 0; j < lanes; j++) top[j] = -__builtin_inf();
  size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (size_t j = 0; j < lanes; j++) top[j] = z[i + j] > top[j] ? z[i + j] : top[j];
  for (; i < n; i++) top[0] = z[i] > top[0] ? z[i] : top[0];
  for (size_t j = 1; j < lanes; j++) top[0] = top[j] > top[0] ? top[j] : top[0];
  return top[0];
}

bool scale(const float* x, size_t n, double temperature, double* z, double* block_max) {
  uint32_t bad = 0;
  for (size_t i = 0, block = 0; i < n; i += kScoreBlock, block++) {
    const size_t size = n - i < kScoreBlock ? n - i : kScoreBlock;
    bad |= size == kScoreBlock ? scale_block(x + i, kScoreBlock, temperature, z + i)
                               : scale_block(x + i, size, temperature, z + i);
    block_max[block] = max_of(z + i, size);
  }
  return bad == 0;
}

// As many doubles as a register of this instruction set holds.
#if defined(__AVX512F__)
constexpr size_t kWide = 8;
#elif defined(__AVX2__)
constexpr size_t kWide = 4;
#else
constexpr size_t kWide = 2;
#endif
typedef double Wide __attribute__((vector_size(kWide * sizeof(double))));
typedef uint64_t WideBits __attribute__((vector_size(kWide * sizeof(double))));

inline Wide load_wide(const double* from) {
  Wide value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

// exp_of in every lane, the same operations.
inline __attribute__((always_inline)) Wide exp_wide(Wide x) {
  const auto inside = x >= -700.0;
  const Wide zero = {};
  x = inside ? x : zero;
  const Wide shifted = x * 1.44269504088896338700e+00 + 6755399441055744.0;
  const Wide whole = shifted - 6755399441055744.0;
  const Wide r = (x - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10;
  Wide value = zero + kExpFactor[0];
  for (size_t i = 1; i < sizeof kExpFactor / sizeof *kExpFactor; i++) value = value * r + kExpFactor[i];
  WideBits bits;
  __builtin_memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;
  Wide scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return inside ? value * scale : zero;
}

void exp_all(const double* z, size_t n, double peak, double* out) {
  size_t i = 0;
  for (; i + kWide <= n; i += kWide) {
    const Wide value = exp_wide(load_wide(z + i) - peak);
    __builtin_memcpy(out + i, &value, sizeof value);
  }
  for (; i < n; i++) out[i] = exp_of(z[i] - peak);
}

double exp_sum(const double* z, size_t n, double peak, double floor) {
  constexpr size_t vectors = kLanes / kWide;
  Wide sums[vectors] = {};
  const Wide zero = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (size_t j = 0; j < vectors; j++) {
      const Wide value = load_wide(z + i + j * kWide);
      sums[j] += value >= floor ? exp_wide(value - peak) : zero;
    }
  double lane[kLanes];
  __builtin_memcpy(lane, sums, sizeof lane);
  for (int j = 0; i < n; i++, j++) {
    const double weight = exp_of(z[i] - peak);
    lane[j] += z[i] >= floor ? weight : 0.0;
  }
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int j = 0; j < half; j++) lane[j] += lane[j + half];
  return lane[0];
}

size_t between(const double* z, size_t n, const double* block_max, double low, double high, int32_t* ids) {
  size_t found = 0;
  for (size_t i = 0, block = 0; i < n; i += kScoreBlock, block++) {
    if (!(block_max[block] >= low)) continue;
    const size_t end = n - i < kScoreBlock ? n : i + kScoreBlock;
    for (size_t v = i; v < end; v++) {
      ids[found] = static_cast<int32_t>(v);
      found += static_cast<size_t>(z[v] >= low) & static_cast<size_t>(z[v] < high);
    }
  }
  return found;
}

size_t contenders(const double* z, size_t begin, size_t end, uint64_t key, double bar, int32_t* ids) {
  size_t found = 0;
  for (size_t i = begin; i < end; i += kScoreBlock) {
    const size_t size = end - i < kScoreBlock ? end - i : kScoreBlock;
    double reach[kScoreBlock];
    const uint64_t base = key + i * kGolden;
    if (size == kScoreBlock)
      for (size_t j = 0; j < kScoreBlock; j++) reach[j] = z[i + j] + noise_bound(mix64(base + j * kGolden));
    else
      for (size_t j = 0; j < size; j++) reach[j] = z[i + j] + noise_bound(mix64(base + j * kGolden));
    uint64_t any = 0;
    for (size_t j = 0; j < size; j++) any |= reach[j] >= bar ? 1u : 0u;
    if (any == 0) continue;
    for (size_t j = 0; j < size; j++) {
      ids[found] = static_cast<int32_t>(i + j);
      found += reach[j] >= bar ? 1u : 0u;
    }
  }
  return found;
}

inline bool any_above(const float* x, float bar) {
  constexpr size_t lanes = 16;
  uint32_t above[lanes] = {};
  for (size_t i = 0; i < kScoreBlock; i += lanes)
    for (size_t j = 0; j < lanes; j++) above[j] |= x[i + j] > bar ? 1u : 0u;
  uint32_t any = 0;
  for (size_t j = 0; j < lanes; j++) any |= above[j];
  return any != 0;
}

// Blocks of which nothing comes into the list are skipped, which soon are nearly all.
void top(const float* x, size_t n, size_t count, int32_t* ids, float* values) {
  for (size_t i = 0; i < count; i++) ids[i] = -1, values[i] = -__builtin_inff();
  for (size_t i = 0; i < n; i += kScoreBlock) {
    const size_t size = n - i < kScoreBlock ? n - i : kScoreBlock;
    if (size == kScoreBlock && !any_above(x + i, values[count - 1])) continue;
    for (size_t v = i; v < i + size; v++) {
      if (!(x[v] > values[count - 1])) continue;
      size_t place = count - 1;
      for (; place > 0 && x[v] > values[place - 1]; place--) {
        ids[place] = ids[place - 1];
        values[place] = values[place - 1];
      }
      ids[place] = static_cast<int32_t>(v);
      values[place] = x[v];
    }
  }
}

constexpr SamplingTable sampling_table() { return {argmax, scale, exp_all, exp_sum, between, contenders, top}; }

}  // namespace
}  // namespace slip::SLIP_ISA
