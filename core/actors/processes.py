# SPDX-License-Identifier: Apache-2.0
"""`Actors`: MonoBeast's actor processes, and which of them fills which buffer.

    the program                                         an actor process
    Actors.poll ──────── pipe: the index of a buffer ────────► ActorProcess.fill_buffers
                ◄─────── pipe: "buffer i is full" ────────────   calls actor.unroll(i)

Each actor process has its own `core.running.unit.Unit` and its own pipe, so an actor
that is killed cannot leave behind a lock that another process waits for.
"""

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import functools
import logging
import math
import multiprocessing
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from core.actors.fork_server import ForkServer
from core.actors.shared_memory import RolloutBuffers, SharedArrays, SharedWeights
from core.algorithm.counters import BusyTime
from core.environments.stepping import Environments, env_seed
from core.errors import ConfigError, EnvSpecError, EnvValueError
from core.nests import ArraySpec, Nest
from core.rollout import new_rollouts
from core.running import terminal
from core.running.compute import set_torch_threads
from core.running.machine import be_killed_first_for_memory, lower_priority
from core.running.randomness import seed_rng
from core.running.signals import STOP_SIGNALS, Pauses, show_stacks
from core.running.unit import Slot, Unit, end_units

log = logging.getLogger(__name__)

# The message of an actor that has filled a buffer: b"F", the buffer's index, and the
# seconds that the environments and the network took.
FULL = struct.Struct("<cIdd")
ACTOR_EXIT_S = 1.0  # For an environment's close(); then the actor is killed.


class ActorError(Exception):
    """An actor died too often; the message has the actor's own traceback."""


# ------------------------------------------------------------ inside an actor process


class Actor(Protocol):
    """The trainer's own `Actor`, which fills buffers."""

    envs: Environments
    last_row: Nest  # Numpy arrays [E, ...]: row 0 of the next rollout.
    state: tuple[torch.Tensor, ...]  # The recurrent state.
    started: bool  # Whether it has made a rollout.
    env_s: float  # Seconds that the environments took for the last rollout.
    agent_s: float  # Seconds that everything else took.

    def unroll(self, index: int) -> None:
        """Fill buffer `index` with one rollout."""


@dataclasses.dataclass(frozen=True)
class ActorProcess:
    """The argument of the trainer's `act` in an actor process.

    Attributes:
      incarnation: a number that no other actor process of this run has. Together with
        `actor_id` it seeds the environments.
      clock: [1] float64 in shared memory; see `Actors`.
    """

    actor_id: int
    incarnation: int
    buffers: RolloutBuffers
    clock: np.ndarray
    _weights: SharedWeights
    _pipe: connection.Connection

    def fetcher(self, net: nn.Module) -> Callable[[], int]:
        """Return a function that brings the newest weights into `net`.

        The function returns the version of these weights.

        Raises:
          ConfigError: `net` is not like the learner's network.
        """
        self._weights.check(net)
        version = -1

        def fetch() -> int:
            nonlocal version
            version = self._weights.fetch(net, version)
            return version

        return fetch

    def fill_buffers(self, actor: Actor) -> None:
        """Fill the buffers that the program names until the program hangs up."""
        with contextlib.closing(actor.envs):
            while True:
                try:
                    index = int.from_bytes(self._pipe.recv_bytes(), "little")
                except (EOFError, ConnectionResetError):
                    return
                actor.unroll(index)
                message = FULL.pack(b"F", index, actor.env_s, actor.agent_s)
                with contextlib.suppress(BrokenPipeError):  # The program hung up.
                    self._pipe.send_bytes(message)


