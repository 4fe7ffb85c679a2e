// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
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

class PoolRun;

struct PoolOptions {
  int64_t unroll_length = 0;  // T, the number of agent steps in a rollout.
  int64_t num_envs = 1;       // K, the number of environments of each stream.
  std::shared_ptr<BatchingQueue> learner_queue;       // batch_dim is 1.
  std::shared_ptr<DynamicBatcher> inference_batcher;  // batch_dim is 1.
  std::vector<std::string> addresses;  // One per stream; see set_addresses.
  // The largest number of streams at a time. 0: as many as `addresses`.
  size_t max_streams = 0;
  Nest initial_agent_state;                 // Of one environment: [.., 1, ...].
  bool named_rows = false;                  // Rows are dicts; otherwise tuples.
  std::vector<std::string> inference_keys;  // Empty: all keys of a row.
  // The values that arrays of integers may have. Arrays that are not listed may
  // have any.
  std::vector<wire::ValueRange> value_ranges;
  // How many values each Discrete choice of an action has, if observations have
  // an action_mask; else empty.
  std::vector<size_t> mask_sizes;
  // The Welcome of the server that the agent was made for. A server that
  // differs from it does not fit. None: the first server to connect decides.
  std::optional<wire::Welcome> welcome;
  // Whether set_addresses may bring servers that nobody knew at the start. If
  // so, a server that does not fit is refused; otherwise it ends the run.
  bool servers_may_change = false;
  std::vector<std::string> info_keys;  // Sent in the Hello, like the next four.
  uint64_t seed = 0;
  std::string run_id;
  std::string version;
  uint64_t first_incarnation = 0;
  // How often one stream may fail in a row without finishing a rollout.
  int max_failures = 5;
  double step_timeout_s = 0;  // For a server to answer; 0: no limit.
  // Wait before a lost stream connects again; doubles up to one second.
  double first_backoff_s = 0.1;
};

// The states of a stream. actor_stream.h shows how they follow each other.
enum class StreamState : uint8_t {
  kUnused,               // Has no address.
  kWaitingToConnect,     // Waits for the end of its back-off.
  kConnecting,           // Waits for the network.
  kGreeting,             // Has sent a Hello; waits for the Welcome.
  kWaitingForEnv,        // Waits for a Step.
  kReceiving,            // A thread writes the row of a Step.
  kWaitingForInference,  // Waits for the agent's outputs.
  kWaitingForRoom,       // Waits for room in the learner queue.
  kMoving,               // A thread moves its rollout to a younger slab.
  kClosing,              // Was given up; waits for the transport's on_closed.
  kStopped,              // run() has ended.
};
std::string_view name(StreamState state);  // "waiting_for_env"

struct AddressStats {
  std::string address;
  int64_t streams = 0;
  int64_t connected = 0;  // Streams that are connected now.
  int64_t steps = 0;      // Agent steps received.
  // Quantiles of the time from sending an Action to receiving its Step, over
  // the whole run, within 10 %.
  double p50_ms = 0;
  double p99_ms = 0;
  double env_s = 0;  // The sum of these times over all streams.
};

// Steps are agent steps: each row but the first of a connection is K steps. At
// any moment received == dequeued + discarded + in_flight.
struct PoolStats {
  int64_t connected = 0;         // Streams that are connected now.
  int64_t connects = 0;          // Connections so far.
  int64_t reconnects = 0;        // Connections but the first of each stream.
  int64_t failures = 0;          // Failures that count towards max_failures.
  int64_t received = 0;          // Steps received from servers.
  int64_t dequeued = 0;          // Steps that the learner queue has handed out.
  int64_t discarded = 0;         // Steps of rollouts cut short or dropped.
  int64_t in_flight = 0;         // Steps in slabs and in the learner queue.
  int64_t waiting_for_room = 0;  // Streams in this state now.
  int64_t slabs_open = 0;        // Learner batches that are being filled.
  double batch_fill = 0;         // Mean number of rows of an inference batch.
  double env_s = 0;  // The sum of AddressStats::env_s, also of addresses that
                     // have left.
  // One entry per stream, up to max_streams:
  std::vector<StreamState> states;
  std::vector<double> waiting_s;  // For its server; 0 if it does not wait.
  std::vector<std::string> stream_addresses;  // Empty: the stream is unused.
  std::vector<AddressStats> addresses;        // In the order of the streams.
};

