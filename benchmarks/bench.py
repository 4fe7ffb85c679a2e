# SPDX-License-Identifier: Apache-2.0
"""Measure every speed that matters on a CPU, in under ten minutes: `make bench`.

    python -m benchmarks.bench

Measures parts and programs in turns, REPEATS times, on Pong with the shallow network
(T=80, B=8), and adds a file to results/speed/history, named by commit. Prints medians
beside those of the newest earlier file of the same kind of machine: the same CPU model,
number of cores and version of torch. The speed of a machine changes from hour to hour.
So compare the column `per emulator`: each rate divided by that of the bare emulator on
one core, measured in the same turn.

A row is slower if the median of `per emulator` fell by more than the noise: the square
root of the sum of the squared spreads (highest less lowest turn) of both files. In a
simulation with normally distributed turns, a run without any change calls one of the
nine rows slower once in 200 runs, and a fall by five standard deviations of the turns
is found nine times in ten.

Exit status: 0 nothing is slower, or there is nothing to compare with; 1 something is.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import ROOT, describe_commit, transport
from benchmarks.ceilings import measure_part, measure_whole
from core.running.machine import num_cores

REPEATS = 5
PART_S, WHOLE_S, WARM_UP_S = 3.0, 12.0, 8.0
HISTORY = ROOT / "results/speed/history"
CPU_INFO = Path("/proc/cpuinfo")
WORK = ["--env", "PongNoFrameskip-v4", "--model", "shallow"]
WORK += ["--unroll_length", "80", "--batch_size", "8", "--precision", "float32"]
BFLOAT16 = ["--precision", "bfloat16"]
YARDSTICK = "emulator"


def measurements() -> dict[str, tuple]:
    """Return what to call for each row of the table."""
    cores = num_cores()
    parts = {
        YARDSTICK: ("emulator", 1, []),
        "environment": ("environment", cores, []),
        "inference": ("inference", cores, []),
        "inference, bfloat16": ("inference", cores, BFLOAT16),
        "learner": ("learner", 1, []),
        "learner, bfloat16": ("learner", 1, BFLOAT16),
        "learner, LSTM": ("learner", 1, ["--use_lstm"]),
    }
    rows = {
        name: (measure_part, part, processes, PART_S, [*WORK, *extra])
        for name, (part, processes, extra) in parts.items()
    }
    for program in ("monobeast", "polybeast"):
        rows[program] = (measure_whole, program, WORK, WHOLE_S, WARM_UP_S)
    rows["transport, K=16"] = (transport.measure, "data path", 16, 2, PART_S)
    return rows


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rates: dict[str, list[float]] = {name: [] for name in measurements()}
    for repeat in range(REPEATS):
        for name, (measure, *args) in measurements().items():
            rates[name].append(measure(*args)["sps"])
        print(f"repeat {repeat + 1} of {REPEATS} done", file=sys.stderr)

    row = {**kind_of_machine(), "steps_per_s": rates}
    earlier = last_of_kind(HISTORY, row)
    path = HISTORY / f"{time.strftime('%Y%m%d-%H%M')}-{describe_commit(ROOT)}.json"
    HISTORY.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row, indent=1) + "\n")
    return report(row, earlier, path)


def report(row: dict[str, Any], earlier: dict[str, Any] | None, path: Path) -> int:
    """Print what was measured and compared; return the exit status."""
    changes = compare(row, earlier) if earlier else {}
    print(f"{row['cpu']}, {row['cores']} cores, torch {row['torch']}")
    print("\n".join(table(row, changes)))
    rates = row["steps_per_s"]
    lstm = statistics.median(
        ff / lstm for ff, lstm in zip(rates["learner"], rates["learner, LSTM"])
    )
    print(f"A learner's step with LSTM costs {lstm:.2f} times that without.")
    print(f"Wrote {path}")
    if earlier is None:
        print("Nothing to compare with: no earlier file is of this kind of machine.")
    slower = [name for name in rates if name in changes and changes[name].is_slower]
    if slower:
        print(
            f"Slower by more than the noise: {'; '.join(slower)}. Commit the file only "
            "if that is wanted: the next run compares with it."
        )
    return 1 if slower else 0


# ------------------------------------------------------------------------ the history


def kind_of_machine() -> dict[str, Any]:
    """Return what two files must share to be compared."""
    cpu = platform.processor() or platform.machine()
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
    return {"cpu": cpu, "cores": num_cores(), "torch": torch.__version__}


def last_of_kind(history: Path, row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the newest file whose machine is of the kind of `row`'s, None if none."""
    for path in sorted(history.glob("*.json"), reverse=True):
        earlier = json.loads(path.read_text())
        if all(earlier.get(key) == row[key] for key in ("cpu", "cores", "torch")):
            return earlier
    return None


class Comparison(NamedTuple):
    """What the medians of `per emulator` say of one row of the table."""

    before: float
    change: float  # As a share of `before`; below zero is slower.
    noise: float  # Likewise.

    @property
    def is_slower(self) -> bool:
        return self.change < -self.noise


def compare(row: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Comparison]:
    """Compare what both files have; see the head of this file for the rule."""
    all_now, all_before = per_emulator(row), per_emulator(earlier)
    found = {}
    for name in all_now.keys() & all_before.keys() - {YARDSTICK}:
        now, before = all_now[name], all_before[name]
        was = statistics.median(before)
        spreads = (max(now) - min(now), max(before) - min(before))
        found[name] = Comparison(
            was, statistics.median(now) / was - 1, math.hypot(*spreads) / was
        )
    return found


def table(row: dict[str, Any], changes: dict[str, Comparison]) -> list[str]:
    head = f"{'':20}{'steps/s':>9}{'per emulator':>14}{'before':>9}{'change':>8}"
    lines = [f"{head}{'noise':>7}"]
    for name, turns in per_emulator(row).items():
        rate = statistics.median(row["steps_per_s"][name])
        line = f"{name:20}{rate:9.0f}{statistics.median(turns):14.3f}"
        if name in changes:
            of = changes[name]
            line += f"{of.before:9.3f}{of.change:+8.0%}{of.noise:7.0%}"
            line += "  slower" * of.is_slower
        lines.append(line)
    return lines


def per_emulator(row: dict[str, Any]) -> dict[str, list[float]]:
    """Return each rate over the yardstick's, turn by turn."""
    rates = row["steps_per_s"]
    return {
        name: [rate / y for rate, y in zip(of_row, rates[YARDSTICK])]
        for name, of_row in rates.items()
    }


if __name__ == "__main__":
    sys.exit(main())
