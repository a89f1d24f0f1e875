// The parts of the module; each is defined in its own *_bind.cpp.
#pragma once

#include <nanobind/nanobind.h>

void bind_linear(nanobind::module_& m);
void bind_decoder(nanobind::module_& m);
void bind_head(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_successors(nanobind::module_& m);
void bind_suffix(nanobind::module_& m);
void bind_tree(nanobind::module_& m);
