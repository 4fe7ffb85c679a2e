// SPDX-License-Identifier: Apache-2.0

#include "slabs.h"

#include <array>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "fake_servers.h"
#include "pool_rig.h"
#include "testing.h"

using namespace torchbeast;
using testing::wait_until;

namespace {

constexpr int64_t kNumEnvs = 2;  // K
constexpr int64_t kNumLanes = 3;
constexpr int64_t kNumStreams = 3;

// Rows of one uint8[3], and a state [2, K, 5].
EnvSpec small_env() {
  EnvSpec env;
  env.num_envs = kNumEnvs;
  env.columns = kNumEnvs * kNumLanes;
  env.leaves = {{DType::kUInt8, {3}, 3, 0, 0}};
  env.state_leaves = {{DType::kUInt8, {2, 1, 5}, 2, 5}};
  return env;
}

AgentSpec small_agent() {
  AgentSpec agent;
  agent.leaves = {{DType::kUInt8, {}, 1, 0, 0}};
  return agent;
}

struct SmallSlabs {
  const EnvSpec env = small_env();
  const AgentSpec agent = small_agent();
  Slabs slabs{env, kT, kNumStreams, BufferPool::create()};
  std::mutex mu;  // Only make_outputs needs it: the tests have one thread.

  void claim(Rollout& rollout) {
    if (slabs.claim_lane_locked(rollout)) return;
    slabs.add_locked(slabs.make_slab());
    CHECK(slabs.claim_lane_locked(rollout));
    std::unique_lock lock(mu);
    slabs.make_outputs(lock, *rollout.slab, agent);
  }

  // Calls fn(byte, row) for all bytes of a lane: those of the rows, then those
  // of the state, which count as row kT + 1.
  template <typename Fn>
  void each_byte(const Slab& slab, size_t lane, const Fn& fn) {
    Rollout rollout;
    rollout.lane = lane;
    for (int64_t t = 0; t <= kT; ++t) {
      for (const auto& [leaf, array] :
           {std::pair(env.leaves[0], slab.env[0]),
            std::pair(agent.leaves[0], slab.outputs[0])}) {
        char* const row = array.data + slabs.offset(rollout, t, leaf);
        for (size_t i = 0; i < kNumEnvs * leaf.nbytes; ++i) fn(row[i], t);
      }
    }
    const size_t size = kNumEnvs * env.state_leaves[0].inner;
    for (size_t outer = 0; outer < 2; ++outer) {
      char* const state =
          slab.state[0].data + (outer * kNumLanes + lane) * size;
      for (size_t i = 0; i < size; ++i) fn(state[i], kT + 1);
    }
  }

  void fill(const Rollout& rollout, int mark) {
    each_byte(*rollout.slab, rollout.lane, [&](char& byte, int64_t t) {
      byte = static_cast<char>(mark + t);
    });
  }

  void check(const Slab& slab, size_t lane, int mark, int64_t rows) {
    each_byte(slab, lane, [&](const char& byte, int64_t t) {
      if (t < rows || t > kT) CHECK_EQ(int{byte}, mark + t);
    });
  }
};

}  // namespace

TEST(lanes_are_taken_in_order_and_slabs_are_begun_when_all_are_taken) {
  SmallSlabs small;
  std::vector<Rollout> rollouts(kNumLanes + 1);
  for (Rollout& rollout : rollouts) small.claim(rollout);
  for (size_t i = 0; i < kNumLanes; ++i) {
    CHECK_EQ(rollouts[i].lane, i);
    CHECK(rollouts[i].slab == rollouts[0].slab);
  }
  CHECK_EQ(rollouts[kNumLanes].lane, 0u);
  CHECK(rollouts[kNumLanes].slab != rollouts[0].slab);
  CHECK_EQ(small.slabs.size_locked(), 2u);
  // The first free lane of the oldest slab.
  rollouts[1].row = 4;
  CHECK_EQ(small.slabs.discard_locked(rollouts[1]), 4);
  CHECK_EQ(small.slabs.discard_locked(rollouts[1]), 0);
  Rollout next;
  small.claim(next);
  CHECK(next.slab == rollouts[0].slab);
  CHECK_EQ(next.lane, 1u);
  CHECK_EQ(next.row, 0);
}

