# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's actors with everything that they need, for tests."""

import argparse
import functools
from collections.abc import Callable

import numpy as np
import torch

import monobeast
from core.actors import prepare
from core.actors.processes import Actors
from core.actors.shared_memory import SharedWeights
from core.algorithm import counters
from core.nests import map_nest
from core.running.unit import Unit
from tests.conftest import wait_until

T, E = 5, 3


def make_flags(env: str = "tests.counting_env:make", *more: str) -> argparse.Namespace:
    flags = monobeast.parse_flags(
        ["--env", env, "--num_actors", "2", "--envs_per_actor", str(E)]
        + ["--batch_size", str(2 * E), "--unroll_length", str(T), "--seed", "7", *more]
    )
    return flags


def make_actor(
    flags: argparse.Namespace,
    net: monobeast.Net | None = None,
    fetch: Callable[[], int] = lambda: 0,
) -> monobeast.Actor:
    """Return an actor for this process, with buffers of its own."""
    spaces = monobeast.read_env(flags)[0]
    net = net or monobeast.create_net(flags, spaces)
    outputs = monobeast.net_outputs(spaces)
    return monobeast.Actor(
        flags,
        net,
        spaces,
        prepare.create_buffers(flags, spaces, net, outputs),
        actor_id=0,
        incarnation=0,
        fetch=fetch,
        clock=np.zeros(1),
    )


class Pool:
    """Actors with everything they need, polled by the test's own thread."""

    def __init__(self, flags: argparse.Namespace):
        torch.manual_seed(0)
        spaces = monobeast.read_env(flags)[0]
        net = monobeast.create_net(flags, spaces)
        outputs = monobeast.net_outputs(spaces)
        self.buffers = prepare.create_buffers(flags, spaces, net, outputs)
        self.weights = SharedWeights(net.state_dict(), 0)
        self.actors = Actors(
            functools.partial(monobeast.act, flags, spaces, monobeast.own_code()),
            flags,
            self.buffers,
            self.weights,
            first_incarnation=0,
            busy=counters.BusyTime(),
            preload="monobeast",
        )
        self.flags = flags

    def __enter__(self) -> "Pool":
        def is_started(unit: Unit | None) -> bool:
            if unit is None:
                return False
            return unit.pid is not None or unit.exitcode is not None  # Dead already.

        def have_started() -> bool:
            self.actors.start()
            return all(is_started(slot.process) for slot in self.actors.slots)

        wait_until(have_started)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.actors.close()

    def next_rollout(self) -> dict:
        """Poll until a buffer is full; return a copy of it, the buffer given back."""

        def arrived() -> bool:
            self.actors.poll(0.01)
            return self.actors.stats()["buffers_full"] > 0

        wait_until(arrived)
        (index,) = self.actors.take(1)
        rollout = map_nest(np.copy, self.buffers.rollout(index))
        self.actors.give_back([index])
        return rollout

    def buffers_accounted_for(self) -> int:
        actors = self.actors
        held = sum(len(slot.held) for slot in actors.slots)
        return held + len(actors._free) + len(actors._full)
