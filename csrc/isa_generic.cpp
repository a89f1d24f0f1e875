#define SLIP_ISA generic
#define SLIP_ISA_NAME "generic"
#define SLIP_SIMD_GENERIC 1
#include "isa_impl.h"