TEST(a_slab_is_complete_with_its_last_rollout) {
  SmallSlabs small;
  std::vector<Rollout> rollouts(kNumLanes);
  for (Rollout& rollout : rollouts) small.claim(rollout);
  Slab* const slab = rollouts[0].slab;
  CHECK(small.slabs.finish_locked(rollouts[2]) == nullptr);
  CHECK(small.slabs.finish_locked(rollouts[0]) == nullptr);
  CHECK_EQ(small.slabs.num_finished_locked(), 2);
  CHECK(small.slabs.finish_locked(rollouts[1]) == slab);
  CHECK(small.slabs.remove_locked(slab).get() == slab);
  CHECK_EQ(small.slabs.size_locked(), 0u);
}

TEST(a_move_completes_the_older_slab_and_keeps_every_byte_of_both_rollouts) {
  SmallSlabs small;
  Rollout slow{.stream = 7};
  small.claim(slow);
  const size_t old_lane = slow.lane;
  Slab* const old = slow.slab;
  slow.row = 2;
  small.fill(slow, 100);
  Slab* complete = nullptr;
  Slab* young = nullptr;
  // Lanes 1 and 2 of the oldest slab, and two slabs after it.
  for (int i = 0; i < 2 + 2 * kNumLanes; ++i) {
    Rollout rollout;
    small.claim(rollout);
    young = rollout.slab;
    small.fill(rollout, 10 * i);
    complete = small.slabs.finish_locked(rollout);
    if (i < 2 + 2 * kNumLanes - 1 && complete) {
      CHECK(
          small.slabs.plan_moves_locked(*complete, [](size_t) { return true; })
              .empty());  // Not old enough.
      small.slabs.remove_locked(complete);
    }
  }
  CHECK(complete == young);
  const auto plan = [&](bool may_move) {
    return small.slabs.plan_moves_locked(*young, [&](size_t stream) {
      CHECK_EQ(stream, 7u);
      return may_move;
    });
  };
  CHECK(plan(false).empty());
  const auto moves = plan(true);
  CHECK_EQ(moves.size(), 1u);
  small.slabs.move(moves[0], small.agent);
  small.slabs.finish_moves_locked(moves);

  CHECK(slow.slab == young);
  small.check(*young, slow.lane, 100, slow.row + 1);
  small.check(*old, old_lane, 10 * (2 + kNumLanes), kT + 1);
  small.check(*old, 1, 0, kT + 1);
  small.check(*young, 1, 10 * (3 + kNumLanes), kT + 1);
  // The old one can be delivered; the young one waits for the slow stream.
  CHECK(small.slabs.remove_locked(old).get() == old);
  CHECK(small.slabs.finish_locked(slow) == young);
}

TEST(a_slab_that_is_not_complete_completes_an_older_one_too) {
  SmallSlabs small;
  const auto plan = [&](Slab& young) {
    return small.slabs.plan_moves_locked(young, [](size_t) { return true; });
  };
  // Each slab waits for a slow rollout, so none would ever be complete.
  std::array<Rollout, 4> slow{Rollout{6}, Rollout{7}, Rollout{8}, Rollout{9}};
  std::array<Slab*, 4> slabs{};
  const auto finish_one = [&](int mark) {
    Rollout rollout;
    small.claim(rollout);
    small.fill(rollout, mark);
    CHECK(small.slabs.finish_locked(rollout) == nullptr);
  };
  for (size_t i = 0; i < slow.size(); ++i) {
    small.claim(slow[i]);
    slow[i].row = 2;
    small.fill(slow[i], 100);
    slabs[i] = slow[i].slab;
    if (i < 3) {
      finish_one(10);
      finish_one(20);
    }
    if (i < 2) CHECK(plan(*slabs[i]).empty());  // None is old enough.
  }
  Slab* const young = slabs[3];
  CHECK(plan(*young).empty());  // It has no finished rollout.
  Rollout last;
  finish_one(30);
  small.claim(last);
  CHECK(last.slab == young);
  const auto moves = plan(*young);
  CHECK_EQ(moves.size(), 1u);
  CHECK(moves[0].old == slabs[0]);
  // Meanwhile the other rollouts of the young slab end. It is not complete, and
  // no other move may begin, although the next old slab waits.
  CHECK(small.slabs.finish_locked(last) == nullptr);
  CHECK(plan(*young).empty());
  CHECK(small.slabs.finish_locked(slow[3]) == nullptr);
  CHECK(plan(*young).empty());
  small.slabs.move(moves[0], small.agent);
  small.slabs.finish_moves_locked(moves);
  CHECK(slow[0].slab == young);
  small.check(*young, slow[0].lane, 100, slow[0].row + 1);
  small.check(*slabs[0], 0, 30, kT + 1);
  CHECK(small.slabs.remove_locked(slabs[0]).get() == slabs[0]);
  // The slow rollout completes the slab to which it has moved.
  CHECK(small.slabs.finish_locked(slow[0]) == young);
}

