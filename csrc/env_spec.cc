// SPDX-License-Identifier: Apache-2.0

#include "env_spec.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "errors.h"
#include "rows.h"
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
        num_bytes(array.dtype, {array.shape.begin() + 2, array.shape.end()})};
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
  copy_runs(to, to_width * inner, from, from_width * inner, outer,
            columns * inner);
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
  for (const wire::ArraySpec& array : welcome.step_arrays) {
    spec.has_stacks = spec.has_stacks || array.stack;
  }
  const Child reward = find_child(*layout.structure, "reward");
  spec.reward = layout.arrays[reward.first_leaf];
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

}  // namespace torchbeast
