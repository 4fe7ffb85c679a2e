# SPDX-License-Identifier: Apache-2.0
"""Real environment servers, and a learner that checks: the figures break these.

The servers are the program `python -m polybeast_env`. The actor pool, the queue and the
batcher are PolyBeast's. The learner does not learn; it checks every rollout. The
environments count (tests/counting_env.py), so every row says to which life of which
stream it belongs, and which row of that life it is.
"""

import collections
import contextlib
import dataclasses
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import psutil
import torch

import libtorchbeast
from core.nests import Nest, leaves, map_nest
from core.remote import server_flags
from core.remote.supervisor import DELIVERED_STEPS
from core.running.supervise import start_thread
from tests import counting_env
from tools.nemesis import programs
from tools.nemesis.result import Result

T, K = 20, 2  # Steps of a rollout, environments of a stream.
LANES = 4  # Rollouts of a learner batch.
POLL_S = 0.005
PAUSE_S = 2.0  # Longest pause between the return of a server and its next fault.
SERVING = r"Serving \S+ at (\S+): "
QUIET_S, QUIET_SAMPLES = 5.0, 10
UNPROVOKED = "unprovoked"
GIVE_UP_S = 60.0  # Limit for a fault to be noticed, and for a server to be back.


# --------------------------------------------------------------------------- the check


@dataclasses.dataclass
class Life:
    """The rollouts of a stream, from its connection to its end, that were learned."""

    last: int = -1  # The largest number of a rollout so far; the first one is 0.
    # Numbers below `last` that have not come yet.
    late: set[int] = dataclasses.field(default_factory=set)
    # By number of a rollout: the row that it shares with the rollout before it, while
    # only one of the two has come.
    edges: dict[int, bytes] = dataclasses.field(default_factory=dict)


class Ledger:
    """Checks rollouts: none is spliced, none comes twice, none is missing."""

    def __init__(self) -> None:
        self.rollouts = 0
        self.duplicated = 0
        self.spliced = 0
        self.first_error = ""
        # The name of a life is the seeds of its environments.
        self._lives: dict[tuple[int, ...], Life] = collections.defaultdict(Life)
        self._seeds: dict[int, tuple[int, ...]] = {}

    def check(self, batch: Nest) -> None:
        """Check a learner batch, [T + 1, B, ...]."""
        for start in range(0, batch["done"].shape[1], K):
            self.check_rollout(map_nest(lambda x, i=start: x[:, i : i + K], batch))

    def check_rollout(self, rollout: Nest) -> None:
        """Check the rollout of one stream, [T + 1, K, ...]."""
        self.rollouts += 1
        try:
            counting_env.check_rollout(rollout)
            seeds, number = locate(rollout)
            for seed in seeds:
                known = self._seeds.setdefault(seed, seeds)
                assert known == seeds, f"{seed} plays with {known} and with {seeds}"
            life = self._lives[seeds]
            if number <= life.last and number not in life.late:
                self.duplicated += 1
                return
            life.late.discard(number)
            life.late.update(range(life.last + 1, number))
            life.last = max(life.last, number)
            self._check_edge(life, number, rollout, row=0)
            self._check_edge(life, number + 1, rollout, row=-1)
        except AssertionError as error:
            self.spliced += 1
            self.first_error = self.first_error or str(error)

    def _check_edge(self, life: Life, number: int, rollout: Nest, row: int) -> None:
        """Check that rollouts `number - 1` and `number` share a row."""
        if number == 0:
            return  # Nothing comes before.
        ours = b"".join(x[row].tobytes() for _, x in leaves(rollout))
        if number in life.edges:
            theirs = life.edges.pop(number)
            assert ours == theirs, f"rollout {number} begins with another row"
        else:
            life.edges[number] = ours

    def lives(self) -> int:
        return len(self._lives)

    def gaps(self) -> set[tuple[tuple[int, ...], int]]:
        """Return the rollouts that are missing before later rollouts of their life."""
        return {
            (seeds, number)
            for seeds, life in list(self._lives.items())
            for number in list(life.late)
        }


