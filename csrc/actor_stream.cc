// SPDX-License-Identifier: Apache-2.0

#include "actor_stream.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "agent_spec.h"
#include "env_spec.h"
#include "errors.h"
#include "pool_run.h"
#include "same_env.h"
#include "text.h"

namespace torchbeast {
namespace {

constexpr double kMaxBackoffS = 1.0;
// The wait before a server that does not fit is asked again: somebody must
// start it with other flags first.
constexpr int kRefusedBackoffS = 60;
// After this many attempts to connect, some seconds, a server that waits for a
// stream may have this one.
constexpr int kMaxAttempts = 8;
// A stream that has finished a rollout before may fail this many times
// max_failures (as in core.running.supervise.RestartBudget).
constexpr int kPatience = 4;
constexpr const char* kMalformed = "the server sent a malformed message: ";

}  // namespace

// --- The thread in PoolRun::run() --------------------------------------------

void ActorStream::connect(Lock& lock) {
  if (address_.empty()) {
    state_ = StreamState::kUnused;
    std::optional<Life> last = std::exchange(life_, std::nullopt);
    lock.unlock();
    last.reset();  // Without the lock: this calls the transport.
    lock.lock();
    return;
  }
  const PoolOptions& options = run_.options_;
  const EnvSpec* const env = run_.env_.get();
  wire::Hello hello;
  hello.version = options.version;
  hello.run_id = options.run_id;
  hello.info_keys = options.info_keys;
  hello.seed = options.seed;
  hello.first_env_id = index_ * options.num_envs;
  hello.incarnation = options.first_incarnation + incarnations_;
  hello.newest_frames = takes_newest_frames_;
  hello.truncation_is_done = !options.named_rows;
  state_ = StreamState::kConnecting;
  ++attempts_;
  // Destroy the last connection without the lock: that calls the transport.
  std::optional<Life> before = std::exchange(life_, std::nullopt);
  life_.emplace(Life{.rollout = {index_}});
  const size_t limit = env ? env->max_message_bytes : kMaxMessageBytes;

  lock.unlock();
  before.reset();
  std::shared_ptr<Stream> stream =
      run_.transport_->connect(address_, this, limit);
  lock.lock();
  life_->stream = stream;
  lock.unlock();
  stream->start(wire::hello_to_server(hello));
  lock.lock();
  life_->started = true;
  if (life_->closing) {  // set_addresses() has taken the address meanwhile.
    lock.unlock();
    stream->cancel();
    lock.lock();
  }
}

// Continues with the Step that waited; the state is kReceiving. If the Step
// waited for room, its row is already the last one of a finished rollout.
void ActorStream::resume(Lock& lock) {
  Segments message = *std::exchange(life_->held, std::nullopt);
  lock.unlock();
  try {
    if (life_->rollout.slab) {
      receive(std::move(message));
    } else {
      begin_rollout(std::move(message));
    }
  } catch (const wire::DecodeError& error) {
    give_up(kMalformed + std::string(error.what()), false);
  }
  lock.lock();
}

// --- Events of the transport -------------------------------------------------

void ActorStream::on_connected() {
  std::lock_guard lock(run_.mu_);
  if (state_ == StreamState::kConnecting) {
    state_ = StreamState::kGreeting;
    life_->asked_at = Clock::now();
  }
}

void ActorStream::on_message(Segments message) {
  try {
    const auto [kind, body] = wire::open(message);
    switch (kind) {
      case wire::Kind::kWelcome:
        on_welcome(message, body);
        return;
      case wire::Kind::kStep:
        on_step(std::move(message));
        return;
      case wire::Kind::kFailure: {
        const wire::Failure failure = wire::decode_failure(message, body);
        give_up("the server reports a failure: " +
                    printable(failure.text, kMaxTextBytes),
                failure.permanent);
        return;
      }
      case wire::Kind::kGoodbye:
        on_goodbye(wire::decode_goodbye(message, body));
        return;
    }
  } catch (const wire::DecodeError& error) {
    give_up(kMalformed + std::string(error.what()), false);
  } catch (...) {
    run_.fail(std::current_exception());
  }
}

void ActorStream::on_goodbye(const wire::Goodbye& goodbye) {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard lock(run_.mu_);
    if (life_->closing || run_.stopping_) return;
    run_.add_event_locked(describe_locked() + ": the server says goodbye: " +
                          printable(goodbye.reason, kMaxTextBytes));
    give_up_locked();
    stream = life_->stream;
  }
  stream->cancel();
}

