# SPDX-License-Identifier: Apache-2.0
"""core.environment: rows by arithmetic, seeds, exact resume, both APIs, --check."""

import copy
import itertools
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from core import check_environment, environment, spaces
from core.environment import EnvError, Environments, EnvSpecError, env_seed, make
from tests import counting_env
from tests.counting_env import CountingEnv, check_rollout
from tests.fault_env import FaultEnv

SEED = 11
DEADLINE_S = 60
FRESH = itertools.count()  # Numbers never seen before.
REPOSITORY = Path(__file__).resolve().parent.parent
LIVES, NESTED, TRUNCATING = (
    counting_env.LIVES,
    counting_env.NESTED,
    counting_env.TRUNCATING,
)
KINDS = [0, TRUNCATING, LIVES, LIVES | TRUNCATING, NESTED | TRUNCATING]


# ---------------------------------------------------------------------------- Helpers


def empty_rows(envs, *axes):
    """Rows [*axes, ...] full of nonsense, so that what is not written shows."""
    fill = {"f": -7.0, "b": True, "i": -7, "u": 99}
    return spaces.map_nest(
        lambda spec: np.full((*axes, *spec.shape), fill[spec.dtype.kind], spec.dtype),
        envs.row_spec,
    )


def at(rows, t):
    return spaces.map_nest(lambda array: array[t], rows)


def sample_actions(envs, num_envs, rng):
    """Random actions [K, ...] of any action space."""
    envs.action_space.seed(int(rng.integers(2**31)))
    samples = [envs.action_space.sample() for _ in range(num_envs)]
    return spaces.map_nest(lambda *leaves: np.stack(leaves), *samples)


def collect(make_env, *, num_steps, num_envs=3, rng_seed=0, **options):
    """Return the rows [T+1, K, ...] of a random play."""
    envs = Environments(make_env, num_envs, seed=SEED, **options)
    rows = empty_rows(envs, num_steps + 1, num_envs)
    rng = np.random.default_rng(rng_seed)
    envs.reset(at(rows, 0))
    for t in range(1, num_steps + 1):
        envs.step(sample_actions(envs, num_envs, rng), at(rows, t))
    envs.close()
    return rows


def assert_same_rows(ours, theirs):
    for (name, a), (_, b) in zip(
        spaces.leaves(ours), spaces.leaves(theirs), strict=True
    ):
        assert a.tobytes() == b.tobytes(), f"{name}: {a} against {b}"


class Scripted(gym.Env):
    """Plays `script`: what each `step` returns, or an exception to raise.

    `None` entries, and all after the script, are ordinary steps.
    """

    def __init__(self, *script, reset=None, observation_space=None):
        self.observation_space = observation_space or gym.spaces.Dict(
            frame=gym.spaces.Box(0, 255, (2, 3), np.uint8),
            pair=gym.spaces.Tuple(
                [gym.spaces.Discrete(5), gym.spaces.Box(-1, 1, (7,), np.float32)]
            ),
        )
        self.action_space = gym.spaces.Discrete(3)
        self._script = script
        self._reset = reset
        self._steps = 0

    def good(self, **changes):
        self.observation_space.seed(0)
        observation = self.observation_space.sample()
        step = {
            "observation": observation,
            "reward": 1.0,
            "terminated": False,
            "truncated": False,
            "info": {},
        }
        for key, value in changes.items():
            if key in step:
                step[key] = value
            elif isinstance(value, str):  # "missing"
                del observation[key]
            else:
                observation[key] = value
        return tuple(step.values())

    def reset(self, *, seed=None, options=None):
        self._steps = 0
        if isinstance(self._reset, BaseException):
            raise self._reset
        return (self.good()[0], {}) if self._reset is None else self._reset

    def step(self, action):
        self._steps += 1
        script = dict(enumerate(self._script, start=1))
        entry = script.get(self._steps)
        if isinstance(entry, BaseException):
            raise entry
        return entry if isinstance(entry, tuple) else self.good(**(entry or {}))


def step_until_error(env, num_steps=5, **options):
    envs = Environments(lambda: env, 1, seed=SEED, first_env_id=5, **options)
    rows = empty_rows(envs, 1)
    envs.reset(rows)
    for _ in range(num_steps):
        envs.step(np.array([0]), rows)


