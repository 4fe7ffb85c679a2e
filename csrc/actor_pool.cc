// SPDX-License-Identifier: Apache-2.0
//
// Every stream is a small state machine:
//
//                      a Step                              row written
//   +-> WaitingForEnv ---------> Receiving --------+-----------------------+
//   |                            |       ^         | (a rollout has ended) |
//   |           queue is full    v       | room    v                       v
//   |                         WaitingForRoom   a new lane WaitingForInference
//   |                                                                      |
//   +----------------------------------------------------------------------+
//                          outputs: an Action is sent
//
// It is moved by three kinds of threads: the transport's (messages, ends of
// streams), the one inside run() (dials, and goes on with streams that had to
// wait), and those that answer the inference batcher. None waits for another.
//
// A rollout is written into a lane of a slab: K columns of a learner batch. In
// the states kReceiving, kWaitingForInference and kMoving the lane, and those
// members of the stream that say so, belong to whoever moved it there, without
// the lock. An event that comes meanwhile and ends the stream only leaves a
// mark (`closing`, `closed`); the owner of the state draws the consequences
// when it moves the stream on. So no lane goes to another rollout while someone
// writes it, or while the inference may read it.
//
// Lock order: Impl::mu_, then the locks inside the learner queue, the batcher
// and the buffer pools; those call us back without holding theirs. While mu_ is
// held no observation is copied, no transport is called, and nothing is taken
// from or returned to the learner queue's buffers: that may need the GIL.

#include "actor_pool.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>

#include "interrupt.h"
#include "rollout_spec.h"
#include "wire.h"

namespace torchbeast {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kMaxBackoffS = 1.0;
constexpr int kPatience = 4;  // Times max_failures, for what can work.
constexpr size_t kMaxEvents = 1000;
// How late a server that does not answer may be noticed, as a part of its time
// and at most.
constexpr double kLateness = 0.05;
constexpr double kMaxLatenessS = 1.0;
constexpr const char* kMalformed = "the server sent a malformed message: ";

// Times on a logarithmic scale: eight buckets per doubling, from 1 us on.
class Histogram {
 public:
  void add(Clock::duration time) {
    const double us = std::chrono::duration<double, std::micro>(time).count();
    total_s_ += 1e-6 * us;
    const double bucket = us > 1 ? kPerDoubling * std::log2(us) : 0;
    ++counts_[std::min(static_cast<size_t>(bucket), counts_.size() - 1)];
  }

  void add(const Histogram& other) {
    for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
    total_s_ += other.total_s_;
  }

  double total_s() const { return total_s_; }

  // The middle of the bucket that `part` of all times do not exceed.
  double quantile_ms(double part) const {
    int64_t total = 0;
    for (const int64_t count : counts_) total += count;
    if (total == 0) return 0;
    auto left = static_cast<int64_t>(std::ceil(part * total));
    size_t bucket = 0;
    while (left > counts_[bucket]) left -= counts_[bucket++];
    return 1e-3 * std::exp2((bucket + 0.5) / kPerDoubling);
  }

 private:
  static constexpr double kPerDoubling = 8;
  std::array<int64_t, 256> counts_ = {};
  double total_s_ = 0;
};

Clock::duration seconds(double s) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(s));
}

// std::swap_ranges goes byte by byte, and takes five times as long.
void swap_bytes(char* a, char* b, size_t size) {
  std::array<char, 4096> buffer;
  while (size > 0) {
    const size_t n = std::min(size, buffer.size());
    std::memcpy(buffer.data(), a, n);
    std::memcpy(a, b, n);
    std::memcpy(b, buffer.data(), n);
    a += n;
    b += n;
    size -= n;
  }
}

bool is_busy(StreamState state) {
  return state == StreamState::kReceiving ||
         state == StreamState::kWaitingForInference ||
         state == StreamState::kMoving;
}

Shape row_shape(int64_t rows, int64_t columns, const Shape& rest) {
  Shape shape = {rows, columns};
  shape.insert(shape.end(), rest.begin(), rest.end());
  return shape;
}

}  // namespace

std::string_view name(StreamState state) {
  switch (state) {
    case StreamState::kWaitingToConnect:
      return "waiting_to_connect";
    case StreamState::kConnecting:
      return "connecting";
    case StreamState::kGreeting:
      return "greeting";
    case StreamState::kWaitingForEnv:
      return "waiting_for_env";
    case StreamState::kReceiving:
      return "receiving";
    case StreamState::kWaitingForInference:
      return "waiting_for_inference";
    case StreamState::kWaitingForRoom:
      return "waiting_for_room";
    case StreamState::kMoving:
      return "moving";
    case StreamState::kClosing:
      return "closing";
    case StreamState::kStopped:
      return "stopped";
  }
  return "unknown";
}

