# SPDX-License-Identifier: Apache-2.0
"""`--precision auto`: the number format in which the network's torso computes."""

import argparse
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import gymnasium as gym
import torch
from torch import nn

from core import ranks
from core.action_spaces import split_mask
from core.algorithm import learners
from core.algorithm.torsos import TORSOS, ImageTorso, model_for
from core.running import folder

log = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")  # Linux only. On other systems auto takes float32.


def settle_precision(
    flags: argparse.Namespace,
    run_dir: Path,
    observation_space: gym.Space,
    *devices: str,
) -> argparse.Namespace:
    """Return the flags with a number format in place of `auto`; log the format.

    A resumed run keeps the format in its meta.json. A new run takes bfloat16 if that is
    faster. meta.json and the checkpoints name the format, not `auto`. Of several
    learners, learner 0 decides.

    Args:
      observation_space: the environment's observation space.
      devices: the torch devices on which the torso learns and acts.
    """
    if flags.precision != "auto":
        return flags
    choice = None
    if ranks.rank() == 0:
        choice = recorded_precision(run_dir) or best_precision(
            flags.model, observation_space, devices
        )
    precision, reason = learners.share(choice)
    log.info("--precision auto takes %s: %s", precision, reason)
    return argparse.Namespace(**{**vars(flags), "precision": precision})


def recorded_precision(run_dir: Path) -> tuple[str, str] | None:
    """Return the format that a run was trained in, and a reason; None in a new run."""
    recorded = folder.recorded_meta(run_dir).get("flags")
    if recorded is None:
        return None
    # Older versions had only float32, and did not record it in meta.json.
    is_bfloat16 = recorded.get("precision") == "bfloat16"
    return "bfloat16" if is_bfloat16 else "float32", "the run has used it before"


def best_precision(
    model: str, observation_space: gym.Space, devices: Sequence[str]
) -> tuple[str, str]:
    """Return the format that suits a new run, and the reason."""
    observation_space, _ = split_mask(observation_space)
    chosen = f"--model {model}"
    if model == "auto":
        model = model_for(observation_space)
        chosen = f"{model} (--model auto)"
    # If a fork has its own torso, this function does not see it, and decides by the one
    # that --model names.
    if not issubclass(TORSOS[model], ImageTorso):
        return "float32", (
            f"{chosen} has no convolutions, and bfloat16 would round the numbers "
            "that it reads. If you have written a torso with convolutions, add "
            "--precision bfloat16"
        )
    names = []
    for device in dict.fromkeys(devices):
        name = bfloat16_unit(device)
        if name is None:
            return "float32", f"{device} has no bfloat16 instructions"
        names.append(f"{device} has {name}")
    return "bfloat16", f"--model {model} is faster with it, {' and '.join(names)}"


def to_bfloat16(torso: nn.Module) -> None:
    """Convert a torso's weights for acting, as autocast would in each forward pass.

    All other numbers stay as the learner has them: autocast computes norms in float32,
    and a buffer may hold numbers that bfloat16 would round.
    """
    for layer in torso.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            layer.bfloat16()


def bfloat16_unit(device: str) -> str | None:
    """Return the hardware that makes a device fast in bfloat16; None if it is not."""
    if device.startswith("cuda"):
        # GPUs before Ampere (8.0) compute in float32 and convert.
        is_fast = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.cuda.get_device_name(device) if is_fast else None
    try:
        found = re.search(r"^flags\s*:(.*)$", CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    words = found[1].split() if found else []
    units = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}
    return next((units[word] for word in units if word in words), None)
