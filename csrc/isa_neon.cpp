#define SLIP_ISA neon
#define SLIP_ISA_NAME "neon"
#define SLIP_SIMD_NEON 1
#include "isa_impl.h"
