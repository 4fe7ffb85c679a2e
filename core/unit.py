# SPDX-License-Identifier: Apache-2.0
"""`Unit`: a worker process and all that its environments start. They end together.

    program ─► guard ─► worker ─► what the environments start ─► what that starts

Some environments start processes: workers, a simulator, a browser. These must not
outlive the worker, and they hold what a fork copies of it, such as its sockets. So
there is a guard, which only waits (Linux). It is the subreaper of everything below it:
a process whose parent ends becomes a child of the guard, whatever session or process
group it is in. When the worker ends, or the program, the guard kills what is left and
then ends as the worker did. If the guard is killed, the kernel ends the worker, and the
program kills the rest.

`limit_calls` is for environments in the program's own process.
"""

import contextlib
import ctypes
import faulthandler
import logging
import multiprocessing
import os
import resource
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from core import terminal
from core.supervise import Exit, dump_stacks, exit_with_parent, send_at_parents_end

log = logging.getLogger(__name__)

HAS_GUARD = sys.platform == "linux"
MARK = "TORCHBEAST_UNIT"  # In the environment of what a unit's environments start.
END_S = 5.0  # For killed processes to be gone; one in a disk's driver may take longer.
LOOK_S = 0.2  # Between two looks at the clock of environments in this process.
END = signal.SIGQUIT  # What tells a guard to end its unit.
GUARD_SIGNALS = {
    *(END, signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGCHLD, signal.SIGCONT),
}


class Unit:
    """A worker process with its guard, in the place of a multiprocessing.Process.

    For the thread that starts it. `target(*args)` runs in the worker; of `args`, what
    the environments fork does not keep the pipes open.

    Args:
      context: of multiprocessing, with any start method.
    """

    def __init__(
        self, context: Any, target: Callable[..., Any], args: tuple, *, name: str
    ):
        self._mark = secrets.token_hex(8)
        self._is_direct = context.get_start_method() != "forkserver"
        parent = os.getpid() if self._is_direct else None
        self._process = context.Process(
            target=_run,
            args=(self._mark, parent, target, args),
            name=name,
            daemon=True,
        )
        self._pid: int | None = None
        self._pidfd: int | None = None

    def start(self) -> None:
        self._process.start()
        if HAS_GUARD and self._is_direct:
            # Forked children keep open the pipe that is multiprocessing's sentinel.
            self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def sentinel(self) -> int:
        """A file descriptor that is readable when the unit has ended."""
        return self._process.sentinel if self._pidfd is None else self._pidfd

    @property
    def pid(self) -> int | None:
        """The worker's process id, or None before it runs."""
        guard = self._process.pid
        if not HAS_GUARD:
            return guard
        if self._pid is None:
            # The oldest: whoever else becomes the guard's child came later.
            self._pid = next(_children_of(guard), None)
        return self._pid

    @property
    def exitcode(self) -> int | None:
        """The worker's, as multiprocessing has it."""
        return self._process.exitcode

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def terminate(self) -> None:
        """Send the worker SIGTERM."""
        self._process.terminate()  # The guard passes it on.

    def kill(self) -> None:
        """End the unit at once."""
        if self._process.exitcode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if HAS_GUARD:
                os.kill(self._process.pid, END)
                os.kill(self._process.pid, signal.SIGCONT)  # It may be stopped.
            else:
                os.killpg(self._process.pid, signal.SIGKILL)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the unit, for up to `timeout_s`."""
        if connection.wait([self.sentinel], timeout_s):
            self._process.join()
            if self._process.exitcode != 0:  # The guard may have been killed.
                _kill_rest(self._process.pid, self._mark)

    def close(self) -> None:
        """Free the descriptors of a unit that has ended and was joined."""
        self._process.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _run(
    mark: str, parent: int | None, target: Callable[..., Any], args: tuple
) -> None:
    """Become a guard, and its worker, which alone returns.

    Args:
      parent: the process that forks guards, if it is known.
    """
    # A group, no session: Linux shares out the CPU by sessions (autogroup), and this
    # one's niceness would mean nothing to the learner.
    os.setpgid(0, 0)
    if HAS_GUARD:
        guard = os.getpid()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, GUARD_SIGNALS)
        _become_subreaper()
        worker = os.fork()
        if worker:
            _guard(worker, parent or os.getppid())
        send_at_parents_end(signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(Exit.INTERNAL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    else:
        exit_with_parent()
    os.environ[MARK] = mark
    multiprocessing.current_process().daemon = False  # These may have no children.
    pipes = [arg for arg in args if isinstance(arg, connection.Connection)]
    os.register_at_fork(after_in_child=lambda: _forget(pipes))
    target(*args)


def _forget(pipes: list[connection.Connection]) -> None:
    """Let go, in what an environment forks, of what is the worker's."""
    for pipe in pipes:
        pipe.close()
    # Who starts such a process ends it with SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # As `nohup` makes it.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _guard(worker: int, parent: int) -> NoReturn:
    """Wait for the end of the worker or the parent, then end what is left."""
    received: list[int] = []
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    for signum in GUARD_SIGNALS:
        signal.signal(signum, lambda signum, _: received.append(signum))
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    # No SIGKILL: there is something to do. And SIGCONT also wakes one that is stopped.
    send_at_parents_end(signal.SIGCONT)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    program = multiprocessing.parent_process()
    assert program is not None, "a guard is started by multiprocessing"
    status = None
    while status is None and os.getppid() == parent and END not in received:
        if signal.SIGTERM in received:
            received.remove(signal.SIGTERM)
            os.kill(worker, signal.SIGTERM)
        if program.sentinel in connection.wait([wake, program.sentinel]):
            break
        os.read(wake, 4096)
        status = _reap(worker)
    status = _end_children(worker, status)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # The worker has left one.
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def _reap(worker: int) -> int | None:
    """Reap children that have ended; return the worker's status if it is among them.

    Raises:
      ChildProcessError: there is none left.
    """
    status = None
    while (ended := os.waitpid(-1, os.WNOHANG))[0]:
        if ended[0] == worker:
            status = ended[1]
            break  # Others may be none.
    return status


