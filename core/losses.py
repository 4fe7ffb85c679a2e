# SPDX-License-Identifier: Apache-2.0
"""The IMPALA loss, in three parts, and the alignment of rollout rows behind it.

Espeholt et al. 2018 (arXiv:1802.01561), section 4.2. All losses are sums over T and B,
as in the authors' own code: a larger batch makes larger gradients.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from core import vtrace
from core.spaces import Nest, leaves, map_nest
from core.vtrace import action_log_probs

PIECE_BYTES = 9 * 2**19  # Observations that the CPU learns from at once.


class ImpalaLoss(NamedTuple):
    """Scalars, sums over T and B. Only `total_loss` has a gradient."""

    total_loss: torch.Tensor  # pg_loss + baseline_loss + entropy_loss.
    pg_loss: torch.Tensor
    baseline_loss: torch.Tensor  # Times its cost.
    entropy_loss: torch.Tensor  # Minus the entropy, times its cost.
    entropy: torch.Tensor  # Nats, over all transitions.
    rho: torch.Tensor  # Clipped importance weights, over all transitions.
    # What else logs.csv shall have columns for, by `metrics.Field` or by name. Elements
    # of a tensor are summed.
    extra: dict[Any, torch.Tensor] = {}  # Shared, so never written to.

    def scalars(self) -> dict[Any, torch.Tensor]:
        """Return all of them by name, those in `extra`, too."""
        own = self._asdict()
        return {**own.pop("extra"), **own}


def compute_policy_gradient_loss(
    logits: torch.Tensor, actions: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """Return -sum over T and B of advantage * log pi(a | x).

    Args:
      logits: [T, B, A] float32.
      actions: [T, B] int64.
      advantages: [T, B] float32, constants: they get no gradient.
    """
    return -(advantages.detach() * action_log_probs(logits, actions)).sum()


def compute_baseline_loss(advantages: torch.Tensor) -> torch.Tensor:
    """Return 0.5 * sum over T and B of advantages ** 2, [T, B] as v - V(x)."""
    return 0.5 * advantages.square().sum()


def compute_entropy_loss(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum, over the steps where `mask` is True, of minus the entropy.

    Args:
      logits: [T, B, A] float32. An action can be ruled out by a very low finite logit
        (`torch.finfo(logits.dtype).min`); -inf would give NaN.
      mask: [T, B] bool.
    """
    log_policy = F.log_softmax(logits, dim=-1)
    negentropy = (log_policy.exp() * log_policy).sum(-1)  # [T, B]
    return negentropy.masked_fill(~mask, 0).sum()


