# SPDX-License-Identifier: Apache-2.0
"""Train with both programs for an hour, with kills, and look for growth.

PolyBeast and MonoBeast train on Catch side by side. Once a minute an environment server
or an actor of each program is killed, but never the first one, whose process thus lives
for the whole hour. Memory (anonymous, in RAM or swapped) and file descriptors of every
process are sampled. The slope is that of a straight line through all samples after the
warm-up, and `+-` is its standard error. The process that replaces a killed one is
sampled as the same process, from an age of `SETTLE_S` on.
"""

import argparse
import collections
import contextlib
import itertools
import time
from typing import Any

import numpy as np
import psutil

from tools.nemesis import playground
from tools.nemesis.programs import Program, train
from tools.nemesis.result import Result
from tools.runs import curve

SAMPLE_S = 5.0
SETTLE_S = 30.0  # Until a new process has allocated what it needs.
WARM_UP = 1 / 3  # Of the run. Until then memory still grows.
MB_PER_HOUR = 1.0
NUM_WORKERS = 3
TRAINERS = {
    "polybeast": ["--num_servers", str(NUM_WORKERS)],
    "monobeast": ["--num_actors", str(NUM_WORKERS), "--envs_per_actor", "8"],
}
CHECKPOINTS = ["--checkpoint_interval_s", "60"]

# (Hours since the start, MB, file descriptors)
Sample = tuple[float, float, int]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kills_per_minute", type=float, default=1.0)
    parser.add_argument(
        "--mb_per_hour",
        type=float,
        default=MB_PER_HOUR,
        help="largest growth that passes; in a few minutes the slope is too noisy",
    )


def measure(flags: argparse.Namespace) -> Result:
    victims = itertools.cycle(range(1, NUM_WORKERS))
    length_s = 60 * flags.minutes
    asked = int(flags.minutes * flags.kills_per_minute)
    samples: dict[str, list[Sample]] = collections.defaultdict(list)
    kills, speeds = {}, {}
    with contextlib.ExitStack() as stack:
        trainings = [
            stack.enter_context(train(trainer, *argv, *CHECKPOINTS))
            for trainer, argv in TRAINERS.items()
        ]
        began = time.monotonic()
        kill_at = [began + length_s * (i + 0.5) / asked for i in range(asked)]
        while (now := time.monotonic()) < began + length_s:
            if kill_at and now >= kill_at[0]:
                kill_at.pop(0)
                victim = next(victims)
                for training in trainings:
                    training.kill(victim)
            for training in trainings:
                training.check()
                for name, sample in take_samples(training, now - began):
                    samples[f"{training.module} {name}"].append(sample)
            time.sleep(SAMPLE_S)
        for training in trainings:
            kills[training.module] = training.replaced
            speeds[training.module] = last_to_first(curve(training.run_dir))
    slopes = {name: slope(taken, length_s) for name, taken in samples.items()}
    found = Result(
        kills,
        dict.fromkeys(TRAINERS, asked),
        {"minutes": flags.minutes, "last_to_first_speed": speeds, "processes": slopes},
    )
    for name, process in slopes.items():
        found.require(
            process["mb_per_hour"] <= flags.mb_per_hour,
            f"{name} grows by {process['mb_per_hour']} MB/h, expected "
            f"{flags.mb_per_hour} at most",
        )
        found.require(
            process["fds_grown"] == 0, f"{name} has {process['fds_grown']} more files"
        )
    return found


def take_samples(training: Program, now_s: float) -> list[tuple[str, Sample]]:
    samples = []
    for name, pid in training.processes().items():
        with contextlib.suppress(psutil.Error, OSError):  # It has just been killed.
            process = psutil.Process(pid)
            if time.time() - process.create_time() > SETTLE_S:
                held = playground.resources(pid)
                sample = (now_s / 3600, held["memory_mb"], int(held["fds"]))
                samples.append((name, sample))
    return samples


def slope(samples: list[Sample], length_s: float) -> dict[str, Any]:
    """Return how fast a process grows."""
    hours, mb, fds = np.array(
        [s for s in samples if s[0] > WARM_UP * length_s / 3600]
    ).T
    (per_hour, _), covariance = np.polyfit(hours, mb, 1, cov=True)
    tenth = max(1, len(fds) // 10)
    return {
        "samples": len(hours),
        # As a curve of twelve points; the slope is through all samples.
        "mb": [round(float(part.mean()), 2) for part in np.array_split(mb, 12)],
        "mb_per_hour": round(float(per_hour), 3),
        "+-": round(float(covariance[0, 0] ** 0.5), 3),
        "fds_grown": int(np.median(fds[-tenth:]) - np.median(fds[:tenth])),
    }


def last_to_first(rows: list[tuple[float, int]]) -> float:
    """Return the speed in the last sixth of a run, divided by that in the second."""
    end_s = rows[-1][0]

    def steps_at(part: float) -> int:
        return next(step for time_s, step in rows if time_s >= part * end_s)

    first, last = (steps_at(b) - steps_at(a) for a, b in ((1 / 6, 2 / 6), (5 / 6, 1)))
    return round(last / first, 3)
