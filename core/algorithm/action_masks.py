# SPDX-License-Identifier: Apache-2.0
"""Action masks: the observation says which actions are allowed.

The environment observes a Dict with the key `action_mask`, as those of PettingZoo do:
True or 1 for each value of the Discrete action that is allowed now, False or 0 for each
that is not. Where an action has several Discrete choices (MultiDiscrete, or a Dict or
Tuple of such spaces), the mask has the entries of all choices one after another, in one
array or in a Tuple of arrays.

The mask is a part of the row, so the learner applies the same mask as the actor did.
`mask_logits` gives each action that is not allowed the lowest finite logit, so that its
probability is 0 in sampling, log-probabilities, entropy and V-trace.

If an environment allows no action at all, it broke its own rules: the episode ends with
an error (`core.environments.row_writer`). If such a row comes from a server of another
make, all actions are equally likely.
"""

from typing import Any

import gymnasium as gym
import torch

from core.errors import ConfigError
from core.nests import Nest, leaves
from core.rollout import ACTION_MASK, category_sizes


def split_mask(observation: Any) -> tuple[Any, Any]:
    """Return an observation, or its space, without its mask, and the mask or None.

    What is left of a Dict with one other key is the value of that key, so that a
    picture beside a mask is a picture.
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
    expected, got = sum(category_sizes(action_space)), gym.spaces.flatdim(mask)
    is_flags = all(
        isinstance(part, gym.spaces.Box | gym.spaces.MultiBinary)
        for _, part in leaves(_parts_of(mask))
    )
    if expected == 0 or got != expected or not is_flags:
        raise ConfigError(
            f"'observation/{ACTION_MASK}' is {mask}; expected {expected} zeros and "
            "ones, as MultiBinary or as a Box of int8: one for each value of each "
            f"Discrete choice in the action space {action_space}. Give the observation "
            "another key if it is no mask."
        )
    if isinstance(rest, gym.spaces.Dict) and not rest.spaces:
        raise ConfigError(
            f"the observation has only the key '{ACTION_MASK}'; expected something to "
            "observe beside it."
        )


def _parts_of(mask: gym.Space) -> Nest:
    return tuple(mask.spaces) if isinstance(mask, gym.spaces.Tuple) else mask


def mask_logits(logits: torch.Tensor, mask: Nest) -> torch.Tensor:
    """Rule actions out.

    Args:
      logits: [N, P] float32, parameters of an `ActionDistribution`; those of the
        Categoricals come first.
      mask: an array or a tuple of arrays, [N, ...], with as many entries as these.

    Returns:
      logits, the lowest finite number where an action is ruled out.
    """
    flags = torch.cat([part.flatten(1) for _, part in leaves(mask)], dim=1) != 0
    n = flags.shape[1]
    allowed = logits[:, :n].masked_fill(~flags, torch.finfo(logits.dtype).min)
    return torch.cat([allowed, logits[:, n:]], dim=1)
