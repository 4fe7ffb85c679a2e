# SPDX-License-Identifier: Apache-2.0
"""core.environments.vector: the rows must be those of `Environments` on the same
environments.

Gymnasium's vector environments, of each autoreset mode, are compared on the counting
environment; ale_py's own vector environment frame by frame with the wrappers in Python.
"""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

import atari_wrappers
from core.environments.stepping import Environments
from core.environments.vector import from_vector_env
from core.errors import EnvError, EnvSpecError, EnvValueError, MakeError
from core.nests import leaves, map_nest
from tests import counting_env
from tests.counting_env import LIVES, TRUNCATING, CountingEnv, check_rollout
from tests.environments.helpers import KINDS, at

SEED = 11
K = 3
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode
MODES = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.value)

try:
    import envpool
except ImportError:
    envpool = None
needs_envpool = pytest.mark.skipif(
    envpool is None, reason="EnvPool is not installed: pip install envpool"
)


# ---------------------------------------------------------------------------- Helpers


def play(envs, *, num_steps, rng_seed=0, reset=True):
    """Return the rows [T+1, K, ...] of a random play, and close `envs`."""
    rows = map_nest(
        lambda spec: np.full((num_steps + 1, K, *spec.shape), 99, spec.dtype),
        envs.row_spec,
    )
    rng = np.random.default_rng(rng_seed)
    envs.reset(at(rows, 0))
    for t in range(1, num_steps + 1):
        envs.step(rng.integers(envs.action_space.n, size=K), at(rows, t))
    envs.close()
    return rows


def assert_same_rows(ours, theirs):
    pairs = zip(leaves(ours), leaves(theirs), strict=True)
    for (name, a), (_, b) in pairs:
        assert a.dtype == b.dtype
        for t, (row, expected) in enumerate(zip(a, b, strict=True)):
            assert row.tobytes() == expected.tobytes(), f"row {t} '{name}'"


class Tolerant(CountingEnv):
    """As a vector environment treats it: numpy's actions, and a step nobody sees.

    Where that step follows a truncation, the `reset` after it begins the same episode.
    """

    def reset(self, *, seed=None, options=None):
        if seed is None and not self._ended:
            assert self._place.step == 1, self._place
            self._place = self._place._replace(step=0)
            self._ended = False
            return counting_env.encode(self._place), {}
        return super().reset(seed=seed, options=options)

    def step(self, action):
        return super().step(int(action))


@pytest.fixture(autouse=True)
def episodes_of_two_steps_at_least(monkeypatch):
    # So that no step that nobody sees ends an episode.
    monkeypatch.setattr(
        counting_env.Place,
        "length",
        lambda place: 2 + (place.seed + 3 * place.game + 5 * place.life) % 5,
    )


def sync(make_env, mode, **options):
    return SyncVectorEnv([make_env] * K, autoreset_mode=mode, **options)


# ------------------------------------------------------------ Gymnasium's vector envs


@MODES
@pytest.mark.parametrize("kind", KINDS)
def test_rows_equal_those_of_environments(mode, kind):
    options = dict(
        seed=SEED, first_env_id=5, incarnation=2, info_keys=(counting_env.INFO_KEY,)
    )
    ours = from_vector_env(sync(lambda: Tolerant(kind), mode), **options)
    theirs = Environments(lambda: CountingEnv(kind), K, **options)
    assert ours.seeds() == theirs.seeds()
    assert ours.row_spec == theirs.row_spec
    rows = play(ours, num_steps=97)
    assert_same_rows(rows, play(theirs, num_steps=97))
    check_rollout(rows)
    assert rows["done"].sum() > 20
    assert (rows["truncated"].sum() > 5) == bool(kind & TRUNCATING)


@MODES
def test_truncation_takes_one_row_where_it_is_done(mode):
    kind = LIVES | TRUNCATING
    options = dict(seed=SEED, truncation_is_done=True)
    ours = from_vector_env(sync(lambda: Tolerant(kind), mode), **options)
    theirs = Environments(lambda: CountingEnv(kind), K, **options)
    rows = play(ours, num_steps=61)
    assert_same_rows(rows, play(theirs, num_steps=61))
    check_rollout(rows, truncation_is_done=True)
    assert not rows["truncated"].any()


