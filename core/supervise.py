# SPDX-License-Identifier: Apache-2.0
"""Supervision: exit codes, signals, worker threads, restarts, stalls, resources.

Small tools that both trainers use to keep one promise: a run makes progress, or it ends
with a checkpoint, a non-zero status and the reason.
"""

import atexit
import concurrent.futures
import contextlib
import ctypes
import enum
import faulthandler
import json
import logging
import math
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from core import terminal

log = logging.getLogger(__name__)

CGROUP = Path("/sys/fs/cgroup")  # In a container with cgroup v2: the container's own.
HANG_GRACE_S = 60.0  # For a main loop that is slow to save, not stuck.


class Exit(enum.IntEnum):
    """Exit statuses of every program here (sysexits.h where one fits)."""

    DONE = 0
    USAGE = 2  # Bad flags; argparse's own.
    INTERNAL = 70
    CHECKPOINT = 74  # A checkpoint could not be read or written.
    STOPPED = 75  # By a signal, with a checkpoint: start it again and it goes on.
    CONFIG = 78  # Configuration, specification or version does not fit.


class ConfigError(Exception):
    """The run cannot go on as configured; the message says what to change."""


class StallError(Exception):
    """No progress for `--stall_timeout_s`."""


# `timeout`, schedulers and terminals signal a process and its group at the same moment.
DUPLICATE_S = 0.2


# SIGHUP comes when the terminal goes, for instance with its ssh connection.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """Turns the first of STOP_SIGNALS into a flag, and the second into an exit.

    A signal within DUPLICATE_S of the first is the same one, delivered twice. So is any
    SIGHUP that follows: kernel and shell send one each. A SIGHUP that is ignored
    (`nohup`) stays so.

    A context manager for the main thread. The old handlers come back afterwards; but
    where a signal would have ended the process, it does so as a second one would: by
    then a run has its checkpoint, and the status says so. While Python itself ends,
    signals wait and do nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
        for signum in STOP_SIGNALS:
            old = signal.getsignal(signum)
            if not (signum == signal.SIGHUP and old == signal.SIG_IGN):
                self._old[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._old.items():
            is_end = handler == signal.SIG_DFL
            signal.signal(signum, _end_at_once if is_end else handler)
        atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, STOP_SIGNALS)

    def _handle(self, signum: int, frame: object) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(signum), now
        elif now - self._received_at >= DUPLICATE_S and signum != signal.SIGHUP:
            terminal.say_at_once(
                "\x1b[?25h\nSecond signal: exiting at once, no checkpoint.\n"
            )
            _end_at_once(signum, frame)


def _end_at_once(signum: int, frame: object) -> None:
    os._exit(128 + signum)  # Children follow: they watch for the end of this process.


REPEAT_S = 600.0  # A warning that comes again is told at least this often.
MAX_CAUSES = 1000  # That are told apart: what an environment says may differ each time.


class Repeats:
    """Tells a warning in full once, and then in a line whenever its count has doubled.

    Also every REPEAT_S. Warnings have the same cause if their texts differ in numbers
    only (those of exit statuses aside). A filter for logging's handlers, one for all of
    them; a record of a lower level takes part if its `extra` has `repeats`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Guarded by the lock: count, first line, and when it was told, by cause.
        self._causes: dict[str, tuple[int, str, float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING and not hasattr(record, "repeats"):
            return True
        if not hasattr(record, "is_told"):  # It is every handler's first question.
            record.__dict__["is_told"] = self._count(record)
        return record.__dict__["is_told"]

    def _count(self, record: logging.LogRecord) -> bool:
        line = one_line(record.getMessage())
        cause = re.sub(r"(?<!exit status )(0x[0-9a-f]+|\b\d+)", "#", line)
        now = time.monotonic()
        with self._lock:
            if cause not in self._causes and len(self._causes) >= MAX_CAUSES:
                cause = str(record.msg)
            before, first, told_at = self._causes.get(cause, (0, line, now))
            count = before + 1
            is_told = count & before == 0 or now - told_at >= REPEAT_S
            if record.levelno < logging.WARNING:
                first = ""  # Nothing that is wrong.
            self._causes[cause] = (count, first, now if is_told else told_at)
        if count > 1:
            record.msg, record.args = f"{line} ({count} times so far)", ()
            record.exc_info = record.exc_text = None
        return is_told

    def most_frequent(self, n: int) -> list[str]:
        """Return counts and first texts of the n warnings that came most often."""
        with self._lock:
            causes = [cause for cause in self._causes.values() if cause[1]]
        causes.sort(key=lambda cause: -cause[0])
        return [f"{count} x {first}" for count, first, _ in causes[:n]]


def one_line(text: str) -> str:
    """Return the first line of a text; of a traceback also the last one."""
    first, *others = text.strip().splitlines() or [""]
    if others and first.endswith("Traceback (most recent call last):"):
        return f"{first} ... {others[-1]}"
    return first


RECORD_BYTES = 32 << 10  # Of `ForParent`'s lines: what a failed stream says, escaped.


class ForParent(logging.Formatter):
    """Makes one line of a log record, which `from_child` reads."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps([record.levelno, super().format(record)])


