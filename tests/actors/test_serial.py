# SPDX-License-Identifier: Apache-2.0
"""`core.actors.serial`: which runs may go on with --serial, and how."""

import contextlib
import json
import random
import signal
import types

import numpy as np
import pytest
import torch

from core.actors import serial
from core.environments.toys import Catch
from core.errors import ConfigError
from core.nests import leaves
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


def test_actions_of_a_game_without_end_are_not_saved_and_a_new_game_begins(
    monkeypatch, caplog
):
    monkeypatch.setattr(serial, "MAX_ACTIONS", (T - 1) * E)
    flags = make_flags("Catch", "--serial", "--num_actors", "1")  # A game: 9 steps.
    actor = make_actor(flags)
    actor.unroll(0)
    assert actor.last_row["episode_step"].tolist() == [T] * E
    state, tensors = serial.actors_state([actor], 0)
    saved = state["actors"][0]["envs"]["envs"]
    assert [env["actions"] for env in saved] == [None] * E

    state = json.loads(json.dumps(state | {"flags": vars(flags)}))
    resumed = make_actor(flags)
    found = types.SimpleNamespace(state=state, tensors=tensors)
    serial.restore_actors([resumed], found)
    assert f"unfinished games of {E} environments are too long" in caplog.text
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
    with serial.open_run(run, lambda **_: make_actor(flags)):
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
