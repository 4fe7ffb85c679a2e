// SPDX-License-Identifier: Apache-2.0

#include "slabs.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "rows.h"

namespace torchbeast {
namespace {

// std::swap_ranges goes byte by byte and takes five times as long.
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

}  // namespace

Slabs::Slabs(const EnvSpec& env, int64_t unroll_length, size_t num_streams,
             std::shared_ptr<BufferPool> buffers)
    : env_(env),
      unroll_length_(unroll_length),
      num_streams_(num_streams),
      buffers_(std::move(buffers)) {}

// --- Lanes -------------------------------------------------------------------

bool Slabs::claim_lane_locked(Rollout& rollout) {
  for (const auto& slab : slabs_) {
    if (slab->frozen) continue;
    for (size_t i = 0; i < slab->lanes.size(); ++i) {
      if (slab->lanes[i].state != Slab::Lane::State::kFree) continue;
      slab->lanes[i] = {Slab::Lane::State::kTaken, &rollout};
      rollout.slab = slab.get();
      rollout.lane = i;
      rollout.row = 0;
      return true;
    }
  }
  return false;
}

std::unique_ptr<Slab> Slabs::make_slab() const {
  auto slab = std::make_unique<Slab>();
  slab->lanes.resize(env_.columns / env_.num_envs);
  for (const RowLeaf& leaf : env_.leaves) {
    slab->env.push_back(buffers_->allocate(
        leaf.dtype, leaf.with_rows(unroll_length_ + 1, env_.columns)));
  }
  for (const StateLeaf& leaf : env_.state_leaves) {
    slab->state.push_back(
        buffers_->allocate(leaf.dtype, leaf.with_columns(env_.columns)));
  }
  return slab;
}

void Slabs::add_locked(std::unique_ptr<Slab> slab) {
  slab->serial = next_serial_++;
  slabs_.push_back(std::move(slab));
}

Slab* Slabs::finish_locked(Rollout& rollout) {
  Slab* const slab = std::exchange(rollout.slab, nullptr);
  slab->lanes[rollout.lane] = {Slab::Lane::State::kFinished, nullptr};
  rollout.row = 0;
  for (const Slab::Lane& lane : slab->lanes) {
    if (lane.state != Slab::Lane::State::kFinished) return nullptr;
  }
  slab->frozen = true;
  return slab;
}

int64_t Slabs::discard_locked(Rollout& rollout) {
  Slab* const slab = std::exchange(rollout.slab, nullptr);
  if (!slab) return 0;
  slab->lanes[rollout.lane] = {};
  return std::exchange(rollout.row, 0);
}

std::unique_ptr<Slab> Slabs::remove_locked(Slab* slab) {
  const auto found =
      std::find_if(slabs_.begin(), slabs_.end(),
                   [&](const auto& other) { return other.get() == slab; });
  std::unique_ptr<Slab> removed = std::move(*found);
  slabs_.erase(found);
  return removed;
}

int64_t Slabs::num_finished_locked() const {
  int64_t finished = 0;
  for (const auto& slab : slabs_) {
    for (const Slab::Lane& lane : slab->lanes) {
      finished += lane.state == Slab::Lane::State::kFinished;
    }
  }
  return finished;
}

std::vector<std::unique_ptr<Slab>> Slabs::clear_locked() {
  return std::exchange(slabs_, {});
}

// --- Rows --------------------------------------------------------------------

bool Slabs::is_before_last_row(const Rollout& rollout) const {
  return rollout.row + 1 == unroll_length_;
}

size_t Slabs::offset(const Rollout& rollout, int64_t row,
                     const RowLeaf& leaf) const {
  return (row * env_.columns + rollout.lane * env_.num_envs) * leaf.nbytes;
}

void Slabs::make_outputs(Lock& lock, Slab& slab, const AgentSpec& agent) const {
  if (!slab.outputs.empty()) return;
  lock.unlock();
  std::vector<Array> outputs;
  for (const RowLeaf& leaf : agent.leaves) {
    outputs.push_back(buffers_->allocate(
        leaf.dtype, leaf.with_rows(unroll_length_ + 1, env_.columns)));
    // Zeros for the first rows of streams, which may be written already.
    std::memset(outputs.back().data, 0, outputs.back().nbytes());
  }
  lock.lock();
  if (slab.outputs.empty()) slab.outputs.swap(outputs);
  lock.unlock();
  outputs.clear();  // If another thread was first: free these without the lock.
  lock.lock();
}

void Slabs::write_env_row(const Rollout& rollout, int64_t row,
                          const Segments& message,
                          const wire::Step& step) const {
  for (size_t i = 0; i < env_.leaves.size(); ++i) {
    const RowLeaf& leaf = env_.leaves[i];
    const wire::Piece piece = step.arrays[leaf.source];
    char* const data = rollout.slab->env[i].data;
    char* const to = data + offset(rollout, row, leaf);
    if (!step.newest_frames || leaf.frame_nbytes == 0) {
      wire::copy(message, piece, to);
      continue;
    }
    const char* const before = data + offset(rollout, row - 1, leaf);
    const size_t older = leaf.nbytes - leaf.frame_nbytes;
    copy_runs(to, leaf.nbytes, before + leaf.frame_nbytes, leaf.nbytes,
              env_.num_envs, older);
    wire::copy_runs(message, piece, leaf.frame_nbytes, leaf.nbytes, to + older);
  }
}

void Slabs::write_outputs(const Rollout& rollout, int64_t row,
                          const AgentSpec& agent,
                          const std::vector<Array>& outputs) const {
  for (size_t i = 0; i < agent.leaves.size(); ++i) {
    const RowLeaf& leaf = agent.leaves[i];
    char* const to = rollout.slab->outputs[i].data + offset(rollout, row, leaf);
    const size_t size = env_.num_envs * leaf.nbytes;
    if (outputs.empty()) {
      std::memset(to, 0, size);
    } else {
      std::memcpy(to, outputs[i].data, size);
    }
  }
}

void Slabs::write_state(const Rollout& rollout,
                        const std::vector<Array>& agent_state) const {
  const size_t K = env_.num_envs;
  for (size_t i = 0; i < env_.state_leaves.size(); ++i) {
    const StateLeaf& leaf = env_.state_leaves[i];
    leaf.copy(K, agent_state[i].data, K,
              rollout.slab->state[i].data + rollout.lane * K * leaf.inner,
              env_.columns);
  }
}

// --- Moves -------------------------------------------------------------------

std::vector<Slabs::Move> Slabs::plan_moves_locked(
    Slab& young, const std::function<bool(size_t)>& may_move) {
  using State = Slab::Lane::State;
  const uint64_t lanes = young.lanes.size();
  std::vector<size_t> finished;
  for (size_t i = 0; i < lanes; ++i) {
    if (young.lanes[i].state == State::kFinished) finished.push_back(i);
  }
  // A frozen slab that is not complete is part of a move.
  if (young.frozen && finished.size() < lanes) return {};
  // Without slow streams, the rollouts are spread over at most this many slabs.
  // An incomplete slab that is older than `young` by more waits for a slow
  // stream.
  const uint64_t spread = (num_streams_ + lanes - 1) / lanes;
  for (const auto& old : slabs_) {
    if (young.serial <= old->serial + spread) break;
    if (old->frozen) continue;
    std::vector<Move> moves;
    bool possible = true;
    for (size_t i = 0; i < lanes; ++i) {
      const Slab::Lane& lane = old->lanes[i];
      if (lane.state == State::kFinished) continue;
      possible = possible && moves.size() < finished.size() &&
                 (lane.state == State::kFree || may_move(lane.rollout->stream));
      if (!possible) break;
      moves.push_back(
          {old.get(), i, &young, finished[moves.size()], lane.rollout});
    }
    if (!possible || moves.size() == lanes) continue;
    old->frozen = young.frozen = true;
    for (const Move& move : moves) {
      young.lanes[move.young_lane].state = State::kTaken;
    }
    return moves;
  }
  return {};
}

// Copies the finished rollout to the old slab, and the rows of the unfinished
// one to the young slab.
void Slabs::move(const Move& move, const AgentSpec& agent) const {
  const int64_t K = env_.num_envs;
  const int64_t filled = move.rollout ? move.rollout->row + 1 : 0;
  const auto move_rows = [&](const std::vector<RowLeaf>& leaves,
                             const std::vector<Array>& old,
                             const std::vector<Array>& young) {
    for (size_t i = 0; i < leaves.size(); ++i) {
      const size_t size = K * leaves[i].nbytes;
      const size_t stride = env_.columns * leaves[i].nbytes;
      char* a = old[i].data + move.old_lane * size;
      char* b = young[i].data + move.young_lane * size;
      for (int64_t t = 0; t <= unroll_length_; ++t) {
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
  move_rows(env_.leaves, move.old->env, move.young->env);
  move_rows(agent.leaves, move.old->outputs, move.young->outputs);
  for (size_t i = 0; i < env_.state_leaves.size(); ++i) {
    const StateLeaf& leaf = env_.state_leaves[i];
    const size_t size = K * leaf.inner;
    char* a = move.old->state[i].data + move.old_lane * size;
    char* b = move.young->state[i].data + move.young_lane * size;
    for (size_t j = 0; j < leaf.outer; ++j) {
      swap_bytes(a, b, size);
      a += env_.columns * leaf.inner;
      b += env_.columns * leaf.inner;
    }
  }
}

void Slabs::finish_moves_locked(const std::vector<Move>& moves) {
  for (const Move& move : moves) {
    move.old->lanes[move.old_lane] = {Slab::Lane::State::kFinished, nullptr};
    move.young->lanes[move.young_lane] = {};
    if (!move.rollout) continue;
    move.young->lanes[move.young_lane] = {Slab::Lane::State::kTaken,
                                          move.rollout};
    move.rollout->slab = move.young;
    move.rollout->lane = move.young_lane;
  }
  moves[0].young->frozen = false;
}

}  // namespace torchbeast
