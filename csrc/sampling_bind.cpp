// Python bindings of the sampling kernels. Callers (kernels/sampling.py) hold the contract; ranges are checked here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bind.h"
#include "gil.h"
#include "isa.h"
#include "pool.h"
#include "sampling.h"
#include "sampling_math.h"

namespace nb = nanobind;

namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using TopIds = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using TopValues = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const slip::SamplingTable& table_of(const std::string& isa) {
  const slip::KernelTable* table = isa.empty() ? &slip::kernels() : slip::find_kernels(isa);
  if (table == nullptr) throw nb::value_error("this CPU cannot run that instruction set");
  return table->sampling;
}

// Buffers of this thread.
slip::SamplingRow& row() {
  thread_local slip::SamplingRow buffers;
  return buffers;
}

bool prepare(const slip::SamplingTable& table, const Logits& logits, const Ids& ids, const Values& values,
             double temperature) {
  const size_t n = logits.shape(0), changed = ids.shape(0);
  if (values.shape(0) != changed) throw nb::value_error("ids and values differ in length");
  for (size_t i = 0; i < changed; i++)
    if (ids.data()[i] < 0 || static_cast<size_t>(ids.data()[i]) >= n) throw nb::value_error("token id out of range");
  return n > 0 && row().prepare(table, logits.data(), n, ids.data(), values.data(), changed, temperature);
}

nb::tuple lists(const std::vector<slip::Scored>& best) {
  nb::list tokens, scores;
  for (const slip::Scored& item : best) {
    tokens.append(item.id);
    scores.append(item.score);
  }
  return nb::make_tuple(tokens, scores);
}

int64_t argmax(const Logits& logits, const std::string& isa) {
  const size_t n = logits.shape(0);
  if (n == 0) return -1;
  const slip::SamplingTable& table = table_of(isa);
  const slip::WithoutGil release;
  return table.argmax(logits.data(), n);
}

nb::tuple select_tokens(const Logits& logits, const Ids& ids, const Values& values, double temperature, double min_p,
                 int64_t top_k, double top_p, uint64_t key, size_t count, const std::string& isa) {
  const slip::SamplingTable& table = table_of(isa);
  std::vector<slip::Scored> best;
  {
    const slip::WithoutGil release;
    const slip::FpScope scope;
    if (count > 0 && prepare(table, logits, ids, values, temperature))
      best = row().select({temperature, min_p, top_k, top_p}, key, count);
  }
  return lists(best);
}

bool probabilities(const Logits& logits, const Ids& ids, const Values& values, double temperature, double min_p,
                   int64_t top_k, double top_p, const Out& out, const std::string& isa) {
  const slip::SamplingTable& table = table_of(isa);
  if (out.shape(0) != logits.shape(0)) throw nb::value_error("out has the wrong length");
  const slip::WithoutGil release;
  const slip::FpScope scope;
  if (!prepare(table, logits, ids, values, temperature)) return false;
  row().probabilities({temperature, min_p, top_k, top_p}, out.data());
  return true;
}

// (log-probability of `token`, the most likely tokens, their log-probabilities); None when a logit is bad.
nb::object logprobs(const Logits& logits, size_t token, size_t count, const std::string& isa) {
  const slip::SamplingTable& table = table_of(isa);
  if (token >= logits.shape(0)) throw nb::value_error("token id out of range");
  std::vector<slip::Scored> best;
  double own = 0.0;
  {
    const slip::WithoutGil release;
    const slip::FpScope scope;
    if (!row().prepare(table, logits.data(), logits.shape(0), nullptr, nullptr, 0, 0.0)) {
      own = 1.0;
    } else {
      const double total = row().log_total(), peak = row().peak();
      own = (row().score(token) - peak) - total;
      best = row().select({0.0, 0.0, 0, 1.0}, 0, count);
      for (slip::Scored& item : best) item.score = (item.score - peak) - total;
    }
  }
  if (own > 0.5) return nb::none();
  nb::tuple found = lists(best);
  return nb::make_tuple(own, found[0], found[1]);
}

// The likeliest tokens of several rows: logits [rows, vocab], ids and values [rows, count].
void top(const Matrix& logits, const TopIds& ids, const TopValues& values, const std::string& isa) {
  const slip::SamplingTable& table = table_of(isa);
  const size_t rows = logits.shape(0), n = logits.shape(1), count = ids.shape(1);
  if (ids.shape(0) != rows || values.shape(0) != rows || values.shape(1) != count || count == 0)
    throw nb::value_error("ids and values must have the shape [rows, count]");
  const slip::WithoutGil release;
  for (size_t row = 0; row < rows; row++)
    table.top(logits.data() + row * n, n, count, ids.data() + row * count, values.data() + row * count);
}

void gumbel(uint64_t key, const Ids& ids, const Out& out) {
  if (out.shape(0) != ids.shape(0)) throw nb::value_error("out has the wrong length");
  const slip::FpScope scope;
  for (size_t i = 0; i < ids.shape(0); i++) out.data()[i] = slip::gumbel_of(key, static_cast<uint64_t>(ids.data()[i]));
}

std::vector<uint64_t> keys(uint64_t seed, uint64_t begin, size_t count, uint64_t stream) {
  std::vector<uint64_t> found;
  for (size_t i = 0; i < count; i++) found.push_back(slip::noise_key(seed, begin + i, stream));
  return found;
}

void uniforms(uint64_t key, const Out& out) {
  const slip::FpScope scope;
  for (size_t i = 0; i < out.shape(0); i++) out.data()[i] = slip::uniform_of(slip::hash_of(key, i));
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("keys", &keys, nb::arg("seed"), nb::arg("begin"), nb::arg("count"), nb::arg("stream"));
  m.def("argmax", &argmax, nb::arg("logits"), nb::arg("isa") = "");
  m.def("select", &select_tokens, nb::arg("logits"), nb::arg("ids"), nb::arg("values"), nb::arg("temperature"),
        nb::arg("min_p"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("key"), nb::arg("count"), nb::arg("isa") = "");
  m.def("probabilities", &probabilities, nb::arg("logits"), nb::arg("ids"), nb::arg("values"), nb::arg("temperature"),
        nb::arg("min_p"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("out"), nb::arg("isa") = "");
  m.def("logprobs", &logprobs, nb::arg("logits"), nb::arg("token"), nb::arg("count"), nb::arg("isa") = "");
  m.def("top", &top, nb::arg("logits"), nb::arg("ids"), nb::arg("values"), nb::arg("isa") = "");
  m.def("gumbel", &gumbel, nb::arg("key"), nb::arg("ids"), nb::arg("out"));
  m.def("uniforms", &uniforms, nb::arg("key"), nb::arg("out"));
}
