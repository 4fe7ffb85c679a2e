# SPDX-License-Identifier: Apache-2.0
"""The rollout: its table, and which arrays a row has for an environment's spaces.

A rollout is a nest of arrays `[T + 1, B, ...]`, time first. Row t holds what was known
when row t's observation arrived, and the action that led to it:

| key             | dtype      | row t                                                 |
| --------------- | ---------- | ----------------------------------------------------- |
| observation     | the space's| what the agent sees; if done[t], the reset observation|
| reward          | float32    | of the transition row t-1 -> row t, unclipped         |
| done            | bool       | row t is the first row of a new episode               |
| truncated       | bool       | row t is the final observation before a time limit    |
| episode_return, | float32,   | of the episode that the transition into row t belongs |
|   episode_step  |   int32    |   to, including this transition                       |
| last_action     | the space's| the action that led to row t                          |
| info            | float32    | dict of scalars, NaN where the environment gave none: |
|                 |            |   game_return and game_step of the full game (all     |
|                 |            |   lives) that ended on the way into row t, info_keys  |
| action,         | the space's| the agent's outputs for row t-1's observation, so     |
|   policy_logits,|   float32, |   action[t] is the action that led to row t;          |
|   baseline      |   float32  |   policy_logits are the parameters of the distribution|
| sample          | float32    | the draw that was scaled and clipped to the action;   |
|                 |            |   absent for Discrete, where the action is the draw   |
| policy_version  | int64      | version of the weights that chose action[t]: number of|
|                 |            |   optimizer steps that led to them                    |
| replayed        | bool       | only in batches, with --replay_ratio: the rollout was |
|                 |            |   in a batch before (core.algorithm.replay)           |

The last row of a rollout is row 0 of the same environment's next one. The recurrent
state stored with a rollout is the state before row 0's observation is processed; models
zero it where `done`.

Termination and truncation differ (Pardo et al. 2018). On termination the reset
observation takes the next row (done). On truncation two rows follow: the final
observation (truncated, with the last reward), then the reset observation (done, reward
0). The step between those two rows is not a transition: the action chosen there is
never executed, the loss gives the step weight zero, and the learner does not count it
(`core.algorithm.update`).

Needs numpy and gymnasium, never torch: the environment servers import it.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from core.errors import MakeError
from core.nests import ArraySpec, Nest, leaves, map_nest


@dataclasses.dataclass(frozen=True)
class Spaces:
    """The spaces of an environment's observations and actions."""

    observation: gym.Space
    action: gym.Space


# The keys of a row that a network reads.
NET_INPUTS = ("observation", "reward", "done", "last_action")


def new_rollouts(flags: argparse.Namespace) -> int:
    """Return how many of a batch's --batch_size rollouts are new, not replayed.

    `core.running.common_flags` checks that both numbers are whole.
    """
    return round(flags.batch_size / (1 + flags.replay_ratio))


# The dtypes of arrays in rows and in messages: plain numbers, which torch supports too.
# No dtype may contain a pointer.
DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64"),
    *("int8", "int16", "int32", "int64", "float16", "float32", "float64"),
)

MAX_TEXT = 300  # Characters of a space in a message.


class UnlearnableSpace(MakeError):
    """Rollouts cannot hold values of this space; the message says what to do."""


def spec_of(space: gym.Space, name: str = "space") -> Nest:
    """Return the nest of `ArraySpec` that describes samples of `space`.

    Box keeps its shape and dtype, Discrete is a scalar int64, MultiDiscrete int64,
    MultiBinary int8; Dict and Tuple become dict and tuple.

    Args:
      name: the name of the space in messages, such as "observation".

    Raises:
      UnlearnableSpace: a part of the space has another type, or no values; the message
        names that part.
    """
    for key, part in leaves(leaf_spaces(space), name):
        if (problem := _problem(part)) is not None:
            raise UnlearnableSpace(f"'{key}' {problem}. {_advice(space, name)}")
    return map_nest(_leaf_spec, leaf_spaces(space))