// Shared with whoever calls us back, who may outlive the pool.
class ActorPool::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(PoolOptions options, std::unique_ptr<Transport> transport);

  void run();
  void stop();
  int64_t count() const;
  PoolStats stats() const;
  std::vector<std::string> take_events();

 private:
  struct Actor;

  struct Lane {
    enum class State : uint8_t { kFree, kTaken, kFinished };
    State state = State::kFree;
    Actor* actor = nullptr;  // Whose rollout it is, while it is taken.
  };

  // A learner batch being filled. The bytes of its arrays belong to the owners
  // of the lanes.
  struct Slab {
    uint64_t serial = 0;      // Guarded by mu_.
    std::vector<Lane> lanes;  // Guarded by mu_.
    bool moving = false;      // Guarded by mu_. No lane changes hands.
    std::vector<Array> env;
    // Guarded by mu_ until filled, at the latest when the first outputs are
    // known; never changed afterwards.
    std::vector<Array> outputs;
    std::vector<Array> state;
  };

  // A rollout of a slab that waits for its stream, and a finished one of a
  // younger slab, to change places.
  struct Move {
    Slab* old;
    size_t old_lane;
    Slab* young;
    size_t young_lane;
    Actor* actor;  // Of the old lane; none if it is free.
  };

  // One connection of a stream, from connect() on; the next one begins as new.
  // What carries no remark is guarded by mu_.
  struct Life {
    // It ends only to begin with the right first_env_id.
    const bool repeat = false;
    std::shared_ptr<Stream> stream = nullptr;
    bool welcomed = false;  // And not closed since.
    bool closing = false;   // We gave it up: its messages are ignored.
    bool closed = false;    // It has ended.
    Clock::time_point asked_at = {};  // When it began to wait for its server.

    Slab* slab = nullptr;  // Its rollout's, if any.
    size_t lane = 0;
    int64_t row = 0;  // The last one written: the steps of the rollout so far.

    // A Step that waits: for room, or for the end of a move.
    std::optional<Segments> held = std::nullopt;

    uint64_t next_seq = 0;  // Only the lane's owner changes it.

    // Owned like the lane.
    wire::Step step = {};                 // Where the message's arrays are.
    std::vector<Array> outputs = {};      // For the row before. None: zeros.
    std::vector<Array> agent_state = {};  // After it.
  };

  // One stream: what is constant, what outlasts a connection, and the present
  // connection. What carries no remark is guarded by mu_.
  struct Actor final : StreamEvents {
    Actor(Impl* impl, size_t stream_index, std::string server_address)
        : pool(impl), index(stream_index), address(std::move(server_address)) {}

    void on_connected() override { pool->on_connected(*this); }
    void on_message(Segments message) override {
      pool->on_message(*this, std::move(message));
    }
    void on_closed(const std::string& why, bool transient) override {
      pool->on_closed(*this, why, transient);
    }

    Impl* const pool;
    const size_t index;
    const std::string address;
    // On one machine it costs more to look for them than to copy all.
    const bool takes_newest_frames = !address.starts_with("unix:");

    StreamState state = StreamState::kWaitingToConnect;
    uint64_t incarnations = 0;
    int attempts = 0;           // To connect, since the last step.
    int failures = 0;           // Since the last finished rollout.
    bool has_finished = false;  // A rollout, ever.
    int64_t steps = 0;
    Histogram latency;

    // None before the first connection. A dead one stays until the next.
    std::optional<Life> life;
  };

  using Lock = std::unique_lock<std::mutex>;

  // Events of the transport.
  void on_connected(Actor& actor);
  void on_message(Actor& actor, Segments message);
  void on_closed(Actor& actor, const std::string& why, bool transient);
  void on_welcome(Actor& actor, const Segments& message, wire::Piece body);
  void on_step(Actor& actor, Segments message);

  // A stream in kReceiving, owned by the caller.
  void receive(Actor& actor, Segments message);
  void begin_rollout(Actor& actor, Segments message);
  void resume(Actor& actor, Segments message);
  void ask_agent(Actor& actor);
  void on_answer(Actor& actor, const Outputs* answer, std::exception_ptr error);
  bool is_over_locked(Actor& actor);

  // Slabs.
  std::unique_ptr<Slab> make_slab() const;
  std::vector<Array> make_outputs() const;
  bool has_outputs(Lock& lock, Slab& slab);
  bool claim_lane_locked(Actor& actor);
  bool ends_rollout(const Actor& actor) const;
  size_t offset(const Actor& actor, int64_t row, const RowLeaf& leaf) const;
  void write_row(const Actor& actor, const Segments& message, int64_t row,
                 bool with_outputs) const;
  void write_state(const Actor& actor) const;
  Slab* finish_rollout_locked(Actor& actor);
  void discard_rollout_locked(Life& life);
  void deliver(Slab* slab);
  std::vector<Move> straggler_moves_locked(Slab& young);
  void move_lane(const Move& move) const;
  void finish_moves_locked(const std::vector<Move>& moves);

  // Ends of streams, and of the run.
  void give_up(Actor& actor, const std::string& why, bool permanent);
  void count_failure_locked(Actor& actor, const std::string& why,
                            bool permanent);
  void give_up_locked(Actor& actor);
  void finish_close_locked(Actor& actor);
  void fail(std::exception_ptr error);
  void fail_locked(std::exception_ptr error);

  // The thread in run().
  void work();
  void connect(Lock& lock, Actor& actor);
  Actor* next_to_resume_locked();
  Actor* next_to_connect_locked();
  void give_up_silent_locked(Lock& lock);
  bool has_ended_locked() const;
  bool has_room_locked(size_t others) const;
  void tear_down();
  void poke();

  std::string where_locked(const Actor& actor) const;
  double waiting_s_locked(const Actor& actor, Clock::time_point now) const;
  void note_locked(std::string line);

  const PoolOptions options_;
  const SpecOptions spec_options_;
  const std::shared_ptr<BufferPool> buffers_ = BufferPool::create();  // Ours.
  const std::unique_ptr<Transport> transport_;
  std::vector<std::unique_ptr<Actor>> actors_;  // The list is constant.
  // What the queue had counted before this pool.
  const int64_t dequeued_before_;
  const int64_t dropped_before_;

  mutable std::mutex mu_;
  std::condition_variable changed_;  // For run() and stop().
  bool called_ = false;  // Guarded by mu_, like all below. run() was.
  bool running_ = false;
  bool stopping_ = false;
  std::exception_ptr failure_;  // The first permanent one.

  // Both are set once, and constant from then on.
  std::unique_ptr<const EnvSpec> env_;
  std::unique_ptr<const AgentSpec> agent_;
  // The one stream that may connect while K, and so env ids, are unknown.
  Actor* scout_ = nullptr;

  std::multimap<Clock::time_point, Actor*> to_connect_;
  std::deque<Actor*> to_resume_;  // In kReceiving, with a held message.
  std::deque<Actor*> waiting_for_room_;
  // When to look next for servers that do not answer.
  Clock::time_point next_look_ = Clock::time_point::max();
  std::vector<std::unique_ptr<Slab>> slabs_;  // By serial.
  uint64_t next_serial_ = 0;
  std::mt19937_64 random_{std::random_device{}()};

  std::deque<std::string> events_;
  int64_t connects_ = 0;
  int64_t reconnects_ = 0;
  int64_t failures_ = 0;
  // Steps.
  int64_t received_ = 0;
  int64_t in_slabs_ = 0;
  int64_t enqueued_ = 0;
  int64_t discarded_ = 0;
};

ActorPool::Impl::Impl(PoolOptions options, std::unique_ptr<Transport> transport)
    : options_(std::move(options)),
      spec_options_{options_.initial_agent_state,
                    options_.named_rows,
                    options_.inference_keys,
                    options_.value_ranges,
                    options_.learner_queue->options().minimum_batch_size,
                    options_.learner_queue->options().maximum_batch_size},
      transport_(std::move(transport)),
      dequeued_before_(options_.learner_queue->dequeued()),
      dropped_before_(options_.learner_queue->dropped()) {
  for (const std::string& address : options_.addresses) {
    actors_.push_back(std::make_unique<Actor>(this, actors_.size(), address));
    to_connect_.emplace(Clock::time_point::min(), actors_.back().get());
  }
}

