// Without the interpreter lock while kernels run; safe in threads that outlive the interpreter.
#pragma once

#include <Python.h>

#include <chrono>
#include <thread>

namespace slip {

// As nanobind's gil_scoped_release, but a thread that comes back when the interpreter is being shut down stays here
// until the process ends. Python up to 3.13 would end that thread by unwinding its stack, and destructors on the way
// turn that into std::terminate: a daemon thread in the middle of a pass would abort the process at its exit.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) std::this_thread::sleep_for(std::chrono::hours(24));
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace slip
