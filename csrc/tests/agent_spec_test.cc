// SPDX-License-Identifier: Apache-2.0

#include "agent_spec.h"

#include <functional>
#include <utility>
#include <vector>

#include "pool_rig.h"
#include "testing.h"

using namespace torchbeast;

namespace {

// The first answer is correct; the second one is changed.
void check_second_answer(const std::function<void(Nest&)>& change,
                         const std::string& text) {
  Rig rig(RigOptions{.num_envs = 3});
  rig.start();
  Player player(rig.network->accept(), 3);
  player.greet();
  play(rig, player, 1);
  player.step();
  const auto batch = rig.batcher->get_batch();
  Nest outputs = answer(batch->inputs());
  change(outputs);
  batch->set_outputs(std::move(outputs));  // Does not throw.
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
  Rig rig(RigOptions{.num_envs = 3});
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
    player.take_action();  // Checks the values.
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
