// After Blumer et al. (1985); adding a token is amortised constant time.
#include "suffix.h"

#include <algorithm>

namespace slip {
namespace {

constexpr int32_t kRoot = 0, kNone = -1;
constexpr int kCountedSuffixes = 64;  // suffixes of the text that are counted per token, longest first
constexpr size_t kWide = 12, kKept = 8;  // a state with more continuations keeps a list of its most frequent ones
constexpr int kBackedOff = 3;            // contexts that are blended
constexpr double kIgnored = 0.1, kDoubt = 3.0, kMostCertain = 0.99;

uint64_t key_of(int32_t state, int32_t token) {
  return static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32 | static_cast<uint32_t>(token);
}

// A node that may be taken: `order` settles ties.
struct Waiting {
  double reach, chance;
  size_t order, depth;
  int32_t token, after, match, parent;
};

bool later(const Waiting& a, const Waiting& b) { return a.reach < b.reach || (a.reach == b.reach && a.order > b.order); }

}  // namespace

int32_t SuffixAutomaton::add_state(int32_t length) {
  states_.push_back({kNone, length, 0, 0, kNone, kNone});
  return static_cast<int32_t>(states_.size()) - 1;
}

int32_t SuffixAutomaton::step(int32_t state, int32_t token) const {
  const State& here = states_[static_cast<size_t>(state)];
  if (here.token == token) return here.to;
  const auto found = more_.find(key_of(state, token));
  return found == more_.end() ? kNone : found->second;
}

void SuffixAutomaton::connect(int32_t state, int32_t token, int32_t target) {
  State& here = states_[static_cast<size_t>(state)];
  if (here.token == kNone) {
    here.token = token, here.to = target;
  } else {
    more_[key_of(state, token)] = target;
    more_tokens_[state].push_back(token);
  }
}

void SuffixAutomaton::append(int32_t token) {
  const int32_t before = last_, added = add_state(static_cast<int32_t>(size_) + 1);
  int32_t state = last_, found = step(state, token);
  while (found == kNone) {
    connect(state, token, added);
    state = states_[static_cast<size_t>(state)].link;
    if (state == kNone) break;
    found = step(state, token);
  }
  int32_t link = kRoot;
  if (state != kNone) {
    const bool whole = states_[static_cast<size_t>(state)].length + 1 == states_[static_cast<size_t>(found)].length;
    link = whole ? found : split(state, token, found);
  }
  states_[static_cast<size_t>(added)].link = link;
  last_ = added;
  size_++;
  recount(added, before, token);
}

// Give the shorter substrings of `found` a state of their own, because they now occur once more.
int32_t SuffixAutomaton::split(int32_t state, int32_t token, int32_t found) {
  const int32_t clone = add_state(states_[static_cast<size_t>(state)].length + 1);
  State copy = states_[static_cast<size_t>(found)];
  copy.length = states_[static_cast<size_t>(clone)].length;
  states_[static_cast<size_t>(clone)] = copy;
  if (const auto more = more_tokens_.find(found); more != more_tokens_.end()) {
    const std::vector<int32_t> tokens = more->second;
    for (const int32_t one : tokens) more_[key_of(clone, one)] = more_[key_of(found, one)];
    more_tokens_[clone] = tokens;
  }
  while (state != kNone && step(state, token) == found) {
    State& here = states_[static_cast<size_t>(state)];
    if (here.token == token) here.to = clone;
    else more_[key_of(state, token)] = clone;
    state = here.link;
  }
  states_[static_cast<size_t>(found)].link = clone;
  return clone;
}

// All suffixes of the text occurred once more; `token` followed all suffixes of the text before it.
void SuffixAutomaton::recount(int32_t added, int32_t before, int32_t token) {
  int32_t state = added;
  for (int i = 0; i < kCountedSuffixes; i++) {
    State& here = states_[static_cast<size_t>(state)];
    here.count++;
    here.latest = static_cast<int32_t>(size_);
    state = here.link;
    if (state <= kRoot) break;
  }
  if (frequent_.empty()) return;
  state = before;
  for (int i = 0; i < kCountedSuffixes && state > kRoot; i++) {
    if (frequent_.count(state) != 0) refresh(state, token);
    state = states_[static_cast<size_t>(state)].link;
  }
}

bool SuffixAutomaton::less_frequent(int32_t state, int32_t token, int32_t other) const {
  const State& one = states_[static_cast<size_t>(step(state, token))];
  const State& two = states_[static_cast<size_t>(step(state, other))];
  return one.count < two.count || (one.count == two.count && one.latest < two.latest);
}

const std::vector<int32_t>& SuffixAutomaton::most_frequent(int32_t state) const {
  const auto known = frequent_.find(state);
  if (known != frequent_.end()) return known->second;
  std::vector<int32_t> tokens = more_tokens_.at(state);
  tokens.push_back(states_[static_cast<size_t>(state)].token);
  const size_t kept = std::min(kKept, tokens.size());
  std::partial_sort(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(kept), tokens.end(),
                    [&](int32_t a, int32_t b) { return less_frequent(state, b, a); });
  tokens.resize(kept);
  return frequent_[state] = tokens;
}

// Only the rank of `token` has changed, and it rose: the best of (kept, token) are the best of all.
void SuffixAutomaton::refresh(int32_t state, int32_t token) {
  std::vector<int32_t>& kept = frequent_[state];
  if (std::find(kept.begin(), kept.end(), token) != kept.end()) return;
  if (kept.size() < kKept) {
    kept.push_back(token);
    return;
  }
  const auto worst =
      std::min_element(kept.begin(), kept.end(), [&](int32_t a, int32_t b) { return less_frequent(state, a, b); });
  if (less_frequent(state, *worst, token)) *worst = token;
}

// The `width` most probable next tokens after `state`, of which the last `match` tokens are the text's own.
void SuffixAutomaton::predict(int32_t state, int32_t match, size_t width, std::vector<Guess>& found) const {
  found.clear();
  double rest = 1.0;
  for (int i = 0; i < kBackedOff && state > kRoot && rest >= kIgnored; i++) {
    const State& here = states_[static_cast<size_t>(state)];
    const int32_t followers = here.count - (here.latest == static_cast<int32_t>(size_) ? 1 : 0);
    if (followers > 0) {
      const double seen = static_cast<double>(followers) * match, trust = seen / (seen + kDoubt);
      const double weight = rest * trust / followers;
      rest *= 1.0 - trust;
      const auto add = [&](int32_t token) {
        const int32_t after = step(state, token);
        const State& next = states_[static_cast<size_t>(after)];
        for (Guess& one : found)
          if (one.token == token) {
            one.chance += weight * next.count;
            return;
          }
        found.push_back({weight * next.count, next.latest, token, after, match + 1});
      };
      const auto more = more_tokens_.find(state);
      if (more != more_tokens_.end() && more->second.size() >= kWide) {
        for (const int32_t token : most_frequent(state)) add(token);
      } else if (here.token != kNone) {
        add(here.token);
        if (more != more_tokens_.end())
          for (const int32_t token : more->second) add(token);
      }
    }
    state = here.link;
    match = state > kRoot ? states_[static_cast<size_t>(state)].length : 0;
  }
  for (Guess& one : found) one.chance = std::min(one.chance, kMostCertain);
  std::sort(found.begin(), found.end(), [](const Guess& a, const Guess& b) {
    if (a.chance != b.chance) return a.chance > b.chance;
    return a.latest != b.latest ? a.latest > b.latest : a.token > b.token;
  });
  if (found.size() > width) found.resize(width);
}

SuffixAutomaton::Tree SuffixAutomaton::tree(size_t nodes, size_t depth, size_t width, double least) const {
  Tree tree;
  int32_t state = std::max(kRoot, states_[static_cast<size_t>(last_)].link);
  if (state == kRoot) return tree;
  std::vector<Waiting> waiting;
  std::vector<Guess> guesses;
  size_t order = 0, at_depth = 0;
  int32_t match = states_[static_cast<size_t>(state)].length, parent = -1;
  double reach = 1.0;
  while (tree.tokens.size() < nodes) {
    if (at_depth < depth) {
      predict(state, match, width, guesses);
      for (const Guess& one : guesses) {
        if (reach * one.chance < least) break;
        waiting.push_back({reach * one.chance, one.chance, order++, at_depth + 1, one.token, one.after, one.match, parent});
        std::push_heap(waiting.begin(), waiting.end(), later);
      }
    }
    if (waiting.empty()) break;
    std::pop_heap(waiting.begin(), waiting.end(), later);
    const Waiting best = waiting.back();
    waiting.pop_back();
    parent = static_cast<int32_t>(tree.tokens.size());
    tree.tokens.push_back(best.token);
    tree.parents.push_back(best.parent);
    tree.chances.push_back(best.chance);
    tree.matches.push_back(best.match);
    state = best.after, match = best.match, at_depth = best.depth, reach = best.reach;
  }
  return tree;
}

}  // namespace slip
