# SPDX-License-Identifier: Apache-2.0
"""Trainers that are started as a user starts them, and the files they leave behind."""

import contextlib
import math
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar

import psutil

from core.running.supervise import from_child, start_thread
from tools.nemesis import FOLDER
from tools.nemesis.result import REPOSITORY
from tools.runs import num_rows

DEADLINE_S = 60.0  # Limit of each wait.
POLL_S = 0.002
LAST_LINES_S = 0.5  # For the output of a program that has ended.
QUIET_S = 2.0  # Many ticks of a main loop. With FLAGS, each tick saves.
MODULES = ("monobeast", "polybeast")
ENDLESS = "1000000000"
MARK = "TORCHBEAST_NEMESIS"  # In the environment of each process of a program.
# Each tick of the main loop saves. Rollouts are small, so there are many.
FLAGS = ["--env", "Catch", "--total_steps", ENDLESS, "--checkpoint_interval_s", "0"]
FLAGS += ["--unroll_length", "5", "--batch_size", "4", "--log_interval_s", "0"]
SIZES = {
    "monobeast": ["--num_actors", "2", "--envs_per_actor", "2"],
    "polybeast": ["--num_servers", "2", "--envs_per_stream", "2"],
}
# The log line just before the program starts its actors or connects to its servers.
CONNECTING = {"monobeast": "Preflight: cores", "polybeast": "Preflight: memory"}

P = TypeVar("P", bound="Process")


class Process:
    """A running `python -m MODULE` and its output. Kills its family at the end."""

    def __init__(
        self,
        module: str,
        folder: Path,
        *argv: str,
        prefix: Sequence[str] = (),
        variables: Mapping[str, str] = {},
    ):
        """Start it.

        Args:
          folder: for its temporary files.
          prefix: the words of a command that executes the program.
          variables: environment variables, besides those of this process.
        """
        self.module, self.folder = module, folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.lines: list[tuple[float, str]] = []  # When each came, and the line.
        self.pids: dict[str, int] = {}  # "server-3": its present process.
        self.replaced = 0  # Processes that others took the place of.
        self.ended_at = math.inf  # When `wait` has seen its end.
        self._mark = f"{MARK}={secrets.token_hex(8)}"
        own = {"TMPDIR": str(self.temporary), FOLDER: str(folder)}
        mark = dict([self._mark.split("=")])
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *argv],
            cwd=REPOSITORY,
            env={**os.environ, **variables, **own, **mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for this program.
        )
        self.pid = self.process.pid
        self._reader = start_thread("output", self._read)

    def __enter__(self: P) -> P:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self.process:  # Closes its pipes.
            self.process.kill()
            self.process.wait()
            wait_for(self._kill_family)
            self._reader.result(DEADLINE_S)

    def _kill_family(self) -> bool:
        pids = self.family()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        return not pids

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            _, text, _ = from_child(line)  # A program may write for a parent.
            for part in (text or " ").splitlines():
                self.lines.append((time.monotonic(), part))
            if match := re.search(r"(\S+-\d+) is process (\d+)", line):
                self.replaced += match[1] in self.pids
                self.pids[match[1]] = int(match[2])

    def text(self) -> str:
        return "\n".join(line for _, line in list(self.lines))

    def find(self, pattern: str) -> list[re.Match[str]]:
        """Return the matches in all lines so far."""
        found = (re.search(pattern, line) for _, line in list(self.lines))
        return [match for match in found if match is not None]

    def is_running(self) -> bool:
        return self.process.poll() is None

    def check(self) -> None:
        """Raise RuntimeError if the program has ended."""
        if not self.is_running():
            raise RuntimeError(f"ended: {self.process.args}\n{self.text()}")

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until it is true.

        Raises:
          RuntimeError: the program ended first, or this took too long; the message has
            the program's output.
        """
        if not came_true(condition, self.is_running):
            raise RuntimeError(f"{condition} is not true of:\n{self.text()}")

    def wait(self) -> int:
        """Wait for the program's end; set `ended_at` and return the exit status.

        Also wait for the end of its output, for LAST_LINES_S at most: processes that it
        has left behind keep the output open.
        """
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: not self.is_running())
        if self.is_running():
            raise RuntimeError(f"did not end:\n{self.text()}")
        self.ended_at = time.monotonic()
        futures.wait([self._reader], LAST_LINES_S)
        return self.process.returncode

    def family(self) -> list[int]:
        """Return the live processes that it started, and all that these started.

        All have inherited the mark in its environment, whatever parent they have now.
        """
        found = []
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):  # It has ended meanwhile.
                if entry.name.isdecimal() and self._mark.encode() in Path(
                    entry.path, "environ"
                ).read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


class Program(Process):
    """A trainer, which trains run x in a folder."""

    def __init__(self, module: str, folder: Path, *flags: str, **options: Any):
        self.run_dir = folder / "runs" / "x"
        self.checkpoints = self.run_dir / "checkpoints"
        self.worker = {"polybeast": "server", "monobeast": "actor"}.get(module, "")
        where = ("--savedir", str(folder / "runs"), "--xpid", "x")
        super().__init__(module, folder, *where, *flags, **options)

    def kill(self, worker: int) -> None:
        """Kill a server or actor that plays `environments.Catch`."""
        os.kill(self.pids[f"{self.worker}-{worker}"], signal.SIGKILL)

    def processes(self) -> dict[str, int]:
        """Return the process of each part of a run of `train`, by name."""
        workers = {n: p for n, p in self.pids.items() if n.startswith(self.worker)}
        found = {"learner": self.pid, **workers}
        for child in psutil.Process(self.pid).children():
            if "polybeast_env" in child.cmdline():
                found["supervisor"] = child.pid
        return found

    def wait_until_saves_fail(self, condition: Callable[[], object]) -> None:
        """Wait until it is true and no checkpoint has come for QUIET_S.

        (The log does not show each failure: a repeated warning is only counted.)
        """
        newest, since = self.newest(), time.monotonic()

        def is_quiet() -> bool:
            nonlocal newest, since
            if not condition() or self.newest() != newest:
                newest, since = self.newest(), time.monotonic()
            return time.monotonic() - since > QUIET_S

        self.wait_for(is_quiet)

    def failed_saves(self) -> int:
        """Return how many saves failed, according to the last lines of a run."""
        found = re.search(r"(\d+) x [^;]*Training goes on", self.text())
        return int(found[1]) if found else 0

    def rows(self) -> int:
        """Return the number of rows in the log."""
        return num_rows(self.run_dir)

    def is_saving(self) -> bool:
        return is_saving(self.pid, self.checkpoints)

    def newest(self) -> str:
        """Return the name of the newest checkpoint, good or not."""
        return max((p.name for p in self.checkpoints.glob("step-*")), default="")

    def leftovers(self) -> list[str]:
        """Return the processes and files that should not be there after the end.

        The cache of torch's compiler does not count: all programs leave it and use it.
        """
        processes = [f"process {pid} {_command(pid)}" for pid in self.family()]
        files = [
            path
            for path in _everything_in(self.temporary)
            if not path.relative_to(self.temporary).parts[0].startswith("torchinductor")
        ]
        files += [p for p in _everything_in(self.run_dir.parent) if ".tmp-" in p.name]
        return processes + [str(p.relative_to(self.temporary.parent)) for p in files]


def is_saving(pid: int, checkpoints: Path) -> bool:
    """Return whether a process is writing a checkpoint in this folder."""
    with contextlib.suppress(OSError):  # It is closed meanwhile, or the process ends.
        for fd in os.scandir(f"/proc/{pid}/fd"):
            path = Path(os.readlink(fd.path))
            if path.parent == checkpoints and not path.name.startswith("step-"):
                return True
    return False


def _everything_in(folder: Path) -> list[Path]:
    # Unlike rglob, this may meet folders that are being removed.
    return [
        Path(parent, name)
        for parent, folders, files in os.walk(folder)
        for name in [*folders, *files]
    ]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


# Kinds of moments in a program's life.
MOMENTS = ("start-up", "connect", "save", "train")


def await_moment(
    program: Program, kind: str, rng: random.Random, *, start_s: float
) -> None:
    """Return at a random moment of a kind; `start_s` is the time of a start-up."""
    rows = program.rows()
    begins, lasts_s = {
        "start-up": (lambda: True, start_s),
        "connect": (lambda: CONNECTING[program.module] in program.text(), 0.5),
        "save": (program.is_saving, 0.01),
        "train": (lambda: program.rows() not in (0, rows), 1.0),
    }[kind]
    program.wait_for(begins)
    time.sleep(rng.uniform(0, lasts_s))


def measure_start(module: str) -> float:
    """Return the seconds from a program's start to its first row of the log."""
    began = time.monotonic()
    with workplace() as folder, Program(module, folder, *SIZES[module], *FLAGS) as it:
        it.wait_for(lambda: it.rows() > 0)
    return time.monotonic() - began


