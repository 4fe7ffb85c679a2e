# SPDX-License-Identifier: Apache-2.0
"""Speed, as ratios of things run side by side on one machine.

    bench           every speed that matters, against its history   make bench
    compare         two versions of this repository                 after a change
    ceilings        each part of a run alone, and the whole         to find a bottleneck
    peers/          other systems on the same work
    environments    our Atari wrappers beside EnvPool
    transport       a step's way from environment to learner        csrc/, core/remote
    learner_bound   whether a slow learner ever waits
    learners        several learners: sum of gradients, scaling     docs/scale.md
    recovery        time until learners go on after a kill          docs/scale.md
    churn           servers that come and go                        docs/scale.md
    tunnel          machines that dial in     docs/environments-on-other-machines.md
    compile         torch.compile
    gpu             a GPU                                           docs/speed.md

The last column says when to run each, or which page uses it. The raw figures are in
results/speed. `python -m benchmarks.NAME --help` explains a program.
"""

from pathlib import Path

from core.installed import explain_missing_packages

explain_missing_packages()  # Here once, for each program of this package.


def out_file(text: str) -> Path:
    """Return the path of --out; make its folder now, not after the measurement."""
    path = Path(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
