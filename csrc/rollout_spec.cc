// SPDX-License-Identifier: Apache-2.0

#include "rollout_spec.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "errors.h"
#include "text.h"
#include "transport.h"

namespace torchbeast {
namespace {

// Rows as tuples, in the order of the TorchBeast of 2019.
constexpr std::array<std::string_view, 5> kTupleRows = {
    "observation", "reward", "done", "episode_step", "episode_return"};

// Scalars whose dtype is part of the contract of a rollout (the table in
// core/rollout.py).
struct Scalar {
  std::string_view name;
  DType dtype;
  bool required;
};
constexpr std::array<Scalar, 5> kScalars = {
    Scalar{"reward", DType::kFloat32, true}, Scalar{"done", DType::kBool, true},
    Scalar{"episode_step", DType::kInt32, true},
    Scalar{"episode_return", DType::kFloat32, true},
    Scalar{"truncated", DType::kBool, false}};

// An upper bound for the tags and lengths around one array of a message.
constexpr size_t kArrayHeaderBytes = 16;
// Messages may be longer than Step and Welcome by this: a Failure holds a
// traceback, and another Welcome may hold longer names.
constexpr size_t kTextBytes = size_t{128} << 10;

// Describes a structure from the network, for messages.
std::string printable_text(const Structure& structure) {
  constexpr size_t kMaxBytes = 1000;
  return printable(describe(structure), kMaxBytes);
}

int64_t product(const Shape& shape, size_t from) {
  int64_t result = 1;
  for (size_t i = from; i < shape.size(); ++i) result *= shape[i];
  return result;
}

// A child of a dict, and the index of its first leaf.
struct Child {
  Structure::Ptr structure;
  size_t first_leaf = 0;
};

Child find_child(const Structure& dict, std::string_view key) {
  size_t first_leaf = 0;
  for (size_t i = 0; i < dict.children.size(); ++i) {
    if (dict.keys[i] == key) return {dict.children[i], first_leaf};
    first_leaf += dict.children[i]->num_leaves;
  }
  return {};
}

void check_scalar(const wire::Welcome& welcome, const wire::Layout& layout,
                  const Scalar& scalar) {
  const Child child = find_child(*layout.structure, scalar.name);
  if (!child.structure) {
    if (!scalar.required) return;
    throw ActorError("step_arrays of the Welcome lack '" +
                     std::string(scalar.name) + "'");
  }
  const std::string expected =
      std::string(scalar.name) + " " + describe(scalar.dtype, {});
  std::string got = "a " + printable_text(*child.structure);
  if (child.structure->kind == Structure::Kind::kLeaf) {
    const auto& spec = welcome.step_arrays[layout.arrays[child.first_leaf]];
    if (spec.dtype == scalar.dtype && spec.shape.empty()) return;
    got = wire::describe(spec);
  }
  throw ActorError("the Welcome says " + got + ", expected " + expected);
}

// Appends the leaves of `child`.
void add_leaves(const wire::Welcome& welcome, const wire::Layout& layout,
                const Child& child, std::vector<RowLeaf>& leaves) {
  for (size_t i = 0; i < child.structure->num_leaves; ++i) {
    const size_t source = layout.arrays[child.first_leaf + i];
    const wire::ArraySpec& spec = welcome.step_arrays[source];
    leaves.push_back({spec.dtype, spec.shape, spec.nbytes, source,
                      spec.stack ? spec.frame_nbytes() : 0});
  }
}

// Appends the indexes of the leaves that inference gets, from rows that are a
// dict. Returns their structure.
Structure::Ptr select_inputs(const Structure& rows,
                             const std::vector<std::string>& keys,
                             std::vector<size_t>& leaves) {
  std::map<std::string, Structure::Ptr> children;
  for (const std::string& key : keys) {
    const Child child = find_child(rows, key);
    if (!child.structure) {
      throw std::invalid_argument("inference_keys holds '" + key +
                                  "', but the environment servers send " +
                                  printable_text(rows));
    }
    if (!children.emplace(key, child.structure).second) continue;
    for (size_t i = 0; i < child.structure->num_leaves; ++i) {
      leaves.push_back(child.first_leaf + i);
    }
  }
  std::sort(leaves.begin(), leaves.end());  // The keys of a dict are sorted.
  return Structure::dict(std::move(children));
}

// Repeats the state of one environment for each environment of a stream.
Array tile(const StateLeaf& leaf, const Array& one, int64_t num_envs,
           BufferPool& buffers) {
  Array array = buffers.allocate(leaf.dtype, leaf.with_columns(num_envs));
  for (int64_t k = 0; k < num_envs; ++k) {
    leaf.copy(1, one.data, 1, array.data + k * leaf.inner, num_envs);
  }
  return array;
}

// An upper bound for the size of a Step.
size_t step_bytes(const wire::Welcome& welcome) {
  size_t bytes = 0;
  for (const wire::ArraySpec& array : welcome.step_arrays) {
    if (array.nbytes > kMaxMessageBytes / welcome.num_envs) {
      bytes = kMaxMessageBytes;
      break;
    }
    bytes += array.nbytes * welcome.num_envs;
  }
  if (bytes >= kMaxMessageBytes) {
    throw ActorError("a Step of this Welcome is larger than " +
                     std::to_string(kMaxMessageBytes >> 20) +
                     " MiB; let a stream carry fewer than " +
                     std::to_string(welcome.num_envs) + " environments");
  }
  return bytes + kArrayHeaderBytes * (welcome.step_arrays.size() + 1);
}

void set_rows(const wire::Welcome& welcome, const wire::Layout& layout,
              const SpecOptions& options, EnvSpec& spec) {
  if (!find_child(*layout.structure, "observation").structure) {
    throw ActorError("step_arrays of the Welcome lack 'observation'");
  }
  if (options.named_rows) {
    spec.rows = layout.structure;
    add_leaves(welcome, layout, {layout.structure, 0}, spec.leaves);
    return;
  }
  std::vector<Structure::Ptr> children;
  for (const std::string_view name : kTupleRows) {
    const Child child = find_child(*layout.structure, name);
    add_leaves(welcome, layout, child, spec.leaves);
    children.push_back(child.structure);
  }
  spec.rows = Structure::tuple(std::move(children));
}

void set_state(const SpecOptions& options, BufferPool& buffers, EnvSpec& spec) {
  spec.state_structure = options.initial_agent_state.structure;
  for (const Array& array : options.initial_agent_state.leaves) {
    const StateLeaf leaf{
        array.dtype, array.shape, static_cast<size_t>(array.shape[0]),
        static_cast<size_t>(product(array.shape, 2)) * itemsize(array.dtype)};
    spec.initial_state.push_back(tile(leaf, array, spec.num_envs, buffers));
    spec.state_leaves.push_back(leaf);
  }
}

void set_inputs(const SpecOptions& options, EnvSpec& spec) {
  Structure::Ptr inputs = spec.rows;
  if (options.inference_keys.empty()) {
    spec.inference_leaves.resize(spec.leaves.size());
    std::iota(spec.inference_leaves.begin(), spec.inference_leaves.end(), 0);
  } else {
    inputs = select_inputs(*spec.rows, options.inference_keys,
                           spec.inference_leaves);
  }
  spec.inputs = Structure::tuple({inputs, spec.state_structure});
}

void set_ranges(const wire::Welcome& welcome, const SpecOptions& options,
                EnvSpec& spec) {
  for (size_t i = 0; i < welcome.step_arrays.size(); ++i) {
    const wire::ArraySpec& array = welcome.step_arrays[i];
    for (const wire::ValueRange& range : options.value_ranges) {
      if (range.path != array.path) continue;
      if (array.dtype != DType::kInt64 ||
          array.nbytes != range.low.size() * sizeof(int64_t)) {
        throw ActorError("the Welcome says " + wire::describe(array) +
                         ", expected int64 and " +
                         std::to_string(range.low.size()) + " numbers");
      }
      spec.ranges.emplace(i, range);
    }
  }
}

void set_mask(const wire::Welcome& welcome, const wire::Layout& layout,
              const SpecOptions& options, EnvSpec& spec) {
  if (options.mask_sizes.empty()) return;
  const Child observation = find_child(*layout.structure, "observation");
  Child mask;
  if (observation.structure->kind == Structure::Kind::kDict) {
    mask = find_child(*observation.structure, "action_mask");
  }
  wire::Mask result{{}, options.mask_sizes, {}};
  size_t entries = 0;
  for (size_t i = 0; mask.structure && i < mask.structure->num_leaves; ++i) {
    const size_t leaf = observation.first_leaf + mask.first_leaf + i;
    const wire::ArraySpec& array = welcome.step_arrays[layout.arrays[leaf]];
    if (array.stack) return;  // A Step may hold a part of it only.
    result.arrays.push_back(layout.arrays[leaf]);
    entries += array.nbytes / itemsize(array.dtype);
  }
  if (entries != result.num_entries()) {
    throw ActorError("the Welcome says observation.action_mask has " +
                     std::to_string(entries) + " entries, expected " +
                     std::to_string(result.num_entries()));
  }
  const Child truncated = find_child(*layout.structure, "truncated");
  if (truncated.structure) {
    result.truncated = layout.arrays[truncated.first_leaf];
  }
  spec.mask = std::move(result);
}

// The first difference between two lists of arrays; empty if there is none.
std::string difference(const std::string& what,
                       const std::vector<wire::ArraySpec>& expected,
                       const std::vector<wire::ArraySpec>& got) {
  for (size_t i = 0; i < std::max(expected.size(), got.size()); ++i) {
    if (i < expected.size() && i < got.size() && expected[i] == got[i]) {
      continue;
    }
    return what + " " + std::to_string(i) + " is " +
           (i < got.size() ? wire::describe(got[i]) : "missing") +
           ", expected " +
           (i < expected.size() ? wire::describe(expected[i]) : "none");
  }
  return "";
}

// The first difference between the options of two servers' environments; empty
// if there is none.
std::string difference(const std::map<std::string, std::string>& expected,
                       const std::map<std::string, std::string>& got) {
  auto a = expected.begin();
  auto b = got.begin();
  while (a != expected.end() && b != got.end() && *a == *b) {
    ++a;
    ++b;
  }
  if (a == expected.end() && b == got.end()) return "";
  const bool only_got =
      a == expected.end() || (b != got.end() && b->first < a->first);
  const bool only_expected =
      b == got.end() || (a != expected.end() && a->first < b->first);
  return "option '" + (only_got ? b : a)->first + "' of the environment is " +
         (only_expected ? "missing" : wire::describe_value(b->second)) +
         ", expected " + (only_got ? "none" : wire::describe_value(a->second)) +
         "; start all servers with the same flags";
}

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

Shape RowLeaf::with_rows(int64_t rows, int64_t columns) const {
  Shape result = {rows, columns};
  result.insert(result.end(), shape.begin(), shape.end());
  return result;
}

Shape StateLeaf::with_columns(int64_t columns) const {
  Shape result = shape;
  result[1] = columns;
  return result;
}

void StateLeaf::copy(size_t columns, const char* from, size_t from_width,
                     char* to, size_t to_width) const {
  if (inner == 0) return;
  for (size_t i = 0; i < outer; ++i) {
    std::memcpy(to + i * to_width * inner, from + i * from_width * inner,
                columns * inner);
  }
}

void check_initial_state(const Nest& initial_agent_state) {
  for (size_t i = 0; i < initial_agent_state.leaves.size(); ++i) {
    const Array& leaf = initial_agent_state.leaves[i];
    if (leaf.shape.size() >= 2 && leaf.shape[1] == 1) continue;
    throw std::invalid_argument(
        "initial_agent_state" + leaf_path(*initial_agent_state.structure, i) +
        " is " + leaf.describe() +
        ", expected the state of one environment: size 1 along axis 1");
  }
}

int64_t num_columns(int64_t num_envs, const QueueOptions& queue) {
  // The smallest multiple, unless K is larger than a batch: it may overflow.
  const int64_t columns =
      num_envs > queue.maximum_batch_size
          ? num_envs
          : (queue.minimum_batch_size + num_envs - 1) / num_envs * num_envs;
  if (columns > queue.maximum_batch_size) {
    throw std::invalid_argument(
        "num_envs is " + std::to_string(num_envs) +
        ", and no multiple of it is a batch of " +
        std::to_string(queue.minimum_batch_size) + " to " +
        std::to_string(queue.maximum_batch_size) +
        " rollouts, as the learner queue asks for; choose a " +
        (num_envs > queue.maximum_batch_size
             ? "maximum_batch_size of at least "
             : "minimum_batch_size that is a multiple of ") +
        std::to_string(num_envs));
  }
  return columns;
}

EnvSpec make_env_spec(const std::string& address, const wire::Welcome& welcome,
                      size_t welcome_bytes, const SpecOptions& options,
                      BufferPool& buffers) {
  EnvSpec spec;
  spec.address = address;
  spec.num_envs = welcome.num_envs;
  spec.columns = options.columns;

  wire::Layout layout;
  try {
    layout = wire::layout(welcome.step_arrays);
    spec.actions = wire::layout(welcome.action_arrays);
  } catch (const wire::DecodeError& error) {
    throw ActorError("the arrays of the Welcome do not nest: " +
                     std::string(error.what()));
  }
  if (layout.structure->kind != Structure::Kind::kDict) {
    throw ActorError("step_arrays of the Welcome are " +
                     printable_text(*layout.structure) +
                     ", expected paths that begin with a name");
  }
  for (const Scalar& scalar : kScalars) check_scalar(welcome, layout, scalar);
  spec.max_message_bytes =
      std::min(kMaxMessageBytes,
               std::max(step_bytes(welcome), welcome_bytes) + kTextBytes);
  for (size_t i = 0; i < welcome.step_arrays.size(); ++i) {
    const wire::ArraySpec& array = welcome.step_arrays[i];
    spec.has_stacks = spec.has_stacks || array.stack;
    if (wire::path_name(array) == "reward") spec.reward = i;
  }
  set_rows(welcome, layout, options, spec);
  set_state(options, buffers, spec);
  set_inputs(options, spec);
  set_ranges(welcome, options, spec);
  set_mask(welcome, layout, options, spec);
  spec.welcome = welcome;
  return spec;
}

void check_values(const EnvSpec& spec, const Segments& message,
                  const wire::Step& step) {
  const auto& arrays = spec.welcome.step_arrays;
  wire::check_finite(message, step.arrays[spec.reward], arrays[spec.reward]);
  for (const auto& [i, range] : spec.ranges) {
    wire::check_range(message, step.arrays[i], arrays[i], range, spec.num_envs);
  }
  if (spec.mask) {
    wire::check_mask(message, step, arrays, *spec.mask, spec.num_envs);
  }
}

void check_same(const EnvSpec& spec, const wire::Welcome& welcome) {
  const wire::Welcome& first = spec.welcome;
  std::string text;
  if (welcome.env != first.env) {
    text = "env is '" + printable(welcome.env, 100) + "', expected '" +
           printable(first.env, 100) + "'";
  } else {
    text = difference("step array", first.step_arrays, welcome.step_arrays);
  }
  if (text.empty()) {
    text =
        difference("action array", first.action_arrays, welcome.action_arrays);
  }
  if (text.empty()) text = difference(first.options, welcome.options);
  if (text.empty() && welcome.frames_per_step != first.frames_per_step) {
    text = "frames_per_step is " + std::to_string(welcome.frames_per_step) +
           ", expected " + std::to_string(first.frames_per_step);
  }
  if (text.empty() && welcome.observation != first.observation) {
    text = "its observation space has other bounds or another number of values";
  }
  if (text.empty() && welcome.action != first.action) {
    text = "its action space has other bounds or another number of values";
  }
  if (text.empty()) return;
  throw ActorError("this server differs from " + spec.address + ": " + text);
}

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
    if (got.dtype == leaf.dtype && got.shape.size() == leaf.shape.size() + 2 &&
        got.shape[0] == 1 && got.shape[1] == env.num_envs &&
        std::equal(leaf.shape.begin(), leaf.shape.end(),
                   got.shape.begin() + 2)) {
      continue;
    }
    throw ActorError("The agent's output" + leaf_path(outputs, i) + " is " +
                     got.describe() + " for one stream, expected " +
                     describe(leaf.dtype, leaf.with_rows(1, env.num_envs)) +
                     " as the first time");
  }
}

}  // namespace torchbeast
