#include "head.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "isa.h"
#include "pool.h"

namespace slip {

namespace {

const OpsTable& ops() { return kernels().ops; }

// Some vectors are read up to 15 floats past their end.
void ensure(std::vector<float>& buffer, size_t floats) {
  if (buffer.size() < floats + 16) buffer.resize(floats + 16);
}

// Rows of elementwise work that are worth a second thread: the few of a draft are done before it wakes.
constexpr int64_t kGrain = 16;

template <class F> void for_rows(int rows, F&& body) {
  const int64_t tasks = (rows + kGrain - 1) / kGrain;
  auto ranges = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kGrain; row < std::min<int64_t>(rows, end * kGrain); row++) body(static_cast<size_t>(row));
  };
  if (tasks <= 1) return ranges(0, tasks);
  Pool::instance().parallel_for(tasks, ranges);
}

}  // namespace

Head::Head(HeadWeights weights, float* pool) : w_(std::move(weights)), decoder_(w_.decoder, pool) {}

void Head::forward(const HeadPass& pass) {
  const FpScope mode;
  const size_t rows = pass.rows.rows, n = w_.decoder.shape.hidden;
  ensure(embedded_, rows * n), ensure(h_, rows * n), ensure(x_, rows * n), ensure(states_, rows * n);
  ensure(entry_, rows * 2 * n);
  for_rows(pass.rows.rows, [&](size_t r) { unpack_row(w_.decoder.embedding, pass.rows.tokens[r], &embedded_[r * n]); });
  if (w_.three) enter_three(pass);
  else enter_one(pass);
  const Entry entry{x_.data(), entry_.data(), w_.entry_width(), pass.older};
  const int stored = pass.store ? pass.rows.sequences : 0;
  decoder_.forward(pass.rows, nullptr, states_.data(), pass.count > 0 ? pass.rows.rows : 0, stored, &entry);
  if (pass.count > 0) finish(pass);
}

// The features as fc takes them.
const float* Head::features(const HeadPass& pass) {
  if (w_.feature_norm == nullptr) return pass.given;
  const size_t width = size_t(w_.features) * w_.feature;
  ensure(features_, pass.rows.rows * width);
  for_rows(pass.rows.rows, [&](size_t r) {
    for (size_t i = 0; i < width; i += w_.feature)
      ops().rms_norm(pass.given + r * width + i, w_.feature_norm + i, w_.feature_eps, w_.feature,
                     &features_[r * width + i]);
  });
  return features_.data();
}

// Queries, keys and values of the first layer see norm(embedding) beside norm(h), h = fc(features) or the state before.
void Head::enter_three(const HeadPass& pass) {
  const DecoderShape& s = w_.decoder.shape;
  const size_t n = s.hidden;
  const int rows = pass.rows.rows;
  const float* h = pass.given;
  if (pass.fresh) {
    linear(Pool::instance(), w_.fc, features(pass), w_.fc.in, rows, h_.data(), n, w_.fc_bias);
    h = h_.data();
  }
  for_rows(rows, [&](size_t r) {
    float* entry = &entry_[2 * r * n];
    ops().rms_norm(&embedded_[r * n], w_.decoder.layers[0].attention_norm, s.eps, s.hidden, entry);
    ops().rms_norm(h + r * n, w_.hidden_norm, s.eps, s.hidden, entry + n);
    std::memcpy(&x_[r * n], w_.norm_before_residual ? entry + n : h + r * n, sizeof(float) * n);
  });
  if (w_.residual.data == nullptr) return;
  linear(Pool::instance(), w_.residual, entry_.data(), 2 * n, rows, states_.data(), n);
  for_rows(rows, [&](size_t r) { ops().add(&states_[r * n], s.hidden, &x_[r * n]); });
}

void Head::enter_one(const HeadPass& pass) {
  const size_t n = w_.decoder.shape.hidden, width = w_.feature, both = n + width;
  const int rows = pass.rows.rows;
  const float* feature = pass.fresh ? features(pass) : pass.given;
  ensure(joined_, rows * both);
  float* joined = joined_.data();
  for_rows(rows, [&](size_t r) {
    std::memcpy(joined + r * both, &embedded_[r * n], sizeof(float) * n);
    std::memcpy(joined + r * both + n, feature + r * width, sizeof(float) * width);
  });
  linear(Pool::instance(), w_.fc, joined, both, rows, x_.data(), n, w_.fc_bias);
  std::memcpy(entry_.data(), x_.data(), sizeof(float) * rows * n);
}

void Head::finish(const HeadPass& pass) {
  const size_t n = w_.decoder.shape.hidden, drafted = w_.decoder.head.out;
  for (int i = 0; i < pass.count; i++) {
    const size_t r = pass.wanted[i];
    std::memcpy(pass.hidden + i * n, &states_[r * n], sizeof(float) * n);
    std::memcpy(pass.normed + i * n, decoder_.normed() + r * n, sizeof(float) * n);
  }
  linear(Pool::instance(), w_.decoder.head, pass.normed, n, pass.count, pass.logits, drafted);
  if (w_.markov_in.data == nullptr) return;
  const size_t rank = w_.markov_in.in;
  ensure(markov_, pass.count * rank), ensure(bias_, pass.count * drafted);
  for (int i = 0; i < pass.count; i++) unpack_row(w_.markov_in, pass.rows.tokens[pass.wanted[i]], &markov_[i * rank]);
  linear(Pool::instance(), w_.markov_out, markov_.data(), rank, pass.count, bias_.data(), drafted);
  for_rows(pass.count,
           [&](size_t i) { ops().add(&bias_[i * drafted], static_cast<int>(drafted), pass.logits + i * drafted); });
}

}  // namespace slip
