// Which kernel tables this CPU can run, and the active one.
#include <atomic>

#include "isa.h"

namespace slip {

namespace generic { extern const KernelTable table; }
#ifdef SLIPSTREAM_X86
namespace avx2 { extern const KernelTable table; }
namespace avx512 { extern const KernelTable table; }
#endif
#ifdef SLIPSTREAM_NEON
namespace neon { extern const KernelTable table; }
#endif

namespace {

// Best first. __builtin_cpu_supports also asks the operating system whether it saves the registers.
std::vector<const KernelTable*> runnable() {
  std::vector<const KernelTable*> tables;
#ifdef SLIPSTREAM_X86
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    tables.push_back(&avx512::table);
  if (has_avx2) tables.push_back(&avx2::table);
#endif
#ifdef SLIPSTREAM_NEON
  tables.push_back(&neon::table);
#endif
  tables.push_back(&generic::table);
  return tables;
}

std::atomic<const KernelTable*> active{nullptr};

}  // namespace

const KernelTable& kernels() {
  const KernelTable* table = active.load(std::memory_order_acquire);
  if (table == nullptr) {
    table = runnable().front();
    active.store(table, std::memory_order_release);
  }
  return *table;
}

const KernelTable* find_kernels(const std::string& name) {
  for (const KernelTable* table : runnable())
    if (name == table->name) return table;
  return nullptr;
}

std::vector<std::string> available_kernels() {
  std::vector<std::string> names;
  for (const KernelTable* table : runnable()) names.emplace_back(table->name);
  return names;
}

bool select_kernels(const std::string& name) {
  const KernelTable* table = name == "auto" ? runnable().front() : find_kernels(name);
  if (table != nullptr) active.store(table, std::memory_order_release);
  return table != nullptr;
}

}  // namespace slip
