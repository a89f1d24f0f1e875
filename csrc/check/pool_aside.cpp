// Work left aside: what it throws reaches whoever finishes it, and a job never runs beside it, short of a thread.
// A program of its own, because nothing that Python can ask for throws.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <new>
#include <thread>

#include "../pool.h"

namespace {

constexpr auto kLong = std::chrono::microseconds(2000);

bool throws(const slip::Pool::Aside& aside) {
  try {
    if (aside.error) std::rethrow_exception(aside.error);
  } catch (const std::bad_alloc&) {
    return true;
  }
  return false;
}

}  // namespace

int main() {
  slip::Pool& pool = slip::Pool::instance();
  pool.set_threads(2);
  int thrown = 0, beside = 0, undone = 0;
  for (int round = 0; round < 200; round++) {
    slip::Pool::Aside aside;
    aside.work = [] { throw std::bad_alloc(); };
    pool.start(aside);
    if (round % 2) std::this_thread::sleep_for(std::chrono::microseconds(100));
    pool.finish(aside);
    thrown += throws(aside);
  }
  for (int round = 0; round < 40; round++) {
    slip::Pool::Aside aside;
    std::atomic<int> done{0};
    std::atomic<bool> at_it{false};
    aside.work = [&] {
      at_it = true;
      std::this_thread::sleep_for(kLong);
      pool.parallel_for(64, [&](int64_t begin, int64_t end) { done += static_cast<int>(end - begin); });
      at_it = false;
    };
    pool.start(aside);
    if (round % 2) std::this_thread::sleep_for(kLong / 4);  // begun, or not
    std::atomic<int> seen{0};
    pool.parallel_for(2, [&](int64_t, int64_t) { seen += at_it; });
    beside += seen != 0;
    pool.finish(aside);
    undone += done != 64;
    pool.start(aside);  // and once more, nothing between
    pool.finish(aside);
    undone += done != 128;
  }
  std::printf("%d of 200 thrown, %d of 40 jobs beside what was left aside, %d not done\n", thrown, beside, undone);
  return thrown != 200 || beside != 0 || undone != 0;
}