def locate(rollout: Nest) -> tuple[tuple[int, ...], int]:
    """Return the name of a rollout's life, and the rollout's number in this life.

    Raises:
      AssertionError: its columns belong to different rollouts.
    """
    first = [counting_env.decode(o) for o in rollout["observation"][0]]
    last = [counting_env.decode(o) for o in rollout["observation"][-1]]
    seeds = tuple(place.seed for place in first)  # Each life has new seeds.
    rows = [row_number(place) for place in first]
    assert rows == [rows[0]] * K and rows[0] % T == 0, f"begins at rows {rows}"
    assert seeds == tuple(place.seed for place in last), f"{first} became {last}"
    return seeds, rows[0] // T


def row_number(place: counting_env.Place) -> int:
    """Return how many steps led from the first row of a life to this one."""
    # Games have 1 to 7 steps; any seven of them in a row have 28.
    sevens = place.game // 7
    games = (place._replace(game=game) for game in range(7 * sevens, place.game))
    return 28 * sevens + sum(game.length() for game in games) + place.step


# --------------------------------------------------------------------------- the parts


class Servers(programs.Process):
    """`python -m polybeast_env`, with environments of tools/nemesis/environments.py."""

    addresses: Sequence[str] = ()

    def signal(self, server: int, signum: signal.Signals) -> None:
        os.kill(self.pids[f"server-{server}"], signum)


@contextlib.contextmanager
def serve(num_servers: int, *argv: str, env: str = "make") -> Iterator[Servers]:
    """Yield servers, once they serve."""
    flags = ["--with_parent", "--env", f"tools.nemesis.environments:{env}"]
    flags += ["--num_servers", str(num_servers), "--envs_per_stream", str(K)]
    flags += ["--streams_per_server", "1"]
    with programs.workplace() as folder:
        if "--server_address" not in argv:
            flags += ["--pipes_basename", f"unix:{folder}/env"]
        with Servers("polybeast_env", folder, *flags, *argv) as servers:
            servers.wait_for(lambda: servers.find(SERVING))
            servers.addresses = server_flags.addresses(servers.find(SERVING)[0][1])
            yield servers


class Learner:
    """Plays on servers with random actions; checks all rollouts. A context manager."""

    def __init__(self, addresses: Sequence[str], *, seed: int = 0, **pool: Any):
        self.addresses = addresses  # One stream each.
        self.ledger = Ledger()
        B = LANES * K
        self._queue = libtorchbeast.BatchingQueue(
            minimum_batch_size=B, maximum_batch_size=B, maximum_queue_size=2 * B
        )
        self._batcher = libtorchbeast.DynamicBatcher(timeout_ms=None)
        self._actors = libtorchbeast.ActorPool(
            T,
            self._queue,
            self._batcher,
            addresses,
            (),
            named_rows=True,
            num_envs=K,
            inference_keys=("done",),
            seed=seed,
            run_id="nemesis",
            **pool,
        )
        self._threads: list[futures.Future] = []

    def __enter__(self) -> "Learner":
        self._threads = [
            start_thread("actors", self._actors.run),
            start_thread("inference", self._infer),
            start_thread("learner", self._learn),
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stop, after all rollouts in the queue were learned."""
        self._actors.stop()
        self._batcher.close()
        deadline = time.monotonic() + GIVE_UP_S
        while self._queue.size() and not self._threads[2].done():
            if time.monotonic() > deadline:
                raise TimeoutError("the learner does not empty its queue")
            time.sleep(POLL_S)
        self._queue.close()
        for thread in self._threads:
            thread.result(GIVE_UP_S)

    def _infer(self) -> None:
        for batch in self._batcher:
            rows, state = batch.get_inputs()
            action = torch.randint(counting_env.NUM_ACTIONS, rows["done"].shape)
            batch.set_outputs(({"action": action}, state))

    def _learn(self) -> None:
        for (env_rows, agent_rows), _ in self._queue:
            rows = {**env_rows, **agent_rows}
            self.ledger.check(map_nest(lambda x: x.numpy(), rows))

    def take_events(self) -> list[str]:
        return self._actors.take_events()

    def stats(self) -> dict[str, Any]:
        """Return the counts of the actor pool, which must add up.

        Raises:
          AssertionError: they do not.
        """
        for thread in self._threads:
            if thread.done() and thread.exception():
                thread.result()
        stats = self._actors.stats()
        accounted = stats["dequeued"] + stats["discarded"] + stats["in_flight"]
        assert stats["received"] == accounted, stats
        return stats


def resources(pid: int) -> dict[str, float]:
    """Return the descriptors, threads and memory of a process."""
    process = psutil.Process(pid)
    return {
        "fds": process.num_fds(),
        "threads": process.num_threads(),
        "memory_mb": memory_mb(pid),
    }


def least_resources(pids: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Return the smallest numbers of each process within QUIET_S.

    Threads and sockets of gRPC end after a while. Leaks stay.
    """
    samples = []
    for _ in range(QUIET_SAMPLES):
        time.sleep(QUIET_S / QUIET_SAMPLES)
        samples.append({name: resources(pid) for name, pid in pids.items()})
    return {
        name: {key: min(sample[name][key] for sample in samples) for key in first}
        for name, first in samples[0].items()
    }


def memory_mb(pid: int) -> float:
    """Return the anonymous memory of a process, in RAM or swapped.

    Shared pages count in full, so that a fork or the end of a sibling changes nothing.
    Mapped files do not count, since the kernel drops them at any time.
    """
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = dict(re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE))
    return (int(found["Anonymous"]) + int(found["Swap"])) / 1024


