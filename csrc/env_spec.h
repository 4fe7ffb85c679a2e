// SPDX-License-Identifier: Apache-2.0
//
// The environments' part of a rollout, made from PoolOptions::welcome or the
// first Welcome: the arrays that servers send. Immutable once made. All
// functions are thread-safe. To add a field to a row that C++ must know, begin
// here.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "array.h"
#include "buffer_pool.h"
#include "nest.h"
#include "row_queue.h"
#include "wire.h"

namespace torchbeast {

// A leaf of a rollout, an array [T + 1, C, *shape] of a learner batch.
struct RowLeaf {
  DType dtype = DType::kUInt8;
  Shape shape;
  size_t nbytes = 0;        // The row of one environment.
  size_t source = 0;        // Index of its array in a Step. Not for outputs.
  size_t frame_nbytes = 0;  // One frame, if the leaf is a stack; else 0.

  Shape with_rows(int64_t rows, int64_t columns) const;  // [rows, columns, ...]
};

// A leaf of the agent's state, an array [outer, columns, ...] with one column
// for each environment.
struct StateLeaf {
  DType dtype = DType::kUInt8;
  Shape shape;       // For one environment: shape[1] is 1.
  size_t outer = 0;  // shape[0]
  size_t inner = 0;  // Bytes of one column.

  Shape with_columns(int64_t columns) const;
  // Copies `columns` columns. `from` and `to` point to the first of them, in
  // arrays that have `from_width` and `to_width` columns.
  void copy(size_t columns, const char* from, size_t from_width, char* to,
            size_t to_width) const;
};

struct EnvSpec {
  std::string address;  // Of the server that sent the Welcome; for messages.
  wire::Welcome welcome;
  int64_t num_envs = 0;     // K, of each stream.
  int64_t columns = 0;      // C, of a learner batch: a multiple of K.
  bool has_stacks = false;  // If so, a Step may hold only the newest frames.
  // An upper bound for all messages of a server.
  size_t max_message_bytes = 0;
  Structure::Ptr rows;
  std::vector<RowLeaf> leaves;           // Of `rows`.
  std::vector<size_t> inference_leaves;  // The `leaves` that inference gets.
  wire::Layout actions;                  // How the arrays of an Action nest.
  Structure::Ptr state_structure;
  std::vector<StateLeaf> state_leaves;
  std::vector<Array> initial_state;  // For K environments.
  // By index of the array in the Welcome.
  std::map<size_t, wire::ValueRange> ranges;
  size_t reward = 0;  // Index of the array `reward` in the Welcome.
  std::optional<wire::Mask> mask;  // None: masks are not checked.
  Structure::Ptr inputs;           // Of inference: (rows, state)
};

struct SpecOptions {
  Nest initial_agent_state;  // Of one environment: [.., 1, ...].
  bool named_rows = false;
  std::vector<std::string> inference_keys;  // With named rows; empty: all.
  std::vector<wire::ValueRange> value_ranges;
  std::vector<size_t> mask_sizes;  // See wire::Mask.
  int64_t columns = 1;             // C, of a learner batch: a multiple of K.
};

// The smallest multiple of K that is a batch of the learner queue. Throws
// std::invalid_argument if there is none.
int64_t num_columns(int64_t num_envs, const QueueOptions& queue);

// `welcome` has K environments, and K is not 0; the caller has checked this.
// `welcome_bytes` is the size of the message that held the Welcome. Throws
// ActorError if the server does not send the arrays that a rollout needs;
// std::invalid_argument if it does not send one of the inference keys.
EnvSpec make_env_spec(const std::string& address, const wire::Welcome& welcome,
                      size_t welcome_bytes, const SpecOptions& options,
                      BufferPool& buffers);

// Throws DecodeError unless the values of a Step are within `ranges`, its
// rewards are finite, and its masks allow at least one value of each choice.
// Other values would make the model or the learner fail, or be an action that
// the environment does not allow.
void check_values(const EnvSpec& spec, const Segments& message,
                  const wire::Step& step);

}  // namespace torchbeast
