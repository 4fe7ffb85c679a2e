# SPDX-License-Identifier: Apache-2.0
"""Compare our Atari wrappers with EnvPool: agent steps per second on one core.

    pip install envpool
    python -m benchmarks.environments

Our wrappers write complete rollout rows for random actions, as an environment server
does. EnvPool only steps. Both run in turns, each time in a new process. Prints the
median of `--repeats` and its ratio to EnvPool's; without EnvPool, our wrappers only.
`--out` writes the raw figures.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks import out_file, write_figures

WARM_UP_S = 1.0
OURS, ENVPOOL = "our wrappers", "EnvPool"


def our_step(name: str, num_envs: int) -> Callable[[], None]:
    """Return a function that steps all environments and writes their rows."""
    import polybeast_env

    flags = polybeast_env.parse_flags(["--env", name])
    envs = polybeast_env.create_environments(flags, num_envs, seed=1)
    rows = envs.zero_rows()
    envs.reset(rows)
    rng = np.random.default_rng(1)
    return lambda: envs.step(rng.integers(envs.action_space.n, size=num_envs), rows)


def envpool_step(name: str, num_envs: int) -> Callable[[], None]:
    """Return a function that steps EnvPool with the settings of our wrappers."""
    import envpool

    envs = envpool.make_gymnasium(
        name,
        num_envs=num_envs,
        num_threads=1,
        seed=1,
        episodic_life=True,
        use_fire_reset=True,
        noop_max=30,
        frame_skip=4,
        stack_num=4,
        gray_scale=True,
        repeat_action_probability=0.0,
    )
    envs.reset()
    rng = np.random.default_rng(1)
    return lambda: envs.step(rng.integers(envs.action_space.n, size=num_envs))


def measure(what: str, name: str, num_envs: int, seconds: float) -> float:
    """Return the steps per second of this process, on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    step = (envpool_step if what == ENVPOOL else our_step)(name, num_envs)
    begin, steps = time.perf_counter(), 0
    while (now := time.perf_counter()) < begin + WARM_UP_S:
        step()
    begin = now
    while (now := time.perf_counter()) < begin + seconds:
        step()
        steps += num_envs
    return steps / (now - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--game", default="Pong")
    parser.add_argument("--num_envs", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=out_file, help="JSON file for the raw figures")
    flags = parser.parse_args()
    if flags.run:
        print(measure(*flags.run, flags.num_envs, flags.seconds))
        return
    names = {OURS: f"{flags.game}NoFrameskip-v4"}
    if importlib.util.find_spec("envpool"):
        names[ENVPOOL] = f"{flags.game}-v5"
    measured: dict[str, list[float]] = {what: [] for what in names}
    for _ in range(flags.repeats):
        for what, name in names.items():
            command = [sys.executable, "-m", "benchmarks.environments"]
            command += ["--run", what, name, "--num_envs", str(flags.num_envs)]
            command += ["--seconds", str(flags.seconds)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(f"{what} failed")
            measured[what].append(float(done.stdout.split()[-1]))
    medians = {what: statistics.median(rates) for what, rates in measured.items()}
    print(f"{flags.game}, {flags.num_envs} environments on one core: steps/s")
    for what, rates in measured.items():
        ratio = ""
        if ENVPOOL in medians:
            ratio = f"{medians[what] / medians[ENVPOOL]:8.2f}"
        spread = f"{min(rates):.0f}-{max(rates):.0f}"
        print(f"{what:14}{medians[what]:8.0f}{spread:>12}{ratio}")
    result = {"game": flags.game, "num_envs": flags.num_envs, "steps/s": measured}
    write_figures(flags.out, **result)


if __name__ == "__main__":
    main()
