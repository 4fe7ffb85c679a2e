# SPDX-License-Identifier: Apache-2.0
"""Run a set of training runs on this machine: a grid of flags and seeds.

    python -m tools.sweep sweep.toml

An example of sweep.toml:

    program = "polybeast"        # or monobeast, or a module of yours
    savedir = "runs/minatar"
    cores = 1                    # for each run; as many runs at a time as fit
    gpus = 0                     # for each run; with 0 a run sees no GPU

    [flags]                      # for every run. true gives --flag; false gives
    total_steps = 5_000_000      #   --no-flag or no flag; a list is joined by commas
    [flags.polybeast]            # for the runs of one program
    num_servers = 1

    [grid]                       # every combination is a run; `program` may be here
    env = ["MinAtar/Breakout-v1", "MinAtar/Freeway-v1"]
    seed = [1, 2, 3]

A run is a folder in savedir, named after its values in the grid. Besides the files of
the program it has sweep.log (the program's output) and sweep.json (its command and exit
status). summary.csv in savedir has a row for each run and is updated while they run.

Ctrl-C or SIGTERM stops all runs, each with a checkpoint; a second signal ends them at
once. The same command then continues: it skips finished runs, resumes interrupted runs
and starts failed runs again. If the sweep itself is killed, its runs stop with a
checkpoint (Linux only).

Exit status: 0 all runs are finished; 2 sweep.toml is wrong; 69 savedir is in use; 70 a
run failed; 75 runs were stopped and can be continued; 78 savedir has runs with other
flags, or cannot be written to.
"""

import argparse
import contextlib
import csv
import dataclasses
import datetime
import fcntl
import functools
import importlib.util
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from core import flag_types
from core.errors import Exit
from core.running import common_flags, terminal
from core.running.log_setup import is_terminal
from core.running.machine import num_cores
from core.running.signals import StopSignal
from core.running.supervise import describe_exit, send_at_parents_end

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TICK_S = 0.5  # Interval at which the screen and summary.csv are updated.
PLAIN_LINE_S = 60.0  # Interval of progress lines if there is no terminal.
TAIL_BYTES = 8192  # More than a row of logs.csv or a line of output has.


class SweepError(Exception):
    """The sweep cannot be run as it is; the message says what to change."""

    def __init__(self, message: str, status: Exit = Exit.USAGE):
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(eq=False)
class Run:
    """A run: its point in the grid, and its progress."""

    name: str
    point: dict[str, Any]  # Its values in the grid.
    program: str
    flags: list[str]  # As words of a command line.
    folder: Path
    total_steps: int | None
    state: str = "queued"  # running, stopping, finished, interrupted, failed, in use
    error: str = ""  # Why it failed, or who uses it.
    row: dict[str, str] = dataclasses.field(default_factory=dict)  # Last of logs.csv.
    cores: list[int] = dataclasses.field(default_factory=list)
    gpus: list[str] = dataclasses.field(default_factory=list)
    process: subprocess.Popen = dataclasses.field(init=False, repr=False)

    def number(self, column: str) -> float | None:
        """Return a number from the last row of its log; None if there is none."""
        return float(text) if (text := self.row.get(column)) else None


# ------------------------------------------------------------------------ sweep.toml


@dataclasses.dataclass
class Sweep:
    """What sweep.toml asks for."""

    savedir: Path
    cores: int  # Of each run.
    gpus: int
    runs: list[Run]


KEYS = ("program", "savedir", "cores", "gpus", "flags", "grid")
OURS = {"xpid", "savedir", "mode"}  # Flags that the sweep sets.


