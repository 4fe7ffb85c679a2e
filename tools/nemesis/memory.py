# SPDX-License-Identifier: Apache-2.0
"""Let an environment take all memory of a container.

Each program trains Catch in a memory cgroup (this needs root) until an environment
takes the memory that is left. That is little, so the learner has most of the memory.
The kernel must still kill the server or actor, not the learner, and the run must go on
with another one.
"""

import argparse
import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

from tools.nemesis.environments import order_file
from tools.nemesis.programs import train, wait_for
from tools.nemesis.result import Result

CGROUP = Path("/sys/fs/cgroup")
ROOM = 40 * 2**20  # Beyond what the run takes: much less than a learner has.
NUM_WORKERS = 2
SIZES = {
    "polybeast": ["--num_servers", str(NUM_WORKERS), "--batch_size", "8"],
    "monobeast": ["--num_actors", str(NUM_WORKERS), "--envs_per_actor", "8"],
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20, help="of each program")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the choice of processes"
    )


def measure(flags: argparse.Namespace) -> Result:
    rng = random.Random(flags.seed)
    injected, replaced = {}, {}
    for trainer, sizes in SIZES.items():
        argv = ["--env", "tools.nemesis.environments:make_greedy", *sizes]
        with (
            memory_cgroup() as cgroup,
            train(trainer, *argv, prefix=cgroup.prefix) as run,
        ):
            for _ in range(flags.kills):
                cgroup.set_room(ROOM)
                victim = f"{run.worker}-{rng.randrange(NUM_WORKERS)}"
                pid = run.pids[victim]
                order_file(run.folder, victim, "memory").touch()
                run.wait_for(lambda: run.pids[victim] != pid)  # noqa: B023
                rows = run.rows()
                run.wait_for(lambda: run.rows() > rows + 1)  # noqa: B023
            injected[trainer] = cgroup.kills()
            replaced[trainer] = run.replaced
    found = Result(injected, dict.fromkeys(SIZES, flags.kills), {"replaced": replaced})
    found.require(injected == replaced, f"{injected} killed, {replaced} replaced")
    return found


class MemoryCgroup:
    """A memory cgroup, of version 1 or 2."""

    def __init__(self, path: Path, usage: str, limit: str, events: str):
        self._usage, self._limit = path / usage, path / limit
        self._events = path / events
        # The words of a command that executes a program in it.
        self.prefix = ["sh", "-c", f'echo $$ >{path}/cgroup.procs && exec "$@"', "sh"]

    def set_room(self, nbytes: int) -> None:
        """Allow its processes `nbytes` more memory than they have now."""
        self._limit.write_text(str(int(self._usage.read_text()) + nbytes))

    def kills(self) -> int:
        """Return how many processes the kernel has killed in it."""
        words = self._events.read_text().split()
        return int(words[words.index("oom_kill") + 1])


@contextlib.contextmanager
def memory_cgroup() -> Iterator[MemoryCgroup]:
    """Yield a new cgroup."""
    is_v1 = (CGROUP / "memory").is_dir()
    path = CGROUP / ("memory" if is_v1 else "") / f"torchbeast-nemesis-{os.getpid()}"
    path.mkdir()
    try:
        v1 = ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control")
        v2 = ("memory.current", "memory.max", "memory.events")
        yield MemoryCgroup(path, *(v1 if is_v1 else v2))
    finally:
        wait_for(lambda: not (path / "cgroup.procs").read_text())
        path.rmdir()
