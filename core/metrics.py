# SPDX-License-Identifier: Apache-2.0
"""What a run writes and shows: logs.csv, TensorBoard, out.log, meta.json, a live line.

    <savedir>/latest -> <xpid>
    <savedir>/<xpid>/
        meta.json      flags, commit, versions, host; one entry for each start
        logs.csv       one row per --log_interval_s; the columns are FIELDS, below
        fields.csv     the glossary: name, unit and meaning of each column
        out.log        what the terminal showed
        tensorboard/   the rows of logs.csv again, as events
        .lock          held by the process that trains

A disk that is full, away, or hangs never stops training: what could not be written
waits in memory, is written with a later row, and is warned about once. A run that
resumes drops the rows that are newer than its checkpoint, so that no step is there
twice.
"""

import collections
import contextlib
import csv
import datetime
import fcntl
import hashlib
import importlib.metadata
import io
import json
import logging
import math
import numbers
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

from core.supervise import ConfigError, Repeats

log = logging.getLogger(__name__)


# ----------------------------------------------------------------------- the columns


class Field(NamedTuple):
    """A column of logs.csv."""

    name: str
    unit: str
    meaning: str


# The columns of logs.csv in order, and the glossary. "Since the last row" means over
# all updates between two rows.
FIELDS = (
    Field(
        "step",
        "agent steps",
        "transitions learned from so far, over all environments. The row that follows "
        "a truncated one is a reset and no step",
    ),
    Field("frames", "frames", "emulator frames behind them; Atari: 4 per step"),
    Field("time_s", "s", "training time so far, without the pauses between resumes"),
    Field("sps", "agent steps/s", "steps per second since the last row"),
    Field(
        "mean_episode_return",
        "reward",
        "mean unclipped return of the last 100 finished full games; blank before the "
        "first",
    ),
    Field("mean_episode_step", "agent steps", "mean length of the same games"),
    Field("games", "count", "full games finished so far"),
    Field(
        "best_mean_return",
        "reward",
        "highest mean_episode_return so far; blank before 100 games",
    ),
    Field(
        "mean_life_return",
        "reward",
        "mean unclipped return of the last 100 episodes as the learner sees them: one "
        "life each where a lost life ends the episode",
    ),
    Field(
        "total_loss",
        "1",
        "pg_loss + baseline_loss + entropy_loss. Like its parts a sum over T and B, "
        "and the mean of the updates since the last row",
    ),
    Field("pg_loss", "1", "policy gradient loss"),
    Field(
        "baseline_loss",
        "1",
        "half the squared error to the V-trace targets, times --baseline_cost",
    ),
    Field(
        "entropy_loss",
        "1",
        "minus the entropy, times --entropy_cost: higher means more decided",
    ),
    Field(
        "entropy",
        "nats per step",
        "mean entropy of the policy; ln(number of actions) if it is uniform",
    ),
    Field(
        "mean_rho",
        "1",
        "mean clipped importance weight of V-trace; 1 if the actors' policy is the "
        "learner's, lower the more they differ",
    ),
    Field("grad_norm", "1", "global gradient norm before clipping, mean"),
    Field("learning_rate", "1", "of the latest update"),
    Field("updates", "count", "optimizer steps so far"),
    Field(
        "skipped_updates",
        "count",
        "updates left out so far because loss or gradient was not finite",
    ),
    Field(
        "policy_lag_mean",
        "updates",
        "optimizer steps between acting and learning, mean since the last row",
    ),
    Field("policy_lag_max", "updates", "the same, largest since the last row"),
    Field(
        "stale_rollouts",
        "count",
        "rollouts left out so far because of --max_policy_lag; never learned from",
    ),
    Field("buffers_full", "count", "rollouts waiting for the learner"),
    Field("learner_busy", "share of time", "that an update is at work"),
    Field(
        "inference_busy",
        "share of time",
        "that actions are being chosen: by PolyBeast's inference threads, or by "
        "MonoBeast's actors, which step environments the rest of the time",
    ),
    Field(
        "env_busy",
        "share of time",
        "that environments step: until a PolyBeast server has answered, or in "
        "MonoBeast's actors",
    ),
    Field(
        "gpu_utilization",
        "share of time",
        "that the learner's GPU computes; blank without one, or without nvidia-ml-py",
    ),
    Field("actor_restarts", "count", "actors started again after a death, since start"),
    Field(
        "rollouts_discarded",
        "count",
        "unfinished rollouts of dead actors, never learned from, since start",
    ),
    Field(
        "streams", "count", "PolyBeast: connected streams to environment servers, now"
    ),
    Field("reconnects", "count", "streams that came back after a loss, since start"),
    Field(
        "steps_discarded",
        "rows",
        "rows of rollouts that a loss cut short, never learned from, since start",
    ),
    Field("learner_queue", "count", "rollouts waiting for the learner"),
    Field(
        "inference_batch",
        "environments",
        "mean size of an inference batch since start",
    ),
    Field(
        "env_step_p50_ms",
        "ms",
        "median time from sending actions to receiving the next observations, since "
        "start; of the median server",
    ),
    Field("env_step_p99_ms", "ms", "the 99th percentile; of the slowest server"),
    Field("rss_mb", "MB", "resident memory of the main process"),
)


