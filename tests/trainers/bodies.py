# SPDX-License-Identifier: Apache-2.0
"""Small environments, one for each kind of action space."""

import gymnasium as gym
import numpy as np

from core.nests import leaves
from examples.tictactoe import TicTacToe as mask  # noqa: F401  # An environment, too.

spaces = gym.spaces


class Body(gym.Env):
    """Observes noise and the sum of the last action; ends after 5 steps."""

    observation_space = spaces.Box(-100, 100, (3,), np.float32)

    def __init__(self, action_space: gym.Space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(0.0), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        total = sum(float(np.sum(x)) for _, x in leaves(action))
        # Every other episode is cut off by a time limit.
        over, even = self.steps == 5, total > 0
        return self.observe(total), total, over and even, over and not even, {}

    def observe(self, total):
        noise = self.np_random.normal(size=2)
        return np.clip([*noise, total], -100, 100).astype(np.float32)


def discrete():
    return Body(spaces.Discrete(3, start=-1))


def choices():
    return Body(spaces.MultiDiscrete([3, 2, 4]))


def bits():
    return Body(spaces.MultiBinary(3))


def box():
    return Body(spaces.Box(np.float64([-2, 0]), np.float64([2, 5]), dtype=np.float64))


def nested():
    return Body(
        spaces.Dict(
            {
                "arm": spaces.Box(-1, 1, (2,)),
                "legs": spaces.Tuple([spaces.MultiBinary(2), spaces.Discrete(3)]),
            }
        )
    )
