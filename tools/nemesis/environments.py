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

STEP_S = 0.002  # As of a small game; or two cores would do nothing but count.


class PacedEnv(CountingEnv):
    """Counts, and takes its time. Says which server it is in on standard output."""

    def __init__(self) -> None:
        super().__init__()
        introduce(os.getpid())

    def step(self, action: int) -> Any:
        time.sleep(STEP_S)
        return super().step(action)


class HangingEnv(PacedEnv):
    """Hangs when its `order_file` says so; says when on standard output."""

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
    # All at once, or other servers' lines may come between.
    os.write(1, f"{name()} {text}\n".encode())


def hang_in_python() -> None:
    time.sleep(1e6)


def hang_in_c() -> None:
    """Keep the GIL, as C code may; unlike sleep(), no signal ends this."""
    reader, _ = os.pipe()
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


HANGS = {"python": hang_in_python, "c": hang_in_c}


def name() -> str:
    """Return what the program calls this process of its: server-3, actor-0."""
    return multiprocessing.current_process().name


def order_file(folder: Path, server: str, kind: str) -> Path:
    return folder / f"{server}-{kind}"


class Catch(toys.Catch):
    """The toy, which says too which process it is in."""

    def __init__(self) -> None:
        super().__init__()
        introduce(os.getpid())


class GreedyCatch(Catch):
    """Takes memory without end when its order says so."""

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