def impala_loss(
    learner_outputs: Mapping[str, torch.Tensor],
    batch: Mapping[str, Any],
    *,
    discounting: float,
    baseline_cost: float,
    entropy_cost: float,
    reward_clipping: str,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    clip_c_threshold: float = 1.0,
    lambda_: float = 1.0,
) -> ImpalaLoss:
    """Compute the loss of a batch of rollouts.

    Its gradient is the update of section 4.2 of Espeholt et al. 2018, with sums over
    all transitions x_s -> x_{s+1} of the batch:

        - sum rho_s log pi(a_s|x_s) (r_s + gamma_s v_{s+1} - V(x_s))
        + baseline_cost * 1/2 sum (v_s - V(x_s))^2
        - entropy_cost * sum H(pi(.|x_s))

    where v is the V-trace target of `core.vtrace`, and only pi and V have a gradient.

    Args:
      learner_outputs: policy_logits [T + 1, B, A] and baseline [T + 1, B], both
        float32 (under autocast the network casts them back), of the network being
        trained, for the observation of each row.
      batch: [T + 1, B, ...] as the table in `core.rollouts` says. Used are reward and
        policy_logits, float32; done and truncated, bool; action, int64 and counted
        from 0.
      discounting: gamma inside an episode.
      baseline_cost: weight of the baseline loss.
      entropy_cost: weight of the entropy bonus.
      reward_clipping: "abs_one" clamps rewards to [-1, 1], "none" leaves them.
      clip_rho_threshold, clip_pg_rho_threshold, clip_c_threshold, lambda_: see
        `core.vtrace.from_importance_weights`.

    Raises:
      ValueError: a shape or dtype disagrees, the message names the tensor; or
        reward_clipping is neither of the two.
    """
    _check_rows(learner_outputs, batch)

    # Row t+1 of the batch holds the action chosen at row t's observation, with the
    # logits it was drawn from, the reward it brought, and whether it ended the episode
    # (the table in core.rollouts). So the T transitions pair the learner's rows [:-1],
    # where they start, with the batch's rows [1:], where they arrive. The learner's
    # last row has no transition left; its value is what the rollout bootstraps from.
    logits = learner_outputs["policy_logits"][:-1]
    values = learner_outputs["baseline"][:-1]
    bootstrap_value = learner_outputs["baseline"][-1]
    actions = batch["action"][1:]
    behavior_logits = batch["policy_logits"][1:]
    rewards = _clip_rewards(batch["reward"][1:], reward_clipping)
    discounts = (~batch["done"][1:]).to(values.dtype) * discounting

    # Termination and truncation part here (Pardo et al. 2018, arXiv:1712.00378). An
    # episode that terminates gets discount 0. One that is truncated goes on to
    # bootstrap from V(final observation): the transition into a truncated row is like
    # any other. What starts at a truncated row leads to the reset observation and is
    # no transition: weight zero, so its v is V, and all its losses are zero.
    transitions = ~batch["truncated"][:-1]

    with torch.no_grad():
        log_rhos = action_log_probs(logits, actions)
        log_rhos -= action_log_probs(behavior_logits, actions)
        log_rhos.masked_fill_(~transitions, -torch.inf)
    vs, pg_advantages = vtrace.from_importance_weights(
        log_rhos,
        discounts,
        rewards,
        values,
        bootstrap_value,
        clip_rho_threshold=clip_rho_threshold,
        clip_pg_rho_threshold=clip_pg_rho_threshold,
        clip_c_threshold=clip_c_threshold,
        lambda_=lambda_,
    )

    pg_loss = compute_policy_gradient_loss(logits, actions, pg_advantages)
    baseline_loss = baseline_cost * compute_baseline_loss(vs - values)
    negentropy = compute_entropy_loss(logits, transitions)
    entropy_loss = entropy_cost * negentropy
    rhos = log_rhos.exp()
    if clip_rho_threshold is not None:
        rhos = rhos.clamp(max=clip_rho_threshold)
    return ImpalaLoss(
        total_loss=pg_loss + baseline_loss + entropy_loss,
        pg_loss=pg_loss.detach(),
        baseline_loss=baseline_loss.detach(),
        entropy_loss=entropy_loss.detach(),
        entropy=-negentropy.detach(),
        rho=rhos.sum(),
    )


def _clip_rewards(rewards: torch.Tensor, reward_clipping: str) -> torch.Tensor:
    if reward_clipping == "abs_one":
        return rewards.clamp(-1, 1)
    if reward_clipping == "none":
        return rewards
    raise ValueError(
        f'reward_clipping is {reward_clipping!r}; expected "abs_one" or "none"'
    )


def _check_rows(
    learner_outputs: Mapping[str, torch.Tensor], batch: Mapping[str, Any]
) -> None:
    baseline = learner_outputs["baseline"]
    logits = learner_outputs["policy_logits"]
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
    if logits.ndim != 3:
        raise ValueError(
            f"the learner's policy_logits is {vtrace.describe(logits)}; expected "
            "[T + 1, B, A]"
        )
    rows_of_logits = (*rows, logits.shape[2])
    vtrace.check("the learner's policy_logits", logits, rows_of_logits, dtype)
    vtrace.check(
        "the batch's policy_logits", batch["policy_logits"], rows_of_logits, dtype
    )
    vtrace.check("action", batch["action"], rows, torch.int64)
    vtrace.check("reward", batch["reward"], rows, dtype)
    # Not uint8: there ~ is bitwise and makes 255 of 0.
    vtrace.check("done", batch["done"], rows, torch.bool)
    vtrace.check("truncated", batch["truncated"], rows, torch.bool)


def split_columns(
    rows: Nest, state: tuple[torch.Tensor, ...]
) -> Iterator[tuple[Nest, tuple[torch.Tensor, ...]]]:
    """Cut a batch into groups of columns, contiguous; a GPU takes it whole.

    The activations of a whole batch take hundreds of MB. On the CPU one group after
    another uses the same, warm memory.
    """
    B = rows["done"].shape[1]
    size = sum(x.nbytes for _, x in leaves(rows["observation"]))
    n = 1 if rows["done"].is_cuda else min(B, -(-size // PIECE_BYTES))
    bounds = [i * B // n for i in range(n + 1)]
    for group in map(slice, bounds[:-1], bounds[1:]):
        yield map_nest(lambda x, group=group: x[:, group].contiguous(), (rows, state))