void ActorStream::on_welcome(const Segments& message, wire::Piece body) {
  const wire::Welcome welcome = wire::decode_welcome(message, body);
  const EnvSpec* env = nullptr;
  {
    std::lock_guard lock(run_.mu_);
    if (life_->closing || run_.stopping_) return;
    if (life_->welcomed) throw wire::DecodeError("a second Welcome");
    env = run_.env_.get();
  }
  try {
    if (welcome.protocol != wire::kProtocol) {
      throw ActorError(
          "the server speaks version " + std::to_string(welcome.protocol) +
          " of the protocol, expected " + std::to_string(wire::kProtocol) +
          "; install the same version on both sides");
    }
    if (welcome.num_envs != run_.options_.num_envs) {
      throw ActorError("the server plays " + std::to_string(welcome.num_envs) +
                       " environments per stream, expected " +
                       std::to_string(run_.options_.num_envs) +
                       " (num_envs); all servers of a run need the same "
                       "--envs_per_stream");
    }
    if (!env) {
      const auto& first = run_.options_.welcome;
      env = run_.set_env(make_env_spec(
          first ? "the server that the model was made for" : address_,
          first ? *first : welcome, message.size(), run_.spec_options_,
          *run_.buffers_));
    }
    check_same(*env, welcome);  // Another Welcome may have been the first.
  } catch (const ActorError& error) {
    give_up(error.what(), true);
    return;
  }

  std::lock_guard lock(run_.mu_);
  if (life_->closing || run_.stopping_) return;
  life_->welcomed = true;
  ++run_.connects_;
  ++incarnations_;
  if (std::exchange(was_connected_, true)) {
    ++run_.reconnects_;
    run_.add_event_locked(describe_locked() + ": connected again");
  }
  life_->agent_state = env->initial_state;
  run_.avoided_until_.erase(address_);
  state_ = StreamState::kWaitingForEnv;
  life_->asked_at = Clock::now();
}

void ActorStream::on_step(Segments message) {
  {
    std::lock_guard lock(run_.mu_);
    if (life_->closing || run_.stopping_) return;
    if (!life_->welcomed) throw wire::DecodeError("a Step before the Welcome");
    // The transport of a stream that began before the first Welcome lets larger
    // messages pass.
    if (message.size() > run_.env_->max_message_bytes) {
      throw wire::DecodeError("a Step of " + std::to_string(message.size()) +
                              " bytes, expected at most " +
                              std::to_string(run_.env_->max_message_bytes));
    }
    if (state_ == StreamState::kMoving && !life_->held) {
      life_->held = std::move(message);
      return;
    }
    if (state_ != StreamState::kWaitingForEnv) {
      throw wire::DecodeError("a Step before the Action it should answer");
    }
    state_ = StreamState::kReceiving;
  }
  receive(std::move(message));
}

void ActorStream::on_closed(const std::string& why, bool transient) {
  std::lock_guard lock(run_.mu_);
  life_->closed = true;
  if (run_.stopping_) return;
  if (!life_->closing) {
    if (!transient) {
      // A server without a right certificate does not fit, either.
      const bool may_change = run_.options_.servers_may_change;
      count_failure_locked(why, may_change && !life_->welcomed);
    } else if (life_->welcomed || std::exchange(last_reason_, why) != why) {
      run_.add_event_locked(describe_locked() + ": " + why);
    }  // One message is enough for attempts that fail for the same reason.
    give_up_locked();
  }
  if (!has_owner_locked()) finish_close_locked();
}

// --- The owner of the stream -------------------------------------------------

