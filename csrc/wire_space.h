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
// order of a Dict's entries. Fields that no space has are skipped. Adds the
// number of fields to `values`, so that a small message cannot make a large
// encoding. Throws DecodeError, also if `values` exceeds kMaxValues.
std::string decode_space(const Segments& message, Piece body, size_t& values);

}  // namespace torchbeast::wire
