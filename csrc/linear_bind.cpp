// Python bindings of packing and `linear`. Callers (kernels/native.py) have checked names, sizes and shapes.
#include "packed_bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "bind.h"
#include "gil.h"
#include "isa.h"
#include "pool.h"

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Data = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using In = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

slip::Packed shape_of(int type, int64_t out, int64_t in) {
  if (type < 0 || type >= slip::kTypes) throw nb::value_error("unknown weight type number");
  return {static_cast<slip::Type>(type), out, in, nullptr};
}

void check(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

// Row o of the result is row order[o] of the stacked parts (order empty: as they come).
void pack(int type, int64_t in, const std::vector<Bytes>& parts, const Rows& order, const Data& data) {
  std::vector<const uint8_t*> stacked, rows;
  const slip::TypeInfo& info = slip::type_info(shape_of(type, 0, in).type);
  for (const Bytes& part : parts) {
    check(static_cast<int64_t>(part.shape(1)) * info.span == in * info.raw_bytes, "bytes per row do not fit the inputs");
    for (size_t r = 0; r < part.shape(0); r++) stacked.push_back(part.data() + r * part.shape(1));
  }
  if (order.shape(0) == 0) rows = stacked;
  for (size_t o = 0; o < order.shape(0); o++) {
    check(order.data()[o] >= 0 && order.data()[o] < static_cast<int64_t>(stacked.size()), "row order out of range");
    rows.push_back(stacked[static_cast<size_t>(order.data()[o])]);
  }
  const slip::Packed shape = shape_of(type, static_cast<int64_t>(rows.size()), in);
  check(data.shape(0) == shape.bytes(), "packed buffer has the wrong size");
  const slip::WithoutGil release;
  slip::pack(slip::Pool::instance(), shape, rows.data(), data.data());
}

void linear(const In& x, const PackedHandle& packed, const Out& y, std::optional<Vector> bias, const std::string& isa) {
  const slip::Packed& w = packed.view;
  check(static_cast<int64_t>(x.shape(1)) == w.in, "x has the wrong number of columns");
  check(y.shape(0) == x.shape(0) && static_cast<int64_t>(y.shape(1)) == w.out, "out has the wrong shape");
  check(!bias || static_cast<int64_t>(bias->shape(0)) == w.out, "bias has the wrong length");
  const slip::KernelTable* table = isa.empty() ? &slip::kernels() : slip::find_kernels(isa);
  check(table != nullptr, "this CPU cannot run those kernels");
  const slip::LinearArgs args{w, x.data(), w.in, static_cast<int64_t>(x.shape(0)), y.data(), w.out,
                              bias ? bias->data() : nullptr};
  const slip::WithoutGil release;
  slip::Pool::instance().parallel_for(w.panels(),
                                      [&](int64_t begin, int64_t end) { table->linear.panels(args, begin, end); });
}

void unpack_rows(const PackedHandle& packed, const Rows& ids, const Out& out) {
  const slip::Packed& w = packed.view;
  check(out.shape(0) == ids.shape(0) && static_cast<int64_t>(out.shape(1)) == w.in, "out has the wrong shape");
  for (size_t k = 0; k < ids.shape(0); k++)
    check(ids.data()[k] >= 0 && ids.data()[k] < w.out, "row number out of range");
  const slip::WithoutGil release;
  slip::Pool::instance().parallel_for(static_cast<int64_t>(ids.shape(0)), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k++) slip::unpack_row(w, ids.data()[k], out.data() + k * w.in);
  });
}

// Seconds of the fastest of `repeats` threaded reads of `data`.
double read_seconds(const Vector& data, int repeats) {
  constexpr int64_t kPiece = 1 << 16;
  const int64_t count = static_cast<int64_t>(data.shape(0)), pieces = (count + kPiece - 1) / kPiece;
  const auto read = slip::kernels().linear.read;
  double best = 1e30;
  volatile float sink = 0;
  const slip::WithoutGil release;
  for (int k = 0; k < repeats; k++) {
    const auto start = std::chrono::steady_clock::now();
    slip::Pool::instance().parallel_for(pieces, [&](int64_t begin, int64_t end) {
      sink = read(data.data() + begin * kPiece, static_cast<size_t>(std::min(count, end * kPiece) - begin * kPiece));
    });
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<PackedHandle>(m, "PackedHandle", "Packed weights: a view that keeps its buffer alive.")
      .def(
          "__init__",
          [](PackedHandle* self, int type, int64_t out, int64_t in, PackedHandle::Buffer data) {
            slip::Packed view = shape_of(type, out, in);
            check(data.shape(0) == view.bytes(), "packed buffer has the wrong size");
            check(reinterpret_cast<uintptr_t>(data.data()) % 64 == 0, "packed buffer is not 64-byte aligned");
            view.data = data.data();
            new (self) PackedHandle{view, std::move(data)};
          },
          nb::arg("type"), nb::arg("out"), nb::arg("in_features"), nb::arg("data"));
  m.def("packed_bytes", [](int type, int64_t out, int64_t in) { return shape_of(type, out, in).bytes(); });
  m.def("pack", &pack, nb::arg("type"), nb::arg("in_features"), nb::arg("parts"), nb::arg("order"), nb::arg("data"));
  m.def("linear", &linear, nb::arg("x"), nb::arg("packed"), nb::arg("out"), nb::arg("bias").none(), nb::arg("isa") = "");
  m.def("unpack_rows", &unpack_rows, nb::arg("packed"), nb::arg("ids"), nb::arg("out"));
  m.def("read_seconds", &read_seconds, nb::arg("data"), nb::arg("repeats"));
}
