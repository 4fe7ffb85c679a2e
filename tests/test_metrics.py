# SPDX-License-Identifier: Apache-2.0
"""Tests of core.metrics: nothing lost, nothing doubled, nothing secret."""

import contextlib
import csv
import fcntl
import io
import json
import logging
import math
import os
import pty
import random
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import threading
import time
import warnings
from fcntl import ioctl
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from core import metrics, run
from core.supervise import ConfigError
from tests.conftest import wait_until

ROOT = Path(__file__).parent.parent
DEADLINE_S = 30.0

COLUMNS = (
    "step,frames,time_s,sps,mean_episode_return,mean_episode_step,games,"
    "best_mean_return,mean_life_return,total_loss,pg_loss,baseline_loss,entropy_loss,"
    "entropy,mean_rho,grad_norm,learning_rate,updates,skipped_updates,policy_lag_mean,"
    "policy_lag_max,stale_rollouts,buffers_full,learner_busy,inference_busy,env_busy,gpu_utilization,"
    "actor_restarts,rollouts_discarded,"
    "streams,reconnects,steps_discarded,learner_queue,inference_batch,"
    "env_step_p50_ms,env_step_p99_ms,rss_mb"
).split(",")


def test_busy_time_is_the_share_of_the_time_between_two_rows(monkeypatch):
    now = 100.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    busy = metrics.BusyTime()
    with busy.measure("learner"):
        now += 3
    with pytest.raises(ValueError), busy.measure("inference", workers=2):
        now += 1
        raise ValueError  # Time is time.
    busy.add("env", 60.0, workers=4)  # Steps that began before the last row.
    now += 4
    assert busy.pop() == {"learner": 3 / 8, "inference": 0.5 / 8, "env": 1.0}
    now += 1
    busy.add("env", 0.25)
    assert busy.pop() == {"learner": 0.0, "inference": 0.0, "env": 0.25}


@pytest.mark.parametrize(
    "env, inference, learner, in_turn, expected",
    [
        (0.9, 0.3, 0.4, False, "env-bound 90%"),
        (0.3, 0.71, 0.4, False, "inference-bound 71%"),
        (0.3, 0.4, 0.98, False, "learner-bound 98%"),
        # Actors that step 50 % and choose 45 % of the time never rest.
        (0.5, 0.45, 0.7, False, "learner-bound 70%"),
        (0.5, 0.45, 0.7, True, "env-bound 95%"),
        (0.45, 0.5, 0.7, True, "inference-bound 95%"),
        (0.3, 0.3, 0.7, True, "learner-bound 70%"),
    ],
)
def test_the_verdict_is_the_stage_that_rests_least(
    env, inference, learner, in_turn, expected
):
    busy = {"env": env, "inference": inference, "learner": learner}
    assert run.verdict(busy, in_turn=in_turn) == expected


def test_before_anything_has_worked_there_is_no_verdict():
    assert run.verdict({}, in_turn=True) is None


@pytest.fixture(autouse=True)
def root_logger_as_before():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def read_rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(run_dir, steps, **options):
    with metrics.RunLog(run_dir, **options) as run_log:
        for step in steps:
            run_log.log({"step": step, "frames": 4 * step, "sps": step / 7})


def steps_of(run_dir, name="logs.csv"):
    return [int(row["step"]) for row in read_rows(run_dir / name)]


