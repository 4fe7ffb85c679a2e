// SPDX-License-Identifier: Apache-2.0

#include "actor_stream.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fake_servers.h"
#include "pool_rig.h"
#include "testing.h"

using namespace torchbeast;
using testing::background;
using testing::wait_until;

TEST(states_and_ledger_of_one_stream_step_by_step) {
  Rig rig(RigOptions{.num_envs = 3});
  rig.start();
  wait_until([&] { return rig.network->num_dialled() == 1; });
  CHECK(rig.state() == StreamState::kConnecting);
  Player player(rig.network->accept(), 3);
  rig.wait_for(StreamState::kGreeting);
  CHECK_EQ(rig.pool->stats().connected, 0);
  player.greet();
  CHECK_EQ(player.hello.version, "1.2.3");
  CHECK_EQ(player.hello.run_id, "run");
  CHECK_EQ(player.hello.info_keys.at(0), "game_return");
  CHECK_EQ(player.hello.seed, 23);
  CHECK_EQ(player.hello.first_env_id, 0);
  CHECK_EQ(player.hello.incarnation, 100);
  // Tuple rows do not have the key `truncated`.
  CHECK(player.hello.truncation_is_done);
  rig.wait_for(StreamState::kWaitingForEnv);
  CHECK_EQ(rig.pool->stats().connected, 1);
  CHECK_EQ(rig.pool->stats().slabs_open, 0);
  Checker checker(3);
  for (int64_t n = 0; n <= 2 * kT; ++n) {
    player.step();
    rig.wait_for(StreamState::kWaitingForInference);
    PoolStats stats = rig.pool->stats();
    CHECK_EQ(stats.received, 3 * n);  // The first row is no step.
    CHECK_EQ(stats.in_flight, 3 * n);
    CHECK(is_balanced(stats));
    // Two rollouts of K = 3 make a batch of C = 6; then the next slab begins.
    CHECK_EQ(rig.queue->size(), n < 2 * kT ? 0 : kC);
    CHECK_EQ(stats.slabs_open, 1);
    rig.answer_batch();
    player.take_action();
    rig.wait_for(StreamState::kWaitingForEnv);
  }
  checker.check(*rig.queue->dequeue_many());
  PoolStats stats = rig.pool->stats();
  CHECK_EQ(stats.dequeued, kT * kC);
  CHECK_EQ(stats.in_flight, 0);
  CHECK(is_balanced(stats));
  CHECK_EQ(stats.addresses.size(), 1u);
  CHECK_EQ(stats.addresses[0].address, "a");
  CHECK_EQ(stats.addresses[0].streams, 1);
  CHECK_EQ(stats.addresses[0].connected, 1);
  CHECK_EQ(stats.addresses[0].steps, 3 * 2 * kT);
  CHECK(stats.addresses[0].p50_ms > 0);
  CHECK(stats.addresses[0].p99_ms >= stats.addresses[0].p50_ms);
}

// --- Streams that end --------------------------------------------------------

