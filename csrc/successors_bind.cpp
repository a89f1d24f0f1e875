// Python bindings of the table of successors; kernels/successors.py owns the arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "gil.h"
#include "isa.h"
#include "pool.h"
#include "successors.h"

namespace nb = nanobind;

namespace {

using Rows = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Owner = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tokens = std::vector<int64_t>;

slip::Successors table_of(const Rows& ids, const Weights& weights, const Owner& owner) {
  const size_t rows = ids.shape(0), pairs = owner.shape(0);
  if (ids.shape(1) != slip::kSuccessors || weights.shape(1) != slip::kSuccessors || weights.shape(0) != rows ||
      pairs == 0 || rows <= pairs)
    throw nb::value_error("the arrays of a table of successors do not fit each other");
  return {ids.data(), weights.data(), owner.data(), rows - pairs, pairs};
}

void check(const slip::Successors& table, int64_t token, int64_t least) {
  if (token < least || token >= static_cast<int64_t>(table.vocab)) throw nb::value_error("token id out of range");
}

// before, tokens: one context per row of logits; before is -1 at the beginning of a text.
void learn(const Rows& ids, const Weights& weights, const Owner& owner, const Tokens& before, const Tokens& tokens,
           const Tokens& order, const Logits& logits) {
  slip::Successors table = table_of(ids, weights, owner);
  if (before.size() != logits.shape(0) || tokens.size() != logits.shape(0) || logits.shape(1) != table.vocab)
    throw nb::value_error("contexts and logits do not fit the table");
  for (const int64_t token : tokens) check(table, token, 0);
  for (const int64_t token : before) check(table, token, -1);
  for (const int64_t row : order)
    if (row < 0 || static_cast<size_t>(row) >= tokens.size()) throw nb::value_error("no such row of logits");
  const slip::WithoutGil release;
  const slip::FpScope scope;
  for (const int64_t row : order) {
    const size_t i = static_cast<size_t>(row);
    table.learn(slip::kernels().sampling, before[i], tokens[i], logits.data() + i * table.vocab);
  }
}

void read_text(const Rows& ids, const Weights& weights, const Owner& owner, const Tokens& tokens) {
  slip::Successors table = table_of(ids, weights, owner);
  for (const int64_t token : tokens) check(table, token, 0);
  const slip::WithoutGil release;
  for (size_t i = 1; i < tokens.size(); i++) table.saw(i > 1 ? tokens[i - 2] : -1, tokens[i - 1], tokens[i]);
}

nb::tuple tree(const Rows& ids, const Weights& weights, const Owner& owner, int64_t before, int64_t token,
               size_t nodes, size_t depth, size_t width, double least, double certain) {
  const slip::Successors table = table_of(ids, weights, owner);
  check(table, token, 0);
  check(table, before, -1);
  slip::SuccessorTree tree;
  tree.grow(table, before, token, {nodes, depth, width, least, certain});
  return nb::make_tuple(tree.tokens, tree.parents, tree.chances);
}

}  // namespace

void bind_successors(nb::module_& m) {
  m.def("successors_learn", &learn, nb::arg("ids"), nb::arg("weights"), nb::arg("owner"), nb::arg("before"),
        nb::arg("tokens"), nb::arg("order"), nb::arg("logits"));
  m.def("successors_read", &read_text, nb::arg("ids"), nb::arg("weights"), nb::arg("owner"), nb::arg("tokens"));
  m.def("successors_tree", &tree, nb::arg("ids"), nb::arg("weights"), nb::arg("owner"), nb::arg("before"),
        nb::arg("token"), nb::arg("nodes"), nb::arg("depth"), nb::arg("width"), nb::arg("least"), nb::arg("certain"));
}
