# SPDX-License-Identifier: Apache-2.0
"""What tests of environments share: random plays, and an environment by a script."""

import gymnasium as gym
import numpy as np

from core import nests
from core.environments.stepping import Environments
from core.nests import map_nest
from tests.counting_env import LIVES, NESTED, TRUNCATING

SEED = 11
KINDS = [0, TRUNCATING, LIVES, LIVES | TRUNCATING, NESTED | TRUNCATING]


def empty_rows(envs, *axes):
    """Rows [*axes, ...] full of nonsense, so that what is not written shows."""
    fill = {"f": -7.0, "b": True, "i": -7, "u": 99}
    return map_nest(
        lambda spec: np.full((*axes, *spec.shape), fill[spec.dtype.kind], spec.dtype),
        envs.row_spec,
    )


def at(rows, t):
    return map_nest(lambda array: array[t], rows)


def sample_actions(envs, num_envs, rng):
    """Random actions [K, ...] of any action space."""
    envs.action_space.seed(int(rng.integers(2**31)))
    samples = [envs.action_space.sample() for _ in range(num_envs)]
    return map_nest(lambda *leaves: np.stack(leaves), *samples)


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
    for (name, a), (_, b) in zip(nests.leaves(ours), nests.leaves(theirs), strict=True):
        assert a.tobytes() == b.tobytes(), f"{name}: {a} against {b}"


def frame(shape=(2, 3), dtype=np.uint8):
    return np.zeros(shape, dtype)


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


def step_until_error(env, **options):
    envs = Environments(lambda: env, 1, seed=SEED, first_env_id=5, **options)
    rows = empty_rows(envs, 1)
    envs.reset(rows)
    for _ in range(5):
        envs.step(np.array([0]), rows)
