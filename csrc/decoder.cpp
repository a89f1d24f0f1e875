#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"

namespace slip {

namespace {

const OpsTable& ops() { return kernels().ops; }

// Grows, never shrinks: passes of changing size must not pay for memory again and again. Some vectors are read up to 15
// floats past their end.
void ensure(std::vector<float>& buffer, size_t floats) {
  if (buffer.size() < floats + 16) buffer.resize(floats + 16);
}

// Working memory of the calling thread.
float* work_memory(size_t floats) {
  thread_local std::vector<float> memory;
  if (memory.size() < floats) memory.resize(floats);
  return memory.data();
}

// Rows of elementwise work that are worth a second thread, in floats.
constexpr int64_t kGrain = 16384;

template <class F> void for_rows(int rows, int64_t width, F&& body) {
  const int64_t step = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width));
  const int64_t tasks = (rows + step - 1) / step;
  auto ranges = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * step; row < std::min<int64_t>(rows, end * step); row++) body(static_cast<int>(row));
  };
  if (tasks <= 1) return ranges(0, tasks);
  Pool::instance().parallel_for(tasks, ranges);
}

}  // namespace

Decoder::Decoder(DecoderWeights weights, float* pool) : w_(std::move(weights)), pool_(pool) {
  scale_ = static_cast<float>(1.0 / std::sqrt(static_cast<double>(w_.shape.head_dim)));
  const int group = w_.shape.heads / w_.shape.kv_heads;
  group_ = std::min(group, kAttendUnits);
  while (group % group_ != 0) group_--;
}

void Decoder::forward(const PassRows& pass, float* logits, float* features, int featured, int stored,
                      const Entry* entry) {
  const FpScope mode;
  const DecoderShape& s = w_.shape;
  prepare(pass, stored, entry);
  embed(pass, entry);
  const bool last_feature = std::count(s.features.begin(), s.features.end(), s.layers) > 0;
  const int outputs = std::max(logits != nullptr ? aside_ : 0, last_feature ? featured : 0);
  for (int layer = 0; layer < s.layers; layer++) {
    const LayerWeights& w = w_.layers[layer];
    if (layer > 0) add_and_norm(w.attention_norm);
    keep_features(layer, features, featured);
    project(norm_.data(), w.qkv, w.qkv_bias, s.q_width() + 2 * s.kv_width(), qkv_.data());
    rotate_and_keep(layer, pass);
    // Of the last layer of a prompt that is read, keys and values are all that is wanted.
    if (layer == s.layers - 1 && outputs < rows_) keep_rows(pass, outputs);
    if (rows_ == 0) return;
    attend(layer, pass);
    linear(Pool::instance(), w.output, mixed_.data(), s.q_width(), rows_, out_.data(), s.hidden, w.output_bias);
    add_and_norm(w.mlp_norm);
    project(norm_.data(), w.gate_up, w.gate_up_bias, 2 * int64_t(s.intermediate), gate_up_.data());
    gate();
    linear(Pool::instance(), w.down, gated_.data(), s.intermediate, rows_, out_.data(), s.hidden, w.down_bias);
  }
  add_and_norm(w_.norm);
  keep_features(s.layers, features, featured);
  if (logits != nullptr && aside_ > 0)
    linear(Pool::instance(), w_.head, norm_.data(), s.hidden, aside_, logits, s.vocab);
}

void Decoder::prepare(const PassRows& pass, int stored, const Entry* entry) {
  const DecoderShape& s = w_.shape;
  rows_ = pass.rows, aside_ = pass.first[pass.sequences - stored];
  threads_ = Pool::instance().threads();
  const size_t m = static_cast<size_t>(rows_);
  const size_t widest = std::max<size_t>(s.hidden, entry == nullptr ? 0 : entry->width);
  ensure(x_, m * s.hidden), ensure(norm_, m * widest), ensure(out_, m * s.hidden);
  ensure(qkv_, m * (s.q_width() + 2 * s.kv_width())), ensure(mixed_, m * s.q_width());
  ensure(gate_up_, 2 * m * s.intermediate), ensure(gated_, m * s.intermediate);
  older_ = entry == nullptr ? 0 : entry->older;
  keys_.resize(s.layers), values_.resize(s.layers);
  for (int layer = 0; layer < s.layers; layer++) {
    ensure(keys_[layer], static_cast<size_t>(last_rows()) * s.kv_width());
    ensure(values_[layer], static_cast<size_t>(last_rows()) * s.kv_width());
  }
  positions_.resize(m), ends_.resize(m), ids_.resize(m);
  for (int i = 0; i < pass.sequences; i++)
    for (int row = pass.first[i]; row < pass.first[i + 1]; row++) {
      positions_[row] = pass.prefix[i] + pass.depths[row];
      ends_[row] = positions_[row] + 1;
      ids_[row] = older_ + row;
    }
  make_groups(pass, pass.sequences);
}

