// Python bindings of the ranked tree.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "pool.h"
#include "tree.h"

namespace nb = nanobind;

namespace {

void check_belief(double belief) {
  if (!(belief >= 0.0 && belief <= 1.0)) throw nb::value_error("beliefs lie from 0 to 1");
}

// (source, tokens, parents, beliefs); raises ValueError unless it is a tree with beliefs from 0 to 1.
std::vector<slip::Offer> offers_of(const nb::list& given) {
  std::vector<slip::Offer> offers;
  for (const nb::handle one : given) {
    const nb::tuple offer = nb::cast<nb::tuple>(one);
    offers.push_back({nb::cast<int32_t>(offer[0]), nb::cast<std::vector<int32_t>>(offer[1]),
                      nb::cast<std::vector<int32_t>>(offer[2]), nb::cast<std::vector<double>>(offer[3])});
    const slip::Offer& made = offers.back();
    if (made.parents.size() != made.tokens.size() || made.beliefs.size() != made.tokens.size() || made.source < 0)
      throw nb::value_error("an offer's tokens, parents and beliefs do not fit each other");
    for (size_t i = 0; i < made.tokens.size(); i++) {
      if (made.parents[i] < -1 || made.parents[i] >= static_cast<int32_t>(i))
        throw nb::value_error("parents come before their children");
      check_belief(made.beliefs[i]);
    }
  }
  return offers;
}

nb::tuple rank(slip::Ranker& self, int64_t row, const nb::list& offers, const std::vector<uint64_t>& keys, double scale,
               bool keep) {
  const slip::FpScope scope;
  const slip::RankedTree tree = self.rank(row, offers_of(offers), keys, scale, keep);
  return nb::make_tuple(tree.tokens, tree.parents, tree.sources, tree.chances, tree.reach);
}

nb::tuple spread(const std::vector<std::vector<double>>& reaches, const std::vector<double>& costs, size_t base,
                 double tokens, double fixed) {
  if (base >= costs.size()) throw nb::value_error("costs end before the rows that are there anyway");
  const slip::Spread found = slip::spread(reaches, costs, base, tokens, fixed);
  return nb::make_tuple(found.counts, found.tokens, found.seconds);
}

}  // namespace

void bind_tree(nb::module_& m) {
  nb::class_<slip::Ranker>(m, "Ranker")
      .def(nb::init<>())
      .def(
          "chance",
          [](const slip::Ranker& self, int32_t source, double belief, int32_t depth) {
            check_belief(belief);
            return self.chance(source, belief, depth);
          },
          nb::arg("source"), nb::arg("belief"), nb::arg("depth"))
      .def("rank", &rank, nb::arg("row"), nb::arg("offers"), nb::arg("keys"), nb::arg("scale"), nb::arg("keep"))
      .def("learn", &slip::Ranker::learn, nb::arg("row"), nb::arg("emitted"))
      .def("forget", &slip::Ranker::forget, nb::arg("row"));
  m.def("spread", &spread, nb::arg("reaches"), nb::arg("costs"), nb::arg("base"), nb::arg("tokens"), nb::arg("fixed"));
}
