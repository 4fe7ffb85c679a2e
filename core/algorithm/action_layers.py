# SPDX-License-Identifier: Apache-2.0
"""The layers of `Net` that depend on the action space: the first and the last."""

import math

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from core.algorithm.distributions import ActionDistribution, box_units
from core.algorithm.torsos import flat_features, orthogonal
from core.nests import Nest, leaves, map_nest
from core.rollout import leaf_spaces


class PolicyHead(nn.Linear):
    """The last layer of the policy: features [N, F] -> parameters [N, P].

    The initial weights are small: at first all actions of a Categorical are about
    equally likely, and a Gaussian's mean is about 0. The standard deviations of
    Gaussians do not depend on the observation; their logs are parameters of this layer.

    Args:
      initial_std: initial standard deviation of each Gaussian, in units in which a
        bounded Box is [-1, 1].
    """

    def __init__(
        self, num_features: int, distribution: ActionDistribution, initial_std: float
    ):
        num_log_stds = distribution.num_log_stds
        super().__init__(num_features, distribution.num_parameters - num_log_stds)
        orthogonal(self, gain=0.01)
        self.log_std: nn.Parameter | None = None
        if num_log_stds:
            self.log_std = nn.Parameter(
                torch.full((num_log_stds,), math.log(initial_std))
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = super().forward(x)
        if self.log_std is None:
            return parameters
        return torch.cat([parameters, self.log_std.expand(len(x), -1)], dim=1)


class ActionFeatures(nn.Module):
    """Features of the last actions, for `Net`'s core: [T, B, ...] -> [T * B, F].

    Discrete and MultiDiscrete parts become one-hot; a bounded Box becomes [-1, 1].

    Attributes:
      num_features: F.
    """

    offset: torch.Tensor
    scale: torch.Tensor
    categories: torch.Tensor

    def __init__(self, space: gym.Space):
        super().__init__()
        self.space = space
        self.num_features = gym.spaces.flatdim(space)
        if isinstance(space, gym.spaces.Discrete):
            categories = torch.arange(space.n) + int(space.start)
            self.register_buffer("categories", categories, persistent=False)
            return
        offset, scale = np.zeros(self.num_features), np.ones(self.num_features)
        begin = 0
        for _, leaf in leaves(leaf_spaces(space)):
            end = begin + gym.spaces.flatdim(leaf)
            if isinstance(leaf, gym.spaces.Box):
                offset[begin:end], scale[begin:end] = (
                    x.ravel() for x in box_units(leaf)
                )
            begin = end
        scale[scale == 0] = 1  # Where both bounds are the same.
        self.is_scaled = bool(offset.any() or (scale != 1).any())
        for name, x in ("offset", offset), ("scale", scale):
            self.register_buffer(name, torch.from_numpy(x).float(), persistent=False)

    def forward(self, actions: Nest) -> torch.Tensor:
        if isinstance(self.space, gym.spaces.Discrete):
            return (actions.reshape(-1, 1) == self.categories).float()
        actions = map_nest(lambda x: x.flatten(0, 1), actions)
        x = torch.cat(list(flat_features(self.space, actions)), dim=1)
        return (x - self.offset) / self.scale if self.is_scaled else x
