# SPDX-License-Identifier: Apache-2.0
"""core.environments.stepping: rows by arithmetic, seeds, recycling, exact resume."""

import contextlib
import copy
import itertools
import json

import gymnasium as gym
import numpy as np
import pytest

from core.environments.make import make
from core.environments.stepping import Environments, env_seed
from core.errors import EnvError, EnvSpecError
from core.nests import map_nest
from tests import counting_env
from tests.counting_env import LIVES, NESTED, TRUNCATING, CountingEnv, check_rollout
from tests.environments.helpers import (
    KINDS,
    SEED,
    Scripted,
    assert_same_rows,
    at,
    collect,
    empty_rows,
    frame,
    sample_actions,
    step_until_error,
)
from tests.fault_env import FaultEnv

FRESH = itertools.count()  # Numbers never seen before.


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_every_row_follows_from_the_row_before(kind):
    rows = collect(
        lambda: CountingEnv(kind), num_steps=211, info_keys=(counting_env.INFO_KEY,)
    )
    check_rollout(rows)
    assert rows["done"].sum() > 60  # Many episodes were seen, and:
    assert rows["truncated"].any() == bool(kind & TRUNCATING)
    assert np.isnan(rows["info"]["half"]).any() and (rows["info"]["half"] > 0).any()


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
        spliced = map_nest(
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


def test_first_row_is_done_with_zeros_and_the_first_action_of_the_space():
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
    assert action["knobs"][0].tolist() == [[1, 1]] * 2  # Nearest to zero.
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
            info = {"score": 10 * self._step - 10}
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
    assert column(rows["info"]["score"]) == [None, 0, 10, None, 0]


@pytest.mark.parametrize("kind", [TRUNCATING, LIVES | TRUNCATING])
def test_truncation_takes_one_row_where_it_is_done(kind):
    rows = collect(lambda: CountingEnv(kind), num_steps=97, truncation_is_done=True)
    check_rollout(rows, truncation_is_done=True)
    assert not rows["truncated"].any()
    before = (counting_env.decode(code) for code in rows["observation"][:-1, 0])
    ends = rows["done"][1:, 0]
    assert any(place.is_cut() and end for place, end in zip(before, ends, strict=True))


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


@pytest.mark.parametrize(
    "option, value, games",
    [
        ("seed_every_game", False, [0, None]),
        ("seed_every_game", True, [0, None, 1]),
        ("recycle_games", 1, [0, None, 1]),
        ("recycle_games", 2, [0, None]),
    ],
)
def test_a_game_that_is_over_after_a_lost_life_ends_as_others_do(option, value, games):
    """The next game gets the seed, or the new environment, that is due."""
    seeds = []

    class Env(Scripted):
        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            return super().reset()[0], {"new_game": True}

    lost = {"terminated": True, "info": {"life_lost": True}}
    made = (Env(lost) for _ in itertools.count())
    play(Environments(lambda: next(made), 1, seed=SEED, **{option: value}), 1)
    assert seeds == [None if g is None else env_seed(SEED, 0, 0, g) for g in games]


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


@pytest.mark.parametrize("result", [frame(), (frame(),), (frame(), [])])
def test_a_reset_that_returns_no_observation_and_dict_is_an_error(result):
    """In the old API of gym it returns the observation alone."""
    with pytest.raises(EnvSpecError, match=r"step 0: 'reset\(\)' expected"):
        step_until_error(Scripted(reset=result))


@pytest.mark.parametrize("error", [KeyError("boom"), SystemExit(3), GeneratorExit()])
def test_an_exception_in_step_names_env_step_and_seed_and_keeps_its_cause(error):
    seed = env_seed(SEED, 5, 0, 0)
    where = rf"^env 5 \(Scripted\) step 3 after reset\(seed={seed}\): "
    with pytest.raises(EnvError, match=where + type(error).__name__) as caught:
        step_until_error(Scripted(None, None, error))
    assert caught.value.__cause__ is error


def test_a_package_that_an_environment_misses_later_is_one_line():
    """Gymnasium imports pygame when a picture is asked for."""
    error = gym.error.DependencyNotInstalled("run `pip install pygame-ce`")
    with pytest.raises(EnvSpecError) as caught:
        step_until_error(Scripted(None, error))
    assert str(caught.value) == "env 5 (Scripted): run `pip install pygame-ce`"


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

        def render(self):
            self.note("render")

        def close(self):
            self.note("close")

    envs = Environments(Env, 3, seed=SEED, clock=clock, recycle_games=2)
    rows = empty_rows(envs, 3)
    envs.reset(rows)
    envs.render()
    for _ in range(2):
        envs.step(np.zeros(3, np.int64), rows)
    envs.close()
    calls, times = zip(*seen)
    assert calls == (
        *("make",) * 3,
        *("reset",) * 3,
        "render",
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


@pytest.mark.parametrize(
    "space, said",
    [
        (gym.spaces.Box(-1, 1, (0,)), "'action' is .* which holds no values"),
        (gym.spaces.Dict(), r"'action' is Dict\(\), which has no parts"),
    ],
    ids=str,
)
def test_actions_without_values_are_refused(space, said):
    class Env(CountingEnv):
        def __init__(self):
            super().__init__()
            self.action_space = space

    with pytest.raises(ValueError, match=said):
        Environments(Env, 1, seed=SEED)


def test_environments_with_different_spaces_are_refused():
    made = iter([CountingEnv(), CountingEnv(), Scripted()])
    with pytest.raises(EnvSpecError, match=r"env 2 \(Scripted\): expected observatio"):
        Environments(lambda: next(made), 3, seed=SEED)


def test_one_environment_in_two_places_is_refused():
    one = CountingEnv()
    with pytest.raises(EnvSpecError, match="create_env returned the same CountingEnv"):
        Environments(lambda: one, 2, seed=SEED)
    # A new one may take the place of the old one, even if it is the same object.
    with contextlib.closing(
        Environments(lambda: one, 1, seed=SEED, recycle_games=1)
    ) as envs:
        rows = envs.zero_rows()
        envs.reset(rows)
        while not rows["info"]["game_step"][0] > 0:
            envs.step(np.array([0]), rows)
    other = CountingEnv()
    made = itertools.chain([one], itertools.repeat(other))
    envs = Environments(lambda: next(made), 2, seed=SEED, recycle_games=1)
    with pytest.raises(EnvError, match="env 0 .* returned the same CountingEnv"):
        play(envs, 20)


def play(envs, num_steps):
    rows = envs.zero_rows()
    envs.reset(rows)
    for _ in range(num_steps):
        envs.step(np.zeros(len(envs.envs), np.int64), rows)


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


def test_a_close_that_fails_between_two_games_names_its_environment():
    class Env(CountingEnv):
        def close(self):
            raise OSError("the simulator does not answer")

    with pytest.raises(EnvError, match=r"env 0 \(Env\) step \d+ .*OSError: the sim"):
        collect(Env, num_steps=97, num_envs=2, recycle_games=1)


def test_a_new_environment_with_other_spaces_is_permanent():
    made = itertools.chain([CountingEnv()], itertools.repeat(CountingEnv(NESTED)))
    with pytest.raises(EnvSpecError, match=r"expected observation_space Box.*got Dict"):
        collect(made.__next__, num_steps=97, num_envs=1, recycle_games=1)


# ----------------------------------------------------------------------- Exact resume


class Halving(gym.ActionWrapper):
    """Writes into the actions that it gets."""

    def action(self, action):
        action /= 2
        return action


RESUMABLE = {
    "Catch": lambda: make("Catch"),
    "Memory": lambda: make("Memory"),
    "CartPole": lambda: make("CartPole-v1"),
    "time limit": lambda: gym.wrappers.TimeLimit(make("CartPole-v1"), 7),
    "continuous": lambda: make("Pendulum-v1"),
    "writes into actions": lambda: Halving(make("Pendulum-v1")),
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


def test_a_game_with_too_many_actions_to_be_saved_is_followed_by_a_new_one():
    options = {"seed": SEED, "seed_every_game": True, "max_actions": 5}
    envs = Environments(counting_env.make, 2, **options)
    rows = empty_rows(envs, 2)
    envs.reset(rows)
    while not rows["episode_step"][0] > 5 >= rows["episode_step"][1] > 0:
        envs.step(np.array([1, 2]), rows)
    before = copy.deepcopy(rows)
    restored = Environments(counting_env.make, 2, **options)
    state = json.loads(json.dumps(envs.state()))
    assert restored.restore(state, rows) == 1
    assert_same_rows(at(rows, 1), at(before, 1))
    game = envs.state()["envs"][0]["game"] + 1
    seed = env_seed(SEED, 0, 0, game)
    assert counting_env.decode(rows["observation"][0]).seed == seed
    assert rows["done"][0] and rows["reward"][0] == rows["episode_return"][0] == 0
    assert restored.state()["envs"][0] == {
        **{"game": game, "episode_return": 0.0, "episode_step": 0},
        **{"game_return": 0.0, "game_step": 0, "actions": []},
    }
    restored.step(np.array([1, 2]), rows)
    assert rows["episode_step"].tolist() == [1, before["episode_step"][1] + 1]


def test_the_limit_of_saved_actions_is_of_their_numbers():
    class Env(Scripted):
        def __init__(self):
            super().__init__()
            self.action_space = gym.spaces.MultiDiscrete([3, 5])

        def step(self, action):
            action[...] = 0
            return super().step(action)

    envs = Environments(Env, 1, seed=SEED, seed_every_game=True, max_actions=5)
    rows = envs.zero_rows()
    envs.reset(rows)
    for saved in ([[[2, 1]]], [[[2, 1]], [[2, 1]]], None):
        envs.step(np.array([[2, 1]]), rows)
        assert envs.state()["envs"][0]["actions"] == saved


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

    said = "other options than before: after a replay of its game, game differs"
    with pytest.raises(RuntimeError, match=said):
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
    with pytest.raises(RuntimeError, match="state needs seed_every_game"):
        envs.state()
    with pytest.raises(RuntimeError, match="restore needs seed_every_game"):
        envs.restore({"seeds": envs.seeds(), "envs": []}, envs.zero_rows())
    not_reset = Environments(counting_env.make, 1, seed=SEED, seed_every_game=True)
    with pytest.raises(RuntimeError, match="a reset before"):
        not_reset.state()
