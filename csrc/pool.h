// A persistent pool of threads for kernels, and the floating point mode they run in.
//
// parallel_for publishes a job of n tasks; the caller and every worker that happens to be awake claim ranges of tasks
// from one atomic word until none is left. The caller waits for claimed tasks only, never for a worker to show up, so a
// worker that the system put aside delays a job by at most the range it holds. Idle workers spin for some tens of
// microseconds (the gap between two kernels of a pass) and then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <type_traits>

namespace slip {

// Round to nearest, denormals kept, exceptions masked: the mode of every kernel. Restores the caller's mode.
class FpScope {
 public:
  FpScope();
  ~FpScope();
  FpScope(const FpScope&) = delete;
  FpScope& operator=(const FpScope&) = delete;

 private:
  uint64_t saved_;
};

class Pool {
 public:
  // The one pool of the process. After fork the child gets a fresh one on first use.
  static Pool& instance();

  int threads() const;
  // Takes effect at the next job. 1 <= n <= 256.
  void set_threads(int n);

  // Work that an idle thread may do while the caller goes on. It must outlive `finish`; what it throws is `error` then.
  struct Aside {
    enum class State { left, taken_back, done };
    std::function<void()> work;
    std::exception_ptr error;
    std::atomic<State> state{State::left};
    const void* pool = nullptr;  // where it lies for others to take, null when nowhere
  };
  // Leaves work for an idle thread; where there is none it waits for `finish`.
  void start(Aside& aside);
  // Returns when the work is done: by an idle thread with this one's help, or here and now when none has begun.
  void finish(Aside& aside);

  // Runs fn(begin, end) over ranges that cover [0, n) exactly once, on several threads; returns when all are done.
  // fn must not throw. When the pool is busy with another caller's job (or fn itself calls parallel_for) the
  // job runs on the calling thread alone. Work left aside gives way: what has begun is helped to its end first, what has
  // not waits for `finish`.
  template <class F> void parallel_for(int64_t n, F&& fn) {
    using Body = std::remove_reference_t<F>;
    run(n, [](void* self, int64_t begin, int64_t end) { (*static_cast<Body*>(self))(begin, end); },
        const_cast<void*>(static_cast<const void*>(&fn)));
  }

 private:
  using Task = void (*)(void*, int64_t, int64_t);
  struct Impl;
  explicit Pool(Impl* impl) : impl_(impl) {}
  void run(int64_t n, Task task, void* self);
  std::atomic<Impl*> impl_;
};

// Cores this process may use: affinity and cgroup quota, hyper-threads counted once.
int usable_cores();

}  // namespace slip
