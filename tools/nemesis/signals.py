# SPDX-License-Identifier: Apache-2.0
"""Send SIGTERM to both trainers at random moments: time until checkpoint and end.

Each program trains one run, again and again, and is stopped while it starts, connects,
saves or trains. It must end with status 75 within LIMIT_S (99 of 100 times). Its last
checkpoint must be of the step that it reports, and never older than the one before.

While Python imports torch, which takes seconds, a program has no signal handler yet, so
SIGTERM ends it at once. It has learned nothing and leaves nothing behind. These ends
are reported, but not counted. Ends before PolyBeast knows its environment are counted,
but need no checkpoint.
"""

import argparse
import itertools
import random
import re
import signal
import time

from core.errors import Exit
from core.running import checkpoint
from tools.nemesis.programs import (
    FLAGS,
    MODULES,
    MOMENTS,
    SIZES,
    Program,
    await_moment,
    measure_start,
    workplace,
)
from tools.nemesis.result import Result, quantile, spread

LIMIT_S = 3.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=50, help="signals to each program")
    parser.add_argument("--seed", type=int, default=1)


def measure(flags: argparse.Namespace) -> Result:
    rng = random.Random(flags.seed)
    exit_s: dict[str, dict[str, list[float]]] = {
        module: {kind: [] for kind in MOMENTS} for module in MODULES
    }
    early_s: list[float] = []  # Of ends before there is a handler.
    wrong: list[str] = []
    for module in MODULES:
        start_s = measure_start(module)
        with workplace() as folder:
            step = -1  # Of the last checkpoint; -1 if there is none.
            for kind in itertools.cycle(MOMENTS):
                if count(exit_s[module]) == flags.count:
                    break
                with Program(module, folder, *SIZES[module], *FLAGS) as program:
                    await_moment(program, kind, rng, start_s=start_s)
                    began = time.monotonic()
                    program.process.send_signal(signal.SIGTERM)
                    status = program.wait()
                    took_s = program.ended_at - began
                    before, step = step, newest_step(program)
                    reason = judge(program, status, before, step)
                if status == -signal.SIGTERM and reason is None:
                    early_s.append(took_s)
                else:
                    exit_s[module][kind].append(took_s)
                if reason is not None:
                    wrong.append(f"{module} at {kind}: {reason}")
    result = Result(
        injected={f"signals_{module}": count(exit_s[module]) for module in MODULES},
        asked={f"signals_{module}": flags.count for module in MODULES},
        figures={
            "exit_s": {
                module: {
                    kind: {"count": len(times), **spread(times)}
                    for kind, times in by_moment.items()
                }
                for module, by_moment in exit_s.items()
            },
            "before_handlers": {"count": len(early_s), **spread(early_s)},
            "wrong": wrong,
        },
    )
    result.require(not wrong, f"wrong ends: {wrong}")
    for name, by_moment in [*exit_s.items(), ("before handlers", {"all": early_s})]:
        times = [took_s for times in by_moment.values() for took_s in times]
        slow = quantile(times, 0.99) if times else 0.0
        result.require_time(slow <= LIMIT_S, f"{name}: 99 of 100 end in {slow:.2f} s")
    return result


def count(by_moment: dict[str, list[float]]) -> int:
    return sum(map(len, by_moment.values()))


def newest_step(program: Program) -> int:
    found = checkpoint.load(program.checkpoints)
    return -1 if found is None else found.step


def judge(program: Program, status: int, before: int, step: int) -> str | None:
    """Return what is wrong with an end, or None.

    Args:
      before: the step of the newest checkpoint when the program started.
      step: of the newest one now.
    """
    said = re.search(r"Stopped by SIGTERM at step (\d+)", program.text())
    if status == -signal.SIGTERM and "Run x in" in program.text():
        return "no handler in a run"
    if status not in (Exit.STOPPED, -signal.SIGTERM):
        return f"exit status {status}: {program.text()}"
    if said is not None and int(said[1]) != step:
        return f"stopped at step {said[1]}, the checkpoint is of step {step}"
    if said is None and "Run x in" in program.text():
        return f"did not say its step: {program.text()}"
    if step < before:
        return f"the checkpoint is of step {step}, there was one of step {before}"
    return None
