# SPDX-License-Identifier: Apache-2.0
"""Environments that fail, for `--env tools.nemesis.faulty:make_hanging` and so on.

Import as little as environment servers do, so that these start as fast.
"""

import os
import random
import sys
import time

import gymnasium as gym

from core.environments.make import make
from core.environments.toys import Catch
from tools.nemesis.environments import hang_in_c

P_CRASH, P_STALL = 0.001, 0.0002  # Per step of each environment.


class Faulty(gym.Wrapper):
    """Ends its process at random steps, or stalls until the process is killed."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        # Its own generator: games are the same with and without faults.
        self._random = random.Random(os.urandom(8))

    def step(self, action):
        lot = self._random.random()
        if lot < P_CRASH:
            count("crashes")
            os._exit(3)
        if lot < P_CRASH + P_STALL:
            count("stalls")
            time.sleep(1e6)
        return self.env.step(action)


def count(kind: str) -> None:
    """Count a fault in a file in the folder FAULTS, if the variable is set."""
    if folder := os.environ.get("FAULTS"):
        with open(os.path.join(folder, kind), "ab") as file:
            file.write(b".")


def make_catch() -> gym.Env:
    return Faulty(Catch())


def make_breakout() -> gym.Env:
    # minatar imports them only to draw, which takes each process a second.
    sys.modules.update(dict.fromkeys(["matplotlib", "seaborn"]))
    return Faulty(make("MinAtar/Breakout-v1"))


class Hanging(Catch):
    """Hangs in its 25th step, in C code that holds the GIL."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 25:
            os.write(2, b"about to hang\n")
            hang_in_c()
        return super().step(action)


def make_hanging() -> gym.Env:
    return Hanging()
