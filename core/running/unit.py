# SPDX-License-Identifier: Apache-2.0
"""`Unit`: a worker process and its descendants, which all end when the worker ends.

    program ─► guard ─► worker ─► processes of the environments ─► their children

Some environments start processes: workers, a simulator, a browser. These must not
outlive the worker, since they hold copies of its resources, such as sockets. Therefore
each worker has a guard, a process that only waits (Linux). The guard is the subreaper
of all processes below it: if the parent of a process ends, the process becomes a child
of the guard, whatever its session or process group. When the worker or the program
ends, the guard kills all remaining processes, and then ends with the worker's status.
If the guard itself is killed, the kernel ends the worker, and the program kills the
remaining processes.

`limit_calls` is for environments in the program's own process, without a `Unit`.
"""

import contextlib
import ctypes
import dataclasses
import errno
import faulthandler
import logging
import math
import multiprocessing
import os
import resource
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from core.errors import Exit
from core.proc import continue_if_stopped
from core.running.signals import Pauses, dump_stacks, end_after, pausable, show_stacks
from core.running.supervise import (
    RestartBudget,
    describe_exit,
    exit_with_parent,
    send_at_parents_end,
)

log = logging.getLogger(__name__)

HAS_GUARD = sys.platform == "linux"
MARK = "TORCHBEAST_UNIT"  # Environment variable that marks the processes of a unit.
END_S = 5.0  # Longest wait for killed processes to end; disk drivers may delay it.
LOOK_S = 0.2  # Interval at which `limit_calls` checks the clocks.
CONTINUE_S = 1.0  # Interval of looks whether a process is stopped.
END = signal.SIGQUIT  # After this signal a guard ends its unit.
GUARD_SIGNALS = {
    *(END, signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGCHLD, signal.SIGCONT),
}