namespace {

// A stream of K = 3 is lost in the given state. The next connection must begin
// with a new rollout, and its rollouts must be complete.
void check_loss_in(StreamState state, int64_t rows_before) {
  RigOptions options;
  options.num_envs = 3;
  if (state == StreamState::kWaitingForRoom) options.maximum_queue_size = kC;
  Rig rig(options);
  rig.start();
  Checker checker(3);

  Player first(rig.network->accept(), 3);
  bool welcomed = false;
  std::shared_ptr<Batch> pending;
  rig.wait_for(StreamState::kGreeting);
  if (state != StreamState::kGreeting) {
    welcomed = true;
    first.greet();
    rig.wait_for(StreamState::kWaitingForEnv);
    play(rig, first, rows_before);
    if (state == StreamState::kWaitingForInference) {
      first.step();
      pending = rig.batcher->get_batch();
    }
    if (state == StreamState::kWaitingForRoom) first.step();
  }
  rig.wait_for(state);
  const PoolStats before = rig.pool->stats();
  CHECK(is_balanced(before));
  first.connection->close("lost in the test");
  if (pending) {
    // No other rollout may get the lane before the answer.
    wait_until([&] { return rig.pool->stats().connected == 0; });
    CHECK(rig.state() == StreamState::kWaitingForInference);
    CHECK_EQ(rig.pool->stats().discarded, 0);
    CHECK(is_balanced(rig.pool->stats()));
    pending->set_outputs(answer(pending->inputs()));
  }

  Player second(rig.network->accept(), 3);
  const PoolStats between = rig.pool->stats();
  CHECK(is_balanced(between));
  CHECK_EQ(between.received, before.received);
  // All rows of the unfinished rollout, none of the finished ones.
  const int64_t rows =
      std::max<int64_t>(rows_before - 1 + (pending != nullptr), 0);
  CHECK_EQ(between.discarded,
           state == StreamState::kWaitingForRoom ? 0 : 3 * (rows % kT));
  second.greet();
  CHECK_EQ(second.hello.incarnation, welcomed ? 101 : 100);
  CHECK_EQ(second.hello.first_env_id, 0);
  if (state == StreamState::kWaitingForRoom) {
    checker.check(*rig.queue->dequeue_many());
  }
  // Two rollouts of the new connection, and the row that ends the second one.
  play(rig, second, 2 * kT);
  second.step();
  checker.check(*rig.queue->dequeue_many());
  if (rig.queue->size() > 0) checker.check(*rig.queue->dequeue_many());
  CHECK_EQ(rig.pool->stats().reconnects, welcomed ? 1 : 0);
  CHECK(is_balanced(rig.pool->stats()));

  const std::vector<std::string> events = rig.pool->take_events();
  CHECK(events.size() >= 1);
  CHECK(events[0].find("lost in the test") != std::string::npos);
  CHECK(events[0].find("a (stream 0") != std::string::npos);
  CHECK(rig.pool->take_events().empty());
}

}  // namespace

TEST(a_stream_lost_while_greeting_comes_back) {
  check_loss_in(StreamState::kGreeting, 0);
}
TEST(a_stream_lost_before_its_first_row_comes_back) {
  check_loss_in(StreamState::kWaitingForEnv, 0);
}
TEST(a_stream_lost_after_its_first_row_comes_back) {
  check_loss_in(StreamState::kWaitingForEnv, 1);
}
TEST(a_stream_lost_within_a_rollout_comes_back) {
  check_loss_in(StreamState::kWaitingForEnv, 4);
}
TEST(a_stream_lost_in_its_second_rollout_comes_back) {
  check_loss_in(StreamState::kWaitingForEnv, kT + 3);
}
TEST(a_stream_lost_while_the_agent_thinks_comes_back) {
  check_loss_in(StreamState::kWaitingForInference, 3);
}
TEST(a_stream_lost_while_the_agent_thinks_about_row_0_comes_back) {
  check_loss_in(StreamState::kWaitingForInference, 0);
}
TEST(a_stream_lost_while_it_waits_for_room_comes_back) {
  check_loss_in(StreamState::kWaitingForRoom, 2 * kT);
}

TEST(a_server_that_is_away_is_tried_again_and_noted_once) {
  fake::CountingServer server(3);
  Rig rig(RigOptions{.num_envs = 3});
  rig.network->serve("a", &server);
  rig.network->refuse("a");
  rig.start();
  rig.start_agent();
  wait_until([&] { return rig.network->connections().size() >= 4; });
  const auto events = rig.pool->take_events();
  CHECK_EQ(events.size(), 1u);
  CHECK(events[0].find("connection refused") != std::string::npos);
  rig.network->refuse("a", false);
  Checker checker(3);
  checker.check(*rig.queue->dequeue_many());
  CHECK(checker.has_seen(0, 100,
                         0));  // Failed attempts do not count as incarnations.
  CHECK_EQ(rig.pool->stats().failures, 0);
}

TEST(each_new_reason_why_a_server_takes_no_stream_is_noted_once) {
  Rig rig;
  rig.start();
  // The first one is noted again after another one, and after a step.
  for (const char* reason : {"refused", "busy", "busy", "refused"}) {
    rig.network->accept()->close(reason);
  }
  Player player(rig.network->accept());
  player.greet();
  play(rig, player, 2);
  player.connection->close("lost");
  for (const char* reason : {"refused", "refused"}) {
    rig.network->accept()->close(reason);
  }
  wait_until([&] { return rig.network->num_dialled() == 1; });
  std::vector<std::string> reasons;
  for (const std::string& event : rig.pool->take_events()) {
    reasons.push_back(event.substr(event.rfind(' ') + 1));
  }
  CHECK((reasons == std::vector<std::string>{"refused", "busy", "refused",
                                             "lost", "refused"}));
}