@dataclasses.dataclass(frozen=True)
class Settled:
    """The state after the last fault, when all that was received is accounted for."""

    missing: set[Any]  # Rollouts.
    discarded: int  # Steps.


# --------------------------------------------------------------------------- the storm


@dataclasses.dataclass
class Fault:
    """What happened to a server, and when (`time.monotonic`)."""

    kind: str  # Or UNPROVOKED.
    server: int
    began: float
    ended: float | None = None
    noticed: float | None = None  # The learner knows that the stream is gone.
    connected: bool = False  # Again, since then.
    back: float | None = None  # The first step of the next life has come.

    def noticed_s(self) -> float:
        assert self.noticed is not None
        return self.noticed - self.began

    def back_s(self) -> float:
        assert self.back is not None and self.ended is not None
        return self.back - self.ended


class Storm:
    """Breaks servers, each again after it has recovered, until all faults are done.

    Args:
      begin: breaks `fault.server`; sets `fault.ended` if that needs no mending.
      end: mends it, up to `longest_s` after the fault was noticed.
      gap_s: the least time between the beginnings of two faults.
    """

    def __init__(
        self,
        servers: Servers,
        learner: Learner,
        begin: Callable[[Fault], None],
        end: Callable[[Fault], None] | None = None,
        *,
        gap_s: float = 0.0,
        longest_s: float = 0.0,
        rng: random.Random,
    ):
        self._servers, self._learner = servers, learner
        self._todo: collections.deque[str] = collections.deque()
        self._begin, self._end = begin, end
        self._gap_s, self._longest_s, self._rng = gap_s, longest_s, rng
        self.faults: list[Fault] = []
        self.unprovoked: list[Fault] = []  # Streams lost without a fault of ours.
        num = len(servers.addresses)
        self._broken: dict[int, Fault] = {}
        self._steps = [0] * num  # At the start of the present life of each server.
        self._not_before = [0.0] * num  # Earliest time of the next change by us.
        self._next = 0.0

    def rage(self, kinds: Iterable[str]) -> None:
        """Inject faults in this order, each into a random server; wait for the last.

        Raises:
          TimeoutError: a server is not back after GIVE_UP_S.
        """
        self._todo.extend(kinds)
        while self._todo or self._broken:
            time.sleep(POLL_S)
            self._servers.check()
            self._listen()
            states = self._learner.stats()["addresses"]
            addresses = list(enumerate(self._learner.addresses))
            for i, address in self._rng.sample(addresses, len(addresses)):
                steps = states[address]["steps"]
                if i in self._broken:
                    self._watch(i, steps, self._broken[i])
                elif self._todo and self._is_well(i, steps):
                    self._break(i, steps)

    def _listen(self) -> None:
        """Record which streams were lost, and which are connected again."""
        for event in self._learner.take_events():
            match = re.match(r".* \(stream (\d+)", event)
            assert match is not None, event
            server = int(match[1])
            fault = self._broken.get(server)
            if fault is None:
                now = time.monotonic()
                fault = Fault(UNPROVOKED, server, began=now, ended=now)
                self._broken[server] = fault
                print(f"Nobody broke this: {event}", file=sys.stderr)
            if event.endswith("connected again"):
                fault.connected = True
            elif fault.noticed is None:
                fault.noticed = time.monotonic()
                lasts_s = self._rng.uniform(0, self._longest_s)
                self._not_before[server] = fault.noticed + lasts_s

    def _is_well(self, i: int, steps: int) -> bool:
        # An earlier death would count as that of a server that cannot serve.
        has_delivered = steps - self._steps[i] > 2 * DELIVERED_STEPS * K
        return has_delivered and time.monotonic() > max(self._not_before[i], self._next)

    def _break(self, i: int, steps: int) -> None:
        fault = Fault(self._todo.popleft(), i, time.monotonic())
        self._next = fault.began + self._gap_s
        self._broken[i] = fault
        self._steps[i] = steps
        self._begin(fault)

    def _watch(self, i: int, steps: int, fault: Fault) -> None:
        now = time.monotonic()
        if now - fault.began > GIVE_UP_S:
            raise TimeoutError(f"{fault} is not over: {self._servers.text()}")
        if fault.noticed is None:
            return
        if fault.ended is None:
            if now > self._not_before[i]:
                assert self._end is not None, fault
                self._end(fault)
                fault.ended = time.monotonic()
        elif not fault.connected:
            self._steps[i] = steps
        elif steps > self._steps[i]:
            fault.back = now
            self._not_before[i] = now + self._rng.uniform(0, PAUSE_S)
            faults = self.unprovoked if fault.kind == UNPROVOKED else self.faults
            faults.append(self._broken.pop(i))


