# SPDX-License-Identifier: Apache-2.0
"""Train TorchRL's IMPALA on Pong until killed; print "seconds steps" lines.

    python train_torchrl.py FOLDER pong

FOLDER is a clone of TorchRL; sota-implementations/impala/impala_single_node.py runs
unchanged, in TorchRL's own environment; see README.md. Two collectors of one
environment each fill rollouts of 20 steps, and 32 rollouts are a batch.

The environments are Gymnasium's, preprocessed there: TorchRL's transforms of pictures
need torchvision, for which the version of a CPU build of torch is not found.
"""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
from torchrl.envs import (
    EndOfLifeTransform,
    GymWrapper,
    RenameTransform,
    RewardSum,
    SignTransform,
    StepCounter,
    TransformedEnv,
)
from work import WORKS, make_env, print_updates

FRAMES_PER_STEP = 4  # The script counts emulator frames.


def create_env(env_name, device, gym_backend, is_test=False):
    """Replaces `make_env` of the script's utils.py."""
    env = make_env("pong")
    space = gym.spaces.Box(0, 1, env.observation_space.shape, np.float32)
    env = gym.wrappers.TransformObservation(env, scale, space)
    env = TransformedEnv(GymWrapper(env, device=device))
    env.append_transform(RenameTransform(["observation"], ["pixels"]))
    if not is_test:
        env.append_transform(EndOfLifeTransform())
        env.append_transform(SignTransform(in_keys=["reward"]))
    env.append_transform(RewardSum())
    env.append_transform(StepCounter(max_steps=4500))
    return env


def scale(picture: np.ndarray) -> np.ndarray:
    return picture.astype(np.float32) / 255


def main(folder: str, work: str) -> None:
    assert work == "pong"
    impala = Path(folder, "sota-implementations", "impala").resolve()
    sys.path.insert(0, str(impala))
    import impala_single_node
    import utils

    utils.make_env = create_env
    print_updates(work)
    sys.argv = [
        str(impala / "impala_single_node.py"),
        f"--config-path={impala}",
        "device=cpu",
        "collector.num_workers=2",
        f"collector.frames_per_batch={WORKS[work].num_steps * FRAMES_PER_STEP}",
        f"loss.batch_size={WORKS[work].num_envs}",
        "logger.backend=null",
        "hydra.run.dir=.",
    ]
    impala_single_node.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