def run_child(code, *args, **options):
    """Run Python code that can import `metrics` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        **options,
    )


PRELUDE = """
import logging, os, resource, signal, sys
from pathlib import Path
from core import metrics
"""


# ------------------------------------------------------------------------- logs.csv


def test_header_is_the_documented_one(tmp_path):
    metrics.RunLog(tmp_path).close()
    assert (tmp_path / "logs.csv").read_text() == ",".join(COLUMNS) + "\n"


def test_info_keys_are_the_last_columns(tmp_path):
    metrics.RunLog(tmp_path, info_keys=("lives", "x y")).close()
    header = (tmp_path / "logs.csv").read_text().rstrip("\n").split(",")
    assert header == [*COLUMNS, "info_lives", "info_x y"]


def test_fields_csv_explains_every_column(tmp_path):
    metrics.RunLog(tmp_path, info_keys=("lives",)).close()
    glossary = read_rows(tmp_path / "fields.csv")
    assert [row["name"] for row in glossary] == [*COLUMNS, "info_lives"]
    assert all(row["unit"] and row["meaning"] for row in glossary)


def test_what_is_missing_none_or_nan_is_a_blank_cell(tmp_path):
    with metrics.RunLog(tmp_path, info_keys=("lives",)) as run_log:
        run_log.log({"step": 3, "sps": None, "entropy": math.nan, "info_lives": 2.5})
    (row,) = read_rows(tmp_path / "logs.csv")
    assert {k: v for k, v in row.items() if v} == {"step": "3", "info_lives": "2.5"}


def test_numbers_come_back_from_the_file(tmp_path):
    with metrics.RunLog(tmp_path) as run_log:
        run_log.log(
            {
                "step": np.int64(10**15 + 1),
                "frames": 4 * 10**15 + 4,
                "time_s": 1234567.8,
                "entropy": np.float32(0.1),
                "pg_loss": torch.tensor(-1.5e-7),
                "grad_norm": math.inf,
            }
        )
    (row,) = read_rows(tmp_path / "logs.csv")
    assert int(row["step"]) == 10**15 + 1
    assert int(row["frames"]) == 4 * 10**15 + 4
    assert float(row["time_s"]) == 1234567.8
    assert float(row["entropy"]) == pytest.approx(0.1, rel=1e-7)
    assert float(row["pg_loss"]) == pytest.approx(-1.5e-7, rel=1e-7)
    assert float(row["grad_norm"]) == math.inf


def test_a_row_is_in_the_file_before_the_log_is_closed(tmp_path):
    run_log = metrics.RunLog(tmp_path)
    run_log.log({"step": 5})
    assert steps_of(tmp_path) == [5]
    run_log.close()


NOVELTY = metrics.Field("novelty_loss", "1", "error of the predictor")


def test_a_name_that_is_no_column_becomes_one(tmp_path):
    with metrics.RunLog(tmp_path) as run_log:
        run_log.log({"step": 1})
        run_log.log({"step": 2, NOVELTY: 0.5, 'a,"b"\n': 7})
        run_log.log({"step": 3, NOVELTY: 0.25})
    rows = read_rows(tmp_path / "logs.csv")
    assert [*rows[0]] == [*COLUMNS, "novelty_loss", "a  b  "]
    assert [r["step"] for r in rows] == ["1", "2", "3"]
    assert [r["novelty_loss"] for r in rows] == ["", "0.5", "0.25"]
    assert [r["a  b  "] for r in rows] == ["", "7", ""]
    *_, described, other = read_rows(tmp_path / "fields.csv")
    assert metrics.Field(**described) == NOVELTY
    assert other == {"name": "a  b  ", "unit": "-", "meaning": "-"}
    assert not list(tmp_path.glob("logs.*.csv"))  # Nothing is lost, so no old file.


def test_a_disk_that_takes_no_new_column_stops_nothing(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise OSError(28, "No space left on device")

    with metrics.RunLog(tmp_path) as run_log:
        monkeypatch.setattr(metrics, "_prepare_csv", fail)
        for step in (1, 2):
            run_log.log({"step": step, NOVELTY: 0.5})
    assert steps_of(tmp_path) == [1, 2]
    assert caplog.text.count("no column novelty_loss: [Errno 28]") == 1


@pytest.mark.parametrize("keys", [("a", "a"), ("a,b",), ('"',), ("a\nb",)])
def test_info_keys_that_would_break_the_header_are_refused(tmp_path, keys):
    with pytest.raises(ValueError, match="info keys must differ"):
        metrics.RunLog(tmp_path, info_keys=keys)


# --------------------------------------------------------------------------- resume


def test_resume_drops_exactly_the_rows_after_the_checkpoint(tmp_path):
    write_rows(tmp_path, [10, 20, 30, 40])
    before = (tmp_path / "logs.csv").read_text().splitlines()
    write_rows(tmp_path, [35, 45], resume_step=30)
    assert steps_of(tmp_path) == [10, 20, 30, 35, 45]
    assert (tmp_path / "logs.csv").read_text().splitlines()[:4] == before[:4]


def test_a_file_cut_at_any_byte_resumes_with_every_whole_row_once(tmp_path):
    write_rows(tmp_path, [10, 20, 30, 40, 50])
    path = tmp_path / "logs.csv"
    whole = path.read_bytes()
    rng = random.Random(7)
    for end in range(whole.index(b"\n40,"), len(whole) + 1):
        path.write_bytes(whole[:end])
        checkpoint = rng.choice([10, 30, 35, 40, 55])
        on_disk = [10 * (i + 1) for i in range(whole[:end].count(b"\n") - 1)]
        # Not RunLog, whose other files would need a second here.
        metrics._prepare_csv(path, COLUMNS, checkpoint)
        kept = [step for step in on_disk if step <= checkpoint]
        assert path.read_bytes() == b"".join(whole.splitlines(True)[: len(kept) + 1])


@pytest.mark.parametrize("end", [0, 1, 100, -1])
def test_a_torn_header_starts_the_file_anew(tmp_path, end):
    path = tmp_path / "logs.csv"
    path.write_text((",".join(COLUMNS) + "\n")[:end])
    write_rows(tmp_path, [7], resume_step=5)
    assert steps_of(tmp_path) == [7]


def test_damaged_rows_in_the_middle_are_left_out_and_said(tmp_path, caplog):
    write_rows(tmp_path, [10, 20, 30])
    path = tmp_path / "logs.csv"
    path.write_bytes(path.read_bytes().replace(b"\n20,80,", b"\n\0\0,80,"))
    write_rows(tmp_path, [40], resume_step=30)
    assert steps_of(tmp_path) == [10, 30, 40]
    assert "left out 1 damaged rows" in caplog.text


def test_columns_that_a_run_has_had_stay_when_it_resumes_with_others(tmp_path):
    with metrics.RunLog(tmp_path, info_keys=("lives", "old")) as run_log:
        run_log.log({"step": 10, "info_lives": 3, "info_old": 5, NOVELTY: 0.5})
    with metrics.RunLog(tmp_path, info_keys=("new", "lives"), resume_step=10) as log:
        log.log({"step": 20, "info_new": 7})
    rows = read_rows(tmp_path / "logs.csv")
    names = ("step", "info_new", "info_lives", "info_old", "novelty_loss")
    cells = [tuple(r[name] for name in names) for r in rows]
    assert cells == [("10", "", "3", "5", "0.5"), ("20", "7", "", "", "")]
    assert metrics.Field(**read_rows(tmp_path / "fields.csv")[-1]) == NOVELTY


@pytest.mark.parametrize("text", ["", "name,unit\n1,2\n", "\0\xff", 'a,b,c\n"d'])
def test_a_damaged_glossary_is_written_anew(tmp_path, text):
    write_rows(tmp_path, [10])
    (tmp_path / "fields.csv").write_text(text)
    write_rows(tmp_path, [20], resume_step=10)
    assert steps_of(tmp_path) == [10, 20]
    assert [row["name"] for row in read_rows(tmp_path / "fields.csv")] == COLUMNS


def test_a_run_from_scratch_in_a_used_folder_keeps_the_old_rows_aside(tmp_path):
    write_rows(tmp_path, [10, 20])
    write_rows(tmp_path, [5])
    write_rows(tmp_path, [6])
    assert steps_of(tmp_path) == [6]
    assert steps_of(tmp_path, "logs.1.csv") == [10, 20]
    assert steps_of(tmp_path, "logs.2.csv") == [5]


def test_a_failed_rewrite_leaves_the_old_file_whole(tmp_path, monkeypatch):
    write_rows(tmp_path, [10, 20])
    old = (tmp_path / "logs.csv").read_bytes()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        metrics._prepare_csv(tmp_path / "logs.csv", COLUMNS, 10)
    assert (tmp_path / "logs.csv").read_bytes() == old
    assert not list(tmp_path.glob(".*tmp*"))


# ------------------------------------------------------------------------- full disk

FULL_DISK = """
run_dir = Path(sys.argv[1])
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
with metrics.setup_logging(run_dir), metrics.RunLog(run_dir) as run_log:
    run_log.log({"step": 1, "entropy": 0.5})
    # A file may grow by 17 bytes more: the disk fills up in the middle of a row.
    size = max((run_dir / "logs.csv").stat().st_size, 200) + 17
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    for step in range(2, 7):
        run_log.log({"step": step, "entropy": 0.5})
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torn = (run_dir / "logs.csv").read_text()
    run_log.log({"step": 7, "entropy": 0.5})
    print(run_log.failed_writes, torn.endswith("\\n"))
