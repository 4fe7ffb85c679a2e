# SPDX-License-Identifier: Apache-2.0
"""Compare the speed of two versions of this repository.

    git worktree add ../before 3123853
    (cd ../before && python setup.py build_ext --inplace)
    python -m benchmarks.compare ../before . --out compare.json

Trains the programs in both folders in turns; every second turn has the other order. The
work is Pong with both networks, where the network takes most of the time, and Catch,
where the transport and Python do. Prints the ratio of the second folder's steps/s to
the first's.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from benchmarks import describe_commit, out_file
from benchmarks.ceilings import measure_whole
from core.running.machine import num_cores

PROGRAMS = ("monobeast", "polybeast")
WORK = {
    "Pong": ["--env", "PongNoFrameskip-v4", "--model", "shallow"],
    "Pong-deep": [
        *("--env", "PongNoFrameskip-v4", "--model", "deep"),
        *("--unroll_length", "80", "--batch_size", "8"),
    ],
    "Catch": ["--env", "Catch"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("folders", nargs=2, type=Path, metavar="FOLDER")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each run")
    parser.add_argument("--warm_up_s", type=float, default=6.0)
    parser.add_argument("--out", type=out_file, help="JSON file for the raw figures")
    flags = parser.parse_args()
    folders = [folder.resolve() for folder in flags.folders]
    out = flags.out and flags.out.resolve()
    rates: dict[str, list[list[float]]] = {
        f"{program} {work}": [[], []]
        for program in flags.programs
        for work in flags.work
    }
    for repeat in range(flags.repeats):
        for name, both in rates.items():
            program, work = name.split()
            for i in (0, 1) if repeat % 2 == 0 else (1, 0):
                os.chdir(folders[i])
                times = (flags.seconds, flags.warm_up_s)
                both[i].append(measure_whole(program, WORK[work], *times)["sps"])
        print(f"repeat {repeat + 1} of {flags.repeats} done", file=sys.stderr)
    print(f"{'':20}{'before':>9}{'after':>9}{'change':>9}   of each turn")
    for name, (before, after) in rates.items():
        changes = [b / a - 1 for a, b in zip(before, after)]
        print(
            f"{name:20}{statistics.median(before):9.0f}{statistics.median(after):9.0f}"
            f"{statistics.median(changes):+9.1%}   "
            + " ".join(f"{change:+.0%}" for change in sorted(changes))
        )
    if out:
        result = {
            "commits": [describe_commit(folder) for folder in folders],
            "cores": num_cores(),
            "steps_per_s": rates,
        }
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
