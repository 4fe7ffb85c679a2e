// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "batching_queue.h"
#include "dynamic_batcher.h"
#include "errors.h"
#include "nest.h"
#include "transport.h"
#include "wire.h"

namespace torchbeast {

struct PoolOptions {
  int64_t unroll_length = 0;  // T, the agent steps of a rollout.
  std::shared_ptr<BatchingQueue> learner_queue;       // batch_dim is 1.
  std::shared_ptr<DynamicBatcher> inference_batcher;  // batch_dim is 1.
  std::vector<std::string> addresses;                 // One for each stream.
  Nest initial_agent_state;  // Of one environment: [.., 1, ...].
  bool named_rows = false;
  std::vector<std::string> inference_keys;  // Empty: all.
  // Of integers that a Step may hold; of its other arrays anything goes.
  std::vector<wire::ValueRange> value_ranges;
  std::vector<std::string> info_keys;  // For Hello, like the next three.
  uint64_t seed = 0;
  std::string run_id;
  std::string version;
  uint64_t first_incarnation = 0;
  int max_failures = 5;       // In a row, on one stream, without a rollout.
  double step_timeout_s = 0;  // For a server to answer; 0: for ever.
  // Before a stream that was lost connects again; doubles up to a second.
  double first_backoff_s = 0.1;
};

// What a stream is doing.
enum class StreamState : uint8_t {
  kWaitingToConnect,     // For its time to try (again).
  kConnecting,           // For the network.
  kGreeting,             // Hello was sent; for Welcome.
  kWaitingForEnv,        // For a Step.
  kReceiving,            // A Step is being written to its rollout.
  kWaitingForInference,  // For the agent's outputs.
  kWaitingForRoom,       // For room in the learner queue, to begin a rollout.
  kMoving,               // Its rollout is being moved to a younger slab.
  kClosing,              // Given up; for the transport to say that it ended.
  kStopped,
};
std::string_view name(StreamState state);  // "waiting_for_env"

struct AddressStats {
  std::string address;
  int64_t streams = 0;
  int64_t connected = 0;  // Streams, now.
  int64_t steps = 0;      // Agent steps received.
  // From an Action sent to its Step received, over the whole run; within 10 %.
  double p50_ms = 0;
  double p99_ms = 0;
  double env_s = 0;  // The sum of these times, over all streams.
};

// Steps are agent steps: rows after the first one of a stream, times K. They
// are accounted for at any moment:
//   received == dequeued + discarded + in_flight
struct PoolStats {
  int64_t connected = 0;         // Streams that have been welcomed, now.
  int64_t connects = 0;          // Welcomes, ever.
  int64_t reconnects = 0;        // Those that were not a stream's first.
  int64_t failures = 0;          // That count towards max_failures, ever.
  int64_t received = 0;          // Steps.
  int64_t dequeued = 0;          // Steps that the learner queue has handed out.
  int64_t discarded = 0;         // Steps of rollouts cut short or dropped.
  int64_t in_flight = 0;         // Steps in slabs and in the learner queue.
  int64_t waiting_for_room = 0;  // Streams.
  int64_t slabs_open = 0;        // Learner batches being filled.
  double batch_fill = 0;         // Mean size of an inference batch, ever.
  std::vector<StreamState> states;      // By stream.
  std::vector<double> waiting_s;        // By stream: for its server, else 0.
  std::vector<AddressStats> addresses;  // In the order of first appearance.
};

// Plays: opens a stream to each address, sends every observation through the
// inference batcher, the actions back, and rollouts to the learner queue.
//
// A stream carries K environments, as its server says; stream i those numbered
// i*K to i*K + K - 1. Its rollouts have T + 1 rows; the last one is row 0 of
// the next (core/rollouts.py has the table). An item of the learner queue is a
// whole learner batch of C columns, C the smallest multiple of K that is at
// least its minimum_batch_size:
//     ((env_rows [T+1, C, ...], agent_outputs [T+1, C, ...]), agent_state)
// and the batcher is asked (env_rows [1, K, ...], agent_state) and answers
// (agent_outputs [1, K, ...], agent_state). env_rows is the tuple (observation,
// reward, done, episode_step, episode_return), where a truncated episode ends
// in one row that is done; or, with named_rows, the dict of all that the server
// sends; of these the batcher gets inference_keys only.
// agent_outputs is a dict with the key "action", or a tuple or list whose first
// entry is the action, or the action itself. Before the first action of a
// stream, outputs are zero and the state is the initial one; agent_state of a
// rollout is the state before its row 0.
//
//   run    blocks, until stop(), or until the queue or the batcher is closed.
//          Throws the first permanent failure: ServerMismatch, or ActorError
//          after max_failures, with the server's own words; AsyncError if an
//          inference batch was dropped,
//          std::invalid_argument if K does not fit the queue. May be called
//          once. Without named_rows the failure ends the queue and the batcher
//          too (fail): the main loop of TorchBeast's learners looks at nothing
//          but their sizes, and would wait for ever.
//   stop   ends run() and returns when it has ended. From any thread but the
//          transport's, at any time, again and again. Blocks.
// The other methods may be called by any thread and do not wait.
//
// A server that goes away costs the rollouts under way; its streams return to
// it for ever. So they do to one that does not answer for step_timeout_s, which
// the network cannot tell from one that thinks. max_failures failures in a row,
// or a permanent one, end the run; four times as many where a rollout was ever
// finished: then it can work, and bad luck is likelier (as in
// core.supervise.RestartBudget).
class ActorPool {
 public:
  // Throws std::invalid_argument.
  ActorPool(PoolOptions options, std::unique_ptr<Transport> transport);
  ~ActorPool();  // Calls stop().
  ActorPool(const ActorPool&) = delete;
  ActorPool& operator=(const ActorPool&) = delete;

  void run();
  void stop();
  int64_t count() const;  // Steps received.
  PoolStats stats() const;

  // One line for each failure, loss and return of a stream since the last call.
  // The oldest are lost when nobody asks.
  std::vector<std::string> take_events();

 private:
  class Impl;
  const std::shared_ptr<Impl> impl_;
};

}  // namespace torchbeast