"""


def test_a_full_disk_delays_rows_but_loses_and_doubles_none(tmp_path):
    child = run_child(FULL_DISK, tmp_path)
    assert child.returncode == 0, child.stderr
    assert child.stdout == "5 False\n"  # It was full, and in the middle of a row.
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert event_steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


def test_a_full_disk_is_warned_about_once(tmp_path):
    child = run_child(FULL_DISK, tmp_path)
    for text in (child.stderr, (tmp_path / "out.log").read_text()):
        assert text.count("Cannot write to") == 1
        assert "Rows that waited: 5, rows lost: 0." in text


def test_what_waits_for_the_disk_is_bounded_and_the_rest_counted(monkeypatch):
    monkeypatch.setattr(metrics, "MAX_WAITING_BYTES", 11)
    file = metrics._LogFile(Path("/dev/full"))
    for _ in range(5):
        file.write(b"seven..")
    assert isinstance(file.error, OSError)
    assert file.lost == 3
    assert file._waiting == 2 * b"seven.."
    file.close()


def test_rows_that_never_reach_the_disk_are_reported_at_the_end(tmp_path, caplog):
    run_log = metrics.RunLog(tmp_path)
    run_log._csv.close()
    run_log._csv.__init__(Path("/dev/full"))
    run_log.log({"step": 1})
    run_log.close()
    assert "The end of /dev/full is lost" in caplog.text


class Pipe:
    """A file's place taken by a pipe that somebody has open and does not read."""

    def __init__(self, path):
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.size = fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, 4096)

    def read(self):
        """Read all that is there."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._fd, 1 << 20)
        return b""


def test_a_pipe_that_nobody_reads_holds_nobody_up(tmp_path):
    pipe = Pipe(tmp_path / "pipe")
    file = metrics._LogFile(tmp_path / "pipe")
    file.start()
    data = b"".join(b"%7d\n" % i for i in range(2 * pipe.size // 8))
    for i in range(0, len(data), 8):
        file.write(data[i : i + 8])
    assert isinstance(file.error, TimeoutError)
    assert file.lost == 0
    read = bytearray()

    def has_arrived() -> bool:  # Whole, once, in order.
        read.extend(pipe.read())
        return len(read) >= len(data)

    wait_until(has_arrived)
    assert read == data
    file.write(b"more\n")
    wait_until(lambda: file.error is None)
    file.close()
    assert pipe.read().endswith(b"more\n")


def test_a_pipe_that_nobody_reads_does_not_hold_up_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "CLOSE_S", 0.01)
    monkeypatch.setattr(metrics, "MAX_WAITING_BYTES", 7000)
    pipe = Pipe(tmp_path / "pipe")
    file = metrics._LogFile(tmp_path / "pipe")
    file.start()
    file.write(bytes(2 * pipe.size))
    for _ in range(9):
        file.write(bytes(1000))
    assert file.lost == 2
    file.close()
    assert isinstance(file.error, TimeoutError)
    pipe.read()  # Or its thread would wait for ever.


def test_logs_that_hang_are_warned_about_and_rows_are_not_held_up(tmp_path, capsys):
    pipe = Pipe(tmp_path / "out.log")
    with metrics.setup_logging(tmp_path), metrics.RunLog(tmp_path) as run_log:
        run_log.log({"step": 1})
        logging.getLogger().warning("x" * 2 * pipe.size)
        for step in (2, 3):
            run_log.log({"step": step})
        assert [row["step"] for row in read_rows(tmp_path / "logs.csv")] == list("123")
        assert capsys.readouterr().err.count("Cannot write to") == 1
        pipe.read()
        wait_until(lambda: not run_log._out_logs[0].error or pipe.read() is None)
        run_log.log({"step": 4})
        assert "works again" in capsys.readouterr().err


# ------------------------------------------------------------- TensorBoard and W&B


def read_events(run_dir):
    from tensorboard.backend.event_processing import event_accumulator

    events = event_accumulator.EventAccumulator(
        str(run_dir / "tensorboard"), size_guidance={"scalars": 0}
    )
    events.Reload()
    return events


def event_steps(run_dir):
    tags = read_events(run_dir).Tags()["scalars"]
    (tag,) = (tag for tag in tags if tag in ("train/sps", "train/entropy"))
    return [event.step for event in read_events(run_dir).Scalars(tag)]


def test_tensorboard_reads_the_same_numbers_as_the_csv(tmp_path):
    rng = random.Random(3)
    with metrics.RunLog(tmp_path) as run_log:
        for step in (5, 10, 15):
            run_log.log({"step": step, "entropy": rng.random(), "sps": None})
    rows = read_rows(tmp_path / "logs.csv")
    events = read_events(tmp_path)
    assert events.Tags()["scalars"] == ["train/entropy"]
    found = [(e.step, e.value) for e in events.Scalars("train/entropy")]
    assert found == [
        (int(row["step"]), pytest.approx(float(row["entropy"]), rel=1e-6))
        for row in rows
    ]


def test_tensorboard_forgets_events_after_the_checkpoint(tmp_path):
    write_rows(tmp_path, [10, 20, 30, 40])
    write_rows(tmp_path, [35, 45], resume_step=30)
    write_rows(tmp_path, [], resume_step=45)
    assert event_steps(tmp_path) == [10, 20, 30, 35, 45]


def test_tensorboard_forgets_everything_when_a_run_starts_from_scratch(tmp_path):
    write_rows(tmp_path, [0, 10])
    write_rows(tmp_path, [5])
    assert event_steps(tmp_path) == [5]


def test_threads_begin_with_the_first_row_and_end_with_the_log(tmp_path):
    """Actors are forked before the first row, and a fork copies no threads."""
    before = threading.enumerate()
    with metrics.setup_logging(tmp_path), metrics.RunLog(tmp_path) as run_log:
        logging.getLogger().warning("said before")
        assert threading.enumerate() == before
        run_log.log({"step": 1})
        new = [thread.name for thread in threading.enumerate() if thread not in before]
        assert len(new) == 3 and {"write logs.csv", "write out.log"} < set(new)
        run_log.log({"step": 2})
        assert len(threading.enumerate()) == len(before) + 3
    assert threading.enumerate() == before


def test_wandb_that_fails_is_left_alone(tmp_path, monkeypatch, caplog):
    calls = []

    def init(**options):
        calls.append(options)
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with metrics.RunLog(tmp_path, wandb=True) as run_log:
        for step in (1, 2):
            run_log.log({"step": step})
    assert len(calls) == 1
    assert caplog.text.count("Weights & Biases failed, and gets no more rows: no") == 1
    assert [row["step"] for row in read_rows(tmp_path / "logs.csv")] == ["1", "2"]


def test_wandb_that_is_not_installed_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        metrics.RunLog(tmp_path, wandb=True)


def test_wandb_gets_the_rows_under_the_id_of_the_run(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(
        log=lambda row, step: calls.append(("log", row, step)),
        finish=lambda: calls.append(("finish",)),
    )

    def init(**options):
        calls.append(("init", options))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run_dir = tmp_path / "pong:1"
    run_dir.mkdir()
    with metrics.RunLog(run_dir, wandb=True, config={"seed": 3}) as run_log:
        assert calls == []  # It would start threads before the actors are forked.
        run_log.log({"step": 5, "sps": 2.0, "entropy": None})
        run_log.log({"step": 7})
    (_, options), *rest = calls
    assert rest == [
        ("log", {"step": 5, "sps": 2.0}, 5),
        ("log", {"step": 7}, 7),
        ("finish",),
    ]
    assert (options["id"], options["name"]) == ("pong-1", "pong:1")
    assert options["resume"] == "allow"
    assert options["config"] == {"seed": 3}


# -------------------------------------------------------------------------- counting


def test_averages_are_means_since_the_last_pop():
    averages = metrics.Averages()
    averages.add(x=1.0, y=np.float32(3))
    averages.add(x=torch.tensor(2.0), y=None)
    averages.add(x=math.nan)
    averages.add_max(z=-5)
    averages.add_max(z=np.int64(-2))
    averages.add_max(z=math.nan)
    averages.add_max(z=-3)
    assert averages.pop() == {"x": 1.5, "y": 3.0, "z": -2.0}
    assert averages.pop() == {"x": None, "y": None, "z": None}
    averages.add_max(z=-7)
    assert averages.pop() == {"x": None, "y": None, "z": -7.0}


class Slow(float):
    """A number that lets other threads run while it is read."""

    def __float__(self):
        os.stat("/")  # Releases the GIL.
        return float.__add__(self, 0.0)


def test_averages_lose_no_value_among_threads():
    averages = metrics.Averages()
    n, values = 503, (1, 10, 100, 1000)
    start = threading.Barrier(len(values))

    def add(value):
        start.wait(DEADLINE_S)
        for i in range(n):
            averages.add(x=Slow(value))
            averages.add_max(y=Slow(value * i))

    threads = [threading.Thread(target=add, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert averages.pop() == {"x": sum(values) / len(values), "y": 1000.0 * (n - 1)}


def test_no_value_falls_between_two_pops():
    averages = metrics.Averages()
    n = 1009

    def add():
        for i in range(n):
            averages.add_max(**{f"value{i}": Slow(i)})

    thread = threading.Thread(target=add)
    thread.start()
    found, deadline = [], time.monotonic() + DEADLINE_S
    while True:
        alive = thread.is_alive()
        found += [value for value in averages.pop().values() if value is not None]
        if not alive:
            break
        assert time.monotonic() < deadline
    assert found == [float(i) for i in range(n)]


def test_episode_stats_are_over_the_last_window_of_games():
    stats = metrics.EpisodeStats(window=3)
    assert stats.games == 0
    assert stats.mean_return is stats.mean_step is stats.mean_life_return is None
    stats.add_games(np.float32([1, 2]), np.float32([10, 20]))
    assert (stats.games, stats.mean_return, stats.mean_step) == (2, 1.5, 15.0)
    assert stats.mean_life_return is None
    stats.add_games([6, 7], [30, 40])
    assert (stats.games, stats.mean_return, stats.mean_step) == (4, 5.0, 30.0)
    stats.add_episodes(np.float32([1, 2, 3, 4]))
    assert stats.mean_life_return == 3.0


def test_best_is_the_highest_mean_over_a_full_window():
    stats = metrics.EpisodeStats(window=3)
    stats.add_games([100, 50], [1, 1])
    assert stats.best_mean_return is None
    stats.add_games([0], [1])
    assert stats.best_mean_return == 50.0
    stats.add_games([10, 10, 11, -90], [1] * 4)
    assert stats.best_mean_return == 50.0
    stats.add_games([1000], [1])
    assert stats.best_mean_return == pytest.approx((11 - 90 + 1000) / 3)


def test_games_need_as_many_returns_as_steps():
    with pytest.raises(ValueError, match="zip"):
        metrics.EpisodeStats().add_games([1.0, 2.0], [3])


def test_episode_stats_come_back_exactly_through_json():
    rng = np.random.default_rng(5)
    stats, copy = metrics.EpisodeStats(), metrics.EpisodeStats()
    copy.add_games([-1.0], [1])  # To be forgotten.
    for num_games in (13, 101, 7):
        stats.add_games(
            rng.normal(size=num_games).astype(np.float32),
            rng.integers(1, 10_000, num_games),
        )
        stats.add_episodes(rng.normal(size=3 * num_games))
        copy.restore(json.loads(json.dumps(stats.state(), allow_nan=False)))
        for s in (stats, copy):
            s.add_games([0.1, 0.2], [3, 4])
        assert copy.state() == stats.state()
        for name in ("games", "mean_return", "mean_step", "mean_life_return"):
            assert getattr(copy, name) == getattr(stats, name)
        assert copy.best_mean_return == stats.best_mean_return


def test_rss_is_that_of_this_process():
    assert 10 < metrics.rss_mb() < 100_000


# --------------------------------------------------------------------------- out.log


def test_records_go_to_stderr_and_are_appended_to_out_log(tmp_path, capsys):
    for text in ("first start", "second start"):
        with metrics.setup_logging(tmp_path):
            logging.getLogger("some.module").info(text)
            logging.debug("not shown")
    lines = (tmp_path / "out.log").read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", x) for x in lines] == [
        "INFO    first start",
        "INFO    second start",
    ]
    assert capsys.readouterr().err.splitlines() == lines


def test_setting_up_twice_shows_a_record_once(tmp_path, capsys):
    outer = metrics.setup_logging(tmp_path)
    with metrics.setup_logging(tmp_path):
        logging.info("once")
    outer.close()
    assert capsys.readouterr().err.count("once") == 1
    assert (tmp_path / "out.log").read_text().count("once") == 1


def test_closing_leaves_the_root_logger_as_it_was(tmp_path):
    root = logging.getLogger()
    before = list(root.handlers), root.level, warnings.showwarning
    with metrics.setup_logging(tmp_path, verbose=True):
        assert root.level == logging.DEBUG
    assert (list(root.handlers), root.level, warnings.showwarning) == before


def test_without_a_run_directory_records_go_to_stderr_only(capsys):
    with metrics.setup_logging(None):
        logging.warning("hello")
    assert capsys.readouterr().err.endswith("WARNING hello\n")


def test_warnings_are_in_out_log(tmp_path):
    with metrics.setup_logging(tmp_path):
        warnings.warn("a shape changed", stacklevel=1)
    assert "a shape changed" in (tmp_path / "out.log").read_text()


def test_the_exception_that_ends_a_run_is_in_out_log(tmp_path, capsys):
    def broken():
        raise FloatingPointError("the loss is not finite")

    with pytest.raises(FloatingPointError):
        with metrics.setup_logging(tmp_path):
            broken()
    text = (tmp_path / "out.log").read_text()
    assert "FloatingPointError: the loss is not finite" in text
    assert "in broken" in text
    assert capsys.readouterr().err == ""  # The program itself shows it, as the last.


# ----------------------------------------------------------------------- status line


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; set `clock.now`."""
    clock = SimpleNamespace(now=1000.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(metrics, "time", fake)
    return clock


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def test_plain_lines_come_at_once_and_then_every_ten_seconds(caplog, clock):
    caplog.set_level(logging.INFO)
    with metrics.StatusLine(1000) as status:
        for second in range(0, 23, 2):
            clock.now = 1000.0 + second
            status.update(second, 4 * second, 1.0, None)
            assert len(caplog.records) == 1 + second // 10
    # The last update is shown at the end.
    assert [m.split()[1] for m in messages(caplog)] == [
        "0/1.00k",
        "10/1.00k",
        "20/1.00k",
        "22/1.00k",
    ]


def test_a_plain_line_says_everything(caplog, clock):
    caplog.set_level(logging.INFO)
    with metrics.StatusLine(50_000_000) as status:
        status.update(
            1_234_000, 4_936_000, 1732.4, -20.346, 2.14, "env-bound 71 %", restarts=3
        )
    assert messages(caplog) == [
        "step 1.23M/50.0M  2.5%  4.94M frames  1,732 SPS  return(100) -20.35  lag 2.1"
        "  env-bound 71 %  ETA 7h49m  restarts 3"
    ]


def test_what_is_not_known_yet_is_left_out_or_a_dash(caplog, clock):
    caplog.set_level(logging.INFO)
    with metrics.StatusLine(700) as status:
        status.update(0, 0, 0.0, None, None, None, restarts=None)
    assert messages(caplog) == [
        "step 0/700  0.0%  0 frames  0 SPS  return(100) -  ETA -"
    ]


def test_force_color_does_not_make_a_file_a_terminal(caplog, clock, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    caplog.set_level(logging.INFO)
    with metrics.StatusLine(700) as status:
        status.update(7, 28, 1.0, None)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00k"),
        (45_640, "45.6k"),
        (9_996, "10.0k"),
        (99_960, "100k"),
        (999_400, "999k"),
        (999_600, "1.00M"),
        (50_000_000, "50.0M"),
        (200_000_000, "200M"),
        (8_000_000_000, "8.00G"),
        (2e12, "2000G"),
    ],
)
def test_counts_are_short(number, text):
    assert metrics._short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3725, "1h02m"), (180_000, "2d02h")],
)
def test_durations_are_short(seconds, text):
    assert metrics._duration(seconds) == text


