// SPDX-License-Identifier: Apache-2.0

#include "env_spec.h"

#include <string>

#include "fake_servers.h"
#include "pool_rig.h"
#include "testing.h"

using namespace torchbeast;

TEST(inference_keys_must_be_what_servers_send) {
  RigOptions options;
  options.num_envs = 3;
  options.named_rows = true;
  options.inference_keys = {"observation", "rewards"};
  fake::CountingServer server(3);
  Rig rig(options);
  rig.network->serve("a", &server);
  rig.start();
  CHECK_THROWS(
      std::invalid_argument,
      "inference_keys holds 'rewards', but the environment servers send",
      rig.running.get());

  options.named_rows = false;
  CHECK_THROWS(std::invalid_argument, "inference_keys needs named_rows",
               Rig{options});
}

namespace {

void check_welcome(const fake::WelcomeOptions& options,
                   const std::string& text) {
  Rig rig;
  rig.start();
  const auto connection = rig.network->accept();
  connection->receive();
  connection->send(fake::welcome(options));
  CHECK_THROWS(ActorError, text, rig.running.get());
}

fake::WelcomeOptions with_array(size_t index, const std::string& array) {
  fake::WelcomeOptions options;
  options.step_arrays.at(index) = array;
  return options;
}

wire::Welcome read_welcome(const fake::WelcomeOptions& options) {
  const std::string text = fake::welcome(options);
  Segments message;
  message.parts.emplace_back(text);
  return wire::decode_welcome(message, wire::open(message).body);
}

void check_second_welcome(const fake::WelcomeOptions& options,
                          const std::string& text) {
  RigOptions rig_options;
  rig_options.addresses = {"a", "b"};
  Rig rig(rig_options);
  rig.start();
  Player first(rig.network->accept());
  first.greet();
  rig.wait_for(StreamState::kWaitingForEnv);
  const auto second = rig.network->accept();
  second->receive();
  second->send(fake::welcome(options));
  CHECK_THROWS(ActorError, "this server differs from a: " + text,
               rig.running.get());

  // The same if the first server was only described.
  RigOptions described;
  described.welcome = read_welcome({});
  Rig other(described);
  other.start();
  const auto only = other.network->accept();
  only->receive();
  only->send(fake::welcome(options));
  CHECK_THROWS(ActorError,
               "differs from the server that the model was made for: " + text,
               other.running.get());
}

}  // namespace

TEST(a_welcome_of_another_protocol_ends_the_run) {
  fake::WelcomeOptions options;
  options.protocol = 2;
  check_welcome(options, "speaks version 2 of the protocol, expected 1");
}

TEST(a_welcome_must_have_the_rows_of_a_rollout) {
  check_welcome(with_array(2, fake::array({"rewards"}, "float32")),
                "lack 'reward'");
  check_welcome(with_array(2, fake::array({"reward"}, "float64")),
                "says reward float64[], expected reward float32[]");
  check_welcome(with_array(3, fake::array({"done"}, "bool", {1})),
                "says done bool[1], expected done bool[]");
  check_welcome(with_array(3, fake::array({"done", "yes"}, "bool")),
                "says a {yes: *}, expected done bool[]");
  fake::WelcomeOptions options;
  for (int i = 0; i < 100; ++i) {  // The message must be cut off.
    options.step_arrays.push_back(fake::array(
        {"done", std::to_string(i) + std::string(200, 'x')}, "bool"));
  }
  options.step_arrays.erase(options.step_arrays.begin() + 3);
  check_welcome(options, "x, expected done bool[]");
  options = {};
  options.step_arrays.erase(options.step_arrays.begin(),
                            options.step_arrays.begin() + 2);
  check_welcome(options, "lack 'observation'");
  check_welcome(with_array(1, fake::array({"observation"}, "uint8")),
                "array observation stands where another one does");
  check_welcome(with_array(1, fake::array({"observation", "frame"}, "uint8",
                                          {1 << 14, 1 << 15})),
                "larger than 256 MiB");
  options = {};
  options.num_envs = 4;
  check_welcome(options,
                "plays 4 environments per stream, expected 1 (num_envs)");
}

// Its text is "reward", too.
TEST(an_array_below_an_empty_name_does_not_take_the_place_of_the_reward) {
  fake::WelcomeOptions options;
  options.step_arrays.push_back(fake::array({"", "reward"}, "uint8"));
  const wire::Welcome welcome = read_welcome(options);
  SpecOptions spec_options;
  spec_options.initial_agent_state.structure = Structure::tuple({});
  const auto buffers = BufferPool::create();
  const EnvSpec spec =
      make_env_spec("a", welcome, 1000, spec_options, *buffers);
  CHECK_EQ(welcome.step_arrays.at(spec.reward).path.size(), size_t{1});
}

TEST(a_batch_must_have_room_for_the_environments_of_a_stream) {
  CHECK_THROWS(std::invalid_argument,
               "num_envs is 4, and no multiple of it is a batch of 6 to 6",
               Rig(RigOptions{.num_envs = 4}));
  CHECK_THROWS(std::invalid_argument,
               "choose a maximum_batch_size of at least 8",
               Rig(RigOptions{.num_envs = 8}));
}

