// SPDX-License-Identifier: Apache-2.0

#include "py_gil.h"

#include <mutex>
#include <vector>

namespace py = pybind11;

namespace torchbeast {
namespace {

// Python objects to release. Thread-safe.
//   add      adds an object, in any thread.
//   release  releases all of them. Needs the GIL.
class DroppedObjects {
 public:
  void add(PyObject* object) {
    std::lock_guard lock(mu_);
    objects_.push_back(object);
  }

  void release() {
    std::vector<PyObject*> objects;
    {
      std::lock_guard lock(mu_);
      objects.swap(objects_);
    }
    for (PyObject* object : objects) Py_DECREF(object);
  }

 private:
  std::mutex mu_;
  std::vector<PyObject*> objects_;  // Guarded by mu_.
};

// Never destroyed: threads of the core may outlive main().
auto* dropped_objects = new DroppedObjects();

unsigned long main_thread =
    0;  // NOLINT: the type of PyThread_get_thread_ident.

}  // namespace

std::shared_ptr<void> keep_alive(PyObject* object) {
  return std::shared_ptr<void>(Py_NewRef(object), [](void* kept) {
    dropped_objects->add(static_cast<PyObject*>(kept));
  });
}

void release_dropped() { dropped_objects->release(); }

void forget_dropped() { dropped_objects = new DroppedObjects(); }

void check_signals() {
  const PyGILState_STATE state = PyGILState_Ensure();
  // No handler may run while an error is set: a handler has raised before, and
  // the wait is about to end.
  const bool raised = !PyErr_Occurred() && PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  if (raised) throw Interrupted();
}

void set_main_thread() {
  main_thread = py::cast<unsigned long>(  // NOLINT: the type above.
      py::module_::import("threading").attr("main_thread")().attr("ident"));
}

bool is_main_thread() { return PyThread_get_thread_ident() == main_thread; }

}  // namespace torchbeast
