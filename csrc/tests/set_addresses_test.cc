// SPDX-License-Identifier: Apache-2.0
//
// ActorPool::set_addresses: servers that come and go while the pool runs.

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "actor_pool.h"
#include "fake_servers.h"
#include "pool_rig.h"
#include "testing.h"

using namespace torchbeast;
using testing::background;
using testing::wait_until;
using Addresses = std::vector<std::string>;

namespace {

RigOptions with_places(size_t max_streams, Addresses addresses = {}) {
  RigOptions options;
  options.num_envs = 3;
  options.addresses = std::move(addresses);
  options.max_streams = max_streams;
  return options;
}

}  // namespace

TEST(machines_that_dialed_in_send_the_newest_frames_only) {
  const std::vector<std::pair<std::string, bool>> cases = {
      {"unix:/tmp/torchbeast-x/env.0", false},
      {"unix:/tmp/torchbeast-x/dialed-host-1234.0", true},
      {"host:1", true}};
  for (const auto& [address, newest] : cases) {
    Rig rig(with_places(1, {address}));
    rig.start();
    Player player(rig.network->accept(), 3);
    player.greet();
    CHECK_EQ(player.hello.newest_frames, newest);
  }
}

TEST(streams_come_and_go_with_the_list) {
  Rig rig(with_places(1));
  rig.start();
  CHECK(rig.state() == StreamState::kUnused);
  CHECK_EQ(rig.pool->stats().addresses.size(), 0u);

  CHECK_EQ(rig.pool->set_addresses({"a"}), 0u);
  Player a(rig.network->accept(), 3);
  CHECK_EQ(a.connection->address, "a");
  a.greet();
  play(rig, a, kT + 3);
  const double env_s = rig.pool->stats().env_s;
  CHECK(env_s > 0);

  CHECK_EQ(rig.pool->set_addresses({"b"}), 0u);
  a.connection->wait_closed();
  Player b(rig.network->accept(), 3);
  CHECK_EQ(b.connection->address, "b");
  b.greet();
  CHECK_EQ(b.hello.first_env_id, 0);
  CHECK_EQ(a.hello.incarnation, 100);
  CHECK_EQ(b.hello.incarnation, 101);
  CHECK_EQ(rig.network->num_streams, 1);
  rig.wait_for(StreamState::kWaitingForEnv);
  PoolStats stats = rig.pool->stats();
  CHECK_EQ(stats.received, 3 * (kT + 2));
  CHECK_EQ(stats.discarded, 3 * 2);
  CHECK_EQ(stats.in_flight, 3 * kT);
  CHECK_EQ(stats.connects, 2);
  CHECK_EQ(stats.reconnects, 0);
  CHECK_EQ(stats.env_s, env_s);
  CHECK_EQ(stats.addresses.size(), 1u);
  CHECK_EQ(stats.addresses[0].address, "b");
  CHECK_EQ(stats.addresses[0].steps, 0);
  CHECK_EQ(stats.addresses[0].env_s, 0);

  play(rig, b, kT + 1);
  Checker checker(3);
  checker.check(*rig.queue->dequeue_many());
  CHECK(checker.has_seen(0, 100, 0));
  CHECK(checker.has_seen(0, 101, 0));

  CHECK_EQ(rig.pool->set_addresses({}), 0u);
  b.connection->wait_closed();
  rig.wait_for(StreamState::kUnused);
  wait_until([&] { return rig.network->num_streams == 0; });
  stats = rig.pool->stats();
  CHECK(is_balanced(stats));
  CHECK_EQ(stats.in_flight, 0);
  CHECK_EQ(stats.connected, 0);
  CHECK_EQ(stats.stream_addresses.at(0), "");
  CHECK(rig.pool->take_events().empty());
}

TEST(streams_whose_addresses_stay_are_not_disturbed) {
  fake::CountingServer server(3);
  Rig rig(with_places(4, {"a", "b", "b"}));
  for (const char* address : {"a", "b", "c"}) {
    rig.network->serve(address, &server);
  }
  rig.start();
  rig.start_agent();
  const auto is_connected = [&](int64_t streams) {
    return rig.pool->stats().connected == streams;
  };
  wait_until([&] { return is_connected(3); });
  // One of the two streams at b ends, one at c begins, in another order.
  CHECK_EQ(rig.pool->set_addresses({"c", "b", "a"}), 0u);
  wait_until([&] {
    return is_connected(3) && rig.state(2) == StreamState::kUnused &&
           rig.network->num_streams == 3;
  });
  // c has the place that was free, so it need not wait for the end at b.
  CHECK(rig.pool->stats().stream_addresses == (Addresses{"a", "b", "", "c"}));
  const auto connections = rig.network->connections();
  int ended = 0;
  for (const auto& connection : connections) ended += connection->has_ended();
  CHECK_EQ(ended, 1);
  CHECK_EQ(server.errors(), 0);
}

