// SPDX-License-Identifier: Apache-2.0
//
// All servers of a run must play the same environment, because a learner batch
// has rows of all of them. Thread-safe.

#pragma once

#include "env_spec.h"
#include "wire.h"

namespace torchbeast {

// Throws ActorError, naming the difference, if the server of `welcome` differs
// from the first one in environment, arrays or spaces.
void check_same(const EnvSpec& spec, const wire::Welcome& welcome);

}  // namespace torchbeast
