# SPDX-License-Identifier: Apache-2.0
"""Running statistics that `Net` keeps as buffers: of its inputs, and of its targets.

--normalize_observations adds `InputNorm` to a network, and --normalize_returns makes
`PopArt` the last layer of the baseline. Their statistics are in the network's
state_dict. So they are in checkpoints, and actors get them together with the weights.
Only `Learner.update` changes the statistics, after the optimizer step: the forward pass
of an update uses the statistics with which an actor of the newest weights acted, so the
importance weights of its rollouts are 1. An update whose loss is not finite is skipped
and changes no statistics. The test modes do not change them.
"""

import argparse
import itertools
import logging
from collections.abc import Iterable

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from core.action_spaces import ACTION_MASK
from core.errors import ConfigError
from core.nests import Nest, leaves, map_nest
from core.rollout import leaf_spaces

log = logging.getLogger(__name__)

CLIP = 10.0  # Normalized inputs are in [-CLIP, CLIP].
EPSILON = 1e-8  # Added to the variance, which may be 0.
# Weight of a new batch in the statistics of targets: an average over about 1 / RATE
# updates. An average over all updates would lag behind the targets, which grow while
# the policy improves. The statistics of one batch would be noisy: its rollouts are few,
# and their rows are similar.
RATE = 0.01
MIN_STD, MAX_STD = 1e-4, 1e6  # Bounds of Hessel et al. 2018.
# Another lower bound, relative to the mean. When a policy has solved its task, targets
# are almost equal. Divided by their standard deviation, differences without any meaning
# would be as large as others, and could change the policy until it fails.
MIN_RELATIVE_STD = 0.001


def normalized(flags: argparse.Namespace) -> list[str]:
    """Return what the flags ask to normalize: "observations", "returns", or both."""
    names = ("observations", "returns")
    return [name for name in names if getattr(flags, f"normalize_{name}")]


def check_statistics(flags: argparse.Namespace, net: nn.Module) -> None:
    """Raise ConfigError if a flag needs statistics that Net does not keep."""
    for what, name, expected in (
        ("observations", "normalize", InputNorm),
        ("returns", "baseline", PopArt),
    ):
        part = getattr(net, name, None)
        if what in normalized(flags) and not hasattr(part, "learn"):
            raise ConfigError(
                f"--normalize_{what} is set, but Net.{name} is {type(part).__name__}, "
                f"which keeps no statistics; expected {expected.__name__} of "
                "core.algorithm.normalization. Edit Net, or leave the flag out."
            )
    inputs = getattr(net, "normalize", None)
    if flags.normalize_observations and isinstance(inputs, InputNorm):
        if inputs.clip_rewards and not any(
            isinstance(part, RunningNorm) for part in inputs.observation
        ):
            log.warning(
                "--normalize_observations changes nothing here: it is for Box spaces "
                "of floats, and the observation has none."
            )


