// Included once by each isa_*.cpp, which defines SLIP_ISA (the namespace) and SLIP_ISA_NAME.
#include "isa.h"
#include "simd.h"

#include "ops_kernels.h"
#include "sampling_kernels.h"

namespace slip::SLIP_ISA {

extern const LinearTable linear_table;  // linear_<isa>.cpp
extern const KernelTable table;
const KernelTable table = {SLIP_ISA_NAME, linear_table, ops_table(), sampling_table()};

}  // namespace slip::SLIP_ISA
