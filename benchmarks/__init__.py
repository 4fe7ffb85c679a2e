# SPDX-License-Identifier: Apache-2.0
"""Speed, as ratios of things that run side by side on one machine.

    bench           every speed that matters, against its history   make bench
    compare         two versions of this repository                 after a change
    ceilings        each part of a run alone, and the whole         to find a bottleneck
    peers/          other systems on the same work                  docs/speed.md
    environments    our Atari wrappers beside EnvPool               docs/speed.md
    transport       messages from environments to the learner       csrc/, core/remote
    learners        several learners: sum of gradients, scaling     docs/scale.md
    recovery        time until learners go on after a kill          docs/scale.md
    churn           servers that come and go                        docs/scale.md
    tunnel          machines that dial in     docs/environments-on-other-machines.md
    compile         torch.compile                                   docs/speed.md
    gpu             a GPU                                           docs/speed.md

The last column says when to run each, or which page uses it. The raw figures are in
results/speed. `python -m benchmarks.NAME --help` explains a program.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from core.imports import explain_missing_packages
from core.running.machine import num_cores

explain_missing_packages()  # Here once, for each program of this package.

ROOT = Path(__file__).parents[1]


def out_file(text: str) -> Path:
    """Return the path of --out; make its folder now, not after the measurement."""
    path = Path(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def describe_commit(folder: Path) -> str:
    """Return the commit that a folder has, with -dirty if files differ from it."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def write_figures(path: Path | None, **figures: Any) -> None:
    """Write raw figures as JSON, with where they come from; nothing without --out."""
    if path is None:
        return
    origin = {
        "command": sys.orig_argv[1:],
        "commit": describe_commit(ROOT),
        "cores": num_cores(),
    }
    path.write_text(json.dumps(origin | figures, indent=1) + "\n")
