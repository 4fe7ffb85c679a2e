# SPDX-License-Identifier: Apache-2.0
"""core.vector_env: the rows must be those of `Environments` on the same environments.

Gymnasium's vector environments, of each autoreset mode, are compared on the counting
environment; Atari games frame by frame with the wrappers in Python.
"""

import collections
import json
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

import atari_wrappers
import core.flags
import polybeast_env
from core import checkpoint, metrics, spaces, vector_env
from core.environment import EnvError, Environments, EnvSpecError
from core.supervise import Exit
from core.vector_env import from_vector_env, make_vector
from tests import counting_env
from tests.counting_env import LIVES, NESTED, TRUNCATING, CountingEnv, check_rollout

SEED = 11
K = 3
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode
MODES = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.value)
KINDS = [0, TRUNCATING, LIVES, LIVES | TRUNCATING, NESTED | TRUNCATING]

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
    rows = spaces.map_nest(
        lambda spec: np.full((num_steps + 1, K, *spec.shape), 99, spec.dtype),
        envs.row_spec,
    )
    rng = np.random.default_rng(rng_seed)
    envs.reset(at(rows, 0))
    for t in range(1, num_steps + 1):
        envs.step(rng.integers(envs.action_space.n, size=K), at(rows, t))
    envs.close()
    return rows


def at(rows, t):
    return spaces.map_nest(lambda array: array[t], rows)


def assert_same_rows(ours, theirs):
    pairs = zip(spaces.leaves(ours), spaces.leaves(theirs), strict=True)
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
    "changes, message",
    [
        (dict(rewards=np.array([0, np.nan, 0])), "'reward' expected a finite float32"),
        (dict(observations=np.zeros((K, 5), np.float32)), r"'observation' expected"),
    ],
)
def test_a_broken_environment_is_named(changes, message):
    envs = from_vector_env(Numpy(SAME_STEP, **changes), seed=SEED, first_env_id=6)
    with pytest.raises(EnvSpecError, match=r"env [67] \(Numpy\) step 1: " + message):
        play(envs, num_steps=1)


def test_what_a_vector_env_raises_is_an_error_of_all_its_environments():
    fault = KeyError("coin")
    envs = from_vector_env(Numpy(SAME_STEP, raises=fault), seed=SEED, first_env_id=6)
    with pytest.raises(
        EnvError, match=r"envs 6 to 8 \(Numpy\) step 1: KeyError: 'coin'"
    ) as e:
        play(envs, num_steps=1)
    assert e.value.__cause__ is fault


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


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_ale_pys_own_vector_env_can_be_brought_along(mode):
    from ale_py.vector_env import AtariVectorEnv

    vector = AtariVectorEnv(
        "breakout",
        K,
        num_threads=1,
        autoreset_mode=mode,
        noop_max=0,
        use_fire_reset=False,
        reward_clipping=False,
        max_num_frames_per_episode=640,
    )
    ours = play(from_vector_env(vector, seed=SEED, info_keys=("lives",)), num_steps=331)
    theirs = play(wrappers("Breakout", **options(max_frames=640)), num_steps=331)
    # Its frame stack begins with black pictures, ours with the first one. And its time
    # limit leaves the last frame out of the final picture.
    for rows in (ours, theirs):
        rows["observation"] = rows["observation"][:, :, -1]
        rows["observation"][theirs["truncated"]] = 0
    if mode is SAME_STEP:
        ends = np.isfinite(theirs["info"]["game_step"])
        theirs["info"]["lives"][ends] = np.nan
    assert_same_rows(ours, theirs)
    assert ours["truncated"].any() and np.isfinite(ours["info"]["game_step"]).any()


# -------------------------------------------------------------------------- Atari games


def options(**changes):
    """Options of which nothing is drawn: no no-ops, no sticky actions; no lives."""
    plain = dict(noop_max=0, fire_reset=False, episodic_life=False)
    return atari_wrappers.protocol("impala", **{**plain, **changes})


def games(name, **options):
    given = dict(seed=SEED, info_keys=("lives",))
    return make_vector(name, K, atari_options=options, **given)


class LifeAtTheEndOfAStep(gym.Wrapper):
    """`atari_wrappers.EpisodicLife`, but above MaxAndSkip and without its no-op."""

    def __init__(self, env):
        super().__init__(env)
        self._ale = env.unwrapped.ale
        self._game_goes_on = False

    def step(self, action):
        self._picture, reward, terminated, truncated, info = self.env.step(action)
        if 0 < self._ale.lives() < self._lives and not terminated:
            terminated = True
            if not truncated:
                info["life_lost"] = self._game_goes_on = True
        self._lives = self._ale.lives()
        return self._picture, reward, terminated, truncated, info

    def reset(self, *, seed=None, options=None):
        new_game = seed is not None or not self._game_goes_on
        info = {}
        if new_game:
            self._picture, info = self.env.reset(seed=seed, options=options)
        self._lives = self._ale.lives()
        self._game_goes_on = False
        return self._picture, {**info, "new_game": new_game}


