# SPDX-License-Identifier: Apache-2.0
"""PolyBeast end to end, beside environment-only stepping and beside MonoBeast.

    python -m benchmarks.polybeast --model shallow --unroll_length 80 --batch_size 8
    python -m benchmarks.polybeast --memory_steps 1000000 --env Catch

The first takes flags that both trainers know and prints one table, agent steps/s:
the parts as in benchmarks/monobeast.py, then PolyBeast and MonoBeast, all taking
turns, `--repeats` times. The part with the highest CPU cost per step bounds the whole.

The second trains PolyBeast for that many steps and prints how its memory (proportional
set size of the learner and its local servers) grows over the last two thirds.

Raw figures go to `--out` as one JSON object.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import monobeast
from benchmarks.monobeast import (
    PARTS,
    measure_part,
    measure_whole,
    read_progress,
    tree_pss,
)
from core.supervise import num_cores

PROGRAMS = ("polybeast", "monobeast")


def compare(own: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Measure the parts and both programs in turns; print the table."""
    monobeast.parse_flags(argv)  # Refuses bad flags at once, not in each child.
    cores = num_cores()
    processes = {"environment": cores, "inference": cores, "learner": 1}
    measured: dict[str, list[dict[str, float]]] = {
        name: [] for name in (*PARTS, *PROGRAMS)
    }
    for repeat in range(own.repeats):
        for part in PARTS:
            measured[part].append(measure_part(part, processes[part], own.part_s, argv))
        for program in PROGRAMS:
            measured[program].append(measure_whole(own.whole_s, argv, program))
        print(f"repeat {repeat + 1} of {own.repeats} done", file=sys.stderr)

    def median(name: str, key: str) -> float:
        return statistics.median(m[key] for m in measured[name])

    poly = median("polybeast", "sps")
    print(f"{cores} cores, {platform.machine()}, torch {torch.__version__}; {argv}")
    print(f"{'':14}{'steps/s':>9}{'spread':>16}{'CPU us/step':>13}{'poly/this':>12}")
    for name, results in measured.items():
        rates = sorted(m["sps"] for m in results)
        rate = statistics.median(rates)
        us = median(name, "cpu_us") if name in PARTS else cores * 1e6 / rate
        spread = f"{rates[0]:.0f}-{rates[-1]:.0f}"
        print(f"{name:14}{rate:9.0f}{spread:>16}{us:>13.0f}{poly / rate:>12.2f}")
    bounding = max(PARTS, key=lambda part: median(part, "cpu_us"))
    print(f"The largest share of the CPU goes to: {bounding}")
    for program in PROGRAMS:
        print(
            f"{program}: peak memory {median(program, 'peak_mb'):.0f} MB, learner busy "
            f"{median(program, 'learner_busy'):.0%}"
        )
    return {"measured": measured}


def memory(own: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Train for `--memory_steps`; print the slope of the memory over the steps."""
    with tempfile.TemporaryDirectory() as savedir:
        child = subprocess.Popen(
            [sys.executable, "-m", "polybeast", "--savedir", savedir]
            + ["--xpid", "speed", "--log_interval_s", "1", "--disable_checkpoint"]
            + ["--total_steps", str(own.memory_steps), *argv],
            stderr=subprocess.DEVNULL,
        )
        samples = []  # (steps, MB)
        while child.poll() is None:
            time.sleep(1.0)
            mb = tree_pss(child.pid) / 2**20
            progress = read_progress(Path(savedir))
            if progress and child.poll() is None:
                samples.append((progress[-1][1], mb))
        if child.returncode != 0:
            raise RuntimeError(f"polybeast ended with {child.returncode}")
    settled = [s for s in samples if s[0] > own.memory_steps / 3]
    steps, mbs = np.array(settled).T
    slope = np.polyfit(steps / 1e6, mbs, 1)[0]
    print(
        f"{len(settled)} samples after a third of {own.memory_steps} steps: "
        f"{mbs.mean():.1f} MB, {slope:+.2f} MB per million steps"
    )
    return {"samples": samples, "mb_per_million_steps": slope}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="How fast PolyBeast is here; other flags are the trainers'."
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--part_s", type=float, default=8.0, help="seconds per part")
    parser.add_argument(
        "--whole_s", type=float, default=30.0, help="seconds end to end, warmed up"
    )
    parser.add_argument(
        "--memory_steps", type=int, help="report the growth of memory over these steps"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the raw figures")
    own, argv = parser.parse_known_args()
    result = memory(own, argv) if own.memory_steps else compare(own, argv)
    if own.out:
        own.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"argv": argv, "cores": num_cores(), **result}
        own.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