// --- The thread in run() -----------------------------------------------------

void ActorPool::Impl::run() {
  {
    std::lock_guard lock(mu_);
    if (called_) throw std::runtime_error("ActorPool.run() was called twice");
    called_ = true;
    if (stopping_) return;
    running_ = true;
  }
  // Neither list of listeners can be left again: they may outlive us.
  const auto listen = [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->poke();
  };
  try {
    options_.learner_queue->on_change(listen);
    options_.inference_batcher->on_close(listen);
    work();
  } catch (...) {
    fail(std::current_exception());
  }
  tear_down();
  std::exception_ptr failure;
  {
    std::lock_guard lock(mu_);
    failure = failure_;
  }
  if (!failure) return;
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception&) {  // Not a signal's, which is the caller's.
    if (!options_.named_rows) {
      options_.learner_queue->fail(failure);
      options_.inference_batcher->fail(failure);
    }
    throw;
  }
}

void ActorPool::Impl::stop() {
  Lock lock(mu_);
  stopping_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return !running_; });
}

void ActorPool::Impl::work() {
  Lock lock(mu_);
  if (options_.step_timeout_s > 0) next_look_ = Clock::now();
  while (!has_ended_locked()) {
    if (Clock::now() >= next_look_) give_up_silent_locked(lock);
    if (Actor* actor = next_to_resume_locked()) {
      Segments message = *std::exchange(actor->life->held, std::nullopt);
      lock.unlock();
      resume(*actor, std::move(message));
      lock.lock();
    } else if (Actor* due = next_to_connect_locked()) {
      connect(lock, *due);
    } else if (to_connect_.empty() || scout_) {
      wait_interruptibly(lock, changed_, next_look_);
    } else {
      wait_interruptibly(lock, changed_,
                         std::min(to_connect_.begin()->first, next_look_));
    }
  }
}

// Ends the streams whose servers have not answered in time. Lets go of the lock
// meanwhile.
void ActorPool::Impl::give_up_silent_locked(Lock& lock) {
  const auto now = Clock::now();
  const double limit_s = options_.step_timeout_s;
  std::vector<std::shared_ptr<Stream>> streams;
  for (const auto& actor : actors_) {
    if (waiting_s_locked(*actor, now) <= limit_s || actor->life->closing) {
      continue;
    }
    std::array<char, 32> limit = {};
    std::snprintf(limit.data(), limit.size(), "%g", limit_s);
    note_locked(where_locked(*actor) + ": the server has not answered for " +
                limit.data() + " s; connecting anew");
    give_up_locked(*actor);
    streams.push_back(actor->life->stream);
  }
  next_look_ = now + seconds(std::min(kLateness * limit_s, kMaxLatenessS));
  lock.unlock();
  for (const auto& stream : streams)
    stream->cancel();  // on_closed will follow.
  lock.lock();
}

bool ActorPool::Impl::has_ended_locked() const {
  return stopping_ || failure_ || options_.learner_queue->is_closed() ||
         options_.inference_batcher->is_closed();
}

// Whether a stream may begin a rollout while `others` wait to. Each of them may
// have one in the queue beyond its maximum: then, with each batch that is
// taken, as many begin as it had rollouts, and they finish one after another.
// If all waited until the queue is down to its maximum, all would begin at
// once, and the learner would wait for them.
bool ActorPool::Impl::has_room_locked(size_t others) const {
  const int64_t theirs = static_cast<int64_t>(others) * env_->num_envs;
  return options_.learner_queue->has_room(theirs);
}

// Room in the queue, or the end of the queue or the batcher.
void ActorPool::Impl::poke() {
  std::lock_guard lock(mu_);
  if (!waiting_for_room_.empty() || has_ended_locked()) changed_.notify_all();
}

ActorPool::Impl::Actor* ActorPool::Impl::next_to_resume_locked() {
  if (!to_resume_.empty()) {
    Actor* const actor = to_resume_.front();
    to_resume_.pop_front();
    return actor;
  }
  if (waiting_for_room_.empty() ||
      !has_room_locked(waiting_for_room_.size() - 1)) {
    return nullptr;
  }
  Actor* const actor = waiting_for_room_.front();
  waiting_for_room_.pop_front();
  actor->state = StreamState::kReceiving;
  return actor;
}

ActorPool::Impl::Actor* ActorPool::Impl::next_to_connect_locked() {
  if (to_connect_.empty() || scout_) return nullptr;
  const auto first = to_connect_.begin();
  if (first->first > Clock::now()) return nullptr;
  Actor* const actor = first->second;
  to_connect_.erase(first);
  if (!env_) scout_ = actor;
  return actor;
}

void ActorPool::Impl::connect(Lock& lock, Actor& actor) {
  wire::Hello hello;
  hello.version = options_.version;
  hello.run_id = options_.run_id;
  hello.info_keys = options_.info_keys;
  hello.seed = options_.seed;
  // Without a K, stream 0 is right with 0; another scout comes again.
  hello.first_env_id = env_ ? actor.index * env_->num_envs : 0;
  hello.incarnation = options_.first_incarnation + actor.incarnations;
  hello.newest_frames = actor.takes_newest_frames;
  hello.truncation_is_done = !options_.named_rows;
  actor.state = StreamState::kConnecting;
  ++actor.attempts;
  // The dead connection is destroyed without the lock: it has a stream.
  std::optional<Life> before = std::exchange(actor.life, std::nullopt);
  actor.life.emplace(Life{.repeat = !env_ && actor.index > 0});
  const size_t limit = env_ ? env_->max_message_bytes : kMaxMessageBytes;

  lock.unlock();
  before.reset();
  std::shared_ptr<Stream> stream =
      transport_->connect(actor.address, &actor, limit);
  lock.lock();
  actor.life->stream = stream;
  lock.unlock();
  stream->start(wire::hello_to_server(hello));
  lock.lock();
}