@MODES
def test_a_vector_env_may_reuse_its_arrays(mode):
    vector = sync(lambda: Tolerant(TRUNCATING), mode, copy=False)
    rows = play(from_vector_env(vector, seed=SEED), num_steps=61)
    check_rollout(rows)


@MODES
def test_environments_may_live_in_processes(mode):
    kind = LIVES | TRUNCATING
    vector = AsyncVectorEnv(
        [lambda: Tolerant(kind)] * K, autoreset_mode=mode, context="fork"
    )
    ours = play(from_vector_env(vector, seed=SEED), num_steps=61)
    theirs = play(Environments(lambda: CountingEnv(kind), K, seed=SEED), num_steps=61)
    assert_same_rows(ours, theirs)
    assert ours["done"].sum() > 20 and ours["truncated"].sum() > 5


class NewGame(Tolerant):
    """Says after every other lost life that the frames since then ended the game."""

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        return observation, {**info, "new_game": self._place.life == 2}


@MODES
def test_a_reset_can_tell_that_the_game_is_over(mode):
    ours = play(
        from_vector_env(sync(lambda: NewGame(LIVES), mode), seed=SEED), num_steps=61
    )
    theirs = play(Environments(lambda: NewGame(LIVES), K, seed=SEED), num_steps=61)
    assert_same_rows(ours, theirs)
    games = np.isfinite(ours["info"]["game_step"])
    assert games.sum() > 10  # Two per three lives.


class Numpy(VectorEnv):
    """A vector environment of its own making: arrays, no masks, counts its steps.

    Episodes end at step `length`, and are terminated unless `truncates`.
    """

    def __init__(self, mode, *, length=3, truncates=False, **changes):
        self.num_envs = K
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = gym.spaces.Box(0, 99, (2,), np.float32)
        self.single_action_space = gym.spaces.Discrete(5)
        self._length, self._truncates, self._changes = length, truncates, changes
        self.seed = None

    def _observations(self):
        return np.repeat(self._step[:, None], 2, 1).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.seed = seed
        mask = (options or {}).get("reset_mask", np.ones(K, bool))
        self._step = np.where(mask, 0, getattr(self, "_step", 0))
        return self._observations(), {}

    def step(self, actions):
        self._step = self._step + 1
        ended = self._step == self._length
        observations, infos = self._observations(), {"double": 2.0 * self._step}
        if self.metadata["autoreset_mode"] is SAME_STEP and ended.any():
            infos["final_obs"] = observations
            infos["final_info"] = {"double": infos["double"]}
            self._step = np.where(ended, 0, self._step)
            infos["double"] = 2.0 * self._step
            observations = self._observations()
        none = np.zeros(K, bool)
        terminated, truncated = (none, ended) if self._truncates else (ended, none)
        result = dict(
            observations=observations,
            rewards=actions.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            infos=infos,
        )
        for key, value in self._changes.items():
            if key in result:
                result[key] = value
            elif value is None:
                infos.pop(key, None)
        if "raises" in self._changes:
            raise self._changes["raises"]
        return tuple(result.values())


def test_a_vector_env_of_ones_own_that_resets_in_the_same_step():
    vector = Numpy(SAME_STEP)
    envs = from_vector_env(vector, seed=SEED, info_keys=("double", "absent"))
    rows = play(envs, num_steps=7)
    assert vector.seed == envs.seeds()[0]
    np.testing.assert_array_equal(
        rows["observation"][:, 0, 0], [0, 1, 2, 0, 1, 2, 0, 1]
    )
    np.testing.assert_array_equal(rows["done"][:, 1], [1, 0, 0, 1, 0, 0, 1, 0])
    expected = [np.nan, 2, 4, 6, 2, 4, 6, 2]  # The transition's, not the reset's.
    np.testing.assert_array_equal(rows["info"]["double"][:, 2], expected)
    assert np.isnan(rows["info"]["absent"]).all()


