// Sampling: from one row of logits to tokens. Numpy twin: kernels/reference_sampling.py, same operations, same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace slip {

constexpr size_t kScoreBlock = 64;  // scores are skipped in blocks of this many, by the block's maximum

// Kernels over the whole vocabulary. They only compare, or compute elementwise, or sum in 32 lanes by id.
struct SamplingTable {
  // Lowest id of the largest logit; -1 when one is NaN or +infinity, or none is finite.
  int64_t (*argmax)(const float* x, size_t n);
  // z = double(x) / temperature (not divided at 0) and the maximum of each block. False when an x is NaN or +infinity.
  bool (*scale)(const float* x, size_t n, double temperature, double* z, double* block_max);
  // out = exp(z - peak)
  void (*exp_all)(const double* z, size_t n, double peak, double* out);
  // Sum of exp(z - peak) over z >= floor.
  double (*exp_sum)(const double* z, size_t n, double peak, double floor);
  // Ids with low <= z < high, ascending; returns how many. block_max as made by `scale`.
  size_t (*between)(const double* z, size_t n, const double* block_max, double low, double high, int32_t* ids);
  // Ids in [begin, end) whose score plus noise may reach bar, ascending; returns how many. begin: start of a block.
  size_t (*contenders)(const double* z, size_t begin, size_t end, uint64_t key, double bar, int32_t* ids);
  // The `count` largest logits above -infinity and their ids, largest first, lowest id first on ties; places that stay
  // empty hold -1 and -infinity. A NaN is passed over.
  void (*top)(const float* x, size_t n, size_t count, int32_t* ids, float* values);
};

struct SamplingRule {
  double temperature;  // 0 is greedy
  double min_p;        // 0 is off
  int64_t top_k;       // 0 is off
  double top_p;        // 1 is off
};

struct Scored {
  double score;
  int32_t id;
};

// One row of logits made ready: scores after processors and temperature. Buffers are kept from row to row.
class SamplingRow {
 public:
  // `values[i]` replaces the logit of ids[i] (in range). False when a raw logit is NaN or +infinity or nothing is left.
  bool prepare(const SamplingTable& table, const float* logits, size_t n, const int64_t* ids, const double* values,
               size_t changed, double temperature);
  // The best `count` under score plus noise, best first; greedy: by score alone.
  std::vector<Scored> select(const SamplingRule& rule, uint64_t key, size_t count);
  // The law of the draw, [n].
  void probabilities(const SamplingRule& rule, double* p);
  // log of the sum of exp(z - peak).
  double log_total() const;
  double peak() const { return peak_; }
  double score(size_t id) const { return z_[id]; }

 private:
  class Ordered;
  bool cut(const SamplingRule& rule);
  std::vector<Scored> best_of_all(uint64_t key, size_t count);

  const SamplingTable* table_ = nullptr;
  size_t n_ = 0;
  double peak_ = 0.0;
  std::vector<double> z_, block_max_;
  std::vector<int32_t> ids_;
  std::vector<Scored> kept_, items_;
};

}  // namespace slip
