# SPDX-License-Identifier: Apache-2.0
"""Measure the time to a score: each system with its authors' settings, in turns.

    python -m benchmarks.peers.score --work cartpole --cleanrl PYTHON FOLDER --out FILE

PYTHON and FOLDER are those of `benchmarks.peers.run`. The clock starts with the process
and stops when the mean return of the last 100 full games, with sampled actions, reaches
SCORES. README.md has the settings.
"""

import argparse
import contextlib
import functools
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import ROOT, out_file, write_figures
from benchmarks.peers.run import HERE, kill_tree
from core.running.machine import num_cores
from tools.runs import log_rows

SCORES = {
    "cartpole": 475.0,  # Gymnasium's threshold for CartPole-v1.
    "halfcheetah": 1443.0,  # Quoted for CleanRL, 1 million steps of v4.
}
OURS = {
    "cartpole": "@settings/classic_control.txt --env CartPole-v1 --total_steps 240000",
    "halfcheetah": "@settings/mujoco.txt --env HalfCheetah-v5 --total_steps 1000000",
}
APPO = "@examples/appo/mujoco.txt"
POLL_S = 0.2

Progress = Iterator[tuple[int, float]]  # Steps, mean return of the last 100 games.


def follow_lines(child: subprocess.Popen) -> Progress:
    """Read "seconds steps return" from the output of a peer's script."""
    for line in child.stdout:
        if match := re.fullmatch(r"[\d.e-]+ (\d+) ([-\d.e+]+)\n", line):
            yield int(match[1]), float(match[2])


def follow_log(run_dir: Path, child: subprocess.Popen) -> Progress:
    """Read the log of one of our programs."""
    has_ended = False
    while not has_ended:
        has_ended = child.poll() is not None
        for row in log_rows(run_dir)[-1:]:
            if int(row["games"] or 0) >= 100:
                yield int(row["step"]), float(row["mean_episode_return"])
        time.sleep(POLL_S)


def measure(
    command: list[str],
    folder: str | Path,
    follow: Callable[[subprocess.Popen], Progress],
    score: float,
    limit_s: float,
) -> dict[str, float | int | None]:
    """Train until the score; return the seconds and steps it took, and the best return.

    Seconds and steps are None if training ends without the score, or after `limit_s`.
    `last_steps` says how far it came.

    Raises:
      RuntimeError: the program failed, or it told no return.
    """
    began, best, steps = time.monotonic(), -math.inf, 0
    result: dict[str, float | int | None] = {"seconds": None, "steps": None}
    child = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    limit = threading.Timer(limit_s, kill_tree, [child])
    limit.start()
    status = None  # Of a program that ends by itself.
    try:
        for steps, mean_return in follow(child):
            best = max(best, mean_return)
            if mean_return >= score:
                result = {"seconds": time.monotonic() - began, "steps": steps}
                break
        else:
            status = child.wait()
    finally:
        limit.cancel()
        kill_tree(child)
    has_failed = bool(status) and time.monotonic() - began < limit_s
    if best == -math.inf or has_failed:
        raise RuntimeError(
            f"{command} ended with {status} after {steps} steps; the best mean return "
            f"of 100 games is {best}"
        )
    return {**result, "best": best, "last_steps": steps}


def create_runs(
    args: argparse.Namespace, savedir: str
) -> dict[str, Callable[[int], dict[str, float | int | None]]]:
    """Return for each system a function that trains it with a seed."""
    work, score = args.work, SCORES[args.work]
    runs: dict[str, Callable[[int], dict[str, float | int | None]]] = {}

    def ours(program: str, folder: Path | str, flags: list[str], seed: int):
        xpid = f"{program}-{time.monotonic_ns()}"
        command = [sys.executable, "-m", program, *flags, "--seed", str(seed)]
        command += ["--savedir", savedir, "--xpid", xpid, "--log_interval_s", "0.2"]
        follow = functools.partial(follow_log, Path(savedir, xpid))
        return measure(
            [*command, "--disable_checkpoint"], folder, follow, score, args.limit_s
        )

    def script(python: str, name: str, *own: str):
        def run(seed: int):
            command = [python, str(HERE / name), *own, work, str(seed)]
            return measure(command, savedir, follow_lines, score, args.limit_s)

        return run

    flags = OURS[work].split()
    for program in ("monobeast", "polybeast"):
        runs[program] = functools.partial(ours, program, ROOT, flags)
    if args.appo:
        runs["monobeast, examples/appo"] = functools.partial(
            ours, "monobeast", args.appo, [flags[0], APPO, *flags[1:]]
        )
    if args.cleanrl:
        python, folder = args.cleanrl
        runs["CleanRL PPO"] = script(python, "train_cleanrl.py", folder)
    if args.sb3:
        runs["SB3 PPO"] = script(args.sb3, "train_sb3.py", "ppo")
    return runs


def print_table(work: str, measured: dict[str, list[dict]]) -> None:
    print(f"{work} to {SCORES[work]:g}, {num_cores()} cores, one column for each seed")
    for name, results in measured.items():
        cells = [
            f"{result['seconds']:.0f} s ({result['steps'] / 1000:.0f}k)"
            if result["seconds"] is not None
            else f"not (best {result['best']:.4g})"
            for result in results
        ]
        median = statistics.median(result["seconds"] or math.inf for result in results)
        text = "not" if median == math.inf else f"{median:.0f} s"
        print(f"{name:26}{text:>7}  {', '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", choices=SCORES, default="cartpole")
    path = os.path.abspath
    parser.add_argument("--sb3", type=path, metavar="PYTHON")
    parser.add_argument("--cleanrl", type=path, nargs=2, metavar=("PYTHON", "FOLDER"))
    parser.add_argument(
        "--appo",
        type=path,
        metavar="FOLDER",
        help="a clone of this repository with the patch of examples/appo applied",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit_s", type=float, default=1800.0)
    parser.add_argument("--out", type=out_file, help="JSON file for the raw figures")
    args = parser.parse_args()
    if args.appo and args.work != "halfcheetah":
        parser.error("--appo has settings for --work halfcheetah only")
    with tempfile.TemporaryDirectory() as savedir:
        runs = create_runs(args, savedir)
        measured: dict[str, list[dict]] = {name: [] for name in runs}
        for seed in range(1, args.seeds + 1):
            for name, run in runs.items():
                measured[name].append(run(seed))
                print(name, seed, measured[name][-1], file=sys.stderr, flush=True)
            write_figures(
                args.out, work=args.work, score=SCORES[args.work], measured=measured
            )
    print_table(args.work, measured)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
