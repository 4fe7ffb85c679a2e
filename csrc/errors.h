// SPDX-License-Identifier: Apache-2.0
//
// The exceptions of the core. Besides these it throws std::invalid_argument (an
// argument is wrong) and std::runtime_error (a call came in the wrong order).

#pragma once

#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace torchbeast {

// There is no memory for an array.
struct OutOfMemory : std::bad_alloc {
  explicit OutOfMemory(std::string message) : text(std::move(message)) {}
  const char* what() const noexcept override { return text.c_str(); }

  std::string text;
};

// A queue or a batcher was closed before the call, or while the call waited.
struct QueueClosed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A batch was dropped without outputs, so its callers get no answer.
struct AsyncError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An environment server failed too often in a row.
struct ActorError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A server does not fit this learner. To connect again will not help.
struct ServerMismatch : ActorError {
  using ActorError::ActorError;
};

// A server cannot be reached, or is busy. It may answer soon.
struct ServerUnavailable : ActorError {
  using ActorError::ActorError;
};

}  // namespace torchbeast
