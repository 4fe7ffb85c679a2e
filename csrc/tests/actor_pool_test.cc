// SPDX-License-Identifier: Apache-2.0

#include "actor_pool.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_servers.h"
#include "pool_rig.h"
#include "testing.h"

using namespace torchbeast;
using testing::background;
using testing::wait_until;

namespace {

void learn_and_check(int64_t num_envs, size_t num_streams, bool named_rows,
                     std::vector<std::string> inference_keys = {}) {
  RigOptions options;
  options.num_envs = num_envs;
  options.inference_keys = std::move(inference_keys);
  options.addresses.assign(num_streams, "a");
  options.named_rows = named_rows;
  options.maximum_queue_size = 2 * kC;
  if (num_envs == 3) options.minimum_batch_size = kC - 1;  // Rounded up to 6.
  fake::CountingServer server(num_envs);
  Rig rig(options);
  rig.network->serve("a", &server);
  rig.start();
  rig.start_agent();
  Checker checker(num_envs, named_rows);
  // A busy machine may let one stream run long before another.
  const auto has_seen_all = [&] {
    for (size_t i = 0; i < num_streams * num_envs; ++i) {
      if (!checker.has_seen(static_cast<int64_t>(i), 100, 0)) return false;
    }
    return true;
  };
  int64_t num_batches = 0;
  while (num_batches < 20 || !has_seen_all()) {
    checker.check(*rig.queue->dequeue_many());
    CHECK_EQ(checker.rollouts(), ++num_batches * kC);
  }
  rig.pool->stop();
  rig.running.get();
  CHECK_EQ(server.errors(), 0);
  CHECK(2 * num_envs * server.short_steps() > server.steps());
  const PoolStats stats = rig.pool->stats();
  CHECK(is_balanced(stats));
  CHECK_EQ(stats.dequeued, kT * checker.rollouts());
  CHECK_EQ(stats.in_flight, kT * rig.queue->size());
  CHECK_EQ(stats.received, rig.pool->count());
  CHECK(stats.received <= server.steps());
  CHECK_EQ(stats.reconnects, 0);
  CHECK(stats.batch_fill >= num_envs &&
        stats.batch_fill <= num_envs * num_streams);
}

}  // namespace

TEST(rollouts_of_single_environments) { learn_and_check(1, 7, false); }

TEST(rollouts_of_three_environments_per_stream) {
  learn_and_check(3, 3, false);
}

TEST(rollouts_with_named_rows) { learn_and_check(3, 2, true); }

TEST(inference_gets_the_keys_it_asks_for_and_rollouts_hold_all) {
  learn_and_check(3, 2, true, {"reward", "observation", "reward"});

  RigOptions options;
  options.num_envs = 3;
  options.named_rows = true;
  options.inference_keys = {"reward", "observation"};
  fake::CountingServer server(3);
  Rig rig(options);
  rig.network->serve("a", &server);
  rig.start();
  const auto batch = rig.batcher->get_batch();
  const Structure& rows = *batch->inputs().structure->children[0];
  CHECK(rows.keys == (std::vector<std::string>{"observation", "reward"}));
  const Array& reward = batch->inputs().leaves[rows.num_leaves - 1];
  CHECK(reward.dtype == DType::kFloat32);
}

TEST(one_stream_fills_a_slab_alone) { learn_and_check(1, 1, false); }

// For ThreadSanitizer: stop() discards rollouts while other threads answer the
// inference batches of these rollouts.
TEST(a_pool_stops_while_agents_answer) {
  for (int i = 0; i < 200; ++i) {
    RigOptions options;
    options.num_envs = 3;
    options.addresses.assign(4, "a");
    fake::CountingServer server(3);
    Rig rig(options);
    rig.network->serve("a", &server);
    rig.start();
    rig.start_agent();
    rig.start_agent();
    rig.queue->dequeue_many();
    rig.pool->stop();
    rig.running.get();
  }
}

