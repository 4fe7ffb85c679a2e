# SPDX-License-Identifier: Apache-2.0
"""Classic gym 0.26.2 and Atari on atari-py. Run by `make test-classic`."""

import os
import subprocess
import sys
from pathlib import Path

import gym as classic_gym
import gymnasium
import numpy as np
import pytest

from atari_wrappers import make_atari
from core.environments import classic_atari, stepping
from core.environments import make as make_module
from core.environments.classic_gym import convert_space
from core.nests import map_nest

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 240  # For a subprocess that imports torch on a busy machine.


def first_rows(envs):
    rows = map_nest(
        lambda spec: np.zeros((len(envs.envs), *spec.shape), spec.dtype), envs.row_spec
    )
    envs.reset(rows)
    return rows


NUMPY_1_ONLY = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.0.0",
    reason="gym 0.26.2's Acrobot uses np.float_, which numpy 2 has not",
)


@pytest.mark.parametrize(
    "env_id",
    ["CartPole-v1", "MountainCar-v0", pytest.param("Acrobot-v1", marks=NUMPY_1_ONLY)],
)
def test_classic_control_plays_as_in_gymnasium(env_id):
    ours, theirs = make_module.make(f"gym:{env_id}"), gymnasium.make(env_id)
    assert isinstance(ours.unwrapped, classic_gym.Env)
    assert ours.action_space == theirs.action_space
    rng = np.random.default_rng(1)
    for seed in range(3):
        observation, _ = ours.reset(seed=seed)
        expected, _ = theirs.reset(seed=seed)
        for _ in range(211):
            np.testing.assert_allclose(observation, expected, rtol=1e-5, atol=1e-6)
            action = rng.integers(ours.action_space.n)
            observation, reward, *done, _ = ours.step(action)
            expected, expected_reward, *expected_done, _ = theirs.step(action)
            assert (reward, done) == (expected_reward, expected_done)
            if any(done):
                break


def test_continuous_actions_reach_a_classic_environment():
    envs = stepping.Environments(lambda: make_module.make("gym:Pendulum-v1"), 2, seed=3)
    rows = first_rows(envs)
    assert rows["last_action"].shape == (2, 1)
    action = np.array([[1.5], [-0.5]], np.float32)
    envs.step(action, rows)
    np.testing.assert_array_equal(rows["last_action"], action)
    assert (rows["reward"] < 0).all()


def old_api(max_episode_steps):
    """CartPole with 4-tuple `step`, as before gym 0.26."""
    env = classic_gym.make(
        "CartPole-v1", max_episode_steps=max_episode_steps, disable_env_checker=True
    )
    return classic_gym.wrappers.StepAPICompatibility(env, output_truncation_bool=False)


@pytest.mark.parametrize("make", [old_api, lambda n: make_module.make(
    "gym:CartPole-v1", max_episode_steps=n)], ids=["4-tuple", "5-tuple"])  # fmt: skip
def test_a_time_limit_of_classic_gym_truncates(make):
    envs = stepping.Environments(lambda: make(7), 1, seed=3)
    rows = first_rows(envs)
    for step in range(1, 8):
        envs.step(np.array([step % 2]), rows)
        assert not rows["done"][0]
        assert rows["truncated"][0] == (step == 7)
    assert rows["info"]["game_return"][0] == 7
    envs.step(np.array([0]), rows)
    assert rows["done"][0] and not rows["truncated"][0]


def test_an_old_step_that_ends_without_a_time_limit_terminates():
    envs = stepping.Environments(lambda: old_api(500), 1, seed=3)
    rows = first_rows(envs)
    for _ in range(100):
        envs.step(np.array([1]), rows)  # Falls over.
        assert not rows["truncated"][0]
        if rows["done"][0]:
            break
    assert rows["done"][0]
    assert rows["info"]["game_return"][0] == rows["episode_step"][0] < 20


def test_spaces_of_classic_gym_become_those_of_gymnasium():
    classic, new = classic_gym.spaces, gymnasium.spaces

    def nest(spaces):
        return spaces.Dict(
            a=spaces.Box(-1, 1, (2, 3), np.float32),
            b=spaces.Tuple([spaces.Discrete(5, start=2), spaces.MultiBinary(7)]),
            c=spaces.MultiDiscrete([2, 3, 5]),
        )

    assert convert_space(nest(classic)) == nest(new)


