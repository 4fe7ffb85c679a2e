// SPDX-License-Identifier: Apache-2.0
//
// The spaces of a Welcome. Python, which reads the first server's Welcome,
// checks its spaces. Here they are only compared.

#pragma once

#include <cstddef>
#include <string>

#include "wire_format.h"

namespace torchbeast::wire {

// Returns a Space of a message in an encoding that is the same for the same
// space: packed or not, with one bound or one for each element, and in any
// order of a Dict's entries. `depth` is 0 for the outermost space. Throws
// DecodeError.
std::string decode_space(const Segments& message, Piece body, size_t depth);

}  // namespace torchbeast::wire