TEST(an_agent_may_write_to_its_inputs) {
  Rig rig(RigOptions{.num_envs = 3});
  rig.start();
  Checker checker(3);
  // Two connections, which begin with the same state. Batches have one request.
  for (int64_t life = 0; life < 2; ++life) {
    Player player(rig.network->accept(), 3);
    player.greet();
    for (int64_t n = 0; n < 2 * kT + 1; ++n) {
      player.step();
      const auto batch = rig.batcher->get_batch();
      Nest outputs = answer(batch->inputs());
      for (const Array& leaf : batch->inputs().leaves) {
        std::memset(leaf.data, 0xff, leaf.nbytes());
      }
      batch->set_outputs(std::move(outputs));
      player.take_action();
    }
    checker.check(*rig.queue->dequeue_many());
    CHECK(checker.has_seen(0, 100 + life, 0));
    player.connection->close();
  }
}

// --- Ends of the run ---------------------------------------------------------

namespace {

void check_stop_in(StreamState state) {
  RigOptions options;
  options.num_envs = 3;
  options.maximum_queue_size = kC;
  Rig rig(options);
  const auto pending = start_until(rig, state);
  rig.pool->stop();
  rig.running.get();
  CHECK(rig.state() == StreamState::kStopped);
  PoolStats stats = rig.pool->stats();
  CHECK_EQ(stats.connected, 0);
  CHECK_EQ(stats.slabs_open, 0);
  CHECK(is_balanced(stats));
  CHECK_EQ(stats.in_flight, kT * rig.queue->size());
  rig.pool->stop();  // A second call does nothing.
  if (pending) {
    pending->set_outputs(answer(pending->inputs()));  // Has no effect.
    CHECK(rig.state() == StreamState::kStopped);
  }
  rig.queue->close();
  stats = rig.pool->stats();
  CHECK(is_balanced(stats));
  CHECK_EQ(stats.in_flight, 0);
  CHECK_EQ(stats.received, stats.discarded);
}

}  // namespace

TEST(stop_while_waiting_to_connect) {
  check_stop_in(StreamState::kWaitingToConnect);
}
TEST(stop_while_connecting) { check_stop_in(StreamState::kConnecting); }
TEST(stop_while_greeting) { check_stop_in(StreamState::kGreeting); }
TEST(stop_while_waiting_for_env) { check_stop_in(StreamState::kWaitingForEnv); }
TEST(stop_while_waiting_for_inference) {
  check_stop_in(StreamState::kWaitingForInference);
}
TEST(stop_while_waiting_for_room) {
  check_stop_in(StreamState::kWaitingForRoom);
}

TEST(run_is_for_once) {
  Rig rig;
  rig.start();
  const auto connection = rig.network->accept();
  CHECK_THROWS(std::runtime_error, "twice", rig.pool->run());
  rig.pool->stop();
  rig.running.get();
  CHECK_THROWS(std::runtime_error, "twice", rig.pool->run());
}

TEST(run_after_stop_returns) {
  Rig rig;
  rig.pool->stop();
  rig.pool->run();
  CHECK(rig.network->connections().empty());
}

TEST(pools_that_follow_each_other_at_a_queue_have_ledgers_of_their_own) {
  Rig rig(RigOptions{.num_envs = 3});
  const auto play_batches = [&rig](int batches) {
    rig.start();
    Player player(rig.network->accept(), 3);
    player.greet();
    play(rig, player, batches * 2 * kT + 1);
    rig.pool->stop();
    rig.running.get();
  };
  const auto check = [](const ActorPool& pool, int dequeued, int discarded,
                        int in_flight) {
    const PoolStats stats = pool.stats();
    CHECK_EQ(stats.dequeued, kC * kT * dequeued);
    CHECK_EQ(stats.discarded, kC * kT * discarded);
    CHECK_EQ(stats.in_flight, kC * kT * in_flight);
    CHECK(is_balanced(stats));
  };
  auto next = rig.make_pool();
  play_batches(2);
  rig.queue->dequeue_many();
  const auto before = std::exchange(rig.pool, std::move(next));
  play_batches(3);
  check(*before, 1, 0, 1);
  check(*rig.pool, 0, 0, 3);
  rig.queue->dequeue_many();
  check(*before, 2, 0, 0);
  check(*rig.pool, 0, 0, 3);
  rig.queue->dequeue_many();
  rig.queue->close();
  check(*before, 2, 0, 0);
  check(*rig.pool, 1, 2, 0);
}