TEST(addresses_without_a_place_wait_for_one) {
  Rig rig(with_places(2));
  CHECK_EQ(rig.pool->set_addresses({"a", "b", "c", "d"}), 2u);
  CHECK(rig.pool->stats().stream_addresses == (Addresses{"a", "b"}));
  // Those that are there keep their places, also if others come before.
  CHECK_EQ(rig.pool->set_addresses({"d", "c", "b", "a"}), 2u);
  CHECK(rig.pool->stats().stream_addresses == (Addresses{"a", "b"}));
  CHECK_EQ(rig.pool->set_addresses({"d", "c", "b"}), 1u);
  CHECK(rig.pool->stats().stream_addresses == (Addresses{"d", "b"}));
  CHECK_EQ(rig.pool->set_addresses({"b", "b"}), 0u);
  CHECK(rig.pool->stats().stream_addresses == (Addresses{"b", "b"}));
}

TEST(a_new_address_has_no_failures_yet) {
  RigOptions options = with_places(1, {"a"});
  options.max_failures = 2;
  Rig rig(options);
  rig.start();
  rig.network->accept()->send(fake::failure("a is ill"));
  wait_until([&] { return rig.pool->stats().failures == 1; });
  rig.pool->set_addresses({"b"});
  fake::ConnectionPtr connection = rig.network->accept();
  while (connection->address == "a") connection = rig.network->accept();
  connection->send(fake::failure("b is ill"));
  connection = rig.network->accept();
  CHECK_EQ(connection->address, "b");
  connection->send(fake::failure("b is worse"));
  CHECK_THROWS(ActorError, "2 times in a row", rig.running.get());
}

TEST(the_servers_that_are_there_complete_the_batches_of_those_that_left) {
  // Two slabs of two lanes. Without a and b, only c is left for both lanes.
  fake::CountingServer server(3);
  Rig rig(with_places(3, {"a", "b", "c"}));
  rig.network->serve("c", &server);
  rig.start();
  rig.start_agent();
  Checker checker(3);
  for (int i = 0; i < 4; ++i) checker.check(*rig.queue->dequeue_many());
  rig.pool->set_addresses({"c"});
  for (int i = 0; i < 4; ++i) checker.check(*rig.queue->dequeue_many());
  CHECK(rig.pool->stats().slabs_open <= 2);
}

TEST(addresses_may_change_before_and_after_the_run) {
  Rig rig(with_places(1, {"a"}));
  rig.pool->set_addresses({"b"});
  rig.start();
  CHECK_EQ(rig.network->accept()->address, "b");
  rig.pool->stop();
  rig.running.get();
  CHECK_EQ(rig.pool->set_addresses({"c", "d"}), 0u);
  CHECK_EQ(rig.network->connections().size(), 1u);
  CHECK(rig.state() == StreamState::kStopped);
}

// --- The address leaves in each state ----------------------------------------

namespace {

void check_leave_in(StreamState state) {
  RigOptions options = with_places(1, {"a"});
  options.maximum_queue_size = kC;
  fake::CountingServer server(3);
  Rig rig(options);
  const auto pending = start_until(rig, state);
  rig.pool->set_addresses({});
  if (pending) {
    // Inference may still read the rollout.
    rig.network->connections()[0]->wait_closed();
    CHECK_EQ(rig.pool->stats().discarded, 0);
    pending->set_outputs(answer(pending->inputs()));
  }
  rig.wait_for(StreamState::kUnused);
  wait_until([&] { return rig.network->num_streams == 0; });
  const PoolStats stats = rig.pool->stats();
  CHECK(is_balanced(stats));
  CHECK_EQ(stats.connected, 0);
  CHECK_EQ(stats.waiting_for_room, 0);
  CHECK_EQ(stats.in_flight, kT * rig.queue->size());

  rig.network->serve("b", &server);
  rig.start_agent();
  rig.pool->set_addresses({"b"});
  Checker checker(3);
  for (int i = 0; i < 3; ++i) checker.check(*rig.queue->dequeue_many());
  CHECK(is_balanced(rig.pool->stats()));
  rig.pool->stop();
}

}  // namespace

TEST(leave_while_waiting_to_connect) {
  check_leave_in(StreamState::kWaitingToConnect);
}
TEST(leave_while_connecting) { check_leave_in(StreamState::kConnecting); }
TEST(leave_while_greeting) { check_leave_in(StreamState::kGreeting); }
TEST(leave_while_waiting_for_env) {
  check_leave_in(StreamState::kWaitingForEnv);
}
TEST(leave_while_waiting_for_inference) {
  check_leave_in(StreamState::kWaitingForInference);
}
TEST(leave_while_waiting_for_room) {
  check_leave_in(StreamState::kWaitingForRoom);
}

