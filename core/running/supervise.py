# SPDX-License-Identifier: Apache-2.0
"""Supervision: worker threads, restarts, stalls, child processes.

With these tools both trainers make sure that a run makes progress, or ends with a
checkpoint, a non-zero status and the reason.
"""

import concurrent.futures
import contextlib
import ctypes
import faulthandler
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import connection, parent_process
from typing import Any

from core.errors import ConfigError, Exit, StallError, one_line
from core.running.signals import Pauses, dump_stacks, end_after, pausable

log = logging.getLogger(__name__)


# Extra time for a main loop that a busy machine delays: a program that is killed for
# this writes no last checkpoint.
HANG_GRACE_S = 60.0

SAY_JOIN_S = 1.0  # A wait for threads at the end of a run is logged after this time.
LOOK_S = 0.2  # At this interval that wait looks whether it is hopeless.

REPEAT_S = 600.0  # A warning that comes again is shown again after this time.
MAX_CAUSES = 1000  # Limits memory, since an environment may raise a new text each time.


class Repeats:
    """Shows a warning in full once, and then one line each time its count has doubled.

    A line is also shown if the warning comes again REPEAT_S after the last line. Two
    warnings count as the same if their texts differ only in numbers (except exit
    statuses). This is a filter of `logging`: give all handlers the same object. It
    applies to records of the level WARNING, and to others with `repeats` in `extra`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by _lock: cause -> (count, first line, time of the last line shown).
        self._causes: dict[str, tuple[int, str, float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING and not hasattr(record, "repeats"):
            return True
        if not hasattr(record, "is_shown"):  # The first handler decides.
            record.__dict__["is_shown"] = self._count(record)
        return record.__dict__["is_shown"]

    def _count(self, record: logging.LogRecord) -> bool:
        line = one_line(record.getMessage())
        cause = re.sub(r"(?<!exit status )(0x[0-9a-f]+|\b\d+)", "#", line)
        now = time.monotonic()
        with self._lock:
            if cause not in self._causes and len(self._causes) >= MAX_CAUSES:
                cause = str(record.msg)
            before, first, shown_at = self._causes.get(cause, (0, line, now))
            count = before + 1
            # The first condition: `count` is a power of two.
            is_shown = count & before == 0 or now - shown_at >= REPEAT_S
            if record.levelno < logging.WARNING:
                first = ""  # Not a problem: `most_frequent` leaves it out.
            self._causes[cause] = (count, first, now if is_shown else shown_at)
        if count > 1:
            record.msg, record.args = f"{line} ({count} times so far)", ()
            record.exc_info = record.exc_text = None
        return is_shown

    def most_frequent(self, n: int) -> list[str]:
        """Return the counts and first texts of the n most frequent warnings."""
        with self._lock:
            causes = [cause for cause in self._causes.values() if cause[1]]
        causes.sort(key=lambda cause: -cause[0])
        return [f"{count} x {first}" for count, first, _ in causes[:n]]


RECORD_BYTES = 32 << 10  # Longest line of `ForParent`: the error of a stream, as JSON.


class ForParent(logging.Formatter):
    """Formats a log record as one line of JSON, which `from_child` reads.

    A record's `extra` may have `restarts`: how often the child has restarted its own
    children so far.
    """

    def format(self, record: logging.LogRecord) -> str:
        restarts = getattr(record, "restarts", 0)
        return json.dumps([record.levelno, super().format(record), restarts])


def from_child(line: str) -> tuple[int, str, int]:
    """Return level, text and `restarts` of a line of a child's output.

    Lines that `ForParent` did not write have level INFO and 0 restarts.
    """
    # RecursionError: the line begins with thousands of brackets.
    with contextlib.suppress(ValueError, RecursionError):
        match json.loads(line):
            case [int(level), str(text), int(restarts)]:
                return level, text, restarts
    return logging.INFO, line.rstrip(), 0


def start_thread(
    name: str, fn: Callable[..., Any], *args: Any
) -> concurrent.futures.Future:
    """Run `fn(*args)` in a daemon thread; return the Future of its result."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(fn(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def join_threads(
    threads: Mapping[str, concurrent.futures.Future],
    limit_s: float,
    is_hopeless: Callable[[], bool],
) -> bool:
    """Wait for threads that must stop; log those that still run, and all stacks.

    Args:
      is_hopeless: asked every LOOK_S; True ends the wait, without these logs.

    Returns:
      Whether all threads have stopped.
    """
    began = time.monotonic()
    say_at, end_at = began + SAY_JOIN_S, began + limit_s
    while running := concurrent.futures.wait(threads.values(), LOOK_S).not_done:
        if is_hopeless():
            return False
        now = time.monotonic()
        if now > end_at:
            break
        if now > say_at:
            say_at = math.inf
            log.info(
                "Waiting for %s to stop, for up to %.0f s. A second signal ends the "
                "program at once.",
                ", ".join(name for name, t in threads.items() if t in running),
                limit_s,
            )
    for name, thread in threads.items():
        if thread in running:
            log.error("%s did not stop within %g s; all stacks follow", name, limit_s)
    if running:
        dump_stacks()
    return not running