def info_field(key: str) -> Field:
    """Return the column for one of --info_keys."""
    return Field(
        f"info_{key}", "-", f"info[{key!r}] of the environment, mean since the last row"
    )


def rss_mb() -> float:
    """Return the resident memory of this process in MB."""
    return psutil.Process().memory_info().rss / 1e6


# -------------------------------------------------------------------------- counting


class Averages:
    """Means and maxima of what happens between two log rows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Both guarded by the lock. A name stays when its values have been taken.
        self._sums: dict[Any, tuple[float, int]] = {}
        self._maxima: dict[str, float | None] = {}

    def add(self, values: Mapping[Any, Any] = {}, /, **named: Any) -> None:
        """Count one value for each name or `Field`; None and NaN are no values."""
        with self._lock:
            for name, value in {**values, **named}.items():
                total, count = self._sums.get(name, (0.0, 0))
                if (number := _number(value)) is not None:
                    total, count = total + number, count + 1
                self._sums[name] = total, count

    def add_max(self, **values: Any) -> None:
        """Like `add`, but `pop` will return the largest value."""
        with self._lock:
            for name, value in values.items():
                number, largest = _number(value), self._maxima.get(name)
                if largest is None or (number is not None and number > largest):
                    self._maxima[name] = number

    def pop(self) -> dict[Any, float | None]:
        """Return the means and maxima since the last call, None where no value came."""
        with self._lock:
            row: dict[Any, float | None] = {
                name: total / count if count else None
                for name, (total, count) in self._sums.items()
            }
            row |= self._maxima
            self._sums = dict.fromkeys(self._sums, (0.0, 0))
            self._maxima = dict.fromkeys(self._maxima)
        return row


def _number(value: Any) -> float | None:
    """Return a number, also of numpy or torch, as a float; None for None and NaN."""
    if value is None or math.isnan(value := float(value)):
        return None
    return value


class BusyTime:
    """What share of the time each stage works, between two log rows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Both guarded by the lock.
        self._seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def add(self, stage: str, seconds: float, *, workers: int = 1) -> None:
        """Count time that one of a stage's workers has worked."""
        with self._lock:
            self._seconds[stage] = self._seconds.get(stage, 0) + seconds / workers

    @contextlib.contextmanager
    def measure(self, stage: str, *, workers: int = 1) -> Iterator[None]:
        """Count the time that the block takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(stage, time.monotonic() - began, workers=workers)

    def pop(self) -> dict[str, float]:
        """Return each stage's share of the time since the last call, at most 1."""
        with self._lock:
            now = time.monotonic()
            wall = max(now - self._since, 1e-9)
            shares = {k: min(1.0, s / wall) for k, s in self._seconds.items()}
            self._seconds = dict.fromkeys(self._seconds, 0.0)
            self._since = now
        return shares