// --- Everything at once ------------------------------------------------------

TEST(a_refused_server_gives_its_place_to_one_that_waits) {
  RigOptions options = with_places(2, {"good"});
  options.servers_may_change = true;
  Rig rig(options);
  rig.start();
  Player good(rig.network->accept(), 3);
  good.greet();
  play(rig, good, 3);
  const auto refuse_next = [&](const std::string& address) {
    const auto connection = rig.network->accept();
    CHECK_EQ(connection->address, address);
    connection->receive();
    connection->send(fake::failure("no ROM", true));
    connection->wait_closed();
  };
  CHECK_EQ(rig.pool->set_addresses({"good", "b", "b", "c"}), 2u);
  refuse_next("b");
  refuse_next("c");
  // There is no other server now that was not refused a moment ago.
  rig.wait_for(StreamState::kWaitingToConnect, 1);
  CHECK_EQ(rig.network->num_dialled(), 0u);

  // One that comes later.
  CHECK_EQ(rig.pool->set_addresses({"good", "b", "b", "c", "late"}), 3u);
  Player late(rig.network->accept(), 3);
  CHECK_EQ(late.connection->address, "late");
  late.greet();
  play(rig, late, 3);
  CHECK(rig.pool->stats().stream_addresses == (Addresses{"good", "late"}));
  // The refused servers have not left the list: they wait for a place.
  CHECK_EQ(rig.pool->set_addresses({"good", "c"}), 0u);
  late.connection->wait_closed();
  CHECK_EQ(rig.network->accept()->address, "c");
}

TEST(a_server_that_cannot_be_reached_gives_its_place_to_one_that_waits) {
  RigOptions options = with_places(1);
  options.first_backoff_s = 1e-9;
  Rig rig(options);
  rig.network->refuse("away");
  rig.network->refuse("also away");
  rig.start();
  CHECK_EQ(rig.pool->set_addresses({"away", "also away", "there"}), 2u);
  Player player(rig.network->accept(), 3);
  CHECK_EQ(player.connection->address, "there");
  player.greet();
  play(rig, player, 3);
  const auto events = rig.pool->take_events();
  CHECK(std::any_of(events.begin(), events.end(), [](const auto& event) {
    return event.starts_with("away (") &&
           event.ends_with("also away gets its place of max_streams");
  }));
  // A place that is free does not go to a server that was tried a moment ago.
  const size_t tried = rig.network->connections().size();
  CHECK_EQ(rig.pool->set_addresses({"away", "late"}), 1u);
  player.connection->wait_closed();
  CHECK_EQ(rig.network->accept()->address, "late");
  CHECK_EQ(rig.network->connections().size(), tried + 1);
  // If no server waits that was not tried a moment ago, it goes on trying.
  CHECK_EQ(rig.pool->set_addresses({"away", "also away"}), 1u);
  const size_t before = rig.network->connections().size();
  wait_until([&] { return rig.network->connections().size() > before + 20; });
}

TEST(random_lists_break_no_rollout) {
  constexpr int kLists = 300;
  constexpr int kServers = 7;
  RigOptions options = with_places(9);
  options.num_envs = 1;
  options.maximum_queue_size = 2 * kC;
  options.num_threads = 3;
  fake::CountingServer server(1);
  Rig rig(options);
  for (int i = 0; i < kServers; ++i) {
    rig.network->serve(std::to_string(i), &server);
  }
  rig.start();
  rig.start_agent();
  rig.start_agent();
  Checker checker(1);
  auto learner = background([&] {
    while (const auto batch = rig.queue->dequeue_many()) checker.check(*batch);
  });
  std::minstd_rand random(5);
  size_t most = 0;
  for (int i = 0; i < kLists; ++i) {
    Addresses addresses;  // Each server up to twice.
    for (int j = 0; j < 2 * kServers; ++j) {
      if (random() % 2) addresses.push_back(std::to_string(j / 2));
    }
    std::shuffle(addresses.begin(), addresses.end(), random);
    most = std::max(most, addresses.size());
    const size_t left_out = rig.pool->set_addresses(addresses);
    CHECK_EQ(left_out,
             addresses.size() - std::min<size_t>(addresses.size(), 9));
    // Now and then another server is lost at the same time.
    const auto connections = rig.network->connections();
    if (!connections.empty() && random() % 3 == 0) {
      connections[random() % connections.size()]->close();
    }
    CHECK(is_balanced(rig.pool->stats()));
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 4));
  }
  CHECK(most > 9);
  rig.pool->set_addresses({"3"});
  wait_until([&] {
    const PoolStats stats = rig.pool->stats();
    return stats.connected == 1 &&
           std::count(stats.states.begin(), stats.states.end(),
                      StreamState::kUnused) == 8;
  });
  wait_until([&] { return rig.network->num_streams == 1; });
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
}
