# SPDX-License-Identifier: Apache-2.0
"""What several learners must have in common: their flags, network and processor.

All learners make the same calls, with a `collect` that returns every learner's value in
the order of their ranks (`core.algorithm.learners`). So all learners raise an error.
"""

import argparse
import json
import platform
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from core import ranks
from core.errors import ConfigError, UsageError

Collect = Callable[[Any], list[Any]]

# Flags that may differ: machines differ, and only learner 0 has the folder of the run.
MAY_DIFFER = {
    *("xpid", "savedir", "disable_checkpoint", *ranks.OUTPUTS),
    *("num_actors", "envs_per_actor", "num_servers"),
    *("num_buffers", "max_learner_queue_size"),
    *("server_addresses", "listen", "pipes_basename", "tls_dir"),
    *("learner_device", "actor_device", "disable_cuda"),
    *("learner_cores", "num_inference_threads", "num_learner_threads"),
}


def check_flags(flags: argparse.Namespace, collect: Collect) -> None:
    """Refuse learners whose flags differ from those of learner 0.

    Raises:
      UsageError: in all learners. The message names the learner and the flag.
    """
    ours = {
        key: json.dumps(value, default=str)
        for key, value in sorted(vars(flags).items())
        if key not in MAY_DIFFER
    }
    first, *others = collect(ours)
    for i, theirs in enumerate(others, 1):
        for key in first.keys() | theirs.keys():
            if first.get(key) != theirs.get(key):
                raise UsageError(
                    f"learner {i} was started with --{key} {theirs.get(key)}, but "
                    f"learner 0 with --{key} {first.get(key)}. Give all learners "
                    "the same flags."
                )


def check_networks(net: nn.Module, rank: int, collect: Collect) -> None:
    """Refuse learners whose networks, or whose kinds of processors, differ.

    Args:
      rank: of this learner.

    Raises:
      ConfigError: the message names the difference to another learner.
    """
    processor = processor_of(next(net.parameters()).device)
    for i, other in enumerate(collect(processor)):
        if other != processor:
            raise ConfigError(
                f"learner {rank} learns on {processor}, but learner {i} on "
                f"{other}. These round differently, so the weights would differ. "
                "Start learners on one kind of processor."
            )
    sizes = {name: tuple(x.shape) for name, x in net.state_dict().items()}
    for i, others in enumerate(collect(sizes)):
        if others != sizes:
            names = sizes.keys() | others.keys()
            name = min(n for n in names if sizes.get(n) != others.get(n))
            raise ConfigError(
                f"learner {rank}'s network has {name} {sizes.get(name)}, but "
                f"learner {i}'s has {others.get(name)}. Do all learners have the "
                "same environment?"
            )


def check_parameters(
    net: nn.Module, gather: Callable[[torch.Tensor], list[torch.Tensor]]
) -> None:
    """Compare checksums of all learners' parameters.

    Args:
      gather: returns every learner's tensor, in the order of their ranks.

    Raises:
      RuntimeError: the parameters differ.
    """
    checksum = 0
    for x in net.parameters():
        checksum = zlib.crc32(bytes_of(x).numpy().data, checksum)
    found = [int(x) for x in gather(torch.tensor(checksum))]
    if len({*found}) > 1:
        raise RuntimeError(
            f"the learners' weights differ: their checksums are {found}. Each "
            "learner must do the same with the same gradient. Does your code draw "
            "random numbers, or change weights, in learner 0 only? Or does one "
            "learner's processor round differently?"
        )


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, on the CPU: gloo has not all dtypes and strides."""
    return x.detach().cpu().contiguous().flatten().view(torch.uint8)


def processor_of(device: torch.device) -> str:
    """Return the model of a GPU, or the architecture of a CPU.

    Two CPUs of one architecture may round differently, too; `check_weights` notices it.
    """
    if device.type == "cuda":
        return f"a GPU ({torch.cuda.get_device_name(device)})"
    return f"a CPU ({platform.machine()})"