@pytest.mark.parametrize("mode, truncates", [(SAME_STEP, False), (DISABLED, True)])
def test_a_vector_env_may_write_into_its_arguments(mode, truncates):
    class Writing(Numpy):
        def reset(self, *, seed=None, options=None):
            result = super().reset(seed=seed, options=options)
            if options:
                options["reset_mask"][...] = False
            return result

        def step(self, actions):
            result = super().step(actions)
            actions -= 5
            return result

    ours, expected = (
        play(from_vector_env(vector(mode, truncates=truncates), seed=SEED), num_steps=7)
        for vector in (Writing, Numpy)
    )
    assert_same_rows(ours, expected)


def test_termination_wins_over_truncation():
    both = dict(terminated=np.ones(K, bool), truncated=np.ones(K, bool))
    rows = play(from_vector_env(Numpy(SAME_STEP, **both), seed=SEED), num_steps=3)
    assert rows["done"].all() and not rows["truncated"].any()


def test_a_vector_env_of_ones_own_that_never_resets_by_itself():
    rows = play(
        from_vector_env(Numpy(DISABLED, truncates=True), seed=SEED), num_steps=7
    )
    np.testing.assert_array_equal(
        rows["observation"][:, 0, 0], [0, 1, 2, 3, 0, 1, 2, 3]
    )
    np.testing.assert_array_equal(rows["done"][:, 1], [1, 0, 0, 0, 1, 0, 0, 0])
    np.testing.assert_array_equal(rows["truncated"][:, 1], [0, 0, 0, 1, 0, 0, 0, 1])
    assert (rows["reward"][4] == 0).all()


def test_one_that_resets_too_late_is_refused():
    with pytest.raises(ValueError, match="Numpy resets an ended episode in its next"):
        from_vector_env(Numpy(NEXT_STEP), seed=SEED)


def test_a_vector_env_must_tell_its_autoreset_mode():
    with pytest.raises(ValueError, match=r"autoreset_mode'\], got None"):
        from_vector_env(Numpy(None), seed=SEED)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(truncates=True), "is not known to reset single environments"),
        (dict(truncates=True, final_obs=None), r"expected info\['final_obs'\], got"),
        (dict(rewards=np.zeros((K, 1))), r"'rewards' expected shape \(3,\), got"),
        (dict(terminated=False), r"'terminations' expected shape \(3,\), got"),
        (dict(truncated=[False]), r"'truncations' expected shape \(3,\), got"),
    ],
)
def test_a_broken_batch_is_named(changes, message):
    envs = from_vector_env(Numpy(SAME_STEP, **changes), seed=SEED, first_env_id=6)
    with pytest.raises(
        EnvSpecError, match=r"envs 6 to 8 \(Numpy\) step \d: .*" + message
    ):
        play(envs, num_steps=3)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(rewards=np.array([0, np.nan, 0])), EnvValueError, "'reward' expected"),
        (dict(observations=np.zeros((K, 5), "f4")), EnvSpecError, "'observation' exp"),
    ],
)
def test_a_broken_environment_is_named(changes, error, message):
    envs = from_vector_env(Numpy(SAME_STEP, **changes), seed=SEED, first_env_id=6)
    with pytest.raises(error, match=r"env [67] \(Numpy\) step 1: " + message):
        play(envs, num_steps=1)


def test_environments_of_a_vector_cannot_be_recycled():
    with pytest.raises(MakeError, match="recycle_games is 2.*Leave --recycle_games"):
        from_vector_env(Numpy(SAME_STEP), seed=SEED, recycle_games=2)


def test_what_a_vector_env_raises_is_an_error_of_all_its_environments():
    fault = KeyError("coin")
    envs = from_vector_env(Numpy(SAME_STEP, raises=fault), seed=SEED, first_env_id=6)
    with pytest.raises(
        EnvError, match=r"envs 6 to 8 \(Numpy\) step 1: KeyError: 'coin'"
    ) as e:
        play(envs, num_steps=1)
    assert e.value.__cause__ is fault


def test_ctrl_c_is_no_error_of_the_environments():
    envs = from_vector_env(Numpy(SAME_STEP, raises=KeyboardInterrupt()), seed=SEED)
    with pytest.raises(KeyboardInterrupt):
        play(envs, num_steps=1)


