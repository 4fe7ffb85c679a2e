# SPDX-License-Identifier: Apache-2.0
"""MonoBeast with actors whose weights are some updates old, on purpose.

    python -m results.lag.lagged --lag 50 --correction none --env Catch ...

All other flags are MonoBeast's. With `--correction none` all importance weights of
V-trace are 1, as if the present policy had chosen the actions.
"""

import argparse
import collections
import sys

import monobeast
from core.actors import shared_memory
from core.algorithm import update


def hold_back(lag: int) -> None:
    """Let SharedWeights publish the weights of `lag` updates ago."""
    publish = shared_memory.SharedWeights.publish
    held = collections.deque(maxlen=lag + 1)

    def publish_old(self, tensors, version):
        if not held or held[-1][1] != version:  # Once for each update.
            held.append(({k: v.clone() for k, v in tensors.items()}, version))
        publish(self, *held[0])

    shared_memory.SharedWeights.publish = publish_old


def trust_old_actions() -> None:
    """Let the loss take the learner's policy for the one that has acted."""
    impala_loss = update.impala_loss

    def uncorrected(outputs, batch, **options):
        batch = {**batch, "policy_logits": outputs["policy_logits"].detach()}
        # The table pairs row t's observation with row t + 1's action and logits.
        batch["policy_logits"] = batch["policy_logits"].roll(1, dims=0)
        return impala_loss(outputs, batch, **options)

    update.impala_loss = uncorrected


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--correction", choices=["vtrace", "none"], default="vtrace")
    flags, rest = parser.parse_known_args()
    hold_back(flags.lag)
    if flags.correction == "none":
        trust_old_actions()
    return monobeast.main(rest)


if __name__ == "__main__":
    sys.exit(main())