def from_child(line: str) -> tuple[int, str]:
    """Return level and text of a line from a child's output, its log's or not."""
    with contextlib.suppress(ValueError):
        match json.loads(line):
            case [int(level), str(text)]:
                return level, text
    return logging.INFO, line.rstrip()


def start_thread(
    name: str, fn: Callable[..., Any], *args: Any
) -> concurrent.futures.Future:
    """Run `fn(*args)` in a daemon thread; its result or exception is the Future's."""
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
    threads: Mapping[str, concurrent.futures.Future], limit_s: float
) -> None:
    """Wait for threads that were told to stop; name and show those that do not."""
    _, running = concurrent.futures.wait(threads.values(), limit_s)
    for name, thread in threads.items():
        if thread in running:
            log.error("%s did not stop within %g s; all stacks follow", name, limit_s)
    if running:
        dump_stacks()


class RestartBudget:
    """Says when a dead worker may start again, or that it has died too often.

    A death is quick if the worker had delivered nothing since it started. After
    `max_quick_deaths` of those in a row the budget is spent, or, if this worker has
    ever delivered, after PATIENCE times as many: it can work, so bad luck is likelier.
    (With one crash in 1000 steps a worker that delivers after 160 does not in a seventh
    of its starts; five of those in a row come every 16 million steps.) Waits
    double from `first_wait_s` up to `max_wait_s`; a worker that had delivered restarts
    at once.
    """

    PATIENCE = 4

    def __init__(
        self,
        *,
        max_quick_deaths: int = 5,
        first_wait_s: float = 0.1,
        max_wait_s: float = 5.0,
    ):
        self.max_quick_deaths = max_quick_deaths
        self.quick_deaths = 0  # In a row.
        self._has_delivered = False  # Since it started.
        self._can_deliver = False  # It has, ever.
        self._first_wait_s = first_wait_s
        self._max_wait_s = max_wait_s

    def delivered(self) -> None:
        self.quick_deaths = 0
        self._has_delivered = self._can_deliver = True

    def died(self) -> float | None:
        """Count a death; return the seconds to wait, or None if the budget is spent."""
        if self._has_delivered:
            self._has_delivered = False
            return 0.0
        self.quick_deaths += 1
        patience = self.PATIENCE if self._can_deliver else 1
        if self.quick_deaths >= patience * self.max_quick_deaths:
            return None
        return min(self._first_wait_s * 2 ** (self.quick_deaths - 1), self._max_wait_s)


DUMP_S = 1.0  # At most, for a process to show its stacks.


def show_stacks(pid: int) -> None:
    """Make a child process write its stacks: its faulthandler listens to SIGUSR1.

    Returns when it has, so that those of several do not mix, or after DUMP_S.
    """
    os.kill(pid, signal.SIGUSR1)  # It need not have the GIL.
    if sys.platform != "linux":
        time.sleep(DUMP_S / 10)  # No telling.
        return
    deadline = time.monotonic() + DUMP_S
    while not _has_handled(pid, signal.SIGUSR1) and time.monotonic() < deadline:
        time.sleep(0.001)


def _has_handled(pid: int, signum: int) -> bool:
    """Say whether no such signal waits in a process and no handler of it is at work."""
    for file in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # The thread has ended meanwhile.
            # A thread blocks the signal whose handler it runs.
            masks = r"^(?:SigPnd|ShdPnd|SigBlk):\s*(\w+)$"
            for mask in re.findall(masks, file.read_text(), re.MULTILINE):
                if int(mask, 16) >> (signum - 1) & 1:
                    return False
    return True


