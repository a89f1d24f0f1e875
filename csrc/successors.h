// A table of likely successors of tokens and of pairs of tokens. Numpy twin: kernels/reference_successors.py, same
// operations, same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sampling.h"

namespace slip {

constexpr size_t kSuccessors = 8;  // kept per context

// Rows 0 to vocab - 1 are for single tokens, the `pairs` rows after them for pairs, by hash; owner: which pair.
// A row: ids, best first, -1 in empty places; their weights, which sum to 1 at most.
struct Successors {
  int32_t* ids;
  float* weights;
  int64_t* owner;
  size_t vocab, pairs;

  // Blend in what a row of logits says. Nothing happens when its likeliest tokens are not finite.
  void learn(const SamplingTable& table, int64_t before, int64_t token, const float* logits);
  // Blend in that `next` was seen after (before, token).
  void saw(int64_t before, int64_t token, int64_t next);

 private:
  friend struct SuccessorTree;
  size_t row_of(int64_t before, int64_t token) const;
  int64_t name_of(int64_t before, int64_t token) const { return before * static_cast<int64_t>(vocab) + token; }
  void blend(int64_t before, int64_t token, const int32_t* next, const float* weight, bool whole);
  void blend_row(size_t row, const int32_t* next, const float* weight, bool whole);
};

// The most probable paths through the table: nodes by falling probability of being reached.
struct SuccessorTree {
  struct Limits {
    size_t nodes, depth, width;
    double least, certain;  // smallest probability of a path; largest chance of a node
  };
  std::vector<int32_t> tokens, parents;
  std::vector<double> chances;

  void grow(const Successors& table, int64_t before, int64_t token, const Limits& limits);
};

}  // namespace slip
