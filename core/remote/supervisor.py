# SPDX-License-Identifier: Apache-2.0
"""Supervise the processes of polybeast_env.py: start, watch, replace and end them.

Each environment server has a process of its own, forked from the program. The program
itself, the supervisor, runs no threads and does not import gRPC. So it can fork at any
time, and the new process needs no imports except gRPC.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import logging
import mmap
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

import numpy as np

from core.errors import ConfigError, Exit
from core.remote.addresses import STREAMS_SUFFIX, claim_address, make_private
from core.running import terminal
from core.running.machine import be_killed_first_for_memory, lower_priority, num_cores
from core.running.signals import STOP_SIGNALS, Pauses, StopSignal
from core.running.unit import Slot, Unit, end_units

log = logging.getLogger(__name__)

STOP_S = 1.5  # Time for servers to say goodbye and close environments; then SIGKILL.
# A server that dies after fewer environment steps than this counts as a quick death.
DELIVERED_STEPS = 20
NICENESS = 5  # For servers beside a learner. The learner's inference threads have 19.


class ServerError(Exception):
    """A server process died too often in a row."""


@dataclasses.dataclass(kw_only=True)
class ServerSlot(Slot):
    """The slot of one server. Its process may be replaced; its address stays."""

    index: int
    address: str
    # [2 * S, 2] float64, in memory shared with the process. See
    # `core.remote.service.ServerOptions`.
    progress: np.ndarray
    is_listening: bool = False
    has_listened: bool = False  # If it has ever listened, the socket's file is ours.


class Servers:
    """The server processes. A context manager; all methods are for the main thread.

    Args:
      create_server: called as create_server(flags, address, progress) in each server
        process; returns a `core.remote.env_server.Server`.
      addresses: one for each server.
      stop: dead servers are not replaced after a signal.
    """

    def __init__(
        self,
        flags: argparse.Namespace,
        create_server: Callable[[argparse.Namespace, str, np.ndarray], Any],
        addresses: Sequence[str],
        stop: StopSignal,
    ):
        self._flags = flags
        self._create_server = create_server
        self._stop = stop
        self._context = multiprocessing.get_context("fork")
        self._cores = own_cores(flags)
        self._restarts = 0
        # Servers that a learner starts need no `ChildOutput`: they write to a pipe that
        # the learner always reads.
        waits = any(map(terminal.may_wait, (1, 2))) and not flags.with_parent
        self._output = terminal.ChildOutput() if waits else None
        places = 2 * flags.streams_per_server
        shared = mmap.mmap(-1, len(addresses) * places * 2 * 8)
        progress = np.frombuffer(shared).reshape(len(addresses), places, 2)
        self.slots = [
            ServerSlot(name=f"Server {i}", index=i, address=a, progress=progress[i])
            for i, a in enumerate(addresses)
        ]
        self._pauses = Pauses()

    def __enter__(self) -> "Servers":
        return self

    def are_listening(self) -> bool:
        return all(slot.is_listening for slot in self.slots)

    def describe(self) -> str:
        """Return one line with the environment, the addresses and the numbers."""
        flags, addresses = self._flags, [slot.address for slot in self.slots]
        N, S, K = flags.num_servers, flags.streams_per_server, flags.envs_per_stream
        where = ",".join(addresses)
        base, dot, first = addresses[0].rpartition(
            "." if addresses[0].startswith("unix:") else ":"
        )
        if first.isdecimal() and addresses == [
            f"{base}{dot}{int(first) + i}" for i in range(N)
        ]:
            where = f"{addresses[0]}-{int(first) + N - 1}" if N > 1 else addresses[0]

        def count(n: int, noun: str) -> str:
            return f"{n} {noun}{'s' * (n != 1)}"

        return (
            f"Serving {flags.env} at {where}: {count(N, 'server')} x "
            f"{count(S, 'stream')} x {count(K, 'environment')}"
        )

    def poll(self, timeout_s: float, *others: int) -> set[Any]:
        """Start servers that are due, wait for events up to `timeout_s`, handle them.

        Returns the file descriptors in `others` that became readable.

        Raises:
          ConfigError: a server cannot serve this environment or address.
          ServerError: a server died too often in a row without stepping environments.
        """
        for slot in self.slots:
            start = functools.partial(self._start, slot)
            slot.budget.start_if_due(slot.name, start)
        handles: list[Any] = [
            s.process.sentinel for s in self.slots if s.process is not None
        ]
        handles += [s.pipe for s in self.slots if s.pipe is not None]
        if self._output is not None:
            handles.append(self._output.fileno())
        ready: set[Any] = set(connection.wait([*handles, *others], timeout_s))
        if self._output is not None and self._output.fileno() in ready:
            self._output.read()
        if self._stop.received is not None:  # The servers may have got the signal too.
            return set()
        pause_end = self._pauses.end()
        for slot in self.slots:
            if slot.pipe in ready:
                self._receive(slot)
            if slot.process is not None and slot.process.sentinel in ready:
                self._handle_death(slot)
            self._check_progress(slot, pause_end)
            self._check_socket(slot)
        return ready.intersection(others)

    def _start(self, slot: ServerSlot) -> None:
        """Start a process for `slot`. An OSError may be temporary: see the budget."""
        if self._flags.remove_folder:
            make_private(os.path.dirname(slot.address.removeprefix("unix:")))
        slot.progress[:] = 0.0
        slot.reason = None
        ours, theirs = self._context.Pipe(duplex=False)
        process = Unit(
            self._context,
            serve_one,
            (
                self._flags,
                self._create_server,
                slot.address,
                slot.progress,
                self._cores[slot.index % len(self._cores)] if self._cores else None,
                theirs,
                None if self._output is None else self._output.theirs,
            ),
            name=f"server-{slot.index}",
        )
        # Block signals during the fork: the child first has the parent's handlers,
        # which would lose a signal that should end the child.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            theirs.close()  # Otherwise the parent would not see the pipe's end.
        slot.process, slot.pipe = process, ours

    def _receive(self, slot: ServerSlot) -> None:
        assert slot.pipe is not None
        try:
            kind, text = slot.pipe.recv_bytes().decode().split(" ", 1)
        except (EOFError, OSError):  # The process is dying; its sentinel comes next.
            slot.pipe.close()
            slot.pipe = None
            return
        # A server that has served before may only lack something for a moment.
        if kind == "config" and not slot.has_listened:
            raise ConfigError(text)
        if kind == "listening":
            slot.is_listening = slot.has_listened = True
            slot.address = text  # With the port that the system chose for port 0.
        else:
            slot.reason = text

    def _handle_death(self, slot: ServerSlot) -> None:
        """Plan the restart of a dead server."""
        if slot.pipe is not None and slot.pipe.poll():
            self._receive(slot)
        reason = slot.remove_process()
        slot.is_listening = False
        if slot.progress[:, 0].sum() >= DELIVERED_STEPS:
            slot.budget.delivered()
        error = ServerError(
            f"server {slot.index} at {slot.address} died "
            f"{slot.budget.quick_deaths + 1} times in a row within {DELIVERED_STEPS} "
            f"steps of its environments; the last time: {reason}"
        )
        event = f"{slot.name} died ({reason}); starting it again"
        self._restarts += 1
        slot.budget.plan_restart(event, error, self._restarts)

    def _check_progress(self, slot: ServerSlot, pause_end: float) -> None:
        """Continue a stopped server; kill one whose environments take too long."""
        if slot.process is None:
            return
        # The learner would not notice it: its messages wait in the socket. Over TCP the
        # pings of gRPC notice it.
        if slot.address.startswith("unix:"):
            slot.process.continue_if_stopped(slot.name)
        since = slot.progress[:, 1]
        oldest = min(since[since > 0], default=0.0)
        if slot.kill_if_hung(oldest, pause_end, self._flags.env_step_timeout_s):
            since[:] = 0.0  # Kill it only once.

    def _check_socket(self, slot: ServerSlot) -> None:
        """End a server whose socket file was deleted: no learner could connect."""
        is_unix = slot.address.startswith("unix:")
        path = slot.address.removeprefix("unix:")
        if slot.is_listening and is_unix and not os.path.exists(path):
            assert slot.process is not None
            slot.is_listening = False
            slot.reason = f"its socket {path} was deleted"
            slot.process.terminate()

    def __exit__(self, *exc_info: object) -> None:
        """End all servers, and remove the files that killed servers leave behind."""
        for slot in self.slots:
            if slot.process is not None:
                slot.process.terminate()
        end_units(self.slots, STOP_S)
        if self._output is not None:
            self._output.close()
        for slot in self.slots:
            if slot.address.startswith("unix:"):
                self._remove_sockets(slot)
        if self._flags.remove_folder:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(self.slots[0].address.removeprefix("unix:")))

    def _remove_sockets(self, slot: ServerSlot) -> None:
        is_ours = slot.has_listened or self._flags.remove_folder
        # A server may be killed between the creation of its sockets and its report. So
        # sockets that nobody uses are removed too, but not those of another program.
        claim = contextlib.nullcontext() if is_ours else claim_address(slot.address)
        path = slot.address.removeprefix("unix:")
        with contextlib.suppress(ConfigError, OSError), claim:
            for file in path, path + STREAMS_SUFFIX:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file)


def serve_one(
    flags: argparse.Namespace,
    create_server: Callable[[argparse.Namespace, str, np.ndarray], Any],
    address: str,
    progress: np.ndarray,
    own_core: int | None,
    pipe: connection.Connection,
    output: connection.Connection | None,
) -> None:
    """Run one server in this process until SIGTERM or the end of the supervisor.

    Args:
      own_core: the core on which this process is to stay, or None.
      pipe: for the messages "listening ADDRESS", "config ERROR", "failed TRACEBACK".
      output: replaces stdout and stderr if writing to those of the program may block.
    """
    if output is not None:
        waits = [fd for fd in (1, 2) if terminal.may_wait(fd)]
        terminal.redirect_descriptors(output, waits)
    # After Ctrl-C, or when the terminal closes, the supervisor ends its servers. The
    # handler is not SIG_IGN, because processes of an environment would inherit SIG_IGN.
    signal.signal(signal.SIGINT, lambda *_: None)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` sets SIG_IGN.
        signal.signal(signal.SIGHUP, lambda *_: None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    be_killed_first_for_memory()
    assert sys.__stderr__ is not None
    faulthandler.enable(sys.__stderr__)
    faulthandler.register(signal.SIGUSR1, sys.__stderr__, all_threads=True)
    if flags.with_parent:
        lower_priority(NICENESS)
    if own_core is not None:
        with contextlib.suppress(OSError):  # The container may have lost the core.
            os.sched_setaffinity(0, {own_core})
    try:
        server = create_server(flags, address, progress)
        address = server.start()
    except BaseException as error:
        lacks_grpc = isinstance(error, ModuleNotFoundError) and error.name == "grpc"
        if lacks_grpc or isinstance(error, ConfigError):
            pipe.send_bytes(f"config {error}".encode())
            sys.exit(Exit.CONFIG)
        text = f"failed {traceback.format_exc().strip()}"
        pipe.send_bytes(text.encode(errors="backslashreplace"))
        raise
    signal.signal(signal.SIGTERM, lambda *_: server.stop("the server was stopped"))
    pipe.send_bytes(f"listening {address}".encode())
    server.run()


def own_cores(flags: argparse.Namespace) -> list[int]:
    """Return the cores to distribute among the servers; empty: use any core.

    The threads of a server share a GIL. On one core they wake each other faster: a
    message takes the server a third less CPU time (results/speed). So each server stays
    on one core if every core has the same number of servers, no learner started these
    servers, and the container has no CPU quota. If your environments start threads or
    processes, return [] here.
    """
    if flags.with_parent or not hasattr(os, "sched_setaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    is_fair = len(cores) == num_cores() and flags.num_servers % len(cores) == 0
    return cores if is_fair else []
