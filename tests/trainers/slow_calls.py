# SPDX-License-Identifier: Apache-2.0
"""MonoBeast, where calls of environments may take long, except those that hang."""

import threading
import time
from types import SimpleNamespace

import monobeast
from core.running import unit

HANGS_S = 1e6  # For how long calls in tests/fault_env.py sleep.


def main(argv: list[str]) -> int:
    """Train; the clock of `limit_calls` shows no late call before one hangs."""
    sleep, monotonic = time.sleep, time.monotonic
    hangs = threading.Event()

    def note(seconds: float) -> None:
        if seconds == HANGS_S:
            hangs.set()
        sleep(seconds)

    def clock() -> float:
        return monotonic() - (0 if hangs.is_set() else HANGS_S)

    time.sleep = note
    unit.time = SimpleNamespace(monotonic=clock, sleep=sleep)
    return monobeast.main(argv)