def _run_actor(
    act: Callable[[ActorProcess], None],
    actor_id: int,
    incarnation: int,
    seed: int,
    pipe: connection.Connection,
    output: connection.Connection,
    shared: tuple[RolloutBuffers, SharedWeights, SharedArrays],
) -> None:
    """Run one actor process: prepare the process, then call `act`.

    If `act` fails, the process sends b"E" and the traceback to the program, or b"P" if
    trying again cannot help, and ends with status 1. What an environment returned
    wrongly is told without a traceback, which would show no line of the environment.
    """
    be_killed_first_for_memory()
    terminal.redirect_output(output)
    # The program handles stop signals and then ends the actors. The handler is not
    # SIG_IGN, because the processes that an environment starts would inherit SIG_IGN.
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda *_: None)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # For `show_stacks`.
    set_torch_threads(1)
    lower_priority()
    seed_rng(seed)
    buffers, weights, clocks = shared
    clock = clocks.arrays["clock"][actor_id : actor_id + 1]
    try:
        act(ActorProcess(actor_id, incarnation, buffers, clock, weights, pipe))
    except BaseException as error:  # An environment's sys.exit() is a failure too.
        match error:
            case EnvSpecError() | ConfigError():
                message = f"P{error}"
            case EnvValueError():
                message = f"E{type(error).__name__}: {error}"
            case _:
                message = f"E{traceback.format_exc()}"
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(message.encode(errors="backslashreplace"))
        sys.exit(1)


# ---------------------------------------------------------------------- in the program


@dataclasses.dataclass(kw_only=True)
class ActorSlot(Slot):
    """One actor's place: its present process, if any, and the buffers it holds."""

    actor_id: int
    held: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    last_served: int = 0  # When it was last handed a buffer, as a running number.