def test_an_unknown_classic_id_names_what_is_near():
    with pytest.raises(ValueError, match="gym:CartPole-v1"):
        make_module.make("gym:CartPol-v1")


# ----------------------------------------------------------------------------- Atari


@pytest.mark.parametrize("game", ["Pong", "Breakout", "SpaceInvaders"])
def test_atari_py_plays_as_ale_py(game):
    # Two emulators, years apart, one game: every picture, reward and end is the same,
    # through lost lives and into the next game. (No no-ops: their number is drawn.)
    ours = make_atari(f"gym:{game}NoFrameskip-v4", noop_max=0)
    theirs = make_atari(f"{game}NoFrameskip-v4", noop_max=0)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    rng = np.random.default_rng(1)
    observation, expected = ours.reset(seed=1)[0], theirs.reset(seed=1)[0]
    np.testing.assert_array_equal(observation, expected)
    ends = 0
    for step in range(307):
        action = rng.integers(ours.action_space.n)
        observation, reward, *done, info = ours.step(action)
        expected, expected_reward, *expected_done, expected_info = theirs.step(action)
        assert (reward, done) == (expected_reward, expected_done), step
        assert info == expected_info
        np.testing.assert_array_equal(observation, expected, err_msg=f"step {step}")
        if any(done):
            ends += 1
            observation, info = ours.reset()
            expected, expected_info = theirs.reset()
            assert info == expected_info
            np.testing.assert_array_equal(observation, expected)
    assert game == "Pong" or ends > 0


def test_sticky_actions_and_all_actions_reach_atari_py():
    env = make_atari(
        "gym:PongNoFrameskip-v4", sticky_actions=0.25, full_action_space=True
    )
    assert env.unwrapped.ale.getFloat("repeat_action_probability") == 0.25
    assert env.action_space.n == 18
    env = make_atari("gym:PongNoFrameskip-v0")  # Sticky by its id; the options decide.
    assert env.unwrapped.ale.getFloat("repeat_action_probability") == 0
    assert env.action_space.n == 6


def test_the_seed_decides_a_game_on_atari_py():
    env = make_atari("gym:FreewayNoFrameskip-v4", noop_max=0, sticky_actions=0.25)

    def play(seed):
        env.reset(seed=seed)
        rng = np.random.default_rng(0)
        for _ in range(41):
            observation, *_ = env.step(rng.integers(env.action_space.n))
        return observation.tobytes()

    first = play(1)
    assert play(2) != first
    assert play(1) == first


def test_a_game_on_atari_py_can_be_rendered():
    env = make_atari("gym:PongNoFrameskip-v4", render_mode="rgb_array")
    env.reset(seed=1)
    picture = env.render()
    assert picture.shape == (210, 160, 3)
    expected = make_atari("PongNoFrameskip-v4", render_mode="rgb_array", noop_max=0)
    ours = make_atari("gym:PongNoFrameskip-v4", render_mode="rgb_array", noop_max=0)
    ours.reset(seed=1)
    expected.reset(seed=1)
    np.testing.assert_array_equal(ours.render(), expected.render())


def test_registering_twice_changes_nothing():
    classic_atari.register()
    before = dict(classic_gym.envs.registry)
    classic_atari.register()
    after = classic_gym.envs.registry
    assert after.keys() == before.keys()
    assert all(after[env_id] is before[env_id] for env_id in before)
    assert len([env_id for env_id in before if "NoFrameskip" in env_id]) > 100


@pytest.mark.parametrize("env_id", ["gym:PongNoFrameskip-v4", "gym:CartPole-v1"])
def test_monobeast_trains_on_classic_gym(env_id, tmp_path):
    command = [sys.executable, "-m", "monobeast", "--env", env_id, "--serial"]
    command += ["--savedir", str(tmp_path), "--xpid", "classic"]
    command += ["--envs_per_actor", "2", "--batch_size", "2", "--unroll_length", "5"]
    command += ["--total_steps", "60", "--seed", "1"]
    result = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = (tmp_path / "classic" / "logs.csv").read_text().splitlines()
    assert int(rows[-1].split(",")[0]) >= 60  # Steps.
