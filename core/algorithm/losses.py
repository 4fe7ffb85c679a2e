# SPDX-License-Identifier: Apache-2.0
"""The three parts of the IMPALA loss; checks of a batch, and its split into groups.

Espeholt et al. 2018 (arXiv:1802.01561), section 4.2. All losses are sums over T and B,
as in the authors' own code: a larger batch makes larger gradients.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from core import columns, ranks
from core.algorithm import replay, vtrace
from core.algorithm.counters import not_a_number
from core.algorithm.distributions import ActionDistribution
from core.algorithm.gpu import wait_for
from core.errors import ConfigError
from core.nests import Nest, leaves, map_nest, not_finite

# Largest part of a batch, in bytes of observations, that a CPU processes at once.
PIECE_BYTES = 9 * 2**19


class ImpalaLoss(NamedTuple):
    """Scalars, sums over T and B. Only `total_loss` has a gradient."""

    total_loss: torch.Tensor  # pg_loss + baseline_loss + entropy_loss.
    pg_loss: torch.Tensor
    baseline_loss: torch.Tensor  # Times --baseline_cost.
    entropy_loss: torch.Tensor  # Minus the entropy, times --entropy_cost.
    entropy: torch.Tensor  # Nats, over all transitions.
    rho: torch.Tensor  # Clipped importance weights, over all transitions.
    target: torch.Tensor  # V-trace targets, float64, over all transitions.
    target_square: torch.Tensor  # Their squares.
    # More columns for logs.csv, by `counters.Field` or by name. Elements of a tensor
    # are summed.
    extra: dict[Any, torch.Tensor] = {}  # Shared, so never written to.

    def scalars(self) -> dict[Any, torch.Tensor]:
        """Return all scalars by name, including those in `extra`."""
        own = self._asdict()
        extra = own.pop("extra")
        return {**extra, **own}


# Names of numbers beside these scalars, until `batch_counts` makes columns of them.
COUNTS = ("steps", "new_steps", "replayed_steps")
TAKEN = {*ImpalaLoss._fields, *COUNTS, replay.LAG.name, replay.RHO.name}


def check_loss(loss: Any, info_keys: Iterable[str]) -> None:
    """Check the result of a `compute_loss`, which a fork may have changed.

    Raises:
      ConfigError: it is not an `ImpalaLoss`, or `total_loss` has no gradient, or a
        column in `extra` cannot be added to the log.
    """
    if not isinstance(loss, ImpalaLoss):
        raise ConfigError(
            f"compute_loss returned a {type(loss).__name__}; expected an ImpalaLoss, "
            "such as update.impala_loss(...)._replace(total_loss=...)"
        )
    total = loss.total_loss
    if not isinstance(total, torch.Tensor) or total.ndim or not total.requires_grad:
        got = f"a {type(total).__name__}"
        if isinstance(total, torch.Tensor):
            has_gradient = "with" if total.requires_grad else "without"
            got = f"{vtrace.describe(total)} {has_gradient} a gradient"
        raise ConfigError(
            "compute_loss returned an ImpalaLoss whose total_loss is not one number "
            "with a gradient: expected a tensor of shape [] (.sum() over T and B, no "
            f"detach, no .item()), got {got}"
        )
    columns.check_names(loss.extra, {*TAKEN, *(f"info_{key}" for key in info_keys)})


def compute_policy_gradient_loss(
    log_probs: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """Return -sum over T and B of advantage * log pi(a | x).

    Args:
      log_probs: [T, B] float32, log pi(a | x) of the actions taken.
      advantages: [T, B] float32, constants: they get no gradient.
    """
    return -(advantages.detach() * log_probs).sum()


def compute_baseline_loss(advantages: torch.Tensor) -> torch.Tensor:
    """Return 0.5 * sum over T and B of advantages ** 2, [T, B] as v - V(x)."""
    return 0.5 * advantages.square().sum()


def compute_entropy_loss(entropy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum, over the steps where `mask` is True, of minus the entropy.

    Args:
      entropy: [T, B] float32, in nats.
      mask: [T, B] bool.
    """
    return -entropy.masked_fill(~mask, 0).sum()


def clip_rewards(rewards: torch.Tensor, reward_clipping: str) -> torch.Tensor:
    if reward_clipping == "abs_one":
        return rewards.clamp(-1, 1)
    if reward_clipping == "none":
        return rewards
    raise ValueError(
        f'reward_clipping is {reward_clipping!r}; expected "abs_one" or "none"'
    )