TEST(a_stream_with_another_address_notes_the_reason_of_its_new_server) {
  Rig rig;
  rig.start();
  rig.network->accept()->close("refused");
  const auto again = rig.network->accept();
  CHECK_EQ(rig.pool->take_events().size(), 1u);
  rig.pool->set_addresses({"b"});
  again->wait_closed();
  rig.network->accept()->close("refused");
  wait_until([&] { return rig.network->num_dialled() == 1; });
  const auto events = rig.pool->take_events();
  CHECK_EQ(events.size(), 1u);
  CHECK(events[0].starts_with("b (stream 0"));
}

TEST(no_stream_comes_again_at_once_while_all_are_turned_away) {
  RigOptions options;
  options.addresses = {"a", "b"};
  Rig rig(options);
  rig.network->refuse("a");
  rig.network->refuse("b");
  const auto began = std::chrono::steady_clock::now();
  rig.start();
  // Four attempts of one stream are at least 0.05, 0.1 and 0.2 s apart.
  wait_until([&] { return rig.network->connections().size() >= 8; });
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - began;
  CHECK(took.count() >= 0.35);
}

TEST(a_first_server_that_is_away_does_not_stop_the_others) {
  RigOptions options;
  options.num_envs = 3;
  options.addresses = {"away", "b", "c"};
  fake::CountingServer server(3);
  Rig rig(options);
  rig.network->refuse("away");
  rig.network->serve("away", &server);
  rig.network->serve("b", &server);
  rig.network->serve("c", &server);
  rig.start();
  rig.start_agent();
  Checker checker(3);
  while (!checker.has_seen(3, 100, 0) || !checker.has_seen(6, 100, 0)) {
    checker.check(*rig.queue->dequeue_many());
  }
  CHECK(!checker.has_seen(0, 100, 0));
  CHECK_EQ(rig.pool->stats().connected, 2);
  rig.network->refuse("away", false);
  while (!checker.has_seen(0, 100, 0)) {
    checker.check(*rig.queue->dequeue_many());
  }
  rig.pool->stop();
  CHECK_EQ(server.errors(), 0);
}

// --- Servers that do not answer ----------------------------------------------

TEST(a_server_that_does_not_greet_is_given_up_and_tried_again_for_ever) {
  RigOptions options;
  options.step_timeout_s = 0.02;
  options.max_failures = 1;
  Rig rig(options);
  rig.start();
  for (int i = 0; i < 5; ++i) {
    Player player(rig.network->accept());
    player.connection->receive();  // Hello.
    player.connection->wait_closed();
  }
  CHECK_EQ(rig.pool->stats().failures, 0);
  CHECK(rig.pool->take_events().at(0).find("not answered for 0.02 s") !=
        std::string::npos);
}

TEST(a_server_that_never_sends_its_first_row_is_given_up) {
  RigOptions options;
  options.step_timeout_s = 0.5;
  Rig rig(options);
  rig.start();
  Player player(rig.network->accept());
  player.greet();
  player.connection->wait_closed();
  Player(rig.network->accept()).greet();
  rig.wait_for(StreamState::kWaitingForEnv);
  CHECK_EQ(rig.pool->stats().reconnects, 1);
}

TEST(a_server_that_sends_no_welcome_does_not_hold_the_others) {
  RigOptions options;
  options.addresses = {"a", "b"};
  Rig rig(options);
  rig.start();
  const auto silent = rig.network->accept();
  CHECK_EQ(silent->address, "a");
  Player other(rig.network->accept());
  other.greet();
  play(rig, other, kT);
  CHECK_EQ(other.hello.first_env_id, 1);
  CHECK_EQ(rig.pool->stats().received, kT - 1);
}

TEST(a_server_that_hangs_in_a_step_is_given_up_and_its_rollout_discarded) {
  RigOptions options;
  options.step_timeout_s = 0.5;
  Rig rig(options);
  rig.start();
  Player player(rig.network->accept());
  player.greet();
  play(rig, player, 3);
  CHECK(rig.pool->stats().waiting_s.at(0) > 0);
  player.connection->wait_closed();
  Player again(rig.network->accept());
  again.greet();
  rig.wait_for(StreamState::kWaitingForEnv);
  const PoolStats stats = rig.pool->stats();
  CHECK_EQ(stats.received, 2);
  CHECK_EQ(stats.discarded, 2);
  CHECK(is_balanced(stats));
}

