# SPDX-License-Identifier: Apache-2.0
"""A profiler trace of a few updates."""

import logging
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig

log = logging.getLogger(__name__)

UNTRACED_UPDATES = 5  # The first updates of a run are slower than the others.
TRACED_UPDATES = 3


class Trace:
    """Traces TRACED_UPDATES updates with the profiler of torch. A context manager.

    The file opens in chrome://tracing or ui.perfetto.dev. The trace shows the threads
    that run torch: inference and learners, but not the actor pool. Call all methods in
    one thread: a profiler belongs to the thread that started it.

    Args:
      path: the file to write, or None to trace nothing.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._begin: int | None = None  # The first update to trace.
        self._is_running = False
        # None when there is nothing to trace, or nothing more.
        self._profiler: torch.profiler.profile | None = None
        if path is not None:
            self._profiler = torch.profiler.profile(
                experimental_config=_ExperimentalConfig(profile_all_threads=True)
            )

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_running:
            self._write()
        elif self._profiler is not None:
            log.warning("Too few updates for a trace: %s not written", self._path)

    def tick(self, updates: int) -> None:
        """Begin or end the trace, given the number of updates so far."""
        if self._profiler is None:
            return
        if self._begin is None:
            self._begin = updates + UNTRACED_UPDATES
        if self._is_running and updates >= self._begin + TRACED_UPDATES:
            self._write()
        elif not self._is_running and updates >= self._begin:
            self._begin = updates
            self._profiler.start()
            self._is_running = True

    def _write(self) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        self._is_running = False
        self._profiler.export_chrome_trace(str(self._path))
        self._profiler = None  # Frees the memory of the recorded events.
        log.info("Wrote %s", self._path)
