// Offers of several drafters as one ranked tree, with chances learned from what verification showed. Twin:
// kernels/reference_tree.py, same operations, same order; docs/drafting.md says what they mean.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace slip {

struct Offer {
  int32_t source;
  std::vector<int32_t> tokens, parents;
  std::vector<double> beliefs;
};

// Nodes by falling probability of their whole path (`reach`); source: whose chance was highest.
struct RankedTree {
  std::vector<int32_t> tokens, parents, sources;
  std::vector<double> chances, reach;
};

class Ranker {
 public:
  // Chance of a node of one source alone, given that its parent stands.
  double chance(int32_t source, double belief, int32_t depth) const;
  // keys: of the noise of the next positions, none when greedy; scale: what one unit of noise weighs in logits.
  // keep: remember the tree for `learn`.
  RankedTree rank(int64_t row, std::vector<Offer> offers, const std::vector<uint64_t>& keys, double scale, bool keep);
  // Compare what was kept for a row with the tokens emitted. Returns by source how surprising a right first token was.
  std::vector<std::pair<int32_t, double>> learn(int64_t row, const std::vector<int32_t>& emitted);
  void forget(int64_t row) { kept_.erase(row); }

 private:
  static constexpr int kBins = 11, kLevels = 5;
  struct Tally {
    double seen = 0.0, hits = 0.0, believed = 0.0;
    void add(bool hit, double belief);
  };
  struct Source {
    Tally whole;
    std::array<Tally, kBins> bins;
    std::array<std::array<Tally, kLevels>, kBins> cells;
  };
  struct Weight {
    double value, precision;
  };
  using Weights = std::unordered_map<uint64_t, Weight>;
  struct Input {
    uint64_t weight;
    double value;
  };
  struct Node {
    int32_t token, parent, depth, source, misses;
    double best, chance;
    uint64_t pattern;
    std::vector<Input> inputs;
  };
  struct Kept {
    std::vector<Offer> offers;
    std::vector<Node> nodes;
  };

  std::vector<Node> unite(const std::vector<Offer>& offers) const;
  double mix(const Node& node) const;
  Weight weight_of(const Node& node, size_t input) const;
  void teach(const Node& node, bool hit);
  void observe(int32_t source, double belief, int32_t depth, bool hit);

  std::unordered_map<int32_t, Source> sources_;
  Weights weights_;
  std::unordered_map<int64_t, Kept> kept_;
};

// How many nodes of each tree are worth verifying: every number of the best of all is looked at.
struct Spread {
  std::vector<int32_t> counts;
  double tokens, seconds;
};

// reaches: of each row's nodes, falling. costs: seconds of a pass by token rows; base, tokens: rows and expected tokens
// without these nodes; fixed: seconds beside the pass.
Spread spread(const std::vector<std::vector<double>>& reaches, const std::vector<double>& costs, size_t base,
              double tokens, double fixed);

}  // namespace slip