LIVE_LINE = """
import threading
run_dir = Path(sys.argv[1])
with metrics.setup_logging(run_dir), metrics.StatusLine(1000) as status:
    for step in range(100, 800, 100):
        status._shown_at = -1.0  # As if enough time had gone by.
        status.update(step, 4 * step, 50.0, -3.25, 1.5, "env-bound 71 %")
        if step == 300:
            logging.getLogger("x").warning("an actor died")
        if step == 500:
            print("printed by the user")
        assert threading.active_count() == 1, threading.enumerate()
print("after the line")
"""


def run_in_terminal(code, *args, columns, stdout_to_terminal=True):
    """Run Python code in a terminal; return its status and what the terminal got."""
    parent, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    child = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, *map(str, args)],
        cwd=ROOT,
        env=env | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
        stdin=subprocess.DEVNULL,
        stdout=terminal if stdout_to_terminal else subprocess.PIPE,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        output = read_terminal(parent)
        stdout = child.stdout.read().decode() if child.stdout else ""
        return child.wait(DEADLINE_S), output, stdout
    finally:
        child.kill()
        child.wait(DEADLINE_S)
        os.close(parent)
        if child.stdout:
            child.stdout.close()


def read_terminal(fd, until=None):
    """Read until everybody has closed the terminal, or `until` is there."""
    data, deadline = b"", time.monotonic() + DEADLINE_S
    while until is None or until not in data:
        left = deadline - time.monotonic()
        assert left > 0 and select.select([fd], [], [], left)[0], data
        try:
            chunk = os.read(fd, 65536)
        except OSError:  # Linux says so at the end.
            break
        if not chunk:
            break
        data += chunk
    return data.decode()


