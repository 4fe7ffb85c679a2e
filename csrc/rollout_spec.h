// SPDX-License-Identifier: Apache-2.0
//
// What rollouts are made of: the arrays that the environments send, and those
// that the agent answers with. Pure functions; what they make is immutable.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "array.h"
#include "buffer_pool.h"
#include "nest.h"
#include "wire.h"

namespace torchbeast {

// A leaf of a rollout: [T+1, C, *shape].
struct RowLeaf {
  DType dtype = DType::kUInt8;
  Shape shape;
  size_t nbytes = 0;        // Of one environment's row.
  size_t source = 0;        // Env rows: which array of a Step it is.
  size_t frame_nbytes = 0;  // Of a stack of frames; else 0.
};

// A leaf of the agent's state: [outer, columns, *inner].
struct StateLeaf {
  DType dtype = DType::kUInt8;
  Shape shape;  // Of one environment: columns is 1.
  size_t outer = 0;
  size_t inner = 0;  // Bytes.

  Shape with_columns(int64_t columns) const;
  // Copies `columns` columns between arrays that have more of them; `from` and
  // `to` point to the first column.
  void copy(size_t columns, const char* from, size_t from_width, char* to,
            size_t to_width) const;
};

// Follows from the first Welcome.
struct EnvSpec {
  std::string address;  // Where it came from.
  wire::Welcome welcome;
  int64_t num_envs = 0;     // K, of each stream.
  int64_t columns = 0;      // C, of a learner batch: a multiple of K.
  bool has_stacks = false;  // So Steps may have only the newest frames.
  // No message of a server that fits is larger.
  size_t max_message_bytes = 0;
  Structure::Ptr rows;
  std::vector<RowLeaf> leaves;           // Of `rows`.
  std::vector<size_t> inference_leaves;  // Which of `leaves` inference gets.
  wire::Layout actions;                  // How the arrays of an Action nest.
  Structure::Ptr state_structure;
  std::vector<StateLeaf> state_leaves;
  std::vector<Array> initial_state;  // For K environments.
  // Of the arrays of a Step, by their place in the Welcome.
  std::map<size_t, wire::ValueRange> ranges;
  size_t reward = 0;
  Structure::Ptr inputs;  // Of the inference: (rows, state)
};

struct SpecOptions {
  Nest initial_agent_state;  // Of one environment: [.., 1, ...].
  bool named_rows = false;
  std::vector<std::string> inference_keys;  // With named rows; empty: all.
  std::vector<wire::ValueRange> value_ranges;
  int64_t minimum_batch_size = 1;  // Of the learner queue; so the next.
  int64_t maximum_batch_size = 1;
};

// Throws std::invalid_argument unless every leaf is [.., 1, ...].
void check_initial_state(const Nest& initial_agent_state);

// `welcome_bytes` is the size of the message that held the Welcome. Throws
// ActorError if the server does not send what a rollout needs,
// std::invalid_argument if its number of environments does not fit, or it lacks
// one of the inference keys.
EnvSpec make_env_spec(const std::string& address, wire::Welcome welcome,
                      size_t welcome_bytes, const SpecOptions& options,
                      BufferPool& buffers);

// Throws DecodeError unless the values of a Step are within `ranges`, and its
// rewards finite. A value that no network can take must not get to one.
void check_values(const EnvSpec& spec, const Segments& message,
                  const wire::Step& step);

// Throws ActorError, naming the difference, unless `welcome` promises the same.
void check_same(const EnvSpec& spec, const wire::Welcome& welcome);

// Follows from the first answer of the agent.
struct AgentSpec {
  Structure::Ptr outputs;
  std::vector<RowLeaf> leaves;  // Of `outputs`.
  std::vector<size_t> actions;  // By array of an Action: which leaf it is.
  Structure::Ptr item;          // ((env_rows, outputs), agent_state)
};

// The arrays of an Action, as the servers expect them. Views of `answer`, and
// of `converted`: integers of another type than the server's are converted.
// Throws ActorError for one that does not fit. `answer` has been checked.
std::vector<std::string_view> action_arrays(
    const EnvSpec& env, const AgentSpec& agent, const Nest& answer,
    std::vector<std::string>& converted);

// `answer` is (agent_outputs [1, K, ...], agent_state), as compute() returns
// it. Both throw ActorError, naming what was expected and got.
AgentSpec make_agent_spec(const EnvSpec& env, const Nest& answer);
void check_answer(const EnvSpec& env, const AgentSpec& agent,
                  const Nest& answer);

}  // namespace torchbeast