def check_rows(
    learner_outputs: Mapping[str, torch.Tensor],
    batch: Mapping[str, Any],
    distribution: ActionDistribution,
) -> None:
    """Raise ValueError, which names the tensor, if a shape or dtype is wrong."""
    baseline = learner_outputs["baseline"]
    if (
        baseline.ndim != 2
        or len(baseline) < 2
        or baseline.dtype not in (torch.float32, torch.float64)
    ):
        raise ValueError(
            f"the learner's baseline is {vtrace.describe(baseline)}; expected float32 "
            "[T + 1, B] with T >= 1"
        )
    rows, dtype = tuple(baseline.shape), baseline.dtype
    parameters = (*rows, distribution.num_parameters)
    for whose, tensors in ("learner", learner_outputs), ("batch", batch):
        name = f"the {whose}'s policy_logits"
        vtrace.check(name, tensors["policy_logits"], parameters, dtype)
    if distribution.is_discrete:
        vtrace.check("action", batch["action"], rows, torch.int64)
    else:
        vtrace.check("sample", batch["sample"], (*rows, distribution.size), dtype)
    vtrace.check("reward", batch["reward"], rows, dtype)
    # Not uint8, for which ~ is bitwise: ~0 is 255.
    vtrace.check("done", batch["done"], rows, torch.bool)
    vtrace.check("truncated", batch["truncated"], rows, torch.bool)


def split_columns(
    rows: Nest, state: tuple[torch.Tensor, ...]
) -> Iterator[tuple[Nest, tuple[torch.Tensor, ...]]]:
    """Split a batch into groups of columns, contiguous. On a GPU there is one group.

    The activations of a whole batch take hundreds of MB. On the CPU one group after
    another uses the same memory.
    """
    B = rows["done"].shape[1]
    size = sum(x.nbytes for _, x in leaves(rows["observation"]))
    n = 1 if rows["done"].is_cuda else min(B, -(-size // PIECE_BYTES))
    bounds = [i * B // n for i in range(n + 1)]
    for group in map(slice, bounds[:-1], bounds[1:]):
        yield map_nest(lambda x, group=group: x[:, group].contiguous(), (rows, state))


def sums_to_log(
    vs: torch.Tensor,
    log_rhos: torch.Tensor,
    batch: Mapping[str, Any],
    clipping: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the fields of `ImpalaLoss` that are not losses, by name.

    Args:
      vs, log_rhos: [T, B], as in V-trace. log_rhos is -inf if there is no transition.
      clipping: options of V-trace, with or without `clip_rho_threshold`.
    """
    rhos = log_rhos.exp()
    if (threshold := clipping.get("clip_rho_threshold", 1.0)) is not None:
        rhos = rhos.clamp(max=threshold)
    targets = vs.double().masked_fill(batch["truncated"][:-1], 0)
    return {
        "rho": rhos.sum(),
        "target": targets.sum(),
        "target_square": targets.square().sum(),
        "extra": replay.sum_replayed(rhos, batch),
    }


def sum_scalars(parts: Sequence[ImpalaLoss], norm: torch.Tensor) -> dict[Any, float]:
    """Return the sums of the parts' scalars, and grad_norm, as numbers.

    Copies all numbers from the device at once, and waits for the device.

    Raises:
      ConfigError: a scalar that a fork has added is neither a number nor a tensor of
        numbers.
    """
    sums: dict[Any, torch.Tensor] = {}
    for part in parts:
        for key, value in part.scalars().items():
            try:
                x = torch.as_tensor(value).detach()
            except (TypeError, ValueError, RuntimeError) as error:
                raise not_a_number(key, value) from error
            if x.is_complex():
                raise not_a_number(key, value)
            x = x.to(norm.device, torch.float64)
            x = x.sum() if x.ndim else x
            sums[key] = sums[key] + x if key in sums else x
    sums["grad_norm"] = norm.double()
    numbers = torch.stack(list(sums.values()))
    wait_for(numbers.device)
    return dict(zip(sums, numbers.tolist()))


def target_moments(sums: Mapping[Any, float], num_steps: int) -> tuple[float, float]:
    """Return mean and variance of the V-trace targets, from the sums of scalars."""
    mean = sums["target"] / max(num_steps, 1)
    # float64 has enough digits for this difference, even if the mean is far from 0.
    return mean, max(0.0, sums["target_square"] / max(num_steps, 1) - mean**2)


def describe_not_finite(batch: Nest, sums: Mapping[Any, float]) -> str:
    """Name what is not finite in a batch and in its `sum_scalars`; say what to do."""
    in_batch = not_finite({k: v for k, v in batch.items() if k != "info"})
    in_loss = [
        key.name if isinstance(key, columns.Field) else key
        for key, value in sums.items()
        if key != "grad_norm" and not math.isfinite(value)
    ]
    loss = f"In the loss: {', '.join(in_loss) or 'nothing, but in its gradient'}."
    whose = "the batch"
    if ranks.size() > 1:  # The sums are of all learners.
        whose = "this learner's share of the batch (each learner names its own)"
    if in_batch:
        return (
            f"Not finite in {whose}: {', '.join(in_batch)}. {loss} Check the "
            "environment's observations and rewards."
        )
    return (
        f"Not finite in {whose}: nothing. {loss} Lower --learning_rate, check the "
        "environment's rewards for numbers that are too large, or look into the loss "
        "and Net.forward for a logarithm, a division or a square root."
    )