def wrappers(game, **options):
    """The stack of `make_atari` in Python, with lives as the C++ can tell them."""
    env_id = f"{game}NoFrameskip-v4"

    def make():
        if not options["episodic_life"]:
            return atari_wrappers.make_atari(env_id, **options)
        emulator = atari_wrappers.Emulator(
            game=gym.spec(env_id).kwargs["game"],
            repeat_action_probability=options["sticky_actions"],
            full_action_space=options["full_action_space"],
        )
        env = TimeLimit(emulator, options["max_frames"])
        if options["noop_max"]:
            env = atari_wrappers.NoopReset(env, options["noop_max"])
        env = atari_wrappers.MaxAndSkip(env, options["frame_skip"])
        env = LifeAtTheEndOfAStep(env)
        if options["fire_reset"] and emulator.get_action_meanings()[1] == "FIRE":
            env = atari_wrappers.FireReset(env)
        return atari_wrappers.FrameStack(atari_wrappers.WarpFrame(env))

    return Environments(make, K, seed=SEED, info_keys=("lives",))


PROTOCOLS = {
    "plain": options(),
    "fire": options(fire_reset=True),
    "lives": options(fire_reset=True, episodic_life=True),
    # Which is reached in the same step with one no-op and without: see `_Games`.
    "limit": options(fire_reset=True, episodic_life=True, max_frames=410),
    "full": options(frame_skip=3, full_action_space=True),
    "noop": options(noop_max=1),  # There is but one number to draw.
}


def assert_same_play(name, game, changed, *, num_steps):
    ours = play(games(name, **changed), num_steps=num_steps)
    if name.startswith("envpool:"):
        changed = {**changed, "noop_max": 1}  # It always does one.
    assert_same_rows(ours, play(wrappers(game, **changed), num_steps=num_steps))
    return ours


# Without lives but with fire; with lives and fire; without fire.
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("game", ["Pong", "Breakout", "MsPacman"])
def test_rows_of_ale_vector_equal_those_of_the_wrappers(game, protocol):
    rows = assert_same_play(
        f"ale-vector:{game}", game, PROTOCOLS[protocol], num_steps=151
    )
    assert np.abs(rows["reward"]).sum() > 0
    if protocol == "lives" and game == "Breakout":
        over = np.isfinite(rows["info"]["game_step"])
        assert rows["done"].sum() - K > over.sum() > 0  # Lives as well as games.
    if protocol == "limit":
        assert rows["truncated"].any()


@needs_envpool
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("game", ["Pong", "Breakout", "MsPacman"])
def test_rows_of_envpool_equal_those_of_the_wrappers(game, protocol):
    changed = PROTOCOLS[protocol]
    assert_same_play(f"envpool:{game}-v5", game, changed, num_steps=151)


@pytest.mark.slow
@pytest.mark.parametrize("game", ["Pong", "Breakout", "SpaceInvaders", "Seaquest"])
@pytest.mark.parametrize("name", ["ale-vector:{}", "envpool:{}-v5"])
def test_rows_equal_those_of_the_wrappers_for_thousands_of_steps(name, game):
    if envpool is None and name.startswith("envpool:"):
        pytest.skip("EnvPool is not installed: pip install envpool")
    changed = PROTOCOLS["lives"]
    assert_same_play(name.format(game), game, changed, num_steps=2003)


def test_sticky_actions_equal_those_of_the_wrappers_with_the_same_seed(monkeypatch):
    def seed_game(self, seed=None):  # The wrappers' emulator draws another one from it.
        self.ale.setInt("random_seed", 0 if seed is None else seed)
        return seed, seed

    monkeypatch.setattr(atari_wrappers.Emulator, "seed_game", seed_game)
    changed = options(sticky_actions=0.25, full_action_space=True)
    sticky = assert_same_play("ale-vector:Freeway", "Freeway", changed, num_steps=211)
    plain = play(
        games("ale-vector:Freeway", **{**changed, "sticky_actions": 0.0}), num_steps=211
    )
    assert sticky["observation"].tobytes() != plain["observation"].tobytes()


def first_pictures(envs, num_games):
    """Reset each game again and again; return the number of no-ops of each."""
    emulators = envs._source._emulators
    return [emulators.reset(k % K, None) for k in range(num_games)]


