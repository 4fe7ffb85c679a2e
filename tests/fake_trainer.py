# SPDX-License-Identifier: Apache-2.0
"""A program that `tools.sweep` takes for a trainer, without the training.

Each start adds a line to `starts` in the run's folder: process id, cores, GPUs.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from core.errors import Exit


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--xpid", required=True)
    parser.add_argument("--savedir", type=Path, required=True)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--total_steps", type=int)
    parser.add_argument("--fail_with", type=int, help="seed of the run that fails")
    on_or_off = argparse.BooleanOptionalAction
    parser.add_argument("--shaping", action=on_or_off, default=True)
    parser.add_argument("--wait", action="store_true", help="for SIGUSR1 to finish")
    flags = parser.parse_args()
    folder = flags.savedir / flags.xpid
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    with open(folder / "starts", "a") as file:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        print(os.getpid(), cores, os.environ["CUDA_VISIBLE_DEVICES"], file=file)
    with open(folder / "logs.csv", "w") as file:
        file.write("step,frames,time_s,sps,mean_episode_return,best_mean_return\n")
        file.write("500,2000,5,100,1.5,2\n1000,4000,10,100,2.5,3\n1500,60")
    if flags.seed == flags.fail_with:
        print("ValueError: bad luck", file=sys.stderr)
        return 70
    if flags.wait:
        signal.alarm(300)  # Should nobody end it.
        told = signal.sigwait({signal.SIGTERM, signal.SIGUSR1})
        if told == signal.SIGTERM:
            (folder / "checkpoint").touch()
            return Exit.STOPPED
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
