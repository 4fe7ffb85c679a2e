# SPDX-License-Identifier: Apache-2.0
"""PolyBeast beside its parts and MonoBeast, and its memory over a long run.

    python -m benchmarks.polybeast --model shallow --unroll_length 80 --batch_size 8
    python -m benchmarks.polybeast --memory_steps 1000000 --env Catch

The first is benchmarks/ceilings.py under another name. The second trains for that many
steps and prints the slope of the proportional set size (PSS) of the learner and its
local servers over the last two thirds. Other flags are polybeast's. Raw figures go to
`--out` as one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ceilings
from benchmarks.ceilings import read_progress, tree_pss
from core.running.machine import num_cores


def measure(total: int, argv: list[str]) -> dict[str, Any]:
    """Train for that many steps; print the slope of the memory over the steps."""
    with tempfile.TemporaryDirectory() as savedir:
        child = subprocess.Popen(
            [sys.executable, "-m", "polybeast", "--savedir", savedir]
            + ["--xpid", "speed", "--log_interval_s", "1", "--disable_checkpoint"]
            + ["--total_steps", str(total), *argv],
            stderr=subprocess.DEVNULL,
        )
        samples = []  # (steps, MB)
        while child.poll() is None:
            time.sleep(1.0)
            mb = tree_pss(child.pid) / 2**20
            progress = read_progress(Path(savedir))
            # Not while the run is ending, when processes have gone.
            if progress and progress[-1]["step"] < total and child.poll() is None:
                samples.append((progress[-1]["step"], mb))
        if child.returncode != 0:
            raise RuntimeError(f"polybeast ended with {child.returncode}")
    settled = [s for s in samples if s[0] > total / 3]
    steps, mbs = np.array(settled).T
    slope = np.polyfit(steps / 1e6, mbs, 1)[0]
    print(
        f"{len(settled)} samples after a third of {total} steps: "
        f"{mbs.mean():.1f} MB, {slope:+.2f} MB per million steps"
    )
    return {"samples": samples, "mb_per_million_steps": slope}


def main() -> None:
    if not any(word.startswith("--memory_steps") for word in sys.argv):
        return ceilings.main()
    parser = argparse.ArgumentParser(
        description="Memory over a long PolyBeast run.", allow_abbrev=False
    )
    parser.add_argument("--memory_steps", type=int, help="agent steps to train for")
    parser.add_argument("--out", type=Path, help="JSON file for the raw figures")
    own, argv = parser.parse_known_args()
    result = measure(own.memory_steps, argv)
    if own.out:
        own.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"argv": argv, "cores": num_cores(), **result}
        own.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