def raise_failures(threads: Mapping[str, concurrent.futures.Future]) -> None:
    """If threads have ended with exceptions, raise the first one."""
    for thread in threads.values():
        if thread.done():
            thread.result()


def wait_for_failure(
    threads: Mapping[str, concurrent.futures.Future], timeout_s: float
) -> None:
    """Wait until a thread ends, or `timeout_s`; raise the thread's exception."""
    concurrent.futures.wait(
        threads.values(), timeout_s, concurrent.futures.FIRST_COMPLETED
    )
    raise_failures(threads)


class RestartBudget:
    """Decides when a dead worker restarts, and when it has died too often.

    A death is quick if the worker has delivered nothing since its latest start. The
    budget is spent after MAX_QUICK_DEATHS quick deaths in a row. If the worker
    delivered after an earlier start, PATIENCE times as many are allowed, because the
    worker can work. (If one step in 1000 crashes and a worker delivers every 160 steps,
    one start in seven ends with a quick death; five in a row then happen every 16
    million steps.) After a quick death the worker waits before it restarts, at first
    FIRST_WAIT_S, then twice as long each time up to MAX_WAIT_S. After a death that is
    not quick it restarts at once.

    Attributes:
      start_at: when to start the worker (`time.monotonic`); None while it runs.
    """

    MAX_QUICK_DEATHS = 5
    PATIENCE = 4
    FIRST_WAIT_S = 0.1
    MAX_WAIT_S = 5.0

    def __init__(self, start_at: float | None = None) -> None:
        self.start_at = start_at
        self.quick_deaths = 0  # In a row.
        self._has_delivered = False  # Since its latest start.
        self._can_deliver = False  # Whether it has ever delivered.

    def delivered(self) -> None:
        self.quick_deaths = 0
        self._has_delivered = self._can_deliver = True

    def died(self) -> float | None:
        """Count a death, and set `start_at`; return the seconds to wait until then.

        Returns None if the budget is spent.
        """
        wait_s = 0.0
        if not self._has_delivered:
            self.quick_deaths += 1
            patience = self.PATIENCE if self._can_deliver else 1
            if self.quick_deaths >= patience * self.MAX_QUICK_DEATHS:
                return None
            wait_s = self.FIRST_WAIT_S * 2 ** (self.quick_deaths - 1)
            wait_s = min(wait_s, self.MAX_WAIT_S)
        self._has_delivered = False
        self.start_at = time.monotonic() + wait_s
        return wait_s

    def plan_restart(self, event: str, spent: Exception, restarts: int = 0) -> None:
        """Count a death; log `event` and the seconds until the worker restarts.

        Args:
          spent: raised if this death, which `quick_deaths` does not count yet, spends
            the budget.
          restarts: for the log record: see `ForParent`.
        """
        wait_s = self.died()
        if wait_s is None:
            raise spent
        log.warning("%s in %.1f s", event, wait_s, extra={"restarts": restarts})

    def start_if_due(self, name: str, start: Callable[[], None]) -> None:
        """Call `start` if it is time. A failure counts as a death of the worker.

        There may be too little memory for a moment, or too many processes or open
        files; or a fork server has died, and multiprocessing starts another.

        Raises:
          OSError, EOFError: that of `start`, which has failed too often.
        """
        if self.start_at is None or time.monotonic() < self.start_at:
            return
        try:
            start()
        except (OSError, EOFError) as error:
            event = f"{name} could not be started ({error!r}); trying again"
            self.plan_restart(event, error)
        else:
            self.start_at = None


