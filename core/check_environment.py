# SPDX-License-Identifier: Apache-2.0
"""`python -m core.environment --check ENV`: does ENV obey its own spec?

Prints what the learner will see of it, then every way in which it breaks its spec or
the API, one per line. Exit code 0 if there is none, else 78; so it is for a space that
cannot be learned from, which breaks nothing, but is no use here.
"""

import argparse
import collections
import contextlib
import copy
import math
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

import core.flags
from core import environment, spaces
from core.environment import Environments, EnvSpecError, EnvValueError

EXIT_OK, EXIT_SPEC_MISMATCH = 0, 78
SAY_S = 5.0  # Between two words of how far a slow environment has come.
REPLAY_STEPS = 300  # Of two plays with one seed. Enough to see a seed being ignored.


class Unplayable(Exception):
    """The play cannot go on after the last violation found."""


class Violations:
    """What an environment did wrong: each kind once, with its first step and count."""

    def __init__(self) -> None:
        self.step = 0  # The step being looked at; 0 is the first reset.
        self._first: dict[str, str] = {}  # Kind -> what was seen first.
        self._count: collections.Counter[str] = collections.Counter()
        self.info_scalars: set[str] = (
            set()
        )  # Not wrong: keys that --info_keys can take.

    def add(self, kind: str, text: str) -> None:
        self._first.setdefault(kind, f"step {self.step}: {text}")
        self._count[kind] += 1

    def expected(self, name: str, expected: Any, got: Any) -> None:
        self.add(name, f"'{name}' expected {expected}, got {environment.describe(got)}")

    def lines(self) -> list[str]:
        return [
            f"{text} ({count} times)" if (count := self._count[kind]) > 1 else text
            for kind, text in self._first.items()
        ]


def check_observation(found: Violations, space: gym.Space, value: Any) -> None:
    """Compare structure, shape, dtype and values (bounds, NaN) with the space."""
    leaf_spaces = dict(spaces.leaves(spaces.leaf_spaces(space), "observation"))
    values = dict(spaces.leaves(value, "observation"))
    if values.keys() != leaf_spaces.keys():
        missing = sorted(leaf_spaces.keys() - values.keys())
        surplus = sorted(values.keys() - leaf_spaces.keys())
        text = f"the space has {missing}, the observation instead {surplus}"
        found.add("structure", text)
    for name in leaf_spaces.keys() & values.keys():
        leaf_space = leaf_spaces[name]
        spec = spaces.spec_of(leaf_space)
        array = np.asarray(values[name])
        if array.shape != spec.shape or not np.can_cast(array.dtype, spec.dtype):
            found.expected(name, spec, array)
        elif not leaf_space.contains(array.astype(spec.dtype)):
            text = f"values in [{array.min()}, {array.max()}]"
            found.add(f"{name} values", f"'{name}' expected {leaf_space}, got {text}")


def check_step(found: Violations, space: gym.Space, result: Any) -> None:
    """Compare what `step` returned with the space and the API.

    Raises:
      Unplayable: `result` cannot be taken apart.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        expected = "(observation, reward, terminated, truncated, info)"
        found.expected("step()", expected, result)
        raise Unplayable
    observation, reward, terminated, truncated, info = result
    check_observation(found, space, observation)
    try:
        if np.ndim(reward) != 0 or not np.isfinite(float(reward)):
            raise ValueError
    except (TypeError, ValueError):
        found.expected("reward", "a finite number", reward)
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            found.expected(name, "a bool", flag)
    if not isinstance(info, dict):
        found.expected("info", "a dict", info)
        return
    for key, value in info.items():
        if isinstance(value, int | float | np.number | np.bool_):
            found.info_scalars.add(key)


def steps(num_steps: int, doing: str) -> Iterator[int]:
    """Yield 0 to num_steps - 1; where that takes long, say how far it has come."""
    say_at = time.monotonic() + SAY_S
    for step in range(num_steps):
        if time.monotonic() >= say_at:
            say_at = time.monotonic() + SAY_S
            done = f"{step:,} of {num_steps:,} steps"
            print(f"{doing}: {done}", file=sys.stderr, flush=True)
        yield step


def play(found: Violations, env: gym.Env, *, num_steps: int, seed: int) -> list[Any]:
    """Take random actions; return the observations, rewards and ends of episodes.

    Raises:
      Unplayable: what the environment returned cannot be taken apart.
    """
    seen: list[Any] = []
    observation_space = environment.convert_space(env.observation_space)
    action_space = environment.convert_space(env.action_space)
    leaf_spaces = spaces.leaf_spaces(action_space)
    action_space.seed(seed)
    ended = True
    for step in steps(num_steps, "playing"):
        if ended:
            found.step = step
            result: Any = env.reset(seed=seed) if step == 0 else env.reset()
            if not isinstance(result, tuple) or len(result) != 2:
                found.expected("reset()", "(observation, info)", result)
                raise Unplayable
            check_observation(found, observation_space, result[0])
            seen.append(copy.deepcopy(result[0]))
        found.step = step + 1
        result = env.step(environment.action_at(leaf_spaces, sample(action_space), 0))
        check_step(found, observation_space, result)
        ended = bool(result[2] or result[3])
        seen.append(copy.deepcopy((result[0], result[1], ended)))
    return seen


def sample(action_space: gym.Space) -> spaces.Nest:
    """Return a random action as a batch of one."""
    return spaces.map_nest(
        lambda leaf: np.asarray(leaf)[np.newaxis], action_space.sample()
    )


def same(a: Any, b: Any) -> bool:
    """Return whether two nests hold the same values, bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def print_rows(name: str, *, num_steps: int, seed: int) -> None:
    """Print the rows of one environment, and what random play yields."""
    with contextlib.closing(
        Environments(lambda: environment.make(name), 1, seed=seed)
    ) as envs:
        specs = list(spaces.leaves(envs.row_spec))
        for i, (key, spec) in enumerate(specs):
            print(f"{'' if i else 'row':<13}{key} {spec}")
        num_bytes = sum(spec.nbytes for _, spec in specs)
        print(f"{'':<13}= {num_bytes:,} bytes, and what the agent adds")

        rows = spaces.map_nest(
            lambda spec: np.zeros((1, *spec.shape), spec.dtype), envs.row_spec
        )
        envs.action_space.seed(seed)
        envs.reset(rows)
        rewards, lengths, returns = [], [], []
        start = time.perf_counter()
        for _ in steps(num_steps, "measuring"):
            envs.step(sample(envs.action_space), rows)
            rewards.append(float(rows["reward"][0]))
            if not math.isnan(rows["info"]["game_step"][0]):
                lengths.append(int(rows["info"]["game_step"][0]))
                returns.append(float(rows["info"]["game_return"][0]))
        rate = num_steps / (time.perf_counter() - start)
    print(f"random play  {num_steps:,} steps, {len(lengths)} finished games")
    print(f"{'':<13}reward {min(rewards):g} to {max(rewards):g}")
    if lengths:
        print(f"{'':<13}return {min(returns):g} to {max(returns):g}", end=", ")
        print(f"mean {np.mean(returns):g}")
        print(f"{'':<13}length {min(lengths)} to {max(lengths)} steps", end=", ")
        print(f"mean {np.mean(lengths):g}")
    print(f"speed        {rate:,.0f} steps/s, one environment on one core")


