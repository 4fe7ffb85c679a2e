// SPDX-License-Identifier: Apache-2.0

#include "actor_pool.h"

#include <array>
#include <stdexcept>
#include <utility>

#include "batching_queue.h"
#include "dynamic_batcher.h"
#include "pool_run.h"

namespace torchbeast {
namespace {

constexpr std::array<std::string_view, 11> kStateNames = {
    "unused",
    "waiting_to_connect",
    "connecting",
    "greeting",
    "waiting_for_env",
    "receiving",
    "waiting_for_inference",
    "waiting_for_room",
    "moving",
    "closing",
    "stopped",
};
static_assert(static_cast<size_t>(StreamState::kStopped) + 1 ==
              kStateNames.size());

// Every leaf must be [.., 1, ...].
void check_initial_state(const Nest& initial_agent_state) {
  for (size_t i = 0; i < initial_agent_state.leaves.size(); ++i) {
    const Array& leaf = initial_agent_state.leaves[i];
    if (leaf.shape.size() >= 2 && leaf.shape[1] == 1) continue;
    throw std::invalid_argument(
        "initial_agent_state" + leaf_path(*initial_agent_state.structure, i) +
        " is " + leaf.describe() +
        ", expected the state of one environment: size 1 along axis 1");
  }
}

PoolOptions checked(PoolOptions options) {
  const auto require = [](bool condition, const std::string& text) {
    if (!condition) throw std::invalid_argument(text);
  };
  require(options.unroll_length >= 1,
          "unroll_length is " + std::to_string(options.unroll_length) +
              ", expected at least 1");
  require(options.num_envs >= 1, "num_envs is " +
                                     std::to_string(options.num_envs) +
                                     ", expected at least 1");
  if (options.welcome) {
    const int64_t num_envs = options.welcome->num_envs;
    require(num_envs == options.num_envs,
            "welcome is of a server with another number of environments per "
            "stream (" +
                std::to_string(num_envs) + ") than num_envs (" +
                std::to_string(options.num_envs) + ")");
  }
  require(options.learner_queue != nullptr, "learner_queue is missing");
  require(options.inference_batcher != nullptr, "inference_batcher is missing");
  for (const auto& [what, batch_dim] :
       {std::pair("learner_queue", options.learner_queue->options().batch_dim),
        std::pair("inference_batcher",
                  options.inference_batcher->options().batch_dim)}) {
    require(batch_dim == 1,
            std::string(what) + " has batch_dim " + std::to_string(batch_dim) +
                ", expected 1: rollouts are [time, batch, ...]");
  }
  if (options.max_streams == 0) options.max_streams = options.addresses.size();
  require(options.max_streams > 0, "there are no env server addresses");
  require(options.addresses.size() <= options.max_streams,
          "there are " + std::to_string(options.addresses.size()) +
              " env server addresses, but max_streams is " +
              std::to_string(options.max_streams));
  require(options.inference_keys.empty() || options.named_rows,
          "inference_keys needs named_rows: without it rows are tuples, which "
          "have no keys; pass named_rows=True");
  require(options.max_failures >= 1, "max_failures is " +
                                         std::to_string(options.max_failures) +
                                         ", expected at least 1");
  require(options.first_backoff_s >= 0,
          "first_backoff_s is " + std::to_string(options.first_backoff_s) +
              ", expected at least 0");
  require(options.step_timeout_s >= 0,
          "step_timeout_s is " + std::to_string(options.step_timeout_s) +
              ", expected at least 0");
  require(options.initial_agent_state.structure != nullptr,
          "initial_agent_state is missing; without a state it is ()");
  check_initial_state(options.initial_agent_state);
  return options;
}

}  // namespace

std::string_view name(StreamState state) {
  return kStateNames[static_cast<size_t>(state)];
}

ActorPool::ActorPool(PoolOptions options, std::unique_ptr<Transport> transport)
    : run_(std::make_shared<PoolRun>(checked(std::move(options)),
                                     std::move(transport))) {}

ActorPool::~ActorPool() { stop(); }

void ActorPool::run() { run_->run(); }
void ActorPool::stop() { run_->stop(); }
size_t ActorPool::set_addresses(const std::vector<std::string>& addresses) {
  return run_->set_addresses(addresses);
}
int64_t ActorPool::count() const { return run_->count(); }
PoolStats ActorPool::stats() const { return run_->stats(); }
std::vector<std::string> ActorPool::take_events() {
  return run_->take_events();
}

}  // namespace torchbeast
