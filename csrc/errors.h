// SPDX-License-Identifier: Apache-2.0
//
// What the core throws besides std::invalid_argument (an argument is wrong) and
// std::runtime_error (a call came in the wrong order).

#pragma once

#include <stdexcept>

namespace torchbeast {

// A queue or a batcher was closed, before the call or while it waited.
struct QueueClosed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A batch was dropped by whoever had to answer it.
struct AsyncError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An environment server failed, too often in a row.
struct ActorError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A server and this learner do not fit: trying again will not help.
struct ServerMismatch : ActorError {
  using ActorError::ActorError;
};

// A server is not there, or busy; it may be back soon.
struct ServerUnavailable : ActorError {
  using ActorError::ActorError;
};

}  // namespace torchbeast
