// The Python object behind packed weights, for every *_bind.cpp that takes some.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "linear.h"

namespace nb = nanobind;

struct PackedHandle {
  using Buffer = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  slip::Packed view;
  Buffer buffer;
};
