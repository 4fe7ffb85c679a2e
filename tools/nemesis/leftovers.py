# SPDX-License-Identifier: Apache-2.0
"""End both trainers in every way, at random moments, and look for what is left.

The ways are SIGINT, SIGTERM, SIGKILL, an environment that raises, a learner that
raises, and SIGKILL while an environment hangs in C code with the GIL held. LIMIT_S
after the end there may be no process of the run, wherever it is in the process tree; no
file in the temporary folder or in /dev/shm; and no temporary file in the run's folder.
Exception: a SIGKILL may leave the file that was being written, which the next start
removes.
"""

import argparse
import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from core.errors import Exit
from tools.nemesis.programs import (
    FLAGS,
    MODULES,
    MOMENTS,
    SIZES,
    Program,
    await_moment,
    measure_start,
    wait_for,
    workplace,
)
from tools.nemesis.result import Result, spread

LIMIT_S = 5.0
SHM = Path("/dev/shm")
SIGNALS = {
    "INT": signal.SIGINT,
    "TERM": signal.SIGTERM,
    "KILL": signal.SIGKILL,
    "KILL while hung": signal.SIGKILL,
}
BREAKS = {
    "KILL while hung": ["--env", "tools.nemesis.faulty:make_hanging"],
    "environment raises": ["--env", "tests.wrong_env:make_raising"],
    "learner raises": ["--env", "tests.wrong_env:make_boundless"]
    + ["--reward_clipping", "none"],
}
WAYS = list(dict.fromkeys([*SIGNALS, *BREAKS]))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=50, help="ends of each program")
    parser.add_argument("--seed", type=int, default=1)


def measure(flags: argparse.Namespace) -> Result:
    rng = random.Random(flags.seed)
    ends: Counter[str] = Counter()
    left: list[str] = []
    clean_s: list[float] = []
    for module in MODULES:
        start_s = measure_start(module)
        for i in range(flags.count):
            way, kind = WAYS[i % len(WAYS)], MOMENTS[i // len(WAYS) % len(MOMENTS)]
            shm = set(os.listdir(SHM))
            with workplace() as folder, start(module, folder, way) as program:
                status = end(program, way, kind, rng, start_s)
                ends[f"{module}: {way}, status {status}"] += 1
                seconds, found = watch(program, shm, killed=status == -signal.SIGKILL)
            clean_s.append(seconds)
            left += [f"{module} after {way} at {kind}: {what}" for what in found]
    result = Result(
        injected={"ends": ends.total()},
        asked={"ends": len(MODULES) * flags.count},
        figures={
            "left": left,
            "clean_s": spread(clean_s),
            "ends": dict(sorted(ends.items())),
        },
    )
    result.require(not left, f"left behind: {left}")
    return result


def start(module: str, folder: Path, way: str) -> Program:
    return Program(module, folder, *SIZES[module], *FLAGS, *BREAKS.get(way, []))


def watch(
    program: Program, shm: set[str], *, killed: bool = False
) -> tuple[float, list[str]]:
    """Wait until nothing is left of a program that has ended, for up to LIMIT_S.

    Return the seconds since its end, and what is left.

    Args:
      shm: what was in /dev/shm before.
      killed: temporary files in the run's folder do not count.
    """
    found: list[str] = []

    def is_clean() -> bool:
        nonlocal found
        found = program.leftovers() + sorted(set(os.listdir(SHM)) - shm)
        if killed:
            found = [x for x in found if not (x.startswith("runs/") and ".tmp-" in x)]
        return not found

    with contextlib.suppress(TimeoutError):
        wait_for(is_clean, program.ended_at + LIMIT_S - time.monotonic())
    return time.monotonic() - program.ended_at, found


def end(
    program: Program, way: str, kind: str, rng: random.Random, start_s: float
) -> int:
    """End a program in some way; return its exit status."""
    if way == "KILL while hung":
        program.wait_for(lambda: "about to hang" in program.text())
    elif way in SIGNALS:
        await_moment(program, kind, rng, start_s=start_s)
    if way in SIGNALS:
        program.process.send_signal(SIGNALS[way])
    status = program.wait()
    expected = {
        # A signal finds no handler while Python imports torch.
        "INT": (Exit.STOPPED, -signal.SIGINT),
        "TERM": (Exit.STOPPED, -signal.SIGTERM),
        "KILL": (-signal.SIGKILL,),
        "KILL while hung": (-signal.SIGKILL,),
    }.get(way, (Exit.INTERNAL,))
    if status not in expected:
        raise RuntimeError(f"status {status} after {way}:\n{program.text()}")
    return status
