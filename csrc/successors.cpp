// Blending rows and growing trees; a few microseconds per row.
#include "successors.h"

#include <algorithm>

#include "sampling_math.h"

namespace slip {
namespace {

constexpr float kNewest = 0.5f;      // weight of what was shown last
constexpr double kPairWeight = 0.85;  // weight of the pair's row, where it is known, against the single token's

struct Candidate {
  double weight;
  int32_t id;
};

// A node that may be taken: `order` settles ties.
struct Waiting {
  double reach, chance;
  size_t order, depth;
  int64_t before;
  int32_t token, parent;
};

bool later(const Waiting& a, const Waiting& b) { return a.reach < b.reach || (a.reach == b.reach && a.order > b.order); }

}  // namespace

size_t Successors::row_of(int64_t before, int64_t token) const {
  const uint64_t h = static_cast<uint64_t>(before) * 0x9E3779B1u + static_cast<uint64_t>(token) * 0x85EBCA77u;
  return vocab + (h >> 7) % pairs;
}

void Successors::learn(const SamplingTable& table, int64_t before, int64_t token, const float* logits) {
  int32_t next[kSuccessors];
  float weight[kSuccessors];
  table.top(logits, vocab, kSuccessors, next, weight);
  if (next[0] < 0 || weight[0] == __builtin_inff()) return;
  const double peak = weight[0];
  double share[kSuccessors], total = 0.0;
  for (size_t i = 0; i < kSuccessors; i++) {
    share[i] = next[i] < 0 ? 0.0 : exp_of(static_cast<double>(weight[i]) - peak);
    total += share[i];
  }
  for (size_t i = 0; i < kSuccessors; i++) weight[i] = static_cast<float>(share[i] / total);
  blend(before, token, next, weight, true);
}

void Successors::saw(int64_t before, int64_t token, int64_t next) {
  int32_t ids_[kSuccessors] = {static_cast<int32_t>(next), -1, -1, -1, -1, -1, -1, -1};
  float weight[kSuccessors] = {1.0f};
  blend(before, token, ids_, weight, false);
}

void Successors::blend(int64_t before, int64_t token, const int32_t* next, const float* weight, bool whole) {
  blend_row(static_cast<size_t>(token), next, weight, whole);
  if (before < 0) return;
  const size_t row = row_of(before, token);
  int64_t& name = owner[row - vocab];
  if (name != name_of(before, token)) {
    name = name_of(before, token);
    std::fill_n(ids + row * kSuccessors, kSuccessors, -1);
    std::fill_n(weights + row * kSuccessors, kSuccessors, 0.0f);
  }
  blend_row(row, next, weight, whole);
}

// whole: the list is the model's own, and fills an empty row; a single sighting never does.
void Successors::blend_row(size_t row, const int32_t* next, const float* weight, bool whole) {
  int32_t* old_ids = ids + row * kSuccessors;
  float* old = weights + row * kSuccessors;
  const float share = whole && old[0] <= 0.0f ? 1.0f : kNewest;
  int32_t both_ids[2 * kSuccessors];
  float both[2 * kSuccessors];
  size_t count = 0;
  for (size_t i = 0; i < kSuccessors && next[i] >= 0; i++, count++) both_ids[count] = next[i], both[count] = share * weight[i];
  const size_t fresh = count;
  for (size_t j = 0; j < kSuccessors && old_ids[j] >= 0; j++) {
    const float rest = (1.0f - share) * old[j];
    const size_t same = static_cast<size_t>(std::find(both_ids, both_ids + fresh, old_ids[j]) - both_ids);
    if (same < fresh) {
      both[same] += rest;
    } else {
      both_ids[count] = old_ids[j];
      both[count++] = rest;
    }
  }
  for (size_t i = 1; i < count; i++)  // insertion sort: stable, best first
    for (size_t j = i; j > 0 && both[j] > both[j - 1]; j--) {
      std::swap(both[j], both[j - 1]);
      std::swap(both_ids[j], both_ids[j - 1]);
    }
  for (size_t i = 0; i < kSuccessors; i++) {
    const bool kept = i < count && both[i] > 0.0f;
    old_ids[i] = kept ? both_ids[i] : -1;
    old[i] = kept ? both[i] : 0.0f;
  }
}

void SuccessorTree::grow(const Successors& table, int64_t before, int64_t token, const Limits& limits) {
  std::vector<Waiting> waiting;
  size_t order = 0, depth = 0;
  int32_t parent = -1;
  double reach = 1.0;
  while (tokens.size() < limits.nodes) {
    if (depth < limits.depth) {
      Candidate found[2 * kSuccessors];
      size_t count = 0;
      const size_t single = static_cast<size_t>(token) * kSuccessors;
      for (size_t i = 0; i < kSuccessors && table.ids[single + i] >= 0; i++)
        found[count++] = {table.weights[single + i], table.ids[single + i]};
      const size_t row = before < 0 ? table.vocab : table.row_of(before, token);
      if (before >= 0 && table.owner[row - table.vocab] == table.name_of(before, token)) {
        for (size_t i = 0; i < count; i++) found[i].weight *= 1.0 - kPairWeight;
        const size_t of_single = count;
        for (size_t i = row * kSuccessors; i < (row + 1) * kSuccessors && table.ids[i] >= 0; i++) {
          const double weight = kPairWeight * table.weights[i];
          size_t same = 0;
          while (same < of_single && found[same].id != table.ids[i]) same++;
          if (same < of_single) found[same].weight += weight;
          else found[count++] = {weight, table.ids[i]};
        }
      }
      std::stable_sort(found, found + count, [](const Candidate& a, const Candidate& b) { return a.weight > b.weight; });
      for (size_t i = 0; i < std::min(count, limits.width); i++) {
        const double chance = std::min(found[i].weight, limits.certain);
        if (reach * chance < limits.least) break;
        waiting.push_back({reach * chance, chance, order++, depth + 1, token, found[i].id, parent});
        std::push_heap(waiting.begin(), waiting.end(), later);
      }
    }
    if (waiting.empty()) break;
    std::pop_heap(waiting.begin(), waiting.end(), later);
    const Waiting best = waiting.back();
    waiting.pop_back();
    parent = static_cast<int32_t>(tokens.size());
    tokens.push_back(best.token);
    parents.push_back(best.parent);
    chances.push_back(best.chance);
    before = best.before, token = best.token, depth = best.depth, reach = best.reach;
  }
}

}  // namespace slip
