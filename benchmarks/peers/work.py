# SPDX-License-Identifier: Apache-2.0
"""The work that all systems do: environments, and the size of a batch.

Imported by the scripts of the peers, each in its own virtual environment, so this
needs Gymnasium alone, minatar for MinAtar, and torch in two functions.
"""

import dataclasses
import time
from typing import Any

import gymnasium as gym


@dataclasses.dataclass(frozen=True)
class Work:
    """Environments in total, and steps of each environment in one batch.

    Synchronous systems learn from all environments at once: num_envs * num_steps is the
    size of the batch that MonoBeast and PolyBeast make of rollouts.
    """

    num_envs: int
    num_steps: int

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps


WORKS = {
    "pong": Work(num_envs=32, num_steps=20),
    "cartpole": Work(num_envs=64, num_steps=64),
    "minatar": Work(num_envs=64, num_steps=64),
    "halfcheetah": Work(num_envs=32, num_steps=64),
}


def make_env(work: str) -> gym.Env:
    """Return one environment, for systems that bring no wrappers of their own."""
    if work == "pong":
        import ale_py

        gym.register_envs(ale_py)
        env = gym.make("PongNoFrameskip-v4")
        return gym.wrappers.FrameStackObservation(
            gym.wrappers.AtariPreprocessing(env), stack_size=4
        )  # [4, 84, 84] uint8
    if work == "minatar":
        import minatar.gym

        if "MinAtar/Breakout-v1" not in gym.registry:
            minatar.gym.register_envs()
        return gym.make("MinAtar/Breakout-v1")  # [10, 10, 4] bool
    return gym.make({"cartpole": "CartPole-v1", "halfcheetah": "HalfCheetah-v5"}[work])


def minatar_torso(num_channels: int) -> Any:
    """Return TorchBeast's network for MinAtar: [N, C, 10, 10] -> [N, 256]."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(num_channels, 16, kernel_size=3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
    )


def print_updates(work: str) -> None:
    """From now on print "seconds steps" after each step of an optimizer of torch."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    began, updates = time.monotonic(), 0

    def report(*_) -> None:
        nonlocal updates
        updates += 1
        # On a new line, as a progress bar may stand on this one.
        seconds, steps = time.monotonic() - began, updates * WORKS[work].batch_size
        print(f"\n{seconds} {steps}", flush=True)

    register_optimizer_step_post_hook(report)