def screen(output):
    """Return the lines that a terminal shows after `output`, and all it ever showed."""
    lines, ever = [""], []
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if token == "\n":
            lines.append("")
        elif token == "\x1b[2K":
            lines[-1] = ""
        elif token == "\x1b[1A":
            lines.pop()
        elif token[0] not in "\x1b\r":
            lines[-1] += token
            ever.append(lines[-1])
    return [line.rstrip() for line in lines], ever


def test_a_terminal_shows_one_live_line_below_what_is_logged_and_printed(tmp_path):
    status, output, _ = run_in_terminal(LIVE_LINE, tmp_path, columns=130)
    assert status == 0, output
    lines, ever = screen(output)
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING  an actor died", lines[0])
    assert lines[1:] == [
        "printed by the user",
        "step 700/1.00k  ━━━━━━━─── 70.0%  2.80k frames  50 SPS  return(100) -3.25"
        "  lag 1.5  env-bound 71 %  ETA 6s",
        "after the line",
        "",
    ]
    assert any(line.startswith("step 100/") for line in ever)
    assert "an actor died" in (tmp_path / "out.log").read_text()


def test_a_narrow_terminal_shows_the_most_important_parts_in_one_line(tmp_path):
    columns = 59
    status, output, _ = run_in_terminal(LIVE_LINE, tmp_path, columns=columns)
    assert status == 0, output
    lines, ever = screen(output)
    assert lines[2] == "step 700/1.00k  50 SPS  return(100) -3.25  ETA 6s"
    drawn = [line for line in ever if line.startswith("step")]
    assert max(map(len, drawn)) < columns


