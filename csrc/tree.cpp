#include "tree.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "sampling_math.h"

namespace slip {
namespace {

constexpr int32_t kAnchor = -1;
constexpr int kDepthEdges[] = {1, 2, 4, 8};
constexpr double kWeight = 4.0, kForget = 0.97, kLeast = 0.002, kMost = 0.99, kMostCertain = 0.995;
constexpr double kTogether = 0.7, kMiss = -0.9, kNoise = 0.7, kNoiseCentre = 0.6;
constexpr double kWeightPrecision = 8.0, kBiasPrecision = 4.0, kMostPrecision = 150.0;
constexpr uint64_t kNoiseWeight = 1ull << 32, kBias = 1ull << 63, kDeep = 1ull << 62, kSampled = 1ull << 61;
constexpr int32_t kMostSources = 28;  // two bits each in a pattern

int level_of(int32_t depth) { return static_cast<int>(std::lower_bound(kDepthEdges, kDepthEdges + 4, depth) - kDepthEdges); }

size_t bin_of(double belief) { return static_cast<size_t>(belief * 10.0); }

double stretch(double p) { return std::log(p / (1.0 - p)); }

double squash(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Calls found(node, depth, hit) for every node whose parent lies on the path of the emitted tokens.
template <typename Tokens, typename Parents, typename Found>
void decided(size_t count, Tokens token, Parents parent, const std::vector<int32_t>& emitted, Found found) {
  std::vector<int32_t> standing(count, -1);
  for (size_t node = 0; node < count; node++) {
    const int32_t above = parent(node), depth = above == kAnchor ? 0 : standing[static_cast<size_t>(above)];
    if (depth < 0 || static_cast<size_t>(depth) >= emitted.size()) continue;
    const bool hit = token(node) == emitted[static_cast<size_t>(depth)];
    if (hit) standing[node] = depth + 1;
    found(node, depth + 1, hit);
  }
}

}  // namespace

void Ranker::Tally::add(bool hit, double belief) {
  seen = seen * kForget + 1.0;
  hits = hits * kForget + (hit ? 1.0 : 0.0);
  believed = believed * kForget + belief;
}

double Ranker::chance(int32_t source, double belief, int32_t depth) const {
  const auto found = sources_.find(source);
  if (found == sources_.end()) return std::min(std::max(belief, kLeast), kMost);
  const Source& known = found->second;
  const size_t bin = bin_of(belief);
  double expected = std::min(belief * (known.whole.hits + kWeight) / (known.whole.believed + kWeight), kMost);
  const Tally& coarse = known.bins[bin];
  expected = (coarse.hits + kWeight * expected) / (coarse.seen + kWeight);
  const Tally& fine = known.cells[bin][static_cast<size_t>(level_of(depth))];
  expected = (fine.hits + kWeight * expected) / (fine.seen + kWeight);
  return std::min(std::max(expected, kLeast), kMost);
}

void Ranker::observe(int32_t source, double belief, int32_t depth, bool hit) {
  Source& known = sources_[source];
  const size_t bin = bin_of(belief);
  known.whole.add(hit, belief);
  known.bins[bin].add(hit, belief);
  known.cells[bin][static_cast<size_t>(level_of(depth))].add(hit, belief);
}

// The same token below the same path is one node; its inputs are the chances that sources gave it.
std::vector<Ranker::Node> Ranker::unite(const std::vector<Offer>& offers) const {
  std::vector<Node> nodes;
  std::vector<std::vector<int32_t>> speaks(offers.size());  // parents below which a source offers something
  for (size_t i = 0; i < offers.size(); i++) {
    const Offer& offer = offers[i];
    std::vector<int32_t> place;
    for (size_t k = 0; k < offer.tokens.size(); k++) {
      const int32_t above = offer.parents[k] == kAnchor ? kAnchor : place[static_cast<size_t>(offer.parents[k])];
      size_t at = 0;
      while (at < nodes.size() && (nodes[at].token != offer.tokens[k] || nodes[at].parent != above)) at++;
      const int32_t depth = above == kAnchor ? 1 : nodes[static_cast<size_t>(above)].depth + 1;
      if (at == nodes.size()) nodes.push_back({offer.tokens[k], above, depth, offer.source, 0, 0.0, 0.0, 0, {}});
      Node& node = nodes[at];
      const double alone = chance(offer.source, offer.beliefs[k], depth);
      if (alone > node.best) node.best = alone, node.source = offer.source;
      node.inputs.push_back({static_cast<uint64_t>(offer.source) * 2, stretch(alone)});
      place.push_back(static_cast<int32_t>(at));
      speaks[i].push_back(above);
    }
  }
  for (Node& node : nodes) {
    node.pattern = kBias | (node.depth > 1 ? kDeep : 0);
    for (size_t i = 0; i < offers.size(); i++) {
      const uint64_t own = static_cast<uint64_t>(offers[i].source) * 2;
      const bool offered = std::any_of(node.inputs.begin(), node.inputs.end(), [own](const Input& one) { return one.weight == own; });
      const bool spoke = std::find(speaks[i].begin(), speaks[i].end(), node.parent) != speaks[i].end();
      node.misses += offered ? 0 : 1;
      node.pattern |= (offered ? 3ull : spoke ? 2ull : 1ull) << (2 * (offers[i].source % kMostSources));
    }
    if (node.inputs.size() > 1)
      for (Input& one : node.inputs) one.weight++;
  }
  return nodes;
}

Ranker::Weight Ranker::weight_of(const Node& node, size_t input) const {
  const uint64_t name = input < node.inputs.size() ? node.inputs[input].weight : node.pattern;
  const auto found = weights_.find(name);
  if (found != weights_.end()) return found->second;
  if (name == node.pattern) return {kMiss * node.misses, kBiasPrecision};
  if (name == kNoiseWeight) return {kNoise, kWeightPrecision};
  return {name % 2 ? kTogether : 1.0, kWeightPrecision};
}

double Ranker::mix(const Node& node) const {
  double sum = 0.0;
  for (size_t i = 0; i < node.inputs.size(); i++) sum += weight_of(node, i).value * node.inputs[i].value;
  return squash(sum + weight_of(node, node.inputs.size()).value);
}

// A step of diagonal Newton descent on the logistic loss; the limit of precision lets old observations fade.
void Ranker::teach(const Node& node, bool hit) {
  const double p = mix(node), error = (hit ? 1.0 : 0.0) - p, curve = p * (1.0 - p);
  for (size_t i = 0; i <= node.inputs.size(); i++) {
    const bool bias = i == node.inputs.size();
    const double x = bias ? 1.0 : node.inputs[i].value;
    Weight weight = weight_of(node, i);
    weight.precision = std::min(weight.precision + curve * x * x, kMostPrecision);
    weight.value += error * x / weight.precision;
    weights_[bias ? node.pattern : node.inputs[i].weight] = weight;
  }
}

RankedTree Ranker::rank(int64_t row, std::vector<Offer> offers, const std::vector<uint64_t>& keys, double scale,
                        bool keep) {
  std::vector<Node> nodes = unite(offers);
  std::vector<double> total(nodes.size() + 1, 0.0), odds(nodes.size() + 1, 1.0), reach(nodes.size());
  for (Node& node : nodes) {
    if (static_cast<size_t>(node.depth) <= keys.size()) {
      const double noise = gumbel_of(keys[static_cast<size_t>(node.depth) - 1], static_cast<uint64_t>(node.token));
      node.inputs.push_back({kNoiseWeight, scale * (noise - kNoiseCentre)});
      node.pattern |= kSampled;
    }
    node.chance = std::min(std::max(mix(node), kLeast), kMost);
    total[static_cast<size_t>(node.parent + 1)] += node.chance;
  }
  // Where siblings sum to more than one, each gets its share of their odds: a sure one hardly suffers from doubtful rivals.
  for (const Node& node : nodes) odds[static_cast<size_t>(node.parent + 1)] += node.chance / (1.0 - node.chance);
  for (size_t i = 0; i < nodes.size(); i++) {
    Node& node = nodes[i];
    const size_t above = static_cast<size_t>(node.parent + 1);
    if (total[above] > kMostCertain) node.chance = node.chance / (1.0 - node.chance) / odds[above];
    reach[i] = node.chance * (above ? reach[above - 1] : 1.0);
  }
  std::vector<size_t> order(nodes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return reach[a] > reach[b]; });
  RankedTree tree;
  std::vector<int32_t> place(nodes.size());
  for (const size_t i : order) {
    const Node& node = nodes[i];
    place[i] = static_cast<int32_t>(tree.tokens.size());
    tree.tokens.push_back(node.token);
    tree.parents.push_back(node.parent == kAnchor ? kAnchor : place[static_cast<size_t>(node.parent)]);
    tree.sources.push_back(node.source);
    tree.chances.push_back(node.chance);
    tree.reach.push_back(reach[i]);
  }
  if (keep) kept_[row] = {std::move(offers), std::move(nodes)};
  return tree;
}

std::vector<std::pair<int32_t, double>> Ranker::learn(int64_t row, const std::vector<int32_t>& emitted) {
  std::vector<std::pair<int32_t, double>> surprises;
  const auto found = kept_.find(row);
  if (found == kept_.end()) return surprises;
  const Kept& kept = found->second;
  decided(
      kept.nodes.size(), [&](size_t i) { return kept.nodes[i].token; }, [&](size_t i) { return kept.nodes[i].parent; },
      emitted, [&](size_t i, int32_t, bool hit) { teach(kept.nodes[i], hit); });
  for (const Offer& offer : kept.offers) {
    double surprise = 0.0;
    decided(
        offer.tokens.size(), [&](size_t i) { return offer.tokens[i]; }, [&](size_t i) { return offer.parents[i]; },
        emitted, [&](size_t i, int32_t depth, bool hit) {
          if (hit && depth == 1) surprise = std::min(1.0, 2.0 - 2.0 * chance(offer.source, offer.beliefs[i], 1));
          observe(offer.source, offer.beliefs[i], depth, hit);
        });
    surprises.emplace_back(offer.source, surprise);
  }
  kept_.erase(found);
  return surprises;
}

Spread spread(const std::vector<std::vector<double>>& reaches, const std::vector<double>& costs, size_t base,
              double tokens, double fixed) {
  std::vector<std::pair<double, size_t>> nodes;
  for (size_t row = 0; row < reaches.size(); row++)
    for (const double reach : reaches[row]) nodes.emplace_back(reach, row);
  std::stable_sort(nodes.begin(), nodes.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  Spread best{std::vector<int32_t>(reaches.size(), 0), tokens, costs[base] + fixed};
  size_t count = 0;
  for (size_t n = 1; n <= nodes.size() && base + n < costs.size(); n++) {
    tokens += nodes[n - 1].first;
    const double seconds = costs[base + n] + fixed;
    if (tokens * best.seconds > best.tokens * seconds) count = n, best.tokens = tokens, best.seconds = seconds;
  }
  for (size_t n = 0; n < count; n++) best.counts[nodes[n].second]++;
  return best;
}

}  // namespace slip
