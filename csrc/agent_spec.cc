// SPDX-License-Identifier: Apache-2.0

#include "agent_spec.h"

#include <cstring>
#include <utility>

#include "errors.h"

namespace torchbeast {
namespace {

// Checks that the answer is (outputs, state), and checks the state. Returns the
// structure of the outputs.
const Structure& outputs_of(const EnvSpec& env, const Nest& answer) {
  const Structure& top = *answer.structure;
  if ((top.kind != Structure::Kind::kTuple &&
       top.kind != Structure::Kind::kList) ||
      top.children.size() != 2) {
    throw ActorError("The inference answered with " + describe(top) +
                     ", expected a tuple of two: (agent outputs, agent state)");
  }
  const Structure& state = *top.children[1];
  if (state.num_leaves != env.state_leaves.size()) {
    throw ActorError(
        "The inference answered with an agent state of " +
        std::to_string(state.num_leaves) + " arrays " + describe(state) +
        ", expected " + std::to_string(env.state_leaves.size()) +
        " as in the initial state " + describe(*env.state_structure));
  }
  for (size_t i = 0; i < env.state_leaves.size(); ++i) {
    const StateLeaf& leaf = env.state_leaves[i];
    const Array& got = answer.leaves[top.children[0]->num_leaves + i];
    const Shape expected = leaf.with_columns(env.num_envs);
    if (got.dtype == leaf.dtype && got.shape == expected) continue;
    throw ActorError("The inference answered with agent state" +
                     leaf_path(state, i) + " " + got.describe() +
                     " for one stream, expected " +
                     describe(leaf.dtype, expected));
  }
  return *top.children[0];
}

// The index of the action's first leaf in the outputs, and its structure.
std::pair<size_t, Structure::Ptr> action_of(const Structure::Ptr& outputs) {
  switch (outputs->kind) {
    case Structure::Kind::kLeaf:
      return {0, outputs};
    case Structure::Kind::kDict: {
      const Child child = find_child(*outputs, "action");
      if (child.structure) return {child.first_leaf, child.structure};
      break;
    }
    default:
      if (!outputs->children.empty()) return {0, outputs->children[0]};
  }
  throw ActorError("The agent's outputs " + describe(*outputs) +
                   " hold no action; expected a dict with the key 'action', "
                   "or a tuple that begins with the action");
}

// If `dtype` is an integer type, calls `fn` with a zero of this type. Returns
// whether it is one.
template <typename Fn>
bool with_integer(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kUInt8:
      return fn(uint8_t{}), true;
    case DType::kInt8:
      return fn(int8_t{}), true;
    case DType::kUInt16:
      return fn(uint16_t{}), true;
    case DType::kInt16:
      return fn(int16_t{}), true;
    case DType::kUInt32:
      return fn(uint32_t{}), true;
    case DType::kInt32:
      return fn(int32_t{}), true;
    case DType::kUInt64:
      return fn(uint64_t{}), true;
    case DType::kInt64:
      return fn(int64_t{}), true;
    default:
      return false;
  }
}

bool is_integer(DType dtype) {
  return with_integer(dtype, [](auto) {});
}

// Returns the elements of `array`, which are integers, as `dtype`.
std::string converted_to(DType dtype, const Array& array) {
  std::string bytes(array.num_elements() * itemsize(dtype), '\0');
  with_integer(array.dtype, [&](auto from) {
    with_integer(dtype, [&](auto to) {
      for (int64_t i = 0; i < array.num_elements(); ++i) {
        std::memcpy(&from, array.data + i * sizeof(from), sizeof(from));
        if (!std::in_range<decltype(to)>(from)) {
          throw ActorError("The agent's action " + std::to_string(from) +
                           " is out of the range of " +
                           std::string(name(dtype)) +
                           ", which the environment expects");
        }
        to = static_cast<decltype(to)>(from);
        std::memcpy(bytes.data() + i * sizeof(to), &to, sizeof(to));
      }
    });
  });
  return bytes;
}

std::string describe_actions(const EnvSpec& env) {
  std::string text;
  for (const size_t array : env.actions.arrays) {
    const wire::ArraySpec& spec = env.welcome.action_arrays[array];
    text += (text.empty() ? "" : ", ") + wire::describe(spec);
  }
  return text;
}

}  // namespace

