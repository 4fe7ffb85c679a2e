# SPDX-License-Identifier: Apache-2.0
"""V-trace: value targets from actions that a slightly older policy chose.

Equation (1) of Espeholt et al. 2018 (arXiv:1802.01561),

    v_s = V(x_s) + sum_{t=s}^{s+n-1} gamma^{t-s} (prod_{i=s}^{t-1} c_i) delta_t
    delta_t = rho_t (r_t + gamma V(x_{t+1}) - V(x_t))

with ratio_t = pi(a_t|x_t) / mu(a_t|x_t), rho_t = min(rho_bar, ratio_t) and
c_t = lambda min(c_bar, ratio_t). mu is the policy of the actors, pi that of the
learner. Here gamma is one discount per step, 0 for the transition that terminates an
episode (not for one that a time limit cuts).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class VTraceReturns(NamedTuple):
    """Both [T, B], with the dtype of the arguments and without gradient."""

    vs: torch.Tensor  # v_s, the target of V(x_s).
    pg_advantages: torch.Tensor  # rho_s (r_s + gamma_s v_{s+1} - V(x_s)).


class VTraceFromLogitsReturns(NamedTuple):
    """All [T, B]. The first two have no gradient."""

    vs: torch.Tensor
    pg_advantages: torch.Tensor
    log_rhos: torch.Tensor  # log pi(a_t | x_t) - log mu(a_t | x_t).
    behavior_action_log_probs: torch.Tensor  # log mu(a_t | x_t).
    target_action_log_probs: torch.Tensor  # log pi(a_t | x_t).


def action_log_probs(
    policy_logits: torch.Tensor, actions: torch.Tensor
) -> torch.Tensor:
    """Return log pi(a | x) [T, B] of actions [T, B] int64 under logits [T, B, A]."""
    log_policy = F.log_softmax(policy_logits, dim=-1)
    return log_policy.gather(-1, actions.unsqueeze(-1)).squeeze(-1)  # [T, B]


def from_logits(
    behavior_policy_logits: torch.Tensor,
    target_policy_logits: torch.Tensor,
    actions: torch.Tensor,
    discounts: torch.Tensor,
    rewards: torch.Tensor,
    values: torch.Tensor,
    bootstrap_value: torch.Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
) -> VTraceFromLogitsReturns:
    """Compute V-trace targets and advantages for softmax policies.

    The signature is that of the original TorchBeast, for its forks. The trainers here
    do not use this function.

    Args:
      behavior_policy_logits: [T, B, A] float32 of mu, which the actors followed.
      target_policy_logits: [T, B, A] float32 of pi, the learner's.
      actions: [T, B] int64.

    The other arguments are those of `from_importance_weights`.

    Raises:
      ValueError: a shape or dtype disagrees; the message names the tensor.
    """
    target = action_log_probs(target_policy_logits, actions)
    behavior = action_log_probs(behavior_policy_logits, actions)
    log_rhos = target - behavior
    returns = from_importance_weights(
        log_rhos,
        discounts,
        rewards,
        values,
        bootstrap_value,
        clip_rho_threshold=clip_rho_threshold,
        clip_pg_rho_threshold=clip_pg_rho_threshold,
    )
    return VTraceFromLogitsReturns(*returns, log_rhos, behavior, target)


@torch.no_grad()
def from_importance_weights(
    log_rhos: torch.Tensor,
    discounts: torch.Tensor,
    rewards: torch.Tensor,
    values: torch.Tensor,
    bootstrap_value: torch.Tensor,
    *,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    clip_c_threshold: float = 1.0,
    lambda_: float = 1.0,
) -> VTraceReturns:
    """Compute V-trace targets and policy-gradient advantages.

    Equation (1) of Espeholt et al. 2018 (arXiv:1802.01561), by the recursion of its
    Remark 1. No gradient flows through the results. Step t leads from x_t to x_{t+1}.

    Args:
      log_rhos: [T, B] float32, log pi(a_t | x_t) - log mu(a_t | x_t). -inf gives the
        step weight zero: vs equals V(x_t) there and the advantage is 0.
      discounts: [T, B] float32, gamma, or 0 if the step terminates an episode or leads
        to a reset.
      rewards: [T, B] float32, of the step.
      values: [T, B] float32, V(x_t) under the learner's network.
      bootstrap_value: [B] float32, V(x_T) under the learner's network.
      clip_rho_threshold: rho_bar; V becomes the value of a policy between mu and pi,
        the closer to pi the larger rho_bar is. None does not clip.
      clip_pg_rho_threshold: the same for the weight in pg_advantages.
      clip_c_threshold: c_bar, which limits how fast the weights of a long trace grow.
        In the paper it is not larger than rho_bar.
      lambda_: the lambda of Remark 2; 0 gives one-step targets.

    All tensors have one dtype; float64 works too. More axes than [T, B] are refused:
    flatten them into B.

    Raises:
      ValueError: a shape or dtype disagrees; the message names the tensor.
    """
    if values.ndim != 2 or values.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"values is {describe(values)}; expected float32 [T, B]. Flatten any "
            "further axes into B."
        )
    T, B = values.shape
    check("log_rhos", log_rhos, (T, B), values.dtype)
    check("discounts", discounts, (T, B), values.dtype)
    check("rewards", rewards, (T, B), values.dtype)
    check("bootstrap_value", bootstrap_value, (B,), values.dtype)

    rhos = log_rhos.exp()
    next_values = torch.cat([values[1:], bootstrap_value.unsqueeze(0)])
    deltas = _clip(rhos, clip_rho_threshold) * (
        rewards + discounts * next_values - values
    )
    traces = lambda_ * discounts * rhos.clamp(max=clip_c_threshold)

    # Remark 1: v_t - V(x_t) = delta_t + gamma_t c_t (v_{t+1} - V(x_{t+1})). Two such
    # steps combine to one step of the same form, so log2(T) rounds replace T steps.
    # After a round, errors[t] is the sum of the terms of `span` steps, and traces[t] is
    # the product of their gamma c.
    errors, span = deltas, 1
    while span < T:
        near = torch.addcmul(errors[:-span], traces[: T - span], errors[span:])
        errors = torch.cat([near, errors[-span:]])
        traces = traces[:-span] * traces[span:]
        span *= 2
    vs = values + errors

    next_vs = torch.cat([vs[1:], bootstrap_value.unsqueeze(0)])
    pg_advantages = _clip(rhos, clip_pg_rho_threshold) * (
        rewards + discounts * next_vs - values
    )
    return VTraceReturns(vs, pg_advantages)


def _clip(rhos: torch.Tensor, threshold: float | None) -> torch.Tensor:
    return rhos if threshold is None else rhos.clamp(max=threshold)


def check(
    name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raise ValueError, which names the tensor, unless its shape and dtype match."""
    if x.shape != shape or x.dtype != dtype:
        expected = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
        raise ValueError(f"{name} is {describe(x)}; expected {expected}")


def describe(x: torch.Tensor) -> str:
    """Return dtype and shape, such as `float32[5, 3]`."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