// --- Slabs in a pool ---------------------------------------------------------

TEST(items_of_the_queue_are_handed_out_uncopied_and_recycled) {
  RigOptions options;
  options.addresses.assign(6, "a");
  options.maximum_queue_size = kC;
  fake::CountingServer server(1);
  Rig rig(options);
  rig.network->serve("a", &server);
  rig.start();
  rig.start_agent();
  Checker checker(1);
  for (int i = 0; i < 10; ++i) checker.check(*rig.queue->dequeue_many());
  const size_t allocated = rig.queue->buffers()->num_allocated();
  // No more memory than the slabs need that can exist at the same time.
  CHECK(allocated <= 9u * 6);
  for (int i = 0; i < 50; ++i) checker.check(*rig.queue->dequeue_many());
  CHECK(rig.queue->buffers()->num_allocated() <= 9u * 6);
}

TEST(a_lane_with_a_pending_answer_is_not_given_to_another_stream) {
  RigOptions options;
  options.num_envs = 3;
  options.addresses = {"a", "b"};
  Rig rig(options);
  rig.start();
  Player lost(rig.network->accept(), 3);
  lost.greet();
  Player other(rig.network->accept(), 3);
  other.greet();
  lost.step();
  const auto pending = rig.batcher->get_batch();
  const Nest expected = answer(pending->inputs());
  lost.connection->close();
  wait_until([&] { return rig.pool->stats().connected == 1; });
  // If the lane were free, two rollouts would fill the slab.
  play(rig, other, 2 * kT);
  other.step();
  wait_until([&] { return rig.pool->stats().received == 3 * 2 * kT; });
  CHECK_EQ(rig.queue->size(), 0);
  const Nest now = answer(pending->inputs());
  CHECK_EQ(value<int64_t>(now.leaves[0], 0),
           value<int64_t>(expected.leaves[0], 0));
  CHECK_EQ(value<int64_t>(now.leaves[0], 0), 0);  // Row 0 of environment 0.
  pending->set_outputs(answer(pending->inputs()));
  rig.wait_for(StreamState::kWaitingForInference, 1);
  rig.answer_batch();
  other.take_action();
  // Now a later rollout gets the lane.
  play(rig, other, kT);
  Checker checker(3);
  checker.check(*rig.queue->dequeue_many());
}

// --- Fullness and slowness ---------------------------------------------------

TEST(streams_wait_for_room_and_go_on) {
  RigOptions options;
  options.num_envs = 3;
  options.addresses.assign(4, "a");
  options.maximum_queue_size = kC;
  fake::CountingServer server(3);
  Rig rig(options);
  rig.network->serve("a", &server);
  rig.start();
  rig.start_agent();
  Checker checker(3);
  for (int round = 0; round < 10; ++round) {
    // Wait for this state: the streams may not have noticed the last batch
    // taken. The rollouts of the three other streams that wait do not count
    // towards the maximum, so each batch taken lets as many streams go on as
    // fill the next one.
    wait_until([&] {
      return rig.pool->stats().waiting_for_room == 4 &&
             rig.queue->size() == 3 * kC;
    });
    const PoolStats stats = rig.pool->stats();
    CHECK(is_balanced(stats));
    CHECK(stats.slabs_open <= 2);
    checker.check(*rig.queue->dequeue_many());
  }
  rig.pool->stop();
  CHECK(checker.num_overtaken() <= 2 * kC);
  CHECK_EQ(server.errors(), 0);
  CHECK_EQ(rig.pool->stats().dequeued, kT * checker.rollouts());
}