# ------------------------------------------------------------------ Rows by arithmetic


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_every_row_follows_from_the_row_before(kind):
    rows = collect(
        lambda: CountingEnv(kind), num_steps=211, info_keys=(counting_env.INFO_KEY,)
    )
    check_rollout(rows)
    assert rows["done"].sum() > 60  # Many episodes were seen, and:
    assert rows["truncated"].any() == bool(kind & TRUNCATING)
    assert np.isnan(rows["info"]["half"]).any() and (rows["info"]["half"] > 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_rollouts_that_overlap_by_one_row_continue_each_other(kind):
    rows = collect(lambda: CountingEnv(kind), num_steps=65)
    for start in range(0, 65, 13):
        rollout = spaces.map_nest(lambda a: a[start : start + 14], rows)  # noqa: B023
        check_rollout(rollout, at(rows, start))


@pytest.mark.parametrize(
    "key",
    ["reward", "done", "truncated", "episode_return", "episode_step", "last_action"],
)
def test_check_rollout_notices_one_wrong_value(key):
    rows = collect(lambda: CountingEnv(TRUNCATING), num_steps=13)
    rows[key][7, 1] = ~rows[key][7, 1] if rows[key].dtype == bool else 2.5
    rows["action"] = rows["last_action"].copy()
    rows["action"][7, 1] = (rows["action"][7, 1] + 1) % 3  # As torn as the key.
    with pytest.raises(AssertionError, match="column 1"):
        check_rollout(rows)


def test_check_rollout_notices_a_splice_of_two_incarnations_at_every_row():
    make_env = counting_env.make_truncating
    first = collect(make_env, num_steps=19)
    second = collect(make_env, num_steps=19, incarnation=1)
    for t in range(1, 20):
        spliced = spaces.map_nest(
            lambda a, b: np.concatenate([a[:t], b[: 20 - t]]),  # noqa: B023
            first,
            second,
        )
        with pytest.raises(AssertionError, match=rf"row {t} "):
            check_rollout(spliced)


def test_check_rollout_notices_a_rollout_that_does_not_continue_the_last():
    rows = collect(counting_env.make, num_steps=13)
    with pytest.raises(AssertionError, match="row 0"):
        check_rollout(rows, at(rows, 3))


def test_first_row_is_done_with_zeros_and_the_zero_of_the_action_space():
    class Env(CountingEnv):
        def __init__(self):
            super().__init__()
            self.action_space = gym.spaces.Dict(
                gear=gym.spaces.Discrete(3, start=-1),
                knobs=gym.spaces.Tuple(
                    [
                        gym.spaces.Box(1, 2, (2,), np.float32),
                        gym.spaces.MultiDiscrete([3, 5], start=[2, 1]),
                    ]
                ),
            )

    envs = Environments(Env, 2, seed=SEED, info_keys=("half",))
    rows = empty_rows(envs, 2)
    envs.reset(rows)
    assert rows["done"].all() and not rows["truncated"].any()
    for key in ("reward", "episode_return", "episode_step"):
        assert not rows[key].any(), key
    assert all(np.isnan(array).all() for array in rows["info"].values())
    action = rows["last_action"]
    assert action["gear"].tolist() == [-1, -1]
    assert not action["knobs"][0].any()
    assert action["knobs"][1].tolist() == [[2, 1]] * 2


def test_truncation_takes_two_rows_and_the_second_executes_nothing():
    executed = []

    class Env(gym.Env):
        observation_space = gym.spaces.Box(0, 9, (1,), np.int32)
        action_space = gym.spaces.Discrete(5)

        def reset(self, *, seed=None, options=None):
            self._step = 0
            return np.array([0], np.int32), {"score": 5}

        def step(self, action):
            executed.append(action)
            self._step += 1
            info = {"score": 10 * self._step}
            return np.array([self._step], np.int32), 0.5, False, self._step == 2, info

    envs = Environments(Env, 1, seed=SEED, info_keys=("score",))
    rows = empty_rows(envs, 5, 1)
    envs.reset(at(rows, 0))
    for t, action in enumerate((1, 2, 3, 4), start=1):
        envs.step(np.array([action]), at(rows, t))

    def column(array):
        return [None if np.isnan(x) else x for x in array[:, 0].tolist()]

    assert executed == [1, 2, 4]
    assert column(rows["observation"][..., 0]) == [0, 1, 2, 0, 1]
    assert column(rows["last_action"]) == [0, 1, 2, 3, 4]
    assert column(rows["reward"]) == [0, 0.5, 0.5, 0, 0.5]
    assert column(rows["done"]) == [True, False, False, True, False]
    assert column(rows["truncated"]) == [False, False, True, False, False]
    assert column(rows["episode_return"]) == [0, 0.5, 1.0, 1.0, 0.5]
    assert column(rows["episode_step"]) == [0, 1, 2, 2, 1]
    assert column(rows["info"]["game_return"]) == [None, None, 1.0, None, None]
    assert column(rows["info"]["game_step"]) == [None, None, 2, None, None]
    assert column(rows["info"]["score"]) == [None, 10, 20, None, 10]


@pytest.mark.parametrize("kind", [TRUNCATING, LIVES | TRUNCATING])
def test_truncation_takes_one_row_where_it_is_done(kind):
    rows = collect(lambda: CountingEnv(kind), num_steps=97, truncation_is_done=True)
    check_rollout(rows, truncation_is_done=True)
    assert not rows["truncated"].any()
    before = (counting_env.decode(code) for code in rows["observation"][:-1, 0])
    ends = rows["done"][1:, 0]
    assert any(place.is_cut() and end for place, end in zip(before, ends, strict=True))


def test_time_limit_of_gymnasium_truncates_in_two_rows():
    rows = collect(
        lambda: gym.wrappers.TimeLimit(make("CartPole-v1"), 5), num_steps=12, num_envs=1
    )
    assert np.flatnonzero(rows["truncated"]).tolist() == [5, 11]
    assert np.flatnonzero(rows["done"]).tolist() == [0, 6, 12]
    assert rows["info"]["game_return"][[5, 11], 0].tolist() == [5, 5]


def test_termination_wins_over_truncation():
    env = Scripted({"terminated": True, "truncated": True})
    envs = Environments(lambda: env, 1, seed=SEED)
    rows = empty_rows(envs, 1)
    envs.reset(rows)
    envs.step(np.array([0]), rows)
    assert rows["done"][0] and not rows["truncated"][0]
    assert rows["info"]["game_return"][0] == 1.0
    envs.step(np.array([0]), rows)
    assert rows["episode_step"][0] == 1  # No row was spent on a reset.


@pytest.mark.parametrize("over", ["life", "truncated", "new_game"])
def test_life_lost_at_the_end_of_the_game_counts_the_game_once(over):
    """The last life may go with the time limit, or on the way to the next episode."""

    class Env(Scripted):
        def reset(self, *, seed=None, options=None):
            observation, info = super().reset()
            return observation, info | {"new_game": over == "new_game"}

    lost = {"terminated": True, "info": {"life_lost": True}}
    env = Env(None, lost | ({"truncated": True} if over == "truncated" else {}))
    envs = Environments(lambda: env, 1, seed=SEED)
    rows = empty_rows(envs, 1)
    envs.reset(rows)
    game_returns = []
    for _ in range(4):
        envs.step(np.array([0]), rows)
        game_returns.append(float(rows["info"]["game_return"][0]))
    expected = [np.nan] * 4 if over == "life" else [np.nan, 2, np.nan, 2]
    np.testing.assert_array_equal(game_returns, expected)


def test_actions_reach_the_environment_as_its_space_says():
    received = []

    class Env(CountingEnv):
        def __init__(self):
            super().__init__()
            self.action_space = gym.spaces.Dict(
                gear=gym.spaces.Discrete(3),
                wheel=gym.spaces.Tuple(
                    [
                        gym.spaces.Box(-1, 1, (2,), np.float32),
                        gym.spaces.MultiBinary(3),
                        gym.spaces.MultiDiscrete([3, 5]),
                    ]
                ),
            )

        def step(self, action):
            received.append(action)
            return super().step(0)

    envs = Environments(Env, 2, seed=SEED)
    rows = empty_rows(envs, 2)
    envs.reset(rows)
    actions = sample_actions(envs, 2, np.random.default_rng(0))
    expected = copy.deepcopy(actions)
    envs.step(actions, rows)
    assert_same_rows(rows["last_action"], expected)
    actions["wheel"][0][...] = 9.0  # The environment must not see its action change.
    for k, action in enumerate(received):
        assert type(action["gear"]) is int and action["gear"] == expected["gear"][k]
        for i in range(3):
            got, want = action["wheel"][i], expected["wheel"][i][k]
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)


