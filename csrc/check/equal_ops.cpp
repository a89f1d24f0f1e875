// Compares everything of a pass that is not `linear`, attention over trees included, of every kernel set this CPU can
// run with the generic one, bit for bit. Built and run like equal_kernels.cpp.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "../isa.h"
#include "../ops.h"
#include "../pool.h"

namespace {

using Floats = std::vector<float>;

Floats random_floats(std::mt19937& random, size_t count, float size) {
  Floats values(count);
  for (float& value : values) value = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f * size;
  return values;
}

// Queries of a random tree over a cache in scattered blocks; all stretches, merged in order.
struct Case {
  int head_dim, rows, cached, group = 3;
  int stride = (head_dim + 15) / 16 * 16, width = 2 * head_dim;
  Floats pool, q, keys, values;
  std::vector<int32_t> table, ends, ids, parents;

  Case(std::mt19937& random, int dim, int count, int prefix) : head_dim(dim), rows(count), cached(prefix) {
    pool = random_floats(random, static_cast<size_t>(16) * slip::kKvBlock * (dim + stride) + 16, 2);
    q = random_floats(random, static_cast<size_t>(rows) * group * dim, 2);
    keys = random_floats(random, static_cast<size_t>(rows) * width + 16, 2);
    values = random_floats(random, static_cast<size_t>(rows) * width + 16, 2);
    std::vector<int32_t> depths;
    for (int32_t i = 0; i < 16; i++) table.push_back(i * 7 % 16);
    for (int32_t row = 0; row < rows; row++) {
      parents.push_back(row == 0 ? -1 : static_cast<int32_t>(random() % static_cast<uint32_t>(row)));
      depths.push_back(row == 0 ? 0 : depths[static_cast<size_t>(parents.back())] + 1);
      ends.push_back(cached + depths.back() + 1);
      ids.push_back(row);
    }
  }

  Floats run(const slip::OpsTable& ops) const {
    const size_t keys_of_block = static_cast<size_t>(slip::kKvBlock) * static_cast<size_t>(head_dim);
    const size_t block = keys_of_block + static_cast<size_t>(slip::kKvBlock) * static_cast<size_t>(stride);
    const int units = rows * group;
    const slip::AttendTask task{q.data(), static_cast<ptrdiff_t>(group) * head_dim, ends.data(), ids.data(),
                                parents.data(), units, group, head_dim, stride, 0.25f, cached, pool.data(),
                                table.data(), block, 0, nullptr, keys.data(), values.data(), width};
    Floats work(slip::attend_work(head_dim)), out(static_cast<size_t>(units) * static_cast<size_t>(head_dim));
    Floats top[2], total[2], mixed[2];
    slip::AttendPart parts[2];
    for (int i = 0; i < 2; i++) {
      top[i].resize(static_cast<size_t>(units)), total[i].resize(static_cast<size_t>(units));
      mixed[i].resize(static_cast<size_t>(units) * static_cast<size_t>(stride));
      parts[i] = {top[i].data(), total[i].data(), mixed[i].data()};
    }
    const int most = cached + rows;
    for (int stretch = 0; slip::stretch_begin(stretch) * slip::kSegment < most; stretch++) {
      ops.attend(task, stretch, parts[stretch > 0], work.data());
      if (stretch > 0) ops.attend_merge(task, stretch, parts[0], parts[1]);
    }
    for (int u = 0; u < units; u++)
      ops.attend_finish(*(total[0].data() + u), mixed[0].data() + u * stride, head_dim, out.data() + u * head_dim);
    return out;
  }
};

Floats elementwise(const slip::OpsTable& ops, const Floats& x, const Floats& weight) {
  const int n = static_cast<int>(x.size());
  Floats all, out(x.size());
  const auto keep = [&] { all.insert(all.end(), out.begin(), out.end()); };
  ops.exp(x.data(), n, out.data()), keep();
  ops.rms_norm(x.data(), weight.data(), 1e-5f, n, out.data()), keep();
  ops.silu_mul(x.data(), weight.data(), n, out.data()), keep();
  ops.add(x.data(), n, out.data()), keep();
  ops.rotate(out.data(), weight.data(), x.data(), n / 2), keep();
  return all;
}

bool same(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

int main() {
  const slip::FpScope mode;
  const slip::OpsTable& generic = slip::find_kernels("generic")->ops;
  int different = 0;
  for (const std::string& name : slip::available_kernels()) {
    const slip::OpsTable& ops = slip::find_kernels(name)->ops;
    std::mt19937 random(7);
    for (const int head_dim : {10, 24, 64, 128})
      for (const int rows : {1, 3, 9, 30})
        for (const int cached : {0, 1, 127, 200, 256, 510, 1100}) {
          const Case example(random, head_dim, rows, cached);
          different += !same(example.run(generic), example.run(ops));
        }
    for (const size_t n : {1, 15, 16, 17, 1002}) {
      const Floats x = random_floats(random, n, 90), weight = random_floats(random, n, 1);
      different += !same(elementwise(generic, x, weight), elementwise(ops, x, weight));
    }
    std::printf("%s: %s\n", name.c_str(), different == 0 ? "equal" : "DIFFERENT");
  }
  return different != 0;
}