def _end_children(worker: int, status: int | None) -> int:
    """Kill all children until there are none; return the worker's status.

    The children of those that end become children of this process.
    """
    deadline = time.monotonic() + END_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            for pid in _children_of(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            found = _reap(worker)
            status = found if status is None else status
            time.sleep(0.001)
    return int(signal.SIGKILL) if status is None else status


def _kill_rest(guard: int, mark: str) -> None:
    """Kill what a killed guard has left, by its process group and its mark."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(guard, signal.SIGKILL)
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # It has ended, or is somebody else's.
            if f"{MARK}={mark}".encode() in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)


def _children_of(pid: int) -> Iterator[int]:
    """Yield the present children of a process, the oldest first."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                children.append((int(fields[19]), int(stat.parent.name)))
    yield from (child for _, child in sorted(children))


@contextlib.contextmanager
def limit_calls(limit_s: float) -> Iterator[np.ndarray]:
    """Give a clock to environments in this process; end it if one call takes too long.

    All stacks are shown first, and what the environments started is killed. The exit
    status is 70, or 1 if C code holds the GIL: then only faulthandler can act.
    """
    clock = np.zeros(1)  # See `core.environment.Environments`.
    done = threading.Event()

    def watch() -> None:
        while not done.wait(LOOK_S):
            # It fires if this thread does not come back.
            faulthandler.dump_traceback_later(
                limit_s + END_S, exit=True, file=terminal.urgent_fd()
            )
            if clock[0] == 0 or time.monotonic() - clock[0] <= limit_s:
                continue
            log.error(
                "One call of the environment has taken %g s (--env_step_timeout_s)",
                limit_s,
            )
            dump_stacks()
            for pid in _descendants_of(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os._exit(Exit.INTERNAL)

    thread = threading.Thread(target=watch, name="environment-watch", daemon=True)
    thread.start()
    try:
        yield clock
    finally:
        done.set()
        thread.join()  # Whoever forks next must have one thread.
        faulthandler.cancel_dump_traceback_later()


def _descendants_of(pid: int) -> Iterator[int]:
    for child in _children_of(pid):
        yield from _descendants_of(child)
        yield child


def _become_subreaper() -> None:
    pr_set_child_subreaper = 36
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