def test_observations_of_a_kindred_dtype_are_cast():
    space = gym.spaces.Box(-9, 9, (2,), np.float32)
    entries = [{"observation": o} for o in ([1, 2], np.array([0.5, 2.5]), (3.0, 4.0))]
    env = Scripted(*entries, observation_space=space)
    envs = Environments(lambda: env, 1, seed=SEED)
    rows = empty_rows(envs, 1)
    envs.reset(rows)
    for expected in ([1, 2], [0.5, 2.5], [3, 4]):
        envs.step(np.array([0]), rows)
        assert rows["observation"][0].tolist() == expected


# ------------------------------------------------------------------ Errors


def frame(shape=(2, 3), dtype=np.uint8):
    return np.zeros(shape, dtype)


VIOLATIONS = {
    "float64 for uint8": (
        {"frame": frame(dtype=np.float64)},
        "'observation/frame' expected uint8[2,3], got float64[2,3]",
    ),
    "int64 for uint8": (
        {"frame": frame(dtype=np.int64)},
        "'observation/frame' expected uint8[2,3], got int64[2,3]",
    ),
    "wrong shape": (
        {"frame": frame((3, 2))},
        "'observation/frame' expected uint8[2,3], got uint8[3,2]",
    ),
    "shape that would broadcast": (
        {"frame": frame((3,))},
        "'observation/frame' expected uint8[2,3], got uint8[3]",
    ),
    "object array": (
        {"frame": frame(dtype=object)},
        "'observation/frame' expected uint8[2,3], got object[2,3]",
    ),
    "ragged list": (
        {"frame": [[1, 2, 3], [4]]},
        "'observation/frame' expected uint8[2,3], got a list of 2",
    ),
    "None": ({"frame": None}, "'observation/frame' expected uint8[2,3], got None"),
    "missing key": (
        {"frame": "missing"},
        "'observation' expected a dict with keys ['frame', 'pair'], "
        "got a dict with keys ['pair']",
    ),
    "surplus key": (
        {"sound": 1},
        "'observation' expected a dict with keys ['frame', 'pair'], "
        "got a dict with keys ['frame', 'pair', 'sound']",
    ),
    "array for dict": (
        {"observation": frame()},
        "'observation' expected a dict with keys ['frame', 'pair'], got uint8[2,3]",
    ),
    "tuple too short": (
        {"pair": (1,)},
        "'observation/pair' expected a tuple of 2, got a tuple of 1",
    ),
    "leaf in a tuple": (
        {"pair": (1, np.zeros(5, np.float32))},
        "'observation/pair/1' expected float32[7], got float32[5]",
    ),
    "float for Discrete": (
        {"pair": (1.5, np.zeros(7, np.float32))},
        "'observation/pair/0' expected int64[], got 1.5",
    ),
    "NaN reward": ({"reward": np.nan}, "'reward' expected a finite float32, got nan"),
    "infinite reward": (
        {"reward": np.float32(-np.inf)},
        "'reward' expected a finite float32, got -inf",
    ),
    "reward beyond float32": (
        {"reward": 1e39},
        "'reward' expected a finite float32, got 1e+39",
    ),
    "reward array": (
        {"reward": np.zeros(1)},
        "'reward' expected a number, got float64[1]",
    ),
    "no reward": ({"reward": None}, "'reward' expected a number, got None"),
    "flag array": (
        {"truncated": np.zeros(2, bool)},
        "'terminated, truncated' expected bools, got a tuple of 2",
    ),
    "info list": ({"info": []}, "'info' expected a dict, got a list of 0"),
    "info text": (
        {"info": {"score": "7"}},
        "'info/score' expected a number, got '7'",
    ),
    "info array": (
        {"info": {"score": np.zeros(2)}},
        "'info/score' expected a number, got float64[2]",
    ),
    "old API": (
        (0, 0.0, False, {}),
        "'step()' expected (observation, reward, terminated, truncated, info), "
        "got a tuple of 4",
    ),
}


@pytest.mark.parametrize(
    ("space", "values", "expected"),
    [
        (gym.spaces.Discrete(5, start=-2), [-2, 2, 3], "expected -2 to 2, got 3"),
        (
            gym.spaces.MultiDiscrete([5, 3]),
            [np.array([0, 2]), np.array([4, 0]), np.array([0, 3])],
            "expected [0, 0] to [4, 2], got [0, 3]",
        ),
    ],
    ids=["Discrete", "MultiDiscrete"],
)
def test_a_value_out_of_range_fails_the_environment_and_is_named(
    space, values, expected
):
    """It may be an accident: other than a wrong shape it does not end the run."""

    class Scripted(gym.Env):
        observation_space = gym.spaces.Dict(x=space)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.left = iter(values)
            return {"x": next(self.left)}, {}

        def step(self, action):
            return {"x": next(self.left)}, 0.0, False, False, {}

    envs = Environments(Scripted, 1, seed=3)
    rows = empty_rows(envs, 1)
    envs.reset(rows)
    envs.step(np.zeros(1, np.int64), rows)
    with pytest.raises(EnvError) as error:
        envs.step(np.zeros(1, np.int64), rows)
    assert "step 2: 'observation/x' " + expected in str(error.value)


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_a_broken_spec_is_named_with_env_step_expected_and_got(violation):
    entry, message = VIOLATIONS[violation]
    with pytest.raises(EnvSpecError) as caught:
        step_until_error(Scripted(None, entry), info_keys=("score",))
    assert str(caught.value) == f"env 5 (Scripted) step 2: {message}"


def test_reset_of_the_old_api_on_a_gymnasium_env_is_an_error():
    with pytest.raises(EnvSpecError, match=r"step 0: 'reset\(\)' expected"):
        step_until_error(Scripted(reset=frame()))


@pytest.mark.parametrize("error", [KeyError("boom"), SystemExit(3), GeneratorExit()])
def test_an_exception_in_step_names_env_step_and_seed_and_keeps_its_cause(error):
    seed = env_seed(SEED, 5, 0, 0)
    where = rf"^env 5 \(Scripted\) step 3 after reset\(seed={seed}\): "
    with pytest.raises(EnvError, match=where + type(error).__name__) as caught:
        step_until_error(Scripted(None, None, error))
    assert caught.value.__cause__ is error


