// SPDX-License-Identifier: Apache-2.0
//
// An ActorPool for tests, with its learner queue, its batcher and agent, and
// environment servers that a test plays.

#pragma once

#include <cstdint>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "actor_pool.h"
#include "fake_servers.h"
#include "testing.h"

namespace torchbeast {

inline constexpr int64_t kT = 5;
inline constexpr int64_t kC = 6;  // Columns of a learner batch.

inline const Array& at(const Nest& nest, const std::string& path) {
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

inline Nest initial_state() {
  return {Structure::tuple({Structure::leaf()}),
          {make_array<float>(DType::kFloat32, {2, 1, 3},
                             {0, 10, 20, 100, 110, 120})}};
}

// The agent's answer: right_action, and a state that counts the answers.
inline Nest answer(const Nest& inputs, bool named_rows = false) {
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

// Checks that learner batches hold the values of the environments in each row,
// that each rollout comes once, and that none has rows of two connections.
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

  // The number of rollouts that have not come although a later one of the same
  // connection has: they are in slabs that are not complete.
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
      // The outputs for the row before; zeros in the first row of a connection.
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
    // The state before row 0 has counted one answer for each row before it.
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

inline bool is_balanced(const PoolStats& stats) {
  return stats.received == stats.dequeued + stats.discarded + stats.in_flight &&
         stats.in_flight >= 0;
}

struct RigOptions {
  int64_t num_envs = 1;
  std::vector<std::string> addresses = {"a"};
  size_t max_streams = 0;
  std::optional<int64_t> maximum_queue_size;
  int64_t minimum_batch_size = kC;
  bool named_rows = false;
  std::vector<std::string> inference_keys;
  std::vector<wire::ValueRange> value_ranges;
  std::optional<wire::Welcome> welcome;
  bool servers_may_change = false;
  int max_failures = 5;
  double step_timeout_s = 0;
  double first_backoff_s = 0.1;
  int num_threads = 2;
};

// A pool with its queue, batcher and network.
struct Rig {
  explicit Rig(RigOptions rig_options = {}) : options(std::move(rig_options)) {
    QueueOptions queue_options;
    queue_options.minimum_batch_size = options.minimum_batch_size;
    queue_options.maximum_batch_size = kC;
    queue_options.maximum_queue_size = options.maximum_queue_size;
    queue = std::make_shared<BatchingQueue>(queue_options);
    batcher = std::make_shared<DynamicBatcher>(BatcherOptions{});
    pool = make_pool();
  }

  std::unique_ptr<ActorPool> make_pool() const {
    PoolOptions pool_options;
    pool_options.unroll_length = kT;
    pool_options.num_envs = options.num_envs;
    pool_options.learner_queue = queue;
    pool_options.inference_batcher = batcher;
    pool_options.addresses = options.addresses;
    pool_options.max_streams = options.max_streams;
    pool_options.initial_agent_state = initial_state();
    pool_options.named_rows = options.named_rows;
    pool_options.inference_keys = options.inference_keys;
    pool_options.value_ranges = options.value_ranges;
    pool_options.welcome = options.welcome;
    pool_options.servers_may_change = options.servers_may_change;
    pool_options.info_keys = {"game_return"};
    pool_options.seed = 23;
    pool_options.run_id = "run";
    pool_options.version = "1.2.3";
    pool_options.first_incarnation = 100;
    pool_options.max_failures = options.max_failures;
    pool_options.step_timeout_s = options.step_timeout_s;
    pool_options.first_backoff_s = options.first_backoff_s;
    return std::make_unique<ActorPool>(
        std::move(pool_options),
        std::make_unique<fake::Transport>(network, options.num_threads));
  }

  ~Rig() {
    if (pool) pool->stop();
    if (!batcher->is_closed()) batcher->close();
    if (!queue->is_closed()) queue->close();
  }

  void start() {
    running = testing::background([this] { pool->run(); });
  }

  // Starts a thread that answers all batches.
  void start_agent() {
    agents.push_back(testing::background([this] {
      while (const auto batch = batcher->get_batch()) {
        batch->set_outputs(answer(batch->inputs(), options.named_rows));
      }
    }));
  }

  // Answers one batch.
  void answer_batch() {
    const auto batch = batcher->get_batch();
    batch->set_outputs(answer(batch->inputs(), options.named_rows));
  }

  StreamState state(size_t stream = 0) const {
    return pool->stats().states.at(stream);
  }
  void wait_for(StreamState expected, size_t stream = 0) const {
    testing::wait_until([&] { return state(stream) == expected; });
  }

  const RigOptions options;
  const std::shared_ptr<fake::Network> network =
      std::make_shared<fake::Network>();
  std::shared_ptr<BatchingQueue> queue;
  std::shared_ptr<DynamicBatcher> batcher;
  std::unique_ptr<ActorPool> pool;
  std::future<void> running;
  std::vector<std::future<void>> agents;
};

// A server that the test plays. Its messages are correct.
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

// Sends `rows` rows of a stream and answers each as the agent.
inline void play(Rig& rig, Player& player, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    player.step();
    rig.answer_batch();
    player.take_action();
  }
}

// Starts the run, and brings its only stream, of K = 3 at the address a, into a
// state; with kWaitingForRoom, maximum_queue_size is kC. Returns the batch that
// waits for its answer, if there is one.
inline std::shared_ptr<Batch> start_until(Rig& rig, StreamState state) {
  if (state == StreamState::kWaitingToConnect) rig.network->refuse("a");
  rig.start();
  std::shared_ptr<Batch> pending;
  if (state == StreamState::kWaitingToConnect) {
    testing::wait_until([&] { return !rig.network->connections().empty(); });
  } else if (state == StreamState::kConnecting) {
    testing::wait_until([&] { return rig.network->num_dialled() == 1; });
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
  return pending;
}

}  // namespace torchbeast
