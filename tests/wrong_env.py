# SPDX-License-Identifier: Apache-2.0
"""Catch, but for one thing: `--env tests.wrong_env:make_raising` and so on.

Imports as little as environment servers do, so that they start as fast.
"""

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv

from core.environments.toys import Catch


class Wrong(Catch):
    """Catch whose `step` returns what a function makes of the true result."""

    def __init__(self, change: Callable[[tuple], Any]) -> None:
        super().__init__()
        self._change = change

    def step(self, action):
        return self._change(super().step(action))


def make_raising() -> Wrong:
    def fail(result):
        raise OSError("the simulator is out of coffee")

    return Wrong(fail)


def make_nan() -> Wrong:
    """Observations that are not finite: no action can be sampled."""
    return Wrong(lambda result: (result[0] * np.nan, *result[1:]))


def make_boundless() -> Wrong:
    """Rewards whose squares are not finite, when they are not clipped."""
    return Wrong(lambda result: (result[0], 1e30, *result[2:]))


def make_hanging() -> Wrong:
    def hang_forever(result):
        os.write(2, b"about to hang\n")
        time.sleep(1e6)  # Until killed.

    return Wrong(hang_forever)


def make_vector() -> SyncVectorEnv:
    return SyncVectorEnv([Catch, Catch])


def make_never() -> Wrong:
    os.write(2, b"about to hang\n")
    time.sleep(1e6)  # Until killed.
    raise AssertionError


class Telling(Catch):
    """Catch that says with which seed its random numbers begin."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            os.write(2, f"begins with seed {seed}\n".encode())
        return super().reset(seed=seed, options=options)


def make_chatty() -> Wrong:
    """A megabyte to stdout, as from a C library, with every 50th step."""
    count = itertools.count()

    def talk(result):
        if next(count) % 50 == 0:
            os.write(1, b"chatter\n" + bytes(1 << 20) + b"\n")
        return result

    return Wrong(talk)
