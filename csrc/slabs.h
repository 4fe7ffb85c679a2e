// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "agent_spec.h"
#include "array.h"
#include "buffer_pool.h"
#include "env_spec.h"
#include "transport.h"
#include "wire.h"

namespace torchbeast {

struct Slab;

// The rollout that a stream is writing, and its place.
struct Rollout {
  const size_t stream = 0;  // Index of the stream.
  Slab* slab = nullptr;     // Null between two rollouts.
  size_t lane = 0;
  int64_t row = 0;  // The last row written: the number of steps so far.
};

// A learner batch that is being filled. It has C columns, which are C / K lanes
// of K columns. A lane holds the rollout of one stream. The owner of the stream
// writes and reads the bytes of the lane without the lock.
struct Slab {
  struct Lane {
    enum class State : uint8_t { kFree, kTaken, kFinished };
    State state = State::kFree;
    Rollout* rollout = nullptr;  // Only while it is taken.
  };

  uint64_t serial = 0;      // Guarded by the lock. Slabs count from 0.
  std::vector<Lane> lanes;  // Guarded by the lock.
  // Guarded by the lock. No lane may be claimed, and no move may begin, as the
  // slab is complete or part of a move.
  bool frozen = false;
  // The arrays of the batch: [T + 1, C, ...] of the environments and of the
  // agent's outputs, and the agent's state before row 0.
  std::vector<Array> env;
  // Guarded by the lock until make_outputs() has filled it; constant
  // afterwards.
  std::vector<Array> outputs;
  std::vector<Array> state;
};

// All learner batches that are being filled, oldest first, and the functions
// that write rows to them.
//   claim_lane  gives a rollout the first free lane of the oldest slab.
//   write_*     write one row, or the state, of a rollout to its lane.
//   finish      ends a rollout. A slab is complete when all its rollouts are
//               finished.
//   discard     frees the lane of a rollout that was cut short.
//   plan_moves, move, finish_moves
//               complete an old slab with finished rollouts of a younger one.
//               So slow rollouts gather in few slabs, and finished ones do not
//               wait for them.
// "The lock" is PoolRun::mu_. Methods that end in _locked need it. Call the
// others without it: they allocate memory, which may need the GIL, or copy many
// bytes.
class Slabs {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // An unfinished rollout of an old slab and a finished one of a younger slab,
  // which change places.
  struct Move {
    Slab* old;
    size_t old_lane;
    Slab* young;
    size_t young_lane;
    Rollout* rollout;  // The unfinished one. Null if the old lane is free.
  };

  // `env` must outlive the slabs.
  Slabs(const EnvSpec& env, int64_t unroll_length, size_t num_streams,
        std::shared_ptr<BufferPool> buffers);

  // Lanes.

  // Returns false if no slab has a free lane; then add a new slab.
  bool claim_lane_locked(Rollout& rollout);
  std::unique_ptr<Slab> make_slab() const;
  void add_locked(std::unique_ptr<Slab> slab);
  // Takes the finished rollout's lane away. Returns the slab if it is complete:
  // the caller must deliver it. Otherwise null.
  Slab* finish_locked(Rollout& rollout);
  // Returns the number of steps that are lost.
  int64_t discard_locked(Rollout& rollout);
  std::unique_ptr<Slab> remove_locked(Slab* slab);

  // Rows.

  // Whether the next row is the rollout's last.
  bool is_before_last_row(const Rollout& rollout) const;
  // The offset in bytes of a row in an array of the rollout's slab.
  size_t offset(const Rollout& rollout, int64_t row, const RowLeaf& leaf) const;
  // Allocates the slab's arrays for the agent's outputs, unless it has them.
  // Releases the lock meanwhile.
  void make_outputs(Lock& lock, Slab& slab, const AgentSpec& agent) const;
  void write_env_row(const Rollout& rollout, int64_t row,
                     const Segments& message, const wire::Step& step) const;
  // Writes zeros if `outputs` is empty: the first row of a life.
  void write_outputs(const Rollout& rollout, int64_t row,
                     const AgentSpec& agent,
                     const std::vector<Array>& outputs) const;
  void write_state(const Rollout& rollout,
                   const std::vector<Array>& agent_state) const;

  // Moves.

  // Plans how finished rollouts of the slab `young` complete an older slab that
  // has waited for a slow stream for too long. Empty if there is none, if
  // `young` has too few of them, or if a slow stream cannot be moved now:
  // `may_move(stream)` is false. Until finish_moves_locked() nobody has the
  // lanes of the finished rollouts.
  std::vector<Move> plan_moves_locked(
      Slab& young, const std::function<bool(size_t)>& may_move);
  // Copies the bytes of the two rollouts.
  void move(const Move& move, const AgentSpec& agent) const;
  void finish_moves_locked(const std::vector<Move>& moves);

  // How many streams there are, of which plan_moves_locked() expects rollouts.
  void set_num_streams_locked(size_t num_streams) {
    num_streams_ = num_streams;
  }
  size_t size_locked() const { return slabs_.size(); }
  int64_t num_finished_locked() const;  // Rollouts.
  // Removes and returns all slabs.
  std::vector<std::unique_ptr<Slab>> clear_locked();

 private:
  const EnvSpec& env_;
  const int64_t unroll_length_;
  size_t num_streams_;  // Guarded by the lock.
  const std::shared_ptr<BufferPool> buffers_;
  std::vector<std::unique_ptr<Slab>> slabs_;  // Guarded by the lock. By serial.
  uint64_t next_serial_ = 0;                  // Guarded by the lock.
};

}  // namespace torchbeast
