# SPDX-License-Identifier: Apache-2.0
"""Train RLlib's IMPALA on Pong until killed; print "seconds steps" lines.

    python rllib_pong.py pong

Runs in RLlib's own environment; see README.md. One runner with 16 environments, batches
of 640 steps, the network of Mnih et al. 2015, each sample used once.
"""

import time

import ale_py
import gymnasium as gym
import ray
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.connectors.learner.frame_stacking import FrameStackingLearner
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack
from ray.tune.registry import register_env

FRAGMENT = 20  # Steps of one environment in a row.


def create_env(_):
    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    return wrap_atari_for_new_api_stack(env, dim=84, framestack=None)


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    register_env("pong", create_env)
    config = (
        IMPALAConfig()
        .environment("pong")
        .env_runners(
            num_env_runners=1,
            num_envs_per_env_runner=16,
            rollout_fragment_length=FRAGMENT,
            env_to_module_connector=lambda *_, **__: FrameStackingEnvToModule(
                num_frames=4
            ),
        )
        .learners(learner_connector=lambda *_, **__: FrameStackingLearner(num_frames=4))
        .training(
            train_batch_size_per_learner=640,
            grad_clip=40.0,
            entropy_coeff=0.01,
            lr=6e-4,
        )
        .rl_module(
            model_config=DefaultModelConfig(
                conv_filters=[[32, 8, 4], [64, 4, 2], [64, 3, 1]],
                conv_activation="relu",
                head_fcnet_hiddens=[512],
                head_fcnet_activation="relu",
                vf_share_layers=True,
            )
        )
        .reporting(min_time_s_per_iteration=2)
    )
    algo = config.build_algo()
    begin = time.monotonic()
    while True:
        result = algo.train()
        learners = result.get("learners", {}).get("__all_modules__", {})
        trained = learners.get("num_env_steps_trained_lifetime", 0)
        # RLlib adds a step without loss to the end of each fragment, and counts it.
        trained *= FRAGMENT / (FRAGMENT + 1)
        print(time.monotonic() - begin, trained, flush=True)


if __name__ == "__main__":
    main()