// Plays in the environments of servers. Opens one stream to each address, asks
// the inference batcher for an action for every observation, sends the actions
// to the servers, and enqueues rollouts for the learner.
//
// A stream carries K environments. Stream i has the environments i*K to
// i*K + K - 1. A rollout has T + 1 rows; its last row is row 0 of the next one
// (the table in core/rollout.py). An item of the learner queue is a whole
// learner batch. It has C columns: the smallest multiple of K that is at least
// the queue's minimum_batch_size.
//     ((env_rows [T+1, C, ...], agent_outputs [T+1, C, ...]), agent_state)
// The inputs of the batcher are (env_rows [1, K, ...], agent_state), and its
// outputs (agent_outputs [1, K, ...], agent_state).
//   env_rows       with named_rows, the dict of all arrays that the server
//                  sends, of which the batcher gets inference_keys only.
//                  Without, the tuple (observation, reward, done, episode_step,
//                  episode_return), where a truncated episode ends with one row
//                  that is `done`.
//   agent_outputs  a dict with the key "action", a tuple or list whose first
//                  entry is the action, or the action itself. Zeros in the
//                  first row of a connection.
//   agent_state    in an item, the state before row 0. It begins as
//                  initial_agent_state.
//
//   run   blocks until stop(), or until the queue or the batcher is closed.
//         Throws the first permanent failure: ServerMismatch; ActorError after
//         max_failures, with the server's message; AsyncError if an inference
//         batch was dropped; std::invalid_argument if a server does not send
//         one of the inference keys. May be called once. Without named_rows,
//         the failure also goes to `fail` of the queue and the batcher, because
//         the main loop of a TorchBeast learner of 2019 only asks for their
//         sizes.
//   stop  ends run() and returns when run() has ended. Any thread may call it,
//         at any time and more than once, except the transport's threads.
//         Blocks, except in a signal handler that interrupts run(): then run()
//         ends after the handler. A signal handler that raises ends the wait.
//   set_addresses
//         replaces the list of addresses, also while run() is going. An address
//         that comes n times gets n streams. Streams whose addresses stay are
//         not disturbed. Streams whose addresses are gone end, and their
//         unfinished rollouts are discarded; other addresses take their places,
//         and with them their environments' numbers, in incarnations of their
//         own. Returns how many of the addresses, the last new ones, got no
//         stream because there are max_streams already. They wait for the
//         stream of an address that leaves, or whose server is refused or
//         cannot be reached. After the end of run() it does nothing.
// Any thread may call the other methods. They do not wait.
//
// If a server is lost but its address is still in the list, its unfinished
// rollouts are discarded, and its streams connect again, without a limit. The
// same holds for a server that does not answer for step_timeout_s. The run ends
// after a permanent failure, or after max_failures failures of one stream in a
// row. If the stream has ever finished a rollout, it may fail four times as
// often (as in core.running.supervise.RestartBudget). With servers_may_change,
// these failures end only the stream, as a permanent failure does, while a
// server at another address is connected and has not failed since its last
// rollout.
//
// With servers_may_change, a permanent failure, such as a wrong certificate,
// ends only its stream once any server has been welcomed, or if the options
// have the Welcome: the stream asks its server again after a long wait. Before
// that it counts as any other failure, because the first server may just be
// connecting.
class ActorPool {
 public:
  // Throws std::invalid_argument.
  ActorPool(PoolOptions options, std::unique_ptr<Transport> transport);
  ~ActorPool();  // Calls stop().
  ActorPool(const ActorPool&) = delete;
  ActorPool& operator=(const ActorPool&) = delete;

  void run();
  void stop();
  size_t set_addresses(const std::vector<std::string>& addresses);
  int64_t count() const;  // Steps received.
  PoolStats stats() const;

  // Returns one line for each failure, loss and reconnect of a stream since the
  // last call. Keeps only the latest ones.
  std::vector<std::string> take_events();

 private:
  const std::shared_ptr<PoolRun> run_;
};

}  // namespace torchbeast
