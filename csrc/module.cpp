// The compiled module: what it can run on this CPU, its threads, and the kernels of the other *_bind.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "gil.h"
#include "isa.h"
#include "pool.h"

namespace nb = nanobind;

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // threads that outlive the interpreter keep what they use
  m.attr("version") = SLIPSTREAM_VERSION;
  m.attr("interface") = SLIPSTREAM_INTERFACE;  // native.py refuses a core whose number is not its own
  m.attr("layout_version") = slip::kLayoutVersion;
  m.def("available_kernels", &slip::available_kernels, "Names of the kernel sets this CPU can run, best first.");
  m.def("active_kernels", [] { return std::string(slip::kernels().name); });
  m.def("select_kernels", &slip::select_kernels, nb::arg("name"), "False if this CPU cannot run `name`.");
  m.def("threads", [] { return slip::Pool::instance().threads(); });
  m.def("usable_cores", &slip::usable_cores);
  m.def(
      "set_threads",
      [](int n) {
        if (n < 1 || n > 256) throw nb::value_error("threads must be between 1 and 256");
        const slip::WithoutGil release;
        slip::Pool::instance().set_threads(n);
      },
      nb::arg("n"));
  bind_linear(m);
  bind_decoder(m);
  bind_head(m);
  bind_sampling(m);
  bind_successors(m);
  bind_suffix(m);
  bind_tree(m);
}
