// Compares `linear` of every kernel set this CPU can run with the generic one, bit for bit. A program of its own, so that it
// also runs where Python does not, for instance NEON under qemu (csrc/README.md).
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "../isa.h"
#include "../pool.h"

namespace {

// Random blocks; the halves that hold scales are kept finite.
std::vector<uint8_t> random_rows(std::mt19937& random, slip::Type type, int64_t rows, int64_t in) {
  const slip::TypeInfo& info = slip::type_info(type);
  std::vector<uint8_t> raw(static_cast<size_t>(rows * in / info.span * info.raw_bytes));
  for (uint8_t& byte : raw) byte = static_cast<uint8_t>(random());
  const auto finite = [&](size_t at) { raw[at + 1] = static_cast<uint8_t>((raw[at + 1] & 0x83) | 0x28); };
  for (size_t block = 0; block < raw.size(); block += static_cast<size_t>(info.raw_bytes)) {
    if (type == slip::Type::F32) raw[block + 3] = static_cast<uint8_t>((raw[block + 3] & 0x81) | 0x3e);
    else if (type == slip::Type::Q6_K) finite(block + 208);
    else finite(block);
    if (type == slip::Type::Q4_1 || type == slip::Type::Q5_1 || type == slip::Type::Q4_K || type == slip::Type::Q5_K)
      finite(block + 2);
  }
  return raw;
}

int64_t compare(std::mt19937& random, slip::Type type, const slip::KernelTable& table, bool plant) {
  constexpr int64_t out = 75, in = 512, most = 37;
  const std::vector<uint8_t> raw = random_rows(random, type, out, in);
  std::vector<const uint8_t*> rows;
  for (int64_t o = 0; o < out; o++) rows.push_back(raw.data() + static_cast<size_t>(o) * raw.size() / out);
  slip::Packed packed{type, out, in, nullptr};
  std::vector<uint8_t> buffer(packed.bytes() + 64);
  uint8_t* data = buffer.data() + (64 - reinterpret_cast<uintptr_t>(buffer.data()) % 64) % 64;
  slip::pack(slip::Pool::instance(), packed, rows.data(), data);
  packed.data = data;
  std::vector<float> x(most * in), expected(most * out), found(most * out);
  for (float& value : x) value = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f;
  const slip::KernelTable& generic = *slip::find_kernels("generic");
  int64_t different = 0;
  for (const int64_t m : {1, 2, 3, 4, 5, 6, 8, 9, 13, 37}) {
    generic.linear.panels({packed, x.data(), in, m, expected.data(), out, nullptr}, 0, packed.panels());
    data[packed.bytes() / 2] ^= plant ? 4 : 0;
    table.linear.panels({packed, x.data(), in, m, found.data(), out, nullptr}, 0, packed.panels());
    different += std::memcmp(expected.data(), found.data(), static_cast<size_t>(m * out) * sizeof(float)) != 0;
  }
  return different;
}

}  // namespace

// With any argument one bit of the weights changes between the two: every comparison must then fail.
int main(int arguments, char**) {
  const bool plant = arguments > 1;
  std::mt19937 random(7);
  int64_t different = 0;
  for (const std::string& name : slip::available_kernels()) {
    for (int type = 0; type < slip::kTypes; type++)
      different += compare(random, static_cast<slip::Type>(type), *slip::find_kernels(name), plant);
    std::printf("%s: %s\n", name.c_str(), different == 0 ? "equal" : "DIFFERENT");
  }
  return different == 0 ? 0 : 1;
}