def test_the_clock_runs_while_the_vector_env_works():
    clock, seen = np.zeros(1), []

    class Watching(Numpy):
        def reset(self, **options):
            seen.append(clock[0])
            return super().reset(**options)

        def step(self, actions):
            seen.append(clock[0])
            return super().step(actions)

    envs = from_vector_env(Watching(SAME_STEP), seed=SEED, clock=clock)
    rows = envs.zero_rows()
    clock[0] = 0.0
    envs.reset(rows)
    clock[0] = 0.0
    envs.step(np.zeros(K, np.int64), rows)
    assert len(seen) == 2 and all(seen)


def test_step_before_reset_is_an_error():
    envs = from_vector_env(Numpy(SAME_STEP), seed=SEED)
    with pytest.raises(RuntimeError, match="before reset"):
        envs.step(np.zeros(K, np.int64), None)


def test_closing_closes_the_vector_env_and_may_be_repeated():
    vector = Numpy(SAME_STEP)
    envs = from_vector_env(vector, seed=SEED)
    envs.close()
    envs.close()
    assert vector.closed


def test_ale_pys_own_vector_env_can_be_brought_along():
    from ale_py.vector_env import AtariVectorEnv

    vector = AtariVectorEnv(
        "breakout",
        K,
        num_threads=1,
        autoreset_mode=SAME_STEP,
        noop_max=0,
        use_fire_reset=False,
        reward_clipping=False,
        max_num_frames_per_episode=640,
    )
    ours = play(from_vector_env(vector, seed=SEED, info_keys=("lives",)), num_steps=331)
    protocol = atari_wrappers.PROTOCOLS["impala"] | dict(
        noop_max=0, fire_reset=False, episodic_life=False, max_frames=640
    )
    wrappers = Environments(
        lambda: atari_wrappers.make_atari("BreakoutNoFrameskip-v4", **protocol),
        K,
        seed=SEED,
        info_keys=("lives",),
    )
    theirs = play(wrappers, num_steps=331)
    # Its frame stack begins with black pictures, ours with the first one. And its time
    # limit leaves the last frame out of the final picture.
    for rows in (ours, theirs):
        rows["observation"] = rows["observation"][:, :, -1]
        rows["observation"][theirs["truncated"]] = 0
    ends = np.isfinite(theirs["info"]["game_step"])
    theirs["info"]["lives"][ends] = np.nan
    assert_same_rows(ours, theirs)
    assert ours["truncated"].any() and np.isfinite(ours["info"]["game_step"]).any()


# ---------------------------------------------------------------------------- EnvPool


def envpool_rows(env_id, *, num_steps, info_keys=()):
    vector = envpool.make_gymnasium(env_id, num_envs=K, num_threads=1, seed=SEED)
    envs = from_vector_env(vector, seed=SEED, info_keys=info_keys)
    return play(envs, num_steps=num_steps)


@needs_envpool
def test_a_truncated_episode_of_envpool_shows_its_final_observation():
    # Random play never terminates an episode of this environment.
    rows = envpool_rows("MountainCar-v0", num_steps=413, info_keys=("elapsed_step",))
    ends = np.flatnonzero(rows["truncated"][:, 0])
    np.testing.assert_array_equal(ends, [200, 401])
    np.testing.assert_array_equal(np.flatnonzero(rows["done"][:, 1]), [0, 201, 402])
    position = rows["observation"][:, 0, 0]
    speed = rows["observation"][:, 0, 1]
    assert (speed[[0, 201, 402]] == 0).all()  # A new episode begins at rest.
    after = np.delete(np.arange(1, 414), [200, 401])  # All rows but those.
    np.testing.assert_allclose(
        position[after], position[after - 1] + speed[after], atol=1e-6
    )
    np.testing.assert_array_equal(rows["info"]["game_return"][ends, 0], [-200, -200])
    np.testing.assert_array_equal(rows["reward"][201], 0)


@needs_envpool
def test_an_episode_of_envpool_that_terminates_is_reset_in_its_row():
    rows = envpool_rows("CartPole-v1", num_steps=211)
    assert rows["done"].sum() > 10 and not rows["truncated"].any()
    starts = rows["observation"][rows["done"]]
    assert (np.abs(starts) <= 0.05).all()  # Where CartPole begins.
    assert (rows["reward"][1:] == 1).all()
    lengths = rows["info"]["game_step"][np.isfinite(rows["info"]["game_step"])]
    assert lengths.min() >= 8  # An episode that is over would have one of 1.
