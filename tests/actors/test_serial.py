# SPDX-License-Identifier: Apache-2.0
"""`core.actors.serial`: which runs may go on with --serial, and how."""

import contextlib
import copy
import json
import math
import random
import signal
import time
import types

import numpy as np
import pytest
import torch

from core import ranks
from core.actors import serial
from core.environments.toys import Catch
from core.errors import ConfigError
from core.nests import leaves, map_nest
from core.running.randomness import rng_state
from core.running.signals import StopSignal
from tests.actors.pool import E, T, make_actor, make_flags


def test_a_run_of_polybeast_does_not_go_on_in_lock_step():
    found = types.SimpleNamespace(state={"flags": {"info_keys": [], "num_servers": 2}})
    run = types.SimpleNamespace(flags=make_flags("Catch", "--serial"), found=found)
    with pytest.raises(ConfigError, match="--serial is True but .* with False"):
        serial.first_incarnation(run)


@pytest.mark.parametrize(
    "key, old",
    [
        ("serial", False),
        ("seed", 8),
        ("num_actors", 3),
        ("envs_per_actor", 9),
        ("info_keys", ["half"]),
    ],
)
def test_a_run_goes_on_in_lock_step_with_the_same_values_only(key, old):
    flags = make_flags("Catch", "--serial")
    trained = vars(flags) | {"info_keys": list(flags.info_keys)} | {key: old}
    found = types.SimpleNamespace(state={"flags": trained, "actors": []})
    run = types.SimpleNamespace(flags=flags, found=found)
    with pytest.raises(ConfigError, match=f"^--{key} is .* trained with .* as they"):
        serial.first_incarnation(run)


def test_a_run_keeps_its_incarnation_if_it_goes_on_exactly(monkeypatch):
    flags = make_flags("Catch", "--serial")
    run = types.SimpleNamespace(flags=flags, found=None, first_incarnation=5)
    assert serial.first_incarnation(run) == 0
    state = {"flags": vars(flags), "actors": [], "first_incarnation": 7}
    run.found = types.SimpleNamespace(state=state)
    assert serial.first_incarnation(run) == 7
    monkeypatch.setattr(ranks, "size", lambda: 2)
    assert serial.first_incarnation(run) == 5


def test_restored_actors_go_on_as_the_saved_ones_did():
    flags = make_flags("Catch", "--serial", "--use_lstm")
    actor, idle = make_actor(flags), make_actor(flags)
    actor.unroll(0)
    state, tensors = serial.actors_state([actor, idle], 0)
    saved = copy.deepcopy(tensors)
    torch.manual_seed(3)
    actor.unroll(0)
    map_nest(np.testing.assert_array_equal, tensors, saved)

    restored = [make_actor(flags, actor.net) for _ in range(2)]
    found = types.SimpleNamespace(state=state, tensors=tensors)
    serial.restore_actors(restored, found)
    assert [actor.started for actor in restored] == [True, False]
    torch.manual_seed(3)
    restored[0].unroll(0)
    ours, theirs = restored[0].buffers, actor.buffers
    for slabs in ((ours.rows, theirs.rows), (ours.agent_state, theirs.agent_state)):
        map_nest(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), *slabs)


def test_actions_of_a_game_without_end_are_not_saved_and_a_new_game_begins(
    monkeypatch, caplog
):
    monkeypatch.setattr(serial, "MAX_ACTIONS", (T - 1) * E)
    flags = make_flags("Catch", "--serial", "--num_actors", "1")  # A game: 9 steps.
    actors = [make_actor(flags) for _ in range(2)]
    for actor in actors:
        actor.unroll(0)
        assert actor.last_row["episode_step"].tolist() == [T] * E
    state, tensors = serial.actors_state(actors, 0)
    saved = state["actors"][1]["envs"]["envs"]
    assert [env["actions"] for env in saved] == [None] * E

    state = json.loads(json.dumps(state | {"flags": vars(flags)}))
    resumed, other = make_actor(flags), make_actor(flags)
    found = types.SimpleNamespace(state=state, tensors=tensors)
    serial.restore_actors([resumed, other], found)
    assert f"unfinished games of {2 * E} environments are too long" in caplog.text
    assert resumed.last_row["done"].all()
    resumed.unroll(0)
    rollout = resumed.buffers.rollout(0)
    assert (rollout["episode_step"].T == np.arange(T + 1)).all()


