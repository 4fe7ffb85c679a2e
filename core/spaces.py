# SPDX-License-Identifier: Apache-2.0
"""Specs and nests: the shapes and dtypes of what an environment says and hears.

A *nest* is a leaf, or a dict or tuple of nests. Observations are nests, and so is a
whole rollout row (see `core.rollouts`). Needs numpy and gymnasium, never torch: the
environment servers import it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np

# A leaf of any type, or a dict or tuple of nests. (A recursive alias would force
# every caller into casts.)
Nest = Any


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def map_nest(fn: Callable[..., Any], nest: Nest, *others: Nest) -> Nest:
    """Apply `fn` to the leaves of nests of one structure; keep the structure.

    Raises:
      ValueError: the nests differ in their keys or lengths.
    """
    if isinstance(nest, dict):
        for other in others:
            if not isinstance(other, dict) or other.keys() != nest.keys():
                got = sorted(other) if isinstance(other, dict) else type(other).__name__
                raise ValueError(f"nests differ: keys {sorted(nest)} against {got}")
        return {k: map_nest(fn, v, *(o[k] for o in others)) for k, v in nest.items()}
    if isinstance(nest, tuple):
        for other in others:
            if not isinstance(other, tuple) or len(other) != len(nest):
                size = len(other) if isinstance(other, tuple) else type(other).__name__
                raise ValueError(f"nests differ: a tuple of {len(nest)} against {size}")
        return tuple(map_nest(fn, *leaves) for leaves in zip(nest, *others))
    return fn(nest, *others)


def leaves(nest: Nest, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) in a fixed order; names are paths such as `observation/0`.

    No two leaves have the same name: in keys, `~` and `/` become `~0` and `~1`.
    """
    items: list[tuple[str, Any]]
    if isinstance(nest, dict):
        escaped = (key.replace("~", "~0").replace("/", "~1") for key in nest)
        items = list(zip(escaped, nest.values()))
    elif isinstance(nest, tuple):
        items = [(str(i), value) for i, value in enumerate(nest)]
    else:
        yield name, nest
        return
    for key, value in items:
        yield from leaves(value, f"{name}/{key}" if name else key)


class UnlearnableSpace(ValueError):
    """A space that rollouts have no arrays for; the text says how to do without it."""


def spec_of(space: gym.Space, name: str = "space") -> Nest:
    """Return the nest of `ArraySpec` that samples of `space` obey.

    Box keeps its shape and dtype, Discrete is a scalar int64, MultiDiscrete int64,
    MultiBinary int8; Dict and Tuple become dict and tuple.

    Args:
      name: of the space, for messages, such as "observation".

    Raises:
      UnlearnableSpace: a part of the space is of another kind, or empty; the message
        names it.
    """
    for key, part in leaves(leaf_spaces(space), name):
        if (problem := _problem(part)) is not None:
            raise UnlearnableSpace(f"'{key}' {problem}. {_without(space)}")
    return map_nest(_leaf_spec, leaf_spaces(space))


def leaf_spaces(space: gym.Space) -> Nest:
    """Return the nest of the spaces of the leaves."""
    match space:
        case gym.spaces.Dict():
            return {key: leaf_spaces(sub) for key, sub in space.spaces.items()}
        case gym.spaces.Tuple():
            return tuple(leaf_spaces(sub) for sub in space.spaces)
    return space


def value_range(space: gym.Space) -> tuple[Any, Any] | None:
    """Return the least and the greatest value of a leaf that is Discrete: two ints.

    Of a MultiDiscrete two arrays. None for all others: whatever their dtype holds does
    no harm, but networks make Discrete values one-hot, and fail outside the range.
    """
    match space:
        case gym.spaces.Discrete():
            return int(space.start), int(space.start + space.n - 1)
        case gym.spaces.MultiDiscrete():
            return space.start, space.start + space.nvec - 1
    return None


def _leaf_spec(space: gym.Space) -> ArraySpec:
    match space:
        case gym.spaces.Discrete():
            return ArraySpec((), np.dtype(np.int64))
        case gym.spaces.MultiDiscrete():
            return ArraySpec(tuple(space.nvec.shape), np.dtype(np.int64))
    assert space.shape is not None and space.dtype is not None
    return ArraySpec(tuple(space.shape), np.dtype(space.dtype))


def _problem(space: gym.Space) -> str | None:
    """Say why a leaf's space cannot be learned from, or None if it can."""
    match space:
        case gym.spaces.Box() | gym.spaces.MultiBinary() if 0 in space.shape:
            return f"is {space} of shape {space.shape}, which holds no values"
        case (
            gym.spaces.Box()
            | gym.spaces.MultiBinary()
            | gym.spaces.Discrete()
            | gym.spaces.MultiDiscrete()
        ):
            return None
    return (
        f"is a {type(space).__name__}; expected Box, Discrete, MultiDiscrete, "
        "MultiBinary, Dict or Tuple"
    )


def _without(space: gym.Space) -> str:
    """Say how to leave out of a space what cannot be learned from."""
    if not isinstance(space, gym.spaces.Dict):
        return "Wrap the environment so that it uses one of these."
    good = [
        key
        for key, sub in space.spaces.items()
        if all(_problem(part) is None for _, part in leaves(leaf_spaces(sub)))
    ]
    return f"Leave it out: gymnasium.wrappers.FilterObservation(env, {good})"


def row_spec(
    observation_space: gym.Space, action_space: gym.Space, info_keys: tuple[str, ...]
) -> dict[str, Nest]:
    """Return the spec of the environment's part of one rollout row (no batch axis).

    The table in `core.rollouts` says what each key means.
    """
    f32, i32 = np.dtype(np.float32), np.dtype(np.int32)
    return {
        "observation": spec_of(observation_space, "observation"),
        "reward": ArraySpec((), f32),
        "done": ArraySpec((), np.dtype(bool)),
        "truncated": ArraySpec((), np.dtype(bool)),
        "episode_return": ArraySpec((), f32),
        "episode_step": ArraySpec((), i32),
        "last_action": spec_of(action_space, "action"),
        "info": {
            key: ArraySpec((), f32) for key in ("game_return", "game_step", *info_keys)
        },
    }


def flat_ranges(space: gym.Space) -> np.ndarray:
    """Return an offset and a scale for each element of a flattened space, int64[2, N].

    Networks see (x - offset) / scale of the integers of a Box: in [0, 1], or where the
    lower bound is negative in [-1, 1], with 0 at 0. All else has offset 0 and scale 1:
    floats, bools, other spaces, and integers whose range is 2**30 or more. Such bounds
    are those of the dtype and say nothing of the values.
    """
    parts: list[np.ndarray] = []
    match space:
        case gym.spaces.Dict():
            parts += map(flat_ranges, space.spaces.values())
        case gym.spaces.Tuple():
            parts += map(flat_ranges, space.spaces)
        case gym.spaces.Box() if np.issubdtype(space.dtype, np.integer):
            low, high = (x.ravel().astype(np.float64) for x in (space.low, space.high))
            offset = np.maximum(low, 0)
            scale = np.maximum(high - offset, -low)
            is_scaled = (scale > 0) & (scale < 2**30)
            ranges = np.where(is_scaled, [offset, scale], [[0], [1]])
            parts = [ranges.astype(np.int64)]
        case _:
            parts = [np.repeat([[0], [1]], gym.spaces.flatdim(space), axis=1)]
    return np.concatenate(parts, axis=1)