def check(name: str, *, num_steps: int, seed: int) -> list[str]:
    """Print what the learner will see of `--env name`; return what is wrong with it.

    Raises:
      UnlearnableSpace: it has a space that rollouts have no arrays for.
      ValueError: there is no such environment.
    """
    found = Violations()
    with (
        contextlib.closing(environment.make(name)) as used,
        contextlib.closing(environment.make(name)) as fresh,
    ):
        is_classic = isinstance(used, environment.ClassicGym)
        api = "classic gym" if is_classic else "Gymnasium"
        print(f"environment  {environment.name_of(used)} ({api} API)")
        print(f"observation  {used.observation_space}")
        print(f"actions      {used.action_space}")
        spaces.row_spec(used.observation_space, used.action_space, ())
        try:
            play(found, used, num_steps=num_steps, seed=seed)
            # With one seed, an environment that was used must play like a new one.
            again, anew = (
                play(Violations(), env, num_steps=REPLAY_STEPS, seed=seed + 1)
                for env in (used, fresh)
            )
            if not same(again, anew):
                found.step = 0
                found.add(
                    "seed",
                    f"two plays from reset(seed={seed + 1}) with the same actions "
                    "differ: no run can be repeated",
                )
            print(f"info         {', '.join(sorted(found.info_scalars)) or '-'}")
            print_rows(name, num_steps=num_steps, seed=seed)
        except Unplayable:
            pass
        except (EnvSpecError, EnvValueError) as error:
            if not found.lines():  # Else it is one of those.
                found.add("rows", str(error))
        except Exception as error:
            traceback.print_exc()
            found.add("raises", f"{type(error).__name__}: {error}")
    return found.lines()


def main(argv: list[str] | None = None) -> int:
    parser = core.flags.Parser(
        prog="python -m core.environment",
        description="Report what the learner will see of an environment, and whether "
        "the environment obeys its own spec under random actions.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--check",
        metavar="ENV",
        required=True,
        help="the environment, as `--env` of the trainers takes it",
    )
    parser.add_argument("--steps", type=int, default=1000, help="random steps to take")
    parser.add_argument("--seed", type=int, default=0, help="seed of the play")
    flags = parser.parse_args(argv)
    if flags.steps < 1:
        parser.error(f"--steps is {flags.steps} but must be at least 1")
    if flags.seed < 0:
        parser.error(f"--seed is {flags.seed} but must not be negative")
    try:
        violations = check(flags.check, num_steps=flags.steps, seed=flags.seed)
    except spaces.UnlearnableSpace as error:
        print(f"not learned  {error}")
        return EXIT_SPEC_MISMATCH
    except ValueError as error:
        parser.error(str(error))
    for line in violations:
        print(f"VIOLATION    {line}")
    if violations:
        return EXIT_SPEC_MISMATCH
    print(f"ok           {flags.check} obeys its own spec")
    return EXIT_OK
