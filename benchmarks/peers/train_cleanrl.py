# SPDX-License-Identifier: Apache-2.0
"""Train CleanRL's PPO until killed; print "seconds steps" lines.

    python train_cleanrl.py FOLDER {pong,cartpole,minatar,halfcheetah} [SEED]

FOLDER is a clone of CleanRL; the script that fits the work runs unchanged, in CleanRL's
own environment; see README.md. It passes once over each batch, in one minibatch.

With a seed the script keeps its own settings, and runs to its own end. Then each line
also has the mean return of the last 100 games, as soon as there are so many.
"""

import collections
import runpy
import statistics
import sys
import time
from pathlib import Path

import gymnasium as gym
from torch.utils.tensorboard import SummaryWriter
from work import WORKS, make_env

# HalfCheetah-v5 needs a newer Gymnasium than CleanRL's script can use.
SCRIPTS = {
    "pong": ("ppo_atari_envpool.py", "Pong-v5"),
    "cartpole": ("ppo.py", "CartPole-v1"),
    "minatar": ("ppo.py", "flat-v0"),
    "halfcheetah": ("ppo_continuous_action.py", "HalfCheetah-v4"),
}


class Report(SummaryWriter):
    """Writes what the script logs, and prints the steps once a batch is learned."""

    began = time.monotonic()
    returns = collections.deque[float](maxlen=100)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        super().add_scalar(tag, value, step)
        if tag == "charts/episodic_return":
            self.returns.append(value.item())
        if tag == "charts/SPS":
            mean = [statistics.fmean(self.returns)] if len(self.returns) == 100 else []
            print(time.monotonic() - self.began, step, *mean, flush=True)


def main(folder: str, work: str, seed: str | None = None) -> None:
    script, env_id = SCRIPTS[work]
    # The script's network is for vectors.
    gym.register(
        "flat-v0", lambda: gym.wrappers.FlattenObservation(make_env("minatar"))
    )
    # The script imports the name when it runs.
    sys.modules["torch.utils.tensorboard"].SummaryWriter = Report
    path = Path(folder, "cleanrl", script).resolve()
    sys.argv = [str(path), f"--env-id={env_id}", "--no-cuda"]
    if seed is not None:
        sys.argv += [f"--seed={seed}"]
    else:
        sys.argv += [f"--num-envs={WORKS[work].num_envs}"]
        sys.argv += [f"--num-steps={WORKS[work].num_steps}"]
        sys.argv += ["--update-epochs=1", "--num-minibatches=1"]
        sys.argv += ["--total-timesteps=1000000000"]
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