def leaf_spaces(space: gym.Space) -> Nest:
    """Return the nest whose leaves are the spaces of the leaves of a sample.

    A Dict or Tuple without parts is a leaf, so that `spec_of` refuses it by name.

    Raises:
      UnlearnableSpace: the key of a Dict is not a string.
    """
    match space:
        case gym.spaces.Dict() if space.spaces:
            for key in space.spaces:
                if not isinstance(key, str):
                    raise UnlearnableSpace(
                        f"{space} has the key {key!r}; expected a string. Wrap the "
                        "environment so that all keys are strings."
                    )
            return {key: leaf_spaces(sub) for key, sub in space.spaces.items()}
        case gym.spaces.Tuple() if space.spaces:
            return tuple(leaf_spaces(sub) for sub in space.spaces)
    return space


def text_of(space: gym.Space) -> str:
    """Return a space as one line for messages; of a large Box it shows few bounds."""
    with np.printoptions(threshold=8, edgeitems=1):
        text = " ".join(str(space).split())
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def wrong_bounds(low: np.ndarray, high: np.ndarray) -> str | None:
    """Say which element of a Box has no finite value within its bounds, or None."""
    is_right = (low <= high) & (low < np.inf) & (high > -np.inf)  # False for NaN.
    if is_right.all():
        return None
    at = tuple(np.argwhere(~is_right)[0].tolist())
    return (
        f"element {list(at)} has the bounds {low[at]} and {high[at]}; expected lower "
        "bound <= upper bound, lower bound < inf and upper bound > -inf"
    )


def value_range(space: gym.Space) -> tuple[Any, Any] | None:
    """Return the lowest and highest allowed value of an integer-valued leaf.

    Two ints for Discrete, two arrays for MultiDiscrete, None for all other spaces.
    Networks turn Discrete values into one-hot vectors, which fails outside this range;
    values of other spaces cannot make a network fail.
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
        case gym.spaces.Dict() | gym.spaces.Tuple():
            return f"is {space}, which has no parts"
        case (
            gym.spaces.Box() | gym.spaces.MultiBinary() | gym.spaces.MultiDiscrete()
        ) if 0 in space.shape:
            return f"is {text_of(space)} of shape {space.shape}, which holds no values"
        case gym.spaces.Box() if (
            space.dtype.name not in DTYPES or not space.dtype.isnative
        ):
            dtypes = ", ".join(DTYPES)
            return f"is {text_of(space)}; expected one of the dtypes {dtypes}"
        case gym.spaces.Box() if np.isnan([space.low, space.high]).any():
            return f"is {text_of(space)}; expected bounds that are numbers or infinite"
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


def _advice(space: gym.Space, name: str) -> str:
    """Return how to change or remove the unusable parts of a space."""
    if name == "action":
        return "Change it with a gymnasium.ActionWrapper."
    if not isinstance(space, gym.spaces.Dict):
        return "Change it with a gymnasium.ObservationWrapper."
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

    The table above says what each key means.
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

    A network's input is (x - offset) / scale. For the integers of a Box this is in
    [0, 1], or in [-1, 1] if the lower bound is negative (then 0 stays 0). Offset 0 and
    scale 1 leave all other values as they are: floats, bools, other spaces, and
    integers whose scale would be 2**30 or more (usually the bounds of the dtype).
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
            parts.append(ranges.astype(np.int64))
        case _:
            parts.append(np.repeat([[0], [1]], gym.spaces.flatdim(space), axis=1))
    return np.concatenate(parts, axis=1)


def each_action(leaf_spaces: Nest, actions: Nest) -> Nest:
    """Return iterators: `map_nest(next, ...)` is the next environment's action.

    Ints for Discrete, else copies of arrays. The arrays have the dtype of the space: in
    a MultiDiscrete not always int64.
    """

    def leaf(space: gym.Space, rows: np.ndarray) -> Iterator[int | np.ndarray]:
        if isinstance(space, gym.spaces.Discrete):
            return iter(rows.tolist())
        return (np.array(row, space.dtype) for row in rows)

    return map_nest(leaf, leaf_spaces, actions)


def action_at(leaf_spaces: Nest, actions: Nest, k: int) -> Any:
    """Return environment k's action, as `each_action` does."""
    rest = map_nest(lambda rows: rows[k:], actions)
    return map_nest(next, each_action(leaf_spaces, rest))


def copy_at(rows: Nest, k: int, values: Nest) -> None:
    """Copy the leaves of `values` into entry k of the leaves of `rows`."""

    def copy(row: np.ndarray, value: Any) -> None:
        row[k] = value

    map_nest(copy, rows, values)
