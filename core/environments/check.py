# SPDX-License-Identifier: Apache-2.0
"""`python -m core.environments.check ENV`: does ENV obey its own spec?

Prints what the learner will see of the environment, then each kind of violation of its
spec or of the API, one per line. The exit status is 0 if there is none, else 78; it is
2 if there is no such environment. A space that the learner does not support is not a
violation, but gives status 78 too.
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

if __name__ == "__main__":
    from core.imports import explain_missing_packages

    explain_missing_packages()

import gymnasium as gym
import numpy as np

from core import flag_types, rollout
from core.action_spaces import (
    ACTION_MASK,
    allowed_values,
    category_sizes,
    check_spaces,
    split_mask,
)
from core.environments import faults
from core.environments.classic_gym import ClassicGym, convert_space
from core.environments.make import make
from core.environments.stepping import Environments
from core.errors import ConfigError, EnvSpecError, EnvValueError, Exit, MakeError, leave
from core.nests import Nest, describe, leaves, map_nest
from core.rollout import UnlearnableSpace, action_at, row_spec, spec_of

PROGRESS_S = 5.0  # Between two lines of progress.
REPLAY_STEPS = 300  # Of each of two plays with one seed, to notice an ignored seed.


class Unplayable(Exception):
    """The play cannot continue after the last violation."""


class Violations:
    """The violations of an environment: each kind once, with first step and count."""

    def __init__(self) -> None:
        self.step = 0  # The present step; 0 is the first reset.
        self._first: dict[str, str] = {}  # Kind -> text of its first violation.
        self._count: collections.Counter[str] = collections.Counter()
        # Keys that --info_keys can take. These are not violations.
        self.info_scalars: set[str] = set()

    def add(self, kind: str, text: str) -> None:
        self._first.setdefault(kind, f"step {self.step}: {text}")
        self._count[kind] += 1

    def expected(self, name: str, expected: Any, got: Any) -> None:
        self.add(name, f"'{name}' expected {expected}, got {describe(got)}")

    def raised(self, error: Exception) -> None:
        """Add an exception of the environment; show the traceback of the first."""
        text = f"{type(error).__name__}: {error}"
        if text not in self._first:
            traceback.print_exception(error)
        self.add(text, text)

    def lines(self) -> list[str]:
        return [
            f"{text} ({count} times)" if (count := self._count[kind]) > 1 else text
            for kind, text in self._first.items()
        ]


def check_observation(found: Violations, space: gym.Space, value: Any) -> None:
    """Compare structure, shape, dtype and values (bounds, NaN) with the space."""
    leaf_spaces = dict(leaves(rollout.leaf_spaces(space), "observation"))
    values = dict(leaves(value, "observation"))
    if values.keys() != leaf_spaces.keys():
        missing = sorted(leaf_spaces.keys() - values.keys())
        surplus = sorted(values.keys() - leaf_spaces.keys())
        halves = [("lacks", missing), ("adds", surplus)]
        text = " and ".join(f"{verb} {keys}" for verb, keys in halves if keys)
        found.add("structure", f"the observation {text}")
    for name in leaf_spaces.keys() & values.keys():
        leaf_space = leaf_spaces[name]
        spec = spec_of(leaf_space)
        array = np.asarray(values[name])
        if array.shape != spec.shape or not np.can_cast(array.dtype, spec.dtype):
            found.expected(name, spec, array)
        elif not _contains(leaf_space, array.astype(spec.dtype)):
            text = f"values in [{array.min()}, {array.max()}]"
            if np.isnan(array).any():
                text = "NaN"
            found.add(f"{name} values", f"'{name}' expected {leaf_space}, got {text}")


def _contains(space: gym.Space, value: np.ndarray) -> bool:
    # MultiDiscrete.contains refuses a wider dtype than its own, but rows have int64.
    if (limits := rollout.value_range(space)) is not None:
        low, high = limits
        return bool(np.all((low <= value) & (value <= high)))
    return bool(space.contains(value))


def check_step(found: Violations, space: gym.Space, result: Any) -> None:
    """Compare what `step` returned with the space and the API.

    Raises:
      Unplayable: `result` is not a tuple of five.
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
    """Yield 0 to num_steps - 1; print progress every PROGRESS_S seconds."""
    print_at = time.monotonic() + PROGRESS_S
    for step in range(num_steps):
        if time.monotonic() >= print_at:
            print_at = time.monotonic() + PROGRESS_S
            done = f"{step:,} of {num_steps:,} steps"
            print(f"{doing}: {done}", file=sys.stderr, flush=True)
        yield step


def play(
    found: Violations, env: gym.Env, *, num_steps: int, seed: int
) -> Iterator[Any]:
    """Take random actions; yield the observations, rewards and ends of episodes.

    Raises:
      Unplayable: `reset` or `step` did not return a tuple of the right length.
    """
    observation_space = convert_space(env.observation_space)
    action_space = convert_space(env.action_space)
    leaf_spaces = rollout.leaf_spaces(action_space)
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
            yield copy.deepcopy(result[0])
        action = sample(found, action_space, result[0])
        found.step = step + 1
        result = env.step(action_at(leaf_spaces, action, 0))
        check_step(found, observation_space, result)
        ended = bool(result[2] or result[3])
        yield copy.deepcopy((result[0], result[1], ended))