class Watchdog:
    """If there is no progress, logs every thread's stack and raises `StallError`.

    The main loop must call `progress` or `rest` regularly. If the main loop itself
    hangs, faulthandler, which needs no GIL, dumps the stacks after twice the limit plus
    HANG_GRACE_S, and ends the process.

    Args:
      limit_s: the longest time without progress.
      on_stall: "stop", or "wait" to log an error each time and raise nothing.
    """

    def __init__(self, limit_s: float, on_stall: str = "stop"):
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._value: Any = None
        # Monotonic times: of the latest progress, later by all rests since; of the
        # latest call.
        self._since = self._called_at = time.monotonic()
        self._pauses = Pauses()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(pausable())

    def progress(
        self, value: Any, describe_wait: Callable[[], str] | None = None
    ) -> None:
        """Report how far the run is; a new value is progress.

        Args:
          describe_wait: says what the run waits for; called only after a stall.

        Raises:
          StallError: `value` has not changed for longer than the limit.
        """
        now = time.monotonic()
        self._since = max(self._since, self._pauses.end())
        if value != self._value:
            self._value, self._since = value, now
        elif now - self._since > self._limit_s:
            waits_for = f", waiting for {describe_wait()}" if describe_wait else ""
            dump_stacks()
            text = (
                f"no progress for {now - self._since:.0f} s (--stall_timeout_s "
                f"{self._limit_s:g}) at {self._value}{waits_for}; every thread's stack "
                "is above"
            )
            if self._on_stall == "stop":
                raise StallError(text)
            log.error("%s. Still waiting (--on_stall wait).", text)
            self._since = now
        self._watch_main_loop(now)

    def rest(self) -> None:
        """Report that there was nothing to do since the last call.

        This time does not count: the time limit goes on with the next `progress`.
        """
        now = time.monotonic()
        self._since += now - self._called_at
        self._watch_main_loop(now)

    def _watch_main_loop(self, now: float) -> None:
        self._called_at = now
        end_after(2 * self._limit_s + HANG_GRACE_S)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._stack.close()


def send_at_parents_end(signum: int) -> None:
    """Make the kernel send this process a signal when its parent ends. Linux only.

    SIGKILL and SIGCONT also reach a stopped process (SIGSTOP).
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signum))


def exit_with_parent() -> None:
    """Make this child process end when its parent ends, also after `kill -9`.

    For systems other than Linux: see `send_at_parents_end`.
    """
    parent = parent_process()
    assert parent is not None, "called in a process without a parent"

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(int(Exit.INTERNAL))

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def describe_exit(exitcode: int | None) -> str:
    """Return what an exit code means, such as 'killed by SIGSEGV'."""
    if exitcode is None:
        return "still running"
    if exitcode < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"


def check_main_file() -> None:
    """Refuse a main program that child processes cannot import.

    Raises:
      ConfigError: the main program was read from standard input.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)  # Notebooks have no file, and need none.
    if path is not None and main.__spec__ is None and not os.path.exists(path):
        raise ConfigError(
            f"the main program is {path}, which is not a file, but actor processes "
            "must import it. Save it as a file, or use --serial."
        )
