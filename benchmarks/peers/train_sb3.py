# SPDX-License-Identifier: Apache-2.0
"""Train Stable-Baselines3's A2C or PPO until killed; print "seconds steps" lines.

    python train_sb3.py {a2c,ppo} {pong,cartpole,minatar,halfcheetah}
    python train_sb3.py ppo {cartpole,halfcheetah} SEED

Runs in Stable-Baselines3's own environment; see README.md. PPO passes once over each
batch, in one minibatch, so that both use each sample once.

With a seed it trains with the settings of RL Zoo, to their end. Then each line also has
the mean return of the last 100 games, as soon as there are so many.
"""

import statistics
import sys
import time
from typing import Any

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

# RL Zoo's settings: hyperparams/ppo.yml of rl-baselines3-zoo at 22e3ff2.
ZOO: dict[str, dict[str, Any]] = {
    "cartpole": {
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "ent_coef": 0.0,
        "learning_rate": lambda left: left * 0.001,  # `left` falls from 1 to 0.
        "clip_range": lambda left: left * 0.2,
    },
    "halfcheetah": {
        "n_steps": 512,
        "batch_size": 64,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
        "policy_kwargs": {
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": torch.nn.ReLU,
            "net_arch": {"pi": [256, 256], "vf": [256, 256]},
        },
    },
}
ZOO_ENVS = {"cartpole": 8, "halfcheetah": 1}
ZOO_STEPS = {"cartpole": 100_000, "halfcheetah": 1_000_000}


class MinatarTorso(BaseFeaturesExtractor):
    """The network of the other systems for MinAtar."""

    def __init__(self, space: gym.Space):
        super().__init__(space, features_dim=256)
        self.layers = minatar_torso(space.shape[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.movedim(-1, 1))  # [N, H, W, C] to [N, C, H, W]


def create_envs(work: str, num_envs: int, gamma: float = 0.99) -> VecEnv:
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
    return VecNormalize(envs, gamma=gamma) if work == "halfcheetah" else envs


class Report(BaseCallback):
    """Prints the steps learned from; at the start of a rollout that is all of them."""

    def __init__(self, *, tells: bool = False):
        """Prints the mean return, too, if it `tells`."""
        super().__init__()
        self._tells = tells

    def _on_training_start(self) -> None:
        self.began = time.monotonic()

    def _on_rollout_start(self) -> None:
        games = self.model.ep_info_buffer  # The last 100.
        tells = self._tells and len(games) == 100
        mean = [statistics.fmean(game["r"] for game in games)] if tells else []
        print(time.monotonic() - self.began, self.num_timesteps, *mean, flush=True)

    def _on_step(self) -> bool:
        return True


def main(algorithm: str, work: str, seed: str | None = None) -> None:
    if seed is not None:
        envs = create_envs(work, ZOO_ENVS[work], ZOO[work]["gamma"])
        model = PPO("MlpPolicy", envs, seed=int(seed), device="cpu", **ZOO[work])
        model.learn(total_timesteps=ZOO_STEPS[work], callback=Report(tells=True))
        return
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
        "CnnPolicy" if work == "pong" else "MlpPolicy",
        create_envs(work, size.num_envs),
        **settings,
    )
    model.learn(total_timesteps=10**9, callback=Report())


if __name__ == "__main__":
    main(*sys.argv[1:])
