// A whole pass of a decoder of the Llama family: tokens in, logits out, keys and values kept aside or stored.
//
// Twin: kernels/reference_decoder.py. The decoder only orders the work; all arithmetic is in the kernel tables.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "linear.h"
#include "ops.h"
#include "pool.h"

namespace slip {

struct DecoderShape {
  int hidden, intermediate, layers, heads, kv_heads, head_dim, vocab;
  float eps;
  std::vector<int> features;  // layers whose inputs are features; `layers` means the last output

  int q_width() const { return heads * head_dim; }
  int kv_width() const { return kv_heads * head_dim; }
  int value_stride() const { return (head_dim + 15) / 16 * 16; }
  // Floats of one layer in a block: per key-value head keys [kKvBlock / kKeyTile, head_dim, kKeyTile], then values
  // [kKvBlock, stride]: one run of memory in the order in which a task reads it. Memory is slower where runs are short.
  size_t key_floats() const { return static_cast<size_t>(head_dim) * kKvBlock; }
  size_t head_floats() const { return key_floats() + static_cast<size_t>(kKvBlock) * value_stride(); }
  size_t layer_floats() const { return head_floats() * kv_heads; }
  size_t block_floats() const { return layer_floats() * layers; }
};

// Weights of one layer; null where the model has none. qkv holds 1 or 3 parts, gate_up 1 or 2.
struct LayerWeights {
  const float *attention_norm, *mlp_norm, *q_norm, *k_norm;
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
  std::vector<Packed> qkv, gate_up;
  Packed output, down;
};

struct DecoderWeights {
  DecoderShape shape;
  Packed embedding, head;
  const float* norm;
  std::vector<LayerWeights> layers;
};

// The rows of a pass, grouped by sequence; see Pass in kernels/passes.py.
struct PassRows {
  int rows, sequences;
  const int32_t *tokens, *parents, *depths;  // [rows]
  const int32_t *first, *prefix;             // [sequences + 1], [sequences]
  const int32_t* tables;                     // [sequences, table_stride]
  int64_t table_stride;
};

// Rows that do not come from the embedding: those of a drafting head.
struct Entry {
  const float* x;       // [rows, hidden] what the first layer's output is added to
  const float* normed;  // [rows, width] what its queries, keys and values are made of
  int64_t width;
  int older;  // rows of the passes before this one that stay aside; `parents` counts them first and may name them
};

class Decoder {
 public:
  // pool: KV blocks of shape.block_floats(). Pointers must outlive the decoder.
  Decoder(DecoderWeights weights, float* pool);
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  void set_rope(const float* cos, const float* sin) { cos_ = cos, sin_ = sin; }
  // The rows of the last pass after the final norm (without one: as they are), [rows, hidden].
  const float* normed() const { return norm_.data(); }
  // Keys and values of the last `stored` sequences, which are chains, go straight into the blocks at prefix + depth, where
  // other sequences may read them; those of the others stay aside for `commit`. logits, of the rows aside [rows, vocab],
  // may be null. features [featured, features * hidden], of the first rows.
  void forward(const PassRows& pass, float* logits, float* features, int featured, int stored,
               const Entry* entry = nullptr);
  // Copies keys and values of `count` rows of the last pass to their blocks and offsets.
  void commit(int count, const int32_t* rows, const int32_t* blocks, const int32_t* offsets);
  int last_rows() const { return older_ + aside_; }

 private:
  struct Group {  // one attention job: rows of a sequence, heads that share a key-value head
    int sequence, head, kv_head, first_row, rows, stretches;
    size_t place;  // of its first part in parts_
  };
  struct Stretch {
    int group, number;
  };

  void prepare(const PassRows& pass, int stored, const Entry* entry);
  void make_groups(const PassRows& pass, int sequences);
  void keep_rows(const PassRows& pass, int rows);
  void order_stretches();
  void embed(const PassRows& pass, const Entry* entry);
  void keep_features(int layer, float* features, int featured);
  void project(const float* input, const std::vector<Packed>& parts, const float* bias, int64_t width, float* out);
  void rotate_and_keep(int layer, const PassRows& pass);
  bool splits() const { return static_cast<int>(groups_.size()) < 4 * threads_; }
  void attend(int layer, const PassRows& pass);
  void attend_split(int layer, const PassRows& pass);
  AttendTask task(int layer, const PassRows& pass, const Group& group) const;
  void finish(const Group& group, const float* totals, const float* mixed);
  void add_and_norm(const float* weight);
  void gate();
  void write_cache(int layer, const float* key, const float* value, int block, int offset);
  float* keys(int layer) { return keys_[layer].data(); }
  float* values(int layer) { return values_[layer].data(); }

  DecoderWeights w_;
  float* pool_;
  const float *cos_ = nullptr, *sin_ = nullptr;
  float scale_;
  int group_;          // heads of one attention job: all heads of a key-value head unless they are very many
  int older_ = 0, aside_ = 0;  // rows of earlier passes and of the last one in keys_ and values_
  int rows_ = 0, threads_ = 1;
  std::vector<float> x_, norm_, qkv_, mixed_, out_, gate_up_, gated_, parts_;
  std::vector<std::vector<float>> keys_, values_;  // by layer
  std::vector<int32_t> positions_, ends_, ids_;
  std::vector<Group> groups_;
  std::vector<Stretch> stretches_;      // of all groups, in the order in which they are taken
  std::vector<std::atomic<int>> left_;  // stretches of each group still to be done
};

}  // namespace slip
