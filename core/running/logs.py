# SPDX-License-Identifier: Apache-2.0
"""`RunLog`: writes each row to logs.csv, TensorBoard and (optional) Weights & Biases.

A disk that is full or does not answer never stops training. Rows that cannot be written
wait in memory and are written with a later row, and there is one warning. A resumed run
drops the rows that are newer than its checkpoint, so that no step is logged twice.
"""

import csv
import io
import logging
import math
import numbers
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.algorithm.counters import as_number
from core.columns import FIELDS, NOT_IN_A_NAME, Field, info_field, read_fields
from core.running import dashboard, terminal
from core.running.atomic import write_atomically
from core.running.folder import lock_folder
from core.running.log_file import CLOSE_S, LogFile, is_missing, report_lost
from core.running.log_setup import FileHandler
from core.running.wandb_log import WandbLog

log = logging.getLogger(__name__)

# Then a new out.log begins. An environment that prints all the time writes this in
# eight minutes (`core.running.terminal.BYTES_PER_S`), another run in weeks.
MAX_OUT_LOG_BYTES = 32 << 20


class RunLog:
    """Writes log rows to logs.csv, TensorBoard and (optional) Weights & Biases.

    If files were deleted since the last row, `log` creates them again, also meta.json
    and the lock. A context manager; only one thread may use it. The threads that write
    the files (also out.log) and the threads of Weights & Biases start with the first
    row, because actors must be forked before any thread starts.

    Args:
      run_dir: the run's folder, which exists.
      info_keys: the names of --info_keys; each has a column `info_<key>`.
      resume_step: the step of the checkpoint that a resumed run starts from; newer rows
        and events are dropped. None for a run that starts at step 0; an old logs.csv is
        kept as logs.<n>.csv.
      wandb: the flags, to log to Weights & Biases too; None: do not.

    A resumed run keeps all columns of logs.csv, also columns for which it has no values
    (of another version, or of other info keys). A row with a new name adds a column.

    Raises:
      OSError: the folder is not writable. After the start this is only a warning.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        info_keys: Sequence[str] = (),
        resume_step: int | None = None,
        wandb: Mapping[str, Any] | None = None,
    ):
        self._failed_writes = 0  # Rows of the present outage that had to wait.
        self._run_dir = run_dir
        self._warned = False
        self._wandb = None if wandb is None else WandbLog(run_dir, wandb)

        fields = {field.name: field for field in (*FIELDS, *map(info_field, info_keys))}
        if resume_step is not None:
            # First this version's columns and units, then the file's other columns.
            fields = {**fields, **_read_glossary(run_dir), **fields}
        self._refused: set[str] = set()  # Columns that could not be added.
        self._write_header(fields, resume_step)
        self._csv = LogFile(run_dir / "logs.csv")
        meta = run_dir / "meta.json"
        self._meta = meta.read_text(encoding="utf-8") if meta.exists() else None
        self._events = _EventFile(run_dir / "tensorboard", resume_step=resume_step)
        self._files = (self._csv, self._events.file)
        self._out_logs = [
            handler.file
            for handler in logging.getLogger().handlers
            if isinstance(handler, FileHandler)
        ]

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write_header(
        self, fields: Mapping[str, Field], resume_step: float | None
    ) -> None:
        """Write fields.csv and the header of logs.csv."""
        glossary = io.StringIO()
        lines = [Field._fields, *fields.values()]
        csv.writer(glossary, lineterminator="\n").writerows(lines)
        write_atomically(self._run_dir / "fields.csv", glossary.getvalue().encode())
        _prepare_csv(self._run_dir / "logs.csv", tuple(fields), resume_step)
        self._fields = dict(fields)

    def _replace_deleted(self, step: int) -> None:
        """Create deleted files again. `step` is the present step of the run.

        Raises:
          RunDirBusy: another run uses the folder now.
        """
        meta = self._run_dir / "meta.json"
        files = (*self._files, *self._out_logs)
        others = [meta] * (self._meta is not None and is_missing(meta))
        gone = [file.path for file in files if file.is_gone()] + others
        if not gone:
            return
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            lock_folder(self._run_dir)  # Another run may have made the folder anew.
            if self._meta is not None:
                write_atomically(meta, self._meta.encode())
            if self._csv.is_gone():
                self._write_header(self._fields, math.inf)
                self._csv.reopen()
            if self._events.file.is_gone():
                self._events.reopen(step)
            for file in self._out_logs:
                if file.is_gone():
                    file.reopen()
        except OSError as error:  # The next row tries again.
            log.warning("%s was deleted; cannot create it again: %s", gone[0], error)
            return
        log.warning(
            "Deleted during the run, and created again without the old contents: %s. "
            "Checkpoints will be in %s as before.",
            ", ".join(map(str, gone)),
            self._run_dir,
        )

    def _add_columns(self, fields: Mapping[str, Field]) -> None:
        """Add columns to logs.csv.

        If this fails, only TensorBoard (and Weights & Biases) get their values.
        """
        if self._csv.error:
            return  # Rows wait in memory. The next row tries again.
        try:
            self._write_header({**self._fields, **fields}, math.inf)
            self._csv.reopen()
        except OSError as error:
            self._refused |= fields.keys()
            log.warning("Cannot add %s to logs.csv: %s", ", ".join(fields), error)

    def log(self, row: Mapping[Any, float | int | None]) -> None:
        """Write one row. A missing value, None and NaN become blank cells.

        Args:
          row: numbers by column. A key is the name of a column, or a `Field`, which
            also explains a new column in fields.csv. A new name adds a column.

        Raises:
          ConfigError: a value is not a number.
        """
        new: dict[str, Field] = {}
        values: dict[str, float | int] = {}
        for key, value in row.items():
            field = key if isinstance(key, Field) else Field(key, "-", "-")
            name = NOT_IN_A_NAME.sub(" ", field.name)
            if name not in self._fields and name not in self._refused:
                new[name] = field._replace(name=name)
            if (number := _cell(name, value)) is not None:
                values[name] = number
        if new:
            self._add_columns(new)
        step = int(values["step"])
        self._replace_deleted(step)
        for file in self._out_logs:
            file.limit(MAX_OUT_LOG_BYTES)
        for file in (*self._files, *self._out_logs):
            file.start()
        cells = (_format(values.get(column)) for column in self._fields)
        self._csv.write((",".join(cells) + "\n").encode())
        self._events.add(step, values)
        self._report_errors()
        if self._wandb is not None:
            self._wandb.add(step, values)

    def close(self) -> None:
        for file in self._files:
            file.close()
        for file in terminal.files():
            file.flush(CLOSE_S)
        for file in (*self._files, *terminal.files()):
            report_lost(file)
        if self._wandb is not None:
            self._wandb.close()

    def _report_errors(self) -> None:
        """Warn once when the disk fails, and log once when it works again."""
        files = (*self._files, *self._out_logs, *terminal.files())
        failed = [file for file in files if file.error]
        self._failed_writes += bool(failed)
        # A busy disk may be late for one row.
        is_late = all(isinstance(file.error, TimeoutError) for file in failed)
        if failed and not self._warned and not (is_late and self._failed_writes == 1):
            self._warned = True
            log.warning(
                "Cannot write to %s (%s). Training goes on; rows wait in memory.",
                failed[0].path,
                failed[0].error,
            )
        elif not failed:
            if self._warned:
                log.info(
                    "Writing to %s works again. Rows that waited: %d, lost so far: %d.",
                    self._run_dir,
                    self._failed_writes,
                    max(file.lost for file in files),
                )
            self._warned, self._failed_writes = False, 0


def _cell(column: str, value: Any) -> float | int | None:
    if isinstance(value, numbers.Integral):
        return int(value)
    return as_number(column, value)


def _format(value: float | int | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.8g}"


def _read_glossary(run_dir: Path) -> dict[str, Field]:
    """Return the columns in fields.csv; {} if the file is missing or damaged."""
    try:
        return {field.name: field for field in read_fields(run_dir / "fields.csv")}
    except (OSError, ValueError, TypeError, csv.Error):
        return {}


def _prepare_csv(path: Path, columns: Sequence[str], resume_step: float | None) -> None:
    """Reduce logs.csv to a header and the complete rows up to `resume_step`.

    If rows or columns would be lost, the old file is kept as logs.<n>.csv.
    """
    if path.exists():
        with open(path, encoding="utf-8", errors="replace") as file:
            old_columns = _cells(file.readline())
            has_rows = file.readline().endswith("\n")
        if has_rows and (resume_step is None or not {*old_columns} <= {*columns}):
            kept = next(
                kept
                for n in range(1, 10_000)
                if not (kept := path.with_name(f"{path.stem}.{n}.csv")).exists()
            )
            shutil.copyfile(path, kept)
            log.info("Kept the old %s as %s", path.name, kept.name)
    write_atomically(path, _new_lines(path, columns, resume_step))


def _new_lines(
    path: Path, columns: Sequence[str], resume_step: float | None
) -> Iterator[bytes]:
    """Yield the new lines of logs.csv, from the old file, if there is one.

    The old file may be larger than the memory: it is read line by line.
    """
    yield (",".join(columns) + "\n").encode()
    if resume_step is None or not path.exists():
        return
    num_damaged = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        old_columns = _cells(file.readline())
        for line in file:
            cells = _cells(line)
            row = dict(zip(old_columns, cells, strict=False))
            if not line.endswith("\n"):
                break  # A kill can leave an incomplete last line.
            if len(cells) != len(old_columns) or not row.get("step", "").isdecimal():
                num_damaged += 1  # A power failure can leave zero bytes in a file.
            elif int(row["step"]) <= resume_step:
                kept = [row.get(name, "") for name in columns]
                yield (",".join(kept) + "\n").encode()
    if num_damaged:
        log.warning("%s: left out %d damaged rows", path, num_damaged)


def _cells(line: str) -> list[str]:
    return line.rstrip("\n").split(",")


class _EventFile:
    """Writes TensorBoard events, one per row.

    This replaces torch's SummaryWriter, whose thread starts with the object, while
    actors may be forked only from a process with one thread. Also, this thread ends if
    the disk is full.

    Args:
      folder: the folder for TensorBoard; each start of the run adds a file.
      resume_step: TensorBoard drops events of earlier starts after this step; None to
        drop all events of earlier starts.
    """

    def __init__(self, folder: Path, *, resume_step: int | None):
        # Imported here: this takes half a second, and the test modes do not need it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files in the order of their names, which begin with the
        # time. The clock may have been set back since the last start.
        before = [
            path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")
        ]
        began = max([int(time.time()), *(int(t) + 1 for t in before if t.isdecimal())])
        name = f"{began:010d}.{len(before):04d}.{socket.gethostname()}"
        self.file = LogFile(folder / f"events.out.tfevents.{name}")
        self._records = RecordWriter(self.file)
        self._session = SessionLog(status=SessionLog.START)
        self._begin(0 if resume_step is None else resume_step + 1)

    def _begin(self, purge_step: int) -> None:
        self._write(self._event(file_version="brain.Event:2"))
        self._write(self._event(session_log=self._session, step=purge_step))
        layout = self._summary(value=[dashboard.layout()])
        self._write(self._event(step=purge_step, summary=layout))

    def reopen(self, step: int) -> None:
        """Continue in a new file after the old one was deleted."""
        self.file.path.parent.mkdir(exist_ok=True)
        self.file.reopen()
        self._begin(step)

    def add(self, step: int, row: Mapping[str, float | int]) -> None:
        values = [
            self._summary.Value(tag=dashboard.tag(key), simple_value=value)
            for key, value in row.items()
            if key != "step"
        ]
        self._write(self._event(step=step, summary=self._summary(value=values)))

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
