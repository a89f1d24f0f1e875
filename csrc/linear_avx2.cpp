#define SLIP_ISA avx2
#define SLIP_SIMD_AVX2 1
#include "linear_kernels.h"
