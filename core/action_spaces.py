# SPDX-License-Identifier: Apache-2.0
"""Action spaces that a policy can act in, and masks that rule actions out.

Masks: observations are a Dict with the key `action_mask`, as in PettingZoo: True or 1
for each value of the Discrete action that is allowed now, False or 0 for each value
that is not. Where an action has several Discrete choices (MultiDiscrete, or a Dict or
Tuple of such spaces), the mask has the entries of all choices one after another, in one
array or in a Tuple of arrays.

The mask is a part of the rollout row, so learner and actor apply the same mask.
`core.algorithm.distributions.mask_logits` gives each action that is not allowed the
lowest finite logit, so that its probability is 0 in sampling, log-probabilities,
entropy and V-trace.

If a mask allows no action at all, that is an error of the environment
(`core.environments.row_writer`). If the server that sends such a row is not
TorchBeast's, the learner's pool ends the stream (`check_mask` in csrc/wire.cc).

Needs numpy and gymnasium, never torch: environment machines use it.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from core.errors import ConfigError
from core.nests import Nest, leaves
from core.rollout import (
    UnlearnableSpace,
    leaf_spaces,
    spec_of,
    text_of,
    wrong_bounds,
)

ACTION_MASK = "action_mask"  # Key of a Dict observation.
MAX_CATEGORIES = 2**24  # A `sample` is float32, which has all integers up to here.


def check_spaces(observation_space: gym.Space, action_space: gym.Space) -> None:
    """Refuse spaces that no network and no policy fits, and a mask that does not fit.

    Raises:
      ConfigError: the message names the part of the space, and what to do.
    """
    for name, space in ("observation", observation_space), ("action", action_space):
        try:
            spec_of(space, name)
        except UnlearnableSpace as error:
            raise ConfigError(str(error)) from error
    check_actions(action_space)
    check_mask(observation_space, action_space)


def check_actions(space: gym.Space) -> None:
    """Refuse an action space that no distribution fits.

    Raises:
      ConfigError: the message names the part of the space, and what to do.
    """
    for name, part in leaves(leaf_spaces(space), "action"):
        if isinstance(part, gym.spaces.Box):
            _check_box(name, part)
        if max(category_sizes(part), default=0) > MAX_CATEGORIES:
            raise ConfigError(
                f"'{name}' is {text_of(part)}: a policy cannot choose among more than "
                f"{MAX_CATEGORIES} values. Wrap the environment so that it takes "
                "MultiDiscrete (digits of the number), or a Box of floats."
            )


def _check_box(name: str, space: gym.spaces.Box) -> None:
    if space.dtype.kind != "f":
        raise ConfigError(
            f"'{name}' is {text_of(space)}: no distribution of the policy fits a Box "
            f"of {space.dtype}. Wrap the environment so that it takes a Box of floats, "
            "or MultiDiscrete for whole numbers, or MultiBinary for bits."
        )
    if (problem := wrong_bounds(space.low, space.high)) is not None:
        raise ConfigError(
            f"'{name}' is {text_of(space)}: {problem}. Change it with a "
            "gymnasium.ActionWrapper."
        )


def category_sizes(action_space: gym.Space) -> list[int]:
    """Return how many values each Discrete choice of an action has.

    One number for a Discrete leaf, one for each element of a MultiDiscrete leaf.
    """
    sizes: list[int] = []
    for _, leaf in leaves(leaf_spaces(action_space)):
        match leaf:
            case gym.spaces.Discrete():
                sizes.append(int(leaf.n))
            case gym.spaces.MultiDiscrete():
                sizes += map(int, leaf.nvec.flat)
    return sizes


def first_action(space: gym.Space) -> Any:
    """Return the `last_action` (one leaf) of a row before the first action.

    Of a Box it is 0, or the value of the space that is nearest to 0. Of Discrete and
    MultiDiscrete it is the lowest value, otherwise 0.
    """
    if isinstance(space, gym.spaces.Box):
        return np.clip(0, space.low, space.high)
    return getattr(space, "start", 0)


# ---------------------------------------------------------------------------- masks


def split_mask(observation: Any) -> tuple[Any, Any]:
    """Return an observation, or its space, without its mask, and the mask or None.

    If the Dict has only one other key, the value of that key is returned, so that a
    picture beside a mask becomes a picture.
    """
    is_space = isinstance(observation, gym.spaces.Dict)
    parts = observation.spaces if is_space else observation
    if not isinstance(parts, dict) or ACTION_MASK not in parts:
        return observation, None
    rest = {key: value for key, value in parts.items() if key != ACTION_MASK}
    if len(rest) == 1:
        (observation,) = rest.values()
    else:
        observation = gym.spaces.Dict(rest) if is_space else rest
    return observation, parts[ACTION_MASK]


def check_mask(observation_space: gym.Space, action_space: gym.Space) -> None:
    """Refuse a mask that does not fit the action space.

    Raises:
      ConfigError: the message says how many entries were expected.
    """
    rest, mask = split_mask(observation_space)
    if mask is None:
        return
    expected = sum(category_sizes(action_space))
    if expected == 0:
        raise ConfigError(
            f"the observation has the key '{ACTION_MASK}', but a mask rules out values "
            f"of Discrete and MultiDiscrete actions only, and the action space is "
            f"{text_of(action_space)}. Give that key another name."
        )
    parts = mask.spaces if isinstance(mask, gym.spaces.Tuple) else (mask,)
    are_flags = all(
        isinstance(part, gym.spaces.Box | gym.spaces.MultiBinary) for part in parts
    )
    if not are_flags or gym.spaces.flatdim(mask) != expected:
        raise ConfigError(
            f"'observation/{ACTION_MASK}' is {text_of(mask)}; expected {expected} "
            f"zeros and ones, one for each value of each Discrete choice in the action "
            f"space {text_of(action_space)}: MultiBinary({expected}), a Box of int8, "
            "or a Tuple of such spaces. If it is not a mask, give the key another name."
        )
    if isinstance(rest, gym.spaces.Dict) and not rest.spaces:
        raise ConfigError(
            f"the observation has only the key '{ACTION_MASK}'; expected something to "
            "observe beside it."
        )


def allowed_values(mask: Nest, sizes: Sequence[int]) -> list[np.ndarray]:
    """Return which values of each Discrete choice a mask allows, counted from 0.

    Args:
      mask: of one environment: an array, or a tuple of arrays.
      sizes: as `category_sizes` returns them.
    """
    flags = np.concatenate([np.ravel(part) for _, part in leaves(mask)]) != 0
    return [np.flatnonzero(part) for part in np.split(flags, np.cumsum(sizes)[:-1])]
