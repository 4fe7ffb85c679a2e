// SPDX-License-Identifier: Apache-2.0

#include "py_memory.h"

#include <pybind11/numpy.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>

#include "interrupt.h"
#include "py_gil.h"
#include "py_nest.h"

namespace py = pybind11;

namespace torchbeast {
namespace {

// Converts what `allocate` has returned to a Block of at least `nbytes`.
Block to_block(py::object memory, size_t nbytes) {
  constexpr uintptr_t kAlignment =
      16;  // That of malloc; enough for every dtype.
  if (!is_tensor(memory)) {
    const py::object got = memory;
    memory = py::module_::import("numpy").attr("frombuffer")(memory, "uint8");
    if (!py::cast<py::array>(memory).writeable()) {
      throw std::invalid_argument(
          std::string("expected memory to write to, got a read-only ") +
          Py_TYPE(got.ptr())->tp_name + "; return a bytearray or a tensor");
    }
  }
  const Array array = to_array(memory);
  if (array.nbytes() < nbytes) {
    throw std::invalid_argument("expected at least as many bytes, got " +
                                std::to_string(array.nbytes()));
  }
  if (reinterpret_cast<uintptr_t>(array.data) % kAlignment != 0) {
    throw std::invalid_argument("expected memory aligned to " +
                                std::to_string(kAlignment) + " bytes");
  }
  return {array.data, array.owner};
}

// Ends the calls of `allocate` before the interpreter ends. Otherwise Python
// would unwind the threads that wait for the GIL, which may be threads of the
// core. Thread-safe.
//   Guard  marks a running call. Its constructor throws after end().
//   end    waits until no call runs. Call it without the GIL.
class Allocations {
 public:
  class Guard {
   public:
    explicit Guard(Allocations* allocations) : allocations_(allocations) {
      std::lock_guard lock(allocations_->mu_);
      if (allocations_->ended_) {
        throw std::runtime_error("the Python interpreter is ending");
      }
      ++allocations_->running_;
    }
    ~Guard() {
      std::lock_guard lock(allocations_->mu_);
      if (--allocations_->running_ == 0) allocations_->finished_.notify_all();
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    Allocations* const allocations_;
  };

  void end() {
    std::unique_lock lock(mu_);
    ended_ = true;
    while (running_ > 0) wait_interruptibly(lock, finished_);
  }

 private:
  std::mutex mu_;
  std::condition_variable finished_;
  int running_ = 0;     // Guarded by mu_.
  bool ended_ = false;  // Guarded by mu_.
};

Allocations& allocations() {
  static auto* const allocations = new Allocations();  // Never destroyed.
  return *allocations;
}

// No Python exception: the code that catches it has no GIL.
std::runtime_error failure(size_t nbytes, const std::exception& error) {
  return std::runtime_error("allocate(" + std::to_string(nbytes) +
                            ") failed: " + error.what());
}

}  // namespace

std::shared_ptr<BufferPool> make_pool(const py::object& allocate) {
  if (allocate.is_none()) return BufferPool::create();
  const std::shared_ptr<void> function = keep_alive(allocate.ptr());
  return BufferPool::create([function](size_t nbytes) {
    const Allocations::Guard guard(&allocations());
    const py::gil_scoped_acquire gil;
    // A signal handler has raised in this work before: no Python may run until
    // without_gil() raises its error.
    if (PyErr_Occurred()) throw Interrupted();
    try {
      const py::handle allocate(static_cast<PyObject*>(function.get()));
      return to_block(allocate(nbytes), nbytes);
    } catch (py::error_already_set& error) {
      // A signal handler's, such as KeyboardInterrupt: without_gil() raises it.
      if (is_main_thread() && !error.matches(PyExc_Exception)) {
        error.restore();
        throw Interrupted();
      }
      throw failure(nbytes, error);
    } catch (const std::exception& error) {
      throw failure(nbytes, error);
    }
  });
}

void end_allocations() { allocations().end(); }

}  // namespace torchbeast