TEST(a_pool_may_know_the_welcome_of_its_servers) {
  fake::CountingServer server(3);
  RigOptions options;
  options.num_envs = 3;
  options.welcome = read_welcome({.num_envs = 3});
  Rig rig(options);
  rig.network->serve("a", &server);
  rig.start();
  rig.start_agent();
  Checker(3).check(*rig.queue->dequeue_many());
  options.num_envs = 2;
  CHECK_THROWS(std::invalid_argument,
               "environments per stream (3) than num_envs (2)", Rig{options});
}

TEST(a_pool_that_knows_the_welcome_refuses_also_the_first_server_to_connect) {
  fake::CountingServer server(1);
  RigOptions options;
  options.addresses = {"a", "b"};
  options.max_failures = 1;
  options.servers_may_change = true;
  options.welcome = read_welcome({});
  Rig rig(options);
  rig.start();
  const auto first = rig.network->accept();
  first->receive();
  first->send(fake::failure("another protocol", true));
  rig.network->accept()->close("a wrong certificate", false);
  rig.wait_for(StreamState::kWaitingToConnect, 0);
  rig.wait_for(StreamState::kWaitingToConnect, 1);
  const auto events = rig.pool->take_events();
  CHECK_EQ(events.size(), 2u);
  for (const std::string& event : events) {
    CHECK(event.find("refused; the run goes on") != std::string::npos);
  }
  rig.network->serve("c", &server);
  rig.pool->set_addresses({"c"});
  rig.start_agent();
  Checker(1).check(*rig.queue->dequeue_many());
}

TEST(messages_are_no_larger_than_the_welcome_says) {
  Rig rig(RigOptions{.num_envs = 3});
  rig.start();
  Player first(rig.network->accept(), 3);
  CHECK_EQ(first.connection->max_message_bytes, torchbeast::kMaxMessageBytes);
  first.greet();
  first.step();
  rig.answer_batch();
  first.take_action();
  first.connection->close();
  Player second(rig.network->accept(), 3);
  const size_t limit = second.connection->max_message_bytes;
  CHECK(limit >= first.next().size());
  CHECK(limit >= fake::failure(std::string(64 << 10, 'x'), false).size());
  CHECK(limit < size_t{256} << 10);
}

TEST(a_stream_that_began_before_the_first_welcome_has_the_same_limit) {
  RigOptions options;
  options.addresses = {"a", "b"};
  Rig rig(options);
  rig.start();
  Player first(rig.network->accept());
  Player second(rig.network->accept());
  CHECK_EQ(second.connection->max_message_bytes, torchbeast::kMaxMessageBytes);
  first.greet();
  second.greet();
  // A Step with a long field that the learner does not know.
  second.connection->send(second.next() +
                          fake::bytes(15, std::string(1 << 20, 'x')));
  second.connection->wait_closed();
  CHECK(rig.pool->take_events().at(0).find("bytes, expected at most") !=
        std::string::npos);
}

TEST(a_large_welcome_may_come_again) {
  Rig rig;
  rig.start();
  fake::WelcomeOptions options;
  options.env = std::string(1 << 20, 'x');
  const std::string welcome = fake::welcome(options);
  const auto first = rig.network->accept();
  first->receive();
  first->send(welcome, 1 << 16);
  rig.wait_for(StreamState::kWaitingForEnv);
  first->close();
  CHECK(rig.network->accept()->max_message_bytes >= welcome.size());
}

TEST(all_servers_must_welcome_alike) {
  fake::WelcomeOptions options;
  options.env = "Other";
  check_second_welcome(options, "env is 'Other', expected 'Counting'");
  check_second_welcome(
      with_array(1, fake::array({"observation", "frame"}, "uint8", {7})),
      "step array 1 is observation.frame uint8[7], expected observation.frame "
      "uint8[5]");
  options = {};
  options.step_arrays.pop_back();
  check_second_welcome(options, "step array 8 is missing");
  options = {};
  options.action_arrays = {fake::array({}, "int32")};
  check_second_welcome(
      options, "action array 0 is action int32[], expected action int64[]");
  options = {};
  options.options = {fake::option("frame_skip", 8)};
  check_second_welcome(
      options, "option 'frame_skip' of the environment is 8, expected 4");
  options.options = {};
  check_second_welcome(
      options, "option 'frame_skip' of the environment is missing, expected 4");
  options.options = {fake::option("frame_skip", 4), fake::option("a", 1)};
  check_second_welcome(options,
                       "option 'a' of the environment is 1, expected none");
  options = {};
  options.frames_per_step = 1;
  check_second_welcome(options, "frames_per_step is 1, expected 4");
  options = {};
  options.observation = fake::bytes(2, fake::number(1, 2 * 301));
  check_second_welcome(
      options,
      "its observation space has other bounds or another number of values");
  options = {};
  options.action = fake::bytes(2, fake::number(1, 2 * 301));
  check_second_welcome(
      options, "its action space has other bounds or another number of values");
}
