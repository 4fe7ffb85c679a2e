// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "actor_pool.h"
#include "array.h"
#include "clock.h"
#include "dynamic_batcher.h"
#include "histogram.h"
#include "slabs.h"
#include "transport.h"
#include "wire.h"

namespace torchbeast {

class PoolRun;

// One of the max_streams streams of an ActorPool: a state machine. Its states
// are:
//
//   kUnused <-> kWaitingToConnect, as set_addresses() gives and takes addresses
//
//   kWaitingToConnect <-------------------------------------+
//     | the back-off is over, and it has an address:        |
//     | connect()                                           |
//     v                                                     |
//   kConnecting                                             |
//     | on_connected; the Hello is sent                     |
//     v                                                     |
//   kGreeting                                     on_closed |
//     | a Welcome                                           |
//     v                                                     |
//   kWaitingForEnv <----------------------------+        kClosing
//     | a Step                                  |           ^
//     v                                         |           | failure, or
//   kReceiving: the row is written              |           | end of stream
//     |     |                                   |           |
//     |     | it ends a rollout, and the        |       any state
//     |     v learner queue is full             |
//     |   kWaitingForRoom                       |
//     |     | room                              |
//     v     v                                   |
//   kWaitingForInference                        |
//     | the agent's outputs; an Action is sent  |
//     +-----------------------------------------+
//
//   kWaitingForEnv -> kMoving: the stream's rollout moves to another slab; then
//       back, or to kReceiving if a Step has arrived meanwhile.
//   kStopped: run() has ended.
//
// PoolRun::set_addresses() sets `wanted_`. `server_` follows when there is no
// connection: at once in kUnused and kWaitingToConnect, otherwise on_closed.
//
// Threads. The transport's threads call the events. The thread in run()
// connects streams and resumes those that waited. The threads that answer the
// inference batcher call on_answer. None of them waits for another.
//
// Locks. PoolRun::mu_ guards all members that are not const and not marked
// "Owned"; methods that end in _locked need it. In the states kReceiving,
// kWaitingForInference and kMoving one thread owns the stream: the thread that
// changed the state, and after kWaitingForInference the one that answers. The
// owner uses the bytes of the rollout's lane and the members marked "Owned"
// without the lock. An event that ends the stream meanwhile only sets `closing`
// and `closed`; the owner finds these in finish_if_ended_locked(). So no lane
// is given to another rollout while a thread writes it or inference may read
// it.
class ActorStream final : public StreamEvents {
 public:
  using Lock = std::unique_lock<std::mutex>;

  ActorStream(PoolRun& run, size_t index) : run_(run), index_(index) {}

  // Called by the transport.
  void on_connected() override;
  void on_message(Segments message) override;
  void on_closed(const std::string& why, bool transient) override;

 private:
  friend class PoolRun;  // Both are guarded by PoolRun::mu_.

  // All that belongs to one connection. connect() makes a new Life, so nothing
  // of a lost connection can reach the next one.
  struct Life {
    std::shared_ptr<Stream> stream = nullptr;
    bool started = false;   // connect() has called Stream::start.
    bool welcomed = false;  // A Welcome has come, and the stream has not ended.
    bool closing = false;  // The pool has given the stream up. Ignore messages.
    bool closed = false;   // on_closed has come.
    bool refused = false;  // Its server does not fit: connect again much later.
    Clock::time_point asked_at = {};  // When it began to wait for its server.

    Rollout rollout = {};  // Written by the owner with the lock held.

    // A Step that waits for room in the learner queue or for the end of a move.
    std::optional<Segments> held = std::nullopt;

    uint64_t next_seq = 0;  // Written by the owner with the lock held.

    wire::Step step = {};                 // Owned. The present Step.
    std::vector<Array> outputs = {};      // Owned. Of the agent's last answer,
    std::vector<Array> agent_state = {};  // Owned. and the state after it.
  };

  // What the stream knows of the server at its address. Begins anew with
  // another address.
  struct Server {
    // Does not change while there is a connection, so the callbacks of the
    // connection read it without the lock.
    std::string address = {};  // Empty: none.
    // To find out which frames are new costs a server more than to copy all of
    // them to a unix socket. But the sockets of machines that have dialed in,
    // which core/remote/acceptor.py names dialed-*, lead to the network.
    bool takes_newest_frames = false;

    bool was_connected = false;    // Whether it has ever welcomed the stream.
    int attempts = 0;              // Attempts to connect since the last step.
    std::string last_reason = {};  // Why the last one without a Welcome failed.
    int failures = 0;              // Failures since the last finished rollout.
    bool has_finished = false;     // Whether a rollout was ever finished.
    int64_t steps = 0;
    Histogram latency = {};
  };

  // Called by the thread in PoolRun::run(). Both release the lock meanwhile.
  // Without an address, connect() only destroys the last connection.
  void connect(Lock& lock);
  void resume(Lock& lock);

  // Messages.
  void on_welcome(const Segments& message, wire::Piece body);
  void on_step(Segments message);
  void on_goodbye(const wire::Goodbye& goodbye);

  // Called by the owner of the stream.
  void receive(Segments message);
  void decode(const Segments& message);
  void begin_rollout(Segments message);
  void write_row(const Segments& message, int64_t row, const AgentSpec* agent);
  void ask_agent();
  void on_answer(const Outputs* outputs, std::exception_ptr error);
  void finish_move_locked();
  bool finish_if_ended_locked();

  // Ends of the stream.
  void give_up(const std::string& why, bool permanent);
  void give_up_malformed(const wire::DecodeError& error);
  void count_failure_locked(const std::string& why, bool permanent);
  void give_up_locked();
  void finish_close_locked();

  // Changes of the address.
  std::shared_ptr<Stream> follow_address_locked();
  void set_address_locked();

  bool has_owner_locked() const;
  std::string describe_locked() const;
  double waiting_s_locked(Clock::time_point now) const;

  PoolRun& run_;
  const size_t index_;
  StreamState state_ = StreamState::kUnused;
  std::string wanted_;  // The address that it shall have. Empty: none.
  Server server_;
  uint64_t incarnations_ = 0;  // Connections that were welcomed.
  // None before the first connection. Replaced only by connect().
  std::optional<Life> life_;
};

}  // namespace torchbeast