def test_ctrl_c_is_no_error_of_the_environment():
    with pytest.raises(KeyboardInterrupt):
        step_until_error(Scripted(KeyboardInterrupt()))


def test_the_clock_is_set_anew_for_each_call_into_an_environment():
    """So that a limit is for one environment's call, however many there are."""
    clock, seen = np.zeros(1), []

    class Env(FaultEnv):
        def note(self, call):
            seen.append((call, clock[0]))

        def __init__(self):
            self.note("make")
            super().__init__(None, at_step=0)

        def reset(self, **options):
            self.note("reset")
            return super().reset(**options)

        def step(self, action):
            self.note("step")
            return (*super().step(action)[:2], True, False, {})

        def close(self):
            self.note("close")

    envs = Environments(Env, 3, seed=SEED, clock=clock, recycle_games=2)
    rows = empty_rows(envs, 3)
    envs.reset(rows)
    for _ in range(2):
        envs.step(np.zeros(3, np.int64), rows)
    envs.close()
    calls, times = zip(*seen)
    assert calls == (
        *("make",) * 3,
        *("reset",) * 3,
        *("step", "reset") * 3,
        *("step", "close", "make", "reset") * 3,
        *("close",) * 3,
    )
    assert 0 < times[0] and all(a < b for a, b in zip(times, times[1:])), times


def test_an_environment_without_memory_is_an_error_like_any_other():
    class Env(CountingEnv):
        def step(self, action):
            return np.zeros(2**50)

    with pytest.raises(EnvError, match=r"env 5 \(Env\) step 1 .*MemoryError: Unable"):
        step_until_error(Env())


def test_steps_in_messages_count_from_the_last_seeded_reset():
    """So that seed and step lead to the same place again."""
    over, boom = {"terminated": True}, OSError("boom")

    class Env(Scripted):
        def reset(self, *, seed=None, options=None):
            steps = self._steps  # One script for all games.
            result = super().reset()
            self._steps = steps
            return result

    with pytest.raises(EnvError, match=r"step 3 after"):
        step_until_error(Env(None, over, boom))
    with pytest.raises(EnvError, match=r"step 1 after"):
        step_until_error(Env(None, over, boom), seed_every_game=True)


def test_an_exception_in_reset_names_env_and_seed():
    with pytest.raises(EnvError, match=r"step 0 after reset\(seed=\d+\): OSError: no"):
        step_until_error(Scripted(reset=OSError("no")))


def test_environments_with_different_spaces_are_refused():
    made = iter([CountingEnv(), CountingEnv(), Scripted()])
    with pytest.raises(ValueError, match=r"env 2 \(Scripted\): expected observation_s"):
        Environments(lambda: next(made), 3, seed=SEED)


def test_environments_are_closed_when_making_one_of_them_fails():
    closed = []

    class Env(CountingEnv):
        def close(self):
            closed.append(self)

    made = iter([Env(), Env()])
    with pytest.raises(StopIteration):
        Environments(lambda: next(made), 3, seed=SEED)
    assert len(closed) == 2


def test_close_closes_every_environment_once_even_if_one_raises():
    closed = []

    class Env(CountingEnv):
        def close(self):
            closed.append(self)
            if len(closed) == 1:
                raise OSError("close failed")

    envs = Environments(Env, 3, seed=SEED)
    with pytest.raises(OSError, match="close failed"):
        envs.close()
    envs.close()
    assert len(closed) == 3


def test_step_before_reset_is_an_error():
    envs = Environments(counting_env.make, 1, seed=SEED)
    with pytest.raises(RuntimeError, match="before reset"):
        envs.step(np.array([0]), empty_rows(envs, 1))


# ------------------------------------------------------------------------------- Seeds