TEST(a_pool_may_be_destroyed_unused) { Rig rig; }

TEST(a_pool_may_be_destroyed_with_an_answer_pending) {
  Rig rig;
  rig.start();
  Player player(rig.network->accept());
  player.greet();
  player.step();
  const auto batch = rig.batcher->get_batch();
  rig.pool->stop();
  rig.running.get();
  rig.pool.reset();
  batch->set_outputs(answer(batch->inputs()));
}

TEST(closing_the_queue_ends_the_run) {
  fake::CountingServer server(3);
  Rig rig(RigOptions{.num_envs = 3});
  rig.network->serve("a", &server);
  rig.start();
  rig.start_agent();
  wait_until([&] { return rig.queue->size() >= 2 * kC; });
  rig.queue->close();
  rig.running.get();
  const PoolStats stats = rig.pool->stats();
  CHECK(is_balanced(stats));
  CHECK_EQ(stats.in_flight, 0);
  CHECK_EQ(stats.dequeued, 0);
}

TEST(closing_the_queue_ends_a_run_that_waits_for_room) {
  RigOptions options;
  options.num_envs = 3;
  options.maximum_queue_size = kC;
  fake::CountingServer server(3);
  Rig rig(options);
  rig.network->serve("a", &server);
  rig.start();
  rig.start_agent();
  rig.wait_for(StreamState::kWaitingForRoom);
  rig.queue->close();
  rig.running.get();
  CHECK(is_balanced(rig.pool->stats()));
}

TEST(closing_the_batcher_ends_the_run) {
  Rig rig;
  rig.start();
  Player player(rig.network->accept());
  player.greet();
  player.step();
  rig.wait_for(StreamState::kWaitingForInference);
  rig.batcher->close();
  rig.running.get();
}

TEST(a_dropped_batch_ends_the_run_with_an_error) {
  Rig rig;
  rig.start();
  Player player(rig.network->accept());
  player.greet();
  player.step();
  rig.batcher->get_batch().reset();
  CHECK_THROWS(AsyncError, "", rig.running.get());
}

TEST(a_queue_that_was_closed_before_ends_the_run) {
  Rig rig;
  rig.queue->close();
  rig.pool->run();
}

TEST(options_are_checked) {
  const auto make = [](const std::function<void(PoolOptions&)>& change) {
    PoolOptions options;
    options.unroll_length = kT;
    QueueOptions queue_options;
    queue_options.minimum_batch_size = kC;
    options.learner_queue = std::make_shared<BatchingQueue>(queue_options);
    options.inference_batcher =
        std::make_shared<DynamicBatcher>(BatcherOptions{});
    options.addresses = {"a"};
    options.initial_agent_state = initial_state();
    change(options);
    ActorPool(std::move(options), std::make_unique<fake::Transport>(
                                      std::make_shared<fake::Network>(), 1));
  };
  make([](PoolOptions&) {});
  CHECK_THROWS(std::invalid_argument, "unroll_length is 0",
               make([](PoolOptions& o) { o.unroll_length = 0; }));
  CHECK_THROWS(std::invalid_argument, "num_envs is 0, expected at least 1",
               make([](PoolOptions& o) { o.num_envs = 0; }));
  CHECK_THROWS(std::invalid_argument, "learner_queue is missing",
               make([](PoolOptions& o) { o.learner_queue.reset(); }));
  CHECK_THROWS(std::invalid_argument, "inference_batcher is missing",
               make([](PoolOptions& o) { o.inference_batcher.reset(); }));
  CHECK_THROWS(std::invalid_argument, "no env server addresses",
               make([](PoolOptions& o) { o.addresses.clear(); }));
  make([](PoolOptions& o) {
    o.addresses.clear();
    o.max_streams = 1;
  });
  CHECK_THROWS(std::invalid_argument,
               "there are 2 env server addresses, but max_streams is 1",
               make([](PoolOptions& o) {
                 o.addresses = {"a", "b"};
                 o.max_streams = 1;
               }));
  CHECK_THROWS(std::invalid_argument, "max_failures is 0",
               make([](PoolOptions& o) { o.max_failures = 0; }));
  CHECK_THROWS(std::invalid_argument, "first_backoff_s is -1",
               make([](PoolOptions& o) { o.first_backoff_s = -1; }));
  CHECK_THROWS(std::invalid_argument, "initial_agent_state is missing",
               make([](PoolOptions& o) { o.initial_agent_state = {}; }));
  CHECK_THROWS(std::invalid_argument,
               "initial_agent_state[0] is float32[2,3], expected the state of "
               "one environment",
               make([](PoolOptions& o) {
                 o.initial_agent_state.leaves[0].shape = {2, 3};
               }));
  CHECK_THROWS(std::invalid_argument, "learner_queue has batch_dim 0",
               make([](PoolOptions& o) {
                 QueueOptions queue_options;
                 queue_options.batch_dim = 0;
                 o.learner_queue =
                     std::make_shared<BatchingQueue>(queue_options);
               }));
}

