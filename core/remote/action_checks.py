# SPDX-License-Identifier: Apache-2.0
"""Check that the actions of a learner are in the action space."""

import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from core.nests import Nest, leaves
from core.remote import messages
from core.rollout import leaf_spaces, value_range


def action_checks(space: gym.Space, actions: Nest) -> list[Callable[[], None]]:
    """Return one function per leaf, which checks the present values of `actions`.

    The functions raise WireError. Like Gymnasium, they do not check the bounds of a Box
    of floats: many environments clip actions, and policies rely on that.
    """
    pairs = zip(leaves(leaf_spaces(space), "action"), leaves(actions, "action"))
    return [
        functools.partial(_check_action, name, leaf, *_limits(leaf), values)
        for (name, leaf), (_, values) in pairs
        if values.size
    ]


def _limits(space: gym.Space) -> tuple[Any, Any]:
    """Return the bounds: two scalars, or two arrays of an action's shape."""
    if (limits := value_range(space)) is not None:
        return limits
    match space:
        case gym.spaces.Box() if space.dtype.kind == "f":
            info = np.finfo(space.dtype)
            return info.min, info.max
        case gym.spaces.Box() if space.dtype.kind != "b":
            return space.low, space.high
    return 0, 1  # MultiBinary, and bools, which are viewed as bytes.


def _check_action(
    name: str, space: gym.Space, low: Any, high: Any, values: np.ndarray
) -> None:
    numbers = values.view(np.uint8) if values.dtype.kind == "b" else values
    if isinstance(low, int):
        # Two reductions take a third of the time of the comparison below.
        fine = low <= numbers.min() and numbers.max() <= high
    else:
        fine = ((low <= numbers) & (numbers <= high)).all()  # False for NaN.
    if not fine:
        bad = ~((low <= numbers) & (numbers <= high))
        k = int(np.argwhere(bad)[0][0])
        raise messages.WireError(
            f"'{name}' of environment {k} in this stream: expected {space}, got "
            f"{numbers[k].tolist()}"
        )
