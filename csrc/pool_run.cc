// SPDX-License-Identifier: Apache-2.0

#include "pool_run.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstdio>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "batching_queue.h"
#include "dynamic_batcher.h"
#include "interrupt.h"

namespace torchbeast {
namespace {

constexpr size_t kMaxEvents = 1000;
// How often to look for servers that have not answered in time: after this
// fraction of step_timeout_s, but at least once in kMaxCheckS.
constexpr double kCheckFraction = 0.05;
constexpr double kMaxCheckS = 1.0;

}  // namespace

PoolRun::PoolRun(PoolOptions options, std::unique_ptr<Transport> transport)
    : options_(std::move(options)),
      spec_options_{
          options_.initial_agent_state,
          options_.named_rows,
          options_.inference_keys,
          options_.value_ranges,
          options_.mask_sizes,
          num_columns(options_.num_envs, options_.learner_queue->options())},
      transport_(std::move(transport)) {
  for (size_t i = 0; i < options_.max_streams; ++i) {
    streams_.push_back(std::make_unique<ActorStream>(*this, i));
  }
  set_addresses(options_.addresses);
}

// --- The thread in run() -----------------------------------------------------

void PoolRun::run() {
  {
    std::lock_guard lock(mu_);
    if (called_) {
      throw std::runtime_error(
          "ActorPool.run() was called twice; make a new ActorPool to play "
          "again");
    }
    called_ = true;
    if (stopping_) return;
    running_ = true;
    thread_ = std::this_thread::get_id();
    before_ = options_.learner_queue->counts();
  }
  // Listeners cannot be removed, and may be called after this object is gone.
  const auto listen = [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->wake_run();
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
  } catch (const std::exception&) {  // Not Interrupted, which is a signal's.
    if (!options_.named_rows) {
      options_.learner_queue->fail(failure);
      options_.inference_batcher->fail(failure);
    }
    throw;
  }
}

void PoolRun::stop() {
  Lock lock(mu_);
  stopping_ = true;
  changed_.notify_all();
  if (thread_ == std::this_thread::get_id()) return;  // A signal handler.
  while (running_) wait_interruptibly(lock, changed_);
}

size_t PoolRun::set_addresses(const std::vector<std::string>& addresses) {
  std::vector<std::shared_ptr<Stream>> to_cancel;
  size_t left_out = 0;
  {
    std::lock_guard lock(mu_);
    if (stopping_) return 0;
    left_out = assign_addresses_locked(addresses);
    num_wanted_ = addresses.size() - left_out;
    for (const auto& stream : streams_) {
      if (stream->state_ == StreamState::kWaitingToConnect &&
          is_avoided_locked(stream->wanted_)) {
        give_place_locked(*stream);  // follow_address_locked() does the rest.
      }
    }
    if (slabs_) slabs_->set_num_streams_locked(num_wanted_);
    for (const auto& stream : streams_) {
      if (auto to_end = stream->follow_address_locked()) {
        to_cancel.push_back(std::move(to_end));
      }
    }
  }
  for (const auto& stream : to_cancel) {
    stream->cancel();  // on_closed will follow.
  }
  return left_out;
}

// Sets the address that each stream shall have. Returns how many addresses got
// no stream.
size_t PoolRun::assign_addresses_locked(
    const std::vector<std::string>& addresses) {
  std::map<std::string, std::deque<ActorStream*>> present;
  for (const auto& stream : streams_) {
    if (!stream->wanted_.empty()) {
      present[stream->wanted_].push_back(stream.get());
    }
  }
  std::deque<std::string> added;
  for (const std::string& address : addresses) {
    std::deque<ActorStream*>& streams = present[address];
    if (streams.empty()) {
      added.push_back(address);
    } else {
      streams.pop_front();  // This stream stays.
    }
  }
  for (const auto& [address, streams] : present) {
    for (ActorStream* const stream : streams) stream->wanted_.clear();
  }
  std::stable_partition(added.begin(), added.end(), [&](const auto& address) {
    return !is_avoided_locked(address);
  });
  // First the streams that need not end before.
  for (const bool is_unused : {true, false}) {
    for (const auto& stream : streams_) {
      if (added.empty()) break;
      if (!stream->wanted_.empty() ||
          stream->server_.address.empty() != is_unused) {
        continue;
      }
      stream->wanted_ = std::move(added.front());
      added.pop_front();
    }
  }
  left_out_ = std::move(added);
  return left_out_.size();
}

bool PoolRun::is_avoided_locked(const std::string& address) const {
  const auto found = avoided_until_.find(address);
  return found != avoided_until_.end() && found->second > Clock::now();
}

void PoolRun::work() {
  Lock lock(mu_);
  if (options_.step_timeout_s > 0) next_timeout_check_ = Clock::now();
  while (!has_ended_locked()) {
    if (Clock::now() >= next_timeout_check_) give_up_unresponsive_locked(lock);
    if (ActorStream* stream = next_to_resume_locked()) {
      stream->resume(lock);
    } else if (ActorStream* due = next_to_connect_locked()) {
      due->connect(lock);
    } else if (to_connect_.empty()) {
      wait_interruptibly(lock, changed_, next_timeout_check_);
    } else {
      wait_interruptibly(
          lock, changed_,
          std::min(to_connect_.begin()->first, next_timeout_check_));
    }
  }
}

// Ends the streams whose servers have not answered for step_timeout_s. Releases
// the lock meanwhile.
void PoolRun::give_up_unresponsive_locked(Lock& lock) {
  const auto now = Clock::now();
  const double limit_s = options_.step_timeout_s;
  std::vector<std::shared_ptr<Stream>> to_cancel;
  for (const auto& stream : streams_) {
    if (stream->waiting_s_locked(now) <= limit_s || stream->life_->closing) {
      continue;
    }
    std::array<char, 32> limit = {};
    std::snprintf(limit.data(), limit.size(), "%g", limit_s);
    add_event_locked(stream->describe_locked() +
                     ": the server has not answered for " + limit.data() +
                     " s; connecting anew");
    stream->give_up_locked();
    to_cancel.push_back(stream->life_->stream);
  }
  next_timeout_check_ =
      now + seconds(std::min(kCheckFraction * limit_s, kMaxCheckS));
  lock.unlock();
  for (const auto& stream : to_cancel) {
    stream->cancel();  // on_closed will follow.
  }
  lock.lock();
}

// Called when the learner queue has room, and when the queue or the batcher is
// closed. Wakes the thread in run() if it has something to do.
void PoolRun::wake_run() {
  std::lock_guard lock(mu_);
  if (!waiting_for_room_.empty() || has_ended_locked()) changed_.notify_all();
}

ActorStream* PoolRun::next_to_resume_locked() {
  if (!to_resume_.empty()) {
    ActorStream* const stream = to_resume_.front();
    to_resume_.pop_front();
    return stream;
  }
  if (waiting_for_room_.empty() ||
      !has_room_locked(waiting_for_room_.size() - 1)) {
    return nullptr;
  }
  ActorStream* const stream = waiting_for_room_.front();
  waiting_for_room_.pop_front();
  stream->state_ = StreamState::kReceiving;
  return stream;
}

ActorStream* PoolRun::next_to_connect_locked() {
  if (to_connect_.empty()) return nullptr;
  const auto first = to_connect_.begin();
  if (first->first > Clock::now()) return nullptr;
  ActorStream* const stream = first->second;
  to_connect_.erase(first);
  return stream;
}

void PoolRun::tear_down() {
  {
    std::lock_guard lock(mu_);
    stopping_ = true;
  }
  transport_->shutdown();
  // No events come any more. Answers of the batcher and calls of stats() may
  // still come. Declared before the lock, so destroyed without it:
  std::vector<std::shared_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Slab>> slabs;
  std::vector<std::optional<Segments>> messages;
  std::lock_guard lock(mu_);
  for (const auto& stream : streams_) {
    stream->state_ = StreamState::kStopped;
    if (!stream->life_) continue;
    // A thread in on_answer may still use the other members of life_.
    ActorStream::Life& life = *stream->life_;
    discard_rollout_locked(life.rollout);
    life.welcomed = false;
    streams.push_back(std::move(life.stream));
    messages.push_back(std::exchange(life.held, std::nullopt));
  }
  if (slabs_) {
    const int64_t steps = options_.unroll_length * options_.num_envs *
                          slabs_->num_finished_locked();
    discarded_ += steps;
    in_slabs_ -= steps;
    slabs = slabs_->clear_locked();
  }
  assert(in_slabs_ == 0);
  waiting_for_room_.clear();
  to_resume_.clear();
  to_connect_.clear();
  running_ = false;
  changed_.notify_all();
}

// --- Called by the streams ---------------------------------------------------

bool PoolRun::has_ended_locked() const {
  return stopping_ || failure_ || options_.learner_queue->is_closed() ||
         options_.inference_batcher->is_closed();
}

// Whether a stream may begin a rollout while `others` streams wait for room.
// The rollouts of the waiting streams do not count towards the maximum of the
// queue. So each batch that the learner takes lets as many rollouts begin as it
// holds, and rollouts end one after another. If all streams waited until the
// queue is below its maximum, all would begin at the same time, and the learner
// would wait for them.
bool PoolRun::has_room_locked(size_t others) const {
  const int64_t theirs = static_cast<int64_t>(others) * options_.num_envs;
  return options_.learner_queue->has_room(theirs);
}

// Sets env_, unless another thread was faster. Returns env_.
const EnvSpec* PoolRun::set_env(EnvSpec env) {
  std::lock_guard lock(mu_);
  if (env_) return env_.get();
  auto made = std::make_unique<const EnvSpec>(std::move(env));
  slabs_ = std::make_unique<Slabs>(*made, options_.unroll_length, num_wanted_,
                                   options_.learner_queue->buffers());
  env_ = std::move(made);
  return env_.get();
}

void PoolRun::discard_rollout_locked(Rollout& rollout) {
  if (!rollout.slab) return;
  const int64_t steps = slabs_->discard_locked(rollout) * options_.num_envs;
  discarded_ += steps;
  in_slabs_ -= steps;
}

// Enqueues a slab for the learner that is complete, after the moves.
void PoolRun::deliver(Slab* slab, const std::vector<Slabs::Move>& moves) {
  const int64_t steps = options_.unroll_length * env_->columns;
  for (const Slabs::Move& move : moves) slabs_->move(move, *agent_);
  std::unique_ptr<Slab> complete;
  {
    std::lock_guard lock(mu_);
    if (!moves.empty()) finish_moves_locked(moves);
    complete = slabs_->remove_locked(slab);
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

// If an older slab than `young` has waited for a slow stream for too long,
// begins the moves that complete the older one.
std::vector<Slabs::Move> PoolRun::begin_moves_locked(Slab& young) {
  std::vector<Slabs::Move> moves =
      slabs_->plan_moves_locked(young, [this](size_t stream) {
        return streams_[stream]->state_ == StreamState::kWaitingForEnv;
      });
  for (const Slabs::Move& move : moves) {
    if (move.rollout) {
      streams_[move.rollout->stream]->state_ = StreamState::kMoving;
    }
  }
  return moves;
}

void PoolRun::finish_moves_locked(const std::vector<Slabs::Move>& moves) {
  slabs_->finish_moves_locked(moves);
  for (const Slabs::Move& move : moves) {
    if (move.rollout) streams_[move.rollout->stream]->finish_move_locked();
  }
}

// While another server waits for a stream, this one gets none.
void PoolRun::avoid_locked(const std::string& address,
                           Clock::time_point until) {
  std::erase_if(avoided_until_,
                [](const auto& entry) { return entry.second < Clock::now(); });
  avoided_until_[address] = until;
}

// The server of the stream was refused or cannot be reached. Lets an address
// that waits for a stream have this one, if there is such an address. The
// stream's own address waits then.
bool PoolRun::give_place_locked(ActorStream& stream) {
  const auto next =
      std::find_if(left_out_.begin(), left_out_.end(),
                   [&](const auto& a) { return !is_avoided_locked(a); });
  if (next == left_out_.end()) return false;
  std::string address = std::move(*next);
  left_out_.erase(next);
  left_out_.push_back(std::exchange(stream.wanted_, std::move(address)));
  return true;
}

// Whether a server at another address is connected that has not failed lately.
bool PoolRun::has_other_server_locked(const std::string& address) const {
  return std::any_of(streams_.begin(), streams_.end(), [&](const auto& stream) {
    return stream->server_.address != address && stream->life_ &&
           stream->life_->welcomed && stream->server_.failures == 0;
  });
}

void PoolRun::fail(std::exception_ptr error) {
  std::lock_guard lock(mu_);
  fail_locked(std::move(error));
}

void PoolRun::fail_locked(std::exception_ptr error) {
  changed_.notify_all();
  if (failure_ || has_ended_locked()) return;
  failure_ = std::move(error);
}

void PoolRun::add_event_locked(std::string line) {
  if (events_.size() == kMaxEvents) events_.pop_front();
  events_.push_back(std::move(line));
}

// --- Statistics --------------------------------------------------------------

int64_t PoolRun::count() const {
  std::lock_guard lock(mu_);
  return received_;
}

std::vector<std::string> PoolRun::take_events() {
  std::lock_guard lock(mu_);
  std::vector<std::string> lines(std::make_move_iterator(events_.begin()),
                                 std::make_move_iterator(events_.end()));
  events_.clear();
  return lines;
}

PoolStats PoolRun::stats() const {
  PoolStats stats;
  std::map<std::string, size_t> by_address;
  std::vector<Histogram> latencies;
  std::lock_guard lock(mu_);
  stats.connects = connects_;
  stats.reconnects = reconnects_;
  stats.failures = failures_;
  stats.received = received_;
  stats.waiting_for_room = waiting_for_room_.size();
  stats.slabs_open = slabs_ ? slabs_->size_locked() : 0;
  const DynamicBatcher& batcher = *options_.inference_batcher;
  if (const int64_t batches = batcher.num_batches(); batches > 0) {
    stats.batch_fill = static_cast<double>(batcher.num_rows()) / batches;
  }

  // Rows leave the queue in the order in which they came. The first ones may be
  // of a pool before this one, and the last ones of a pool after it.
  const BatchingQueue::Counts counts = options_.learner_queue->counts();
  const int64_t rows = enqueued_ / options_.unroll_length;
  const int64_t taken = counts.taken - before_.taken;
  const int64_t left = taken + counts.dropped - before_.dropped;
  const int64_t dequeued = std::clamp<int64_t>(taken - before_.queued, 0, rows);
  const int64_t gone = std::clamp<int64_t>(left - before_.queued, 0, rows);
  stats.dequeued = options_.unroll_length * dequeued;
  stats.discarded = discarded_ + options_.unroll_length * (gone - dequeued);
  stats.in_flight = in_slabs_ + enqueued_ - options_.unroll_length * gone;

  const auto now = Clock::now();
  stats.env_s = left_env_s_;
  for (const auto& stream : streams_) {
    stats.states.push_back(stream->state_);
    stats.waiting_s.push_back(stream->waiting_s_locked(now));
    const ActorStream::Server& server = stream->server_;
    stats.stream_addresses.push_back(server.address);
    if (server.address.empty()) continue;
    const auto [found, is_new] =
        by_address.emplace(server.address, stats.addresses.size());
    if (is_new) {
      stats.addresses.emplace_back().address = server.address;
      latencies.emplace_back();
    }
    AddressStats& address = stats.addresses[found->second];
    ++address.streams;
    const bool connected = stream->life_ && stream->life_->welcomed;
    address.connected += connected;
    address.steps += server.steps;
    latencies[found->second].add(server.latency);
    stats.connected += connected;
  }
  for (size_t i = 0; i < latencies.size(); ++i) {
    stats.addresses[i].p50_ms = latencies[i].quantile_ms(0.50);
    stats.addresses[i].p99_ms = latencies[i].quantile_ms(0.99);
    stats.addresses[i].env_s = latencies[i].total_s();
    stats.env_s += stats.addresses[i].env_s;
  }
  return stats;
}

}  // namespace torchbeast
