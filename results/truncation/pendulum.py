# SPDX-License-Identifier: Apache-2.0
"""Pendulum in games of 20 steps, all of which a time limit ends.

One game in 200 has 200 steps, enough to swing up and to stay there. Its return is the
scalar `long_return` in `info`: the score of the agent where the short limit does not
cut the game.

    --env results.truncation.pendulum:make_truncated     the limit truncates
    --env results.truncation.pendulum:make_terminated    the limit terminates
"""

import gymnasium as gym
import numpy as np

LIMIT, LONG = 20, 200  # Steps.
LONG_EVERY = 200  # Games.
TORQUES = np.linspace(-2.0, 2.0, 5, dtype=np.float32)


class ShortGames(gym.Wrapper):
    def __init__(self, *, terminate: bool):
        super().__init__(gym.make("Pendulum-v1").unwrapped)
        self.action_space = gym.spaces.Discrete(len(TORQUES))
        self.terminate = terminate
        self.games = 0

    def reset(self, **kwargs):
        self.games += 1
        self.limit = LIMIT if self.games % LONG_EVERY else LONG
        self.steps, self.sum = 0, 0.0
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, *_, info = self.env.step(TORQUES[action : action + 1])
        self.steps += 1
        self.sum += float(reward)
        over = self.steps == self.limit
        if over and self.limit == LONG:
            info = {**info, "long_return": self.sum}
        # Some 16 at most: into [-1, 0].
        reward = float(reward) / 16.3
        return (
            observation,
            reward,
            over and self.terminate,
            over and not self.terminate,
            info,
        )


def make_truncated() -> gym.Env:
    return ShortGames(terminate=False)


def make_terminated() -> gym.Env:
    return ShortGames(terminate=True)
