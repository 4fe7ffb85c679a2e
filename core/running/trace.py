# SPDX-License-Identifier: Apache-2.0
"""A profiler trace of a few updates."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig

from core.algorithm.gpu import recording
from core.errors import UsageError

log = logging.getLogger(__name__)

UNTRACED_UPDATES = 5  # The first updates of a run are slower than the others.
TRACED_SPANS = 3  # Spans of each name to trace: updates, and batches of inference.


class Trace:
    """Traces a few updates with the profiler of torch. A context manager.

    Open the file in chrome://tracing or ui.perfetto.dev. The trace shows the threads
    that run torch: inference and learners, but not the actor pool. Call `span` in these
    threads. Call all other methods in one thread, because a profiler belongs to the
    thread that started it.

    Args:
      path: the file to write, or None to trace nothing.

    Raises:
      UsageError: this version of torch can trace only one thread.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._begin: int | None = None  # The first update to trace.
        self._is_running = False
        self._lock = threading.Lock()
        # Guarded by _lock. How often each span has been traced from start to end.
        self._spans: dict[str, int] = {}
        # None if nothing is to be traced, or after the trace.
        self._profiler: torch.profiler.profile | None = None
        if path is not None:
            try:
                config = _ExperimentalConfig(profile_all_threads=True)
            except TypeError as error:
                raise UsageError(
                    "--write_profiler_trace needs torch 2.7 or newer, this is torch "
                    f"{torch.__version__}: update torch, or leave the flag out"
                ) from error
            self._profiler = torch.profiler.profile(experimental_config=config)

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_running:
            self._write()
        elif self._profiler is not None:
            log.warning("Too few updates for a trace: %s not written", self._path)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Show the block in the trace."""
        if self._profiler is None:  # record_function would take 10 us.
            yield
            return
        with self._lock:
            self._spans.setdefault(name, 0)
        is_traced = self._is_running  # The profiler ignores spans that began before.
        with torch.profiler.record_function(name):
            yield
        with self._lock:
            self._spans[name] += is_traced

    def tick(self, updates: int) -> None:
        """Begin or end the trace, given the number of updates so far."""
        if self._profiler is None:
            return
        if self._begin is None:
            self._begin = updates + UNTRACED_UPDATES
        with self._lock:
            is_complete = all(n >= TRACED_SPANS for n in self._spans.values())
        if self._is_running and is_complete:
            self._write()
        elif not self._is_running and updates >= self._begin:
            with recording:
                self._profiler.start()
            self._is_running = True

    def _write(self) -> None:
        assert self._profiler is not None and self._path is not None
        with recording:  # It waits for the GPU.
            self._profiler.stop()
        self._is_running = False
        with contextlib.suppress(OSError):  # Of an earlier run; or it cannot be opened.
            self._path.unlink()
        self._profiler.export_chrome_trace(str(self._path))
        self._profiler = None  # Frees the memory of the recorded events.
        if _is_complete(self._path):
            log.info("Wrote %s", self._path)
        else:
            log.error("torch could not write %s: no folder, or no space?", self._path)


def _is_complete(path: Path) -> bool:
    """Return whether a trace has its end. torch prints errors but does not raise."""
    try:
        with path.open("rb") as file:
            file.seek(-2, os.SEEK_END)
            return file.read().rstrip().endswith(b"}")
    except OSError:  # There is no file, or an empty one.
        return False
