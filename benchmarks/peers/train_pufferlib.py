# SPDX-License-Identifier: Apache-2.0
"""Train PufferLib's PPO until killed; print "seconds steps" lines.

    python train_pufferlib.py {pong,cartpole,minatar,halfcheetah}

Runs in PufferLib's own environment; see README.md. PuffeRL, its trainer, with its own
vectorization. One pass over each batch, in one minibatch.
"""

import sys
import time

import ale_py
import gymnasium as gym
import numpy as np
import pufferlib.emulation
import pufferlib.models
import pufferlib.vector
import torch
from pufferlib import pufferl
from torch import nn
from work import WORKS, make_env, minatar_torso

pufferl.ADVANTAGE_CUDA = False  # It only asks whether nvcc is installed.


def create_env(work: str, buf=None, seed=0):
    """Return an environment that PufferLib emulates; with its Gymnasium, 0.29."""
    if work == "pong":
        env = ale_py.AtariEnv("pong", frameskip=1, repeat_action_probability=0.0)
        env.spec = gym.envs.registration.EnvSpec("PongNoFrameskip-v4")
        env = gym.wrappers.FrameStack(gym.wrappers.AtariPreprocessing(env), 4)
        env = gym.wrappers.TransformObservation(env, np.asarray)
    elif work == "halfcheetah":
        env = gym.wrappers.ClipAction(gym.make("HalfCheetah-v4"))
        env = gym.wrappers.NormalizeObservation(env)
        env = gym.wrappers.NormalizeReward(env)
    else:
        env = make_env(work)
    if work == "minatar":  # PufferLib takes no Box of bool.
        env = gym.wrappers.TransformObservation(env, np.uint8)
        env.observation_space = gym.spaces.Box(0, 1, env.observation_space.shape, "u1")
    return pufferlib.emulation.GymnasiumPufferEnv(env=env, buf=buf)


class Policy(nn.Module):
    """The networks that TorchBeast has for these spaces: two tanh layers, or MinAtar's.

    PufferLib's own is one layer of 128 units.
    """

    def __init__(self, work: str, envs):
        super().__init__()
        self.work = work
        shape = envs.single_observation_space.shape
        actions = envs.single_action_space
        num_outputs = actions.shape[0] if work == "halfcheetah" else actions.n
        if work == "minatar":
            self.torso = minatar_torso(shape[-1])
            self.policy = nn.Linear(256, num_outputs)
            self.value = nn.Linear(256, 1)
        else:
            self.torso = nn.Identity()
            self.policy = two_layers(shape[0], num_outputs)
            self.value = two_layers(shape[0], 1)
        self.log_std = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, x: torch.Tensor, state=None):
        x = x.float()
        x = self.torso(x.movedim(-1, 1) if self.work == "minatar" else x)
        policy = self.policy(x)
        if self.work == "halfcheetah":
            std = self.log_std.exp().expand_as(policy)
            policy = torch.distributions.Normal(policy, std)
        return policy, self.value(x)

    forward_eval = forward


def two_layers(num_inputs: int, num_outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(num_inputs, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, num_outputs),
    )


def read_config() -> dict:
    """Return PufferLib's default configuration of its trainer."""
    argv, sys.argv = sys.argv, sys.argv[:1]
    config = pufferl.load_config("default")["train"]
    sys.argv = argv
    return config


def main(work: str) -> None:
    size = WORKS[work]
    layout = {"backend": pufferlib.vector.Serial}
    if work == "pong":
        # Half of the environments step while the trainer chooses actions for the rest.
        # The workers and the trainer spin while they wait, so this is slower than one
        # process for the works with faster environments.
        layout = {
            "backend": pufferlib.vector.Multiprocessing,
            "num_workers": 2,
            "batch_size": size.num_envs // 2,
        }
    envs = pufferlib.vector.make(
        create_env, env_kwargs={"work": work}, num_envs=size.num_envs, **layout
    )
    if work == "pong":  # Nature's network: 64 maps of 7 x 7.
        policy = pufferlib.models.Convolutional(
            envs, framestack=4, flat_size=64 * 7 * 7
        )
        policy.forward_eval = policy.forward
    else:
        policy = Policy(work, envs)
    config = read_config() | {
        "env": work,
        "device": "cpu",
        "optimizer": "adam",
        "learning_rate": 2.5e-4,
        "total_timesteps": 10**9,
        "batch_size": size.batch_size,
        "minibatch_size": size.batch_size,
        "bptt_horizon": size.num_steps,
        "use_rnn": False,
        "checkpoint_interval": 10**9,
    }
    trainer = pufferl.PuffeRL(config, envs, policy)
    trainer.print_dashboard = lambda **_: None  # It would clear the lines.
    began = time.monotonic()
    while True:
        trainer.evaluate()
        trainer.train()
        print(time.monotonic() - began, trainer.global_step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