TEST(a_server_is_not_given_up_for_a_slow_agent) {
  RigOptions options;
  options.addresses = {"a", "silent"};
  options.step_timeout_s = 0.5;
  Rig rig(options);
  rig.start();
  Player player(rig.network->accept());
  player.greet();
  player.step();
  rig.wait_for(StreamState::kWaitingForInference);
  CHECK_EQ(rig.pool->stats().waiting_s.at(0), 0);
  // Meanwhile a server would have been given up three times.
  for (int i = 0; i < 3; ++i) rig.network->accept()->wait_closed();
  CHECK(rig.state() == StreamState::kWaitingForInference);
  rig.answer_batch();
  player.take_action();
}

TEST(a_goodbye_is_no_failure) {
  RigOptions options;
  options.max_failures = 1;
  Rig rig(options);
  rig.start();
  Player player(rig.network->accept());
  player.greet();
  player.connection->send(fake::goodbye("SIGTERM"));
  Player again(rig.network->accept());
  again.greet();
  rig.wait_for(StreamState::kWaitingForEnv);
  CHECK_EQ(rig.pool->stats().failures, 0);
  CHECK_EQ(rig.pool->stats().reconnects, 1);
  CHECK(rig.pool->take_events().at(0).find("goodbye: SIGTERM") !=
        std::string::npos);
}

// --- Servers that fail -------------------------------------------------------

TEST(a_permanent_failure_ends_the_run_with_the_servers_words) {
  Rig rig;
  rig.start();
  Player player(rig.network->accept());
  player.greet();
  play(rig, player, 3);
  player.connection->send(fake::failure("Traceback: no ROM\x01\xff", true));
  CHECK_THROWS(ActorError,
               "a (stream 0, environments 0 to 0), step 3: the server reports "
               "a failure: Traceback: no ROM??",
               rig.running.get());
  CHECK(player.connection->has_ended());
  const PoolStats stats = rig.pool->stats();
  CHECK_EQ(stats.discarded, 2);
  CHECK(is_balanced(stats));
  CHECK(stats.states.at(0) == StreamState::kStopped);
}

TEST(a_server_that_does_not_fit_is_refused_if_servers_may_change) {
  RigOptions options;
  options.addresses = {"a"};
  options.max_streams = 2;
  options.max_failures = 1;
  options.servers_may_change = true;
  Rig rig(options);
  rig.start();
  Player first(rig.network->accept());
  first.greet();
  play(rig, first, 3);
  rig.pool->set_addresses({"a", "b"});
  const auto second = rig.network->accept();
  second->receive();
  fake::WelcomeOptions other;
  other.env = "Other";
  second->send(fake::welcome(other));
  rig.wait_for(StreamState::kWaitingToConnect, 1);
  const auto events = rig.pool->take_events();
  CHECK_EQ(events.size(), 1u);
  CHECK(events[0].starts_with("b (stream 1"));
  CHECK(events[0].find("refused; the run goes on without it and asks it again "
                       "within 60 s: this server differs from a: env is "
                       "'Other', expected 'Counting'") != std::string::npos);

  // The same for a permanent failure. Another server is asked at once.
  play(rig, first, 3);
  first.connection->send(fake::failure("no ROM", true));
  rig.wait_for(StreamState::kWaitingToConnect, 0);
  rig.pool->set_addresses({"c"});
  Player third(rig.network->accept());
  third.greet();
  play(rig, third, 3);
  CHECK_EQ(rig.network->num_dialled(), 0u);
  CHECK_EQ(rig.pool->stats().failures, 2);
  CHECK(is_balanced(rig.pool->stats()));
}

TEST(a_first_server_that_does_not_fit_has_some_tries_if_servers_may_change) {
  RigOptions options;
  options.max_failures = 3;
  options.servers_may_change = true;
  Rig rig(options);
  rig.start();
  for (int i = 0; i < 3; ++i) {
    const auto connection = rig.network->accept();
    connection->receive();
    connection->send(fake::failure("no ROM", true));
  }
  CHECK_THROWS(ServerMismatch, "the server reports a failure: no ROM",
               rig.running.get());
}

TEST(failures_in_a_row_end_the_run) {
  RigOptions options;
  options.max_failures = 3;
  Rig rig(options);
  rig.start();
  for (int i = 0; i < 3; ++i) {
    Player player(rig.network->accept());
    CHECK_EQ(rig.pool->stats().failures, i);
    player.greet();
    play(rig, player, kT - 1);
    player.connection->send(fake::failure("boom " + std::to_string(i)));
  }
  CHECK_THROWS(ActorError,
               "failed 3 times in a row without finishing a rollout; now: the "
               "server reports a failure: boom 2",
               rig.running.get());
  CHECK_EQ(rig.pool->stats().discarded, 3 * (kT - 2));
}