void ActorPool::Impl::tear_down() {
  {
    std::lock_guard lock(mu_);
    stopping_ = true;
  }
  transport_->shutdown();
  // From here on only those who answer the batcher may come, and stats().
  std::vector<std::shared_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Slab>> slabs;
  std::vector<std::optional<Segments>> messages;
  std::lock_guard lock(mu_);
  for (const auto& actor : actors_) {
    actor->state = StreamState::kStopped;
    if (!actor->life) continue;
    // Whoever answers may still write to the rest of it.
    Life& life = *actor->life;
    discard_rollout_locked(life);
    life.welcomed = false;
    streams.push_back(std::move(life.stream));
    messages.push_back(std::exchange(life.held, std::nullopt));
  }
  for (const auto& slab : slabs_) {
    for (const Lane& lane : slab->lanes) {
      if (lane.state != Lane::State::kFinished) continue;
      const int64_t steps = options_.unroll_length * env_->num_envs;
      discarded_ += steps;
      in_slabs_ -= steps;
    }
  }
  assert(in_slabs_ == 0);
  slabs.swap(slabs_);
  waiting_for_room_.clear();
  to_resume_.clear();
  to_connect_.clear();
  running_ = false;
  changed_.notify_all();
}

// --- Events of the transport -------------------------------------------------

void ActorPool::Impl::on_connected(Actor& actor) {
  std::lock_guard lock(mu_);
  if (actor.state == StreamState::kConnecting) {
    actor.state = StreamState::kGreeting;
    actor.life->asked_at = Clock::now();
  }
}

void ActorPool::Impl::on_message(Actor& actor, Segments message) {
  try {
    const auto [kind, body] = wire::open(message);
    switch (kind) {
      case wire::Kind::kWelcome:
        on_welcome(actor, message, body);
        return;
      case wire::Kind::kStep:
        on_step(actor, std::move(message));
        return;
      case wire::Kind::kFailure: {
        const wire::Failure failure = wire::decode_failure(message, body);
        give_up(actor,
                "the server reports a failure: " +
                    wire::printable(failure.text, kMaxTextBytes),
                failure.permanent);
        return;
      }
      case wire::Kind::kGoodbye: {
        const wire::Goodbye goodbye = wire::decode_goodbye(message, body);
        std::shared_ptr<Stream> stream;
        {
          std::lock_guard lock(mu_);
          if (actor.life->closing || stopping_) return;
          note_locked(where_locked(actor) + ": the server says goodbye: " +
                      wire::printable(goodbye.reason, kMaxTextBytes));
          give_up_locked(actor);
          stream = actor.life->stream;
        }
        stream->cancel();
        return;
      }
    }
  } catch (const wire::DecodeError& error) {
    give_up(actor, kMalformed + std::string(error.what()), false);
  } catch (...) {
    fail(std::current_exception());
  }
}

void ActorPool::Impl::on_welcome(Actor& actor, const Segments& message,
                                 wire::Piece body) {
  Life& life = *actor.life;
  wire::Welcome welcome = wire::decode_welcome(message, body);
  const EnvSpec* env = nullptr;
  {
    std::lock_guard lock(mu_);
    if (life.closing || stopping_) return;
    if (life.welcomed) throw wire::DecodeError("a second Welcome");
    env = env_.get();
  }
  std::unique_ptr<const EnvSpec> made;
  try {
    if (welcome.protocol != wire::kProtocol) {
      throw ActorError(
          "the server speaks version " + std::to_string(welcome.protocol) +
          " of the protocol, expected " + std::to_string(wire::kProtocol) +
          "; install the same version on both sides");
    }
    if (env) {
      check_same(*env, welcome);
    } else {  // This is the scout: there is no other.
      made = std::make_unique<const EnvSpec>(
          make_env_spec(actor.address, std::move(welcome), message.size(),
                        spec_options_, *buffers_));
      env = made.get();
    }
  } catch (const ActorError& error) {
    give_up(actor, error.what(), true);
    return;
  }

  std::shared_ptr<Stream> stream;
  {
    std::lock_guard lock(mu_);
    if (life.closing || stopping_) return;
    if (made) {
      env_ = std::move(made);
      scout_ = nullptr;
      changed_.notify_all();
    }
    if (!life.repeat) {
      life.welcomed = true;
      ++connects_;
      if (actor.incarnations++ > 0) {
        ++reconnects_;
        note_locked(where_locked(actor) + ": connected again");
      }
      life.agent_state = env->initial_state;
      actor.state = StreamState::kWaitingForEnv;
      life.asked_at = Clock::now();
      return;
    }
    actor.attempts = 0;
    give_up_locked(actor);
    stream = life.stream;
  }
  stream->cancel();
}

void ActorPool::Impl::on_step(Actor& actor, Segments message) {
  Life& life = *actor.life;
  {
    std::lock_guard lock(mu_);
    if (life.closing || stopping_) return;
    if (!life.welcomed) throw wire::DecodeError("a Step before the Welcome");
    if (actor.state == StreamState::kMoving && !life.held) {
      life.held = std::move(message);
      return;
    }
    if (actor.state != StreamState::kWaitingForEnv) {
      throw wire::DecodeError("a Step before the Action it should answer");
    }
    actor.state = StreamState::kReceiving;
  }
  receive(actor, std::move(message));
}

void ActorPool::Impl::on_closed(Actor& actor, const std::string& why,
                                bool transient) {
  Life& life = *actor.life;
  std::lock_guard lock(mu_);
  life.closed = true;
  if (stopping_) return;
  if (!life.closing) {
    if (!transient) {
      count_failure_locked(actor, why, false);
    } else if (life.welcomed || actor.attempts == 1) {
      note_locked(where_locked(actor) + ": " + why);
    }  // Else it is one of many attempts to reach a server that is away.
    give_up_locked(actor);
  }
  if (!is_busy(actor.state)) finish_close_locked(actor);
}

// --- A stream in kReceiving --------------------------------------------------

// Whether the stream has ended or is about to. For the owner of a busy state
// who wants to move the stream on: if true, there is nothing left to do.
bool ActorPool::Impl::is_over_locked(Actor& actor) {
  if (stopping_) return true;
  if (!actor.life->closing) return false;
  actor.state = StreamState::kClosing;
  if (actor.life->closed) finish_close_locked(actor);
  return true;
}