def wait_for_streams(servers: Servers, learner: Learner) -> None:
    """Wait until every server has played for a while."""

    def all_play() -> bool:
        states = learner.stats()["addresses"].values()
        return all(s["connected"] and s["steps"] > 10 * T * K for s in states)

    servers.wait_for(all_play)


def settle(servers: Servers, learner: Learner) -> Settled:
    """Wait until all that was received by now is learned.

    The rollouts of a stream are in several learner batches. The batches that are open
    now are full when many more rollouts have come.
    """
    ledger = learner.ledger
    gaps, discarded = ledger.gaps(), learner.stats()["discarded"]
    enough = ledger.rollouts + LANES * (4 + 2 * len(servers.addresses) // LANES)
    servers.wait_for(lambda: ledger.rollouts >= enough)
    return Settled(gaps & ledger.gaps(), discarded)


@contextlib.contextmanager
def play(
    servers: Servers, addresses: Sequence[str] | None = None, **pool: Any
) -> Iterator[Learner]:
    """Yield a learner that plays on servers, or on `addresses`: those of proxies."""
    with Learner(addresses or servers.addresses, **pool) as learner:
        wait_for_streams(servers, learner)
        yield learner


def require_conservation(
    found: Result, storm: Storm, learner: Learner, settled: Settled
) -> None:
    """Add the sums of all steps to a result, after the learner has stopped.

    Each received row is learned once, or discarded with its rollout, which a fault has
    ended too early.
    """
    stats, ledger = learner.stats(), learner.ledger
    learned = (ledger.rollouts - ledger.duplicated) * T * K
    lost = stats["received"] - stats["discarded"] - learned
    missing = len(settled.missing)
    faults = len(storm.faults) + len(storm.unprovoked)
    found.figures |= {
        "unprovoked": len(storm.unprovoked),
        "lives": ledger.lives(),
        "rollouts": ledger.rollouts,
        "steps_received": stats["received"],
        "steps_discarded": settled.discarded,
        "steps_lost": lost,
        "rollouts_missing": missing,
        "rollouts_duplicated": ledger.duplicated,
        "rollouts_spliced": ledger.spliced,
    }
    found.require(
        not storm.unprovoked, f"{len(storm.unprovoked)} streams lost that nobody broke"
    )
    found.require(lost == 0, f"{lost} steps are neither learned nor discarded")
    found.require(missing == 0, f"{missing} rollouts are missing between others")
    found.require(ledger.duplicated == 0, f"{ledger.duplicated} rollouts came twice")
    found.require(
        ledger.spliced == 0, f"{ledger.spliced} spliced rollouts: {ledger.first_error}"
    )
    most = faults * (T - 1) * K
    found.require(
        settled.discarded <= most,
        f"{settled.discarded} steps discarded by {faults} faults, expected {most} at "
        "most: a partial rollout each",
    )