def kill_if_hung(name: str, process: Any, since: float, limit_s: float) -> bool:
    """Kill a process whose environment takes too long, after it has shown its stacks.

    Args:
      process: a `core.unit.Unit`; SIGUSR1 makes its worker's faulthandler write.
      since: when its present call began (`time.monotonic`), 0 between calls.
      limit_s: one call into one environment may take so long.

    Returns whether it was killed.
    """
    if since == 0 or time.monotonic() - since <= limit_s:
        return False
    log.warning(
        "%s hangs: one call of its environment has taken %g s (--env_step_timeout_s); "
        "its stacks follow",
        name,
        limit_s,
    )
    if process.pid is not None:
        show_stacks(process.pid)
    process.kill()
    return True


class Watchdog:
    """Raises `StallError`, with every thread's stack in the log, when nothing moves.

    `progress` or `rest` is called on each tick of the main loop. Should the main loop
    itself hang, faulthandler's own thread, which needs no GIL, dumps the stacks after
    twice the limit and HANG_GRACE_S, and ends the process.

    Args:
      limit_s: how long nothing may move.
      on_stall: "stop", or "wait" to say it each time and raise nothing.
    """

    def __init__(self, limit_s: float, on_stall: str = "stop"):
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._value: Any = None
        self._since = time.monotonic()

    def progress(self, value: Any, stage: Callable[[], str] | None = None) -> None:
        """Say how far the run is, and what it waits for should that be where it was.

        Raises:
          StallError: it has been there for longer than the limit.
        """
        now = time.monotonic()
        if value != self._value:
            self._value, self._since = value, now
        elif now - self._since > self._limit_s:
            waits_for = "" if stage is None else f", waiting for {stage()}"
            dump_stacks()
            text = (
                f"no progress for {now - self._since:.0f} s (--stall_timeout_s "
                f"{self._limit_s:g}) at {self._value}{waits_for}; every thread's stack "
                "is above"
            )
            if self._on_stall == "stop":
                raise StallError(text)
            log.error("%s. Waiting on (--on_stall wait).", text)
            self._since = now
        self._watch_main_loop()

    def rest(self) -> None:
        """Say that there is nothing to do: the time does not count."""
        self._since = time.monotonic()
        self._watch_main_loop()

    def _watch_main_loop(self) -> None:
        faulthandler.dump_traceback_later(
            2 * self._limit_s + HANG_GRACE_S, exit=True, file=terminal.urgent_fd()
        )

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()


def dump_stacks() -> None:
    """Log what every thread does: Python's stacks, and all states."""
    with tempfile.TemporaryFile(dir=_memory_folder()) as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
    log.error("All stacks:\n%s%s", stacks, "\n".join(thread_states()))


def _memory_folder() -> str | None:
    """Return a folder for temporary files that a full disk does not concern."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def thread_states() -> Iterator[str]:
    """Yield a line for each thread of this process, C++ ones too. Linux only.

    S sleeps, R runs, D waits for a disk; what it sleeps in is the kernel's word.
    """
    for task in sorted(Path("/proc/self/task").glob("*")):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            name = (task / "comm").read_text().strip()
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            sleeps_in = (task / "wchan").read_text().strip("0") or "-"
            yield f"thread {task.name} {name}: {fields[0]} {sleeps_in}, CPU {cpu_s:g} s"


def send_at_parents_end(signum: int) -> None:
    """Let the kernel send this process a signal when its parent ends. Linux only.

    SIGKILL and SIGCONT reach a process that somebody has stopped (SIGSTOP), too.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signum))


def continue_if_stopped(name: str, pid: int) -> None:
    """Continue a process that this one depends on, should it be stopped. Linux only."""
    with contextlib.suppress(OSError):  # It has ended, or there is no /proc.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            log.warning("%s (process %d) was stopped; continuing it", name, pid)
            os.kill(pid, signal.SIGCONT)


def exit_with_parent() -> None:
    """Make this child process end when its parent ends, kill -9 included.

    The kernel sends SIGKILL on Linux; elsewhere, and where a fork server stands between
    the two, a thread waits for the parent's end.
    """
    parent = parent_process()
    assert parent is not None, "called in a process without a parent"
    send_at_parents_end(signal.SIGKILL)

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(int(Exit.INTERNAL))

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def be_killed_first_for_memory() -> None:
    """Make Linux, out of memory, kill this process rather than the learner.

    An environment that leaks is replaced; a killed learner is the end of the run. Such
    a process counts as if it had half of the memory more. What it starts inherits it.
    """
    with contextlib.suppress(OSError):  # Not Linux, or forbidden.
        Path("/proc/self/oom_score_adj").write_text("500")


