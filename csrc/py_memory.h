// SPDX-License-Identifier: Apache-2.0
//
// Lets a Python callable allocate the memory of batches, for example
// page-locked memory.

#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "buffer_pool.h"

namespace torchbeast {

// Returns a pool that allocates by calling `allocate(nbytes)`; from the heap if
// `allocate` is None. Needs the GIL.
std::shared_ptr<BufferPool> make_pool(const pybind11::object& allocate);

// From now on the pools throw instead of calling `allocate`. Waits for running
// calls, which need the GIL, so call it without the GIL. Ctrl-C ends the wait.
void end_allocations();

}  // namespace torchbeast