class Actors:
    """The actor processes, and which of them holds which rollout buffer.

    A buffer is free, held by one actor, full, or held by a learner thread. Each actor
    holds up to two buffers: the one that it fills now, and the next one. When an actor
    dies, its finished rollouts stay full buffers. Its unfinished rollout is discarded,
    the buffers that it held become free, and a new process replaces it.

    Each actor has a clock in shared memory: the time (`time.monotonic`) at which the
    present call into its environment, or the present choice of actions, began, or 0
    while it fills no buffer. An actor whose call takes longer than --env_step_timeout_s
    is killed.

    The main thread calls `start`, `poll` and `close` (Linux ends a child process
    together with the thread that started it). Learner threads call `take` and
    `give_back`.
    """

    def __init__(
        self,
        act: Callable[[ActorProcess], None],
        flags: argparse.Namespace,
        buffers: RolloutBuffers,
        weights: SharedWeights,
        *,
        first_incarnation: int,
        busy: BusyTime,
        preload: str,
    ):
        """Prepare to start the actors; `start` starts them.

        Args:
          act: what each actor process runs. It must be picklable: a function of a
            module, or a `functools.partial` of one.
          first_incarnation: of the first actor process; each further one adds 1.
          busy: counts the seconds of environments and networks.
          preload: a module that the fork server imports before it forks the actors.
        """
        self._act = act
        self._flags = flags
        self._busy = busy
        shape = ArraySpec((flags.num_actors,), np.dtype(np.float64))
        clocks = SharedArrays({"clock": shape})
        self._clock = clocks.arrays["clock"]
        self._shared = (buffers, weights, clocks)
        num_free = math.ceil(flags.num_buffers / flags.envs_per_actor)
        # The replay exchanges these buffers for those that it keeps. If actors got them
        # now, they would run further ahead of the learner than --num_buffers allows.
        self.reserve = range(num_free, buffers.num_buffers)
        self._output = terminal.ChildOutput()
        self._incarnation = first_incarnation
        self._context = multiprocessing.get_context(flags.start_method)
        self._fork_server: ForkServer | None = None
        if flags.start_method == "forkserver":
            # The fork server imports torch once, and then forks actors within
            # milliseconds.
            self._fork_server = ForkServer(self._context, preload)
        self.slots = [
            ActorSlot(name=f"Actor {i}", actor_id=i) for i in range(flags.num_actors)
        ]
        # Guards everything below, and the slots' `held` and `pipe`.
        self._changed = threading.Condition()
        self._free = collections.deque(range(num_free))
        self._full: collections.deque[int] = collections.deque()
        self._served = 0  # Buffers handed out so far.
        self._waiting = 0  # Learner threads in `take`.
        self._closed = False
        self.received = 0  # Full buffers since the start.
        self.discarded = 0  # Unfinished buffers of dead actors.
        self.restarts = 0
        self._pauses = Pauses()

    def start(self) -> None:
        """Start every actor that is due, once the fork server is ready."""
        if self._fork_server is not None and not self._fork_server.has_imported():
            return
        for slot in self.slots:
            start = functools.partial(self._start, slot)
            slot.budget.start_if_due(slot.name, start)
        # This starts a thread, so it comes after the first actors: they may be forked.
        self._output.start()

    def _start(self, slot: ActorSlot) -> None:
        """Start a process for `slot`. An OSError may be temporary: see the budget."""
        # The first actors may be forked, because there are no threads yet. Later on, a
        # fork would copy locks that other threads hold at that moment.
        context = self._context
        cannot_fork = (
            self._flags.start_method == "fork" and threading.active_count() > 1
        )
        is_cut_off = self._fork_server is not None and self._fork_server.is_cut_off()
        if cannot_fork or is_cut_off:
            context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        i, incarnation = slot.actor_id, self._incarnation
        seed = env_seed(self._flags.seed, i, incarnation, 0)
        output = self._output.theirs
        process = Unit(
            context,
            _run_actor,
            (self._act, i, incarnation, seed, theirs, output, self._shared),
            name=f"actor-{i}",
        )
        self._incarnation += 1
        self._clock[i] = 0.0
        process.start()
        slot.process = process
        theirs.close()  # Otherwise we would not see that the actor's end is closed.
        slot.reason = None
        with self._changed:
            slot.pipe = ours
            self._hand_out()

    def _hand_out(self) -> None:
        """Give free buffers to the actors that hold the fewest. Needs the lock.

        Among actors that hold the same number, the one that has waited longest is
        first. So if the learner is slow and no actor holds a buffer, each gets one.
        """
        while self._free and not self._closed:
            slot = min(
                (s for s in self.slots if s.pipe is not None and len(s.held) < 2),
                key=lambda s: (len(s.held), s.last_served),
                default=None,
            )
            if slot is None:
                return
            index = self._free.popleft()
            slot.held.append(index)
            self._served += 1
            slot.last_served = self._served
            assert slot.pipe is not None
            with contextlib.suppress(OSError):  # The actor is dying; see `poll`.
                slot.pipe.send_bytes(index.to_bytes(4, "little"))

    def poll(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for messages and deaths of actors; handle them.

        Raises:
          ActorError: an actor has died too often without delivering a rollout.
          ConfigError: an environment breaks its spec, or the actors' network is not the
            learner's.
        """
        by_handle: dict[Any, ActorSlot] = {
            s.process.sentinel: s for s in self.slots if s.process is not None
        }
        by_handle |= {s.pipe: s for s in self.slots if s.pipe is not None}
        for handle in connection.wait(list(by_handle), timeout_s):
            slot = by_handle[handle]
            if slot.pipe is not None:
                self._receive(slot)
            if slot.process is not None and handle == slot.process.sentinel:
                self._handle_death(slot)
        pause_end = self._pauses.end()
        for slot in self.slots:
            self._check_progress(slot, pause_end)
        self.start()

    def _check_progress(self, slot: ActorSlot, pause_end: float) -> None:
        """Continue a stopped actor; kill an actor whose environment takes too long."""
        if slot.process is None:
            return
        slot.process.continue_if_stopped(slot.name)
        since = self._clock[slot.actor_id]
        if slot.kill_if_hung(since, pause_end, self._flags.env_step_timeout_s):
            self._clock[slot.actor_id] = 0.0  # Kill it only once.

    def _receive(self, slot: ActorSlot) -> None:
        assert slot.pipe is not None
        try:
            while slot.pipe.poll():
                message = slot.pipe.recv_bytes()
                if message[:1] == b"P":
                    raise ConfigError(message[1:].decode())
                if message[:1] == b"E":
                    slot.reason = message[1:].decode().strip()
                    continue
                _, index, env_s, agent_s = FULL.unpack(message)
                self._busy.add("env", env_s, workers=len(self.slots))
                self._busy.add("inference", agent_s, workers=len(self.slots))
                slot.budget.delivered()
                with self._changed:
                    assert slot.held[0] == index, (slot.actor_id, slot.held, index)
                    slot.held.popleft()
                    self._full.append(index)
                    self.received += 1
                    self._hand_out()
                    self._changed.notify_all()
        except (EOFError, OSError):
            # The process is ending. Its sentinel comes next.
            with self._changed:
                self._hang_up(slot)

    def _hang_up(self, slot: ActorSlot) -> None:
        """Close an actor's pipe, which tells the actor to end. Needs the lock."""
        if slot.pipe is not None:
            slot.pipe.close()
            slot.pipe = None

    def _handle_death(self, slot: ActorSlot) -> None:
        """Take back a dead actor's buffers and plan its replacement."""
        reason = slot.remove_process()
        with self._changed:
            self._hang_up(slot)
            if slot.held:
                self.discarded += 1
            self._free.extend(slot.held)
            slot.held.clear()
            self._hand_out()
        error = ActorError(
            f"actor {slot.actor_id} died {slot.budget.quick_deaths + 1} times in a row "
            f"without delivering a rollout; the last time: {reason}"
        )
        event = f"{slot.name} died ({reason}); its rollout is discarded; restarting it"
        slot.budget.plan_restart(event, error)
        self.restarts += 1

    def take(self, n: int) -> list[int] | None:
        """Return `n` full buffers, the oldest first; None at the end. Blocks."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._closed or len(self._full) >= n)
            self._waiting -= 1
            if self._closed:
                return None
            return [self._full.popleft() for _ in range(n)]

    def give_back(self, indices: list[int]) -> None:
        """Make buffers free again."""
        with self._changed:
            self._free.extend(indices)
            self._hand_out()

    def num_waiting(self) -> int:
        """Return the number of learner threads that wait in `take`."""
        return self._waiting

    def stats(self) -> dict[str, Any]:
        """Return the log's columns about actors."""
        return {
            "buffers_full": len(self._full) * self._flags.envs_per_actor,
            "actor_restarts": self.restarts,
            "rollouts_discarded": self.discarded * self._flags.envs_per_actor,
        }

    def describe_wait(self) -> str:
        """Say what a run without progress waits for; make the actors show stacks."""
        for pid in self.pids():
            show_stacks(pid)
        full = self.stats()["buffers_full"]
        waits_for = "the learner" if full >= new_rollouts(self._flags) else "the actors"
        return f"{waits_for} ({full} rollouts wait)"

    def rows(self) -> tuple[int, dict[str, int]]:
        """Return how many rows were received, and how many of them wait in buffers."""
        rows = self._flags.unroll_length * self._flags.envs_per_actor
        return rows * self.received, {"in flight": rows * len(self._full)}

    def pids(self) -> list[int]:
        """Return the process ids of the actors that run."""
        pids = [slot.process.pid for slot in self.slots if slot.process is not None]
        return [pid for pid in pids if pid is not None]

    def stop_handing_out(self) -> None:
        """Wake the learner threads: `take` returns None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Hang up, and kill the actors that still run after ACTOR_EXIT_S."""
        self.stop_handing_out()
        with self._changed:
            for slot in self.slots:
                self._hang_up(slot)
        end_units(self.slots, ACTOR_EXIT_S)
        self._output.close()
        if self._fork_server is not None:
            self._fork_server.close()
