// Python bindings of drafting heads. Callers (kernels/head.py) have checked sizes; what could reach foreign memory is
// checked here again.
#include "head.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <optional>
#include <tuple>
#include <vector>

#include "bind.h"
#include "decoder_reader.h"
#include "gil.h"

namespace {

slip::HeadWeights read_head(Reader& reader, const nb::dict& shape, const nb::dict& given) {
  slip::HeadWeights w;
  w.decoder.shape = read_shape(shape);
  const slip::DecoderShape& s = w.decoder.shape;
  w.three = nb::cast<bool>(given["three"]);
  w.norm_before_residual = nb::cast<bool>(given["norm_before_residual"]);
  w.feature = nb::cast<int>(given["feature"]), w.features = nb::cast<int>(given["features"]);
  w.feature_eps = nb::cast<float>(given["feature_eps"]);
  check(w.feature > 0 && w.features > 0 && (w.three || w.features == 1), "a head's features are not possible");
  const int64_t width = int64_t(w.features) * w.feature;
  w.feature_norm = reader.vector(given, "feature_norm", width);
  w.hidden_norm = reader.vector(given, "hidden_norm", s.hidden);
  w.fc_bias = reader.vector(given, "fc_bias", s.hidden);
  w.fc = reader.matrix(given["fc"], s.hidden, w.three ? width : width + s.hidden);
  w.decoder.embedding = reader.matrix(given["embedding"], -1, s.hidden);
  w.decoder.head = reader.matrix(given["head"], s.vocab, s.hidden);
  w.decoder.norm = reader.vector(given, "norm", s.hidden);
  auto optional = [&](const char* name, int64_t out, int64_t in) {
    return given[name].is_none() ? slip::Packed{slip::Type::F32, 0, 0, nullptr} : reader.matrix(given[name], out, in);
  };
  w.residual = optional("residual", s.hidden, s.hidden);
  w.markov_in = given["markov_in"].is_none() ? slip::Packed{slip::Type::F32, 0, 0, nullptr}
                                             : nb::cast<const PackedHandle&>(given["markov_in"]).view;
  if (w.markov_in.data != nullptr) {
    w.markov_in = reader.matrix(given["markov_in"], w.decoder.embedding.out, w.markov_in.in);
    w.markov_out = reader.matrix(given["markov_out"], s.vocab, w.markov_in.in);
  }
  for (nb::handle layer : nb::cast<nb::list>(given["layers"])) {
    const int64_t inputs = w.decoder.layers.empty() ? w.entry_width() : 0;
    w.decoder.layers.push_back(read_layer(reader, nb::cast<nb::dict>(layer), s, inputs));
  }
  check(static_cast<int>(w.decoder.layers.size()) == s.layers, "layers are missing");
  check(s.features.size() == 1 && s.features[0] == s.layers, "a head returns what leaves its last layer");
  check(!w.three || (w.hidden_norm != nullptr && w.decoder.layers[0].attention_norm != nullptr), "a norm is missing");
  return w;
}

class PyHead {
 public:
  using Arrays = std::tuple<Ids, Ids, Ids, Ids, Ids, Tables>;
  using Results = std::tuple<Out, Out, Out>;

  PyHead(const nb::dict& shape, const nb::dict& weights, const Out& pool) : pool_(pool) {
    Reader reader(kept_);
    slip::HeadWeights w = read_head(reader, shape, weights);
    shape_ = w.decoder.shape, embedded_ = w.decoder.embedding.out, width_ = int64_t(w.features) * w.feature;
    check(pool.shape(1) == shape_.block_floats(), "the KV pool has blocks of another size");
    head_.emplace(std::move(w), pool.data());
  }
  ~PyHead() {
    if (begun_) slip::Pool::instance().finish(begun_->aside);
  }

  void rope(const Matrix& cos, const Matrix& sin) {
    check_rope(cos, sin, shape_);
    const Turn turn(busy_);
    check(!begun_, "a pass that was begun has not been finished");
    cos_ = cos, sin_ = sin;
    head_->set_rope(cos_.data(), sin_.data());
  }

  // parents: of the older rows first; the other arrays are of the new rows.
  void forward(const Arrays& arrays, const Matrix& given, bool fresh, bool store, const Ids& wanted,
               const Results& results) {
    const Turn turn(busy_);
    check(!begun_, "a pass that was begun has not been finished");
    const slip::HeadPass pass = checked(arrays, given, fresh, store, wanted, results);
    const slip::WithoutGil release;
    head_->forward(pass);
  }

  // A pass over fresh features that are stored, left to an idle thread until `finish`.
  void start(const Arrays& arrays, const Matrix& given, const Ids& wanted, const Results& results) {
    const Turn turn(busy_);
    check(!begun_, "a pass that was begun has not been finished");
    const slip::HeadPass pass = checked(arrays, given, true, true, wanted, results);
    begun_.emplace(arrays, given, wanted, results);
    begun_->aside.work = [this, pass] { head_->forward(pass); };
    slip::Pool::instance().start(begun_->aside);
  }

  void finish() {
    const Turn turn(busy_);
    check(begun_.has_value(), "no pass was begun");
    {
      const slip::WithoutGil release;
      slip::Pool::instance().finish(begun_->aside);
    }
    const std::exception_ptr error = begun_->aside.error;
    begun_.reset();
    if (error) std::rethrow_exception(error);
  }