TEST(failures_in_a_row_end_only_their_stream_while_another_server_plays) {
  RigOptions options;
  options.addresses = {"a"};
  options.max_streams = 2;
  options.max_failures = 3;
  options.servers_may_change = true;
  Rig rig(options);
  rig.start();
  Player good(rig.network->accept());
  good.greet();
  play(rig, good, 3);
  rig.pool->set_addresses({"a", "b"});
  for (int i = 0; i < 3; ++i) {
    Player bad(rig.network->accept());
    bad.greet();
    bad.connection->send("garbage");
    bad.connection->wait_closed();
  }
  const auto events = rig.pool->take_events();
  CHECK(events.back().find("refused; the run goes on without it") !=
        std::string::npos);
  CHECK(events.back().find(
            "failed 3 times in a row without finishing a rollout; now: the "
            "server sent a malformed message") != std::string::npos);
  play(rig, good, 1);

  // Nobody else plays when this one fails too often.
  good.connection->send(fake::failure("boom"));
  for (int i = 0; i < 2; ++i) {
    Player again(rig.network->accept());
    again.greet();
    again.connection->send(fake::failure("boom"));
  }
  CHECK_THROWS(ActorError,
               "a (stream 0, environments 0 to 0), step 0: failed 3",
               rig.running.get());
}

TEST(a_failure_reaches_who_watches_tuples_by_the_size_of_a_queue) {
  for (const bool named_rows : {false, true}) {
    RigOptions options;
    options.max_failures = 1;
    options.named_rows = named_rows;
    Rig rig(options);
    rig.start();
    auto agent = background([&] { return rig.batcher->get_batch(); });
    auto learner = background([&] { return rig.queue->dequeue_many(); });
    Player player(rig.network->accept());
    player.greet();
    player.connection->send(fake::failure("boom"));
    CHECK_THROWS(ActorError, "boom", rig.running.get());
    if (named_rows) {  // Such learners watch run().
      CHECK_EQ(rig.queue->size() + rig.batcher->size(), 0);
      rig.queue->close();
      rig.batcher->close();
    } else {
      CHECK_THROWS(ActorError, "boom", rig.queue->size());
      CHECK_THROWS(ActorError, "boom", rig.batcher->size());
    }
    CHECK(!agent.get());
    CHECK(!learner.get());
  }
}

namespace {

void check_forgives(int max_failures) {
  RigOptions options;
  options.max_failures = max_failures;
  Rig rig(options);
  rig.start();
  for (int i = 0; i < 4; ++i) {
    Player player(rig.network->accept());
    player.greet();
    play(rig, player, kT + 1);
    player.connection->send(fake::failure("boom"));
  }
  Player player(rig.network->accept());
  CHECK_EQ(rig.pool->stats().failures, 4);
}

}  // namespace

TEST(a_finished_rollout_forgives_failures) { check_forgives(2); }

TEST(failures_may_be_without_limit) {
  check_forgives(std::numeric_limits<int>::max());
}

TEST(a_stream_that_has_worked_may_fail_four_times_as_often) {
  RigOptions options;
  options.max_failures = 2;
  Rig rig(options);
  rig.start();
  {
    Player player(rig.network->accept());
    player.greet();
    play(rig, player, kT + 1);
    player.connection->send(fake::failure("boom 1"));
  }
  for (int i = 2; i <= 8; ++i) {
    Player player(rig.network->accept());
    CHECK_EQ(rig.pool->stats().failures, i - 1);
    player.greet();
    player.connection->send(fake::failure("boom " + std::to_string(i)));
  }
  CHECK_THROWS(ActorError, "failed 8 times in a row", rig.running.get());
}

TEST(an_end_that_is_not_transient_counts_as_a_failure) {
  RigOptions options;
  options.max_failures = 2;
  Rig rig(options);
  rig.start();
  rig.network->accept()->close("UNIMPLEMENTED: no such method", false);
  rig.network->accept()->close("UNIMPLEMENTED: no such method", false);
  CHECK_THROWS(ActorError,
               "a (stream 0, environments 0 to 0), step 0: failed 2 times",
               rig.running.get());
}