// From here on the pass is over its first rows only, of whole sequences.
void Decoder::keep_rows(const PassRows& pass, int rows) {
  rows_ = rows;
  make_groups(pass, static_cast<int>(std::find(pass.first, pass.first + pass.sequences, rows) - pass.first));
}

// Cuts attention of the first sequences into jobs of at most kAttendUnits units.
void Decoder::make_groups(const PassRows& pass, int sequences) {
  const DecoderShape& s = w_.shape;
  const int heads_per_kv = s.heads / s.kv_heads, most = kAttendUnits / group_;
  groups_.clear();
  size_t place = 0;
  for (int i = 0; i < sequences; i++)
    for (int head = 0; head < s.heads; head += group_)
      for (int row = pass.first[i]; row < pass.first[i + 1]; row += most) {
        const int rows = std::min(most, pass.first[i + 1] - row);
        const int end = *std::max_element(ends_.begin() + row, ends_.begin() + row + rows);
        const int count = stretches((end + kSegment - 1) / kSegment);
        groups_.push_back({i, head, head / heads_per_kv, row, rows, count, place});
        place += static_cast<size_t>(count) * rows * group_ * (s.value_stride() + 2);
      }
  if (!splits()) return;
  if (left_.size() < groups_.size()) left_ = std::vector<std::atomic<int>>(2 * groups_.size());
  ensure(parts_, place);
  order_stretches();
}

// Long stretches first, so that threads end together; heads of a stretch one after another, as they lie in memory.
void Decoder::order_stretches() {
  stretches_.clear();
  for (size_t begin = 0, end; begin < groups_.size(); begin = end) {
    int most = 0;
    for (end = begin; end < groups_.size() && groups_[end].sequence == groups_[begin].sequence; end++)
      most = std::max(most, groups_[end].stretches);
    for (int number = most - 1; number >= 0; number--)
      for (size_t group = begin; group < end; group++)
        if (number < groups_[group].stretches) stretches_.push_back({static_cast<int>(group), number});
  }
}

void Decoder::embed(const PassRows& pass, const Entry* entry) {
  const DecoderShape& s = w_.shape;
  if (entry != nullptr) {
    std::memcpy(x_.data(), entry->x, sizeof(float) * rows_ * s.hidden);
    std::memcpy(norm_.data(), entry->normed, sizeof(float) * rows_ * entry->width);
    return;
  }
  for_rows(rows_, s.hidden, [&](int r) {
    float* x = &x_[size_t(r) * s.hidden];
    unpack_row(w_.embedding, pass.tokens[r], x);
    ops().rms_norm(x, w_.layers[0].attention_norm, s.eps, s.hidden, &norm_[size_t(r) * s.hidden]);
  });
}

void Decoder::keep_features(int layer, float* features, int featured) {
  const DecoderShape& s = w_.shape;
  const size_t width = s.features.size() * s.hidden;
  for (size_t place = 0; place < s.features.size(); place++)
    if (s.features[place] == layer)
      for (int r = 0; r < featured; r++)
        std::memcpy(features + r * width + place * s.hidden, &x_[size_t(r) * s.hidden], sizeof(float) * s.hidden);
}

void Decoder::project(const float* input, const std::vector<Packed>& parts, const float* bias, int64_t width,
                      float* out) {
  int64_t column = 0;
  for (const Packed& part : parts) {
    const float* own = bias == nullptr ? nullptr : bias + column;
    linear(Pool::instance(), part, input, part.in, rows_, out + column, width, own);
    column += part.out;
  }
}

