# SPDX-License-Identifier: Apache-2.0
"""Train Stable-Baselines3's A2C or PPO until killed; print "seconds steps" lines.

    python train_sb3.py {a2c,ppo} {pong,cartpole,minatar,halfcheetah}

Runs in Stable-Baselines3's own environment; see README.md. PPO passes once over each
batch, in one minibatch, so that both use each sample once.
"""

import sys
import time

import ale_py
import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecEnv,
    VecFrameStack,
    VecNormalize,
)
from work import WORKS, make_env, minatar_torso


class MinatarTorso(BaseFeaturesExtractor):
    """The network of the other systems for MinAtar."""

    def __init__(self, space: gym.Space):
        super().__init__(space, features_dim=256)
        self.layers = minatar_torso(space.shape[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.movedim(-1, 1))  # [N, H, W, C] to [N, C, H, W]


def create_envs(work: str) -> VecEnv:
    num_envs = WORKS[work].num_envs
    if work == "pong":
        gym.register_envs(ale_py)
        envs = make_atari_env(
            "PongNoFrameskip-v4",
            num_envs,
            vec_env_cls=SubprocVecEnv,
            vec_env_kwargs={"start_method": "fork"},  # Else each imports torch.
        )
        return VecFrameStack(envs, n_stack=4)
    if work == "minatar":  # Stable-Baselines3 takes no Box of bool.
        return make_vec_env(
            lambda: gym.wrappers.DtypeObservation(make_env(work), np.float32),
            num_envs,
            vec_env_cls=DummyVecEnv,
        )
    envs = make_vec_env(lambda: make_env(work), num_envs, vec_env_cls=DummyVecEnv)
    return VecNormalize(envs) if work == "halfcheetah" else envs


class Report(BaseCallback):
    """Prints the steps learned from; at the start of a rollout that is all of them."""

    def _on_training_start(self) -> None:
        self.began = time.monotonic()

    def _on_rollout_start(self) -> None:
        print(time.monotonic() - self.began, self.num_timesteps, flush=True)

    def _on_step(self) -> bool:
        return True


def main(algorithm: str, work: str) -> None:
    size = WORKS[work]
    settings = {"n_steps": size.num_steps, "device": "cpu"}
    if algorithm == "ppo":
        settings |= {"n_epochs": 1, "batch_size": size.batch_size}
    if work == "minatar":
        settings["policy_kwargs"] = {
            "features_extractor_class": MinatarTorso,
            "net_arch": [],
        }
    model = {"a2c": A2C, "ppo": PPO}[algorithm](
        "CnnPolicy" if work == "pong" else "MlpPolicy", create_envs(work), **settings
    )
    model.learn(total_timesteps=10**9, callback=Report())


if __name__ == "__main__":
    main(*sys.argv[1:])