def test_ale_vector_begins_a_game_with_one_to_noop_max_noops():
    envs = games("ale-vector:Breakout", **options(noop_max=4))
    envs.reset(
        spaces.map_nest(lambda s: np.zeros((K, *s.shape), s.dtype), envs.row_spec)
    )
    noops = collections.Counter(frame.frames for frame in first_pictures(envs, 300))
    envs.close()
    assert sorted(noops) == [1, 2, 3, 4]
    assert min(noops.values()) > 300 / 4 - 4 * 300**0.5 / 2.3  # 4 sigma.


@needs_envpool
def test_envpool_begins_a_game_with_one_to_noop_max_noops():
    # In this game the first pictures all differ.
    emulator = atari_wrappers.MaxAndSkip(atari_wrappers.Emulator(game="freeway"), 4)
    envs = games("envpool:Freeway-v5", **options(noop_max=4))
    emulator.reset(seed=0)
    warp = atari_wrappers.WarpFrame(emulator)
    pictures = []
    for _ in range(6):
        pictures.append(warp.observation(emulator._screen()).tobytes())
        emulator.env.step(0)
    noops = collections.Counter(
        pictures.index(frame.picture.tobytes()) for frame in first_pictures(envs, 300)
    )
    envs.close()
    assert sorted(noops) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "name",
    ["ale-vector:Breakout", pytest.param("envpool:Breakout-v5", marks=needs_envpool)],
)
def test_games_depend_on_seed_environment_and_incarnation_alone(name):
    def rows(**changes):
        given = dict(seed=SEED, first_env_id=3, incarnation=0) | changes
        impala = atari_wrappers.protocol("impala", sticky_actions=0.25)
        return play(make_vector(name, K, atari_options=impala, **given), num_steps=43)

    first = rows()
    assert_same_rows(rows(), first)
    for changes in (dict(seed=12), dict(first_env_id=9), dict(incarnation=1)):
        other = rows(**changes)
        assert other["observation"].tobytes() != first["observation"].tobytes()
    shifted = rows(first_env_id=4)
    np.testing.assert_array_equal(
        shifted["observation"][0, 0], first["observation"][0, 1]
    )


@pytest.mark.parametrize(
    "name", ["ale-vector:Pong", pytest.param("envpool:Pong-v5", marks=needs_envpool)]
)
def test_an_action_that_a_game_does_not_have_is_an_error(name):
    envs = games(name, **options())
    row = spaces.map_nest(lambda s: np.zeros((K, *s.shape), s.dtype), envs.row_spec)
    envs.reset(row)
    message = r"envs 0 to 2 .*: expected actions 0 to 5, got \[0 6 0\]"
    with pytest.raises(EnvError, match=message):
        envs.step(np.array([0, 6, 0]), row)
    envs.close()


def test_games_can_be_closed_in_the_middle_of_a_step():
    envs = games("ale-vector:Pong", **options())
    row = spaces.map_nest(lambda s: np.zeros((K, *s.shape), s.dtype), envs.row_spec)
    envs.reset(row)
    envs._source.begin_step(np.zeros(K, np.int64), np.zeros(K, bool))
    envs.close()


# -------------------------------------------------------------------------------- Names


def test_a_game_may_be_given_by_its_gymnasium_id():
    for name in ("ale-vector:ALE/Pong-v5", "ale-vector:PongNoFrameskip-v4"):
        assert vector_env.is_vector(name) and vector_env.is_atari(name)
        envs = games(name, **options())
        assert envs.action_space == gym.spaces.Discrete(6)
        envs.close()


@pytest.mark.parametrize("name", ["Pong", "ALE/Pong-v5", "package.module:function"])
def test_other_names_are_not_vector_environments(name):
    assert not vector_env.is_vector(name)


def test_an_unknown_game_is_answered_with_near_ones():
    with pytest.raises(ValueError, match="Did you mean ale-vector:Pong"):
        games("ale-vector:Pomg", **options())


@needs_envpool
def test_an_unknown_envpool_id_is_answered_with_near_ones():
    with pytest.raises(ValueError, match="Did you mean envpool:Pong-v5"):
        games("envpool:Pong-v4", **options())


def test_without_envpool_its_name_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)  # What import takes for missing.
    with pytest.raises(ValueError, match=r"envpool:Pong-v5 .*pip install envpool"):
        games("envpool:Pong-v5", **options())


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("ale-vector:Pong", dict(noop_max=-1), "noop_max is -1 but must be at least 0"),
        (
            "ale-vector:Pong",
            dict(frame_skip=0),
            "frame_skip is 0 but must be at least 1",
        ),
        (
            "ale-vector:Pong",
            dict(max_frames=0),
            "max_frames is 0 but must be at least 1",
        ),
        ("ale-vector:Pong", dict(sticky_actions=1.5), "sticky_actions is 1.5 but must"),
        pytest.param(
            "envpool:Pong-v5",
            dict(frame_skip=1),
            "frame_skip is 1 but must be at least 2 for envpool",
            marks=needs_envpool,
        ),
    ],
)
def test_an_option_out_of_its_range_is_named(name, changes, message):
    with pytest.raises(ValueError, match=message):
        games(name, **options(**changes))