// Writes the Step's row; asks the agent, or goes on to the next rollout.
void ActorPool::Impl::receive(Actor& actor, Segments message) {
  Life& life = *actor.life;
  const int64_t K = env_->num_envs;
  const auto now = Clock::now();
  try {
    const wire::Piece body = wire::open(message).body;
    wire::decode_step(message, body, env_->welcome.step_arrays, K, &life.step);
    if (life.step.seq != life.next_seq) {
      throw wire::DecodeError("Step " + std::to_string(life.step.seq) +
                              ", expected Step " +
                              std::to_string(life.next_seq));
    }
    if (life.step.newest_frames && !life.slab) {
      throw wire::DecodeError("the first Step has only the newest frames");
    }
    if (life.step.newest_frames && ends_rollout(actor)) {
      throw wire::DecodeError("Step " + std::to_string(life.step.seq) +
                              " has only the newest frames, expected all");
    }
    check_values(*env_, message, life.step);
  } catch (const wire::DecodeError& error) {
    {
      std::lock_guard lock(mu_);
      if (is_over_locked(actor)) return;
      actor.state = StreamState::kWaitingForEnv;
    }
    throw;  // To on_message, or resume().
  }

  if (life.next_seq > 0) {  // The very first row belongs to no action.
    bool with_outputs;
    {
      Lock lock(mu_);
      actor.latency.add(now - life.asked_at);
      with_outputs = has_outputs(lock, *life.slab);
    }
    write_row(actor, message, life.row + 1, with_outputs);

    bool ends = false;
    Slab* complete = nullptr;
    {
      std::lock_guard lock(mu_);
      ++life.next_seq;
      ++life.row;
      actor.attempts = 0;
      actor.steps += K;
      received_ += K;
      in_slabs_ += K;
      ends = life.row == options_.unroll_length;
      if (ends) {
        complete = finish_rollout_locked(actor);
      } else {
        if (is_over_locked(actor)) return;
        actor.state = StreamState::kWaitingForInference;
      }
    }
    if (!ends) {
      ask_agent(actor);
      return;
    }
    if (complete) deliver(complete);
  } else {
    std::lock_guard lock(mu_);
    ++life.next_seq;
  }
  begin_rollout(actor, std::move(message));
}

// Takes a lane for the stream, and the last row received as its row 0.
void ActorPool::Impl::begin_rollout(Actor& actor, Segments message) {
  Life& life = *actor.life;
  bool with_outputs;
  std::unique_ptr<Slab> fresh;  // Let go of after the lock, if not needed.
  {
    Lock lock(mu_);
    if (is_over_locked(actor)) return;
    if (!has_room_locked(waiting_for_room_.size())) {
      life.held = std::move(message);
      actor.state = StreamState::kWaitingForRoom;
      waiting_for_room_.push_back(&actor);
      return;
    }
    if (!claim_lane_locked(actor)) {
      lock.unlock();
      fresh = make_slab();
      lock.lock();
      if (is_over_locked(actor)) return;
      if (!claim_lane_locked(actor)) {  // Another thread may have made one.
        fresh->serial = next_serial_++;
        slabs_.push_back(std::move(fresh));
        claim_lane_locked(actor);
      }
    }
    with_outputs = has_outputs(lock, *life.slab);
  }
  write_row(actor, message, 0, with_outputs);
  write_state(actor);
  {
    std::lock_guard lock(mu_);
    if (is_over_locked(actor)) return;
    actor.state = StreamState::kWaitingForInference;
  }
  ask_agent(actor);
}

// Goes on with a Step that had to wait: for room, with its row written to the
// rollout that it ended; or as it came.
void ActorPool::Impl::resume(Actor& actor, Segments message) {
  try {
    if (actor.life->slab) {
      receive(actor, std::move(message));
    } else {
      begin_rollout(actor, std::move(message));
    }
  } catch (const wire::DecodeError& error) {
    give_up(actor, kMalformed + std::string(error.what()), false);
  }
}

// The inputs are the row itself, in the slab. It stays as it is until the
// answer, and its memory for as long as anybody holds the inputs.
void ActorPool::Impl::ask_agent(Actor& actor) {
  const Life& life = *actor.life;
  const int64_t K = env_->num_envs;
  Nest inputs;
  inputs.structure = env_->inputs;
  inputs.leaves.reserve(env_->inputs->num_leaves);
  for (const size_t i : env_->inference_leaves) {
    const RowLeaf& leaf = env_->leaves[i];
    const Array& array = life.slab->env[i];
    inputs.leaves.push_back({leaf.dtype, row_shape(1, K, leaf.shape),
                             array.data + offset(actor, life.row, leaf),
                             array.owner});
  }
  for (const Array& array : life.agent_state) inputs.leaves.push_back(array);
  try {
    options_.inference_batcher->compute_async(
        std::move(inputs),
        [weak = weak_from_this(), &actor](const Outputs* answer,
                                          std::exception_ptr error) {
          // The pool owns the stream.
          if (const auto self = weak.lock()) {
            self->on_answer(actor, answer, error);
          }
        });
  } catch (...) {
    fail(std::current_exception());
  }
}

// Runs in an inference thread: must not wait, and must not throw, as whoever
// set the outputs has done nothing wrong by our standards.
void ActorPool::Impl::on_answer(Actor& actor, const Outputs* outputs,
                                std::exception_ptr error) {
  Life& life = *actor.life;
  if (error) {
    // The lane stays taken: a batch that failed may still be read.
    fail(error);
    return;
  }
  try {
    const AgentSpec* agent = nullptr;
    bool wants_whole = false;
    {
      std::lock_guard lock(mu_);
      if (stopping_)
        return;  // Or tear_down() may write to the actor meanwhile.
      agent = agent_.get();
      wants_whole =
          actor.takes_newest_frames && env_->has_stacks && ends_rollout(actor);
    }
    Nest answer = outputs->copy(*buffers_);
    if (!agent) {
      auto made =
          std::make_unique<const AgentSpec>(make_agent_spec(*env_, answer));
      std::lock_guard lock(mu_);
      if (!agent_) agent_ = std::move(made);
      agent = agent_.get();
    }
    check_answer(*env_, *agent, answer);

    std::vector<std::string> converted;
    std::string message = wire::action_to_server(
        life.next_seq - 1, action_arrays(*env_, *agent, answer, converted),
        wants_whole);

    const auto state = answer.leaves.begin() + agent->leaves.size();
    life.outputs.assign(answer.leaves.begin(), state);
    life.agent_state.assign(state, answer.leaves.end());
    std::shared_ptr<Stream> stream;
    {
      std::lock_guard lock(mu_);
      if (is_over_locked(actor)) return;
      actor.state = StreamState::kWaitingForEnv;
      life.asked_at = Clock::now();
      stream = life.stream;
    }
    stream->send(std::move(message));
  } catch (...) {
    fail(std::current_exception());
  }
}