// --- Everything at once ------------------------------------------------------

namespace {

// A server that fails at times. Its stream of environment 0 is slow at times.
class MoodyServer : public fake::CountingServer {
 public:
  using CountingServer::CountingServer;

  void reply(fake::Connection& connection) override {
    const fake::Hello& hello = connection.hello;
    const auto mood = (hello.first_env_id * 7919 + hello.incarnation * 104729 +
                       connection.n * 1299709) /
                      8;
    if (hello.first_env_id == 0 && mood % 8 == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    if (mood % 397 == 0) {
      ++failures_;
      connection.deliver(fake::failure("bad mood"));
    } else {
      CountingServer::reply(connection);
    }
  }

  int64_t failures() const { return failures_; }  // Sent.

 private:
  std::atomic<int64_t> failures_{0};
};

}  // namespace

TEST(random_losses_break_no_rollout) {
  constexpr int64_t kStreams = 9;
  constexpr int kLosses = 150;
  RigOptions options;
  options.addresses.assign(kStreams, "a");
  options.maximum_queue_size = 2 * kC;
  options.max_failures = 1000;
  options.num_threads = 3;
  for (int64_t i = 0; i < kStreams; ++i) {
    options.addresses[i] = std::to_string(i % 3);
  }
  MoodyServer server(1);
  Rig rig(options);
  for (const auto& address : options.addresses) {
    rig.network->serve(address, &server);
  }
  rig.start();
  rig.start_agent();
  rig.start_agent();
  Checker checker(1);
  auto learner = background([&] {
    std::minstd_rand random(3);
    while (const auto batch = rig.queue->dequeue_many()) {
      checker.check(*batch);
      if (random() % 16 == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
      }
    }
  });
  std::minstd_rand random(11);
  int losses = 0;
  int num_malformed = 0;
  while (losses < kLosses) {
    const auto connections = rig.network->connections();
    if (!connections.empty()) {
      // One of the latest connections, most of which are open.
      const size_t back = random() % (2 * kStreams) + 1;
      const auto& connection =
          connections[connections.size() - std::min(back, connections.size())];
      if (!connection->has_ended()) {
        connection->close();
        ++losses;
      }
    }
    CHECK(is_balanced(rig.pool->stats()));
    for (const std::string& event : rig.pool->take_events()) {
      num_malformed += event.find("malformed") != std::string::npos;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  rig.pool->stop();
  rig.running.get();
  rig.queue->close();
  learner.get();
  CHECK_EQ(server.errors(), 0);
  const PoolStats stats = rig.pool->stats();
  CHECK(is_balanced(stats));
  CHECK_EQ(stats.in_flight, 0);
  CHECK_EQ(stats.dequeued, kT * checker.rollouts());
  CHECK(checker.rollouts() > 0);
  CHECK(stats.reconnects > 0);
  CHECK_EQ(num_malformed, 0);
  CHECK(stats.failures > 0);
  CHECK(stats.failures <= server.failures());
}