AgentSpec make_agent_spec(const EnvSpec& env, const Nest& answer) {
  outputs_of(env, answer);
  AgentSpec agent;
  agent.outputs = answer.structure->children[0];
  for (size_t i = 0; i < agent.outputs->num_leaves; ++i) {
    const Array& array = answer.leaves[i];
    if (array.shape.size() < 2 || array.shape[0] != 1) {
      throw ActorError("The agent's output" + leaf_path(*agent.outputs, i) +
                       " is " + array.describe() +
                       ", expected [1, batch size, ...]");
    }
    const Shape shape(array.shape.begin() + 2, array.shape.end());
    agent.leaves.push_back(
        {array.dtype, shape, num_bytes(array.dtype, shape), 0, 0});
  }

  const auto [first, action] = action_of(agent.outputs);
  bool fits = action->num_leaves == env.actions.arrays.size();
  std::string got;
  for (size_t i = 0; i < action->num_leaves; ++i) {
    const RowLeaf& leaf = agent.leaves[first + i];
    got += (i > 0 ? ", " : "") + describe(leaf.dtype, leaf.shape);
    if (!fits) continue;
    const auto& spec = env.welcome.action_arrays[env.actions.arrays[i]];
    fits = leaf.nbytes / itemsize(leaf.dtype) ==
               spec.nbytes / itemsize(spec.dtype) &&
           (leaf.dtype == spec.dtype ||
            (is_integer(leaf.dtype) && is_integer(spec.dtype)));
  }
  if (!fits) {
    throw ActorError("The agent's action is " + got +
                     " for each environment, but " + env.address + " expects " +
                     describe_actions(env));
  }
  agent.actions.resize(env.actions.arrays.size());
  for (size_t i = 0; i < env.actions.arrays.size(); ++i) {
    agent.actions[env.actions.arrays[i]] = first + i;
  }
  agent.item = Structure::tuple(
      {Structure::tuple({env.rows, agent.outputs}), env.state_structure});
  return agent;
}

void check_answer(const EnvSpec& env, const AgentSpec& agent,
                  const Nest& answer) {
  const Structure& outputs = outputs_of(env, answer);
  if (&outputs != agent.outputs.get() && !equal(outputs, *agent.outputs)) {
    throw ActorError("The agent's outputs are " + describe(outputs) +
                     ", expected " + describe(*agent.outputs) +
                     " as the first time");
  }
  for (size_t i = 0; i < agent.leaves.size(); ++i) {
    const RowLeaf& leaf = agent.leaves[i];
    const Array& got = answer.leaves[i];
    const Shape expected = leaf.with_rows(1, env.num_envs);
    if (got.dtype == leaf.dtype && got.shape == expected) continue;
    throw ActorError("The agent's output" + leaf_path(outputs, i) + " is " +
                     got.describe() + " for one stream, expected " +
                     describe(leaf.dtype, expected) + " as the first time");
  }
}

std::vector<std::string_view> action_arrays(
    const EnvSpec& env, const AgentSpec& agent, const Nest& answer,
    std::vector<std::string>& converted) {
  converted.resize(agent.actions.size());
  std::vector<std::string_view> arrays;
  arrays.reserve(agent.actions.size());
  for (size_t i = 0; i < agent.actions.size(); ++i) {
    const Array& array = answer.leaves[agent.actions[i]];
    const DType expected = env.welcome.action_arrays[i].dtype;
    if (array.dtype == expected) {
      arrays.emplace_back(array.data, array.nbytes());
    } else {
      arrays.emplace_back(converted[i] = converted_to(expected, array));
    }
  }
  return arrays;
}

}  // namespace torchbeast
