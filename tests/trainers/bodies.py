# SPDX-License-Identifier: Apache-2.0
"""Small environments, one for each kind of action space."""

import gymnasium as gym
import numpy as np

from core.action_spaces import allowed_values, category_sizes
from core.nests import leaves
from examples.tictactoe import TicTacToe as mask  # An environment, too.

spaces = gym.spaces
INF = np.inf


class Stuck(mask):
    """Allows nothing in its second row."""

    def step(self, action):
        observation, *rest = super().step(action)
        return {**observation, "action_mask": np.zeros(9, np.int8)}, *rest


class Body(gym.Env):
    """Observes noise and the sum of the last action; ends after 5 steps."""

    observation_space = spaces.Box(-100, 100, (3,), np.float32)
    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(self, action_space: gym.Space):
        self.action_space = action_space

    def render(self):
        return np.full((32, 32, 3), 40 * self.steps, np.uint8)

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
    return Body(spaces.MultiDiscrete([3, 2, 4], start=[0, -1, 5], dtype=np.int32))


def bits():
    return Body(spaces.MultiBinary((2, 2)))


def box():
    low, high = np.float64([[-2, 7], [-INF, 1]]), np.float64([[2, 9], [INF, INF]])
    return Body(spaces.Box(low, high, dtype=np.float64))


NESTED = spaces.Dict(
    {
        "arm": spaces.Box(-1, 1, (2,)),
        "grip": spaces.Box(0, 3, (), np.float16),
        "legs": spaces.Tuple([spaces.MultiBinary(2), spaces.Discrete(3, start=-1)]),
        "toes": spaces.MultiDiscrete([[2, 3]]),
    }
)


def nested():
    return Body(NESTED)


class MaskedBody(Body):
    """Rules out some values of each Discrete choice, at random."""

    observation_space = spaces.Dict(
        {
            "noise": Body.observation_space,
            "action_mask": spaces.Tuple(
                [spaces.Box(0, 1, (3,), np.int8), spaces.MultiBinary(5)]
            ),
        }
    )

    def step(self, action):
        legs, toes = action["legs"][1] + 1, action["toes"].ravel()
        for value, allowed in zip([legs, *toes], self.allowed, strict=True):
            assert value in allowed, (action, self.allowed)
        return super().step(action)

    def observe(self, total):
        toes = [[0, 1, 1, 0, 1], [1, 0, 0, 1, 0]][self.np_random.integers(2)]
        legs = np.roll([1, 1, 0], self.np_random.integers(3))
        flags = legs.astype(np.int8), np.int8(toes)
        self.allowed = allowed_values(flags, category_sizes(NESTED))
        return {"noise": super().observe(total), "action_mask": flags}


def masked():
    return MaskedBody(NESTED)
