// SPDX-License-Identifier: Apache-2.0
//
// The agent's part of a rollout, made from the agent's first answer: the arrays
// that it returns. All later answers must be alike. Immutable once made. All
// functions are thread-safe.

#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "env_spec.h"
#include "nest.h"

namespace torchbeast {

struct AgentSpec {
  Structure::Ptr outputs;
  std::vector<RowLeaf> leaves;  // Of `outputs`.
  std::vector<size_t> actions;  // For each array of an Action: its leaf.
  // Of an item of the learner queue: ((env_rows, outputs), agent_state)
  Structure::Ptr item;
};

// `answer` is (agent_outputs [1, K, ...], agent_state), as compute() returns
// it. Both functions throw ActorError with what was expected and got.
AgentSpec make_agent_spec(const EnvSpec& env, const Nest& answer);
void check_answer(const EnvSpec& env, const AgentSpec& agent,
                  const Nest& answer);

// Returns the arrays of an Action: views of `answer`. Integers of another type
// than the server expects are converted; these are views of `converted`. Throws
// ActorError for an integer out of range. check_answer has checked `answer`.
std::vector<std::string_view> action_arrays(
    const EnvSpec& env, const AgentSpec& agent, const Nest& answer,
    std::vector<std::string>& converted);

}  // namespace torchbeast
