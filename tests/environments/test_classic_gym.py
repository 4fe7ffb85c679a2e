# SPDX-License-Identifier: Apache-2.0
"""core.environments.classic_gym, on copies of its API: needs no classic gym."""

import sys
import types

import gymnasium as gym
import numpy as np
import pytest

from core.environments.classic_gym import ClassicGym, adapt, convert_space
from core.environments.make import make
from core.environments.stepping import Environments
from core.errors import EnvSpecError, MakeError
from tests.environments.helpers import SEED, collect


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


class Wrapper:
    """Does not say what `reset` takes."""

    def __init__(self, env):
        self.env = env
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.step = env.step

    def reset(self, **kwargs):
        return self.env.reset(**kwargs)


def test_classic_wrappers_with_kwargs_do_not_hide_how_to_seed():
    for env_class in (OldEnv, MiddleEnv, NewEnv):
        env = Wrapper(env_class())
        env.unwrapped, env.seed = env.env, env.env.seed
        observation, _ = adapt(env).reset(seed=13)
        assert observation.tolist() == [0, 13]


def test_classic_env_that_only_takes_kwargs_is_seeded_through_them():
    observation, _ = adapt(Wrapper(NewEnv())).reset(seed=13)
    assert observation.tolist() == [0, 13]


def test_classic_env_without_a_seed_warns_and_still_resets():
    class Env(OldEnv):
        seed = None

    with pytest.warns(UserWarning, match="Env takes no seed"):
        env = adapt(Env())
    assert env.reset(seed=13)[0].tolist() == [0, 0]


def test_one_classic_environment_in_two_places_is_refused():
    one = NewEnv()
    with pytest.raises(EnvSpecError, match="create_env returned the same"):
        Environments(lambda: one, 2, seed=SEED)


@pytest.mark.parametrize("wraps", [False, True])
def test_an_environment_whose_reset_takes_no_seed_is_told(wraps):
    class Unseeded(gym.Env):
        observation_space = action_space = gym.spaces.Discrete(2)

        def reset(self, options=None):
            return 0, {}

    env = gym.Wrapper(Unseeded()) if wraps else Unseeded()
    with pytest.raises(MakeError, match=r"^Unseeded.reset takes no seed; .*seed=None"):
        adapt(env)

    class Repaired(gym.Wrapper):
        def reset(self, *, seed=None, options=None):
            return self.env.reset()

    repaired = Repaired(env)
    assert adapt(repaired) is repaired
    Unseeded.reset = lambda self, **kwargs: (0, {})
    assert adapt(env) is env


def test_classic_env_renders_and_closes_and_shows_its_unwrapped_self():
    env = OldEnv()
    adapted = gym.Wrapper(adapt(env))
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

    assert adapt(Env()).reset() == (observation, {})


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
        c=gym.spaces.Box(-1, 2, (2, 3), np.float32),
        b=gym.spaces.Tuple(
            [gym.spaces.Discrete(5, start=-2), gym.spaces.MultiBinary(7)]
        ),
        a=gym.spaces.MultiDiscrete([3, 5]),
    )
    converted = convert_space(old(space))
    assert converted == space
    assert list(converted) == list("cba")  # The order of an action mask's entries.
    assert convert_space(space) is space


def test_a_classic_space_is_known_by_what_it_is_derived_from():
    box = dict(low=[0, 0], high=[1, 2], shape=(2,), dtype="float32")
    for name in ("Box", "BoxSpace"):
        derived = type("Camera", (type(name, (), box),), {})
        converted = convert_space(derived())
        assert converted == gym.spaces.Box(np.zeros(2), np.array([1, 2]), dtype="f4")


def test_a_classic_space_of_unknown_kind_is_named():
    with pytest.raises(ValueError, match="Graph.*expected Box, Discrete"):
        convert_space(type("Graph", (), {"__repr__": lambda s: "Graph"})())


def test_make_adapts_classic_environments(monkeypatch):
    made = []

    class Error(Exception):
        pass

    class UnregisteredEnv(Error):
        pass

    def fake_make(id, disable_env_checker=None, **kwargs):
        made.append((id, disable_env_checker, kwargs))
        if " " in id:
            raise Error(f"Malformed environment ID: {id}.")
        if id == "Broken-v0":
            import no_such_module  # noqa: F401
        if id != "Old-v0":
            raise UnregisteredEnv("no such id")
        return OldEnv()

    error = classic(Error=Error, UnregisteredEnv=UnregisteredEnv)
    registry = classic(registry={"Old-v0": None, "Older-v0": None})
    fake = classic(make=fake_make, error=error, envs=registry)
    monkeypatch.setitem(sys.modules, "gym", fake)
    env = make("gym:Old-v0", render_mode="rgb_array")
    assert isinstance(env, ClassicGym)
    assert made == [("Old-v0", True, {"render_mode": "rgb_array"})]
    with pytest.raises(ValueError, match="--env gym:Olt-v0 .*Did you mean gym:Old-v0"):
        make("gym:Olt-v0")
    with pytest.raises(MakeError, match="^--env gym:Old v0: Malformed environment ID"):
        make("gym:Old v0")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        make("gym:Broken-v0")
