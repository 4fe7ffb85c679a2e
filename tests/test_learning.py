# SPDX-License-Identifier: Apache-2.0
"""Both trainers learn: fixed seeds, scores that a broken learner does not reach.

Seen red: Catch with a sign error in V-trace's delta, with the action of the row before,
and with a discount of 0; Memory with a recurrent state that is always zero.
"""

import csv

import pytest

CATCH = ["--env", "Catch", "--total_steps", 100_000, "--learning_rate", 0.001]
# Only entropy keeps the answers random until the LSTM knows the cue.
MEMORY = ["--env", "Memory", "--total_steps", 25_000, "--learning_rate", 0.001]
MEMORY += ["--entropy_cost", 0.1]
SMALL = ["--batch_size", 8, "--epsilon", 0.001, "--seed", 1]
# Two streams of 8 environments.
POLYBEAST = ["--num_servers", 1, "--streams_per_server", 2]


@pytest.fixture
def train(start, tmp_path):
    """Train with flags to the end; return the mean return of the last 100 games."""

    def train(*argv, module: str = "monobeast") -> float:
        few = POLYBEAST if module == "polybeast" else ["--num_actors", 1]
        program = start("--xpid", "learns", *few, *SMALL, *argv, module=module)
        assert program.wait() == 0, program.text()
        with open(tmp_path / "runs" / "learns" / "logs.csv", newline="") as file:
            return float(list(csv.DictReader(file))[-1]["mean_episode_return"])

    return train


def test_catch_is_learned_in_lock_step(train):
    assert train(*CATCH, "--serial") >= 0.95


def test_catch_is_learned_by_asynchronous_actors(train):
    assert train(*CATCH, "--num_actors", 2) >= 0.95


def test_catch_is_learned_from_environment_servers(train):
    assert train(*CATCH, module="polybeast") >= 0.95


@pytest.mark.parametrize("module", ["monobeast", "polybeast"])
def test_catch_is_learned_in_bfloat16(train, module):
    assert train(*CATCH, "--precision", "bfloat16", module=module) >= 0.95


def test_memory_is_learned_with_a_recurrent_state(train):
    assert train(*MEMORY, "--serial", "--use_lstm") >= 0.9


def test_memory_stays_near_chance_without_a_recurrent_state(train):
    assert -0.4 <= train(*MEMORY, "--serial") <= 0.4


def test_memory_is_learned_with_the_state_that_the_actor_pool_keeps(train):
    assert train(*MEMORY, "--use_lstm", module="polybeast") >= 0.9
