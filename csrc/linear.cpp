#include "linear.h"

#include <algorithm>
#include <vector>

#include "isa.h"
#include "pool.h"

namespace slip {

namespace {

constexpr TypeInfo kInfo[kTypes] = {
    {"F32", 1, 4, 128},        {"F16", 1, 2, 64},         {"BF16", 1, 2, 64},       {"Q8_0", 32, 34, 1088},
    {"Q4_0", 32, 18, 576},     {"Q4_1", 32, 20, 640},     {"Q5_0", 32, 22, 704},    {"Q5_1", 32, 24, 768},
    {"Q4_K", 256, 144, 4736},  {"Q5_K", 256, 176, 5760},  {"Q6_K", 256, 210, 6720},
};

}  // namespace

const TypeInfo& type_info(Type type) { return kInfo[static_cast<int>(type)]; }

size_t Packed::panel_bytes() const {
  const TypeInfo& info = type_info(type);
  const int64_t inputs = type == Type::BF16 || type == Type::F16 ? (in + 1) / 2 * 2 : in;  // whole lines of 128 bytes
  return static_cast<size_t>(inputs / info.span) * static_cast<size_t>(info.panel_bytes);
}

void linear(Pool& pool, const Packed& w, const float* x, int64_t ldx, int64_t m, float* y, int64_t ldy,
            const float* bias) {
  const LinearArgs args{w, x, ldx, m, y, ldy, bias};
  const auto panels = kernels().linear.panels;
  pool.parallel_for(w.panels(), [&](int64_t begin, int64_t end) { panels(args, begin, end); });
}

void unpack_row(const Packed& w, int64_t row, float* out) {
  const FpScope mode;
  std::vector<float> panel(static_cast<size_t>(w.in) * kPanel);
  kernels().linear.unpack_panel(w, row / kPanel, panel.data());
  for (int64_t i = 0; i < w.in; i++) out[i] = panel[static_cast<size_t>(i * kPanel + row % kPanel)];
}

}  // namespace slip
