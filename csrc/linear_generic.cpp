#define SLIP_ISA generic
#define SLIP_SIMD_GENERIC 1
#include "linear_kernels.h"
