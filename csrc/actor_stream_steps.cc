// SPDX-License-Identifier: Apache-2.0
//
// What a stream does with a Step: it writes the row into its rollout, asks the
// agent and sends the Action. actor_stream.cc has the connection.

#include <utility>
#include <vector>

#include "actor_stream.h"
#include "agent_spec.h"
#include "env_spec.h"
#include "pool_run.h"

namespace torchbeast {

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
    give_up_malformed(error);
  }
  lock.lock();
}

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
      server_.latency.add(now - life.asked_at);
      agent = run_.agent_.get();
      if (agent) run_.slabs_->make_outputs(lock, *life.rollout.slab, *agent);
    }
    write_row(message, life.rollout.row + 1, agent);

    bool ends = false;
    Slab* complete = nullptr;
    std::vector<Slabs::Move> moves;
    {
      std::lock_guard lock(run_.mu_);
      ++life.next_seq;
      ++life.rollout.row;
      server_.attempts = 0;
      server_.last_reason.clear();
      server_.steps += K;
      run_.received_ += K;
      run_.in_slabs_ += K;
      ends = life.rollout.row == run_.options_.unroll_length;
      if (ends) {
        Slab* const slab = life.rollout.slab;
        complete = run_.slabs_->finish_locked(life.rollout);
        moves = run_.begin_moves_locked(*slab);
        if (!moves.empty()) complete = moves[0].old;
        server_.failures = 0;
        server_.has_finished = true;
      } else {
        if (finish_if_ended_locked()) return;
        state_ = StreamState::kWaitingForInference;
      }
    }
    if (!ends) {
      ask_agent();
      return;
    }
    if (complete) run_.deliver(complete, moves);
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
      wants_whole = server_.takes_newest_frames && env.has_stacks &&
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

}  // namespace torchbeast