def sample(found: Violations, action_space: gym.Space, observation: Nest) -> Nest:
    """Return a random action, as a batch of one, that the observation's mask allows.

    Return any action if there is no mask, or if the mask is malformed or allows no
    action (both are violations).
    """
    action = action_space.sample()
    sizes = category_sizes(action_space)
    _, mask = split_mask(observation)
    if mask is not None and sum(np.size(x) for _, x in leaves(mask)) == sum(sizes):
        allowed = allowed_values(mask, sizes)
        if all(map(len, allowed)):
            action = choose(action_space, action, iter(allowed))
        else:
            found.add("mask", f"'observation/{ACTION_MASK}' allows no action")
    return map_nest(lambda leaf: np.asarray(leaf)[np.newaxis], action)


def choose(
    action_space: gym.Space, action: Nest, allowed: Iterator[np.ndarray]
) -> Nest:
    """Return `action` with its Discrete values drawn again, from the allowed values."""

    def leaf(part: Any, value: Any) -> Any:
        drawn = [part.np_random.choice(next(allowed)) for _ in category_sizes(part)]
        return np.reshape(drawn, np.shape(value)) + part.start if drawn else value

    return map_nest(leaf, rollout.leaf_spaces(action_space), action)


def same(a: Any, b: Any) -> bool:
    """Return whether two nests hold the same values, bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def print_rows(name: str, *, num_steps: int, seed: int) -> None:
    """Print the row spec, and rewards, lengths and speed of random play."""
    with contextlib.closing(Environments(lambda: make(name), 1, seed=seed)) as envs:
        specs = list(leaves(envs.row_spec))
        for i, (key, spec) in enumerate(specs):
            print(f"{'' if i else 'row':<13}{key} {spec}")
        num_bytes = sum(spec.nbytes for _, spec in specs)
        print(f"{'':<13}= {num_bytes:,} bytes, without the agent's outputs")

        rows = envs.zero_rows()
        envs.action_space.seed(seed)
        envs.reset(rows)
        rewards, lengths, returns = [], [], []
        start = time.perf_counter()
        for _ in steps(num_steps, "measuring"):
            observation = map_nest(lambda x: x[0], rows["observation"])
            envs.step(sample(Violations(), envs.action_space, observation), rows)
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


@contextlib.contextmanager
def closing(found: Violations, env: gym.Env) -> Iterator[gym.Env]:
    """Close `env` at the end of the block; an exception of `close` is a violation."""
    try:
        yield env
    finally:
        try:
            with faults.only_exceptions("close()"):
                env.close()
        except Exception as error:
            found.raised(error)


def check(name: str, *, num_steps: int, seed: int) -> list[str]:
    """Print what the learner will see of `--env name`; return the violations.

    Raises:
      UnlearnableSpace: rollouts have no arrays for one of its spaces.
      ConfigError: no policy can act in its action space.
      MakeError: there is no such environment.
    """
    found = Violations()
    with closing(found, make(name)) as used, closing(found, make(name)) as fresh:
        api = "classic gym" if isinstance(used, ClassicGym) else "Gymnasium"
        print(f"environment  {faults.name_of(used)} ({api} API)")
        if type(used.unwrapped).__module__.startswith("ale_py"):
            print("note         this is the bare game; the trainers add the wrappers")
            print("             of atari_wrappers.py and see other observations")
        print(f"observation  {used.observation_space}")
        print(f"actions      {used.action_space}")
        row_spec(used.observation_space, used.action_space, ())
        check_spaces(used.observation_space, used.action_space)
        try:
            for _ in play(found, used, num_steps=num_steps, seed=seed):
                pass
            # With the same seed a used environment must play like a new one.
            used_play, fresh_play = (
                list(play(Violations(), env, num_steps=REPLAY_STEPS, seed=seed + 1))
                for env in (used, fresh)
            )
            if not same(used_play, fresh_play):
                found.step = 0
                found.add(
                    "seed",
                    f"two plays from reset(seed={seed + 1}) with the same actions "
                    "differ: the seed does not decide the game",
                )
            print(f"info         {', '.join(sorted(found.info_scalars)) or '-'}")
            print_rows(name, num_steps=num_steps, seed=seed)
        except Unplayable:
            pass
        except (EnvSpecError, EnvValueError) as error:
            if not found.lines():  # Otherwise `found` has this error already.
                found.add("rows", str(error))
        except Exception as error:
            found.raised(error)
    return found.lines()


def main(argv: list[str] | None = None) -> int:
    parser = flag_types.Parser(
        prog="python -m core.environments.check",
        description="Print what the learner will see of an environment, and whether "
        "the environment obeys its own spec under random actions.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "env",
        metavar="ENV",
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
        violations = check(flags.env, num_steps=flags.steps, seed=flags.seed)
    except (UnlearnableSpace, ConfigError) as error:
        print(f"unsupported  {error}")
        return Exit.CONFIG
    except MakeError as error:
        parser.error(str(error))
    for line in violations:
        print(f"VIOLATION    {line}")
    if violations:
        return Exit.CONFIG
    print(f"ok           {flags.env} obeys its own spec")
    return Exit.DONE


if __name__ == "__main__":
    leave(main())
