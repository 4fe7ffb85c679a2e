# SPDX-License-Identifier: Apache-2.0
"""Train with a full /dev/shm, and on a disk without free inodes.

Both programs train Catch on a small disk while /dev/shm is full, in a mount namespace
of their own (this needs root). Again and again the disk has no inodes left. The run
must go on, keep its checkpoints, and save again when there are inodes.
"""

import argparse
import contextlib
import errno
import itertools
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from core.running import checkpoint
from tools.nemesis.programs import FLAGS, MODULES, SIZES, Program, workplace
from tools.nemesis.result import Result

FULL_SHM = "mount -t tmpfs -o size=4k tmpfs /dev/shm && echo >/dev/shm/full"
DISK = "size=200m,nr_inodes=100"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=20, help="times without inodes")


def measure(flags: argparse.Namespace) -> Result:
    seen: Counter[str] = Counter()
    for module in MODULES:
        with workplace() as folder, small_disk(folder / "runs"):
            prefix = ["unshare", "-m", "sh", "-c", f'{FULL_SHM} && exec "$@"', "sh"]
            argv = [*SIZES[module], *FLAGS, "--log_interval_s", "5"]
            with Program(module, folder, *argv, prefix=prefix) as program:
                program.wait_for(program.newest)
                for _ in range(flags.count):
                    seen += exhaust_inodes(program)
                program.process.terminate()
                seen["full_shm"] += program.wait() == 75
                seen["failed"] += min(flags.count, program.failed_saves())
    found = Result(
        {key: seen[key] for key in ("full_shm", "without_inodes")},
        {"full_shm": len(MODULES), "without_inodes": flags.count * len(MODULES)},
        {"checkpoints_lost": seen["lost"], "saved_again": seen["saved_again"]},
    )
    found.require(
        seen["failed"] == seen["without_inodes"],
        f"{seen['failed']} failed saves, expected {seen['without_inodes']} at least",
    )
    found.require(seen["lost"] == 0, f"{seen['lost']} checkpoints lost")
    return found


def exhaust_inodes(program: Program) -> Counter[str]:
    """Use up the inodes of a disk until no save succeeds; count the effects."""
    seen: Counter[str] = Counter()
    disk = program.run_dir.parent
    ours: list[Path] = []

    def has_none() -> bool:
        # In each call, because the end of a save frees an inode.
        ours.extend(files_without_end(disk, len(ours)))
        return True

    program.wait_until_saves_fail(has_none)
    seen["without_inodes"] += 1
    found = checkpoint.load(program.checkpoints)
    seen["lost"] += found is None or bool(found.rejected)
    newest = program.newest()
    for path in ours:
        path.unlink()
    program.wait_for(lambda: program.newest() > newest)
    seen["saved_again"] += 1
    return seen


def files_without_end(folder: Path, first: int) -> Iterator[Path]:
    """Create files until there are no inodes; yield each."""
    for i in itertools.count(first):
        path = folder / f"file-{i}"
        try:
            path.touch()
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            return
        yield path


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