def read_sweep(path: Path) -> Sweep:
    """Read sweep.toml.

    Raises:
      SweepError: it cannot be read, or does not say what a sweep needs.
    """
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SweepError(str(error)) from error
    for key in config.keys() - set(KEYS):
        raise SweepError(f"unknown key {key!r}; known are {', '.join(KEYS)}")

    def get(key: str, kind: type, default: Any = None) -> Any:
        value = config.get(key, default)
        if type(value) is not kind:
            name = {int: "a whole number", str: "a text", dict: "a table"}[kind]
            raise SweepError(f"{key}: expected {name}, got {value!r}")
        return value

    cores, gpus = get("cores", int, 1), get("gpus", int, 0)
    if cores < 1 or gpus < 0:
        raise SweepError(f"expected cores >= 1 and gpus >= 0, got {cores} and {gpus}")
    grid, flags = get("grid", dict, {}), get("flags", dict, {})
    if not grid:
        raise SweepError("[grid] is empty; for a single run write seed = [1]")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise SweepError(f"grid.{key}: expected a list of values, got {values!r}")
    if "program" in grid and "program" in config:
        raise SweepError("program: given twice, above and in [grid]")
    programs = grid.get("program") or [get("program", str)]
    for program in programs:
        if not is_module(program):
            raise SweepError(f"program: there is no module {program!r} here")
    for key, value in flags.items():
        if isinstance(value, dict) and key not in programs:
            raise SweepError(f"[flags.{key}]: no run has the program {key!r}")
    # The seed comes last in the name: tools.plot expects it there.
    keys = sorted(grid, key="seed".__eq__)
    savedir = Path(get("savedir", str)).expanduser()
    runs = []
    for values in itertools.product(*(grid[key] for key in keys)):
        point = dict(zip(keys, values, strict=True))
        program = point.get("program", programs[0])
        own = {k: v for k, v in flags.items() if not isinstance(v, dict)}
        own |= flags.get(program, {})
        for key in own.keys() & point.keys():
            raise SweepError(f"{key}: given twice, in [flags] and in [grid]")
        own |= {key: value for key, value in point.items() if key != "program"}
        for key in own.keys() & OURS:
            raise SweepError(f"{key}: the sweep sets this flag itself")
        words = [
            word for key, value in own.items() for word in to_words(program, key, value)
        ]
        name = run_name(point)
        steps = None
        with contextlib.suppress(argparse.ArgumentTypeError):  # The program reports it.
            steps = flag_types.int_at_least(1)(str(own.get("total_steps")))
        runs.append(Run(name, point, program, words, savedir / name, steps))
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1 or name.strip(".") in ("", "latest"):
            raise SweepError(f"grid: {name!r} cannot be the name of one run")
        limit = common_flags.MAX_NAME_NBYTES
        if (nbytes := len(name.encode())) > limit:
            raise SweepError(
                f"grid: {name!r:.80} is the name of a run; expected at most {limit} "
                f"bytes, got {nbytes}. Use fewer or shorter values."
            )
    return Sweep(savedir, cores, gpus, runs)


def is_module(name: Any) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):  # Of "", 1 or a missing package.
        return False


def run_name(point: dict[str, Any]) -> str:
    """Return a folder name, such as MinAtar-Breakout-v1-learning_rate=0.001-1."""
    parts = [
        str(value) if isinstance(value, str) or key == "seed" else f"{key}={value}"
        for key, value in point.items()
    ]
    return re.sub(r"[^\w.=+-]", "-", "-".join(parts))


def to_words(program: str, key: str, value: Any) -> list[str]:
    """Return a flag as words of a command line of `program`."""
    match value:
        case True:
            return [f"--{key}"]
        case False:  # Most flags are off unless given; a few have an opposite.
            name, text = re.escape(key), help_of(program)
            if re.search(rf"--{name}(?![\w-])", text) is None:
                raise SweepError(f"{key}: {program} has no flag --{key}")
            # As argparse writes both: "--shaping, --no-shaping".
            has_opposite = re.search(rf"--{name}, --no-{name}(?![\w-])", text)
            return [f"--no-{key}"] if has_opposite else []
        case list():
            return [f"--{key}={','.join(map(str, value))}"]
        case str() | int() | float():
            return [f"--{key}={value}"]
    raise SweepError(f"{key}: cannot make a flag of {value!r}")