def test_seeds_differ_by_env_incarnation_game_and_run():
    seeds = [
        env_seed(seed, env_id, incarnation, game)
        for seed in range(3)
        for env_id in range(5)
        for incarnation in range(3)
        for game in range(7)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_env_seeds_are_the_same_on_every_machine():
    assert env_seed(11, 2, 1, 3) == 641037419


def test_first_game_is_reset_with_the_recorded_seed_and_later_ones_go_on():
    options = {"first_env_id": 17, "incarnation": 2}
    seeds = Environments(counting_env.make, 3, seed=SEED, **options).seeds()
    assert seeds == [env_seed(SEED, 17 + k, 2, 0) for k in range(3)]
    rows = collect(counting_env.make, num_steps=31, **options)
    for k in range(3):
        places = [counting_env.decode(code) for code in rows["observation"][:, k]]
        assert {place.seed for place in places} == {seeds[k]}
        assert places[-1].game > 3


@pytest.mark.parametrize("kind", KINDS)
def test_seed_every_game_seeds_full_games_but_not_lives(kind):
    rows = collect(lambda: CountingEnv(kind), num_steps=97, seed_every_game=True)
    check_rollout(rows, seed_every_game=True)
    for k in range(3):
        codes = at(rows["observation"], (slice(None), k))
        codes = codes["code"] if kind & NESTED else codes
        seeds = [counting_env.decode(code).seed for code in codes]
        games = list(dict.fromkeys(seeds))
        assert games == [env_seed(SEED, k, 0, game) for game in range(len(games))]
        finished = np.isfinite(rows["info"]["game_return"][:, k]).sum()
        assert len(games) - finished in (0, 1)  # The next may begin a row later.


def test_two_plays_with_one_seed_are_equal_and_with_another_are_not():
    def play(seed):
        envs = Environments(lambda: make("CartPole-v1"), 2, seed=seed)
        rows = empty_rows(envs, 2)
        envs.reset(rows)
        for _ in range(29):
            envs.step(np.array([0, 1]), rows)
        return rows["observation"].tolist()

    assert play(3) == play(3)
    assert play(3) != play(4)


# ----------------------------------------------------------------------- Recycling


class Leaky:
    """Makes environments of one kind; knows how many there were, and are."""

    def __init__(self, kind=0):
        self.kind, self.made, self.open, self.most_open = kind, 0, 0, 0

    def __call__(self):
        leaky = self

        class Env(CountingEnv):
            def close(self):
                leaky.open -= 1

        self.made += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        return Env(self.kind)


@pytest.mark.parametrize("kind", KINDS)
def test_recycling_after_every_game_shows_the_rows_of_a_seed_for_every_game(kind):
    """Rows of a new environment are ordinary ones, whatever way the game ended."""
    options = {"num_steps": 97, "num_envs": 3}
    seeded = collect(lambda: CountingEnv(kind), seed_every_game=True, **options)
    leaky = Leaky(kind)
    recycled = collect(leaky, recycle_games=1, **options)
    assert_same_rows(recycled, seeded)
    check_rollout(recycled, seed_every_game=True)
    games = np.isfinite(recycled["info"]["game_return"]).sum()
    cut = recycled["truncated"][-1].sum()  # These have not begun their next game yet.
    assert leaky.made == 3 + games - cut > 9
    assert leaky.open == 0 and leaky.most_open == 3


def test_an_environment_is_recycled_after_n_games_and_repeats_none():
    leaky = Leaky()
    rows = collect(leaky, num_steps=97, num_envs=2, recycle_games=3)
    for k in range(2):
        places = [counting_env.decode(code) for code in rows["observation"][:, k]]
        games = list(dict.fromkeys((place.seed, place.game) for place in places))
        assert len(games) > 7
        assert games == [
            (env_seed(SEED, k, 0, game - game % 3), game % 3)
            for game in range(len(games))
        ]
    assert leaky.made > 6 and leaky.most_open == 2


def test_recycled_environments_resume_exactly():
    options = {"seed": SEED, "seed_every_game": True, "recycle_games": 2}
    unbroken = Environments(counting_env.make_lives, 2, **options)
    rows = empty_rows(unbroken, 98, 2)
    unbroken.reset(at(rows, 0))
    for t in range(1, 98):
        unbroken.step(np.array([1, 2]), at(rows, t))
        if t == 50:
            state = unbroken.state()
    restored = Environments(counting_env.make_lives, 2, **options)
    restored.restore(state, at(rows, 50))
    again = empty_rows(restored, 2)
    for t in range(51, 98):
        restored.step(np.array([1, 2]), again)
        assert_same_rows(again, at(rows, t))


def test_an_environment_that_cannot_be_made_anew_is_an_error_and_all_are_closed():
    leaky = Leaky()

    def make_env():
        if leaky.made == 2:
            raise OSError("no licence left")
        return leaky()

    with pytest.raises(EnvError, match=r"env 0 \(Env\) step \d+ .*OSError: no lic"):
        collect(make_env, num_steps=97, num_envs=2, recycle_games=1)
    assert leaky.open == 1  # `collect` did not come to close it.

    envs = Environments(leaky, 2, seed=SEED, recycle_games=1)
    rows = empty_rows(envs, 2)
    envs.reset(rows)
    for _ in range(97):
        envs.step(np.array([0, 0]), rows)
    envs.close()
    envs.close()
    assert leaky.open == 1


def test_a_new_environment_with_other_spaces_is_permanent():
    made = itertools.chain([CountingEnv()], itertools.repeat(CountingEnv(NESTED)))
    with pytest.raises(EnvSpecError, match=r"expected observation_space Box.*got Dict"):
        collect(made.__next__, num_steps=97, num_envs=1, recycle_games=1)


# ----------------------------------------------------------------------- Exact resume


RESUMABLE = {
    "Catch": lambda: make("Catch"),
    "Memory": lambda: make("Memory"),
    "CartPole": lambda: make("CartPole-v1"),
    "time limit": lambda: gym.wrappers.TimeLimit(make("CartPole-v1"), 7),
    "continuous": lambda: make("Pendulum-v1"),
    "MinAtar": lambda: make("MinAtar/Breakout-v1"),
    "lives": counting_env.make_lives,
    "truncating": counting_env.make_truncating,
    "nested": counting_env.make_nested,
    "lives cut": lambda: CountingEnv(LIVES | TRUNCATING),
}


@pytest.mark.parametrize("name", RESUMABLE)
def test_restored_environments_continue_with_identical_rows(name):
    make_env, num_envs, num_steps = RESUMABLE[name], 2, 31
    options = {"seed": SEED, "first_env_id": 3, "seed_every_game": True}
    unbroken = Environments(make_env, num_envs, **options)
    rng = np.random.default_rng(5)
    actions = [sample_actions(unbroken, num_envs, rng) for _ in range(num_steps)]
    rows = empty_rows(unbroken, num_steps + 1, num_envs)
    states = []
    for t in range(num_steps + 1):
        if t == 0:
            unbroken.reset(at(rows, 0))
        else:
            unbroken.step(actions[t - 1], at(rows, t))
        states.append(json.dumps(unbroken.state()))

    for t in range(num_steps):  # Stop after every single row, go on for a few.
        restored = Environments(make_env, num_envs, **options)
        before = copy.deepcopy(at(rows, t))
        restored.restore(json.loads(states[t]), at(rows, t))
        assert_same_rows(at(rows, t), before)
        assert json.dumps(restored.state()) == states[t]
        continued = empty_rows(restored, num_envs)
        for later in range(t + 1, min(t + 14, num_steps + 1)):
            restored.step(actions[later - 1], continued)
            assert_same_rows(continued, at(rows, later))


def test_restore_of_an_environment_that_ignores_its_seed_says_so():
    class Env(CountingEnv):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=None if seed is None else next(FRESH))

    envs = Environments(Env, 1, seed=SEED, seed_every_game=True)
    rows = empty_rows(envs, 1)
    envs.reset(rows)
    state = envs.state()
    other = Environments(Env, 1, seed=SEED, seed_every_game=True)
    with pytest.raises(
        RuntimeError, match=r"environment 0 \(Env\) is not determ.*'obs"
    ):
        other.restore(state, rows)


@pytest.mark.parametrize("key", ["reward", "episode_return", "last_action"])
def test_restore_compares_every_key_of_the_row(key):
    options = {"seed": SEED, "seed_every_game": True}
    envs = Environments(lambda: make("Catch"), 2, **options)
    rows = empty_rows(envs, 2)
    envs.reset(rows)
    envs.step(np.array([2, 1]), rows)
    rows[key][1] += 1
    with pytest.raises(RuntimeError, match=f"environment 1 .*'{key}'"):
        Environments(lambda: make("Catch"), 2, **options).restore(envs.state(), rows)