void Decoder::rotate_and_keep(int layer, const PassRows& pass) {
  const DecoderShape& s = w_.shape;
  const LayerWeights& w = w_.layers[layer];
  const int half = s.head_dim / 2, width = s.q_width() + 2 * s.kv_width();
  std::vector<int> sequence_of;
  if (aside_ < rows_)
    for (int i = 0; i < pass.sequences; i++)
      sequence_of.insert(sequence_of.end(), pass.first[i + 1] - pass.first[i], i);
  for_rows(rows_, width, [&](int r) {
    float* row = &qkv_[size_t(r) * width];
    const float* cos = cos_ + size_t(positions_[r]) * half;
    const float* sin = sin_ + size_t(positions_[r]) * half;
    for (int head = 0; head < s.heads + s.kv_heads; head++) {
      float* x = row + size_t(head) * s.head_dim;
      const float* norm = head < s.heads ? w.q_norm : w.k_norm;
      if (norm != nullptr) ops().rms_norm(x, norm, s.eps, s.head_dim, x);
      ops().rotate(x, cos, sin, half);
    }
    const float *key = row + s.q_width(), *value = key + s.kv_width();
    if (r >= aside_) {
      const int32_t* table = pass.tables + sequence_of[r] * pass.table_stride;
      write_cache(layer, key, value, table[positions_[r] / kKvBlock], positions_[r] % kKvBlock);
    } else {
      std::memcpy(keys(layer) + size_t(older_ + r) * s.kv_width(), key, sizeof(float) * s.kv_width());
      std::memcpy(values(layer) + size_t(older_ + r) * s.kv_width(), value, sizeof(float) * s.kv_width());
    }
  });
}

void Decoder::write_cache(int layer, const float* key, const float* value, int block, int offset) {
  const DecoderShape& s = w_.shape;
  float* k = pool_ + block * s.block_floats() + layer * s.layer_floats();
  for (int head = 0; head < s.kv_heads; head++, k += s.head_floats()) {
    const size_t from = size_t(head) * s.head_dim;
    float* tile = k + size_t(offset / kKeyTile) * kKeyTile * s.head_dim + offset % kKeyTile;
    for (int i = 0; i < s.head_dim; i++) tile[size_t(i) * kKeyTile] = key[from + i];
    std::memcpy(k + s.key_floats() + size_t(offset) * s.value_stride(), value + from, sizeof(float) * s.head_dim);
  }
}

AttendTask Decoder::task(int layer, const PassRows& pass, const Group& g) const {
  const DecoderShape& s = w_.shape;
  const int width = s.q_width() + 2 * s.kv_width();
  const bool store = g.first_row >= aside_;
  const int stored = pass.prefix[g.sequence] + pass.first[g.sequence + 1] - pass.first[g.sequence];
  const size_t drafted = store ? 0 : size_t(g.kv_head) * s.head_dim;
  AttendTask t;
  t.q = &qkv_[size_t(g.first_row) * width + size_t(g.head) * s.head_dim];
  t.q_stride = width;
  t.ends = &ends_[g.first_row];
  t.ids = &ids_[g.first_row];
  t.parents = pass.parents;
  t.units = g.rows * group_;
  t.group = group_;
  t.head_dim = s.head_dim;
  t.value_stride = s.value_stride();
  t.scale = scale_;
  t.cached = store ? stored : pass.prefix[g.sequence];
  t.pool = pool_;
  t.table = pass.tables + g.sequence * pass.table_stride;
  t.block_floats = s.block_floats();
  t.offset = layer * s.layer_floats() + g.kv_head * s.head_floats();
  t.next = nullptr;
  t.draft_keys = keys_[layer].data() + drafted;
  t.draft_values = values_[layer].data() + drafted;
  t.draft_stride = s.kv_width();
  return t;
}

