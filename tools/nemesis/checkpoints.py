# SPDX-License-Identifier: Apache-2.0
"""Damage checkpoints: kills in the middle of a save, changed bytes, full disks.

Kills: a process saves without end, each step twice, so that half of the saves replace a
good checkpoint. It is killed (SIGKILL) after a random part of a save. Afterwards there
must be a good checkpoint that is at least as new as the last completed save, with every
number as it was saved; no checkpoint may look damaged, and no other file may be left.

Mutations: the newest checkpoint is changed. Each change must be noticed, and the
newest good checkpoint must be used.

Full disks: from a random moment on, the files of a training run cannot grow beyond a
random size. The run must continue, keep its checkpoints, and save again when there is
room.
"""

import argparse
import itertools
import multiprocessing
import random
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from core.running import atomic, checkpoint
from core.running.supervise import exit_with_parent
from tools.nemesis.programs import FLAGS, SIZES, Program, workplace
from tools.nemesis.result import Result

SIZE = 500_000  # Numbers in each of two groups: 2 MB.


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--disks", type=int, default=20, help="how often one is full")
    parser.add_argument("--seed", type=int, default=1)


def measure(flags: argparse.Namespace) -> Result:
    rng = random.Random(flags.seed)
    with workplace() as folder:
        kills = kill_in_saves(folder, flags.kills, rng)
    with workplace() as folder:
        mutations = mutate_many(folder, flags.mutations, rng)
    with workplace() as folder:
        disks = fill_disks(folder, flags.disks, rng)
    result = Result(
        injected={
            "kills_in_a_save": kills["in_a_save"],
            "mutations": mutations["injected"],
            "full_disks": disks["full"],
        },
        asked={
            "kills_in_a_save": flags.kills,
            "mutations": flags.mutations,
            "full_disks": flags.disks,
        },
        figures={
            "unreadable": kills["unreadable"],
            "half_saves_left": kills["half_saves"],
            "detected": mutations["detected"],
            "fell_back": mutations["fell_back"],
            "lost_on_full_disks": disks["lost"],
            "saved_again": disks["saved_again"],
        },
    )
    result.require(kills["unreadable"] == 0, f"{kills['unreadable']} unreadable")
    result.require(kills["half_saves"] == 0, f"{kills['half_saves']} half saves left")
    for key in ("detected", "fell_back"):
        result.require(
            mutations[key] == mutations["injected"],
            f"{key}: {mutations[key]} of {mutations['injected']} mutations",
        )
    result.require(disks["lost"] == 0, f"{disks['lost']} lost on full disks")
    result.require(
        disks["saved_again"] == disks["full"],
        f"saved again after {disks['saved_again']} of {disks['full']} full disks",
    )
    return result


def contents(number: int, size: int = SIZE) -> dict[str, Any]:
    """Return the arguments of save `number`; no other save has the same values."""
    return {
        "step": number // 2,
        "tensors": {
            group: {"weight": torch.full((size,), float(number))}
            for group in ("model", "optimizer")
        },
        "state": {"number": number},
    }


def is_whole(found: checkpoint.Checkpoint) -> bool:
    """Return whether all parts of a checkpoint are of one save."""
    tensors = [t for group in found.tensors.values() for t in group.values()]
    return len(tensors) == 2 and all(
        bool((tensor == found.state["number"]).all()) for tensor in tensors
    )


# ------------------------------------------------------------------------------- kills


def save_forever(
    save: Callable[..., Any], directory: Path, first: int, pipe: connection.Connection
) -> None:
    exit_with_parent()
    for number in itertools.count(first):
        pipe.send_bytes(b"begin")
        save(directory, **contents(number))
        pipe.send_bytes(b"end")