class EpisodeStats:
    """Returns and lengths of the last `window` full games and episodes. Thread-safe."""

    def __init__(self, window: int = 100):
        self._lock = threading.Lock()
        # All guarded by the lock.
        self._returns: collections.deque[float] = collections.deque(maxlen=window)
        self._steps: collections.deque[int] = collections.deque(maxlen=window)
        self._life_returns: collections.deque[float] = collections.deque(maxlen=window)
        self._games = 0
        self._best: float | None = None

    def add_games(self, returns: Iterable[float], steps: Iterable[float]) -> None:
        """Count finished full games."""
        with self._lock:
            for game_return, game_steps in zip(returns, steps, strict=True):
                self._games += 1
                self._returns.append(float(game_return))
                self._steps.append(int(game_steps))
                if len(self._returns) == self._returns.maxlen:
                    mean = _mean(self._returns)
                    if self._best is None or mean > self._best:
                        self._best = mean

    def add_episodes(self, returns: Iterable[float]) -> None:
        """Count finished episodes as the learner sees them: maybe one life each."""
        with self._lock:
            self._life_returns.extend(float(r) for r in returns)

    @property
    def games(self) -> int:
        """Number of full games finished so far."""
        with self._lock:
            return self._games

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last full games; None before the first."""
        with self._lock:
            return _mean(self._returns) if self._returns else None

    @property
    def mean_step(self) -> float | None:
        """Mean length of the same games, in agent steps."""
        with self._lock:
            return _mean(self._steps) if self._steps else None

    @property
    def mean_life_return(self) -> float | None:
        """Mean return of the last episodes; None before the first."""
        with self._lock:
            return _mean(self._life_returns) if self._life_returns else None

    @property
    def best_mean_return(self) -> float | None:
        """Highest mean over a full window so far; None before the first one."""
        with self._lock:
            return self._best

    def state(self) -> dict[str, Any]:
        """Return everything, for JSON and `restore`."""
        with self._lock:
            return {
                "games": self._games,
                "best": self._best,
                "returns": list(self._returns),
                "steps": list(self._steps),
                "life_returns": list(self._life_returns),
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        window = self._returns.maxlen
        with self._lock:
            self._games = state["games"]
            self._best = state["best"]
            self._returns = collections.deque(state["returns"], window)
            self._steps = collections.deque(state["steps"], window)
            self._life_returns = collections.deque(state["life_returns"], window)


def _mean(values: Sequence[float] | collections.deque) -> float:
    return sum(values) / len(values)


# ----------------------------------------------------------------------------- files

# What waits for a disk that does not take it. A row is about 300 bytes, so this is
# days; then rows are lost, rather than the run.
MAX_WAITING_BYTES = 16 << 20
PATIENCE_S = 0.2  # For a disk to take a row; one that takes longer hangs.
CLOSE_S = 2.0  # For it to take what is left when the run ends.


class _LogFile:
    """Appends to a file; what the disk does not take waits in memory for later.

    After `start` a thread of its own writes, so that a disk that hangs (a network file
    system that is away, a pipe that nobody reads) holds nobody up but that. Not
    buffered: what the disk takes within PATIENCE_S is written when `write` returns, and
    survives the death of this process. Thread-safe.
    """

    def __init__(self, path: Path):
        self.path = path
        self._fd = self._open()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # What follows is guarded by it.
        self.error: OSError | None = None  # Of the latest write.
        self.lost = 0  # Writes for which there was no room in memory either.
        self._waiting = b""
        self._asked = self._answered = 0  # Writes, as running numbers.
        self._closing = False

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self.path, flags, 0o644)

    def is_gone(self) -> bool:
        """Say whether the file was deleted, or another one has its name."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return True
        except OSError:  # Closed; or the disk is away.
            return False

    def reopen(self) -> None:
        """Go on in a new file of that name."""
        fd = self._open()
        os.dup2(fd, self._fd, inheritable=False)  # The thread may be writing.
        os.close(fd)

    def start(self) -> None:
        """Write in a thread from now on; calling it again is fine."""
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(
                target=self._run, name=f"write {self.path.name}", daemon=True
            )
            self._thread.start()

    def write(self, data: bytes, patience_s: float = PATIENCE_S) -> None:
        with self._changed:
            if len(self._waiting) < MAX_WAITING_BYTES:
                self._waiting += data
            else:
                self.lost += 1
            if self._thread is None:
                self._waiting, self.error = self._try(self._waiting)
                return
            self._asked += 1
            number = self._asked
            self._changed.notify_all()
            if isinstance(self.error, TimeoutError):
                return  # It hangs already; whoever waited would wait for each row.
            if not self._changed.wait_for(lambda: self._answered >= number, patience_s):
                self.error = TimeoutError(f"no answer for {patience_s:g} s")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or self._asked > self._answered
                )
                if self._asked == self._answered:
                    return
                number = self._asked
                data, self._waiting = self._waiting, b""
            rest, error = self._try(data)
            with self._changed:
                self._waiting = rest + self._waiting
                self.error, self._answered = error, number
                self._changed.notify_all()

    def _try(self, data: bytes) -> tuple[bytes, OSError | None]:
        """Write; return what is left, and why."""
        try:
            while data:
                # May take a part only: the disk can fill up in the middle of a row.
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            return data, error
        return b"", None

    def close(self) -> None:
        if self._closing:
            return
        if isinstance(self.error, TimeoutError):
            self.error = None  # One last chance.
        self.write(b"", CLOSE_S)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if isinstance(self.error, TimeoutError):
            return  # The thread still has the file. It ends with this process.
        if self._thread is not None:
            self._thread.join()
        try:
            os.close(self._fd)
        except OSError as error:  # NFS may report a full disk only now.
            self.error = error


