# SPDX-License-Identifier: Apache-2.0
"""Settings files: the flags that suit one family of environments.

    python -m monobeast @settings/mujoco.txt --env HalfCheetah-v5

The files are in settings/, which has a README with their scores. The defaults of the
flags are those of the IMPALA paper for Atari, with which other families learn little.
"""

import argparse

import gymnasium as gym

from core import ranks
from core.running import common_flags

# The beginning of a Gymnasium environment's entry point -> the family's settings file.
FAMILIES = {
    "gymnasium.envs.classic_control": "classic_control",
    "gymnasium.envs.box2d": "box2d",
    "gymnasium.envs.mujoco": "mujoco",
    "minatar": "minatar",
    "nle.": "nethack",
}
# The same for the beginning of a name. PolyBeast's learner does not import the packages
# of the environments, so its registry may not know them.
NAMES = {"MinAtar/": "minatar", "NetHack": "nethack"}
# What to try where the family's file is not enough. None: nothing is known that helps.
EXCEPTIONS = {
    "Acrobot": None,
    "MountainCar": None,
    "MountainCarContinuous": None,
    "Pendulum": "@settings/classic_control.txt --discounting 0.9",
    "BipedalWalker": "examples/appo, as @settings/box2d.txt alone does not solve it",
    "BipedalWalkerHardcore": None,
}
# If all of these flags have their defaults, a run uses the settings for Atari.
CHECKED = ("learning_rate", "epsilon", "batch_size", "entropy_cost")


def family_of(env: str) -> str | None:
    """Return the name of the settings file for an environment; None if unknown."""
    name = env.rpartition(":")[2]  # Without the package, nle:...
    spec = gym.registry.get(name)
    text, table = (name, NAMES) if spec is None else (str(spec.entry_point), FAMILIES)
    for beginning, family in table.items():
        if text.startswith(beginning):
            return family
    return None


def suggestion(env: str, flags: argparse.Namespace) -> str | None:
    """Return a line that says what to try for `env`, if flags are those for Atari."""
    family = family_of(env)
    if family is None:
        return None
    name = env.rpartition(":")[2].partition("-")[0]  # Without package and version.
    text = EXCEPTIONS.get(name, f"@settings/{family}.txt")
    if text is None:
        return None
    parser = argparse.ArgumentParser()
    common_flags.add_learner_flags(parser)
    common_flags.add_loss_flags(parser)
    common_flags.add_optimizer_flags(parser)
    ours = ranks.flags_of_run(flags)
    if any(ours[key] != parser.get_default(key) for key in CHECKED):
        return None
    return f"The flags are at their defaults, which are for Atari; for {env} try {text}"