def test_a_terminal_narrower_than_the_shortest_line_does_not_wrap(tmp_path):
    columns = 23
    status, output, _ = run_in_terminal(LIVE_LINE, tmp_path, columns=columns)
    assert status == 0, output
    drawn = [line for line in screen(output)[1] if line.startswith("step")]
    assert drawn and max(map(len, drawn)) <= columns
    assert "\x1b[1A" not in output  # The cursor goes up if the line takes two.


def test_what_is_printed_goes_to_the_file_that_stdout_is(tmp_path):
    status, output, stdout = run_in_terminal(
        LIVE_LINE, tmp_path, columns=130, stdout_to_terminal=False
    )
    assert status == 0, output
    assert stdout == "printed by the user\nafter the line\n"
    assert "step 700/" in output


def test_a_run_outlives_its_terminal(tmp_path):
    code = """
with metrics.setup_logging(Path(sys.argv[1])), metrics.StatusLine(1000) as status:
    status.update(100, 400, 50.0, None)
    sys.stdin.read()  # Until the terminal is gone.
    for step in (200, 300):
        status._shown_at = -1.0
        status.update(step, 4 * step, 50.0, None)
    logging.info("still here")
os._exit(7)
"""
    parent, terminal = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"TERM": "xterm"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        read_terminal(parent, until=b"step 100/")
        os.close(parent)
        child.stdin.close()
        assert child.wait(DEADLINE_S) == 7
    finally:
        child.kill()
        child.wait(DEADLINE_S)
    assert "still here" in (tmp_path / "out.log").read_text()