def _write_atomically(path: Path, text: str) -> None:
    """Replace a file so that at any moment the old or the new one is there, whole."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class RunLog:
    """Writes log rows to logs.csv, to TensorBoard and, if asked, to Weights & Biases.

    Files that were deleted since the last row are made anew, meta.json and the lock
    too. A context manager; one thread uses it. The threads that write, out.log's too,
    and W&B's start with the first row: by then the actors have been forked.

    Args:
      run_dir: the run's folder; it exists.
      info_keys: names of --info_keys, a column `info_<key>` each.
      resume_step: the checkpoint's step when resuming; newer rows and events are
        dropped. None for a run that starts at step 0; a logs.csv found there is kept
        as logs.<n>.csv.
      wandb: log to Weights & Biases too; the folder's name is the run's id.
      config: the flags, for Weights & Biases.

    Columns that a run has had stay when it resumes without them (another version, other
    info keys). What a row has under another name becomes a column by itself.

    Raises:
      ConfigError: wandb is asked for but not installed.
      OSError: the folder cannot be written to. Later on that is only a warning.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        info_keys: Sequence[str] = (),
        resume_step: int | None = None,
        wandb: bool = False,
        config: Mapping[str, Any] | None = None,
    ):
        distinct = len(set(info_keys)) == len(info_keys)
        if not distinct or re.search('[\n\r",]', "".join(info_keys)):
            raise ValueError(
                "info keys must differ and be free of commas, quotes and line breaks, "
                f"got {list(info_keys)}"
            )
        self.failed_writes = 0  # Rows that did not reach the disk at once.
        self._run_dir = run_dir
        self._warned = False
        self._wandb: ModuleType | None = _import_wandb() if wandb else None
        self._wandb_run: Any = None
        self._config = dict(config or {})

        fields = {field.name: field for field in (*FIELDS, *map(info_field, info_keys))}
        if resume_step is not None:
            fields = {**fields, **_read_glossary(run_dir), **fields}
        self._fields: dict[str, Field] = {}
        self._refused: set[str] = set()  # Columns that the disk has not taken.
        self._csv = self._open_csv(fields, resume_step)
        meta = run_dir / "meta.json"
        self._meta = meta.read_text(encoding="utf-8") if meta.exists() else None
        self._events = _EventFile(run_dir / "tensorboard", resume_step=resume_step)
        self._out_logs = [
            handler.file
            for handler in logging.getLogger().handlers
            if isinstance(handler, _FileHandler)
        ]

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._fields)

    @property
    def _files(self) -> tuple[_LogFile, _LogFile]:
        return self._csv, self._events.file

    def _open_csv(
        self, fields: Mapping[str, Field], resume_step: float | None
    ) -> _LogFile:
        """Write fields.csv and the header of logs.csv; open logs.csv."""
        self._write_header(fields, resume_step)
        file = _LogFile(self._run_dir / "logs.csv")
        self._fields = dict(fields)
        return file

    def _write_header(
        self, fields: Mapping[str, Field], resume_step: float | None
    ) -> None:
        glossary = io.StringIO()
        lines = [Field._fields, *fields.values()]
        csv.writer(glossary, lineterminator="\n").writerows(lines)
        _write_atomically(self._run_dir / "fields.csv", glossary.getvalue())
        _prepare_csv(self._run_dir / "logs.csv", tuple(fields), resume_step)

    def _replace_deleted(self, step: int) -> None:
        """Make anew what was deleted, for a run that is now at `step`.

        Raises:
          RunDirBusy: another run has taken the folder meanwhile.
        """
        meta, lock = self._run_dir / "meta.json", self._run_dir / ".lock"
        files = (*self._files, *self._out_logs)
        others = [meta] * (self._meta is not None and not meta.exists())
        gone = [file.path for file in files if file.is_gone()] + others
        if not gone:
            return
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            if not lock.exists():
                _lock(self._run_dir)
            if self._meta is not None:
                _write_atomically(meta, self._meta)
            if self._csv.is_gone():
                self._write_header(self._fields, math.inf)
                self._csv.reopen()
            if self._events.file.is_gone():
                self._events.begin_anew(step)
            for file in self._out_logs:
                if file.is_gone():
                    file.reopen()
        except OSError as error:  # The next row tries again.
            log.warning("%s was deleted; cannot make it anew: %s", gone[0], error)
            return
        log.warning(
            "Deleted while the run goes on, and made anew without what was in there: "
            "%s. The next checkpoint is in %s as always.",
            ", ".join(map(str, gone)),
            self._run_dir,
        )

    def _add_columns(self, fields: Mapping[str, Field]) -> None:
        """Give logs.csv more columns.

        If the disk does not allow that, their values are only in TensorBoard.
        """
        if self._csv.error:
            return  # Rows wait in memory. The next row tries again.
        old = self._csv
        try:
            self._csv = self._open_csv({**self._fields, **fields}, math.inf)
        except OSError as error:
            self._refused |= fields.keys()
            log.warning("logs.csv has no column %s: %s", ", ".join(fields), error)
        else:
            old.close()

    def log(self, row: Mapping[Any, float | int | None]) -> None:
        """Write one row. What is missing, None or NaN becomes a blank cell.

        Args:
          row: by names of columns, or by a `Field` that says what a column of one's own
            means. Names that are new become columns.
        """
        new: dict[str, Field] = {}
        values: dict[str, float | int] = {}
        for key, value in row.items():
            field = key if isinstance(key, Field) else Field(key, "-", "-")
            name = re.sub('[\n\r",]', " ", field.name)
            if name not in self._fields and name not in self._refused:
                new[name] = field._replace(name=name)
            if (number := _cell(value)) is not None:
                values[name] = number
        if new:
            self._add_columns(new)
        step = int(values["step"])
        self._replace_deleted(step)
        for file in (*self._files, *self._out_logs):
            file.start()
        cells = (_format(values.get(column)) for column in self._fields)
        self._csv.write((",".join(cells) + "\n").encode())
        self._events.add(step, values)
        self._report_errors()
        if self._wandb is not None:
            self._log_to_wandb(values, step)

    def _log_to_wandb(self, values: Mapping[str, float], step: int) -> None:
        assert self._wandb is not None
        try:
            if self._wandb_run is None:
                self._wandb_run = _init_wandb(self._wandb, self._run_dir, self._config)
            # W&B ignores steps that it has seen before the run was resumed.
            self._wandb_run.log(values, step=step)
        except Exception as error:  # Somebody else's service is no reason to stop.
            log.warning("Weights & Biases failed, and gets no more rows: %s", error)
            self._wandb = self._wandb_run = None

    def close(self) -> None:
        for file in self._files:
            file.close()
            _report_lost(file)
        if self._wandb_run is not None:
            self._wandb_run.finish()
            self._wandb_run = None

    def _report_errors(self) -> None:
        """Warn about a disk that fails, once until it works again."""
        files = (*self._files, *self._out_logs)
        failed = [file for file in files if file.error]
        self.failed_writes += bool(failed)
        if failed and not self._warned:
            log.warning(
                "Cannot write to %s (%s). Training goes on; rows wait in memory.",
                failed[0].path,
                failed[0].error,
            )
        elif self._warned and not failed:
            log.info(
                "Writing to %s works again. Rows that waited: %d, rows lost: %d.",
                self._run_dir,
                self.failed_writes,
                max(file.lost for file in files),
            )
        self._warned = bool(failed)


