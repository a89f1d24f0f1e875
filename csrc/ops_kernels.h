// The ops kernels of one instruction set; included by isa_impl.h only.
#include "attention_kernels.h"
#include "elementwise_kernels.h"
#include "ops.h"
#include "simd.h"

namespace slip::SLIP_ISA {
namespace {

constexpr OpsTable ops_table() {
  return {rms_norm, add_into, silu_mul, rotate, exp_all, attend, attend_merge, attend_finish};
}

}  // namespace
}  // namespace slip::SLIP_ISA