def test_a_terminal_that_cannot_be_written_to_is_left_alone(monkeypatch):
    class Broken(io.StringIO):
        def isatty(self):
            return True

        def write(self, text):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(metrics, "_log_console", lambda: Console(file=Broken()))
    monkeypatch.setenv("TERM", "xterm")
    before = sys.stdout, sys.stderr
    with metrics.StatusLine(1000) as status:
        for step in (100, 200):
            status._shown_at = -math.inf
            status.update(step, 4 * step, 50.0, None)
    assert (sys.stdout, sys.stderr) == before


# ------------------------------------------------------------------------- meta.json


def test_meta_says_what_ran_where_from_which_code(tmp_path):
    flags = {"env": "Catch", "info_keys": ("a", "b"), "savedir": Path("x"), "seed": 3}
    metrics.write_meta(tmp_path, flags=flags, extra={"step": 0, "first_env_seeds": [7]})
    meta = metrics.read_meta(tmp_path)
    assert meta["flags"] == {
        "env": "Catch",
        "info_keys": ["a", "b"],
        "savedir": "x",
        "seed": 3,
    }
    assert meta["first_env_seeds"] == [7]
    assert meta["versions"]["torch"] == torch.__version__
    assert meta["versions"]["python"] == sys.version.split()[0]
    assert {"gymnasium", "ale-py", "numpy"} < meta["versions"].keys()
    assert meta["cpu_count"] == os.cpu_count()
    assert meta["command"][1:] == sys.orig_argv[1:]
    assert meta["command"][0] == Path(sys.orig_argv[0]).name
    assert {"host", "platform", "commit", "dirty"} < meta.keys()


def test_meta_lists_every_start(tmp_path):
    metrics.write_meta(tmp_path, flags={"seed": 1}, extra={"step": 0})
    metrics.write_meta(tmp_path, flags={"seed": 2}, extra={"step": 500})
    meta = metrics.read_meta(tmp_path)
    assert [start["step"] for start in meta["starts"]] == [0, 500]
    assert all(start["time"].endswith("+00:00") for start in meta["starts"])
    assert meta["flags"] == {"seed": 2}


def test_nothing_of_the_environment_is_in_any_file(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "planted-3f9a")
    run_dir = metrics.prepare_run_dir(tmp_path, "run")
    with metrics.setup_logging(run_dir):
        metrics.write_meta(run_dir, flags={"seed": 1}, extra={"step": 0})
        write_rows(run_dir, [1, 2])
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len(files) >= 6
    for path in files:
        assert b"planted-3f9a" not in path.read_bytes(), path
        assert b"WANDB_API_KEY" not in path.read_bytes(), path


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Run git in a new checkout that core/metrics.py seems to lie in."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # Tests may run in a hook of git.
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "metrics.py").write_text("1")
    monkeypatch.setattr(metrics, "__file__", str(folder / "metrics.py"))

    def run(*args):
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        return subprocess.run(
            ["git", *who, *args],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        ).stdout.strip()

    run("init", "-q")
    return run


def test_meta_names_the_commit_and_whether_files_differ_from_it(git, tmp_path):
    git("add", ".")
    git("commit", "-q", "-m", "x")
    (tmp_path / "checkout" / "logs").write_text("untracked")
    for dirty in (False, True):
        metrics.write_meta(tmp_path, flags={}, extra={})
        meta = metrics.read_meta(tmp_path)
        assert meta["commit"] == git("rev-parse", "HEAD")
        assert meta["dirty"] is dirty
        (tmp_path / "checkout" / "metrics.py").write_text("2")


def test_the_commit_of_a_checkout_around_an_installed_copy_is_not_ours(git, tmp_path):
    (tmp_path / "checkout" / "theirs.py").write_text("1")
    git("add", "theirs.py")
    git("commit", "-q", "-m", "x")
    metrics.write_meta(tmp_path, flags={}, extra={})
    assert metrics.read_meta(tmp_path)["commit"] is None


