# SPDX-License-Identifier: Apache-2.0
"""Environments that fail: `--env tests.fault_env:make_crashing` and so on."""

import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np

from core.environments.stepping import env_seed
from tools.nemesis.environments import hang_in_c


class FaultEnv(gym.Env):
    """Observes the number of steps taken; calls `fault` in a given one of them.

    What `fault` returns takes the place of the observation.
    """

    def __init__(self, fault: Callable[[], object], at_step: int = 7) -> None:
        self.observation_space = gym.spaces.Box(-1, 10**6, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(3)
        self._fault, self._at_step = fault, at_step
        self._steps = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._steps += 1
        observation = np.full(2, self._steps, np.float32)
        if self._steps == self._at_step:
            observation = self._fault()
        return observation, 1.0, False, False, {}


def fail() -> None:
    raise KeyError("the simulator is out of fuel")


def make_failing() -> FaultEnv:
    return FaultEnv(fail)


def make_failing_once() -> FaultEnv:
    """Fail if there is no file $FAILED, which is then made."""

    def fail_once() -> np.ndarray:
        path = Path(os.environ["FAILED"])
        if not path.exists():
            path.touch()
            fail()
        return np.zeros(2, np.float32)

    return FaultEnv(fail_once)


def make_exiting() -> FaultEnv:
    return FaultEnv(lambda: os._exit(3))


def make_crashing() -> FaultEnv:
    return FaultEnv(lambda: ctypes.string_at(0))


def make_crashing_late() -> FaultEnv:
    return FaultEnv(lambda: ctypes.string_at(0), at_step=25)


def make_hanging() -> FaultEnv:
    return FaultEnv(lambda: time.sleep(1e6), at_step=25)


def print_in_c() -> np.ndarray:
    """Write more than a pipe holds, with the GIL held, as C code may."""
    text = b"from C\n" * 20_000
    ctypes.PyDLL(None).write(2, text, len(text))
    return np.zeros(2, np.float32)


def make_printing_in_c() -> FaultEnv:
    return FaultEnv(print_in_c, at_step=2)


class HangsLater(FaultEnv):
    """The first instance, which is asked for its spaces, works; later ones hang."""

    def __init__(self, where: str) -> None:
        super().__init__(lambda: None, at_step=0)
        self._where = where if (os.getpid(), where) in _made else ""
        _made.add((os.getpid(), where))
        self._hang("constructor")

    def _hang(self, here: str) -> None:
        if here == self._where:
            time.sleep(1e6)

    def reset(self, *, seed=None, options=None):
        self._hang("reset")
        return super().reset(seed=seed)

    def step(self, action):
        self._hang("step")
        return super().step(action)

    def close(self):
        self._hang("close")


_made: set[tuple[int, str]] = set()


def make_hanging_later_in_constructor() -> HangsLater:
    return HangsLater("constructor")


def make_hanging_later_in_reset() -> HangsLater:
    return HangsLater("reset")


def make_hanging_later_in_step() -> HangsLater:
    return HangsLater("step")


def make_hanging_later_in_close() -> HangsLater:
    return HangsLater("close")


class HangingInClose(FaultEnv):
    def close(self):
        time.sleep(1e6)


def make_hanging_in_close() -> FaultEnv:
    return HangingInClose(fail, at_step=-1)


def make_hanging_in_some() -> FaultEnv:
    """Hangs in servers that were started with HANGS in their environment."""
    return make_hanging() if "HANGS" in os.environ else FaultEnv(fail, at_step=-1)


def make_hanging_in_c() -> FaultEnv:
    """Hangs with the GIL held, as C code may."""
    return FaultEnv(hang_in_c, at_step=25)


def make_hanging_in_c_at_once() -> FaultEnv:
    return FaultEnv(hang_in_c, at_step=1)


class OneHangs(FaultEnv):
    """Of a run with --seed 7 the first environment hangs, in its first life only."""

    def __init__(self) -> None:
        super().__init__(lambda: time.sleep(1e6), at_step=0)

    def reset(self, *, seed=None, options=None):
        if seed == env_seed(7, 0, 0, 0):
            self._at_step = 7
        return super().reset(seed=seed)


class LeakingEnv(FaultEnv):
    """Episodes of 3 steps; the process is out of something in the fourth one."""

    def __init__(self) -> None:
        super().__init__(lambda: os._exit(3), at_step=10)

    def step(self, action):
        observation, reward, *_ = super().step(action)
        return observation, reward, self._steps % 3 == 0, False, {}


class ChangesTorch(FaultEnv):
    """Games of 5 steps. Seeds torch at each reset, and changes its defaults before."""

    def __init__(self) -> None:
        import torch

        super().__init__(lambda: None, at_step=0)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        self._seed = torch.manual_seed

    def reset(self, *, seed=None, options=None):
        self._seed(3)
        self._steps = 0
        return super().reset()

    def step(self, action):
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, self._steps == 5, truncated, info


class Forking(FaultEnv):
    """Steps in a process that it forks, as environments of multiprocessing do."""

    def __init__(self) -> None:
        super().__init__(lambda: None, at_step=0)
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._worker = context.Process(target=_echo, args=(theirs,))
        self._worker.start()
        theirs.close()

    def step(self, action):
        self._pipe.send(super().step(action))
        return self._pipe.recv()

    def close(self):
        self._worker.terminate()
        self._worker.join()


def _echo(pipe) -> None:
    while True:
        pipe.send(pipe.recv())


def make_broken() -> FaultEnv:
    raise RuntimeError("no licence for this simulator")
