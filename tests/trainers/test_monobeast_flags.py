# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's command line: environments, the processes they are in, and buffers.

What both programs' command lines have in common is in test_flags.py.
"""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import monobeast
from core.actors import actor_flags
from core.errors import Exit
from core.rollout import new_rollouts
from core.running.machine import num_cores
from tests.trainers.command_line import parse_test, train


def test_the_command_of_torchbeasts_readme_is_45_environments():
    flags = monobeast.parse_flags(
        "--env PongNoFrameskip-v4 --num_actors 45 --total_steps 30000000 "
        "--learning_rate 0.0004 --epsilon 0.01 --entropy_cost 0.01 --batch_size 4 "
        "--unroll_length 80 --num_buffers 60 --num_threads 4 --xpid example".split()
    )
    assert (flags.num_actors, flags.envs_per_actor) == (45, 1)  # gcd(45, 4) is 1.
    assert flags.num_buffers == 60


@pytest.mark.parametrize(
    "argv, cores, actors, envs",
    [
        ("", 2, 2, 8),
        ("", 32, 32, 8),
        ("--batch_size 4", 2, 2, 4),
        ("--batch_size 12", 2, 2, 6),
        ("--num_actors 48", 2, 3, 16),  # As few processes as keep the cores busy.
        ("--num_actors 48", 32, 48, 1),
        ("--num_actors 256", 32, 32, 8),
        ("--num_actors 16", 2, 2, 8),
        ("--num_actors 1", 2, 1, 1),
        ("--num_actors 3", 2, 3, 1),
        ("--num_actors 16 --serial", 2, 1, 16),  # Whatever machine it goes on.
        ("--num_actors 16 --serial", 32, 1, 16),
        ("--num_actors 3 --envs_per_actor 4", 2, 3, 4),
        ("--envs_per_actor 16", 2, 2, 16),
    ],
)
def test_environments_are_put_into_processes(argv, cores, actors, envs, monkeypatch):
    monkeypatch.setattr(actor_flags, "num_cores", lambda: cores)
    flags = monobeast.parse_flags(argv.split())
    assert (flags.num_actors, flags.envs_per_actor) == (actors, envs)
    recorded = [
        f"--{key}={getattr(flags, key)}" for key in ("num_actors", "envs_per_actor")
    ]
    again = monobeast.parse_flags([*argv.split(), *recorded])
    assert vars(again) | {"xpid": ""} == vars(flags) | {"xpid": ""}


def test_defaults_that_depend_on_others_are_filled_in():
    flags = monobeast.parse_flags(["--batch_size", "24", "--envs_per_actor", "3"])
    assert flags.num_actors == num_cores()
    assert flags.num_buffers == 2 * 3 * flags.num_actors + 2 * 24


def test_serial_defaults_to_one_learner_thread():
    assert monobeast.parse_flags(["--serial"]).num_learner_threads == 1
    assert monobeast.parse_flags("--serial --num_threads 1".split()).serial


def test_a_serial_run_is_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert monobeast.has_gpu(monobeast.parse_flags([]))
    assert not monobeast.has_gpu(monobeast.parse_flags(["--serial"]))


def test_what_is_just_enough_is_accepted():
    monobeast.parse_flags(
        "--num_actors 7 --num_buffers 21 --batch_size 21 --envs_per_actor 3 "
        "--unroll_length 5 --total_steps 105".split()
    )


@pytest.mark.parametrize(
    "argv, new, envs, capacity",
    [
        ("--batch_size 32", 32, 8, None),
        ("--batch_size 32 --replay_ratio 0", 32, 8, None),
        ("--batch_size 32 --replay_ratio 1", 16, 8, 320),
        ("--batch_size 32 --replay_ratio 3 --replay_capacity 32", 8, 8, 32),
        ("--batch_size 12 --replay_ratio 0.5", 8, 4, 120),
        ("--batch_size 32 --replay_ratio 0.3333", 24, 8, 320),
    ],
)
def test_a_batch_has_new_and_replayed_rollouts(argv, new, envs, capacity):
    """The environments of a process divide the number of both."""
    flags = monobeast.parse_flags(argv.split())
    assert new_rollouts(flags) == new
    assert flags.envs_per_actor == envs
    assert flags.replay_capacity == capacity


small = st.integers(1, 12)


@hypothesis.given(
    sizes=st.fixed_dictionaries(
        {"batch_size": small, "unroll_length": small},
        optional={
            "num_actors": small,
            "envs_per_actor": small,
            "num_buffers": st.integers(1, 60),
            "num_learner_threads": st.integers(1, 3),
            "total_steps": st.integers(1, 200),
        },
    ),
    serial=st.booleans(),
)
@hypothesis.settings(max_examples=200)
def test_exactly_what_can_be_trained_is_accepted(sizes, serial):
    A, B, E, T = (
        sizes.get(k)
        for k in ("num_actors", "batch_size", "envs_per_actor", "unroll_length")
    )
    argv = [f"--{name}={value}" for name, value in sizes.items()]
    if A is None:
        cores = 1 if serial else num_cores()
        total = cores * (E or max(e for e in range(1, 9) if B % e == 0))
    else:
        total = A * (E or 1)
    # Buffers for a whole batch, one for every environment, and at least one update.
    possible = (
        (E is None or B % E == 0)
        and sizes.get("num_buffers", 1000) >= max(total, B)
        and sizes.get("total_steps", 1000) >= B * T
        and not (serial and sizes.get("num_learner_threads", 1) > 1)
    )
    try:
        flags = monobeast.parse_flags(argv + ["--serial"] * serial)
    except SystemExit as error:
        assert error.code == Exit.USAGE
        assert not possible
    else:
        assert possible
        assert flags.num_actors * flags.envs_per_actor == total
        assert B % flags.envs_per_actor == 0
        assert flags.num_buffers >= max(total, B)
        if E is None:
            sizes.pop("num_actors", None)
        assert {name: getattr(flags, name) for name in sizes} == sizes


def test_any_run_that_was_trained_can_be_tested(tmp_path):
    argv = (
        "--xpid a --env Catch --batch_size 21 --envs_per_actor 7 --unroll_length 1 "
        "--total_steps 21 --num_actors 1 --num_buffers 21 --serial"
    )
    train(monobeast, tmp_path, argv)
    assert parse_test(monobeast, tmp_path).env == "Catch"
