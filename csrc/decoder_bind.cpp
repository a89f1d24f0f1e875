// Python bindings of the decoder. Callers (kernels/decoder.py) have checked sizes; what could reach foreign memory is
// checked here again.
#include "decoder.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bind.h"
#include "gil.h"
#include "isa.h"
#include "decoder_reader.h"

namespace {

class PyDecoder {
 public:
  PyDecoder(const nb::dict& shape, const nb::dict& weights, const Out& pool) : pool_(pool) {
    Reader reader(kept_);
    slip::DecoderWeights w;
    w.shape = read_shape(shape);
    shape_ = w.shape;
    w.embedding = reader.matrix(weights["embedding"], shape_.vocab, shape_.hidden);
    w.head = reader.matrix(weights["head"], shape_.vocab, shape_.hidden);
    w.norm = reader.vector(weights, "norm", shape_.hidden);
    for (nb::handle layer : nb::cast<nb::list>(weights["layers"]))
      w.layers.push_back(read_layer(reader, nb::cast<nb::dict>(layer), shape_));
    check(w.norm != nullptr, "the last norm is missing");
    check(static_cast<int>(w.layers.size()) == shape_.layers, "layers are missing");
    check(pool.shape(1) == shape_.block_floats(), "the KV pool has blocks of another size");
    decoder_.emplace(std::move(w), pool.data());
  }

  void rope(const Matrix& cos, const Matrix& sin) {
    check_rope(cos, sin, shape_);
    const Turn turn(busy_);
    cos_ = cos, sin_ = sin;
    decoder_->set_rope(cos_.data(), sin_.data());
  }

  void forward(const std::tuple<Ids, Ids, Ids, Ids, Ids, Tables>& arrays, const std::optional<Out>& logits,
               const std::optional<Out>& features, int stored) {
    const Turn turn(busy_);
    const auto& [tokens, parents, depths, first, prefix, tables] = arrays;
    const size_t rows = tokens.shape(0), sequences = prefix.shape(0);
    check(rows > 0 && parents.shape(0) == rows && depths.shape(0) == rows, "arrays of a pass differ in length");
    check(first.shape(0) == sequences + 1 && tables.shape(0) == sequences, "arrays of sequences differ in length");
    check(stored >= 0 && static_cast<size_t>(stored) <= sequences, "more sequences are stored than there are");
    const size_t aside = first.data()[sequences - stored], featured = features ? features->shape(0) : 0;
    check(!logits || (logits->shape(0) == aside && logits->shape(1) == static_cast<size_t>(shape_.vocab)),
          "logits: wrong shape");
    check(!features || ((featured == rows || featured == aside) &&
                        features->shape(1) == shape_.features.size() * shape_.hidden),
          "features: wrong shape");
    const slip::PassRows pass{static_cast<int>(rows), static_cast<int>(sequences), tokens.data(), parents.data(),
                              depths.data(), first.data(), prefix.data(), tables.data(),
                              static_cast<int64_t>(tables.shape(1))};
    check_pass(pass, stored);
    const slip::WithoutGil release;
    decoder_->forward(pass, logits ? logits->data() : nullptr, features ? features->data() : nullptr,
                      static_cast<int>(featured), stored);
  }

  void commit(const Ids& rows, const Ids& blocks, const Ids& offsets) {
    const Turn turn(busy_);
    check(rows.shape(0) == blocks.shape(0) && rows.shape(0) == offsets.shape(0), "arrays of commit differ in length");
    for (size_t i = 0; i < rows.shape(0); i++) {
      const int64_t row = rows.data()[i], block = blocks.data()[i];
      check(row >= 0 && row < decoder_->last_rows(), "commit of a row that the last pass did not have");
      check(block >= 0 && block < static_cast<int64_t>(pool_.shape(0)), "commit to a block outside the pool");
      check(offsets.data()[i] >= 0 && offsets.data()[i] < slip::kKvBlock, "commit outside of a block");
    }
    const slip::WithoutGil release;
    decoder_->commit(static_cast<int>(rows.shape(0)), rows.data(), blocks.data(), offsets.data());
  }

 private:
  // Everything that becomes an address.
  void check_pass(const slip::PassRows& p, int stored) const {
    check(p.first[0] == 0 && p.first[p.sequences] == p.rows, "sequences do not cover the rows of the pass");
    const int64_t positions = static_cast<int64_t>(cos_.is_valid() ? cos_.shape(0) : 0);
    const int64_t blocks = static_cast<int64_t>(pool_.shape(0));
    for (int i = 0; i < p.sequences; i++) {
      check(p.first[i] < p.first[i + 1] && p.prefix[i] >= 0, "a sequence is empty or has a negative prefix");
      const bool store = i >= p.sequences - stored;
      int64_t keys = p.prefix[i];
      for (int r = p.first[i]; r < p.first[i + 1]; r++) {
        check(p.tokens[r] >= 0 && p.tokens[r] < shape_.vocab, "token id outside the vocabulary");
        check(p.parents[r] < r && (p.parents[r] < 0 || p.parents[r] >= p.first[i]), "a row's parent is not before it");
        const int32_t depth = p.parents[r] < 0 ? 0 : p.depths[p.parents[r]] + 1;
        check(p.depths[r] == depth, "a row's depth does not fit its parent");
        check(!store || p.depths[r] == r - p.first[i], "only chains can be stored");
        check(int64_t(p.prefix[i]) + p.depths[r] < positions, "a row's position is outside the rope tables");
      }
      if (store) keys += p.first[i + 1] - p.first[i];
      const int64_t needed = (keys + slip::kKvBlock - 1) / slip::kKvBlock;
      check(needed <= p.table_stride, "a sequence is longer than its block table");
      const int32_t* table = p.tables + i * p.table_stride;
      for (int64_t b = 0; b < needed; b++) check(table[b] >= 0 && table[b] < blocks, "a block outside the pool");
    }
  }

  std::atomic<bool> busy_{false};
  std::vector<nb::object> kept_;
  slip::DecoderShape shape_;
  Out pool_;
  Matrix cos_, sin_;
  std::optional<slip::Decoder> decoder_;
};

void apply(const Vector& x, const nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& out) {
  check(x.shape(0) == out.shape(0), "out has the wrong length");
  const slip::FpScope mode;
  slip::kernels().ops.exp(x.data(), static_cast<int>(x.shape(0)), out.data());
}

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<PyDecoder>(m, "Decoder", "A decoder of the Llama family; see kernels/decoder.py.")
      .def(nb::init<const nb::dict&, const nb::dict&, const Out&>(), nb::arg("shape"), nb::arg("weights"),
           nb::arg("pool"))
      .def("rope", &PyDecoder::rope, nb::arg("cos"), nb::arg("sin"))
      .def("forward", &PyDecoder::forward, nb::arg("arrays"), nb::arg("logits").none(), nb::arg("features").none(),
           nb::arg("stored"))
      .def("commit", &PyDecoder::commit, nb::arg("rows"), nb::arg("blocks"), nb::arg("offsets"));
  m.def("exp", &apply, nb::arg("x"), nb::arg("out"), "e^x with the decoder's own polynomial.");
}
