# SPDX-License-Identifier: Apache-2.0
"""The policy: how an action is drawn from what the network says."""

import torch
import torch.nn.functional as F


def sample_action(logits: torch.Tensor, *, greedy: bool = False) -> torch.Tensor:
    """Sample actions [T, B] int64, numbered from 0, from logits [T, B, A].

    Raises:
      FloatingPointError: the logits are not finite.
    """
    if greedy:
        return logits.argmax(-1)
    probabilities = F.softmax(logits.flatten(0, 1), dim=-1)
    try:
        flat = torch.multinomial(probabilities, num_samples=1)
    except RuntimeError as error:
        if torch.isfinite(probabilities).all():
            raise
        raise FloatingPointError(
            "no action can be sampled: the policy's logits are not finite. The weights "
            "of a run always are; check the environment's observations and rewards."
        ) from error
    return flat.view(logits.shape[:2])
