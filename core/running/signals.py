# SPDX-License-Identifier: Apache-2.0
"""Stop signals, and the stacks of all threads of a program that hangs."""

import atexit
import contextlib
import faulthandler
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.running import terminal
from core.running.machine import tmpfs_folder

log = logging.getLogger(__name__)


# `timeout`, schedulers and terminals signal a process and its group at the same moment,
# so the process may get a signal twice.
DUPLICATE_S = 0.2


# SIGHUP arrives when the terminal closes, for instance when its ssh connection ends.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# `Pauses.end` is called every second or so. If it was not called for this long, the
# process was paused.
PAUSE_S = 30.0


class Pauses:
    """Tells when this process last continued after a pause (Ctrl-Z, SIGSTOP).

    The time of a pause is no delay of an environment or of a learner.
    """

    def __init__(self) -> None:
        self._called = time.monotonic()
        self._end = 0.0

    def end(self) -> float:
        """Return when the newest pause ended (`time.monotonic`), or 0.

        Must be called every few seconds: a longer gap is taken for a pause.
        """
        now = time.monotonic()
        if now - self._called > PAUSE_S:
            self._end = now
        self._called = now
        return self._end


@contextlib.contextmanager
def pausable() -> Iterator[None]:
    """Make SIGTSTP stop faulthandler's timer, which would go on during the pause.

    SIGTSTP comes from Ctrl-Z, and from schedulers before they suspend a job. The thread
    that starts the timer again and again does so after the pause, too. An ignored
    SIGTSTP stays ignored. Does nothing outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_default = is_main and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL
    if is_default:
        signal.signal(signal.SIGTSTP, _pause)
    try:
        yield
    finally:
        if is_default:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _pause(signum: int, frame: object) -> None:
    faulthandler.cancel_dump_traceback_later()
    os.kill(os.getpid(), signal.SIGSTOP)


def end_after(limit_s: float) -> None:
    """Make faulthandler show all stacks and end this process after `limit_s`.

    Another call puts the end off; `faulthandler.cancel_dump_traceback_later` takes it
    back. faulthandler needs no GIL.
    """
    with contextlib.suppress(RuntimeError):  # No thread is left: the next call.
        faulthandler.dump_traceback_later(limit_s, exit=True, file=terminal.urgent_fd())


class StopSignal:
    """Sets `received` at the first of STOP_SIGNALS, and ends the process at the second.

    A signal within DUPLICATE_S of the first is taken for a duplicate and ignored. So is
    a SIGHUP at any later time: kernel and shell send one each. If SIGHUP is ignored at
    the start (`nohup`), it stays ignored.

    A context manager for the main thread, which restores the old handlers at its end.
    If the old handler is the default action, a later signal ends the process with
    status 128 + n instead (n: the signal's number), because the default action would
    report that the signal killed the process. While the interpreter shuts down, these
    signals are ignored.
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

    def renew(self) -> None:
        """Take the signals again that an environment has taken since."""
        for signum in self._old:
            signal.signal(signum, self._handle)

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._old.items():
            is_end = handler == signal.SIG_DFL
            signal.signal(signum, _end_at_once if is_end else handler)
        atexit.register(_ignore_stop_signals)

    def _handle(self, signum: int, frame: object) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(signum), now
        elif now - self._received_at >= DUPLICATE_S and signum != signal.SIGHUP:
            terminal.say_at_once(
                "\x1b[?25h\nSecond signal: exiting at once, no checkpoint.\n"
            )
            _end_at_once(signum, frame)


def _ignore_stop_signals() -> None:
    """Ignore these signals until the process has ended.

    The interpreter restores the default action of signals that have a handler, but not
    of ignored ones. To block them would not be enough: threads of C++ still take them.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _end_at_once(signum: int, frame: object) -> None:
    os._exit(128 + signum)  # The children notice this, and end too.


DUMP_S = 1.0  # Longest wait for a process to show its stacks.


def show_stacks(pid: int) -> None:
    """Make a child process write its stacks: its faulthandler handles SIGUSR1.

    Return when the stacks are written, so that the stacks of several processes do not
    mix, or after DUMP_S. Do nothing if the process has just ended.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)  # faulthandler does not need the GIL.
    if sys.platform != "linux":
        time.sleep(DUMP_S / 10)  # Other systems do not show when a handler has ended.
        return
    deadline = time.monotonic() + DUMP_S
    while not _has_handled(pid, signal.SIGUSR1) and time.monotonic() < deadline:
        time.sleep(0.001)


def _has_handled(pid: int, signum: int) -> bool:
    """Return whether a signal is not pending and its handler is not running."""
    tasks: list[Path] = []
    with contextlib.suppress(OSError):  # The process has just ended.
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    for task in tasks:
        with contextlib.suppress(OSError):  # The thread has just ended.
            status = (task / "status").read_text(errors="replace")
            # While a thread runs a handler, it blocks the handler's signal.
            masks = r"^(?:SigPnd|ShdPnd|SigBlk):\s*(\w+)$"
            for mask in re.findall(masks, status, re.MULTILINE):
                if int(mask, 16) >> (signum - 1) & 1:
                    return False
    return True


def dump_stacks() -> None:
    """Log the Python stack of every Python thread, and the state of all threads."""
    with tempfile.TemporaryFile(dir=tmpfs_folder()) as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
    log.error("All stacks:\n%s%s", stacks, "\n".join(thread_states()))


def thread_states() -> Iterator[str]:
    """Yield a line for each thread of this process, also for C++ threads. Linux only.

    States: S sleeps, R runs, D waits for a disk. The kernel function in which the
    thread sleeps follows the state.
    """
    for task in sorted(Path("/proc/self/task").glob("*")):
        with contextlib.suppress(OSError):  # The thread has just ended.
            name = (task / "comm").read_text(errors="replace").strip()
            stat = (task / "stat").read_text(errors="replace")
            fields = stat.rpartition(")")[2].split()
            cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            sleeps_in = (task / "wchan").read_text().strip("0") or "-"
            yield f"thread {task.name} {name}: {fields[0]} {sleeps_in}, CPU {cpu_s:g} s"
