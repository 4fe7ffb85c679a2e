# SPDX-License-Identifier: Apache-2.0
"""Kill a serial run again and again: it must end like a run that is never killed.

    python -m monobeast --serial --seed 5 ...

The run is killed (SIGKILL) at random moments while it starts, saves or trains, and
started again each time. At the end its last checkpoint must be equal to that of the
uninterrupted run to the last bit (weights, optimizer, step, random generators,
environments), and logs.csv must have every step once, in order.
"""

import argparse
import itertools
import random
from collections import Counter
from pathlib import Path

from tools.nemesis.programs import (
    Program,
    await_moment,
    differences,
    measure_start,
    workplace,
)
from tools.nemesis.result import Result
from tools.runs import log_rows

BATCH = 4 * 5  # Steps per update.
SERIAL = ["--serial", "--seed", "5", "--env", "Catch", "--log_interval_s", "0"]
SERIAL += ["--num_actors", "3", "--envs_per_actor", "2"]
SERIAL += ["--batch_size", "4", "--unroll_length", "5"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--updates", type=int, default=200, help="of the run, per kill")
    parser.add_argument("--seed", type=int, default=1)


def measure(flags: argparse.Namespace) -> Result:
    rng = random.Random(flags.seed)
    steps = BATCH * flags.updates * flags.kills
    total = [*SERIAL, "--total_steps", str(steps)]
    start_s = measure_start("monobeast")
    with workplace() as broken, workplace() as whole:
        with Program("monobeast", whole, *total) as program:
            assert program.wait() == 0, program.text()
            unbroken = program.checkpoints
        moments = kill_many(broken, total, flags.kills, rng, start_s)
        with Program("monobeast", broken, *total) as program:
            assert program.wait() == 0, program.text()
            different = differences(unbroken, program.checkpoints)
            logged = [int(row["step"]) for row in log_rows(program.run_dir)]
    result = Result(
        injected={"kills": moments.total()},
        asked={"kills": flags.kills},
        figures={
            "different": different,
            "log_rows": len(logged),
            "expected_log_rows": steps // BATCH,
            "moments": dict(moments),
        },
    )
    result.require(not different, f"not bit-equal: {different}")
    result.require(
        logged == list(range(BATCH, steps + 1, BATCH)),
        "logs.csv does not have each step once and in order",
    )
    return result


def kill_many(
    folder: Path, flags: list[str], count: int, rng: random.Random, start_s: float
) -> Counter[str]:
    """Kill the run `count` times before its end; return how often at which moment."""
    moments: Counter[str] = Counter()
    for kind in itertools.cycle(["train", "save", "start-up"]):
        if moments.total() == count:
            break
        with Program(
            "monobeast", folder, *flags, "--checkpoint_interval_s", "0.1"
        ) as program:
            try:
                await_moment(program, kind, rng, start_s=start_s)
            except RuntimeError:
                break  # The run has ended: too few kills, which is a failure.
            program.process.kill()
            if program.wait() == 0:
                break
            moments[kind] += 1
    return moments