class Unit:
    """A worker process with its guard; the interface is multiprocessing.Process's.

    `target(*args)` runs in the worker. Processes that the environments fork close the
    pipes in `args`. Only the thread that starts a unit may use it.

    Args:
      context: a context of multiprocessing, with any start method.
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
        self._look_at = 0.0  # When to look next whether a process is stopped.

    def start(self) -> None:
        self._process.start()
        if HAS_GUARD and self._is_direct:
            # multiprocessing's sentinel is a pipe, which forked children keep open.
            try:
                self._pidfd = _open_pidfd(self._process.pid)
            except OSError:  # Too many open files.
                # The caller forgets a unit that did not start; nobody else ends it.
                self._process.kill()
                self.join()
                raise

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
            self._pid = _worker_of(guard)
        return self._pid

    @property
    def exitcode(self) -> int | None:
        """The worker's exit code, as in multiprocessing."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Send SIGTERM to the worker."""
        self._process.terminate()  # The guard sends it to the worker.

    def kill(self) -> None:
        """End the unit at once."""
        if self._process.exitcode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if HAS_GUARD:
                os.kill(self._process.pid, END)
                # The guard may be stopped (SIGSTOP).
                os.kill(self._process.pid, signal.SIGCONT)
            else:
                os.killpg(self._process.pid, signal.SIGKILL)

    def continue_if_stopped(self, name: str) -> None:
        """Continue the worker and its guard if they are stopped (SIGSTOP).

        Looks once a second, however often it is called.
        """
        now = time.monotonic()
        if now < self._look_at or self._process.exitcode is not None:
            return
        self._look_at = now + CONTINUE_S
        for pid in (self._process.pid, self.pid):
            if pid is not None:
                continue_if_stopped(name, pid)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for up to `timeout_s` for the end of the unit."""
        if connection.wait([self.sentinel], timeout_s):
            self._process.join()
            if self._process.exitcode != 0:  # The guard may have been killed.
                _kill_rest(self._process.pid, self._mark)

    def close(self) -> None:
        """Free the descriptors of a unit that was joined."""
        self._process.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


@dataclasses.dataclass(kw_only=True)
class Slot:
    """The place of a worker, whose process may be replaced."""

    name: str  # For log lines, such as "Actor 3".
    budget: RestartBudget = dataclasses.field(
        default_factory=lambda: RestartBudget(start_at=0.0)
    )
    process: Unit | None = None  # None while the slot waits for `budget.start_at`.
    pipe: connection.Connection | None = None  # Messages from the process.
    reason: str | None = None  # Why the process dies; None: only its status is known.

    def kill_if_hung(self, since: float, pause_end: float, limit_s: float) -> bool:
        """Kill the process if its environment takes too long; show its stacks first.

        Args:
          since: when the environment's current call began (`time.monotonic`); 0 for
            none. faulthandler handles SIGUSR1 in the process.
          pause_end: from `Pauses.end`; the time before it does not count.
          limit_s: the longest time for one call of an environment.

        Returns:
          Whether the process was killed. It may take a while to end.
        """
        if since == 0 or time.monotonic() - max(since, pause_end) <= limit_s:
            return False
        log.warning(
            "%s hangs: one call of its environment has taken %g s "
            "(--env_step_timeout_s); its stacks follow",
            self.name,
            limit_s,
        )
        assert self.process is not None
        if self.process.pid is not None:
            show_stacks(self.process.pid)
        self.process.kill()
        self.reason = "its environment hung"
        return True

    def remove_process(self) -> str:
        """Remove the process, which has ended, from the slot; return why it ended."""
        assert self.process is not None
        self.process.join()
        reason = self.reason or describe_exit(self.process.exitcode)
        self.process.close()
        self.process = None
        return reason


def end_units(slots: Sequence[Slot], limit_s: float) -> None:
    """Wait for up to `limit_s` for the end of all units; kill those that still run."""
    deadline = time.monotonic() + limit_s
    units = [slot.process for slot in slots if slot.process is not None]
    for unit in units:
        unit.join(max(0.0, deadline - time.monotonic()))
        unit.kill()
    for unit in units:
        unit.join()


def _run(
    mark: str, parent: int | None, target: Callable[..., Any], args: tuple
) -> None:
    """Split this process into a guard and its worker; run `target` in the worker.

    Args:
      parent: the parent of this process; None if the parent is a fork server.
    """
    # A new process group, not a new session: Linux divides the CPU among sessions
    # (autogroup), and a niceness has no effect between sessions.
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
    multiprocessing.current_process().daemon = False  # A daemon may have no children.
    pipes = [arg for arg in args if isinstance(arg, connection.Connection)]
    os.register_at_fork(after_in_child=lambda: _forget(pipes))
    target(*args)


def _forget(pipes: list[connection.Connection]) -> None:
    """Release the worker's pipes and signal handlers, in a process that it forked."""
    for pipe in pipes:
        pipe.close()
    # SIGTERM, with which the worker ends such a process, must have its default action.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` ignores it.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _guard(worker: int, parent: int) -> NoReturn:
    """Wait for the end of the worker or the parent; then end all processes below."""
    received: list[int] = []
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    for signum in GUARD_SIGNALS:
        signal.signal(signum, lambda signum, _: received.append(signum))
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    # Not SIGKILL, since the guard must still clean up. SIGCONT wakes a stopped guard.
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
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # The worker wrote a core already.
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def _reap(worker: int) -> int | None:
    """Reap children that have ended; return the status of the worker if it has ended.

    Raises:
      ChildProcessError: there are no children.
    """
    status = None
    while (ended := os.waitpid(-1, os.WNOHANG))[0]:
        if ended[0] == worker:
            status = ended[1]
            break  # There may be no other child: `waitpid` would raise.
    return status


def _end_children(worker: int, status: int | None) -> int:
    """Kill children until there are none; return the worker's status.

    When a child ends, its own children become children of this process.
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
    """Kill the processes of a killed guard: those in its process group or with MARK."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(guard, signal.SIGKILL)
    for pid, environ in _read_of_all("environ"):
        if f"{MARK}={mark}".encode() in environ:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _worker_of(guard: int) -> int | None:
    """Return the worker of a guard, or None before the guard has forked it.

    The worker is the oldest child in the guard's process group. Before the guard makes
    this group, its imports may start other processes. Later, other processes become its
    children.
    """
    with contextlib.suppress(ProcessLookupError):  # It has ended.
        if os.getpgid(guard) == guard:  # Costs less than to look for children.
            for pid in _children_of(guard):
                if os.getpgid(pid) == guard:
                    return pid
    return None


