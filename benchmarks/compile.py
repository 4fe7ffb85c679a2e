# SPDX-License-Identifier: Apache-2.0
"""Measure whether torch.compile makes the learner faster on this machine.

    python -m benchmarks.compile

Does updates on one batch, on one core, with the network as it is and with
`net.compile()`, in turns. Prints agent steps per second, the ratio (median of the
turns), and the time of the first update, which compiles. Needs a C++ compiler.
"""

import argparse
import statistics
import time

import torch

import monobeast
from benchmarks import ceilings, out_file, write_figures
from core.running.machine import keep_freed_memory

WORK = (
    "--env CartPole-v1 --unroll_length 32 --batch_size 128",
    "--env MinAtar/Breakout-v1 --batch_size 16",
    "--env MinAtar/Breakout-v1 --batch_size 16 --use_lstm",
    "--env PongNoFrameskip-v4 --model shallow --batch_size 32",
    "--env PongNoFrameskip-v4 --model deep",
)
WARM_UPS = 5


class Updates:
    """Updates on one batch, again and again."""

    def __init__(self, argv: list[str], *, compiled: bool):
        flags = monobeast.parse_flags(argv)
        flags.seed = 0
        learner, self._update, self._steps = ceilings.learner_and_work(flags)
        if compiled:
            learner.net.compile()
        began = time.perf_counter()
        self._update()
        self.first_s = time.perf_counter() - began
        for _ in range(WARM_UPS):
            self._update()

    def rate(self, seconds: float) -> float:
        began, steps = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            self._update()
            steps += self._steps
        return steps / passed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each turn")
    parser.add_argument("--out", type=out_file, help="JSON file for the raw figures")
    own = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    measured = []
    print(f"{'eager/s':>9}{'compiled/s':>12}{'ratio':>7}{'first':>8}")
    for work in WORK:
        ways = [Updates(work.split(), compiled=compiled) for compiled in (False, True)]
        turns = [[way.rate(own.seconds) for way in ways] for _ in range(own.repeats)]
        eager, compiled = (statistics.median(rates) for rates in zip(*turns))
        ratio = statistics.median(ours / theirs for theirs, ours in turns)
        first_s = ways[1].first_s
        print(f"{eager:9.0f}{compiled:12.0f}{ratio:7.2f}{first_s:6.1f} s  {work}")
        measured.append({"work": work, "steps/s": turns, "first_s": first_s})
    write_figures(own.out, torch=torch.__version__, measured=measured)


if __name__ == "__main__":
    main()
