// Python bindings of the suffix automaton.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "pool.h"
#include "suffix.h"

namespace nb = nanobind;

void bind_suffix(nb::module_& m) {
  nb::class_<slip::SuffixAutomaton>(m, "SuffixAutomaton")
      .def(nb::init<>())
      .def_prop_ro("size", &slip::SuffixAutomaton::size)
      .def(
          "extend",
          [](slip::SuffixAutomaton& self, const std::vector<int32_t>& tokens) {
            for (const int32_t token : tokens)
              if (token < 0) throw nb::value_error("token ids start at 0");
            for (const int32_t token : tokens) self.append(token);
          },
          nb::arg("tokens"))
      .def(
          "tree",
          [](const slip::SuffixAutomaton& self, size_t nodes, size_t depth, size_t width, double least) {
            const slip::FpScope scope;
            const slip::SuffixAutomaton::Tree tree = self.tree(nodes, depth, width, least);
            return nb::make_tuple(tree.tokens, tree.parents, tree.chances, tree.matches);
          },
          nb::arg("nodes"), nb::arg("depth"), nb::arg("width"), nb::arg("least"));
}