def _children_of(pid: int) -> Iterator[int]:
    """Yield the children that a process has now, the oldest first."""
    children = []
    for child, stat in _read_of_all("stat"):
        fields = stat.rpartition(b")")[2].split()
        if int(fields[1]) == pid:
            children.append((int(fields[19]), child))
    yield from (child for _, child in sorted(children))


def _read_of_all(name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the id of each process of this machine with its /proc/ID/NAME.

    Leaves out those that have just ended, other users' that may not be read, and all
    while there are too many open files.
    """
    names: list[str] = []
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            names = os.listdir("/proc")
    for pid in filter(str.isdecimal, names):
        try:
            content = Path("/proc", pid, name).read_bytes()
        except OSError:
            continue
        yield int(pid), content


@contextlib.contextmanager
def limit_calls(
    limit_s: float, *, update_s: float = math.inf, at_terminal: bool = True
) -> Iterator[np.ndarray]:
    """End this process if a call of an environment, or an update, takes too long.

    Before the end all stacks are shown, and the processes that the environments started
    are killed. The exit status is 70. If C code holds the GIL, only faulthandler can
    act: it shows the stacks and ends this process with status 1.

    Args:
      limit_s: limit of one call of an environment (`--env_step_timeout_s`).
      update_s: limit of one update with its log row and checkpoint
        (`--stall_timeout_s`).
      at_terminal: whether the limits apply if standard input is a terminal. A user at a
        terminal may be in pdb, and can see that the program hangs.

    Yields:
      Two clocks, float64 [2], which the caller sets to `time.monotonic()`: at the start
      of each call of an environment (see `EnvOptions.clock` in
      `core.environments.stepping`) and at the start of each update. 0 means that none
      is running.
    """
    clocks = np.zeros(2)
    if not at_terminal and sys.stdin is not None and sys.stdin.isatty():
        yield clocks
        return
    limits = (
        (limit_s, "One call of the environment", "--env_step_timeout_s"),
        (update_s, "An update, with its log and checkpoint,", "--stall_timeout_s"),
    )
    done = threading.Event()

    def watch() -> None:
        pauses = Pauses()
        while not done.wait(LOOK_S):
            end_after(limit_s + END_S)
            now, pause_end = time.monotonic(), pauses.end()
            for since, (limit, what, flag) in zip(clocks.tolist(), limits):
                if since and now - max(since, pause_end) > limit:
                    log.error("%s has taken %g s (%s)", what, limit, flag)
                    _end_process()

    # Before the thread: even the first call may hold the GIL.
    end_after(limit_s + END_S)
    thread = threading.Thread(target=watch, name="environment-watch", daemon=True)
    thread.start()
    try:
        with pausable():
            yield clocks
    finally:
        done.set()
        thread.join()  # A process that forks next must have only one thread.
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def running(clock: np.ndarray) -> Iterator[None]:
    """Set `clock` to the time when this block began, and to 0 after the block."""
    clock[0] = time.monotonic()
    try:
        yield
    finally:
        clock[0] = 0.0


def _end_process() -> NoReturn:
    """Show all stacks, kill all processes below this one, and end this process."""
    dump_stacks()
    for pid in _descendants_of(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(Exit.INTERNAL)


def _descendants_of(pid: int) -> Iterator[int]:
    for child in _children_of(pid):
        yield from _descendants_of(child)
        yield child


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor of a process; None if Linux is older than 5.3, or forbids it.

    Python's own pidfd_open is missing in the Pythons of conda and uv.
    """
    pidfd_open = 434  # The number of the system call.
    fd = ctypes.CDLL(None, use_errno=True).syscall(pidfd_open, pid, 0)
    if fd >= 0:
        return fd
    if (error := ctypes.get_errno()) in (errno.ENOSYS, errno.EPERM):
        return None
    raise OSError(error, os.strerror(error))


def _become_subreaper() -> None:
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
