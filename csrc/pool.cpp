#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace slip {

namespace {

#if defined(__x86_64__)
constexpr uint32_t kMode = 0x1f80;  // the state the ABI starts with: no flush-to-zero, no denormals-are-zero
uint64_t read_mode() { return _mm_getcsr(); }
void write_mode(uint64_t mode) { _mm_setcsr(static_cast<uint32_t>(mode)); }
void relax() { _mm_pause(); }
#elif defined(__aarch64__)
constexpr uint64_t kMode = 0;
uint64_t read_mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void write_mode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
void relax() { asm volatile("yield"); }
#else
constexpr uint64_t kMode = 0;
uint64_t read_mode() { return 0; }
void write_mode(uint64_t) {}
void relax() {}
#endif

constexpr auto kSpin = std::chrono::microseconds(50);  // longer than the gap between two kernels of one pass

std::atomic<uint32_t> fork_count{0};
std::once_flag fork_handler;

void count_fork() { fork_count.fetch_add(1); }

// The claim word: generation (24 bits), tasks of the job (20), next unclaimed task (20). One compare-and-swap
// both claims and proves that the job read a moment before is still the current one.
constexpr int kBits = 20;
constexpr uint64_t kField = (uint64_t{1} << kBits) - 1;
constexpr uint64_t make_word(uint64_t generation, uint64_t tasks) { return generation << (2 * kBits) | tasks << kBits; }
constexpr uint64_t tasks_of(uint64_t word) { return word >> kBits & kField; }
constexpr uint64_t next_of(uint64_t word) { return word & kField; }
bool has_work(uint64_t word) { return next_of(word) < tasks_of(word); }

// What others do ends soon: a short spin, then the core is given away.
template <class F> void wait_until(F&& ended) {
  for (int round = 0; !ended(); round++) {
    if (round < 2000) relax();
    else if (round < 2200) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

// Whether this thread is at a range of a job or at work left aside: it must not wait for others then.
thread_local bool is_inside = false;

class Inside {
 public:
  Inside() : before_(is_inside) { is_inside = true; }
  ~Inside() { is_inside = before_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  bool before_;
};

void attempt(Pool::Aside& aside) {
  try {
    aside.work();
  } catch (...) {
    aside.error = std::current_exception();
  }
}

}  // namespace

FpScope::FpScope() : saved_(read_mode()) {
  if (saved_ != kMode) write_mode(kMode);
}
FpScope::~FpScope() {
  if (saved_ != kMode) write_mode(saved_);
}

struct alignas(64) Pool::Impl {
  // Written by the caller between jobs only; valid while the claim word has work.
  std::atomic<Task> task{nullptr};
  std::atomic<void*> self{nullptr};
  std::atomic<int64_t> total{0}, unit{1};
  std::atomic<int> threads{1};
  uint64_t generation = 0;
  alignas(64) std::atomic<uint64_t> claim{0};
  alignas(64) std::atomic<uint64_t> done{0};
  alignas(64) std::atomic<uint32_t> wake{0};
  std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};
  std::atomic<bool> busy{false};
  std::atomic<Aside*> aside{nullptr};  // work that nobody has begun
  std::atomic<int> begun{0};           // threads that may be at such work
  std::vector<std::thread> workers;
  uint32_t fork_epoch = fork_count.load();

  // Claims and runs ranges of the current job until none is left.
  void work() {
    uint64_t word = claim.load(std::memory_order_acquire);
    while (has_work(word)) {
      const Task body = task.load(std::memory_order_relaxed);
      void* object = self.load(std::memory_order_relaxed);
      const int64_t n = total.load(std::memory_order_relaxed), size = unit.load(std::memory_order_relaxed);
      const uint64_t left = tasks_of(word) - next_of(word);
      // Large ranges first, single tasks at the end: few claims, and an even finish.
      const uint64_t take = std::max<uint64_t>(1, left / (2 * static_cast<uint64_t>(threads.load(std::memory_order_relaxed))));
      const uint64_t begin = next_of(word);
      if (!claim.compare_exchange_weak(word, word + take, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      {
        const Inside inside;
        body(object, static_cast<int64_t>(begin) * size, std::min(n, static_cast<int64_t>(begin + take) * size));
      }
      done.fetch_add(take, std::memory_order_release);
      word = claim.load(std::memory_order_acquire);
    }
  }

  bool anything() const { return has_work(claim.load()) || aside.load() != nullptr; }

  void work_aside() {
    if (aside.load(std::memory_order_relaxed) == nullptr) return;
    begun.fetch_add(1);  // before it is taken: whoever finds nothing to take sees that somebody is at it
    if (Aside* mine = aside.exchange(nullptr)) {
      const Inside inside;
      attempt(*mine);
      mine->state.store(Aside::State::done, std::memory_order_release);
    }
    begun.fetch_sub(1);
  }

  // Before a job: nobody may be kept by work left aside, or the job would go without them.
  void settle_aside() {
    if (aside.load(std::memory_order_relaxed) != nullptr)
      if (Aside* mine = aside.exchange(nullptr)) mine->state.store(Aside::State::taken_back, std::memory_order_release);
    if (begun.load() != 0) wait_until([&] {
      work();
      return begun.load() == 0;
    });
  }

  void worker() {
    write_mode(kMode);
    while (!stop.load(std::memory_order_relaxed)) {
      work();
      work_aside();
      const auto deadline = std::chrono::steady_clock::now() + kSpin;
      bool found = false;
      do {
        for (int i = 0; i < 32 && !found; i++) {
          relax();
          found = anything();
        }
      } while (!found && std::chrono::steady_clock::now() < deadline);
      if (found) continue;
      const uint32_t seen = wake.load();
      sleepers.fetch_add(1);
      // Sequentially consistent against run() and start(): either they see this sleeper or this sees their work.
      if (!anything() && !stop.load()) wake.wait(seen);
      sleepers.fetch_sub(1);
    }
  }

  void wake_all() {
    if (sleepers.load() == 0) return;
    wake.fetch_add(1);
    wake.notify_all();
  }

  void start_workers() {
    const int wanted = threads.load() - 1;
    try {
      while (static_cast<int>(workers.size()) < wanted) workers.emplace_back([this] { worker(); });
    } catch (const std::system_error&) {
      threads.store(static_cast<int>(workers.size()) + 1);  // the system gives no more threads: go on with these
    }
  }

  void stop_workers() {
    stop.store(true);
    wake.fetch_add(1);
    wake.notify_all();
    for (std::thread& thread : workers) thread.join();
    workers.clear();
    stop.store(false);
  }
};

Pool& Pool::instance() {
  // Never destroyed: workers may still sleep in it when the process ends.
  static Pool* pool = [] {
#if defined(__unix__) || defined(__APPLE__)
    std::call_once(fork_handler, [] { pthread_atfork(nullptr, nullptr, count_fork); });
#endif
    Impl* impl = new Impl;
    impl->threads.store(usable_cores());
    return new Pool(impl);
  }();
  // The child of a fork has no workers and perhaps a job that will never end: leave all that behind.
  if (pool->impl_.load()->fork_epoch != fork_count.load()) {
    Impl* old = pool->impl_.load();
    Impl* fresh = new Impl;
    fresh->threads.store(old->threads.load());
    if (!pool->impl_.compare_exchange_strong(old, fresh)) delete fresh;
  }
  return *pool;
}

int Pool::threads() const { return impl_.load()->threads.load(); }

void Pool::set_threads(int n) {
  Impl& impl = *impl_.load();
  while (impl.busy.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
  if (n != impl.threads.load()) {
    impl.stop_workers();
    impl.threads.store(n);
  }
  impl.busy.store(false, std::memory_order_release);
}

void Pool::run(int64_t n, Task task, void* self) {
  if (n <= 0) return;
  const FpScope mode;
  Impl& impl = *impl_.load();
  if (n == 1 || impl.threads.load(std::memory_order_relaxed) == 1) return task(self, 0, n);
  if (!is_inside) impl.settle_aside();
  if (impl.busy.exchange(true, std::memory_order_acquire)) return task(self, 0, n);
  if (static_cast<int>(impl.workers.size()) + 1 != impl.threads.load(std::memory_order_relaxed)) impl.start_workers();
  const int64_t unit = (n + static_cast<int64_t>(kField) - 1) / static_cast<int64_t>(kField);
  const uint64_t tasks = static_cast<uint64_t>((n + unit - 1) / unit);
  impl.task.store(task, std::memory_order_relaxed);
  impl.self.store(self, std::memory_order_relaxed);
  impl.total.store(n, std::memory_order_relaxed);
  impl.unit.store(unit, std::memory_order_relaxed);
  impl.done.store(0, std::memory_order_relaxed);
  impl.generation = (impl.generation + 1) & 0xffffff;
  impl.claim.store(make_word(impl.generation, tasks));
  impl.wake_all();
  impl.work();
  wait_until([&] { return impl.done.load(std::memory_order_acquire) == tasks; });  // others hold the last ranges
  impl.busy.store(false, std::memory_order_release);
}

void Pool::start(Aside& aside) {
  Impl& impl = *impl_.load();
  Aside* none = nullptr;
  aside.error = nullptr;
  aside.state.store(Aside::State::left, std::memory_order_relaxed);
  const bool left = impl.threads.load() > 1 && impl.aside.compare_exchange_strong(none, &aside);
  aside.pool = left ? &impl : nullptr;
  if (left) impl.wake_all();
}

void Pool::finish(Aside& aside) {
  Impl* impl = impl_.load();
  Aside* mine = &aside;
  const FpScope mode;
  // In the child of a fork whoever took it stayed behind: it is done again from the beginning.
  if (aside.pool != impl || impl->aside.compare_exchange_strong(mine, nullptr)) return attempt(aside);
  wait_until([&] {
    impl->work();  // its own jobs
    return aside.state.load(std::memory_order_acquire) != Aside::State::left;
  });
  if (aside.state.load(std::memory_order_relaxed) == Aside::State::taken_back) attempt(aside);
}

namespace {

#if defined(__linux__)
// One line of a small file under /sys, or "".
std::string read_line(const std::string& path) {
  std::string text;
  if (FILE* file = std::fopen(path.c_str(), "r")) {
    char buffer[256];
    if (std::fgets(buffer, sizeof buffer, file) != nullptr) text = buffer;
    std::fclose(file);
  }
  return text;
}

// CPUs' worth of time the control group allows, or a large number.
int quota_cores() {
  const std::string text = read_line("/sys/fs/cgroup/cpu.max");
  long long quota = 0, period = 0;
  if (std::sscanf(text.c_str(), "%lld %lld", &quota, &period) != 2 || quota <= 0 || period <= 0) return 1 << 20;
  return static_cast<int>((quota + period - 1) / period);
}
#endif

}  // namespace

int usable_cores() {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    std::set<std::string> physical;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
      if (!CPU_ISSET(cpu, &set)) continue;
      const std::string siblings =
          read_line("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
      physical.insert(siblings.empty() ? "cpu" + std::to_string(cpu) : siblings);
    }
    if (!physical.empty()) cores = static_cast<int>(physical.size());
  }
  cores = std::min(cores, quota_cores());
#endif
  return std::clamp(cores, 1, 256);
}

}  // namespace slip