// --- Slabs -------------------------------------------------------------------

std::unique_ptr<ActorPool::Impl::Slab> ActorPool::Impl::make_slab() const {
  BufferPool& buffers = *options_.learner_queue->buffers();
  auto slab = std::make_unique<Slab>();
  slab->lanes.resize(env_->columns / env_->num_envs);
  for (const RowLeaf& leaf : env_->leaves) {
    slab->env.push_back(buffers.allocate(
        leaf.dtype,
        row_shape(options_.unroll_length + 1, env_->columns, leaf.shape)));
  }
  for (const StateLeaf& leaf : env_->state_leaves) {
    slab->state.push_back(
        buffers.allocate(leaf.dtype, leaf.with_columns(env_->columns)));
  }
  return slab;
}

// Zeros: the first rows of streams may have been written already.
std::vector<Array> ActorPool::Impl::make_outputs() const {
  std::vector<Array> outputs;
  for (const RowLeaf& leaf : agent_->leaves) {
    outputs.push_back(options_.learner_queue->buffers()->allocate(
        leaf.dtype,
        row_shape(options_.unroll_length + 1, env_->columns, leaf.shape)));
    std::memset(outputs.back().data, 0, outputs.back().nbytes());
  }
  return outputs;
}

// Whether the slab has arrays for the agent's outputs; makes them once it is
// known what they are like. Releases the lock meanwhile.
bool ActorPool::Impl::has_outputs(Lock& lock, Slab& slab) {
  if (!agent_) return false;
  if (slab.outputs.empty()) {
    lock.unlock();
    std::vector<Array> outputs = make_outputs();
    lock.lock();
    if (slab.outputs.empty()) slab.outputs.swap(outputs);
    lock.unlock();
    outputs.clear();  // Those of the second thread to come, without the lock.
    lock.lock();
  }
  return true;
}

bool ActorPool::Impl::claim_lane_locked(Actor& actor) {
  for (const auto& slab : slabs_) {
    if (slab->moving) continue;
    for (size_t i = 0; i < slab->lanes.size(); ++i) {
      if (slab->lanes[i].state != Lane::State::kFree) continue;
      slab->lanes[i] = {Lane::State::kTaken, &actor};
      actor.life->slab = slab.get();
      actor.life->lane = i;
      actor.life->row = 0;
      return true;
    }
  }
  return false;
}

// Whether the next row is its last. It is row 0 of the next one, too, so the
// server must send all of it: the row before is not in that slab.
bool ActorPool::Impl::ends_rollout(const Actor& actor) const {
  return actor.life->row + 1 == options_.unroll_length;
}

// Where the row of the actor's lane is in an array of its slab.
size_t ActorPool::Impl::offset(const Actor& actor, int64_t row,
                               const RowLeaf& leaf) const {
  return (row * env_->columns + actor.life->lane * env_->num_envs) *
         leaf.nbytes;
}

void ActorPool::Impl::write_row(const Actor& actor, const Segments& message,
                                int64_t row, bool with_outputs) const {
  const Life& life = *actor.life;
  for (size_t i = 0; i < env_->leaves.size(); ++i) {
    const RowLeaf& leaf = env_->leaves[i];
    const wire::Piece piece = life.step.arrays[leaf.source];
    char* const data = life.slab->env[i].data;
    char* const to = data + offset(actor, row, leaf);
    if (!life.step.newest_frames || leaf.frame_nbytes == 0) {
      wire::copy(message, piece, to);
      continue;
    }
    const char* const before = data + offset(actor, row - 1, leaf);
    const size_t older = leaf.nbytes - leaf.frame_nbytes;
    for (int64_t k = 0; k < env_->num_envs; ++k) {
      const size_t at = k * leaf.nbytes;
      std::memcpy(to + at, before + at + leaf.frame_nbytes, older);
    }
    wire::copy_runs(message, piece, leaf.frame_nbytes, leaf.nbytes, to + older);
  }
  if (!with_outputs) return;
  for (size_t i = 0; i < agent_->leaves.size(); ++i) {
    const RowLeaf& leaf = agent_->leaves[i];
    char* const to = life.slab->outputs[i].data + offset(actor, row, leaf);
    const size_t size = env_->num_envs * leaf.nbytes;
    if (life.outputs.empty()) {
      std::memset(to, 0, size);
    } else {
      std::memcpy(to, life.outputs[i].data, size);
    }
  }
}

void ActorPool::Impl::write_state(const Actor& actor) const {
  const Life& life = *actor.life;
  const size_t K = env_->num_envs;
  for (size_t i = 0; i < env_->state_leaves.size(); ++i) {
    const StateLeaf& leaf = env_->state_leaves[i];
    leaf.copy(K, life.agent_state[i].data, K,
              life.slab->state[i].data + life.lane * K * leaf.inner,
              env_->columns);
  }
}

// Returns the slab if this was its last rollout; then it is the caller's.
ActorPool::Impl::Slab* ActorPool::Impl::finish_rollout_locked(Actor& actor) {
  Life& life = *actor.life;
  Slab* const slab = std::exchange(life.slab, nullptr);
  slab->lanes[life.lane] = {Lane::State::kFinished, nullptr};
  life.row = 0;
  actor.failures = 0;
  actor.has_finished = true;
  for (const Lane& lane : slab->lanes) {
    if (lane.state != Lane::State::kFinished) return nullptr;
  }
  slab->moving = true;
  return slab;
}

void ActorPool::Impl::discard_rollout_locked(Life& life) {
  Slab* const slab = std::exchange(life.slab, nullptr);
  if (!slab) return;
  const int64_t steps = std::exchange(life.row, 0) * env_->num_envs;
  slab->lanes[life.lane] = {};
  discarded_ += steps;
  in_slabs_ -= steps;
}