class RunningNorm(nn.Module):
    """Running mean and variance of each element of an array, in float64.

    Before the first `add` the mean is 0 and the variance 1.
    """

    count: torch.Tensor
    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., *shape] normalized and clipped, as float32.

        Values that are not finite become NaN. Clipping alone would turn infinity into
        an ordinary number, and hide the error of an environment.
        """
        x = x.double()  # First, since operations on two dtypes take twice as long.
        y = (x - self.mean) * (self.var + EPSILON).rsqrt()
        return y.clamp(-CLIP, CLIP).add(x, alpha=0).float()  # 0 * infinity is NaN.

    @torch.no_grad()
    def moments(self, x: torch.Tensor) -> torch.Tensor:
        """Return number, mean and variance of rows [N, *shape]: [3, *shape] float64."""
        var, mean = torch.var_mean(x.double(), dim=0, correction=0)
        return torch.stack([torch.full_like(mean, len(x)), mean, var])

    @torch.no_grad()
    def add(self, moments: torch.Tensor) -> None:
        """Add rows to the statistics, given their `moments`, as Chan et al. 1979 do.

        Writes in place: actors and CUDA graphs hold these tensors. If a value is not
        finite, the statistics do not change.
        """
        num, mean, var = moments
        if not var.isfinite().all():  # Syncs with the device.
            return
        self.count += num.max() if num.numel() else 0
        weight, delta = num / self.count, mean - self.mean
        self.var.mul_(1 - weight).add_(weight * (var + (1 - weight) * delta**2))
        self.mean += weight * delta


class InputNorm(nn.Module):
    """Normalizes a network's inputs from rollout rows: observations and rewards.

    Each leaf of the observation has statistics of its own. Only leaves of Box spaces of
    floats are normalized. Integers (pictures), Discrete, MultiDiscrete and MultiBinary
    leaves, which networks scale or turn into one-hot vectors, stay as they are, and so
    does the key `action_mask` of a Dict. The reward is normalized unless the network
    clips it.
    """

    def __init__(self, observation_space: gym.Space, *, clip_rewards: bool):
        super().__init__()
        self.clip_rewards = clip_rewards
        norms = map_nest(_norm_for, leaf_spaces(observation_space))
        if isinstance(norms, dict) and ACTION_MASK in norms:
            norms[ACTION_MASK] = map_nest(lambda _: nn.Identity(), norms[ACTION_MASK])
        self.observation = nn.ModuleList(norm for _, norm in leaves(norms))
        numbers = itertools.count()
        # The index in `observation` for each leaf.
        self._number = map_nest(lambda _: next(numbers), norms)
        self.reward = RunningNorm(())

    def forward(self, rows: dict[str, Nest]) -> dict[str, Nest]:
        """Return rows [T, B, ...] with normalized observations and rewards."""
        observation = map_nest(
            lambda i, x: self.observation[i](x), self._number, rows["observation"]
        )
        reward = rows["reward"] if self.clip_rewards else self.reward(rows["reward"])
        return {**rows, "observation": observation, "reward": reward}

    def moments(self, rows: dict[str, Nest]) -> torch.Tensor:
        """Return what `learn` needs of a batch [T + 1, B, ...]: [N] float64.

        Row 0 is left out: it was the last row of the previous rollout.
        """
        found: list[torch.Tensor] = []

        def collect(i: int, x: torch.Tensor) -> None:
            if isinstance(norm := self.observation[i], RunningNorm):
                found.append(norm.moments(x[1:].flatten(0, 1)).flatten())

        # In the order of the space: rows may have the keys of a Dict in another order.
        map_nest(collect, self._number, rows["observation"])
        if not self.clip_rewards:
            found.append(self.reward.moments(rows["reward"][1:].flatten()))
        return torch.cat(found) if found else rows["reward"].new_zeros(0).double()

    def learn(self, moments: Iterable[torch.Tensor]) -> None:
        """Add batches to the statistics, given the `moments` of each."""
        norms = [norm for norm in self.observation if isinstance(norm, RunningNorm)]
        norms += [] if self.clip_rewards else [self.reward]
        sizes = [3 * norm.mean.numel() for norm in norms]
        for batch in moments:
            for norm, part in zip(norms, batch.split(sizes), strict=True):
                norm.add(part.view(3, *norm.mean.shape))


def _norm_for(space: gym.Space) -> nn.Module:
    """Return the module that normalizes a leaf of an observation."""
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return RunningNorm(space.shape)
    return nn.Identity()


class PopArt(nn.Linear):
    """A linear layer for values that normalizes its targets (PopArt).

    "Preserving outputs precisely, while adaptively rescaling targets" (van Hasselt et
    al. 2016, arXiv:1602.07714). The layer computes v = std * (W x + b) + mean, where
    mean and std are the running mean and standard deviation of the V-trace targets. So
    v is in units of the rewards, and W x + b is normalized. When mean and std change, W
    and b change so that v stays the same.

    The loss has to divide by `scale` (`core.algorithm.update.impala_loss`). The paper
    updates the statistics with a batch before it computes the loss of the batch. Here
    this comes after the optimizer step: the loss is computed for one group of columns
    after another, so the targets of all columns are known only at the end.

    Statistics have one element for each output, so that an output for each of several
    tasks could have its own.
    """

    updates: torch.Tensor
    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self, in_features: int, out_features: int = 1):
        super().__init__(in_features, out_features)
        zeros = torch.zeros(out_features, dtype=torch.float64)
        self.register_buffer("updates", zeros)
        self.register_buffer("mean", zeros.clone())
        self.register_buffer("var", zeros + 1)

    @property
    def std(self) -> torch.Tensor:
        """Standard deviation of the targets, within its bounds: [out_features]."""
        least = (MIN_RELATIVE_STD * self.mean.abs()).clamp(MIN_STD, MAX_STD)
        return torch.maximum(self.var.sqrt(), least).clamp(max=MAX_STD)

    @property
    def scale(self) -> torch.Tensor:
        """The loss divides errors by this: `std`, or infinity before the first `learn`.

        So in the first batch only the entropy bonus has a gradient. Without a
        normalization the other gradients could be so large that they stay in the
        optimizer's averages for long.
        """
        return torch.where(self.updates > 0, self.std, torch.inf).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return values [..., out_features] in units of the rewards."""
        return super().forward(x) * self.std.float() + self.mean.float()

    @torch.no_grad()
    def learn(self, mean: float, var: float) -> None:
        """Add the mean and variance of a batch's targets; keep the layer's outputs.

        The first 1 / RATE batches have equal weights. After that, each batch reduces
        the weight of the older ones by the factor 1 - RATE. Writes in place: actors and
        CUDA graphs hold these tensors.
        """
        old_mean, old_std = self.mean.clone(), self.std
        self.updates += 1
        rate = (1 / self.updates).clamp(min=RATE)
        # The variance of a mixture of two distributions.
        delta = mean - old_mean
        self.var.mul_(1 - rate).add_(rate * (var + (1 - rate) * delta**2))
        self.mean += rate * delta
        std = self.std
        self.weight.copy_(self.weight * (old_std / std).unsqueeze(1))
        self.bias.copy_((self.bias * old_std + old_mean - self.mean) / std)