def describe_exit(exitcode: int | None) -> str:
    """Return what an exit code means, such as 'killed by SIGSEGV'."""
    if exitcode is None:
        return "still running"
    if exitcode < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"


def available_memory() -> int:
    """Return the bytes of memory still to be had here, container limits heeded."""
    import psutil  # Here, because environment servers do without it.

    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError, KeyError):  # No cgroup v2, or limit.
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        stat = {key: int(value) for key, value in map(str.split, lines)}
        # Cached files count as used, but the kernel drops them when memory is wanted.
        available = min(available, limit - used + stat["file"] - stat["shmem"])
    return available


def check_resources(
    *, shared_bytes: int, memory_folder: str | None, files: int, processes: int
) -> Iterator[str]:
    """Compare what a run needs with what the machine has; yield a line for each.

    Args:
      shared_bytes: shared memory the run will allocate.
      memory_folder: where it is taken from; None for plain memory (memfd).
      files: file descriptors the parent will hold open. The soft limit is raised to
        this if the hard limit allows.
      processes: processes that want a core of their own.

    Raises:
      ConfigError: there is not enough; the message has both numbers and the remedy.
    """
    mib = 2**20
    if memory_folder is None:
        have, where = available_memory(), "memory (memfd: /dev/shm is not needed)"
        remedy = "--num_buffers, --envs_per_actor or --unroll_length"
    else:
        have, where = shutil.disk_usage(memory_folder).free, memory_folder
        remedy = f"--num_buffers or --envs_per_actor, or enlarge {memory_folder}"
    line = (
        f"shared memory: need {shared_bytes / mib:,.1f} MiB, have "
        f"{have / mib:,.1f} MiB of {where}"
    )
    if shared_bytes > have:
        raise ConfigError(f"{line}. Lower {remedy}.")
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY and shared_bytes > largest:
        raise ConfigError(
            f"shared memory: need {shared_bytes / mib:,.1f} MiB, but no file may have "
            f"more than {largest / mib:,.1f} MiB (ulimit -f), and shared memory counts "
            f"as one. Raise the limit, or lower {remedy}."
        )
    yield line

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = float("inf") if hard == resource.RLIM_INFINITY else hard
    line = f"open files: need {files}, have {soft} (ulimit -n), at most {limit}"
    if files > limit:
        raise ConfigError(
            f"{line}. Lower --num_actors, or raise the limit (ulimit -Hn)."
        )
    if soft != resource.RLIM_INFINITY and files > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        line += f"; raised to {files}"
    yield line

    cores = num_cores()
    line = f"cores: {processes} busy processes or threads on {cores}"
    if processes > 2 * cores:
        line += "; more --envs_per_actor and fewer --num_actors would be faster"
    yield line


def keep_freed_memory() -> None:
    """Make glibc's malloc keep what is freed, for the next update to use.

    An update frees and allocates the same large tensors each time. By default malloc
    returns those above 32 MB to the kernel at once, and every update pays tens of
    thousands of page faults to have them back: a fifth of its time on the CPU. All
    threads share one arena so that one pool serves them; call this before there are
    any, for one that has an arena keeps it. No effect without glibc.
    """
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # malloc.h
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(m_arena_max, 1)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def let_learner_go_first(niceness: int = 19) -> None:
    """Make this thread leave the cores to the learner, where they share them.

    On Linux, where threads have a niceness of their own, those that it starts later do
    so too; elsewhere it is the process that does.

    Whoever steps environments or chooses actions can wait for the learner, which sleeps
    when it has no batch; but a preempted learner leaves cores idle: it may hold what
    its other threads need. As a batch thread this one also never preempts anybody by
    waking up, which every message would make it do.
    """
    os.nice(niceness)
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):  # Some containers forbid it.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def check_main_file() -> None:
    """Refuse a main program that processes of multiprocessing cannot import again.

    Raises:
      ConfigError: it was read from standard input.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)  # Notebooks have none, and need none.
    if path is not None and main.__spec__ is None and not os.path.exists(path):
        raise ConfigError(
            f"the main program is {path}, no file, and actor processes import it "
            "again. Save it as a file, or use --serial."
        )


def num_cores() -> int:
    """Return the number of cores this process may use, container limits heeded."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # No cgroup v2, or no limit.
        quota_us, period_us = map(int, (CGROUP / "cpu.max").read_text().split())
        cores = min(cores, math.ceil(quota_us / period_us))
    return cores