// Hands a complete slab to the learner; or, in its place, an older one that
// has been waiting for a slow stream for too long.
void ActorPool::Impl::deliver(Slab* slab) {
  const int64_t steps = options_.unroll_length * env_->columns;
  std::unique_ptr<Slab> complete;
  {
    Lock lock(mu_);
    const std::vector<Move> moves = straggler_moves_locked(*slab);
    if (!moves.empty()) {
      lock.unlock();
      for (const Move& move : moves) move_lane(move);
      lock.lock();
      finish_moves_locked(moves);
      slab = moves[0].old;
    }
    const auto found =
        std::find_if(slabs_.begin(), slabs_.end(),
                     [&](const auto& other) { return other.get() == slab; });
    complete = std::move(*found);
    slabs_.erase(found);
    in_slabs_ -= steps;
    enqueued_ += steps;
  }

  Nest item;
  item.structure = agent_->item;
  for (auto* arrays : {&complete->env, &complete->outputs, &complete->state}) {
    std::move(arrays->begin(), arrays->end(), std::back_inserter(item.leaves));
  }
  try {
    options_.learner_queue->enqueue_now(std::move(item));
  } catch (...) {
    {
      std::lock_guard lock(mu_);
      enqueued_ -= steps;
      discarded_ += steps;
    }
    fail(std::current_exception());
  }
}

// Without stragglers, streams are spread over at most this many slabs. If the
// complete slab is younger than an incomplete one by more, the two exchange
// rollouts so that the older one is complete. That takes streams that wait for
// their environments; with others it is tried again next time.
std::vector<ActorPool::Impl::Move> ActorPool::Impl::straggler_moves_locked(
    Slab& young) {
  const uint64_t lanes = young.lanes.size();
  const uint64_t spread = (actors_.size() + lanes - 1) / lanes;
  for (const auto& old : slabs_) {
    if (young.serial <= old->serial + spread) break;
    if (old->moving) continue;
    std::vector<Move> moves;
    bool possible = true;
    for (size_t i = 0; i < lanes; ++i) {
      const Lane& lane = old->lanes[i];
      if (lane.state == Lane::State::kFinished) continue;
      possible = possible && (lane.state == Lane::State::kFree ||
                              lane.actor->state == StreamState::kWaitingForEnv);
      moves.push_back({old.get(), i, &young, moves.size(), lane.actor});
    }
    if (!possible || moves.size() == lanes) continue;
    old->moving = true;
    for (const Move& move : moves) {
      if (move.actor) move.actor->state = StreamState::kMoving;
    }
    return moves;
  }
  return {};
}

// The finished rollout goes to the old slab, what there is of the other one to
// the young slab.
void ActorPool::Impl::move_lane(const Move& move) const {
  const int64_t K = env_->num_envs;
  const int64_t filled = move.actor ? move.actor->life->row + 1 : 0;
  const auto move_rows = [&](const std::vector<RowLeaf>& leaves,
                             const std::vector<Array>& old,
                             const std::vector<Array>& young) {
    for (size_t i = 0; i < leaves.size(); ++i) {
      const size_t size = K * leaves[i].nbytes;
      const size_t stride = env_->columns * leaves[i].nbytes;
      char* a = old[i].data + move.old_lane * size;
      char* b = young[i].data + move.young_lane * size;
      for (int64_t t = 0; t <= options_.unroll_length; ++t) {
        if (t < filled) {
          swap_bytes(a, b, size);
        } else {
          std::memcpy(a, b, size);
        }
        a += stride;
        b += stride;
      }
    }
  };
  move_rows(env_->leaves, move.old->env, move.young->env);
  move_rows(agent_->leaves, move.old->outputs, move.young->outputs);
  for (size_t i = 0; i < env_->state_leaves.size(); ++i) {
    const StateLeaf& leaf = env_->state_leaves[i];
    const size_t size = K * leaf.inner;
    char* a = move.old->state[i].data + move.old_lane * size;
    char* b = move.young->state[i].data + move.young_lane * size;
    for (size_t j = 0; j < leaf.outer; ++j) {
      swap_bytes(a, b, size);
      a += env_->columns * leaf.inner;
      b += env_->columns * leaf.inner;
    }
  }
}

void ActorPool::Impl::finish_moves_locked(const std::vector<Move>& moves) {
  for (const Move& move : moves) {
    move.old->lanes[move.old_lane] = {Lane::State::kFinished, nullptr};
    move.young->lanes[move.young_lane] = {};
    if (!move.actor) continue;
    Actor& actor = *move.actor;
    move.young->lanes[move.young_lane] = {Lane::State::kTaken, &actor};
    actor.life->slab = move.young;
    actor.life->lane = move.young_lane;
    if (is_over_locked(actor)) continue;
    actor.state = StreamState::kWaitingForEnv;
    if (actor.life->held) {  // It came during the move.
      actor.state = StreamState::kReceiving;
      to_resume_.push_back(&actor);
      changed_.notify_all();
    }
  }
  moves[0].young->moving = false;
}

// --- Ends of streams, and of the run -----------------------------------------

// The server failed, in one way or another. For any thread.
void ActorPool::Impl::give_up(Actor& actor, const std::string& why,
                              bool permanent) {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard lock(mu_);
    if (actor.life->closing || stopping_) return;
    count_failure_locked(actor, why, permanent);
    give_up_locked(actor);
    stream = actor.life->stream;
  }
  stream->cancel();  // on_closed will follow.
}

void ActorPool::Impl::give_up_locked(Actor& actor) {
  actor.life->closing = true;
  actor.life->welcomed = false;
  std::erase(waiting_for_room_, &actor);
  if (!is_busy(actor.state)) actor.state = StreamState::kClosing;
}

void ActorPool::Impl::count_failure_locked(Actor& actor, const std::string& why,
                                           bool permanent) {
  ++failures_;
  ++actor.failures;
  const int64_t limit =
      int64_t{options_.max_failures} * (actor.has_finished ? kPatience : 1);
  const std::string where = where_locked(actor) + ": ";
  note_locked(where + why);
  if (permanent) {
    fail_locked(std::make_exception_ptr(ServerMismatch(where + why)));
  } else if (actor.failures >= limit) {
    fail_locked(std::make_exception_ptr(ActorError(
        where + "failed " + std::to_string(actor.failures) +
        " times in a row without finishing a rollout; now: " + why)));
  }
}

// The stream has ended and nobody uses its lane: connects again, later.
void ActorPool::Impl::finish_close_locked(Actor& actor) {
  discard_rollout_locked(*actor.life);
  if (scout_ == &actor) scout_ = nullptr;
  double delay_s = 0;
  // A scout that was welcomed has no attempts; one that was turned away does.
  if (!actor.life->repeat || actor.attempts > 0) {
    delay_s = std::min(
        options_.first_backoff_s * std::exp2(std::max(actor.attempts - 1, 0)),
        kMaxBackoffS);
    // So that not all streams of a server come back at once.
    delay_s *= std::uniform_real_distribution(0.5, 1.0)(random_);
  }
  actor.state = StreamState::kWaitingToConnect;
  to_connect_.emplace(Clock::now() + seconds(delay_s), &actor);
  changed_.notify_all();
}

