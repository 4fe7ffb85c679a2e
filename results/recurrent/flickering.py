# SPDX-License-Identifier: Apache-2.0
"""MinAtar's Breakout with frames that are black with probability 1/2.

As Hausknecht & Stone 2015 (arXiv:1507.06527) did with Atari's Pong.

    --env results.recurrent.flickering:make_breakout
"""

import gymnasium as gym
import numpy as np

from core.environments.make import make


class Flickering(gym.ObservationWrapper):
    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.rng = np.random.default_rng()

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        return super().reset(seed=seed, options=options)

    def observation(self, observation):
        return observation if self.rng.random() < 0.5 else np.zeros_like(observation)


def make_breakout() -> gym.Env:
    return Flickering(make("MinAtar/Breakout-v1"))
