// SPDX-License-Identifier: Apache-2.0

#include "actor_pool.h"

#include <chrono>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fake_servers.h"
#include "testing.h"

using namespace torchbeast;
using testing::background;
using testing::wait_until;

namespace {

constexpr int64_t kT = 5;
constexpr int64_t kC = 6;  // Columns of a learner batch.

const Array& at(const Nest& nest, const std::string& path) {
  for (size_t i = 0; i < nest.leaves.size(); ++i) {
    if (leaf_path(*nest.structure, i) == path) return nest.leaves[i];
  }
  throw std::logic_error("no leaf " + path + " in " +
                         describe(*nest.structure));
}

template <typename T>
T value(const Array& array, int64_t index) {
  CHECK(index < array.num_elements());
  T result;
  std::memcpy(&result, array.data + index * sizeof(T), sizeof(T));
  return result;
}

template <typename T>
Array make_array(DType dtype, Shape shape, const std::vector<T>& values) {
  static const auto buffers = BufferPool::create();
  Array array = buffers->allocate(dtype, std::move(shape));
  CHECK_EQ(array.nbytes(), values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(array.data, values.data(), array.nbytes());
  return array;
}

Nest initial_state() {
  return {Structure::tuple({Structure::leaf()}),
          {make_array<float>(DType::kFloat32, {2, 1, 3},
                             {0, 10, 20, 100, 110, 120})}};
}

// What the agent answers: see right_action. Its state counts the answers.
Nest answer(const Nest& inputs, bool named_rows = false) {
  const Array& count = at(
      inputs, named_rows ? "[0]['observation']['count']" : "[0][0]['count']");
  const Array& state = at(inputs, "[1][0]");
  const int64_t rows = count.shape[1];
  std::vector<int64_t> actions;
  std::vector<float> logits, states;
  for (int64_t i = 0; i < rows; ++i) {
    const auto env = value<int64_t>(count, 3 * i);
    const auto n = value<int64_t>(count, 3 * i + 2);
    actions.push_back(fake::right_action(env, n));
    logits.push_back(static_cast<float>(env));
    logits.push_back(static_cast<float>(n));
  }
  for (int64_t i = 0; i < state.num_elements(); ++i) {
    states.push_back(value<float>(state, i) + 1);
  }
  const auto leaf = Structure::leaf();
  return {
      Structure::tuple({Structure::dict({{"action", leaf}, {"logits", leaf}}),
                        Structure::tuple({leaf})}),
      {make_array(DType::kInt64, {1, rows}, actions),
       make_array(DType::kFloat32, {1, rows, 2}, logits),
       make_array(DType::kFloat32, {2, rows, 3}, states)}};
}

// Sees to it that learner batches hold what the environments said, row by row,
// every rollout once, and none with rows of two lives.
class Checker {
 public:
  explicit Checker(int64_t num_envs, bool named_rows = false)
      : num_envs_(num_envs), named_rows_(named_rows) {}

  void check(const Nest& batch) {
    const int64_t columns = row(batch, "observation", "['count']").shape[1];
    CHECK_EQ(columns % num_envs_, 0);
    CHECK_EQ(row(batch, "observation", "['count']").shape[0], kT + 1);
    for (int64_t c = 0; c < columns; ++c) check_column(batch, c, columns);
    rollouts_ += columns;
  }

  int64_t rollouts() const { return rollouts_; }

  // Rollouts that have not come although a later one of their life has: those
  // in slabs that are not complete.
  int64_t num_overtaken() const {
    std::map<std::pair<int64_t, int64_t>, std::set<int64_t>> lives;
    for (const auto& [env, incarnation, first] : seen_) {
      lives[{env, incarnation}].insert(first / kT);
    }
    int64_t overtaken = 0;
    for (const auto& [life, numbers] : lives) {
      overtaken += *numbers.rbegin() + 1 - static_cast<int64_t>(numbers.size());
    }
    return overtaken;
  }

  bool has_seen(int64_t env, int64_t incarnation, int64_t first) const {
    return seen_.contains({env, incarnation, first});
  }

 private:
  const Array& row(const Nest& batch, const std::string& name,
                   const std::string& below = "") const {
    static const std::map<std::string, std::string> places = {
        {"observation", "[0]"},
        {"reward", "[1]"},
        {"done", "[2]"},
        {"episode_step", "[3]"},
        {"episode_return", "[4]"}};
    return at(batch, "[0][0]" +
                         (named_rows_ ? "['" + name + "']" : places.at(name)) +
                         below);
  }

  void check_column(const Nest& batch, int64_t c, int64_t columns) {
    const Array& count = row(batch, "observation", "['count']");
    const Array& frame = row(batch, "observation", "['frame']");
    const Array& action = at(batch, "[0][1]['action']");
    const Array& logits = at(batch, "[0][1]['logits']");
    const auto env = value<int64_t>(count, 3 * c);
    const auto life = value<int64_t>(count, 3 * c + 1);
    const auto first = value<int64_t>(count, 3 * c + 2);
    CHECK_EQ(first % kT, 0);
    CHECK_EQ(env % num_envs_, c % num_envs_);
    CHECK(seen_.insert({env, life, first}).second);
    for (int64_t t = 0; t <= kT; ++t) {
      const int64_t n = first + t;
      const int64_t i = t * columns + c;
      CHECK_EQ(value<int64_t>(count, 3 * i), env);
      CHECK_EQ(value<int64_t>(count, 3 * i + 1), life);
      CHECK_EQ(value<int64_t>(count, 3 * i + 2), n);
      for (int64_t p = 0; p < fake::kFrames; ++p) {
        CHECK_EQ(value<uint8_t>(frame, fake::kFrames * i + p),
                 fake::pixel_of(env, n, p));
      }
      CHECK_EQ(value<float>(row(batch, "reward"), i), fake::reward_of(n));
      CHECK_EQ(value<bool>(row(batch, "done"), i), fake::done_of(n));
      CHECK_EQ(value<int32_t>(row(batch, "episode_step"), i), n);
      CHECK_EQ(value<float>(row(batch, "episode_return"), i),
               fake::return_of(env, n));
      // The outputs for the row before; none at the start of a life.
      CHECK_EQ(value<int64_t>(action, i),
               n > 0 ? fake::right_action(env, n - 1) : 0);
      CHECK_EQ(value<float>(logits, 2 * i), n > 0 ? env : 0);
      CHECK_EQ(value<float>(logits, 2 * i + 1), n > 0 ? n - 1 : 0);
      if (named_rows_) {
        CHECK_EQ(value<int64_t>(row(batch, "last_action"), i),
                 value<int64_t>(action, i));
        CHECK_EQ(value<float>(row(batch, "info", "['game_return']"), i), 0.25f);
      }
    }
    // The state before row 0: as many answers as rows before it.
    const Array& state = at(batch, "[1][0]");
    CHECK_EQ(state.shape[1], columns);
    for (int64_t outer = 0; outer < 2; ++outer) {
      for (int64_t inner = 0; inner < 3; ++inner) {
        CHECK_EQ(value<float>(state, (outer * columns + c) * 3 + inner),
                 static_cast<float>(100 * outer + 10 * inner + first));
      }
    }
  }

  const int64_t num_envs_;
  const bool named_rows_;
  std::set<std::tuple<int64_t, int64_t, int64_t>> seen_;
  int64_t rollouts_ = 0;
};

bool is_balanced(const PoolStats& stats) {
  return stats.received == stats.dequeued + stats.discarded + stats.in_flight &&
         stats.in_flight >= 0;
}

struct RigOptions {
  std::vector<std::string> addresses = {"a"};
  std::optional<int64_t> maximum_queue_size;
  int64_t minimum_batch_size = kC;
  bool named_rows = false;
  std::vector<std::string> inference_keys;
  std::vector<wire::ValueRange> value_ranges;
  int max_failures = 5;
  double step_timeout_s = 0;
  int num_threads = 2;
};

// A pool with all that it talks to.
struct Rig {
  explicit Rig(const RigOptions& options = {}) {
    QueueOptions queue_options;
    queue_options.minimum_batch_size = options.minimum_batch_size;
    queue_options.maximum_batch_size = kC;
    queue_options.maximum_queue_size = options.maximum_queue_size;
    queue = std::make_shared<BatchingQueue>(queue_options);
    batcher = std::make_shared<DynamicBatcher>(BatcherOptions{});
    PoolOptions pool_options;
    pool_options.unroll_length = kT;
    pool_options.learner_queue = queue;
    pool_options.inference_batcher = batcher;
    pool_options.addresses = options.addresses;
    pool_options.initial_agent_state = initial_state();
    pool_options.named_rows = options.named_rows;
    pool_options.inference_keys = options.inference_keys;
    pool_options.value_ranges = options.value_ranges;
    pool_options.info_keys = {"game_return"};
    pool_options.seed = 23;
    pool_options.run_id = "run";
    pool_options.version = "1.2.3";
    pool_options.first_incarnation = 100;
    pool_options.max_failures = options.max_failures;
    pool_options.step_timeout_s = options.step_timeout_s;
    named_rows = options.named_rows;
    pool = std::make_unique<ActorPool>(
        std::move(pool_options),
        std::make_unique<fake::Transport>(network, options.num_threads));
  }

  ~Rig() {
    if (pool) pool->stop();
    if (!batcher->is_closed()) batcher->close();
    if (!queue->is_closed()) queue->close();
  }

  void start() {
    running = background([this] { pool->run(); });
  }

  // Answers whatever the pool asks, in a thread.
  void start_agent() {
    agents.push_back(background([this] {
      while (const auto batch = batcher->get_batch()) {
        batch->set_outputs(answer(batch->inputs(), named_rows));
      }
    }));
  }

  // Answers one batch.
  void answer_batch() {
    const auto batch = batcher->get_batch();
    batch->set_outputs(answer(batch->inputs(), named_rows));
  }

  StreamState state(size_t stream = 0) const {
    return pool->stats().states.at(stream);
  }
  void wait_for(StreamState expected, size_t stream = 0) const {
    wait_until([&] { return state(stream) == expected; });
  }

  const std::shared_ptr<fake::Network> network =
      std::make_shared<fake::Network>();
  std::shared_ptr<BatchingQueue> queue;
  std::shared_ptr<DynamicBatcher> batcher;
  bool named_rows;
  std::unique_ptr<ActorPool> pool;
  std::future<void> running;
  std::vector<std::future<void>> agents;
};

// A server that the test plays. Everything it says is right unless asked.
struct Player {
  explicit Player(fake::ConnectionPtr to, int64_t K = 1)
      : connection(std::move(to)), num_envs(K), last_actions(K, 0) {}

  void greet() {
    hello = fake::parse_hello(connection->receive());
    fake::WelcomeOptions options;
    options.num_envs = static_cast<uint64_t>(num_envs);
    connection->send(fake::welcome(options));
  }
  std::string next() {
    const bool is_short = fake::may_be_short(hello, whole, n);
    return fake::step(hello.first_env_id, num_envs, hello.incarnation, n++,
                      last_actions, is_short);
  }
  void step() { connection->send(next()); }
  void take_action() {
    const fake::Action action = fake::parse_action(connection->receive());
    CHECK_EQ(action.seq, n - 1);
    last_actions = action.values;
    whole = action.whole;
    CHECK_EQ(whole, n % kT == 0);  // The row that ends a rollout.
    for (int64_t k = 0; k < num_envs; ++k) {
      CHECK_EQ(last_actions.at(k),
               fake::right_action(hello.first_env_id + k, n - 1));
    }
  }

  fake::ConnectionPtr connection;
  int64_t num_envs;
  fake::Hello hello;
  int64_t n = 0;
  std::vector<int64_t> last_actions;
  bool whole = true;
};

// Plays `rows` rows of a stream whose agent is played by the test, too.
void play(Rig& rig, Player& player, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    player.step();
    rig.answer_batch();
    player.take_action();
  }
}

void learn_and_check(int64_t num_envs, size_t num_streams, bool named_rows,
                     std::vector<std::string> inference_keys = {}) {
  RigOptions options;
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
  for (int i = 0; i < 20; ++i) checker.check(*rig.queue->dequeue_many());
  CHECK_EQ(checker.rollouts(), 20 * kC);
  for (size_t i = 0; i < num_streams * num_envs; ++i) {
    CHECK(checker.has_seen(static_cast<int64_t>(i), 100, 0));
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

TEST(inference_keys_must_be_what_servers_send) {
  RigOptions options;
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

TEST(one_stream_fills_a_slab_alone) { learn_and_check(1, 1, false); }

TEST(states_and_ledger_of_one_stream_step_by_step) {
  Rig rig;
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
  // Whoever reads tuples does not see which rows are truncated.
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
    // Two rollouts of K = 3 make a batch of C = 6; the next has begun then.
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

// For ThreadSanitizer: to stop forgets the rollouts that answers are for.
TEST(a_pool_stops_while_agents_answer) {
  for (int i = 0; i < 200; ++i) {
    RigOptions options;
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
  Rig rig;
  rig.start();
  Checker checker(3);
  // Two lives: they begin with the same state. Batches are of one request.
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
  // Never more memory than for the slabs that can be there at the same time.
  CHECK(allocated <= 9u * 6);
  for (int i = 0; i < 50; ++i) checker.check(*rig.queue->dequeue_many());
  CHECK(rig.queue->buffers()->num_allocated() <= 9u * 6);
}

// --- Streams that end --------------------------------------------------------

namespace {

// A stream of K = 3 ends in the given state. What follows must be a new life,
// and its rollouts whole.
void check_loss_in(StreamState state, int64_t rows_before) {
  RigOptions options;
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
    // The lane may not be used before the answer.
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
  // All rows of the rollout under way, none of the finished ones.
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
  // As far as two rollouts of the new life, and the one row more that ends it.
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

TEST(a_lane_with_a_pending_answer_is_not_given_to_another_stream) {
  RigOptions options;
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
  // Two rollouts would fill the slab, if the lane were free.
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
  // Now a later rollout takes it.
  play(rig, other, kT);
  Checker checker(3);
  checker.check(*rig.queue->dequeue_many());
}

TEST(a_server_that_is_away_is_tried_again_and_noted_once) {
  fake::CountingServer server(3);
  Rig rig;
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
  CHECK(checker.has_seen(0, 100, 0));  // Attempts are not incarnations.
  CHECK_EQ(rig.pool->stats().failures, 0);
}

TEST(no_stream_comes_again_at_once_while_all_are_turned_away) {
  RigOptions options;
  options.addresses = {"a", "b"};
  Rig rig(options);
  rig.network->refuse("a");
  rig.network->refuse("b");
  const auto began = std::chrono::steady_clock::now();
  rig.start();
  // Four of one stream: at least 0.05, 0.1 and 0.2 s apart.
  wait_until([&] { return rig.network->connections().size() >= 8; });
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - began;
  CHECK(took.count() >= 0.35);
}

TEST(a_first_server_that_is_away_does_not_stop_the_others) {
  RigOptions options;
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
  // Three times as long as the server would have had.
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
    if (named_rows) {  // They watch run() itself.
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
  CHECK_THROWS(ActorError, "a (stream 0), step 0: failed 2 times",
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

// --- Servers that do not fit -------------------------------------------------

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

void check_second_welcome(const fake::WelcomeOptions& options,
                          const std::string& text) {
  RigOptions rig_options;
  rig_options.addresses = {"a", "b"};
  Rig rig(rig_options);
  rig.start();
  Player first(rig.network->accept());
  first.greet();
  const auto second = rig.network->accept();
  second->receive();
  second->send(fake::welcome(options));
  CHECK_THROWS(ActorError, "this server differs from a: " + text,
               rig.running.get());
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
  for (int i = 0; i < 100; ++i) {  // Not all of it is shown.
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
  options.num_envs = 0;
  check_welcome(options, "0 num_envs");
}

TEST(a_batch_must_have_room_for_the_environments_of_a_stream) {
  Rig rig;
  rig.start();
  const auto connection = rig.network->accept();
  connection->receive();
  fake::WelcomeOptions options;
  options.num_envs = 4;
  connection->send(fake::welcome(options));
  CHECK_THROWS(std::invalid_argument,
               "play 4 environments per stream, and no multiple of that is a "
               "batch of 6 to 6 rollouts",
               rig.running.get());
}

TEST(messages_are_no_larger_than_the_welcome_says) {
  Rig rig;
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
  options = {};
  options.num_envs = 2;
  check_second_welcome(options, "num_envs is 2, expected 1");
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
  check_second_welcome(options,
                       "option 'frame_skip' of the environment is not");
  options.options = {};
  check_second_welcome(options,
                       "option 'frame_skip' of the environment is not");
  options.options = {fake::option("frame_skip", 4), fake::option("a", 1)};
  check_second_welcome(options,
                       "option 'a' of the environment is not the same");
}

// --- Agents that do not fit --------------------------------------------------

namespace {

// The first answer is right; the next is changed.
void check_second_answer(const std::function<void(Nest&)>& change,
                         const std::string& text) {
  Rig rig;
  rig.start();
  Player player(rig.network->accept(), 3);
  player.greet();
  play(rig, player, 1);
  player.step();
  const auto batch = rig.batcher->get_batch();
  Nest outputs = answer(batch->inputs());
  change(outputs);
  batch->set_outputs(std::move(outputs));  // It is not to blame.
  CHECK_THROWS(ActorError, text, rig.running.get());
  CHECK(is_balanced(rig.pool->stats()));
}

void check_first_answer(Structure::Ptr outputs, DType action,
                        const std::string& text) {
  Rig rig;
  rig.start();
  Player player(rig.network->accept());
  player.greet();
  player.step();
  const auto batch = rig.batcher->get_batch();
  Nest right = answer(batch->inputs());
  right.leaves[0].dtype = action;
  if (action == DType::kFloat32) {
    right.leaves[0] = make_array<float>(action, {1, 1}, {0});
  }
  right.structure = Structure::tuple({outputs, right.structure->children[1]});
  batch->set_outputs(std::move(right));
  CHECK_THROWS(ActorError, text, rig.running.get());
}

}  // namespace

TEST(outputs_must_stay_alike) {
  const auto leaf = Structure::leaf();
  check_second_answer(
      [](Nest& outputs) {
        outputs.leaves[1] = make_array<float>(DType::kFloat32, {1, 3, 3},
                                              {1, 2, 3, 4, 5, 6, 7, 8, 9});
      },
      "output['logits'] is float32[1,3,3] for one stream, expected "
      "float32[1,3,2] as the first time");
  check_second_answer(
      [](Nest& outputs) { outputs.leaves[1].dtype = DType::kInt32; },
      "output['logits'] is int32[1,3,2] for one stream, expected "
      "float32[1,3,2]");
  check_second_answer(
      [&](Nest& outputs) {
        outputs.structure = Structure::tuple(
            {Structure::dict({{"action", leaf}, {"other", leaf}}),
             outputs.structure->children[1]});
      },
      "outputs are {action: *, other: *}, expected {action: *, logits: *}");
  check_second_answer(
      [](Nest& outputs) {
        outputs.leaves[2] = make_array<float>(DType::kFloat32, {1, 3, 3},
                                              std::vector<float>(9));
      },
      "agent state[0] float32[1,3,3] for one stream, expected float32[2,3,3]");
  check_second_answer(
      [&](Nest& outputs) {
        outputs.structure = Structure::tuple({leaf, leaf, leaf});
      },
      "expected a tuple of two");
  check_second_answer(
      [&](Nest& outputs) {
        outputs.structure = Structure::tuple(
            {Structure::tuple({leaf, leaf, leaf}), Structure::tuple({})});
      },
      "an agent state of 0 arrays");
}

TEST(outputs_must_hold_an_action_for_the_environment) {
  const auto leaf = Structure::leaf();
  check_first_answer(Structure::dict({{"act", leaf}, {"logits", leaf}}),
                     DType::kInt64, "hold no action");
  check_first_answer(Structure::dict({{"action", leaf}, {"logits", leaf}}),
                     DType::kFloat32,
                     "action is float32[] for each environment, but a expects "
                     "action int64[]");
  check_first_answer(
      Structure::tuple({Structure::tuple({leaf, leaf})}), DType::kInt64,
      "action is int64[], float32[2] for each environment, but a expects");
}

TEST(actions_of_other_integer_types_are_converted) {
  Rig rig;
  rig.start();
  Player player(rig.network->accept(), 3);
  player.greet();
  for (int i = 0; i < 2 * kT; ++i) {
    player.step();
    const auto batch = rig.batcher->get_batch();
    Nest outputs = answer(batch->inputs());
    std::vector<int16_t> actions;
    for (int k = 0; k < 3; ++k) {
      actions.push_back(
          reinterpret_cast<const int64_t*>(outputs.leaves[0].data)[k]);
    }
    outputs.leaves[0] = make_array<int16_t>(DType::kInt16, {1, 3}, actions);
    batch->set_outputs(std::move(outputs));
    player.take_action();  // Checks it.
  }
}

TEST(actions_out_of_the_range_of_the_environments_type_end_the_run) {
  Rig rig;
  rig.start();
  Player player(rig.network->accept());
  player.greet();
  player.step();
  const auto batch = rig.batcher->get_batch();
  Nest outputs = answer(batch->inputs());
  outputs.leaves[0] =
      make_array<uint64_t>(DType::kUInt64, {1, 1}, {uint64_t{1} << 63});
  batch->set_outputs(std::move(outputs));
  CHECK_THROWS(ActorError,
               "The agent's action 9223372036854775808 is out of the range of "
               "int64, which the environment expects",
               rig.running.get());
}

TEST(the_action_may_be_the_first_of_a_tuple) {
  Rig rig;
  rig.start();
  Player player(rig.network->accept());
  player.greet();
  for (int i = 0; i < 2 * kT; ++i) {
    player.step();
    const auto batch = rig.batcher->get_batch();
    Nest outputs = answer(batch->inputs());
    const auto leaf = Structure::leaf();
    outputs.structure = Structure::tuple(
        {Structure::tuple({leaf, leaf}), outputs.structure->children[1]});
    batch->set_outputs(std::move(outputs));
    player.take_action();
  }
}

// --- Fullness and slowness ---------------------------------------------------

TEST(streams_wait_for_room_and_go_on) {
  RigOptions options;
  options.addresses.assign(4, "a");
  options.maximum_queue_size = kC;
  fake::CountingServer server(3);
  Rig rig(options);
  rig.network->serve("a", &server);
  rig.start();
  rig.start_agent();
  Checker checker(3);
  for (int round = 0; round < 10; ++round) {
    // Those that wait have not heard yet of room made a moment ago. For each
    // other one, a stream's rollouts may wait beyond the maximum: with each
    // batch taken, as many go on as fill the next one.
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
  // Its rollout is begun, moved from slab to slab, and whole in the end.
  int64_t learned = 0;
  for (int64_t n = 0; n <= 2 * kT; ++n) {
    slow.step();
    slow.take_action();
    for (int i = 0; i < 4; ++i) {
      checker.check(*rig.queue->dequeue_many());
      ++learned;
      CHECK(is_balanced(rig.pool->stats()));
      // Five streams of one lane spread over one slab of six, and then the
      // one that is complete and the one that begins; more while threads are in
      // the middle of handing slabs over.
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

// A stream dies while its Step kT waits for room. After it came back and played
// `rows` rows its rollout moves to another slab, which is where the pool looks
// for a Step that came meanwhile.
void check_no_step_outlives_its_stream(int64_t rows) {
  RigOptions options;
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
  // The slab after theirs, and the one that changes places with theirs.
  play(rig, other, 3 * kT - 1);
  other.step();
  checker.check(*rig.queue->dequeue_many());
  rig.answer_batch();
  other.take_action();
  play(rig, other, 2 * kT - 1);
  other.step();
  checker.check(*rig.queue->dequeue_many());

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

// --- Ends of the run ---------------------------------------------------------

namespace {

void check_stop_in(StreamState state) {
  RigOptions options;
  options.maximum_queue_size = kC;
  Rig rig(options);
  std::shared_ptr<Batch> pending;
  if (state == StreamState::kWaitingToConnect) rig.network->refuse("a");
  rig.start();
  if (state == StreamState::kWaitingToConnect) {
    wait_until([&] { return !rig.network->connections().empty(); });
  } else if (state == StreamState::kConnecting) {
    wait_until([&] { return rig.network->num_dialled() == 1; });
  } else {
    Player player(rig.network->accept(), 3);
    if (state != StreamState::kGreeting) player.greet();
    if (state == StreamState::kWaitingForEnv) play(rig, player, 3);
    if (state == StreamState::kWaitingForInference) {
      play(rig, player, 2);
      player.step();
      pending = rig.batcher->get_batch();
    }
    if (state == StreamState::kWaitingForRoom) {
      play(rig, player, 2 * kT);
      player.step();
    }
  }
  rig.wait_for(state);
  rig.pool->stop();
  rig.running.get();
  CHECK(rig.state() == StreamState::kStopped);
  PoolStats stats = rig.pool->stats();
  CHECK_EQ(stats.connected, 0);
  CHECK_EQ(stats.slabs_open, 0);
  CHECK(is_balanced(stats));
  CHECK_EQ(stats.in_flight, kT * rig.queue->size());
  rig.pool->stop();  // Again.
  if (pending) {
    pending->set_outputs(answer(pending->inputs()));  // Nobody minds.
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
  Rig rig;
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
  CHECK_THROWS(std::invalid_argument, "learner_queue is missing",
               make([](PoolOptions& o) { o.learner_queue.reset(); }));
  CHECK_THROWS(std::invalid_argument, "inference_batcher is missing",
               make([](PoolOptions& o) { o.inference_batcher.reset(); }));
  CHECK_THROWS(std::invalid_argument, "no env server addresses",
               make([](PoolOptions& o) { o.addresses.clear(); }));
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

// A server whose stream of environment 0 is slow at times, and that fails.
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
      // Of the latest, so that most still live.
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
