# SPDX-License-Identifier: Apache-2.0
"""`Turns`: the streams of a server step one after the other."""

import contextlib
import threading
import time
from collections.abc import Iterator

MIN_CPU_SHARE = 0.25
FORGET = 0.9  # The weight of what was measured before, at each step.


class Turns:
    """Lets one stream of a server step at a time, if its environments compute.

    A server has two streams so that it steps one while the other waits for actions. But
    numpy and OpenCV release the GIL in the middle of a step. Without turns, two streams
    that have actions would take the GIL from each other again and again: this costs
    time, and both would finish late and then wait for actions at the same time.

    Environments that wait for something, or compute in other threads and processes,
    take no turns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Seconds of the last steps: of the thread's CPU time, and by the clock.
        self._cpu_s = 0.0
        self._wall_s = 0.0

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Step the environments of one stream in this block."""
        computes = self._cpu_s >= MIN_CPU_SHARE * self._wall_s
        with self._lock if computes else contextlib.nullcontext():
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            yield
            cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
        self._cpu_s = FORGET * self._cpu_s + cpu_s
        self._wall_s = FORGET * self._wall_s + wall_s