// Writes the row of the Step to the stream's rollout. Then asks the agent; if
// the row was the last one, begins the next rollout first.
void ActorStream::receive(Segments message) {
  Life& life = *life_;
  const int64_t K = run_.options_.num_envs;
  const auto now = Clock::now();
  try {
    decode(message);
  } catch (const wire::DecodeError& error) {
    {
      std::lock_guard lock(run_.mu_);
      if (finish_if_ended_locked()) return;
      state_ = StreamState::kWaitingForEnv;
    }
    throw;  // on_message or resume() handles it.
  }

  if (life.next_seq > 0) {  // The first row of a life answers no action.
    const AgentSpec* agent = nullptr;
    {
      Lock lock(run_.mu_);
      latency_.add(now - life.asked_at);
      agent = run_.agent_.get();
      if (agent) run_.slabs_->make_outputs(lock, *life.rollout.slab, *agent);
    }
    write_row(message, life.rollout.row + 1, agent);

    bool ends = false;
    Slab* complete = nullptr;
    {
      std::lock_guard lock(run_.mu_);
      ++life.next_seq;
      ++life.rollout.row;
      attempts_ = 0;
      last_reason_.clear();
      steps_ += K;
      run_.received_ += K;
      run_.in_slabs_ += K;
      ends = life.rollout.row == run_.options_.unroll_length;
      if (ends) {
        complete = run_.slabs_->finish_locked(life.rollout);
        failures_ = 0;
        has_finished_ = true;
      } else {
        if (finish_if_ended_locked()) return;
        state_ = StreamState::kWaitingForInference;
      }
    }
    if (!ends) {
      ask_agent();
      return;
    }
    if (complete) run_.deliver(complete);
  } else {
    std::lock_guard lock(run_.mu_);
    ++life.next_seq;
  }
  begin_rollout(std::move(message));
}

// Decodes the Step into life_->step and checks all of it. Throws DecodeError.
void ActorStream::decode(const Segments& message) {
  Life& life = *life_;
  const EnvSpec& env = *run_.env_;
  wire::decode_step(message, wire::open(message).body, env.welcome.step_arrays,
                    env.num_envs, &life.step);
  const uint64_t seq = life.step.seq;
  if (seq != life.next_seq) {
    throw wire::DecodeError("Step " + std::to_string(seq) + ", expected Step " +
                            std::to_string(life.next_seq));
  }
  if (life.step.newest_frames && !life.rollout.slab) {
    throw wire::DecodeError("the first Step has only the newest frames");
  }
  if (life.step.newest_frames &&
      run_.slabs_->is_before_last_row(life.rollout)) {
    throw wire::DecodeError("Step " + std::to_string(seq) +
                            " has only the newest frames, expected all");
  }
  check_values(env, message, life.step);
}

// Claims a lane for the stream's next rollout. Its row 0 is the row of the
// Step. If the learner queue is full, the Step waits until there is room.
void ActorStream::begin_rollout(Segments message) {
  Life& life = *life_;
  Slabs& slabs = *run_.slabs_;
  const AgentSpec* agent = nullptr;
  std::unique_ptr<Slab> new_slab;  // If not used, destroyed without the lock.
  {
    Lock lock(run_.mu_);
    if (finish_if_ended_locked()) return;
    if (!run_.has_room_locked(run_.waiting_for_room_.size())) {
      life.held = std::move(message);
      state_ = StreamState::kWaitingForRoom;
      run_.waiting_for_room_.push_back(this);
      return;
    }
    if (!slabs.claim_lane_locked(life.rollout)) {
      lock.unlock();
      new_slab = slabs.make_slab();
      lock.lock();
      if (finish_if_ended_locked()) return;
      // Another thread may have added a slab meanwhile.
      if (!slabs.claim_lane_locked(life.rollout)) {
        slabs.add_locked(std::move(new_slab));
        slabs.claim_lane_locked(life.rollout);
      }
    }
    agent = run_.agent_.get();
    if (agent) slabs.make_outputs(lock, *life.rollout.slab, *agent);
  }
  write_row(message, 0, agent);
  slabs.write_state(life.rollout, life.agent_state);
  {
    std::lock_guard lock(run_.mu_);
    if (finish_if_ended_locked()) return;
    state_ = StreamState::kWaitingForInference;
  }
  ask_agent();
}

// `agent` is null until the agent has answered once: no outputs to write.
void ActorStream::write_row(const Segments& message, int64_t row,
                            const AgentSpec* agent) {
  const Slabs& slabs = *run_.slabs_;
  slabs.write_env_row(life_->rollout, row, message, life_->step);
  if (agent) slabs.write_outputs(life_->rollout, row, *agent, life_->outputs);
}

// The inputs are views of the row in the slab. Nobody writes to this row before
// the answer, and the inputs own the slab's memory.
void ActorStream::ask_agent() {
  const Life& life = *life_;
  const EnvSpec& env = *run_.env_;
  Nest inputs;
  inputs.structure = env.inputs;
  inputs.leaves.reserve(env.inputs->num_leaves);
  for (const size_t i : env.inference_leaves) {
    const RowLeaf& leaf = env.leaves[i];
    const Array& array = life.rollout.slab->env[i];
    const size_t offset =
        run_.slabs_->offset(life.rollout, life.rollout.row, leaf);
    inputs.leaves.push_back({leaf.dtype, leaf.with_rows(1, env.num_envs),
                             array.data + offset, array.owner});
  }
  for (const Array& array : life.agent_state) inputs.leaves.push_back(array);
  try {
    run_.options_.inference_batcher->compute_async(
        std::move(inputs),
        [weak = run_.weak_from_this(), this](const Outputs* outputs,
                                             std::exception_ptr error) {
          // `weak` also guards `this`: the run owns the stream.
          if (const auto run = weak.lock()) on_answer(outputs, error);
        });
  } catch (...) {
    run_.fail(std::current_exception());
  }
}

