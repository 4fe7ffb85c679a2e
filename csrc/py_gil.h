// SPDX-License-Identifier: Apache-2.0
//
// Waiting without the GIL, and keeping Python objects alive in threads that do
// not hold it.
//
// Rules for the GIL in the files py_*.cc and module.cc:
// * A call that can wait releases the GIL around the wait (without_gil). The
//   waiting stack frames own no Python object, because at the end of the
//   interpreter Python unwinds such threads without the GIL.
// * The core destroys arrays in any thread, also in threads that must not wait
//   for the GIL. So keep_alive() does not release its Python object at once: it
//   puts the object on a list, and the next thread that holds the GIL releases
//   it.
// * The core calls `allocate` (py_memory.h) in any thread, with no lock held.
//   The call takes the GIL, unless the interpreter is about to end.

#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "interrupt.h"

namespace torchbeast {

// Returns a new reference to `object`, which any thread may drop without the
// GIL. Call it with the GIL.
std::shared_ptr<void> keep_alive(PyObject* object);

// Releases the objects whose reference of keep_alive() was dropped. Call it
// with the GIL.
void release_dropped();

// Call it in a child process after os.fork(): a thread of the parent may have
// held the lock of the list of dropped references. Leaks what was on the list.
void forget_dropped();

// A signal's Python handler has raised; the Python error is set.
struct Interrupted {};

// The interrupt_check of the main thread: runs Python's signal handlers, so
// that Ctrl-C ends a wait in C++. Throws Interrupted.
void check_signals();

// Remembers the main thread for is_main_thread(). Call it with the GIL, when
// the module is imported, and again in a child process: there the thread that
// has forked is the main thread.
void set_main_thread();
bool is_main_thread();

// Runs work() without the GIL and returns its result. At the end of the
// interpreter this may not return: Python may unwind or block the thread. So a
// caller must own no Python objects.
template <typename Work>
auto without_gil(const Work& work) {
  using Result = std::invoke_result_t<Work>;
  std::exception_ptr error;
  bool interrupted = false;
  std::optional<Result> result;

  // Not null if a signal handler calls, which runs inside another work().
  auto* const interrupt_check_before = interrupt_check;
  PyThreadState* const thread = PyEval_SaveThread();
  if (is_main_thread()) interrupt_check = check_signals;
  try {
    result.emplace(work());
  } catch (const Interrupted&) {
    interrupted = true;
  } catch (...) {
    error = std::current_exception();
  }
  interrupt_check = interrupt_check_before;
  PyEval_RestoreThread(thread);

  release_dropped();
  // A handler may also raise in a check after which work() returned normally.
  if (PyErr_Occurred()) throw pybind11::error_already_set();
  if (interrupted) {  // The main thread, which called `allocate` for this one.
    throw std::runtime_error("a signal has interrupted the main thread");
  }
  if (error) std::rethrow_exception(error);
  return std::move(*result);
}

// The same for a work() that returns nothing.
template <typename Work>
void call_without_gil(const Work& work) {
  without_gil([&work] {
    work();
    return true;
  });
}

}  // namespace torchbeast
