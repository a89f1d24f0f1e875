// The kernels of one instruction set, as a table of function pointers chosen once at import.
#pragma once

#include <string>
#include <vector>

#include "linear.h"
#include "ops.h"
#include "sampling.h"

namespace slip {

struct KernelTable {
  const char* name;
  const LinearTable& linear;
  OpsTable ops;
  SamplingTable sampling;
};

// The active table. Set before the first kernel runs; not meant to change while kernels run.
const KernelTable& kernels();
// Table of this name if this CPU can run it, else nullptr.
const KernelTable* find_kernels(const std::string& name);
// Names this CPU can run, best first.
std::vector<std::string> available_kernels();
// Makes `name` active ("auto": the best). False if this CPU cannot run it.
bool select_kernels(const std::string& name);

}  // namespace slip