def kill_in_saves(
    directory: Path,
    count: int,
    rng: random.Random,
    save: Callable[..., Any] = checkpoint.save,
) -> Counter[str]:
    """Kill a saving process until `count` kills have met it in the middle."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.nemesis.checkpoints"])
    began = time.monotonic()
    save(directory, **contents(1))
    save_s = time.monotonic() - began
    number = 1  # Of the last save that is known to be complete.
    seen: Counter[str] = Counter()
    while seen["in_a_save"] < count and seen["kills"] < 3 * count:
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=save_forever, args=(save, directory, number + 1, writer)
        )
        process.start()
        writer.close()
        events = [reader.recv_bytes() for _ in range(1 + 2 * rng.randrange(3))]
        time.sleep(rng.uniform(0, save_s))
        process.kill()
        process.join()
        while reader.poll():  # At the end, too.
            try:
                events.append(reader.recv_bytes())
            except EOFError:
                break
        reader.close()
        atomic.sweep(directory)  # As the next start of a run does.
        seen["kills"] += 1
        seen["in_a_save"] += events[-1] == b"begin"
        number += events.count(b"end")
        # The save that had begun may be complete, too.
        complete = (number, number + 1)
        try:
            found = checkpoint.load(directory)
        except checkpoint.CheckpointError:
            found = None
        if (
            found is None
            or found.rejected
            or found.state["number"] not in complete
            or not is_whole(found)
        ):
            seen["unreadable"] += 1
        else:
            number = found.state["number"]
        seen["half_saves"] += any(directory.glob(".*tmp-*"))
    return seen


# --------------------------------------------------------------------------- mutations


def mutate(
    rng: random.Random, directory: Path, newest: str, other: str
) -> tuple[str, int]:
    """Damage the newest checkpoint, or two; return what was done, and to how many."""
    path, theirs = directory / newest, directory / other
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    if rng.randrange(2):
        at = rng.randrange(min(len(data), 1000))  # Most of the rest is tensors.
    kind = rng.choice(["flip", "truncate", "insert", "delete", "zero", "swap", "copy"])
    size = rng.choice([1, 2, 3, 100])
    if kind == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "truncate":
        del data[at:]
    elif kind == "insert":
        data[at:at] = rng.randbytes(size)
    elif kind == "delete":
        del data[at : at + size]
    elif kind == "zero":  # What some file systems show after a power failure.
        data[at:] = bytes(len(data) - at)
    else:
        data = bytearray(theirs.read_bytes())
        if kind == "swap":
            theirs.write_bytes(path.read_bytes())
    path.write_bytes(data)
    return f"{kind} at {at}", 2 if kind == "swap" else 1


def mutate_many(folder: Path, count: int, rng: random.Random) -> Counter[str]:
    """Mutate the newest of three checkpoints, `count` times, each time a new copy."""
    originals, directory = folder / "originals", folder / "checkpoints"
    for number in (2, 4, 6):  # Steps 1, 2 and 3.
        checkpoint.save(originals, **contents(number, size=1000))
    names = sorted(path.name for path in originals.iterdir())
    seen: Counter[str] = Counter()
    for _ in range(count):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(originals, directory)
        _, damaged = mutate(rng, directory, names[2], names[1])
        seen["injected"] += 1
        found = checkpoint.load(directory)
        assert found is not None
        seen["detected"] += len(found.rejected) == damaged
        seen["fell_back"] += found.step == 3 - damaged and is_whole(found)
    return seen


# -------------------------------------------------------------------------- full disks


def fill_disks(folder: Path, count: int, rng: random.Random) -> Counter[str]:
    """Limit the size of MonoBeast's files `count` times, as a full disk does."""
    seen: Counter[str] = Counter()
    flags = [*FLAGS, *SIZES["monobeast"], "--log_interval_s", "5"]
    with Program("monobeast", folder, *flags) as program:
        program.wait_for(program.newest)
        for _ in range(count):
            set_file_size(program.pid, rng.randrange(100_000, 300_000))
            program.wait_until_saves_fail(lambda: True)
            seen["full"] += 1
            found = checkpoint.load(program.checkpoints)
            assert found is not None
            seen["lost"] += bool(found.rejected)
            set_file_size(program.pid, resource.RLIM_INFINITY)
            program.wait_for(lambda: program.newest() > found.path.name)  # noqa: B023
            seen["saved_again"] += 1
        program.process.terminate()
        assert program.wait() == 75, program.text()
        assert program.failed_saves() >= count, program.text()
    return seen


def set_file_size(pid: int, limit: int) -> None:
    """Let files of a process grow to `limit` bytes; then writing fails (EFBIG)."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
