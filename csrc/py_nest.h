// SPDX-License-Identifier: Apache-2.0
//
// Converts arrays and nests between Python and the core. A torch tensor or
// numpy array and its Array share their memory. All functions need the GIL.

#pragma once

#include <pybind11/pybind11.h>

#include "array.h"
#include "nest.h"

namespace torchbeast {

// Converts a tensor on the CPU or an ndarray. Copies it if it is not
// contiguous, or if it is a read-only ndarray. Throws py::type_error or
// std::invalid_argument.
Array to_array(pybind11::handle object);
Nest to_nest(pybind11::handle object);

bool is_tensor(pybind11::handle object);

// Returns a tensor, or an ndarray if torch is not installed, that shares the
// memory of `array`.
pybind11::object to_python(const Array& array);
pybind11::object to_python(const Nest& nest);

}  // namespace torchbeast
