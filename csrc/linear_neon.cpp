#define SLIP_ISA neon
#define SLIP_SIMD_NEON 1
#include "linear_kernels.h"
