// Order, cuts and the draw. The vocabulary is never sorted: tokens come in order only as far as asked for.
#include "sampling.h"

#include <algorithm>
#include <limits>

#include "sampling_math.h"

namespace slip {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kSlack = 1e-9;       // bounds on noise are rounded
constexpr size_t kNoiseChunk = 4096;  // the bar is raised after each; a multiple of kScoreBlock

bool before(const Scored& a, const Scored& b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }
bool after(const Scored& a, const Scored& b) { return before(b, a); }

// The best `count` seen, best first.
class Best {
 public:
  explicit Best(size_t count) : count_(count) {}
  double bar() const { return items_.size() < count_ ? -kInfinity : items_.back().score; }
  void offer(Scored item) {
    if (items_.size() == count_ && !before(item, items_.back())) return;
    if (items_.size() == count_) items_.pop_back();
    items_.insert(std::upper_bound(items_.begin(), items_.end(), item, before), item);
  }
  std::vector<Scored> take() { return std::move(items_); }

 private:
  size_t count_;
  std::vector<Scored> items_;
};

}  // namespace

// Tokens with z >= floor in order, collected in rings below the peak. Each ring is an incremental quicksort: the best
// tokens stand at the end, and only as much is sorted as is asked for.
class SamplingRow::Ordered {
 public:
  Ordered(SamplingRow& row, double floor) : row_(row), floor_(floor), items_(row.items_) { items_.clear(); }

  bool next(Scored& item) {
    while (items_.empty()) {
      if (high_ <= floor_ || ring_ == std::size(kDepths)) return false;
      const double low = std::max(row_.peak_ - kDepths[ring_++], floor_);
      fill(low);
      high_ = low;
    }
    if (sorted_ >= items_.size()) sort_more();
    item = items_.back();
    items_.pop_back();
    return true;
  }

 private:
  // The last ring takes all that is finite.
  static constexpr double kDepths[] = {2.0, 6.0, 12.0, 24.0, kInfinity};
  static constexpr size_t kSmall = 48;

  void fill(double low) {
    low = std::max(low, std::numeric_limits<double>::lowest());
    const size_t found =
        row_.table_->between(row_.z_.data(), row_.n_, row_.block_max_.data(), low, high_, row_.ids_.data());
    items_.resize(found);
    for (size_t i = 0; i < found; i++) items_[i] = {row_.z_[static_cast<size_t>(row_.ids_[i])], row_.ids_[i]};
    starts_.assign(1, 0);
    sorted_ = found;  // nothing is sorted yet
  }

  // Splits the last unsorted part until it is small, then sorts it. starts_: where parts begin, better ones later.
  void sort_more() {
    while (starts_.back() >= items_.size()) starts_.pop_back();
    while (items_.size() - starts_.back() > kSmall) {
      const auto begin = items_.begin() + static_cast<ptrdiff_t>(starts_.back());
      const size_t size = items_.size() - starts_.back(), step = size / 8;
      Scored sample[8];
      for (size_t i = 0; i < 8; i++) sample[i] = begin[static_cast<ptrdiff_t>(i * step + step / 2)];
      std::sort(sample, sample + 8, before);
      const Scored pivot = sample[2];
      const auto middle = std::partition(begin, items_.end(), [&](const Scored& one) { return before(pivot, one); });
      starts_.push_back(static_cast<size_t>(middle - items_.begin()));
    }
    sorted_ = starts_.back();
    std::sort(items_.begin() + static_cast<ptrdiff_t>(sorted_), items_.end(), after);
  }

  SamplingRow& row_;
  double floor_, high_ = kInfinity;
  size_t ring_ = 0, sorted_ = 0;
  std::vector<Scored>& items_;
  std::vector<size_t> starts_;
};

bool SamplingRow::prepare(const SamplingTable& table, const float* logits, size_t n, const int64_t* ids,
                          const double* values, size_t changed, double temperature) {
  table_ = &table;
  n_ = n;
  const size_t blocks = (n + kScoreBlock - 1) / kScoreBlock;
  if (z_.size() < n) {
    z_.resize(n);
    ids_.resize(n + 1);  // one place more: the kernels write before they count
    block_max_.resize(blocks);
  }
  if (!table.scale(logits, n, temperature, z_.data(), block_max_.data())) return false;
  for (size_t i = 0; i < changed; i++) {
    const size_t id = static_cast<size_t>(ids[i]), block = id / kScoreBlock;
    const double old = z_[id];
    double& top = block_max_[block];
    z_[id] = temperature > 0.0 ? values[i] / temperature : values[i];
    if (z_[id] >= top) {
      top = z_[id];
    } else if (old == top) {  // it may have been the block's only maximum
      top = *std::max_element(z_.begin() + static_cast<ptrdiff_t>(block * kScoreBlock),
                              z_.begin() + static_cast<ptrdiff_t>(std::min(n, (block + 1) * kScoreBlock)));
    }
  }
  peak_ = -kInfinity;
  for (size_t block = 0; block < blocks; block++) peak_ = std::max(peak_, block_max_[block]);
  return peak_ > -kInfinity && peak_ < kInfinity;
}