// Runs in the thread that calls Batch::set_outputs, or closes the batcher. Must
// not wait. Must not throw: the exception would come out of that call.
void ActorStream::on_answer(const Outputs* outputs, std::exception_ptr error) {
  Life& life = *life_;
  if (error) {
    // The lane stays claimed: an inference thread may still read the failed
    // batch.
    run_.fail(error);
    return;
  }
  try {
    const EnvSpec& env = *run_.env_;
    const AgentSpec* agent = nullptr;
    bool wants_whole = false;
    {
      std::lock_guard lock(run_.mu_);
      if (run_.stopping_) return;  // tear_down() may change the stream then.
      agent = run_.agent_.get();
      // The next Step is the last row of this rollout and row 0 of the next
      // one, whose slab has no older frames. So the server must send all
      // frames.
      wants_whole = takes_newest_frames_ && env.has_stacks &&
                    run_.slabs_->is_before_last_row(life.rollout);
    }
    Nest answer = outputs->copy(*run_.buffers_);
    if (!agent) {
      auto made =
          std::make_unique<const AgentSpec>(make_agent_spec(env, answer));
      std::lock_guard lock(run_.mu_);
      if (!run_.agent_) run_.agent_ = std::move(made);
      agent = run_.agent_.get();
    }
    check_answer(env, *agent, answer);

    std::vector<std::string> converted;
    std::string message = wire::action_to_server(
        life.next_seq - 1, action_arrays(env, *agent, answer, converted),
        wants_whole);

    const auto state = answer.leaves.begin() + agent->leaves.size();
    life.outputs.assign(answer.leaves.begin(), state);
    life.agent_state.assign(state, answer.leaves.end());
    std::shared_ptr<Stream> stream;
    {
      std::lock_guard lock(run_.mu_);
      if (finish_if_ended_locked()) return;
      state_ = StreamState::kWaitingForEnv;
      life.asked_at = Clock::now();
      stream = life.stream;
    }
    stream->send(std::move(message));
  } catch (...) {
    run_.fail(std::current_exception());
  }
}

// The stream's rollout has been moved to another slab.
void ActorStream::finish_move_locked() {
  if (finish_if_ended_locked()) return;
  state_ = StreamState::kWaitingForEnv;
  if (life_->held) {  // It came during the move.
    state_ = StreamState::kReceiving;
    run_.to_resume_.push_back(this);
    run_.changed_.notify_all();
  }
}

// --- Ends of the stream ------------------------------------------------------

bool ActorStream::has_owner_locked() const {
  return state_ == StreamState::kReceiving ||
         state_ == StreamState::kWaitingForInference ||
         state_ == StreamState::kMoving;
}

// The owner calls this before it changes the state. If the stream or the run
// has ended meanwhile, handles that and returns true: the caller must do no
// more.
bool ActorStream::finish_if_ended_locked() {
  if (run_.stopping_) return true;
  if (!life_->closing) return false;
  state_ = StreamState::kClosing;
  if (life_->closed) finish_close_locked();
  return true;
}

// Ends the stream because its server failed. Any thread may call it.
void ActorStream::give_up(const std::string& why, bool permanent) {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard lock(run_.mu_);
    if (life_->closing || run_.stopping_) return;
    count_failure_locked(why, permanent);
    give_up_locked();
    stream = life_->stream;
  }
  stream->cancel();  // on_closed will follow.
}

void ActorStream::give_up_locked() {
  life_->closing = true;
  life_->welcomed = false;
  std::erase(run_.waiting_for_room_, this);
  if (!has_owner_locked()) state_ = StreamState::kClosing;
}

