// Weights out of Python dictionaries, for the decoder and for drafting heads.
#pragma once

#include <nanobind/stl/vector.h>

#include <atomic>
#include <stdexcept>
#include <utility>
#include <vector>

#include "decoder.h"
#include "packed_bind.h"

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tables = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

inline void check(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

// Collects weights out of Python dictionaries and keeps what they point into alive.
class Reader {
 public:
  explicit Reader(std::vector<nb::object>& kept) : kept_(kept) {}

  const float* vector(const nb::dict& from, const char* name, int64_t length) {
    nb::object value = from[name];
    if (value.is_none()) return nullptr;
    const Vector array = nb::cast<Vector>(value);
    check(static_cast<int64_t>(array.shape(0)) == length, "a vector of weights has the wrong length");
    kept_.push_back(std::move(value));
    return array.data();
  }

  slip::Packed matrix(nb::object value, int64_t out, int64_t in) {
    const slip::Packed view = nb::cast<const PackedHandle&>(value).view;
    check((out < 0 || view.out == out) && view.in == in, "a matrix of weights has the wrong shape");
    kept_.push_back(std::move(value));
    return view;
  }

  std::vector<slip::Packed> stack(const nb::dict& from, const char* name, int64_t out, int64_t in) {
    std::vector<slip::Packed> parts;
    for (nb::handle part : nb::cast<nb::list>(from[name])) {
      parts.push_back(matrix(nb::borrow(part), -1, in));
      out -= parts.back().out;
    }
    check(out == 0, "stacked weights have the wrong number of rows");
    return parts;
  }

 private:
  std::vector<nb::object>& kept_;
};

inline slip::DecoderShape read_shape(const nb::dict& d) {
  auto number = [&](const char* name) { return nb::cast<int>(d[name]); };
  slip::DecoderShape s;
  s.hidden = number("hidden"), s.intermediate = number("intermediate"), s.layers = number("layers");
  s.heads = number("heads"), s.kv_heads = number("kv_heads"), s.head_dim = number("head_dim");
  s.vocab = number("vocab"), s.eps = nb::cast<float>(d["eps"]);
  s.features = nb::cast<std::vector<int>>(d["features"]);
  check(s.layers > 0 && s.kv_heads > 0 && s.heads % s.kv_heads == 0 && s.head_dim > 0 && s.head_dim % 2 == 0,
        "the decoder's shape is not possible");
  return s;
}

// inputs: columns of the queries, keys and values where they are not made of the hidden state alone.
inline slip::LayerWeights read_layer(Reader& reader, const nb::dict& d, const slip::DecoderShape& s,
                                     int64_t inputs = 0) {
  slip::LayerWeights w;
  const int64_t qkv = s.q_width() + 2 * int64_t(s.kv_width()), both = 2 * int64_t(s.intermediate);
  w.attention_norm = reader.vector(d, "attention_norm", s.hidden);
  w.mlp_norm = reader.vector(d, "mlp_norm", s.hidden);
  w.q_norm = reader.vector(d, "q_norm", s.head_dim);
  w.k_norm = reader.vector(d, "k_norm", s.head_dim);
  w.qkv_bias = reader.vector(d, "qkv_bias", qkv);
  w.output_bias = reader.vector(d, "output_bias", s.hidden);
  w.gate_up_bias = reader.vector(d, "gate_up_bias", both);
  w.down_bias = reader.vector(d, "down_bias", s.hidden);
  w.qkv = reader.stack(d, "qkv", qkv, inputs > 0 ? inputs : s.hidden);
  w.gate_up = reader.stack(d, "gate_up", both, s.hidden);
  w.output = reader.matrix(d["output"], s.hidden, s.q_width());
  w.down = reader.matrix(d["down"], s.hidden, s.intermediate);
  check((inputs > 0 || w.attention_norm != nullptr) && w.mlp_norm != nullptr, "a norm weight is missing");
  return w;
}

inline void check_rope(const Matrix& cos, const Matrix& sin, const slip::DecoderShape& s) {
  check(cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1), "rope tables differ in shape");
  check(2 * cos.shape(1) == static_cast<size_t>(s.head_dim), "rope tables have the wrong width");
}

// A decoder's memory serves one call at a time; a second thread gets an error instead of another's numbers.
class Turn {
 public:
  explicit Turn(std::atomic<bool>& busy) : busy_(busy) {
    if (busy_.exchange(true)) throw std::runtime_error("this decoder is already running a pass in another thread");
  }
  ~Turn() { busy_.store(false); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::atomic<bool>& busy_;
};