// Each job walks its stretches in order. When there are fewer jobs than threads could share evenly, stretches become
// tasks of their own: the same parts, merged in the same order, so the results are the same.
void Decoder::attend(int layer, const PassRows& pass) {
  if (splits()) return attend_split(layer, pass);
  const size_t stride = w_.shape.value_stride(), unit = stride + 2;
  auto body = [&](int64_t begin, int64_t end) {
    float* memory = work_memory(attend_work(w_.shape.head_dim) + 2 * kAttendUnits * unit);
    AttendPart parts[2];
    for (int i = 0; i < 2; i++) {
      float* mixed = memory + i * kAttendUnits * unit;
      parts[i] = {mixed + kAttendUnits * stride, mixed + kAttendUnits * (stride + 1), mixed};
    }
    float* work = memory + 2 * kAttendUnits * unit;
    for (int64_t j = begin; j < end; j++) {
      const Group& group = groups_[j];
      AttendTask t = task(layer, pass, group);
      for (int stretch = 0; stretch < group.stretches; stretch++) {
        t.next = t.keys(stretch_begin(stretch + 1));
        ops().attend(t, stretch, parts[stretch > 0], work);
        if (stretch > 0) ops().attend_merge(t, stretch, parts[0], parts[1]);
      }
      finish(group, parts[0].total, parts[0].mixed);
    }
  };
  Pool::instance().parallel_for(static_cast<int64_t>(groups_.size()), body);
}

void Decoder::attend_split(int layer, const PassRows& pass) {
  for (size_t j = 0; j < groups_.size(); j++) left_[j].store(groups_[j].stretches, std::memory_order_relaxed);
  auto part_of = [&](const Group& group, int stretch) {
    const size_t units = static_cast<size_t>(group.rows) * group_, stride = w_.shape.value_stride();
    float* mixed = parts_.data() + group.place + stretch * units * (stride + 2);
    return AttendPart{mixed + units * stride, mixed + units * (stride + 1), mixed};
  };
  auto body = [&](int64_t begin, int64_t end) {
    float* work = work_memory(attend_work(w_.shape.head_dim));
    for (int64_t index = begin; index < end; index++) {
      const auto [j, number] = stretches_[index];
      const Group& group = groups_[j];
      AttendTask t = task(layer, pass, group);
      if (index + 1 < end) {
        const Stretch& next = stretches_[index + 1];
        t.next = task(layer, pass, groups_[next.group]).keys(stretch_begin(next.number));
      }
      ops().attend(t, number, part_of(group, number), work);
      if (left_[j].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
      const AttendPart state = part_of(group, 0);  // the last one to finish merges all, in order
      for (int stretch = 1; stretch < group.stretches; stretch++)
        ops().attend_merge(t, stretch, state, part_of(group, stretch));
      finish(group, state.total, state.mixed);
    }
  };
  Pool::instance().parallel_for(static_cast<int64_t>(stretches_.size()), body);
}

void Decoder::finish(const Group& g, const float* totals, const float* mixed) {
  const DecoderShape& s = w_.shape;
  for (int u = 0; u < g.rows * group_; u++) {
    float* out = &mixed_[size_t(g.first_row + u / group_) * s.q_width() + size_t(g.head + u % group_) * s.head_dim];
    ops().attend_finish(totals[u], mixed + size_t(u) * s.value_stride(), s.head_dim, out);
  }
}

void Decoder::add_and_norm(const float* weight) {
  const int n = w_.shape.hidden;
  for_rows(rows_, n, [&](int r) {
    float* x = &x_[size_t(r) * n];
    ops().add(&out_[size_t(r) * n], n, x);
    if (weight != nullptr) ops().rms_norm(x, weight, w_.shape.eps, n, &norm_[size_t(r) * n]);
    else std::memcpy(&norm_[size_t(r) * n], x, sizeof(float) * n);
  });
}

void Decoder::gate() {
  const int n = w_.shape.intermediate;
  for_rows(rows_, 4 * int64_t(n), [&](int r) {
    const float* both = &gate_up_[2 * size_t(r) * n];
    ops().silu_mul(both, both + n, n, &gated_[size_t(r) * n]);
  });
}

void Decoder::commit(int count, const int32_t* rows, const int32_t* blocks, const int32_t* offsets) {
  const size_t width = w_.shape.kv_width();
  for (int layer = 0; layer < w_.shape.layers; layer++)
    for (int i = 0; i < count; i++)
      write_cache(layer, keys(layer) + rows[i] * width, values(layer) + rows[i] * width, blocks[i], offsets[i]);
}

}  // namespace slip