void ActorPool::Impl::fail(std::exception_ptr error) {
  std::lock_guard lock(mu_);
  fail_locked(std::move(error));
}

void ActorPool::Impl::fail_locked(std::exception_ptr error) {
  changed_.notify_all();
  if (failure_ || has_ended_locked()) return;
  failure_ = std::move(error);
}

// --- What one can ask --------------------------------------------------------

std::string ActorPool::Impl::where_locked(const Actor& actor) const {
  std::string text = actor.address + " (stream " + std::to_string(actor.index);
  if (env_) {
    const int64_t first = actor.index * env_->num_envs;
    text += ", environments " + std::to_string(first) + " to " +
            std::to_string(first + env_->num_envs - 1);
  }
  return text + "), step " +
         std::to_string(actor.life ? actor.life->next_seq : 0);
}

// How long the stream has been waiting for its server; 0 if it is not.
double ActorPool::Impl::waiting_s_locked(const Actor& actor,
                                         Clock::time_point now) const {
  if (actor.state != StreamState::kGreeting &&
      actor.state != StreamState::kWaitingForEnv) {
    return 0;
  }
  return std::chrono::duration<double>(now - actor.life->asked_at).count();
}

void ActorPool::Impl::note_locked(std::string line) {
  if (events_.size() == kMaxEvents) events_.pop_front();
  events_.push_back(std::move(line));
}

int64_t ActorPool::Impl::count() const {
  std::lock_guard lock(mu_);
  return received_;
}

std::vector<std::string> ActorPool::Impl::take_events() {
  std::lock_guard lock(mu_);
  std::vector<std::string> lines(std::make_move_iterator(events_.begin()),
                                 std::make_move_iterator(events_.end()));
  events_.clear();
  return lines;
}

PoolStats ActorPool::Impl::stats() const {
  PoolStats stats;
  std::map<std::string, size_t> by_address;
  std::vector<Histogram> latencies;
  std::lock_guard lock(mu_);
  stats.connects = connects_;
  stats.reconnects = reconnects_;
  stats.failures = failures_;
  stats.received = received_;
  stats.waiting_for_room = waiting_for_room_.size();
  stats.slabs_open = slabs_.size();
  const DynamicBatcher& batcher = *options_.inference_batcher;
  if (const int64_t batches = batcher.num_batches(); batches > 0) {
    stats.batch_fill = static_cast<double>(batcher.num_rows()) / batches;
  }

  const int64_t T = options_.unroll_length;
  const BatchingQueue& queue = *options_.learner_queue;
  stats.dequeued = T * (queue.dequeued() - dequeued_before_);
  const int64_t dropped = T * (queue.dropped() - dropped_before_);
  stats.discarded = discarded_ + dropped;
  stats.in_flight = in_slabs_ + enqueued_ - stats.dequeued - dropped;

  const auto now = Clock::now();
  for (const auto& actor : actors_) {
    const auto [found, is_new] =
        by_address.emplace(actor->address, stats.addresses.size());
    if (is_new) {
      stats.addresses.emplace_back().address = actor->address;
      latencies.emplace_back();
    }
    AddressStats& address = stats.addresses[found->second];
    ++address.streams;
    const bool connected = actor->life && actor->life->welcomed;
    address.connected += connected;
    address.steps += actor->steps;
    latencies[found->second].add(actor->latency);
    stats.connected += connected;
    stats.states.push_back(actor->state);
    stats.waiting_s.push_back(waiting_s_locked(*actor, now));
  }
  for (size_t i = 0; i < latencies.size(); ++i) {
    stats.addresses[i].p50_ms = latencies[i].quantile_ms(0.50);
    stats.addresses[i].p99_ms = latencies[i].quantile_ms(0.99);
    stats.addresses[i].env_s = latencies[i].total_s();
  }
  return stats;
}

// --- ActorPool ---------------------------------------------------------------

namespace {

PoolOptions checked(PoolOptions options) {
  const auto require = [](bool condition, const std::string& text) {
    if (!condition) throw std::invalid_argument(text);
  };
  require(options.unroll_length >= 1,
          "unroll_length is " + std::to_string(options.unroll_length) +
              ", expected at least 1");
  require(options.learner_queue != nullptr, "learner_queue is missing");
  require(options.inference_batcher != nullptr, "inference_batcher is missing");
  for (const auto& [what, batch_dim] :
       {std::pair("learner_queue", options.learner_queue->options().batch_dim),
        std::pair("inference_batcher",
                  options.inference_batcher->options().batch_dim)}) {
    require(batch_dim == 1,
            std::string(what) + " has batch_dim " + std::to_string(batch_dim) +
                ", expected 1: rollouts are [time, batch, ...]");
  }
  require(!options.addresses.empty(), "there are no env server addresses");
  require(options.inference_keys.empty() || options.named_rows,
          "inference_keys needs named_rows");
  require(options.max_failures >= 1, "max_failures is " +
                                         std::to_string(options.max_failures) +
                                         ", expected at least 1");
  require(options.first_backoff_s >= 0,
          "first_backoff_s is " + std::to_string(options.first_backoff_s) +
              ", expected at least 0");
  require(options.step_timeout_s >= 0,
          "step_timeout_s is " + std::to_string(options.step_timeout_s) +
              ", expected at least 0");
  require(options.initial_agent_state.structure != nullptr,
          "initial_agent_state is missing; without a state it is ()");
  check_initial_state(options.initial_agent_state);
  return options;
}

}  // namespace

ActorPool::ActorPool(PoolOptions options, std::unique_ptr<Transport> transport)
    : impl_(std::make_shared<Impl>(checked(std::move(options)),
                                   std::move(transport))) {}

ActorPool::~ActorPool() { stop(); }

void ActorPool::run() { impl_->run(); }
void ActorPool::stop() { impl_->stop(); }
int64_t ActorPool::count() const { return impl_->count(); }
PoolStats ActorPool::stats() const { return impl_->stats(); }
std::vector<std::string> ActorPool::take_events() {
  return impl_->take_events();
}

}  // namespace torchbeast
