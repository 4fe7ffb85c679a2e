# SPDX-License-Identifier: Apache-2.0
"""Train PolyBeast on Catch and MinAtar Breakout with faults and without.

At each step of each environment, the server's process ends with probability P_CRASH, or
hangs with P_STALL for longer than --env_step_timeout_s, so that it is killed
(tools/nemesis/faulty.py). Besides, every KILL_EVERY_S a server is killed from outside.
The goal: the median number of steps until the mean return of the last 100 games reaches
the threshold is at most GOAL times the median of the same seeds without faults.
"""

import argparse
import contextlib
import os
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil

from core.errors import Exit
from tools.nemesis.faulty import P_CRASH, P_STALL
from tools.nemesis.programs import Program, wait_for, workplace
from tools.nemesis.result import Result
from tools.runs import log_rows

GOAL = 1.3
KILL_EVERY_S = 10.0
LIMIT_S = 1800.0  # For one run.
# Many servers of few environments: a fault costs all environments of its process.
FLAGS = ["--num_servers", "8", "--streams_per_server", "1", "--envs_per_stream", "2"]
FLAGS += ["--learning_rate", "0.001", "--log_interval_s", "0.2", "--disable_checkpoint"]
FLAGS += ["--env_step_timeout_s", "1"]


class Task(NamedTuple):
    environment: str
    faulty: str
    threshold: float  # Mean return of 100 games.
    flags: list[str]


TASKS = {
    "Catch": Task(
        "Catch",
        "tools.nemesis.faulty:make_catch",
        0.9,
        ["--total_steps", "150000", "--batch_size", "8", "--epsilon", "0.001"],
    ),
    "Breakout": Task(
        "MinAtar/Breakout-v1",
        "tools.nemesis.faulty:make_breakout",
        4.0,
        ["--total_steps", "1500000", "--batch_size", "16"],
    ),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument(
        "--goal",
        type=float,
        default=GOAL,
        help="largest ratio of steps with and without faults; one seed proves little",
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK"
    )


def measure(flags: argparse.Namespace) -> Result:
    faults: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    steps: dict[str, dict[str, list[int | None]]] = {}
    ratios: dict[str, float] = {}
    for name in flags.tasks:
        plain, faulty = [], []
        for seed in range(flags.seeds):
            plain.append(learn(TASKS[name], seed, None, Counter()))
            with workplace() as folder:
                began = time.monotonic()
                faulty.append(learn(TASKS[name], seed, folder, faults))
                seconds = time.monotonic() - began
                for kind, p in (("crashes", P_CRASH), ("stalls", P_STALL)):
                    happened = [path.stat().st_size for path in folder.glob(kind)]
                    faults[kind] += sum(happened)
                    # Faults are random, but half of the expected number is too few.
                    asked[kind] += int(p * (faulty[-1] or 0) / 2)
                asked["kills"] += int(seconds // KILL_EVERY_S) - 1  # While it starts.
        steps[name] = {"plain": plain, "faulty": faulty}
        if None not in plain + faulty:
            ratios[name] = round(
                statistics.median(faulty) / statistics.median(plain), 3
            )
    result = Result(
        injected=dict(faults),
        asked=dict(asked),
        figures={"steps_to_threshold": steps, "ratio_of_medians": ratios},
    )
    for name in flags.tasks:
        result.require(name in ratios, f"{name}: not learned: {steps[name]}")
        result.require(
            ratios.get(name, 0) <= flags.goal,
            f"{name}: {ratios.get(name)} times the steps",
        )
    return result


def learn(
    task: Task, seed: int, faults: Path | None, happened: Counter[str]
) -> int | None:
    """Train until the threshold; return how many steps that took, None if it failed.

    Args:
      faults: the folder in which environments count their faults; None: no faults.
      happened: this function adds the kills.
    """
    env = task.environment if faults is None else task.faulty
    if faults is not None:
        os.environ["FAULTS"] = str(faults)  # Inherited by the servers.
    command = [*FLAGS, *task.flags, "--env", env, "--seed", str(seed)]
    with workplace() as folder, Program("polybeast", folder, *command) as program:
        next_kill = time.monotonic() + KILL_EVERY_S

        def has_come_to_it() -> bool:
            nonlocal next_kill
            is_due = faults is not None and time.monotonic() > next_kill
            if is_due and kill_a_server(program):
                next_kill += KILL_EVERY_S
                happened["kills"] += 1
            time.sleep(0.05)
            return threshold_step(program.run_dir, task) is not None

        wait_for(lambda: has_come_to_it() or not program.is_running(), LIMIT_S)
        step = threshold_step(program.run_dir, task)
        if program.is_running():
            program.process.terminate()
        status = program.wait()
        if step is None or status not in (Exit.STOPPED, Exit.DONE):
            print(program.text(), file=sys.stderr)
            return None
        return step


def threshold_step(run_dir: Path, task: Task) -> int | None:
    """Return the first step in the log with the threshold reached, if there is one."""
    for row in log_rows(run_dir):
        best = row["best_mean_return"]  # Blank before 100 games.
        if best and float(best) >= task.threshold:
            return int(row["step"])
    return None


def kill_a_server(program: Program) -> bool:
    """Kill a process that steps environments; return whether one was killed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        supervisors = children_of([psutil.Process(program.pid)])
        guards = children_of(supervisors)
        if servers := children_of(guards):
            random.choice(servers).kill()
            return True
    return False


def children_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the children of those processes that have not ended."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.children()
    return found