def _report_lost(file: _LogFile) -> None:
    """Say what a closed file has not taken."""
    if file.error:
        log.warning("The end of %s is lost: %s", file.path, file.error)
    if file.lost:
        log.warning("%s lacks %d rows or lines", file.path, file.lost)


def _cell(value: Any) -> float | int | None:
    if isinstance(value, numbers.Integral):
        return int(value)
    return _number(value)


def _format(value: float | int | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.8g}"


def _read_glossary(run_dir: Path) -> dict[str, Field]:
    """Return the columns that fields.csv names; none if it is not there or damaged."""
    try:
        with open(run_dir / "fields.csv", encoding="utf-8", newline="") as file:
            return {row["name"]: Field(**row) for row in csv.DictReader(file)}
    except (OSError, ValueError, TypeError, KeyError, csv.Error):
        return {}


def _prepare_csv(path: Path, columns: Sequence[str], resume_step: float | None) -> None:
    """Leave in logs.csv a header and the rows up to `resume_step`, nothing torn."""
    old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    header, *lines = old.split("\n")[:-1] or [""]  # What follows the last \n is torn.
    old_columns = header.split(",")
    keep = [",".join(columns)]
    dropped = 0
    for line in lines:
        cells = dict(zip(old_columns, line.split(","), strict=False))
        whole = line.count(",") == header.count(",")
        if not whole or not cells.get("step", "").isdecimal():
            dropped += 1  # A crash of the machine can leave holes.
        elif resume_step is not None and int(cells["step"]) <= resume_step:
            keep.append(",".join(cells.get(column, "") for column in columns))
    new = "\n".join(keep) + "\n"
    if new == old:
        return
    if lines and (resume_step is None or not {*old_columns} <= {*columns}):
        kept = next(
            kept
            for n in range(1, 10_000)
            if not (kept := path.with_name(f"{path.stem}.{n}.csv")).exists()
        )
        shutil.copyfile(path, kept)
        log.info("Kept the old %s as %s", path.name, kept.name)
    if dropped:
        log.warning("%s: left out %d damaged rows", path, dropped)
    _write_atomically(path, new)


class _EventFile:
    """Writes TensorBoard events, one per row.

    Not torch's SummaryWriter: that one has a thread, which must not be there when
    actors are forked, and which dies of a full disk.

    Args:
      folder: where TensorBoard looks; each start of the run adds a file.
      resume_step: TensorBoard will drop earlier starts' events after this step; all,
        if None.
    """

    def __init__(self, folder: Path, *, resume_step: int | None):
        # Half a second, which those who only want the network do not pay.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files in the order of their names.
        starts = len(list(folder.glob("events.out.tfevents.*")))
        name = f"{int(time.time()):010d}.{starts:04d}.{socket.gethostname()}"
        self.file = _LogFile(folder / f"events.out.tfevents.{name}")
        self._records = RecordWriter(self.file)
        self._session = SessionLog(status=SessionLog.START)
        self._begin(0 if resume_step is None else resume_step + 1)

    def _begin(self, purge_step: int) -> None:
        self._write(self._event(file_version="brain.Event:2"))
        self._write(self._event(session_log=self._session, step=purge_step))

    def begin_anew(self, step: int) -> None:
        """Go on in a new file, the old one having been deleted."""
        self.file.path.parent.mkdir(exist_ok=True)
        self.file.reopen()
        self._begin(step)

    def add(self, step: int, row: Mapping[str, float | int]) -> None:
        values = [
            self._summary.Value(tag=f"train/{key}", simple_value=value)
            for key, value in row.items()
            if key != "step"
        ]
        self._write(self._event(step=step, summary=self._summary(value=values)))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