def test_restore_notices_a_game_that_now_ends_earlier():
    options = {"seed": SEED, "seed_every_game": True}
    envs = Environments(lambda: make("Catch"), 1, **options)
    rows = empty_rows(envs, 1)
    envs.reset(rows)
    for _ in range(7):
        envs.step(np.array([1]), rows)

    def shorter():
        env = make("Catch")
        env.ROWS = 4
        env.observation_space = make("Catch").observation_space
        env._board = lambda: rows["observation"][0].copy()
        return env

    with pytest.raises(RuntimeError, match="after a replay of its game, game is not"):
        Environments(shorter, 1, **options).restore(envs.state(), rows)


def test_restore_into_other_seeds_names_both():
    envs = Environments(counting_env.make, 1, seed=SEED, seed_every_game=True)
    rows = empty_rows(envs, 1)
    envs.reset(rows)
    other = Environments(counting_env.make, 1, seed=12, seed_every_game=True)
    with pytest.raises(ValueError, match=f"{envs.seeds()[0]}.*{other.seeds()[0]}"):
        other.restore(envs.state(), rows)


def test_state_needs_a_seed_for_every_game():
    envs = Environments(counting_env.make, 1, seed=SEED)
    envs.reset(empty_rows(envs, 1))
    with pytest.raises(RuntimeError, match="seed_every_game"):
        envs.state()


# ------------------------------------------------------------------------- Classic gym


def classic(**attributes):
    """A class of classic gym's module, not Gymnasium's: spaces known by their names."""
    return types.SimpleNamespace(**attributes)


class Discrete:
    def __init__(self, n):
        self.n = n


class Box:
    def __init__(self, low, high, dtype):
        self.low, self.high, self.dtype = low, high, np.dtype(dtype)
        self.shape = low.shape


class OldEnv:
    """classic gym 0.21: `reset() -> obs`, 4-tuples, `seed()`."""

    metadata = None
    new_reset = new_step = False

    def __init__(self):
        self.observation_space = Box(np.zeros(2, "f"), np.full(2, 99, "f"), np.float32)
        self.action_space = Discrete(3)
        self._seed = 0

    def seed(self, seed=None):
        self._seed = seed

    def reset(self):
        self._steps = 0
        observation = self._observe()
        return (observation, {"reset": 1}) if self.new_reset else observation

    def step(self, action):
        self._steps += 1
        late, cut = self._steps == 5, self._steps == 3 and self._seed % 2 == 1
        info = {"TimeLimit.truncated": True} if cut else {}
        if self.new_step:
            return self._observe(), 1, late, cut, info
        return self._observe(), 1, late or cut, info

    def render(self, mode="human"):
        return mode

    def close(self):
        self.closed = True

    def _observe(self):
        return np.array([self._steps, self._seed % 97], np.float32)


class NewEnv(OldEnv):
    """classic gym 0.26: `reset(seed=) -> (obs, info)` and 5-tuples."""

    new_reset = new_step = True
    seed = None

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._seed = seed
        return super().reset()


class MiddleEnv(NewEnv):
    """classic gym 0.23: `reset(seed=) -> obs`, 4-tuples, a `seed` not to use."""

    new_reset = new_step = False

    def seed(self, seed=None):
        raise AssertionError("reset takes the seed")


@pytest.mark.parametrize("env_class", [OldEnv, MiddleEnv, NewEnv])
def test_classic_gym_of_every_generation_yields_the_same_rows(env_class):
    rows = collect(env_class, num_steps=12, num_envs=11)
    seeds = Environments(env_class, 11, seed=SEED).seeds()
    assert {seed % 2 for seed in seeds} == {0, 1}  # Both kinds of end:
    for k, seed in enumerate(seeds):
        assert set(rows["observation"][:, k, 1]) == {seed % 97}
        truncated = np.flatnonzero(rows["truncated"][:, k]).tolist()
        done = np.flatnonzero(rows["done"][:, k]).tolist()
        if seed % 2:
            assert (truncated, done) == ([3, 7, 11], [0, 4, 8, 12])
        else:
            assert (truncated, done) == ([], [0, 5, 10])


def test_classic_wrappers_with_kwargs_do_not_hide_how_to_seed():
    class Wrapper:
        def __init__(self, env):
            self.env = env
            self.unwrapped = env
            self.observation_space = env.observation_space
            self.action_space = env.action_space
            self.step = env.step
            self.seed = env.seed

        def reset(self, **kwargs):
            return self.env.reset(**kwargs)

    for env_class in (OldEnv, MiddleEnv, NewEnv):
        observation, _ = environment.adapt(Wrapper(env_class())).reset(seed=13)
        assert observation.tolist() == [0, 13]


def test_classic_env_that_only_takes_kwargs_is_seeded_through_them():
    class Wrapper:
        def __init__(self, env):
            self.env = env
            self.observation_space = env.observation_space
            self.action_space = env.action_space
            self.step = env.step

        def reset(self, **kwargs):
            return self.env.reset(**kwargs)

    observation, _ = environment.adapt(Wrapper(NewEnv())).reset(seed=13)
    assert observation.tolist() == [0, 13]


def test_classic_env_without_a_seed_warns_and_still_resets():
    class Env(OldEnv):
        seed = None

    with pytest.warns(UserWarning, match="Env takes no seed"):
        env = environment.adapt(Env())
    assert env.reset(seed=13)[0].tolist() == [0, 0]


def test_classic_env_renders_and_closes_and_shows_its_unwrapped_self():
    env = OldEnv()
    adapted = gym.Wrapper(environment.adapt(env))
    assert adapted.unwrapped is env
    assert adapted.render() == "rgb_array"
    adapted.close()
    assert env.closed


