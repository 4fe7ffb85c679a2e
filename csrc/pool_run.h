// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "actor_pool.h"
#include "actor_stream.h"
#include "agent_spec.h"
#include "batching_queue.h"
#include "buffer_pool.h"
#include "clock.h"
#include "env_spec.h"
#include "slabs.h"
#include "transport.h"

namespace torchbeast {

// The implementation of ActorPool: the streams, their common state, and the
// loop inside run(). Callbacks of the queue and the batcher hold weak pointers
// to it, as they may come after the pool was destroyed.
//
// Locks. mu_ guards the common state and the streams. Lock order: mu_ first,
// then the locks inside the learner queue, the batcher and the buffer pools;
// these hold no lock when they call back. With mu_ held, no thread copies
// observations, calls the transport, or takes memory from or returns it to the
// learner queue's buffers, which may need the GIL.
class PoolRun : public std::enable_shared_from_this<PoolRun> {
 public:
  PoolRun(PoolOptions options, std::unique_ptr<Transport> transport);

  void run();
  void stop();
  size_t set_addresses(const std::vector<std::string>& addresses);
  int64_t count() const;
  PoolStats stats() const;
  std::vector<std::string> take_events();

 private:
  friend class ActorStream;  // Both are guarded by mu_.
  using Lock = ActorStream::Lock;

  // Called by the thread in run().
  void work();
  ActorStream* next_to_resume_locked();
  ActorStream* next_to_connect_locked();
  void give_up_unresponsive_locked(Lock& lock);
  void tear_down();
  void wake_run();

  // Called by set_addresses.
  size_t assign_addresses_locked(const std::vector<std::string>& addresses);
  bool is_avoided_locked(const std::string& address) const;

  // Called by the streams.
  bool has_ended_locked() const;
  bool has_room_locked(size_t others) const;
  void avoid_locked(const std::string& address, Clock::time_point until);
  const EnvSpec* set_env(EnvSpec env);
  void discard_rollout_locked(Rollout& rollout);
  void deliver(Slab* slab, const std::vector<Slabs::Move>& moves);
  std::vector<Slabs::Move> begin_moves_locked(Slab& young);
  void finish_moves_locked(const std::vector<Slabs::Move>& moves);
  bool give_place_locked(ActorStream& stream);
  bool has_other_server_locked(const std::string& address) const;
  void fail(std::exception_ptr error);
  void fail_locked(std::exception_ptr error);
  void add_event_locked(std::string line);

  const PoolOptions options_;
  const SpecOptions spec_options_;
  // For the agent's answers and initial states. Not the learner queue's, which
  // may need the GIL.
  const std::shared_ptr<BufferPool> buffers_ = BufferPool::create();
  const std::unique_ptr<Transport> transport_;
  // One for each of max_streams. The vector never changes.
  std::vector<std::unique_ptr<ActorStream>> streams_;

  mutable std::mutex mu_;
  std::condition_variable changed_;  // run() and stop() wait for it.
  // All members from here on are guarded by mu_.
  bool called_ = false;  // run() was called.
  bool running_ = false;
  std::thread::id thread_;        // The one in run(), once it has begun.
  BatchingQueue::Counts before_;  // Of the learner queue, when run() began.
  bool stopping_ = false;
  std::exception_ptr failure_;  // The first permanent failure.

  // Set once: env_ and slabs_ by the first Welcome, agent_ by the agent's first
  // answer. Constant from then on, so read without the lock once known to be
  // set.
  std::unique_ptr<const EnvSpec> env_;
  std::unique_ptr<const AgentSpec> agent_;
  std::unique_ptr<Slabs> slabs_;

  size_t num_wanted_ = 0;             // Streams that shall have an address.
  std::deque<std::string> left_out_;  // Addresses that wait for a stream.
  // Servers that do not fit or cannot be reached, and until when servers that
  // wait for a stream come before them.
  std::map<std::string, Clock::time_point> avoided_until_;

  // In kWaitingToConnect, by the time at which the thread in run() shall call
  // connect().
  std::multimap<Clock::time_point, ActorStream*> to_connect_;
  std::deque<ActorStream*> to_resume_;  // In kReceiving, with a held Step.
  std::deque<ActorStream*> waiting_for_room_;
  // When to look again for servers that have not answered in time.
  Clock::time_point next_timeout_check_ = Clock::time_point::max();
  std::mt19937_64 random_{std::random_device{}()};

  std::deque<std::string> events_;
  int64_t connects_ = 0;
  int64_t reconnects_ = 0;
  int64_t failures_ = 0;
  double left_env_s_ = 0;  // AddressStats::env_s of addresses that have left.
  // Agent steps:
  int64_t received_ = 0;
  int64_t in_slabs_ = 0;   // Of rollouts in slabs, finished or not.
  int64_t enqueued_ = 0;   // Handed to the learner queue.
  int64_t discarded_ = 0;  // Of rollouts that did not reach the learner queue.
};

}  // namespace torchbeast