@needs_envpool
def test_envpool_has_more_than_atari():
    name = "envpool:MountainCar-v0"  # Whose episodes random play never terminates.
    assert vector_env.is_vector(name) and not vector_env.is_atari(name)
    envs = make_vector(
        name, K, atari_options={}, seed=SEED, info_keys=("elapsed_step",)
    )
    rows = play(envs, num_steps=413)
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
    envs = make_vector("envpool:CartPole-v1", K, atari_options={}, seed=SEED)
    rows = play(envs, num_steps=211)
    assert rows["done"].sum() > 10 and not rows["truncated"].any()
    starts = rows["observation"][rows["done"]]
    assert (np.abs(starts) <= 0.05).all()  # Where CartPole begins.
    assert (rows["reward"][1:] == 1).all()
    lengths = rows["info"]["game_step"][np.isfinite(rows["info"]["game_step"])]
    assert lengths.min() >= 8  # An episode that is over would have one of 1.


# -------------------------------------------------------------------------- Test mode


def trained(savedir, env, *argv):
    """Leave a run of PolyBeast's with a new network; return its folder."""
    import polybeast

    flags = polybeast.parse_flags(
        ["--env", env, "--xpid", "x", "--savedir", str(savedir), *argv]
    )
    envs = polybeast_env.create_environments(flags, 1, seed=0)
    net = polybeast.create_net(
        flags, polybeast.Spaces(envs.observation_space, envs.action_space)
    )
    envs.close()
    run_dir = metrics.prepare_run_dir(savedir, "x")
    metrics.write_meta(
        run_dir,
        flags={**vars(flags), **dict.fromkeys(core.flags.ATARI_FLAGS)},
        extra={"env_options": polybeast_env.env_options(flags)},
    )
    checkpoint.save(
        run_dir / "checkpoints", step=5, tensors={"model": net.state_dict()}, state={}
    )
    return run_dir


@pytest.mark.parametrize(
    "env", ["ale-vector:Pong", pytest.param("envpool:Pong-v5", marks=needs_envpool)]
)
def test_test_mode_plays_the_same_game_by_the_same_protocol(
    env, tmp_path, capfd, monkeypatch
):
    polybeast = pytest.importorskip("polybeast")
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.setitem(atari_wrappers.PROTOCOLS["impala"], "max_frames", 90)
    made, shown = [], []
    make, make_one = vector_env.make_vector, atari_wrappers.make_atari

    def make_vector(name, num_envs, *, atari_options, **options):
        made.append((name, num_envs, atari_options))
        return make(name, num_envs, atari_options=atari_options, **options)

    def make_atari(name, *, render_mode, **atari_options):
        shown.append((name, render_mode, atari_options))
        return make_one(name, render_mode=render_mode, **atari_options)

    protocol = ["--sticky_actions", "0.25", "--frame_skip", "3", "--noop_max", "5"]
    run_dir = trained(tmp_path, env, *protocol)
    monkeypatch.setattr(vector_env, "make_vector", make_vector)
    monkeypatch.setattr(atari_wrappers, "make_atari", make_atari)
    argv = ["--mode", "test", "--savedir", str(tmp_path), "--num_episodes", "2"]
    assert polybeast.main(argv) == Exit.DONE
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (result["env"], result["episodes"], shown) == (env, 2, [])
    expected = options(
        sticky_actions=0.25,
        frame_skip=3,
        noop_max=5,
        fire_reset=True,
        episodic_life=True,
        max_frames=90,
    )
    assert made == [(env, 1, expected)]

    # The C++ draws no pictures, so for a video the wrappers play.
    assert polybeast.main([*argv, "--video", "--num_episodes", "1"]) == Exit.DONE
    assert shown == [("ALE/Pong-v5", "rgb_array", expected)]
    assert (run_dir / "video" / "game-000.mp4").stat().st_size > 1000


@needs_envpool
def test_test_mode_plays_other_games_of_envpool_but_cannot_show_them(tmp_path, capfd):
    polybeast = pytest.importorskip("polybeast")
    trained(tmp_path, "envpool:CartPole-v1")
    argv = ["--mode", "test", "--savedir", str(tmp_path), "--num_episodes", "2"]
    assert polybeast.main(argv) == Exit.DONE
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["episodes"] == 2
    assert polybeast.main([*argv, "--video"]) == Exit.CONFIG
    said = "--env envpool:CartPole-v1 cannot be shown: EnvPool draws no pictures"
    assert said in capfd.readouterr().err
