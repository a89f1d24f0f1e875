// An online suffix automaton over token ids and the drafts it makes. Twin: kernels/reference_suffix.py, same results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace slip {

class SuffixAutomaton {
 public:
  struct Tree {
    std::vector<int32_t> tokens, parents;
    std::vector<double> chances, matches;
  };

  SuffixAutomaton() { add_state(0); }
  size_t size() const { return size_; }
  void append(int32_t token);
  // The most probable continuations of the longest suffix that occurs earlier, by falling probability of their path.
  Tree tree(size_t nodes, size_t depth, size_t width, double least) const;

 private:
  // A state stands for all substrings that end at the same places. Nearly every state has one continuation, kept in
  // it; the others are in more_, and listed by state in more_tokens_.
  struct State {
    int32_t link, length, count, latest, token, to;
  };
  struct Guess {
    double chance;
    int32_t latest, token, after, match;
  };

  int32_t add_state(int32_t length);
  int32_t step(int32_t state, int32_t token) const;
  void connect(int32_t state, int32_t token, int32_t target);
  int32_t split(int32_t state, int32_t token, int32_t found);
  void recount(int32_t added, int32_t before, int32_t token);
  void refresh(int32_t state, int32_t token);
  bool less_frequent(int32_t state, int32_t token, int32_t other) const;
  const std::vector<int32_t>& most_frequent(int32_t state) const;
  void predict(int32_t state, int32_t match, size_t width, std::vector<Guess>& found) const;

  std::vector<State> states_;
  std::unordered_map<uint64_t, int32_t> more_;
  std::unordered_map<int32_t, std::vector<int32_t>> more_tokens_;
  mutable std::unordered_map<int32_t, std::vector<int32_t>> frequent_;  // of wide states that were asked for
  int32_t last_ = 0;
  size_t size_ = 0;
};

}  // namespace slip