def _import_wandb() -> ModuleType:
    try:
        import wandb
    except ModuleNotFoundError:
        raise ConfigError(
            "--wandb is set but the package is not installed. Run `pip install wandb`, "
            "or leave --wandb out."
        ) from None
    return wandb


def _init_wandb(wandb: ModuleType, run_dir: Path, config: dict[str, Any]) -> Any:
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", "torchbeast"),
        id=re.sub(r"[/\\#?%:]", "-", run_dir.name),  # W&B refuses these.
        name=run_dir.name,
        dir=str(run_dir),
        config=config,
        resume="allow",
    )


# -------------------------------------------------------------------------- terminal

_LINE_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


class _FileHandler(logging.Handler):
    """Appends to out.log; a full disk is no reason to fail."""

    def __init__(self, path: Path):
        super().__init__()
        self.file = _LogFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.file.write((self.format(record) + "\n").encode(errors="replace"))
        except Exception:  # The caller's mistake, for instance "%d" of a str.
            self.handleError(record)

    def close(self) -> None:
        self.file.close()
        super().close()


class Logging:
    """Sends log records to the terminal and to out.log until closed."""

    def __init__(self, run_dir: Path | None, *, verbose: bool = False):
        self._root = logging.getLogger()
        self._old_level = self._root.level
        self._handlers: list[logging.Handler] = [_console_handler()]
        self._file_handler: _FileHandler | None = None
        if run_dir is not None:
            self._file_handler = _FileHandler(run_dir / "out.log")
            self._handlers.append(self._file_handler)
        repeats = Repeats()
        for handler in self._handlers:
            handler.addFilter(repeats)
            handler.name = f"torchbeast {type(handler).__name__}"
            if not isinstance(handler, RichHandler):
                handler.setFormatter(logging.Formatter(_LINE_FORMAT, _TIME_FORMAT))
            self._root.addHandler(handler)
        self._root.setLevel(logging.DEBUG if verbose else logging.INFO)
        logging.captureWarnings(True)

    def __enter__(self) -> "Logging":
        return self

    def __exit__(self, exc_type: Any, error: BaseException | None, tb: Any) -> None:
        # The terminal shows it when the program ends; out.log would miss it.
        if isinstance(error, Exception) and self._file_handler is not None:
            text = "".join(traceback.format_exception(error))
            self._file_handler.handle(
                logging.LogRecord(
                    log.name, logging.ERROR, __file__, 0, "%s", (text.rstrip(),), None
                )
            )
        self.close()

    def close(self) -> None:
        for handler in reversed(self._handlers):  # The terminal's last.
            self._root.removeHandler(handler)
            handler.close()
            if isinstance(handler, _FileHandler):
                _report_lost(handler.file)
        if self._handlers:
            logging.captureWarnings(False)
            self._root.setLevel(self._old_level)
        self._handlers = []


def frequent_warnings(n: int) -> list[str]:
    """Return the n warnings that came most often since logging was set up."""
    for handler in logging.getLogger().handlers:
        for repeats in handler.filters:
            if isinstance(repeats, Repeats):
                return repeats.most_frequent(n)
    return []


def setup_logging(run_dir: Path | None, *, verbose: bool = False) -> Logging:
    """Show log records on stderr and, with a run's folder, append them to its out.log.

    In a terminal they appear above the live line of `StatusLine`. An earlier set-up of
    this process is replaced.

    Returns:
      A context manager with `close`. An exception that leaves it is written to out.log.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if (handler.name or "").startswith("torchbeast "):
            root.removeHandler(handler)
            handler.close()
    return Logging(run_dir, verbose=verbose)


def _console_handler() -> logging.Handler:
    console = Console(stderr=True)
    if not _is_terminal(console):
        return logging.StreamHandler(sys.stderr)
    return RichHandler(
        console=console,
        show_path=False,
        omit_repeated_times=False,
        log_time_format="%H:%M:%S",
        highlighter=NullHighlighter(),
    )


def _is_terminal(console: Console) -> bool:
    """Return whether a line can be redrawn. (rich also says yes for FORCE_COLOR.)"""
    return console.file.isatty() and not console.is_dumb_terminal


def _log_console() -> Console:
    """Return the console of the log records, so that they go above the live line."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, RichHandler):
            return handler.console
    return Console(stderr=True)


REDRAW_S = 0.25  # Drawing takes about a millisecond.
PLAIN_LINE_S = 10.0
BAR_WIDTH = 10


