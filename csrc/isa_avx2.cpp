#define SLIP_ISA avx2
#define SLIP_ISA_NAME "avx2"
#define SLIP_SIMD_AVX2 1
#include "isa_impl.h"