TEST(a_straggler_holds_nobody_up) {
  RigOptions options;
  options.addresses = {"slow", "a", "a", "a", "a"};
  fake::CountingServer server(1);
  Rig rig(options);
  rig.network->serve("a", &server);
  rig.start();
  rig.start_agent();
  Player slow(rig.network->accept());
  slow.greet();
  Checker checker(1);
  // The rollout of the slow stream moves from slab to slab, and is complete in
  // the end.
  int64_t learned = 0;
  for (int64_t n = 0; n <= 2 * kT; ++n) {
    slow.step();
    slow.take_action();
    for (int i = 0; i < 4; ++i) {
      checker.check(*rig.queue->dequeue_many());
      ++learned;
      CHECK(is_balanced(rig.pool->stats()));
      // Five streams of one lane use one slab of six lanes, and besides it
      // there are the complete one and the one that begins. While threads
      // deliver slabs there may be more.
      wait_until([&] { return rig.pool->stats().slabs_open <= 4; });
    }
  }
  while (!checker.has_seen(0, 100, kT)) {
    checker.check(*rig.queue->dequeue_many());
    CHECK(++learned < 200);
  }
  CHECK(checker.has_seen(0, 100, 0));
  rig.pool->stop();
  CHECK_EQ(server.errors(), 0);
  CHECK(is_balanced(rig.pool->stats()));
}

TEST(a_straggler_may_be_lost) {
  RigOptions options;
  options.addresses = {"slow", "a", "a", "a"};
  fake::CountingServer server(1);
  Rig rig(options);
  rig.network->serve("a", &server);
  rig.start();
  rig.start_agent();
  Checker checker(1);
  for (int life = 0; life < 4; ++life) {
    Player slow(rig.network->accept());
    slow.greet();
    for (int64_t n = 0; n < 3; ++n) {
      slow.step();
      slow.take_action();
    }
    for (int i = 0; i < 10; ++i) checker.check(*rig.queue->dequeue_many());
    slow.connection->close();
  }
  wait_until([&] { return rig.pool->stats().connected == 3; });
  const PoolStats stats = rig.pool->stats();
  CHECK_EQ(stats.discarded, 4 * 2);
  CHECK(is_balanced(stats));
  for (int i = 0; i < 10; ++i) checker.check(*rig.queue->dequeue_many());
  CHECK(checker.num_overtaken() <= 3 * kC);
  CHECK_EQ(server.errors(), 0);
}

namespace {

// A stream is lost while its Step kT waits for room. It connects again and
// plays `rows` rows; then its rollout moves to another slab. After a move the
// pool resumes a held Step, which must not be the Step of the lost connection.
void check_no_step_outlives_its_stream(int64_t rows) {
  RigOptions options;
  options.num_envs = 3;
  options.addresses = {"a", "b"};
  options.maximum_queue_size = kC;
  Rig rig(options);
  rig.start();
  Checker checker(3);
  Player lost(rig.network->accept(), 3);
  lost.greet();
  Player other(rig.network->accept(), 3);
  other.greet();
  play(rig, lost, 1);  // In the first slab, with a rollout of `other`.
  play(rig, other, 3 * kT);
  other.step();
  rig.wait_for(StreamState::kWaitingForRoom, 1);
  play(rig, lost, kT - 1);
  lost.step();
  rig.wait_for(StreamState::kWaitingForRoom);
  lost.connection->close();

  Player again(rig.network->accept(), 3);
  for (int i = 0; i < 2; ++i) checker.check(*rig.queue->dequeue_many());
  rig.answer_batch();
  other.take_action();
  again.greet();
  play(rig, again, rows);
  // The next slab, and the one whose rollouts complete theirs.
  play(rig, other, 3 * kT - 1);
  other.step();
  checker.check(*rig.queue->dequeue_many());
  rig.answer_batch();
  other.take_action();
  play(rig, other, kT - 1);
  other.step();  // This rollout completes the slab, and theirs moves.
  checker.check(*rig.queue->dequeue_many());
  rig.answer_batch();
  other.take_action();
  play(rig, other, kT - 1);
  other.step();

  again.step();
  wait_until([&] {
    return again.connection->has_ended() ||
           rig.state() == StreamState::kWaitingForInference ||
           rig.state() == StreamState::kWaitingForRoom;
  });
  if (rig.queue->size() > 0) checker.check(*rig.queue->dequeue_many());
  CHECK_EQ(rig.pool->stats().failures, 0);
  CHECK(!again.connection->has_ended());
  CHECK_EQ(checker.has_seen(0, 101, 0), rows == kT);
}

}  // namespace

TEST(a_step_that_waited_for_room_is_no_message_of_the_next_life) {
  check_no_step_outlives_its_stream(3);
}
TEST(a_step_that_waited_for_room_is_no_row_of_the_next_life) {
  check_no_step_outlives_its_stream(kT);
}
