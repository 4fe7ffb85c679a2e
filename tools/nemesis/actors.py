# SPDX-License-Identifier: Apache-2.0
"""Kill MonoBeast's actors at random moments of a whole training run.

    python -m monobeast --env tests.counting_env:make_truncating ...

The trainer runs in this process, which looks at every batch before it is learned from.
Each observation of the counting environment contains its own position. So arithmetic
shows whether a rollout is torn, and whether it was learned from twice. At the end every
buffer must be accounted for: learned, waiting for the learner, held by an actor, or
free.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import monobeast
from core.algorithm.update import Learner
from core.errors import Exit
from core.nests import map_nest
from core.running.supervise import start_thread
from tests.counting_env import check_rollout, decode
from tools.nemesis.programs import ENDLESS, wait_for, workplace
from tools.nemesis.result import Result, spread

E = 2  # Environments of an actor, side by side in a buffer.
FLAGS = ["--env", "tests.counting_env:make_truncating", "--total_steps", ENDLESS]
FLAGS += ["--num_actors", "3", "--envs_per_actor", str(E), "--batch_size", str(2 * E)]
FLAGS += ["--unroll_length", "5", "--disable_checkpoint", "--xpid", "x"]
FLAGS += ["--stall_timeout_s", "30"]  # A deadlock ends the run, and fails the figure.
PAUSE_S = 0.1  # Between two kills, at most.
MAX_QUICK_DEATHS = 2  # In a row. Five stop the run, as they should.


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)


def measure(flags: argparse.Namespace) -> Result:
    rng = random.Random(flags.seed)
    examiner = Examiner()
    killer = Killer(flags.kills, rng)
    update = Learner.update

    class Watched(WatchedActors):
        def start(self) -> None:
            super().start()
            killer.begin(self)

    def examine_and_update(learner: Learner, batch: Any, *more: Any) -> None:
        examiner.examine(batch)
        update(learner, batch, *more)

    with workplace() as folder, replaced(Learner, "update", examine_and_update):
        with replaced(monobeast, "Actors", Watched):
            status = monobeast.main([*FLAGS, "--savedir", str(folder)])
    actors = killer.end()
    if status == Exit.STOPPED and killer.kills < flags.kills:
        sys.exit(128 + signal.SIGTERM)  # Somebody else has stopped the run.
    owned = actors.owned()
    result = Result(
        injected={"kills": killer.kills},
        asked={"kills": flags.kills},
        figures={
            "exit_status": status,
            "received": actors.received,
            "learned": examiner.learned,
            "not_yet_learned": len(actors._full),
            "discarded": actors.discarded,
            "torn_or_twice": len(examiner.wrong),
            "buffers": len(owned),
            "noticed_s": spread(killer.noticed_s),
        },
    )
    result.require(status == Exit.STOPPED, f"exit status {status}")
    result.require(not examiner.wrong, f"wrong rollouts: {examiner.wrong[:3]}")
    result.require(
        sorted(owned) == list(range(actors.num_buffers)), f"buffers: {sorted(owned)}"
    )
    result.require(
        actors.received == examiner.learned + len(actors._full),
        "received rollouts are not those learned and those waiting",
    )
    result.require(
        actors.discarded <= killer.kills, f"{actors.discarded} rollouts discarded"
    )
    return result


@contextlib.contextmanager
def replaced(owner: Any, name: str, ours: Any):
    theirs = getattr(owner, name)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        setattr(owner, name, theirs)


class WatchedActors(monobeast.Actors):
    """Actors that record which buffers the learner threads hold."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.num_buffers = len(self._free)
        self._taken: list[int] = []

    def take(self, n: int) -> list[int] | None:
        indices = super().take(n)
        with self._changed:
            self._taken += indices or []
        return indices

    def give_back(self, indices: list[int]) -> None:
        with self._changed:
            self._taken = [i for i in self._taken if i not in indices]
        super().give_back(indices)

    def owned(self) -> list[int]:
        """Return all buffers: held, taken, full or free."""
        held = [index for slot in self.slots for index in slot.held]
        return [*held, *self._free, *self._full, *self._taken]


class Examiner:
    """Checks each batch before it is learned. Called by the learner threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.learned = 0  # Rollouts, of E environments each.
        self.wrong: list[str] = []
        self._seen: set[Any] = set()  # The first rows of all rollouts.

    def examine(self, batch: Any) -> None:
        with self._lock:
            for first in range(0, batch["done"].shape[1], E):
                columns = slice(first, first + E)
                rollout = map_nest(lambda x: x[:, columns], batch)  # noqa: B023
                self.learned += 1
                try:
                    check_rollout(rollout)
                except AssertionError as error:
                    self.wrong.append(str(error))
                for observation in rollout["observation"][0]:
                    place = decode(observation)
                    if place in self._seen:
                        self.wrong.append(f"learned twice: {place}")
                    self._seen.add(place)


class Killer:
    """A thread that kills actors, and then stops the run."""

    def __init__(self, count: int, rng: random.Random):
        self.kills = 0
        self.noticed_s: list[float] = []  # Time until the run noticed each kill.
        self._count = count
        self._rng = rng
        self._actors: WatchedActors | None = None
        self._has_ended = threading.Event()

    def begin(self, actors: WatchedActors) -> None:
        if self._actors is None:  # `start` is called again for each replacement.
            self._actors = actors
            self._thread = start_thread("killer", self._run)

    def end(self) -> WatchedActors:
        """Wait for the thread, after the end of the run; raise its exception."""
        self._has_ended.set()
        assert self._actors is not None, "the run did not begin"
        self._thread.result(timeout=60)
        return self._actors

    def _run(self) -> None:
        try:
            while self.kills < self._count and not self._has_ended.is_set():
                time.sleep(self._rng.uniform(0, PAUSE_S))
                self._kill_one()
        finally:
            if not self._has_ended.is_set():
                os.kill(os.getpid(), signal.SIGTERM)  # The run's main loop handles it.

    def _kill_one(self) -> None:
        assert self._actors is not None
        slot = self._rng.choice(self._actors.slots)
        restarts = self._actors.restarts
        pid = None
        with contextlib.suppress(AttributeError, ValueError):  # None, or just closed.
            pid = slot.process.pid
        if pid is None or slot.budget.quick_deaths > MAX_QUICK_DEATHS:
            return
        os.kill(pid, signal.SIGKILL)
        self.kills += 1
        self.noticed_s.append(
            wait_for(
                lambda: self._actors.restarts > restarts or self._has_ended.is_set()
            )
        )