 private:
  // What a pass that goes on without its caller works on.
  struct Begun {
    Begun(const Arrays& arrays, const Matrix& given, const Ids& wanted, const Results& results)
        : arrays(arrays), given(given), wanted(wanted), results(results) {}
    Arrays arrays;
    Matrix given;
    Ids wanted;
    Results results;
    slip::Pool::Aside aside;
  };

  slip::HeadPass checked(const Arrays& arrays, const Matrix& given, bool fresh, bool store, const Ids& wanted,
                         const Results& results) const {
    const auto& [tokens, parents, depths, first, prefix, tables] = arrays;
    const auto& [hidden, normed, logits] = results;
    const size_t rows = tokens.shape(0), sequences = prefix.shape(0), count = wanted.shape(0);
    check(rows > 0 && parents.shape(0) >= rows && depths.shape(0) == rows, "arrays of a pass differ in length");
    check(first.shape(0) == sequences + 1 && tables.shape(0) == sequences, "arrays of sequences differ in length");
    check(given.shape(0) == rows, "a row has no input");
    check(static_cast<int64_t>(given.shape(1)) == (fresh ? width_ : shape_.hidden), "inputs have the wrong width");
    auto fits = [&](const Out& out, int64_t width) {
      return out.shape(0) == count && static_cast<int64_t>(out.shape(1)) == width;
    };
    check(fits(hidden, shape_.hidden) && fits(normed, shape_.hidden) && fits(logits, shape_.vocab),
          "results have the wrong shape");
    for (size_t i = 0; i < count; i++)
      check(wanted.data()[i] >= 0 && wanted.data()[i] < static_cast<int>(rows), "a row that is not there is wanted");
    const int older = static_cast<int>(parents.shape(0) - rows);
    check(older == 0 || (!store && older == head_->aside()), "older rows are not those of the passes before");
    const slip::PassRows pass{static_cast<int>(rows), static_cast<int>(sequences), tokens.data(), parents.data(),
                              depths.data(), first.data(), prefix.data(), tables.data(),
                              static_cast<int64_t>(tables.shape(1))};
    check_pass(pass, older, store);
    return {pass, given.data(), fresh, store, older, static_cast<int>(count), wanted.data(),
            hidden.data(), normed.data(), logits.data()};
  }

  // Everything that becomes an address.
  void check_pass(const slip::PassRows& p, int older, bool store) const {
    check(p.first[0] == 0 && p.first[p.sequences] == p.rows, "sequences do not cover the rows of the pass");
    const int64_t positions = static_cast<int64_t>(cos_.is_valid() ? cos_.shape(0) : 0);
    const int64_t blocks = static_cast<int64_t>(pool_.shape(0));
    std::vector<int> depths;
    for (int r = 0; r < older + p.rows; r++) {
      check(p.parents[r] < r && p.parents[r] >= -1, "a row's parent is not before it");
      depths.push_back(p.parents[r] < 0 ? 0 : depths[p.parents[r]] + 1);
    }
    for (int i = 0; i < p.sequences; i++) {
      check(p.first[i] < p.first[i + 1] && p.prefix[i] >= 0, "a sequence is empty or has a negative prefix");
      const int count = p.first[i + 1] - p.first[i];
      for (int r = p.first[i]; r < p.first[i + 1]; r++) {
        check(p.tokens[r] >= 0 && p.tokens[r] < embedded_, "token id outside the vocabulary");
        check(p.depths[r] == depths[older + r], "a row's depth does not fit its parent");
        check(!store || p.depths[r] == r - p.first[i], "only chains can be stored");
        check(int64_t(p.prefix[i]) + p.depths[r] < positions, "a position outside the rope tables");
      }
      const int64_t keys = int64_t(p.prefix[i]) + (store ? count : 0);
      const int64_t needed = (keys + slip::kKvBlock - 1) / slip::kKvBlock;
      check(needed <= p.table_stride, "a sequence is longer than its block table");
      const int32_t* table = p.tables + i * p.table_stride;
      for (int64_t b = 0; b < needed; b++) check(table[b] >= 0 && table[b] < blocks, "a block outside the pool");
    }
  }

  std::atomic<bool> busy_{false};
  std::vector<nb::object> kept_;
  slip::DecoderShape shape_;
  int64_t embedded_ = 0, width_ = 0;
  Out pool_;
  Matrix cos_, sin_;
  std::optional<slip::Head> head_;
  std::optional<Begun> begun_;
};

}  // namespace

void bind_head(nb::module_& m) {
  nb::class_<PyHead>(m, "Head", "A drafting head of the EAGLE family; see kernels/head.py.")
      .def(nb::init<const nb::dict&, const nb::dict&, const Out&>(), nb::arg("shape"), nb::arg("weights"),
           nb::arg("pool"))
      .def("rope", &PyHead::rope, nb::arg("cos"), nb::arg("sin"))
      .def("forward", &PyHead::forward, nb::arg("arrays"), nb::arg("given"), nb::arg("fresh"), nb::arg("store"),
           nb::arg("wanted"), nb::arg("results"))
      .def("start", &PyHead::start, nb::arg("arrays"), nb::arg("given"), nb::arg("wanted"), nb::arg("results"))
      .def("finish", &PyHead::finish);
}
