# SPDX-License-Identifier: Apache-2.0
"""Set the system clock by a day, forward and backward, while both programs train.

Both programs train Catch on all cores. All their processes see a wall clock that jumps:
wall_clock.c, which is compiled for this, shifts the time that they read and the times
until which they wait. The clock of the machine stays as it is. The dates of the log
lines show the jumps. Log lines and checkpoints must come at their intervals, no server
or actor may be lost, and the sum of rows at the end must be correct.
"""

import argparse
import contextlib
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from core.errors import Exit
from tools.nemesis.programs import Program, train
from tools.nemesis.result import Result
from tools.runs import curve

DAY_S = 86400
LOG_S, SAVE_S = 1.0, 2.0  # Intervals, of log lines and of checkpoints.
LATE_S = 3.0  # An interval may be longer by this.
SIZES = {
    "polybeast": ["--num_servers", "2"],
    "monobeast": ["--num_actors", "2", "--envs_per_actor", "8"],
}
WRONG = r"no progress|hangs|died|Not normal since the start|[Ll]ost .*stream"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jumps", type=int, default=10, help="in each program, half of them backward"
    )


def measure(flags: argparse.Namespace) -> Result:
    seen, figures, wrong = {}, {}, []
    late: dict[str, float] = {}
    for trainer, sizes in SIZES.items():
        argv = [*sizes, "--checkpoint_interval_s", str(SAVE_S)]
        with (
            WallClock() as clock,
            train(trainer, *argv, variables=clock.variables) as run,
        ):
            saved = Saves(run.checkpoints)
            run.wait_for(lambda: saved.look() > 1)  # noqa: B023
            wrong += [f"{trainer}: {name} has the real clock" for name in real(run)]
            for shift_s in itertools.islice(itertools.cycle([DAY_S, 0]), flags.jumps):
                clock.set_shift(shift_s)
                let_time_pass(run, saved)
            run.process.terminate()
            status = run.wait()
            times = [time_s for time_s, _ in curve(run.run_dir)]
        if status != Exit.STOPPED:
            wrong.append(f"{trainer}: exit status {status}: {run.text()}")
        if len(run.find(r"\d+ rows received = ")) != 1:
            wrong.append(f"{trainer}: no ledger: {run.text()}")
        wrong += [f"{trainer}: {match.string}" for match in run.find(WRONG)]
        if times != sorted(times):
            wrong.append(f"{trainer}: time_s of the log goes back: {times}")
        seen[trainer] = jumps_in([line for _, line in run.lines])
        figures[trainer] = {
            "log_rows": len(times),
            "longest_between_rows_s": longest(times),
            "checkpoints": len(saved.times),
            "longest_between_checkpoints_s": longest(saved.times),
        }
        late[f"{trainer}: log rows"] = longest(times) - LOG_S
        late[f"{trainer}: checkpoints"] = longest(saved.times) - SAVE_S
    found = Result(seen, dict.fromkeys(SIZES, flags.jumps), figures)
    found.require(not wrong, f"{wrong}")
    for what, late_s in late.items():
        found.require_time(
            late_s <= LATE_S,
            f"{what} late by {late_s:.1f} s, expected {LATE_S} at most",
        )
    return found


class WallClock:
    """A wall clock that only some processes see, at any distance from the real one."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "WallClock":
        folder = tempfile.TemporaryDirectory(prefix="nemesis-")
        library, self._shift = (
            Path(self._stack.enter_context(folder), name)
            for name in ("wall_clock.so", "shift")
        )
        source = Path(__file__).with_name("wall_clock.c")
        cc = [os.environ.get("CC", "cc"), "-std=gnu11", "-O2", "-Wall", "-Werror"]
        subprocess.run([*cc, "-shared", "-fPIC", "-o", library, source], check=True)
        self._shift.write_bytes(bytes(8))
        self.variables = {
            "LD_PRELOAD": str(library),
            "WALL_CLOCK_SHIFT": str(self._shift),
        }
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def set_shift(self, seconds: int) -> None:
        """Set the clock ahead of the real one by so many seconds."""
        with self._shift.open("r+b", buffering=0) as file:
            file.write(seconds.to_bytes(8, "little", signed=True))


class Saves:
    """The times (`time.monotonic`) at which checkpoints in a folder were first seen."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._names: set[str] = set()
        self.times: list[float] = []

    def look(self) -> int:
        """Look for new checkpoints; return the number of all so far."""
        names = {path.name for path in self._folder.glob("step-*")}
        self.times += [time.monotonic()] * len(names - self._names)
        self._names |= names
        return len(self.times)


def let_time_pass(run: Program, saved: Saves) -> None:
    """Wait for more checkpoints and rows, and for a log line, which has the date."""
    lines, rows, saves = len(run.lines), run.rows(), saved.look()
    run.wait_for(
        lambda: (
            saved.look() > saves + 1
            and len(run.lines) > lines
            and run.rows() > rows + 3
        )
    )


def real(run: Program) -> Iterator[str]:
    """Yield the names of a run's processes that do not see its wall clock."""
    for name, pid in run.processes().items():
        if "wall_clock.so" not in Path(f"/proc/{pid}/maps").read_text():
            yield name


def jumps_in(lines: Sequence[str]) -> int:
    """Return how often the date changes from one line of a log to the next."""
    dates = [line[:10] for line in lines if line[:2] == "20" and line[10:11] == " "]
    return sum(a != b for a, b in itertools.pairwise(dates))


def longest(times: Sequence[float]) -> float:
    return round(max(b - a for a, b in itertools.pairwise(times)), 2)
