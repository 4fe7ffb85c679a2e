# SPDX-License-Identifier: Apache-2.0
"""Distributions over actions, for any action space, given the policy's outputs.

`Net`'s policy head returns P numbers for each observation, `policy_logits`. They are
the parameters of an `ActionDistribution`, which depends on the action space:

| part of the space | distribution      | parameters           | sample                |
| ----------------- | ----------------- | -------------------- | --------------------- |
| Discrete(n)       | Categorical       | n logits             | an index from 0       |
| MultiDiscrete     | Categorical, each | n logits, each       | an index from 0, each |
| MultiBinary       | Bernoulli         | a logit, each        | 0 or 1, each          |
| Box of floats     | DiagonalGaussian  | means, then log(std) | a number, each        |

A Tuple or Dict space is the product of its parts. Given the observation, the parts are
independent, so log-probabilities, entropies and KL divergences are sums. In the
parameters and in a sample all Categoricals come first, then all bits, then the elements
of all Boxes.

The policy acts in units in which a bounded Box is [-1, 1]. A Gaussian has no bounds, so
its sample is scaled to the Box and then clipped: this `action` reaches the environment.
Log-probabilities are those of the unclipped `sample`, which the rollout keeps beside
the action, so that pi / mu in V-trace is the ratio of the two densities at the same
sample. (PPO implementations do the same.)
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F

from core.action_spaces import category_sizes, check_actions
from core.nests import ArraySpec, Nest, leaves, map_nest, not_finite
from core.rollout import leaf_spaces, spec_of

# A Box with bounds beyond this counts as unbounded, like one with infinite bounds.
LARGEST_BOUND = 1e6

NOT_FINITE = "no action can be sampled: the policy's logits are not finite"


class Distribution(Protocol):
    """A distribution over S numbers, given P parameters. All tensors are [..., P or S].

    Attributes:
      num_parameters: P.
      size: S.
    """

    num_parameters: int
    size: int

    def sample(self, parameters: torch.Tensor) -> torch.Tensor:
        """Draw one sample [..., S] for each entry of [..., P]."""

    def mode(self, parameters: torch.Tensor) -> torch.Tensor:
        """Return the most probable sample [..., S]."""

    def log_prob(self, parameters: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Return the logarithm [...] of the probability (density) of `sample`."""

    def entropy(self, parameters: torch.Tensor) -> torch.Tensor:
        """Return the entropy [...] in nats."""

    def kl(self, parameters: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return KL(p || q) [...] in nats, with q given by `others`."""


class Categorical:
    """One of n actions. Parameters: n logits. Sample: the index, int64 [..., 1].

    An action that is ruled out has the lowest finite logit (`mask_logits`); -inf would
    make the entropy NaN.
    """

    size = 1

    def __init__(self, n: int):
        self.num_parameters = n

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        # The Gumbel-max trick: with noise E ~ Exp(1), the largest of logits - log(E) is
        # at index i with the probability softmax(logits)[i].
        noise = torch.empty_like(logits).exponential_().log_()
        best, index = (logits - noise).max(-1, keepdim=True)
        # In float64: float32 cannot hold the sum of two rows whose actions are all
        # ruled out.
        if not math.isfinite(best.sum(dtype=torch.float64)):
            raise FloatingPointError(NOT_FINITE)
        return index

    def mode(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1, keepdim=True)

    def log_prob(self, logits: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(logits, dim=-1).gather(-1, sample.long()).squeeze(-1)

    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        log_policy = F.log_softmax(logits, dim=-1)
        return -(log_policy.exp() * log_policy).sum(-1)

    def kl(self, logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        p, q = F.log_softmax(logits, dim=-1), F.log_softmax(others, dim=-1)
        return (p.exp() * (p - q)).sum(-1)


class Bernoulli:
    """n independent bits. Parameters: a logit per bit. Sample: 0 or 1, float32."""

    def __init__(self, n: int):
        self.num_parameters = self.size = n

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        _check_finite(logits)
        return torch.bernoulli(torch.sigmoid(logits))

    def mode(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits > 0).to(logits.dtype)

    def log_prob(self, logits: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        # log sigmoid(l) for 1, log(1 - sigmoid(l)) = log sigmoid(-l) for 0.
        return F.logsigmoid(torch.where(sample > 0.5, logits, -logits)).sum(-1)

    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        # -p log p - (1 - p) log(1 - p), where log p = l + log(1 - p).
        return (F.softplus(logits) - torch.sigmoid(logits) * logits).sum(-1)

    def kl(self, logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        p = torch.sigmoid(logits)
        of_ones = p * (F.logsigmoid(logits) - F.logsigmoid(others))
        of_zeros = (1 - p) * (F.logsigmoid(-logits) - F.logsigmoid(-others))
        return (of_ones + of_zeros).sum(-1)


class DiagonalGaussian:
    """n independent normal variables. Parameters: n means, then n log(std)."""

    def __init__(self, n: int):
        self.size = n
        self.num_parameters = 2 * n

    def sample(self, parameters: torch.Tensor) -> torch.Tensor:
        _check_finite(parameters)
        mean, log_std = parameters.chunk(2, dim=-1)
        return mean + log_std.exp() * torch.randn_like(mean)

    def mode(self, parameters: torch.Tensor) -> torch.Tensor:
        return parameters.chunk(2, dim=-1)[0]

    def log_prob(self, parameters: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        mean, log_std = parameters.chunk(2, dim=-1)
        deviation = (sample - mean) * (-log_std).exp()
        constant = 0.5 * math.log(2 * math.pi)
        return -(0.5 * deviation.square() + log_std + constant).sum(-1)

    def entropy(self, parameters: torch.Tensor) -> torch.Tensor:
        """Return the differential entropy, which is negative for a small std."""
        log_std = parameters.chunk(2, dim=-1)[1]
        return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def kl(self, parameters: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        (mean_p, log_p), (mean_q, log_q) = (
            x.chunk(2, -1) for x in (parameters, others)
        )
        ratio = (2 * (log_p - log_q)).exp()  # Of the variances.
        distance = ((mean_p - mean_q) * (-log_q).exp()).square()
        return 0.5 * (ratio + distance - 1 - 2 * (log_p - log_q)).sum(-1)


def _check_finite(parameters: torch.Tensor) -> None:
    if not torch.isfinite(parameters).all():
        raise FloatingPointError(NOT_FINITE)


def _find_cause(inputs: Nest) -> str:
    """Say why logits are not finite. The weights of a run are always finite."""
    if not any(True for _ in leaves(inputs)):
        return "Check the environment's observations and rewards, and Net.forward."
    if bad := not_finite(inputs):
        return (
            f"Not finite in the network's inputs: {', '.join(bad)}. So check the "
            "environment's observations and rewards."
        )
    return (
        "The network's inputs and weights are finite. So look into Net.forward for a "
        "logarithm, a division or a square root, and into the inputs for numbers that "
        "are too large."
    )


class ActionDistribution:
    """The policy's distribution over the actions of one space.

    Attributes:
      space: the action space.
      is_discrete: whether the space is one Discrete choice.
      num_parameters: P, the size of `policy_logits`.
      size: S, the size of a sample.
      num_log_stds: number of logs of standard deviations, at the end of the parameters.
      columns: the specs of the arrays of `draw`, for one row of one environment.

    Raises:
      ConfigError: no distribution fits a part of the space.
    """

    def __init__(self, space: gym.Space):
        self.space = space
        self.is_discrete = isinstance(space, gym.spaces.Discrete)
        self._first = int(getattr(space, "start", 0)) if self.is_discrete else 0
        check_actions(space)
        sizes = category_sizes(space)
        bits = boxes = 0
        for _, leaf in leaves(leaf_spaces(space)):
            match leaf:
                case gym.spaces.MultiBinary():
                    bits += math.prod(leaf.shape)
                case gym.spaces.Box():
                    boxes += math.prod(leaf.shape)
        self.parts: list[Distribution] = [Categorical(n) for n in sizes]
        self.parts += [Bernoulli(bits)] if bits else []
        self.parts += [DiagonalGaussian(boxes)] if boxes else []
        self.num_log_stds = boxes
        self.num_parameters = sum(part.num_parameters for part in self.parts)
        self.size = sum(part.size for part in self.parts)
        # Where the next leaf of each kind begins in a sample.
        begins = [0, len(sizes), len(sizes) + bits]

        def read(leaf: gym.Space) -> _ActionPart:
            is_bits = isinstance(leaf, gym.spaces.MultiBinary)
            kind = 1 if is_bits else 2 if isinstance(leaf, gym.spaces.Box) else 0
            part = _ActionPart(leaf, begins[kind])
            begins[kind] = part.elements.stop
            return part

        self._actions = map_nest(read, leaf_spaces(space))
        self.columns: dict[str, Nest] = {"action": spec_of(space, "action")}
        if not self.is_discrete:  # If it is, the action is the sample.
            self.columns["sample"] = ArraySpec((self.size,), np.dtype(np.float32))

    def draw(
        self, parameters: torch.Tensor, *, inputs: Nest = (), greedy: bool = False
    ) -> dict[str, Nest]:
        """Choose actions on the CPU, at random or (`greedy`) the most probable ones.

        Args:
          parameters: [T, B, P] float32.
          inputs: what the network computed them from, for the error message; (): not
            known.

        Returns:
          `action`, a nest of [T, B, ...] with the structure and dtypes of the space.
          Unless the space is Discrete, also `sample`, float32 [T, B, S]: the draw,
          which the action scales and clips.

        Raises:
          FloatingPointError: the parameters are not finite.
        """
        try:
            drawn = [
                part.mode(p) if greedy else part.sample(p)
                for part, (p,) in self._split(parameters)
            ]
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}. {_find_cause(inputs)}") from None
        if self.is_discrete:
            action = drawn[0].squeeze(-1)
            return {"action": action + self._first if self._first else action}
        sample = torch.cat([x.float() for x in drawn], dim=-1)
        action = map_nest(lambda part: part.to_action(sample), self._actions)
        return {"action": action, "sample": sample}

    def sample_of(self, rows: Mapping[str, Nest]) -> torch.Tensor:
        """Return the samples [T, B, S] that gave the actions of rollout rows."""
        if self.is_discrete:
            return (rows["action"] - self._first).unsqueeze(-1)
        return rows["sample"]

    def log_prob(self, parameters: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """Return log pi(a | x) [T, B] of samples [T, B, S], given [T, B, P]."""
        samples = sample.split([part.size for part in self.parts], dim=-1)
        parts = zip(self._split(parameters), samples)
        log_probs = (part.log_prob(p, x) for (part, (p,)), x in parts)
        return functools.reduce(torch.add, log_probs)

    def entropy(self, parameters: torch.Tensor) -> torch.Tensor:
        """Return the entropy [T, B] in nats; that of a Box may be negative."""
        parts = self._split(parameters)
        return functools.reduce(torch.add, (part.entropy(p) for part, (p,) in parts))

    def kl(self, parameters: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return KL(p || q) [T, B] in nats, with q given by `others`."""
        parts = self._split(parameters, others)
        return functools.reduce(torch.add, (part.kl(p, q) for part, (p, q) in parts))

    def _split(self, *parameters: torch.Tensor) -> Iterator[tuple[Distribution, Any]]:
        """Yield each part with its own slice of each tensor of parameters."""
        if len(self.parts) == 1:  # Such as Discrete. Saves 5 us in each inference.
            return iter([(self.parts[0], parameters)])
        sizes = [part.num_parameters for part in self.parts]
        return zip(self.parts, zip(*(p.split(sizes, -1) for p in parameters)))


class _ActionPart:
    """Turns some elements of a sample into one leaf of the action.

    Args:
      begin: index of the first of these elements in the sample.
    """

    def __init__(self, space: gym.Space, begin: int):
        self.shape = spec_of(space).shape
        self.elements = slice(begin, begin + math.prod(self.shape))
        self.dtype = torch.from_numpy(np.empty(0, spec_of(space).dtype)).dtype
        self.start = self.box = None
        if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
            # int64: torch cannot add most unsigned types to a sample.
            self.start = torch.from_numpy(np.asarray(space.start, np.int64))
        if isinstance(space, gym.spaces.Box):
            offset, scale = box_units(space)
            # float64, so that an action at a bound of the Box equals the bound.
            bounds = (offset, scale, space.low, space.high)
            self.box = [torch.as_tensor(x, dtype=torch.float64) for x in bounds]

    def to_action(self, sample: torch.Tensor) -> torch.Tensor:
        x = sample[..., self.elements].reshape(*sample.shape[:-1], *self.shape)
        if self.box is not None:
            offset, scale, low, high = self.box
            x = (x.double() * scale + offset).clamp(low, high)
        x = x.to(self.dtype)
        return x if self.start is None else x + self.start


def box_units(space: gym.spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    """Return offset and scale, float64 [*shape]: action = offset + scale * sample.

    An element that is unbounded on either side has scale 1. Its offset is the value of
    the space that is nearest to 0: usually 0.
    """
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    is_bounded = (low >= -LARGEST_BOUND) & (high <= LARGEST_BOUND)
    nearest = np.clip(0, low, high)
    low, high = (np.where(is_bounded, x, nearest) for x in (low, high))
    return (low + high) / 2, np.where(is_bounded, (high - low) / 2, 1)


def mask_logits(logits: torch.Tensor, mask: Nest) -> torch.Tensor:
    """Rule actions out, as an `action_mask` says (`core.action_spaces`).

    Args:
      logits: [N, P] float32, parameters of an `ActionDistribution`, which begin with
        the logits of all Categoricals.
      mask: an array or a tuple of arrays, [N, ...]: one entry for each logit of a
        Categorical.

    Returns:
      logits, with the lowest finite number where an action is ruled out.
    """
    flags = torch.cat([part.flatten(1) for _, part in leaves(mask)], dim=1) != 0
    n = flags.shape[1]
    allowed = logits[:, :n].masked_fill(~flags, torch.finfo(logits.dtype).min)
    return torch.cat([allowed, logits[:, n:]], dim=1)
