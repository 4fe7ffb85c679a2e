# SPDX-License-Identifier: Apache-2.0
"""The flags of running statistics that Net obeys: a fork's may have none."""

import gymnasium as gym
import numpy as np

import monobeast
import polybeast
from core.algorithm.normalization import InputNorm, PopArt
from core.rollout import Spaces

PARTS = {
    "--normalize_observations": ("normalize", InputNorm),
    "--normalize_returns": ("baseline", PopArt),
}


def obeyed(*modules) -> list[str]:
    """Return those of the flags in PARTS that Net obeys in these trainers, or both."""
    box = gym.spaces.Box(-1, 1, (3,), np.float32)
    spaces = Spaces(box, gym.spaces.Discrete(2))
    flags = monobeast.parse_flags([*PARTS, "--reward_clipping", "none"])
    flags.learner_device = "cpu"
    nets = [m.create_net(flags, spaces) for m in modules or (monobeast, polybeast)]
    return [
        flag
        for flag, (name, kind) in PARTS.items()
        if all(isinstance(getattr(net, name, None), kind) for net in nets)
    ]
