# SPDX-License-Identifier: Apache-2.0
"""Environments whose rollouts can be checked by arithmetic, and which hang on command.

For `--env tools.nemesis.environments:make` and so on.
"""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from core.environments import toys
from tests.counting_env import CountingEnv
from tools.nemesis import FOLDER

STEP_S = 0.002  # As of a small game. Without it, counting would keep all cores busy.


class PacedEnv(CountingEnv):
    """Counts slowly. Prints the name of its server and the id of its process."""

    def __init__(self) -> None:
        super().__init__()
        introduce(os.getpid())

    def step(self, action: int) -> Any:
        time.sleep(STEP_S)
        return super().step(action)


class HangingEnv(PacedEnv):
    """Hangs when its `order_file` is there, and prints the time."""

    def __init__(self) -> None:
        super().__init__()
        self._orders = [
            (order_file(Path(os.environ[FOLDER]), name(), kind), kind) for kind in HANGS
        ]

    def step(self, action: int) -> Any:
        for order, kind in self._orders:
            with contextlib.suppress(FileNotFoundError):
                order.unlink()
                say(f"hangs in {kind} at {time.monotonic()}")
                HANGS[kind]()
        return super().step(action)


@functools.cache  # Once in each process.
def introduce(pid: int) -> None:
    say(f"is process {pid}")


def say(text: str) -> None:
    # In one write, so that lines of several servers do not mix.
    os.write(1, f"{name()} {text}\n".encode())


def hang_in_python() -> None:
    time.sleep(1e6)


def hang_in_c() -> None:
    """Wait in C code that holds the GIL. No signal ends this, unlike sleep()."""
    reader, _ = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


HANGS = {"python": hang_in_python, "c": hang_in_c}


def name() -> str:
    """Return the name of this process in its program: server-3, actor-0."""
    return multiprocessing.current_process().name


def order_file(folder: Path, server: str, kind: str) -> Path:
    return folder / f"{server}-{kind}"


class Catch(toys.Catch):
    """The toy task. Prints the name of its server or actor, and the process id."""

    def __init__(self) -> None:
        super().__init__()
        introduce(os.getpid())


class GreedyCatch(Catch):
    """Takes memory without end when its `order_file` is there."""

    def step(self, action: int) -> Any:
        order = order_file(Path(os.environ[FOLDER]), name(), "memory")
        with contextlib.suppress(FileNotFoundError):
            order.unlink()
            taken = []
            while True:
                taken.append(b"x" * 2**20)
        return super().step(action)


def make() -> PacedEnv:
    return PacedEnv()


def make_hanging() -> HangingEnv:
    return HangingEnv()


def make_catch() -> Catch:
    return Catch()


def make_greedy() -> GreedyCatch:
    return GreedyCatch()