def test_without_git_there_is_no_commit_but_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    metrics.write_meta(tmp_path, flags={}, extra={})
    assert metrics.read_meta(tmp_path)["commit"] is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"flags": {}}'])
def test_a_meta_file_that_is_missing_or_damaged_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "meta.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "meta.json"))):
        metrics.read_meta(tmp_path)


# --------------------------------------------------------------------- run directory


def test_latest_points_to_the_run_prepared_last(tmp_path):
    for xpid in ("one", "two", "two", "one"):
        run_dir = metrics.prepare_run_dir(tmp_path / "runs", xpid)
        assert run_dir.is_dir()
        assert os.readlink(tmp_path / "runs" / "latest") == xpid
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert names == {"one", "two", "latest", ".locks"}


def test_the_run_named_latest_is_the_latest_run(tmp_path):
    run_dir = metrics.prepare_run_dir(tmp_path, "one")
    assert metrics.prepare_run_dir(tmp_path, "latest") == run_dir
    assert os.readlink(tmp_path / "latest") == "one"


def test_a_folder_in_the_place_of_latest_is_left_alone(tmp_path, caplog):
    (tmp_path / "latest").mkdir()
    assert metrics.prepare_run_dir(tmp_path, "one").is_dir()
    assert not (tmp_path / "latest").is_symlink()
    assert "latest" in caplog.text
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"one", "latest", ".locks"}


def test_what_a_killed_process_was_writing_is_removed_at_the_next_start(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    nobody = 999_999_999  # Above the largest process id that Linux gives.
    (run_dir / f".meta.json.tmp-{nobody}").write_text("{")
    (tmp_path / f".latest.tmp-{nobody}").symlink_to("run")
    other_run = tmp_path / f".latest.tmp-{os.getppid()}"  # At work on it now.
    other_run.symlink_to("run")
    metrics.prepare_run_dir(tmp_path, "run")
    assert {path.name for path in run_dir.iterdir()} == {".lock"}
    assert {path.name for path in tmp_path.iterdir()} == {
        "run",
        "latest",
        ".locks",
        other_run.name,
    }


# The owner forks a child that outlives it, as an actor may for a moment.
LOCK_OWNER = """
metrics.prepare_run_dir(Path(sys.argv[1]), "run")
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("locked", flush=True)
signal.pause()
"""


@pytest.fixture
def owner(tmp_path):
    """A process that holds the lock of tmp_path/run."""
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + LOCK_OWNER, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert select.select([process.stdout], [], [], DEADLINE_S)[0]
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()
        process.stdin.close()  # Ends the child.


def test_a_run_directory_in_use_is_refused_with_the_pid(tmp_path, owner):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(metrics.RunDirBusy, match=rf"process {owner.pid} on .*--xpid"):
        metrics.prepare_run_dir(tmp_path, "run")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_lock_ends_with_its_owner_even_if_killed(tmp_path, owner):
    owner.kill()
    owner.wait(DEADLINE_S)
    run_dir = metrics.prepare_run_dir(tmp_path, "run")  # The forked child still lives.
    assert (run_dir / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_deleted_folder_is_made_anew_and_stays_locked(tmp_path):
    def start_another() -> str:
        code = "metrics.prepare_run_dir(Path(sys.argv[1]), 'run')"
        return run_child(code, tmp_path).stderr

    run_dir = metrics.prepare_run_dir(tmp_path, "run")
    with metrics.setup_logging(run_dir):
        metrics.write_meta(run_dir, flags={"seed": 7}, extra={"step": 0})
        meta = metrics.read_meta(run_dir)
        with metrics.RunLog(run_dir) as run_log:
            run_log.log({"step": 100, "sps": 1})
            shutil.rmtree(run_dir)
            assert "RunDirBusy" in start_another() and not run_dir.exists()
            run_log.log({"step": 200, "sps": 2})
            assert "RunDirBusy" in start_another()
            os.remove(run_dir / "out.log")  # This one alone.
            run_log.log({"step": 300, "sps": 3})
            logging.warning("the latest")
    assert metrics.read_meta(run_dir) == meta
    assert steps_of(run_dir) == [200, 300]
    assert read_rows(run_dir / "fields.csv")
    said = (run_dir / "out.log").read_text()
    assert f"made anew without what was in there: {run_dir}/out.log." in said
    assert "the latest" in said
    assert event_steps(run_dir) == [200, 300]


def test_the_same_process_may_prepare_its_run_again(tmp_path):
    metrics.prepare_run_dir(tmp_path, "run")
    assert metrics.prepare_run_dir(tmp_path, "run").name == "run"
    other = run_child("metrics.prepare_run_dir(Path(sys.argv[1]), 'run')", tmp_path)
    assert "RunDirBusy" in other.stderr


def test_a_copy_of_a_runs_folder_is_another_run(tmp_path):
    (tmp_path / "x").mkdir()
    run_id = metrics.run_id({}, tmp_path / "x")
    recorded = {"run_id": run_id}
    assert metrics.run_id(recorded, tmp_path / "x") == run_id
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    (tmp_path / "x").rename(tmp_path / "z")
    assert metrics.run_id(recorded, tmp_path / "z") == run_id
    copied = metrics.run_id(recorded, tmp_path / "y")
    assert copied != run_id
    assert metrics.run_id({"run_id": copied}, tmp_path / "y") == copied
