#define SLIP_ISA avx512
#define SLIP_SIMD_AVX512 1
#include "linear_kernels.h"