class StatusLine:
    """Shows where the run is: a live line in a terminal, else a log line now and then.

    A context manager; one thread calls `update`. It starts no thread, and touches the
    terminal only with the first update: by then the actors have been forked.
    """

    def __init__(self, total_steps: int, start_step: int = 0):
        self._total_steps = total_steps
        self._step = start_step
        self._sps: float | None = None  # Smoothed, for the ETA.
        self._parts: list[tuple[int, str]] = []
        self._shown = True  # What `_parts` says.
        self._shown_at = -math.inf
        self._console = _log_console()
        self._in_terminal = _is_terminal(self._console)
        self._live: Live | None = None
        self._gone = False  # The terminal, for instance with its ssh connection.

    def __enter__(self) -> "StatusLine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Show the last update, and leave its line where it is."""
        if not self._shown:
            self._show()
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def update(
        self,
        step: int,
        frames: int,
        sps: float,
        mean_return: float | None,
        policy_lag: float | None = None,
        verdict: str | None = None,
        **extra: Any,
    ) -> None:
        """Take new values, and show them if it is time; `extra` as name and value."""
        self._step = step
        # The first row, at the start, has no rate yet.
        self._sps = 0.8 * self._sps + 0.2 * sps if self._sps else sps
        # Where a line is too long, the parts with the highest number are left out.
        self._parts = [
            (0, f"step {_short(step)}/{_short(self._total_steps)}"),
            (6, self._progress()),
            (5, f"{_short(frames)} frames"),
            (1, f"{sps:,.0f} SPS"),
            (0, f"return(100) {_reward(mean_return)}"),
            (4, "" if policy_lag is None else f"lag {policy_lag:.1f}"),
            (3, verdict or ""),
            (2, f"ETA {self._eta()}"),
            *((7, f"{k} {v}") for k, v in extra.items() if v is not None),
        ]
        self._shown = False
        now = time.monotonic()
        if now - self._shown_at >= (REDRAW_S if self._in_terminal else PLAIN_LINE_S):
            self._shown_at = now
            self._show()

    def _progress(self) -> str:
        share = min(1.0, self._step / self._total_steps)
        if not self._in_terminal:
            return f"{share:.1%}"
        full, empty = "━─" if self._console.encoding.startswith("utf") else "#."
        done = int(share * BAR_WIDTH)
        return f"{full * done}{empty * (BAR_WIDTH - done)} {share:.1%}"

    def _eta(self) -> str:
        left = max(0, self._total_steps - self._step)
        return _duration(left / self._sps) if self._sps else "-"

    def _show(self) -> None:
        self._shown = True
        if not self._in_terminal:
            log.info("%s", _join(self._parts))
        elif not self._gone:
            self._draw()

    def _draw(self) -> None:
        try:
            if self._live is None:
                self._live = Live(
                    console=self._console,
                    auto_refresh=False,
                    # What is printed goes above the line too, unless to a file.
                    redirect_stdout=sys.stdout.isatty(),
                    redirect_stderr=sys.stderr.isatty(),
                )
                self._live.start()
            # The last column stays free: a full line makes some terminals wrap.
            line = _join(self._parts, width=self._console.width - 1)
            text = Text(line, no_wrap=True, overflow="ellipsis")
            text.highlight_regex(r"return\(100\) \S+", "bold")
            self._live.update(text, refresh=True)
        except OSError:
            self._gone = True  # The run need not go too.


def _join(parts: Iterable[tuple[int, str]], width: float = math.inf) -> str:
    """Join the texts, leaving out those with the highest numbers until they fit."""
    kept = [(order, text) for order, text in parts if text]
    while True:
        line = "  ".join(text for _, text in kept)
        last = max(order for order, _ in kept)
        if len(line) <= width or last == 0:
            return line
        kept = [(order, text) for order, text in kept if order < last]


def _short(n: float) -> str:
    """Return a count in three digits: 999, 1.23k, 45.6M."""
    for unit in ("", "k", "M", "G"):
        if n < 999.5 or unit == "G":
            break
        n /= 1000
    digits = 0 if not unit or n >= 99.95 else 1 if n >= 9.995 else 2
    return f"{n:.{digits}f}{unit}"