void ActorStream::count_failure_locked(const std::string& why, bool permanent) {
  ++run_.failures_;
  const std::string where = describe_locked() + ": ";
  const bool may_change = run_.options_.servers_may_change;
  const bool fits_one = run_.options_.welcome || run_.connects_ > 0;
  ++failures_;
  const int64_t limit =
      int64_t{run_.options_.max_failures} * (has_finished_ ? kPatience : 1);
  const bool too_often = failures_ >= limit;
  std::string reason = why;
  if (too_often && !permanent) {
    reason = "failed " + std::to_string(failures_) +
             " times in a row without finishing a rollout; now: " + why;
  }
  if (may_change && ((permanent && fits_one) ||
                     (too_often && run_.has_other_server_locked(address_)))) {
    life_->refused = true;
    run_.add_event_locked(where +
                          "refused; the run goes on without it and asks it "
                          "again within " +
                          std::to_string(kRefusedBackoffS) + " s: " + reason);
    return;
  }
  run_.add_event_locked(where + why);
  if (permanent && (!may_change || too_often)) {
    run_.fail_locked(std::make_exception_ptr(ServerMismatch(where + why)));
  } else if (too_often) {
    run_.fail_locked(std::make_exception_ptr(ActorError(where + reason)));
  }
}

// The stream has ended and no thread owns it. Discards its rollout and lets it
// connect again after a back-off.
void ActorStream::finish_close_locked() {
  run_.discard_rollout_locked(life_->rollout);
  if (address_ != wanted_) {
    set_address_locked();
    return;
  }
  double delay_s = std::min(
      run_.options_.first_backoff_s * std::exp2(std::max(attempts_ - 1, 0)),
      kMaxBackoffS);
  if (life_->refused) delay_s = kRefusedBackoffS;
  // A random delay, so that the streams of a server do not all come at once.
  delay_s *= std::uniform_real_distribution(0.5, 1.0)(run_.random_);
  const auto when = Clock::now() + seconds(delay_s);
  if (life_->refused || attempts_ >= kMaxAttempts) {
    run_.avoid_locked(address_, Clock::now() + seconds(kRefusedBackoffS));
    if (run_.give_place_locked(*this)) {
      if (!life_->refused) {
        run_.add_event_locked(describe_locked() +
                              ": cannot be reached; it waits, and " + wanted_ +
                              " gets its place of max_streams");
      }
      set_address_locked();
      return;
    }
  }
  state_ = StreamState::kWaitingToConnect;
  run_.to_connect_.emplace(when, this);
  run_.changed_.notify_all();
}

// --- Changes of the address --------------------------------------------------

// Makes `address_` follow `wanted_`. Returns the connection that must be
// cancelled first, if there is one; then finish_close_locked() goes on.
std::shared_ptr<Stream> ActorStream::follow_address_locked() {
  if (address_ == wanted_) return nullptr;
  if (state_ == StreamState::kUnused ||
      state_ == StreamState::kWaitingToConnect) {
    set_address_locked();
    return nullptr;
  }
  if (life_->closing) return nullptr;
  give_up_locked();
  // If connect() has not started the connection yet, it cancels it.
  return life_->started ? life_->stream : nullptr;
}

// There is no connection. Lets the thread in run() connect to the new address,
// or, if there is none, destroy the last connection.
void ActorStream::set_address_locked() {
  address_ = wanted_;
  takes_newest_frames_ = !address_.starts_with("unix:") ||
                         address_.find("/dialed-") != std::string::npos;
  was_connected_ = false;
  attempts_ = 0;
  last_reason_.clear();
  failures_ = 0;
  has_finished_ = false;
  steps_ = 0;
  run_.left_env_s_ += latency_.total_s();
  latency_ = {};
  state_ = StreamState::kWaitingToConnect;
  std::erase_if(run_.to_connect_,
                [this](const auto& entry) { return entry.second == this; });
  run_.to_connect_.emplace(Clock::now(), this);
  run_.changed_.notify_all();
}

// --- For messages and statistics ---------------------------------------------

std::string ActorStream::describe_locked() const {
  std::string text = address_ + " (stream " + std::to_string(index_);
  const int64_t K = run_.options_.num_envs;
  text += ", environments " + std::to_string(index_ * K) + " to " +
          std::to_string(index_ * K + K - 1);
  return text + "), step " + std::to_string(life_ ? life_->next_seq : 0);
}

// How long the stream has waited for its server; 0 if it does not wait for it.
double ActorStream::waiting_s_locked(Clock::time_point now) const {
  if (state_ != StreamState::kGreeting &&
      state_ != StreamState::kWaitingForEnv) {
    return 0;
  }
  return std::chrono::duration<double>(now - life_->asked_at).count();
}

}  // namespace torchbeast
