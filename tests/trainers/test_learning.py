# SPDX-License-Identifier: Apache-2.0
"""Both trainers learn: fixed seeds, scores that a broken learner does not reach.

Seen red, all of those named, each with one change in a copy of the sources; the scores
that came of it are in brackets:

  `rewards - discounts * next_values - values` in V-trace: Catch (0.1 to 0.5), Memory
    (0.1), Breakout (0.5 to 0.8)
  `batch["action"][:-1]`, the action of the row before: every test (Breakout 0.5)
  a discount of 0: Catch (-0.1 to 0.4), Breakout (0.4)
  a discount that does not end with the episode: Memory (0.4 to 0.6), FirstStep (0.6),
    Breakout (2.3 to 2.8)
  `unroll_lstm` as if no row were `done`: FirstStep (0.4)
  a recurrent state that is always zero: Memory
"""

import csv

import gymnasium as gym
import numpy as np
import pytest

CATCH = ["--env", "Catch", "--total_steps", 60_000, "--learning_rate", 0.001]
# Only entropy keeps the answers random until the LSTM knows the cue.
MEMORY = ["--env", "Memory", "--total_steps", 25_000, "--learning_rate", 0.001]
MEMORY += ["--entropy_cost", 0.1]
FIRST_STEP = [
    "--env",
    "tests.trainers.test_learning:FirstStep",
    "--total_steps",
    40_000,
]
FIRST_STEP += ["--learning_rate", 0.001, "--use_lstm"]
# Random play has a return of 0.5, the best that does not see the ball some 3.
BREAKOUT = ["--env", "MinAtar/Breakout-v1", "--total_steps", 100_000]
BREAKOUT += ["--learning_rate", 0.002, "--entropy_cost", 0.02]
SMALL = ["--batch_size", 8, "--epsilon", 0.001, "--seed", 1]
MONOBEAST = ["--num_actors", 1, "--envs_per_actor", 8]
POLYBEAST = ["--num_servers", 1, "--streams_per_server", 2]  # Of 8 environments each.


class FirstStep(gym.Env):
    """The first step of an episode wants action 1, all others 0; nothing is to be seen.

    Each reward is +0.2 or -0.2. Episodes have 2 to 6 steps, so only a recurrent state
    that is new in each of them tells where one begins. Mean return: 0.8 for the perfect
    policy, 0.4 without such a state.
    """

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step, self._length = 0, self.np_random.integers(2, 7)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        reward = 0.2 if action == (self._step == 0) else -0.2
        self._step += 1
        return np.zeros(1, np.float32), reward, self._step == self._length, False, {}


@pytest.fixture
def train(start, tmp_path):
    """Train with flags to the end; return the mean return of the last 100 games."""

    def train(*argv, module: str = "monobeast") -> float:
        few = POLYBEAST if module == "polybeast" else MONOBEAST
        program = start("--xpid", "learns", *few, *SMALL, *argv, module=module)
        # On a machine with other work this may take minutes.
        assert program.wait(deadline_s=300) == 0, program.text()
        with open(tmp_path / "runs" / "learns" / "logs.csv", newline="") as file:
            return float(list(csv.DictReader(file))[-1]["mean_episode_return"])

    return train


def test_catch_is_learned_in_lock_step(train):
    assert train(*CATCH, "--serial") >= 0.9


def test_catch_is_learned_by_asynchronous_actors(train):
    assert train(*CATCH, "--num_actors", 2) >= 0.9


def test_catch_is_learned_from_environment_servers_in_bfloat16(train):
    """Memory, below, is learned from environment servers in float32."""
    assert train(*CATCH, "--precision", "bfloat16", module="polybeast") >= 0.9


def test_memory_is_learned_with_a_recurrent_state(train):
    assert train(*MEMORY, "--serial", "--use_lstm") >= 0.9


def test_memory_stays_near_chance_without_a_recurrent_state(train):
    assert -0.4 <= train(*MEMORY, "--serial") <= 0.4


def test_memory_is_learned_with_the_state_that_the_actor_pool_keeps(train):
    assert train(*MEMORY, "--use_lstm", module="polybeast") >= 0.9


def test_each_episode_begins_with_a_new_recurrent_state(train):
    assert train(*FIRST_STEP, module="polybeast") >= 0.7


def test_minatar_breakout_is_learned(train):
    """By MonoBeast; PolyBeast learns it in `tests.trainers.test_fork`."""
    assert train(*BREAKOUT) >= 4