def _reward(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{h}h{m:02d}m"
    return f"{m}m{s:02d}s" if minutes else f"{s}s"


# --------------------------------------------------------------------- run directory


class RunDirBusy(ConfigError):
    """Another process is training in this run's folder."""


def prepare_run_dir(savedir: Path, xpid: str) -> Path:
    """Create `savedir/xpid`, take its locks, and point `savedir/latest` to it.

    One lock is in the folder; the other is beside it, in `savedir/.locks`, and stays
    when the folder is deleted. They end with this process, whatever ends it. They are
    POSIX record locks, since those are not inherited: an actor that outlives its parent
    for a moment does not hold them. The same process may prepare a folder again.

    Raises:
      RunDirBusy: another process holds the lock.
    """
    run_dir = (savedir.expanduser() / xpid).resolve()
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    _lock_name(run_dir)
    run_dir.mkdir(exist_ok=True)
    _lock(run_dir)
    _sweep(run_dir.glob(".*.tmp-*"), ours=True)
    _sweep(run_dir.parent.glob(".latest.tmp-*"), ours=False)
    if run_dir.name != "latest":
        link = run_dir.with_name("latest")
        temporary = run_dir.with_name(f".latest.tmp-{os.getpid()}")
        try:
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(run_dir.name)
            os.replace(temporary, link)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            log.warning("Cannot make %s point to %s: %s", link, run_dir.name, error)
    return run_dir


def _sweep(paths: Iterable[Path], *, ours: bool) -> None:
    """Remove temporary files of processes that were killed while they wrote.

    Args:
      ours: only this process, which holds the run's lock, may write such files.
    """
    for path in paths:
        pid = path.name.rpartition("-")[2]
        if ours or not (pid.isdecimal() and psutil.pid_exists(int(pid))):
            with contextlib.suppress(OSError):
                path.unlink()


def _lock_name(run_dir: Path) -> None:
    """Lock the byte of `savedir/.locks` that belongs to a run's name."""
    byte = int.from_bytes(hashlib.sha256(os.fsencode(run_dir.name)).digest()[:7], "big")
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:  # Never closed, as in `_lock`.
        fd = os.open(run_dir.parent / ".locks", flags, 0o666)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except BlockingIOError:
        raise RunDirBusy(_busy(run_dir)) from None
    except OSError:  # Another user's --savedir, or no locks: then `_lock` must do.
        pass


def _busy(run_dir: Path) -> str:
    owner = ""
    with contextlib.suppress(OSError):  # Deleted.
        owner = (run_dir / ".lock").read_text(errors="replace")
    return (
        f"{run_dir} is in use by {owner or 'another process'}. Stop that run first, or "
        "choose another --xpid."
    )


def _lock(run_dir: Path) -> None:
    path = run_dir / ".lock"
    # Never closed: closing any descriptor of the file would give up the lock.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(fd)
        raise RunDirBusy(_busy(run_dir)) from None
    except OSError as error:
        # Some cluster file systems have no locks. One run per folder is then up to
        # the user.
        log.warning("Cannot lock %s: %s", path, error)
    with contextlib.suppress(OSError):  # It only serves the message above.
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def write_meta(
    run_dir: Path, *, flags: Mapping[str, Any], extra: Mapping[str, Any]
) -> None:
    """Write meta.json: what ran, where, from which code. Never the environment.

    `starts` grows by one entry whenever the run is started or resumed; the rest
    describes the latest start.

    Args:
      flags: every flag and its value.
      extra: what else to record; `step` is the step that this start begins at.
    """
    starts = read_meta(run_dir)["starts"] if (run_dir / "meta.json").exists() else []
    now = datetime.datetime.now(datetime.timezone.utc)
    meta = {
        "flags": dict(flags),
        **extra,
        **_describe_code(),
        "versions": _versions(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        # As it was typed, but python without its path.
        "command": [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]],
    }
    start = {"time": now.isoformat(timespec="seconds"), "step": extra.get("step", 0)}
    start |= {key: meta[key] for key in ("commit", "dirty", "host", "command")}
    meta["starts"] = [*starts, start]
    text = json.dumps(meta, indent=2, default=str)
    _write_atomically(run_dir / "meta.json", text + "\n")


def run_id(recorded: Mapping[str, Any], run_dir: Path) -> str:
    """Return the random name of a run, recorded in its meta.json or new.

    Environment servers tell a run that comes back by it from another one of the same
    name, which may be anybody's. It ends in the folder's device and number, because a
    copy of the folder is another run: two learners of one name would take the servers'
    places from each other for ever.
    """
    found = run_dir.stat()
    folder = f"-{found.st_dev:x}-{found.st_ino:x}"
    known = recorded.get("run_id", "")
    return known if known.endswith(folder) else secrets.token_hex(8) + folder


def read_meta(run_dir: Path) -> dict[str, Any]:
    """Return what `write_meta` wrote.

    Raises:
      ConfigError: meta.json is missing or damaged.
    """
    path = run_dir / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(meta, dict) or not {"flags", "starts"} <= meta.keys():
            raise ValueError("it has no flags or no starts")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path}, written at the start of every run: {error}"
        ) from error
    return meta


def _describe_code() -> dict[str, Any]:
    """Return the commit this file belongs to, None outside a checkout."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args],
            cwd=Path(__file__).parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()

    try:
        # Installed inside somebody else's checkout, the commit would be theirs.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return {
            "commit": git("rev-parse", "HEAD"),
            # Changes of tracked files that are in no commit.
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def _versions() -> dict[str, str | None]:
    distributions = {
        d.name.lower(): d.version for d in importlib.metadata.distributions()
    }
    names = ("torch", "gymnasium", "ale-py", "numpy", "opencv-python-headless")
    return {"python": platform.python_version()} | {
        n: distributions.get(n) for n in names
    }
