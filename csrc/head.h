// A drafting head of the EAGLE family: hidden states of the target, or its own, and tokens in; hidden states and logits
// of the tokens it can draft out. Twin: kernels/reference_head.py. Its layers are a decoder's; what comes before them and
// the LM head after them are here.
#pragma once

#include <cstdint>
#include <vector>

#include "decoder.h"

namespace slip {

struct HeadWeights {
  DecoderWeights decoder;  // `head`: rows of the drafted tokens; `norm`: null for EAGLE-1; layer 0 takes entry_width()
  bool three;              // EAGLE-3: fc over features; else EAGLE-1: fc over embedding and feature
  bool norm_before_residual;
  int feature, features;  // floats of one feature, features of a row
  float feature_eps;
  const float* feature_norm;  // [features * feature], each feature normed on its own; null for none
  const float* hidden_norm;   // EAGLE-3
  const float* fc_bias;       // null for none
  Packed fc;
  Packed residual;                // W of the embedding's way into the residual; data null for none
  Packed markov_in, markov_out;   // logits += markov_out markov_in[token]; data null for none

  int64_t entry_width() const { return three ? 2 * int64_t(decoder.shape.hidden) : decoder.shape.hidden; }
};

// One pass of a head. With `fresh`, `given` holds features [rows, features * feature], else hidden states of this head
// [rows, hidden]. wanted: rows whose results are asked for, ascending; none: keys and values only.
struct HeadPass {
  PassRows rows;  // `parents` counts the `older` rows before its own
  const float* given;
  bool fresh, store;
  int older, count;
  const int32_t* wanted;  // [count]
  float *hidden, *normed, *logits;  // [count, hidden], [count, hidden], [count, drafted tokens]
};

class Head {
 public:
  Head(HeadWeights weights, float* pool);
  Head(const Head&) = delete;
  Head& operator=(const Head&) = delete;

  void set_rope(const float* cos, const float* sin) { decoder_.set_rope(cos, sin); }
  void forward(const HeadPass& pass);
  int aside() const { return decoder_.last_rows(); }  // rows of passes without `store` since the last one with it

 private:
  const float* features(const HeadPass& pass);
  void enter_three(const HeadPass& pass);
  void enter_one(const HeadPass& pass);
  void finish(const HeadPass& pass);

  HeadWeights w_;
  Decoder decoder_;
  std::vector<float> features_, joined_, embedded_, h_, x_, entry_, states_, markov_, bias_;
};

}  // namespace slip
