#define SLIP_ISA avx512
#define SLIP_ISA_NAME "avx512"
#define SLIP_SIMD_AVX512 1
#include "isa_impl.h"
