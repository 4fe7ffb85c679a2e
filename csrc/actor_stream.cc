// SPDX-License-Identifier: Apache-2.0
//
// The connection of a stream: how it begins and ends, and when the stream
// connects again. actor_stream_steps.cc has what it does with a Step.

#include "actor_stream.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

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

}  // namespace

// --- Begin of the connection -------------------------------------------------

void ActorStream::connect(Lock& lock) {
  if (server_.address.empty()) {
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
  hello.newest_frames = server_.takes_newest_frames;
  hello.truncation_is_done = !options.named_rows;
  state_ = StreamState::kConnecting;
  ++server_.attempts;
  // Destroy the last connection without the lock: that calls the transport.
  std::optional<Life> before = std::exchange(life_, std::nullopt);
  life_.emplace(Life{.rollout = {index_}});
  const size_t limit = env ? env->max_message_bytes : kMaxMessageBytes;

  lock.unlock();
  before.reset();
  std::shared_ptr<Stream> stream =
      run_.transport_->connect(server_.address, this, limit);
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
    give_up_malformed(error);
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
          first ? "the server that the model was made for" : server_.address,
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
  if (std::exchange(server_.was_connected, true)) {
    ++run_.reconnects_;
    run_.add_event_locked(describe_locked() + ": connected again");
  }
  life_->agent_state = env->initial_state;
  run_.avoided_until_.erase(server_.address);
  state_ = StreamState::kWaitingForEnv;
  life_->asked_at = Clock::now();
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
    } else if (life_->welcomed ||
               std::exchange(server_.last_reason, why) != why) {
      run_.add_event_locked(describe_locked() + ": " + why);
    }  // One message is enough for attempts that fail for the same reason.
    give_up_locked();
  }
  if (!has_owner_locked()) finish_close_locked();
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

void ActorStream::give_up_malformed(const wire::DecodeError& error) {
  give_up("the server sent a malformed message: " + std::string(error.what()),
          false);
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
  ++server_.failures;
  const int64_t limit = int64_t{run_.options_.max_failures} *
                        (server_.has_finished ? kPatience : 1);
  const bool too_often = server_.failures >= limit;
  std::string reason = why;
  if (too_often && !permanent) {
    reason = "failed " + std::to_string(server_.failures) +
             " times in a row without finishing a rollout; now: " + why;
  }
  if (may_change &&
      ((permanent && fits_one) ||
       (too_often && run_.has_other_server_locked(server_.address)))) {
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
  if (server_.address != wanted_) {
    set_address_locked();
    return;
  }
  double delay_s = std::min(run_.options_.first_backoff_s *
                                std::exp2(std::max(server_.attempts - 1, 0)),
                            kMaxBackoffS);
  if (life_->refused) delay_s = kRefusedBackoffS;
  // A random delay, so that the streams of a server do not all come at once.
  delay_s *= std::uniform_real_distribution(0.5, 1.0)(run_.random_);
  const auto when = Clock::now() + seconds(delay_s);
  if (life_->refused || server_.attempts >= kMaxAttempts) {
    run_.avoid_locked(server_.address,
                      Clock::now() + seconds(kRefusedBackoffS));
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

// Makes the stream's address follow `wanted_`. Returns the connection that must
// be cancelled first, if there is one; then finish_close_locked() goes on.
std::shared_ptr<Stream> ActorStream::follow_address_locked() {
  if (server_.address == wanted_) return nullptr;
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
  run_.left_env_s_ += server_.latency.total_s();
  server_ = {
      .address = wanted_,
      .takes_newest_frames = !wanted_.starts_with("unix:") ||
                             wanted_.find("/dialed-") != std::string::npos};
  state_ = StreamState::kWaitingToConnect;
  std::erase_if(run_.to_connect_,
                [this](const auto& entry) { return entry.second == this; });
  run_.to_connect_.emplace(Clock::now(), this);
  run_.changed_.notify_all();
}

// --- For messages and statistics ---------------------------------------------

std::string ActorStream::describe_locked() const {
  std::string text = server_.address + " (stream " + std::to_string(index_);
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