// Fills kept_ with what survives min_p, top_k and top_p. False when nothing cuts: then all tokens stay.
bool SamplingRow::cut(const SamplingRule& rule) {
  const bool by_rank = rule.top_k > 0 && static_cast<size_t>(rule.top_k) < n_;
  if (rule.min_p <= 0.0 && !by_rank && rule.top_p >= 1.0) return false;
  const double floor = rule.min_p > 0.0 ? peak_ + log_of(rule.min_p) : -kInfinity;
  const size_t most = by_rank ? static_cast<size_t>(rule.top_k) : n_;
  Ordered ordered(*this, floor);
  Scored item;
  kept_.clear();
  if (rule.top_p >= 1.0) {
    while (kept_.size() < most && ordered.next(item)) kept_.push_back(item);
    return true;
  }
  double total = 0.0;
  if (by_rank) {
    while (kept_.size() < most && ordered.next(item)) kept_.push_back(item);
    for (const Scored& one : kept_) total += exp_of(one.score - peak_);
  } else {
    total = table_->exp_sum(z_.data(), n_, peak_, floor);
  }
  const double target = rule.top_p * total;
  double running = 0.0;
  size_t size = 0;
  while (size < kept_.size() || (!by_rank && ordered.next(item))) {
    if (size == kept_.size()) kept_.push_back(item);
    running += exp_of(kept_[size++].score - peak_);
    if (running >= target) break;
  }
  kept_.resize(size);
  return true;
}

std::vector<Scored> SamplingRow::select(const SamplingRule& rule, uint64_t key, size_t count) {
  if (rule.temperature <= 0.0) {
    Ordered ordered(*this, -kInfinity);
    std::vector<Scored> best;
    Scored item;
    while (best.size() < count && ordered.next(item)) best.push_back(item);
    return best;
  }
  if (!cut(rule)) return best_of_all(key, count);
  Best best(count);
  for (const Scored& item : kept_) {
    const uint64_t h = hash_of(key, static_cast<uint64_t>(item.id));
    if (item.score + noise_bound(h) + kSlack < best.bar()) continue;
    best.offer({item.score + -log_of(-log_of(uniform_of(h))), item.id});
  }
  return best.take();
}

// Without cuts: noise only where it can still reach the bar, which starts at the noisy score of the likeliest token.
std::vector<Scored> SamplingRow::best_of_all(uint64_t key, size_t count) {
  Best best(count);
  double bar = -kInfinity;
  if (count == 1) {
    Ordered ordered(*this, -kInfinity);
    Scored top{};
    ordered.next(top);
    bar = top.score + gumbel_of(key, static_cast<uint64_t>(top.id));
  }
  for (size_t begin = 0; begin < n_; begin += kNoiseChunk) {
    const size_t end = std::min(n_, begin + kNoiseChunk);
    bar = std::max(bar, best.bar());
    const size_t found = table_->contenders(z_.data(), begin, end, key, bar - kSlack, ids_.data());
    for (size_t i = 0; i < found; i++) {
      const double z = z_[static_cast<size_t>(ids_[i])];
      if (z == -kInfinity) continue;
      const uint64_t h = hash_of(key, static_cast<uint64_t>(ids_[i]));
      if (z + noise_bound(h) + kSlack < best.bar()) continue;
      best.offer({z + -log_of(-log_of(uniform_of(h))), ids_[i]});
    }
  }
  return best.take();
}

void SamplingRow::probabilities(const SamplingRule& rule, double* p) {
  std::fill(p, p + n_, 0.0);
  if (rule.temperature <= 0.0) {
    p[static_cast<size_t>(std::find(z_.begin(), z_.begin() + static_cast<ptrdiff_t>(n_), peak_) - z_.begin())] = 1.0;
    return;
  }
  if (cut(rule))
    for (const Scored& item : kept_) p[item.id] = exp_of(item.score - peak_);
  else
    table_->exp_all(z_.data(), n_, peak_, p);
  double lane[kLanes] = {};
  size_t v = 0;
  for (; v + kLanes <= n_; v += kLanes)
    for (int j = 0; j < kLanes; j++) lane[j] += p[v + static_cast<size_t>(j)];
  for (int j = 0; v < n_; v++, j++) lane[j] += p[v];
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int j = 0; j < half; j++) lane[j] += lane[j + half];
  for (v = 0; v < n_; v++) p[v] /= lane[0];
}

double SamplingRow::log_total() const {
  return log_of(table_->exp_sum(z_.data(), n_, peak_, -kInfinity));
}

}  // namespace slip