@contextlib.contextmanager
def train(trainer: str, *flags: str, **options: Any) -> Iterator[Program]:
    """Yield a trainer that has learned something, on `environments.Catch`."""
    env = ["--env", "tools.nemesis.environments:make_catch", "--log_interval_s", "1"]
    flags = (*env, "--total_steps", ENDLESS, *flags)
    with workplace() as folder, Program(trainer, folder, *flags, **options) as program:
        program.wait_for(lambda: program.rows() > 2)
        yield program


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """Yield a folder with a short name: a unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        yield Path(folder)


def wait_for(
    condition: Callable[[], object],
    limit_s: float = DEADLINE_S,
    *,
    poll_s: float = POLL_S,
) -> float:
    """Poll until it is true; return the seconds that took.

    Args:
      poll_s: time between two looks. Longer where a look takes a core for long.

    Raises:
      TimeoutError: it took more than `limit_s`.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"not true within {limit_s:g} s: {condition}")
        time.sleep(poll_s)
    return time.monotonic() - began


def came_true(condition: Callable[[], object], is_running: Callable[[], bool]) -> bool:
    """Poll until it is true or the program has ended; say whether it was true."""
    held = False  # The condition may be true for a moment only.

    def is_decided() -> bool:
        nonlocal held
        held = bool(condition())
        return held or not is_running()

    with contextlib.suppress(TimeoutError):
        wait_for(is_decided)
    return held or bool(condition())


def differences(checkpoints: Path, others: Path) -> list[str]:
    """Return the parts that differ in the newest checkpoints of two folders."""
    from core.running import checkpoint  # It needs torch, and many programs do not.

    a, b = checkpoint.load(checkpoints), checkpoint.load(others)
    assert a is not None and b is not None, "no checkpoint"
    assert a.tensors.keys() == b.tensors.keys() and a.state.keys() == b.state.keys()
    different = []
    for group, tensors in a.tensors.items():
        assert tensors.keys() == b.tensors[group].keys()
        for name, tensor in tensors.items():
            if tensor.numpy().tobytes() != b.tensors[group][name].numpy().tobytes():
                different.append(f"{group}/{name}")
    for key in a.state.keys() - {"time_s", "flags"}:  # These may differ.
        if a.state[key] != b.state[key]:
            different.append(key)
    return different