def test_classic_tuple_observation_is_not_mistaken_for_observation_and_info():
    observation = (1, {"x": 2})

    class Tuple:
        spaces = (Discrete(3), type("Dict", (), {"spaces": {"x": Discrete(5)}})())

    class Env(OldEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = Tuple()

        def reset(self):
            return observation

    assert environment.adapt(Env()).reset() == (observation, {})


def test_spaces_of_classic_gym_become_those_of_gymnasium():
    def old(space):
        """Return `space` with classes that Gymnasium does not know."""
        copied = classic(**vars(space))
        copied.shape, copied.dtype = space.shape, space.dtype
        if hasattr(space, "spaces"):
            subs = space.spaces
            copied.spaces = (
                {key: old(sub) for key, sub in subs.items()}
                if isinstance(subs, dict)
                else tuple(old(sub) for sub in subs)
            )
        return type(type(space).__name__, (), vars(copied))()

    space = gym.spaces.Dict(
        a=gym.spaces.Box(-1, 2, (2, 3), np.float32),
        b=gym.spaces.Tuple(
            [gym.spaces.Discrete(5, start=-2), gym.spaces.MultiBinary(7)]
        ),
        c=gym.spaces.MultiDiscrete([3, 5]),
    )
    converted = environment.convert_space(old(space))
    assert converted == space
    assert environment.convert_space(space) is space


def test_a_classic_space_is_known_by_what_it_is_derived_from():
    box = dict(low=[0, 0], high=[1, 2], shape=(2,), dtype="float32")
    for name in ("Box", "BoxSpace"):
        derived = type("Camera", (type(name, (), box),), {})
        converted = environment.convert_space(derived())
        assert converted == gym.spaces.Box(np.zeros(2), np.array([1, 2]), dtype="f4")


def test_a_classic_space_of_unknown_kind_is_named():
    with pytest.raises(ValueError, match="Graph.*expected Box, Discrete"):
        environment.convert_space(type("Graph", (), {"__repr__": lambda s: "Graph"})())


# -------------------------------------------------------------------------------- make


def test_make_knows_toys_gymnasium_ids_and_functions():
    assert type(make("Catch")).__name__ == "Catch"
    assert type(make("Memory")).__name__ == "Memory"
    assert make("CartPole-v1", render_mode="rgb_array").render_mode == "rgb_array"
    assert make("tests.counting_env:make").observation_space.shape == (11,)


def test_make_registers_atari_and_minatar_when_asked():
    pytest.importorskip("ale_py")
    assert make("PongNoFrameskip-v4").unwrapped.ale.lives() == 0
    pytest.importorskip("minatar")
    assert make("MinAtar/Breakout-v1").observation_space.shape == (10, 10, 4)


def test_minatar_forgets_the_last_action_of_the_last_game():
    pytest.importorskip("minatar")
    env = make("MinAtar/Breakout-v1")
    env.reset(seed=3)
    for _ in range(3):  # Sticky actions: one may not be taken.
        env.step(2)
    assert env.unwrapped.game.last_action != 0
    env.reset()
    assert env.unwrapped.game.last_action == 0


def test_minatar_renders_without_plotting_packages():
    pytest.importorskip("minatar")
    env = make("MinAtar/Breakout-v1", render_mode="rgb_array")
    env.reset(seed=3)
    image = env.render()
    assert image.shape == (160, 160, 3) and image.dtype == np.uint8
    black = ~image[::16, ::16].any(axis=-1)
    np.testing.assert_array_equal(black, ~env.unwrapped.game.state().any(axis=-1))


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Return a function that writes a module of the user's, importable by name."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def test_make_gives_a_function_the_keywords_it_accepts(user_module):
    user_module(
        "user_env",
        "from tests.counting_env import CountingEnv\n"
        "def plain():\n    return CountingEnv()\n"
        "def drawn(render_mode):\n"
        "    env = CountingEnv()\n    env.render_mode = render_mode\n    return env\n"
        "def everything(**kwargs):\n    return drawn(**kwargs)\n",
    )
    assert make("user_env:plain", render_mode="rgb_array").render_mode is None
    assert make("user_env:drawn", render_mode="rgb_array").render_mode == "rgb_array"
    assert make("user_env:everything", render_mode="human").render_mode == "human"


def test_make_takes_an_id_that_a_module_registers(user_module):
    user_module(
        "user_registers",
        "import gymnasium\n"
        "gymnasium.register('Counting-v0', 'tests.counting_env:CountingEnv')\n",
    )
    try:
        assert make("user_registers:Counting-v0").spec.id == "Counting-v0"
    finally:
        gym.registry.pop("Counting-v0")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartPol-v1", "--env CartPol-v1 is not known; .*Did you mean CartPole-v1"),
        ("CARTPOLE-V1", "Did you mean CartPole-v1"),
        ("catch", "Did you mean Catch"),
        ("PongNoFrameskip-v5", "Did you mean PongNoFrameskip-v4"),
        ("MinAtar/Breakot-v1", "Did you mean MinAtar/Breakout-v1"),
        ("no.such.module:make", "no module 'no' in the current directory"),
        ("tests.no_such:make", "no module 'tests.no_such'"),
        ("tests.counting_env:mak", "no function 'mak'.*Did you mean make"),
        ("tests.counting_env:LIVES", "expected a function, got 2"),
        ("fractions:Fraction", "Fraction has no reset, step, observation_space"),
        ("gym:CartPole-v1", r"pip install -e .\[classic\]"),
        ("ale-vector:Pong", "is for PolyBeast only: python -m polybeast --env ale-v"),
        ("envpool:Pong-v5", "is for PolyBeast only"),
        ("Nobody-v0", "Where another package registers it: package:ID"),
    ],
)
def test_make_of_an_unknown_name_says_what_to_do(name, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "gym", None)  # As if it were not installed.
    with pytest.raises(ValueError, match=message) as caught:
        make(name)
    assert "--env" in str(caught.value)


def test_make_says_which_package_registers_an_id(user_module):
    user_module(
        "userworld",
        "import gymnasium\n"
        "gymnasium.register('UserWorld-Door-v0', 'tests.counting_env:CountingEnv')\n",
    )
    try:
        with pytest.raises(ValueError, match="mean userworld:UserWorld-Door-v0?"):
            make("UserWorld-Door-v0")
        assert make("userworld:UserWorld-Door-v0").spec.id == "UserWorld-Door-v0"
    finally:
        gym.registry.pop("UserWorld-Door-v0")


def test_make_lets_an_error_inside_the_users_module_through(user_module):
    user_module("user_broken", "import not_installed_package\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_package"):
        make("user_broken:make")


def test_make_adapts_classic_environments(monkeypatch):
    made = []

    class Error(Exception):
        pass

    def fake_make(id, disable_env_checker=None, **kwargs):
        made.append((id, disable_env_checker, kwargs))
        if id != "Old-v0":
            raise Error("no such id")
        return OldEnv()

    error = classic(UnregisteredEnv=Error, DependencyNotInstalled=OSError)
    registry = classic(registry={"Old-v0": None, "Older-v0": None})
    fake = classic(make=fake_make, error=error, envs=registry)
    monkeypatch.setitem(sys.modules, "gym", fake)
    env = make("gym:Old-v0", render_mode="rgb_array")
    assert isinstance(env, environment.ClassicGym)
    assert made == [("Old-v0", True, {"render_mode": "rgb_array"})]
    with pytest.raises(ValueError, match="--env gym:Olt-v0 .*Did you mean gym:Old-v0"):
        make("gym:Olt-v0")