@functools.cache
def help_of(program: str) -> str:
    """Return the text of `program --help`, which has the flags of a fork too."""
    command = [sys.executable, "-m", program, "--help"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise SweepError(f"{' '.join(command[1:])} ended with {done.returncode}")
    return done.stdout.decode(errors="replace")


# --------------------------------------------------------------------------- one run


def recall(run: Run) -> None:
    """Read how far a run got in earlier sweeps.

    Raises:
      SweepError: it was trained with another program or other flags.
    """
    run.row = last_row(run.folder / "logs.csv")
    try:
        record = json.loads((run.folder / "sweep.json").read_text())
        old, status = {record["program"], *record["flags"]}, record["status"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    new = {run.program, *run.flags}
    if old == new:
        run.state = "finished" if status == Exit.DONE else "queued"
    elif run.row:
        few = "fewer flags"
        raise SweepError(
            f"{run.folder} was trained with {' '.join(sorted(old - new)) or few}, "
            f"and the sweep now has {' '.join(sorted(new - old)) or few}. Put that "
            "back, choose another savedir, or remove the folder.",
            Exit.CONFIG,
        )


def start(run: Run, cores: list[int], gpus: list[str]) -> None:
    """Start a run on these cores and GPUs; it goes on from its checkpoint."""
    run.cores, run.gpus, run.state, run.error = cores, gpus, "running", ""
    run.folder.mkdir(exist_ok=True)
    save_record(run, None)
    place = [f"--xpid={run.name}", f"--savedir={run.folder.parent}"]
    with open(run.folder / "sweep.log", "ab") as log:
        run.process = subprocess.Popen(
            [sys.executable, "-m", run.program, *place, *run.flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
            start_new_session=True,  # Ctrl-C in the terminal is for the sweep alone.
            preexec_fn=in_child(cores),
        )


def in_child(cores: list[int]) -> Callable[[], None] | None:
    """Return what a child process calls before it becomes a trainer (Linux only).

    It keeps the child on its cores. It also makes the kernel send SIGTERM to the child
    when the sweep's only thread ends, even after kill -9.
    """
    if sys.platform != "linux":
        return None
    parent = os.getpid()

    def prepare() -> None:
        with contextlib.suppress(OSError):  # The container may have lost the cores.
            os.sched_setaffinity(0, cores)  # Processes of the trainer inherit it.
        send_at_parents_end(signal.SIGTERM)
        if os.getppid() != parent:  # The sweep has just ended.
            os._exit(Exit.STOPPED)

    return prepare


def note_end(run: Run, status: int) -> None:
    """Record how a run's process ended."""
    killed_before_it_could_listen = (
        run.state == "stopping" and status == -signal.SIGTERM
    )
    run.row = last_row(run.folder / "logs.csv")
    save_record(run, status)
    if status == Exit.DONE:
        run.state = "finished"
    elif status == Exit.STOPPED or killed_before_it_could_listen:
        run.state = "interrupted"
    else:
        run.state = "failed"
        lines = tail(run.folder / "sweep.log").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        run.error = f"{describe_exit(status)}: {last}"


def save_record(run: Run, status: int | None) -> None:
    record = {
        "program": run.program,
        "flags": run.flags,
        "cores": run.cores,
        "gpus": run.gpus,
        "status": status,  # None while it runs; negative: minus the signal.
    }
    write_whole(run.folder / "sweep.json", json.dumps(record, indent=2) + "\n")


def try_lock(file: TextIO) -> str:
    """Lock a file as trainers do their folders; return who has it locked, or ""."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        return file.read() or "another process"
    except OSError:
        pass  # A file system without locks.
    return ""


def lock_savedir(savedir: Path, path: Path) -> TextIO:
    """Make savedir, and lock it until the returned file is closed.

    Raises:
      SweepError: it is in use, or cannot be written to.
    """
    try:
        savedir.mkdir(parents=True, exist_ok=True)
        lock = open(savedir / ".lock", "a+")
        if user := try_lock(lock):
            raise SweepError(f"{savedir} is in use by {user}", Exit.BUSY)
        lock.truncate(0)
        name = f"sweep {path}, process {os.getpid()} on {socket.gethostname()}"
        os.write(lock.fileno(), name.encode(errors="replace"))
    except OSError as error:
        raise SweepError(f"savedir: {error}", Exit.CONFIG) from error
    return lock


def user_of(run: Run) -> str:
    """Return the name of the process that trains in the run's folder, or ""."""
    try:
        with open(run.folder / ".lock", "r+") as file:  # Closing it unlocks it.
            return try_lock(file)
    except FileNotFoundError:
        return ""


def last_row(path: Path) -> dict[str, str]:
    """Return the last whole row of a logs.csv, {} before the first."""
    lines = tail(path).split("\n")[:-1]  # After the last \n there may be half a row.
    # Without the header, and without zero bytes after a power failure.
    lines = [line for line in lines if line.partition(",")[0].isdecimal()]
    if not lines:
        return {}
    with open(path, encoding="utf-8") as file:
        header = file.readline().rstrip("\n").split(",")
    return dict(zip(header, lines[-1].split(","), strict=False))


def tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""


def write_whole(path: Path, text: str) -> None:
    """Replace a whole file. If the disk is full, warn: the runs go on."""
    try:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        warn_once(f"Cannot write {path}: {error}")


@functools.cache
def warn_once(text: str) -> None:
    print(text, file=sys.stderr)


# ---------------------------------------------------------------------- what is shown


def summarize(runs: Sequence[Run]) -> str:
    """Return summary.csv: a row for each run."""
    text = io.StringIO()
    rows = [summary(run) for run in runs]
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def summary(run: Run) -> dict[str, Any]:
    step, seconds = run.number("step"), run.number("time_s")
    return {
        "name": run.name,
        **run.point,
        "state": run.state,
        "step": run.row.get("step", ""),
        "frames": run.row.get("frames", ""),
        "hours": f"{seconds / 3600:.4f}" if seconds else "",
        "steps_per_s": f"{step / seconds:.1f}" if step and seconds else "",
        "mean_return": run.row.get("mean_episode_return", ""),  # Last 100 games.
        "best_mean_return": run.row.get("best_mean_return", ""),
        "error": run.error,
    }


def cells(run: Run) -> list[str]:
    """Return the cells of a run in the table, for the progress lines too."""

    def text(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    step, rate = run.number("step"), run.number("sps")
    eta = "-"
    if run.state == "running" and step and rate and run.total_steps:
        left_s = max(0, run.total_steps - step) / rate
        eta = str(datetime.timedelta(seconds=round(left_s)))
    return [
        run.name,
        run.state,
        f"{text(step, ',.0f')} / {text(run.total_steps, ',')}",
        text(rate, ",.0f"),
        text(run.number("mean_episode_return"), ".2f"),
        eta,
    ]


class View:
    """Shows the runs: a live table in a terminal, else a line for each change.

    Starts no thread: the runs end when the thread that started them ends.
    """

    COLUMNS = ("run", "state", "step", "steps/s", "return(100)", "ETA")
    ORDER = ("running", "stopping", "in use", "failed", "interrupted", "queued")

    def __init__(self, runs: Sequence[Run]):
        self._runs = runs
        self._states = {run.name: "queued" for run in runs}  # The states shown last.
        self._lines_at = time.monotonic()
        self._console = Console()
        self._in_terminal = is_terminal(self._console)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> "View":
        if self._in_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()
        if self._in_terminal:
            self._console.print(self._table())

    def show(self) -> None:
        for run in self._runs:
            if run.state != self._states[run.name]:
                self._states[run.name] = run.state
                self._say(run)
        if self._in_terminal:
            self._live.update(self._table(), refresh=True)
        elif time.monotonic() - self._lines_at > PLAIN_LINE_S:
            self._lines_at = time.monotonic()
            for run in self._runs:
                if run.state in ("running", "in use"):
                    self._say(run)

    def _say(self, run: Run) -> None:
        name, state, step, rate, mean, eta = cells(run)
        line = f"{time.strftime('%H:%M:%S')} {name}: {state}, step {step}"
        line += f", {rate} steps/s, return {mean}, ETA {eta}" if run.row else ""
        line += f" ({run.error})" if run.error else ""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(*self.COLUMNS)
        for column in table.columns[2:]:
            column.justify = "right"
        # The most important runs first, because rich cuts a table that is too long.
        order = {state: i for i, state in enumerate(self.ORDER)}
        for run in sorted(self._runs, key=lambda run: order.get(run.state, len(order))):
            table.add_row(*cells(run))
        return table


# ------------------------------------------------------------------------ the sweep


def run_all(sweep: Sweep) -> bool:
    """Do all runs that are not finished; return whether a signal stopped the sweep."""
    free_cores = usable_cores()
    free_gpus = visible_gpus() if sweep.gpus else []
    for what, wanted, have in (
        ("cores", sweep.cores, len(free_cores)),
        ("gpus", sweep.gpus, len(free_gpus)),
    ):
        if wanted > have:
            raise SweepError(f"{what}: each run is to have {wanted}, there are {have}")
    queue = [run for run in sweep.runs if run.state == "queued"]
    running: list[Run] = []
    with StopSignal() as stop, View(sweep.runs) as view:
        try:
            while queue or running:
                if stop.received is not None:
                    queue.clear()
                    tell_to_stop(running)
                for run in list(running):
                    run.row = last_row(run.folder / "logs.csv")
                    if (status := run.process.poll()) is not None:
                        running.remove(run)
                        free_cores = sorted(free_cores + run.cores)
                        free_gpus = sorted(free_gpus + run.gpus)
                        note_end(run, status)
                for run in list(queue):
                    if len(free_cores) < sweep.cores or len(free_gpus) < sweep.gpus:
                        break
                    try:
                        # Perhaps a run that still stops, since its sweep was killed.
                        if user := user_of(run):
                            run.state, run.error = "in use", f"by {user}"
                            continue
                        start(run, free_cores[: sweep.cores], free_gpus[: sweep.gpus])
                    except OSError as error:  # Such as a full disk: the others go on.
                        run.state, run.error = "failed", str(error)
                        queue.remove(run)
                        continue
                    del free_cores[: sweep.cores], free_gpus[: sweep.gpus]
                    queue.remove(run)
                    running.append(run)
                view.show()
                write_whole(sweep.savedir / "summary.csv", summarize(sweep.runs))
                if running:  # Wait for a tick, or until this run ends.
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        running[0].process.wait(TICK_S)
                elif queue:
                    time.sleep(TICK_S)  # The folders of all other runs are in use.
        finally:  # After an error above, runs may still be running.
            tell_to_stop(running)
            for run in running:
                note_end(run, run.process.wait())
            write_whole(sweep.savedir / "summary.csv", summarize(sweep.runs))
    return stop.received is not None


def tell_to_stop(runs: Sequence[Run]) -> None:
    """Make runs write a checkpoint and end. A second signal would end them at once."""
    for run in runs:
        if run.state == "running":
            run.state = "stopping"
            run.process.terminate()


def usable_cores() -> list[int]:
    """Return the cores that this process and its container may use."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(num_cores()))
    return sorted(os.sched_getaffinity(0))[: num_cores()]


def visible_gpus() -> list[str]:
    """Return the names of the GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    code = "import torch; print(torch.cuda.device_count())"
    count = int(subprocess.check_output([sys.executable, "-c", code]))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return listed.split(",")[:count]


@terminal.never_waiting()  # A terminal or `tee` that has gone must not end runs.
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="what to run: a TOML file, see above")
    path = parser.parse_args(argv).file
    try:
        sweep = read_sweep(path)
        with lock_savedir(sweep.savedir, path):
            for run in sweep.runs:
                recall(run)
            stopped = run_all(sweep)
    except SweepError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return int(error.status)
    states = [run.state for run in sweep.runs]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    print(f"{', '.join(counts)}. Summary: {sweep.savedir / 'summary.csv'}")
    if states.count("finished") == len(states):
        return int(Exit.DONE)
    if stopped or "failed" not in states:
        print("The same command goes on from there.")
        return int(Exit.STOPPED)
    return int(Exit.INTERNAL)


if __name__ == "__main__":
    sys.exit(main())
