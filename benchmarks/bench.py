# SPDX-License-Identifier: Apache-2.0
"""Every speed that matters on a CPU, in under ten minutes: `make bench`.

    python -m benchmarks.bench

Measures parts and programs in turns, REPEATS times, on Pong with the shallow network
(T=80, B=8), prints medians beside those of the newest earlier run, and adds a file to
results/speed/history, named by commit. Machines differ, and one machine differs from
hour to hour: compare the column `per emulator`, each rate over that of the bare
emulator on one core, measured in the same turn.
"""

import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks import transport
from benchmarks.ceilings import measure_part, measure_whole
from core.running.machine import num_cores

REPEATS = 5
PART_S, WHOLE_S, WARM_UP_S = 3.0, 12.0, 8.0
HISTORY = Path(__file__).parents[1] / "results/speed/history"
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


def main() -> None:
    rates: dict[str, list[float]] = {name: [] for name in measurements()}
    for repeat in range(REPEATS):
        for name, (measure, *args) in measurements().items():
            rates[name].append(measure(*args)["sps"])
        print(f"repeat {repeat + 1} of {REPEATS} done", file=sys.stderr)

    ratios = relative(rates)
    runs = sorted(HISTORY.glob("*.json"))
    earlier = relative(json.loads(runs[-1].read_text())["steps_per_s"]) if runs else {}
    print(f"{num_cores()} cores, {platform.machine()}, torch {torch.__version__}")
    print(f"{'':20}{'steps/s':>9}{'per emulator':>14}{'before':>9}{'change':>8}")
    for name, ratio in ratios.items():
        line = f"{name:20}{statistics.median(rates[name]):9.0f}{ratio:14.3f}"
        if name in earlier:
            line += f"{earlier[name]:9.3f}{ratio / earlier[name] - 1:+8.0%}"
        print(line)
    lstm = statistics.median(
        ff / lstm for ff, lstm in zip(rates["learner"], rates["learner, LSTM"])
    )
    print(f"A learner's step with LSTM costs {lstm:.2f} times that without.")

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=HISTORY.parent,
        capture_output=True,
        text=True,
    ).stdout.strip()
    HISTORY.mkdir(parents=True, exist_ok=True)
    path = HISTORY / f"{time.strftime('%Y%m%d-%H%M')}-{commit or 'unknown'}.json"
    result = {"cores": num_cores(), "torch": torch.__version__, "steps_per_s": rates}
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"Wrote {path}")


def relative(rates: dict[str, list[float]]) -> dict[str, float]:
    """Return the median, over the turns, of each rate over the yardstick's."""
    return {
        name: statistics.median(r / y for r, y in zip(of_row, rates[YARDSTICK]))
        for name, of_row in rates.items()
    }


if __name__ == "__main__":
    main()
