# SPDX-License-Identifier: Apache-2.0
"""Environments that take all memory of a container: who is killed for it?

Both programs train Catch in a memory cgroup of their own (this needs root), until an
environment takes what is left. The kernel must kill that server or actor, not the
learner, and the run must go on with another one.
"""

import argparse
import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

from tools.nemesis.environments import order_file
from tools.nemesis.programs import wait_for
from tools.nemesis.result import Result
from tools.nemesis.training import Training

CGROUP = Path("/sys/fs/cgroup")
ROOM = 150 * 2**20  # Beyond what the run takes: less than a learner has.
NUM_WORKERS = 2
SIZES = {
    "polybeast": ["--num_servers", str(NUM_WORKERS), "--batch_size", "8"],
    "monobeast": ["--num_actors", str(NUM_WORKERS), "--envs_per_actor", "8"],
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20, help="of each program")
    parser.add_argument("--seed", type=int, default=0, help="of whose turn it is")


def measure(flags: argparse.Namespace) -> Result:
    rng = random.Random(flags.seed)
    injected = {}
    for trainer, sizes in SIZES.items():
        training = Training(
            trainer, "--env", "tools.nemesis.environments:make_greedy", *sizes
        )
        with memory_cgroup(training.process.pid) as cgroup, training as run:
            for kill in range(1, flags.kills + 1):
                cgroup.set_room(ROOM)
                victim = f"{run.worker}-{rng.randrange(NUM_WORKERS)}"
                order_file(run.folder, victim, "memory").touch()
                run.wait_until(lambda: run.kills() >= kill)  # noqa: B023
                rows = len(run.rows())
                run.wait_until(lambda: len(run.rows()) > rows + 1)  # noqa: B023
            injected[trainer] = run.kills()
    return Result(injected, dict.fromkeys(SIZES, flags.kills), {})


class MemoryCgroup:
    """A memory cgroup, of version 1 or 2."""

    def __init__(self, path: Path, usage: str, limit: str):
        self._path, self._usage, self._limit = path, path / usage, path / limit

    def set_room(self, nbytes: int) -> None:
        """Let its processes take so much more than they have."""
        self._limit.write_text(str(int(self._usage.read_text()) + nbytes))


@contextlib.contextmanager
def memory_cgroup(pid: int) -> Iterator[MemoryCgroup]:
    """Yield a new cgroup that has this process, and all that it starts from now on."""
    is_v1 = (CGROUP / "memory").is_dir()
    path = CGROUP / ("memory" if is_v1 else "") / f"torchbeast-nemesis-{os.getpid()}"
    path.mkdir()
    try:
        (path / "cgroup.procs").write_text(str(pid))
        files = ("memory.usage_in_bytes", "memory.limit_in_bytes")
        yield MemoryCgroup(
            path, *(files if is_v1 else ("memory.current", "memory.max"))
        )
    finally:
        wait_for(lambda: not (path / "cgroup.procs").read_text())
        path.rmdir()