def test_environment_servers_can_import_it_without_torch():
    code = (
        "import sys, core.environment, core.check_environment\n"
        "assert 'torch' not in sys.modules and 'gym' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=DEADLINE_S
    )


# ----------------------------------------------------------------------------- --check


def run_check(*arguments, cwd=REPOSITORY):
    return subprocess.run(
        [sys.executable, "-m", "core.environment", "--check", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{cwd}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_check_prints_what_the_learner_sees_and_exits_0():
    result = run_check("tests.counting_env:make_nested", "--steps", "101")
    assert result.returncode == 0, result.stderr
    for text in (
        "CountingEnv (Gymnasium API)",
        "actions      Discrete(3)",
        "observation/pair/0 float32[2]",
        "last_action int64[]",
        "bytes",
        "info         half",
        "101 steps",
        "steps/s",
        "ok           tests.counting_env:make_nested obeys its own spec",
    ):
        assert text in result.stdout


def test_check_of_a_broken_environment_exits_78_with_a_line_each(tmp_path):
    (tmp_path / "broken.py").write_text(
        "import gymnasium as gym\n"
        "import numpy as np\n"
        "class Broken(gym.Env):\n"
        "    observation_space = gym.spaces.Box(0, 1, (3,), np.float32)\n"
        "    action_space = gym.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return np.full(3, 7, np.float32), {}\n"
        "    def step(self, action):\n"
        "        return np.zeros(3), 1.0, 0, False, {}\n"
    )
    result = run_check("broken:Broken", "--steps", "13", cwd=tmp_path)
    assert result.returncode == 78, result.stderr
    lines = [line for line in result.stdout.splitlines() if "VIOLATION" in line]
    assert len(lines) == 3
    assert (
        "step 0: 'observation' expected Box(0.0, 1.0, (3,), float32), got" in lines[0]
    )
    assert "step 1: 'observation' expected float32[3], got float64[3] (13" in lines[1]
    assert "step 1: 'terminated' expected a bool, got 0 (13 times)" in lines[2]


def test_check_of_an_unknown_environment_exits_2_with_the_near_misses():
    result = run_check("CartPol-v1")
    assert result.returncode == 2
    assert "Did you mean CartPole-v1" in result.stderr


class IgnoresSeed(CountingEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if seed is None else next(FRESH))


def broken(*script, **options):
    return lambda: Scripted(*script, **options)


BROKEN = {
    "seed": (IgnoresSeed, r"two plays from reset\(seed=1\) .* differ"),
    "shape": (broken({"frame": frame((3, 2))}), r"'observation/frame' expected uint8"),
    "bounds": (
        broken({"pair": (1, np.full(7, 2, np.float32))}),
        r"'observation/pair/1' expected Box.* got values in \[2.0, 2.0\]",
    ),
    "NaN": (
        broken({"pair": (1, np.full(7, np.nan, np.float32))}),
        r"got values in \[nan, nan\]",
    ),
    "Discrete range": (
        broken({"pair": (5, np.zeros(7, np.float32))}),
        r"'observation/pair/0' expected Discrete\(5\), got values in \[5, 5\]",
    ),
    "structure": (
        broken({"frame": "missing"}),
        r"\['observation/frame'\].*instead \[\]",
    ),
    "reward": (
        broken({"reward": math.inf}),
        "'reward' expected a finite number, got inf",
    ),
    "info": (broken({"info": None}), "'info' expected a dict, got None"),
    "truncated": (broken({"truncated": "no"}), "'truncated' expected a bool, got 'no'"),
    "step()": (broken((1, 2, 3, 4)), r"'step\(\)' expected .* got a tuple of 4"),
    "reset()": (broken(reset=frame()), r"'reset\(\)' expected .* got uint8\[2,3\]"),
    "raises": (broken(None, KeyError("boom")), "KeyError: 'boom'"),
}


@pytest.mark.parametrize("violation", BROKEN)
def test_check_names_the_violation(violation, monkeypatch, capsys):
    make_env, message = BROKEN[violation]
    monkeypatch.setattr(environment, "make", lambda name: make_env())
    assert check_environment.main(["--check", "broken", "--steps", "7"]) == 78
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "VIOLATION" in x)
    assert re.search(message, line), line


class Mission(CountingEnv):
    """As MiniGrid: a dict with a picture, a direction, and a text."""

    def __init__(self, **others):
        super().__init__(counting_env.NESTED)
        parts = {**self.observation_space.spaces, **others}
        self.observation_space = gym.spaces.Dict(parts)


@pytest.mark.parametrize(
    "part, said",
    [
        (gym.spaces.Text(5), "'observation/mission' is a Text; expected Box, Discrete"),
        (
            gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Text(5)]),
            "'observation/mission/1' is a Text",
        ),
        (gym.spaces.Box(0, 1, (0,)), "of shape (0,), which holds no values"),
    ],
)
def test_what_cannot_be_learned_is_no_violation_and_says_how_to_leave_it_out(
    part, said, monkeypatch, capsys
):
    monkeypatch.setattr(environment, "make", lambda name: Mission(mission=part))
    assert check_environment.main(["--check", "mission", "--steps", "7"]) == 78
    out = capsys.readouterr().out
    assert "VIOLATION" not in out
    line = out.splitlines()[-1]
    assert said in line
    call = re.search(r"gymnasium\.wrappers\.(FilterObservation\(.*\))$", line)
    env = gym.wrappers.FilterObservation(
        Mission(mission=part), list(CountingEnv(counting_env.NESTED).observation_space)
    )
    assert call[1] == f"FilterObservation(env, {list(env.observation_space)})"
    spaces.spec_of(env.observation_space)  # Without it, it can be learned.


def test_other_spaces_that_cannot_be_learned_are_named():
    with pytest.raises(spaces.UnlearnableSpace, match="'action' is a Text; .* Wrap"):
        spaces.row_spec(gym.spaces.Discrete(2), gym.spaces.Text(5), ())


def test_a_slow_check_says_how_far_it_has_come(monkeypatch, capsys):
    monkeypatch.setattr(check_environment, "SAY_S", 0.0)
    assert check_environment.main(["--check", "Catch", "--steps", "7"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "playing: 0 of 7 steps"
    assert lines[-1] == "measuring: 6 of 7 steps"
    assert "playing: 299 of 300 steps" in lines