class Drawing(Catch):
    """Draws numbers from the global generators when it is made."""

    def __init__(self):
        super().__init__()
        torch.rand(1)
        np.random.rand()
        random.random()


def test_environments_that_draw_numbers_when_made_do_not_change_a_resumed_run():
    flags = make_flags(f"{__name__}:Drawing", "--serial", "--num_actors", "1")
    actor = make_actor(flags)
    actor.unroll(0)
    state, tensors = serial.actors_state([actor], 0)
    rng, rng_tensors = rng_state()
    state |= {"flags": vars(flags), "rng": rng}
    found = types.SimpleNamespace(state=state, tensors=tensors | {"rng": rng_tensors})
    run = types.SimpleNamespace(
        flags=flags, found=found, open=contextlib.nullcontext, log=lambda stats: None
    )
    run.stop = StopSignal()
    clocks = []

    def create_actor(clock, **_):
        clock[0] = time.monotonic()  # As a call of an environment does.
        clocks.append(clock)
        return make_actor(flags)

    with serial.open_run(run, create_actor):
        assert clocks == [0.0]
        now = rng_state()
    assert now[0] == rng
    for (name, ours), (_, theirs) in zip(leaves(now[1]), leaves(rng_tensors)):
        assert torch.equal(ours, theirs), name


def test_a_signal_stops_a_run_whose_environments_take_signals():
    flags = make_flags("Catch", "--serial", "--num_actors", "1")
    with StopSignal() as stop:
        run = types.SimpleNamespace(flags=flags, stop=stop, found=None)
        run.open, run.log = contextlib.nullcontext, lambda stats: None
        run.learner = types.SimpleNamespace(updates=0)

        def create_actor(**_):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return make_actor(flags)

        with serial.open_run(run, create_actor):
            signal.raise_signal(signal.SIGTERM)
            assert stop.received is signal.SIGTERM


@pytest.mark.parametrize(
    "size, on_stall, limit",
    [(1, "stop", 77.0), (1, "wait", math.inf), (2, "stop", math.inf)],
)
def test_the_clocks_of_a_serial_run(monkeypatch, size, on_stall, limit):
    clocks, limits, closed, logged = np.zeros(2), [], [], []

    @contextlib.contextmanager
    def limit_calls(env_s, *, update_s, at_terminal):
        limits.append((env_s, update_s))
        yield clocks

    @contextlib.contextmanager
    def open_logs():
        yield
        assert not clocks.any()  # The last checkpoint has no limit.

    def create_actor(actor_id, clock):
        clock += 1.0
        envs = types.SimpleNamespace(close=lambda: closed.append(actor_id))
        return types.SimpleNamespace(envs=envs)

    stall = ["--stall_timeout_s", "77", "--on_stall", on_stall]
    flags = make_flags("Catch", "--serial", *stall)
    monkeypatch.setattr(ranks, "size", lambda: size)
    monkeypatch.setattr(serial, "limit_calls", limit_calls)
    stop = types.SimpleNamespace(renew=lambda: None)
    run = types.SimpleNamespace(flags=flags, stop=stop, found=None)
    run.open, run.log = open_logs, logged.append
    with serial.open_run(run, create_actor) as (actors, update_clock):
        update_clock[0] = 7.0
        assert len(actors) == 2 and clocks.tolist() == [2.0, 7.0] and not closed
    assert limits == [(flags.env_step_timeout_s, limit)]
    assert sorted(closed) == [0, 1] and logged == [{}]
    with pytest.raises(KeyError), serial.open_run(run, create_actor):
        raise KeyError
    assert run.extra_state() == ({}, {})