TEST(messages_that_are_wrong_end_their_stream_only) {
  struct Case {
    std::string message;
    std::string says;
  };
  // The stream is in state kWaitingForEnv, for Step 2.
  const auto right = fake::step(0, 1, 100, 2, {1});
  auto too_short = right.substr(0, right.size() - 3);
  auto not_finite = right;
  const std::string reward = fake::raw(fake::reward_of(2));
  not_finite.replace(not_finite.find(reward), reward.size(),
                     fake::raw(std::numeric_limits<float>::infinity()));
  const std::vector<Case> cases = {
      {"\xff\xff\xff", "in the middle of a field"},
      {"", "no message known here"},
      {fake::bytes(7, "future"), "no message known here"},
      {right + right, "two messages"},
      {too_short, "bytes has only"},
      {fake::number(2, 5), "field 2 has wire type 0, expected 2"},
      {fake::step(0, 1, 100, 1, {1}), "Step 1, expected Step 2"},
      {fake::step(0, 1, 100, 3, {1}), "Step 3, expected Step 2"},
      {fake::step(0, 2, 100, 2, {1, 1}),
       "array observation.count has 48 bytes, expected 24 (1 of int64[3])"},
      {fake::bytes(2, fake::fixed64(1, 2)), "it has 0 arrays, expected 9"},
      {fake::bytes(2, fake::parse(right)[0].bytes + fake::number(3, 1)),
       "array observation.frame has 5 bytes, expected 1 (1 newest frames of"},
      {fake::welcome({}), "a second Welcome"},
      {fake::step(0, 1, 1001, 2, {1}),
       "array observation.count of environment 0 in this stream has 1001, "
       "expected 0 to 1000"},
      {fake::step(0, 1, 100, 2, {-1}),
       "array last_action of environment 0 in this stream has -1, expected 0 "
       "to 1000"},
      {not_finite,
       "array reward of environment 0 in this stream has inf, expected a "
       "finite number"},
  };
  RigOptions options;
  options.value_ranges = {
      {{{false, "observation"}, {false, "count"}}, {0, 0, 0}, {9, 1000, 9}},
      {{{false, "last_action"}}, {0}, {1000}}};
  options.max_failures = 100;
  Rig rig(options);
  rig.start();
  for (const Case& c : cases) {
    rig.pool->take_events();
    Player player(rig.network->accept());
    player.greet();
    play(rig, player, 2);
    player.connection->send(c.message, 3);
    wait_until([&] { return player.connection->has_ended(); });
    bool found = false;
    for (const std::string& event : rig.pool->take_events()) {
      found = found || (event.find(c.says) != std::string::npos &&
                        event.find("step 2") != std::string::npos);
    }
    if (!found) std::fprintf(stderr, "expected: %s\n", c.says.c_str());
    CHECK(found);
  }
  const PoolStats stats = rig.pool->stats();
  CHECK_EQ(stats.failures, static_cast<int64_t>(cases.size()));
  CHECK(is_balanced(stats));
}

TEST(newest_frames_must_have_some_before_them) {
  RigOptions options;
  options.max_failures = 100;
  Rig rig(options);
  rig.start();
  Player first(rig.network->accept());
  first.greet();
  first.connection->send(fake::step(0, 1, 100, 0, {0}, true));
  first.connection->wait_closed();
  Player last(rig.network->accept());
  last.greet();
  play(rig, last, kT);
  last.connection->send(fake::step(0, 1, 101, kT, {kT - 1}, true));
  last.connection->wait_closed();
  const std::vector<std::string> events = rig.pool->take_events();
  const auto is_said = [&](const std::string& text) {
    return std::any_of(events.begin(), events.end(), [&](const auto& event) {
      return event.find(text) != std::string::npos;
    });
  };
  CHECK(is_said("the first Step has only the newest frames"));
  CHECK(is_said("Step 5 has only the newest frames, expected all"));
}

TEST(a_step_before_its_time_ends_the_stream) {
  Rig rig;
  rig.start();
  Player early(rig.network->accept());
  early.connection->send(fake::step(0, 1, 0, 0, {0}));
  Player eager(rig.network->accept());
  eager.greet();
  eager.step();
  rig.wait_for(StreamState::kWaitingForInference);
  eager.step();
  wait_until([&] { return eager.connection->has_ended(); });
  rig.answer_batch();
  Player player(rig.network->accept());
  const auto events = rig.pool->take_events();
  CHECK(events.at(0).find("a Step before the Welcome") != std::string::npos);
  CHECK(events.at(1).find("a Step before the Action") != std::string::npos);
}
