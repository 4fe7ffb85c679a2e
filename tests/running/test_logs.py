# SPDX-License-Identifier: Apache-2.0
"""RunLog: logs.csv, its resume, TensorBoard and Weights & Biases."""

import errno
import logging
import math
import os
import random
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from core.algorithm import counters
from core.running import log_setup, logs
from tests.running.conftest import (
    COLUMNS,
    event_steps,
    read_events,
    read_rows,
    steps_of,
    write_rows,
)


def test_what_is_missing_none_or_nan_is_a_blank_cell(tmp_path):
    with logs.RunLog(tmp_path, info_keys=("lives",)) as run_log:
        run_log.log({"step": 3, "sps": None, "entropy": math.nan, "info_lives": 2.5})
    (row,) = read_rows(tmp_path / "logs.csv")
    assert {k: v for k, v in row.items() if v} == {"step": "3", "info_lives": "2.5"}


def test_numbers_come_back_from_the_file(tmp_path):
    with logs.RunLog(tmp_path) as run_log:
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
    run_log = logs.RunLog(tmp_path)
    run_log.log({"step": 5})
    assert steps_of(tmp_path) == [5]
    run_log.close()


NOVELTY = counters.Field("novelty_loss", "1", "error of the predictor")


def test_a_name_that_is_no_column_becomes_one(tmp_path):
    with logs.RunLog(tmp_path) as run_log:
        run_log.log({"step": 1})
        run_log.log({"step": 2, NOVELTY: 0.5, 'a,"b"\n': 7})
        run_log.log({"step": 3, NOVELTY: 0.25})
    rows = read_rows(tmp_path / "logs.csv")
    assert [*rows[0]] == [*COLUMNS, "novelty_loss", "a  b  "]
    assert [r["step"] for r in rows] == ["1", "2", "3"]
    assert [r["novelty_loss"] for r in rows] == ["", "0.5", "0.25"]
    assert [r["a  b  "] for r in rows] == ["", "7", ""]
    *_, described, other = read_rows(tmp_path / "fields.csv")
    assert counters.Field(**described) == NOVELTY
    assert other == {"name": "a  b  ", "unit": "-", "meaning": "-"}
    assert not list(tmp_path.glob("logs.*.csv"))  # Nothing is lost, so no old file.


def test_a_disk_that_takes_no_new_column_stops_nothing(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise OSError(28, "No space left on device")

    with logs.RunLog(tmp_path) as run_log:
        monkeypatch.setattr(logs, "_prepare_csv", fail)
        for step in (1, 2):
            run_log.log({"step": step, NOVELTY: 0.5})
    assert steps_of(tmp_path) == [1, 2]
    assert caplog.text.count("Cannot add novelty_loss to logs.csv: [Errno 28]") == 1


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
        logs._prepare_csv(path, COLUMNS, checkpoint)
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
    with logs.RunLog(tmp_path, info_keys=("lives", "old")) as run_log:
        run_log.log({"step": 10, "info_lives": 3, "info_old": 5, NOVELTY: 0.5})
    with logs.RunLog(tmp_path, info_keys=("new", "lives"), resume_step=10) as log:
        log.log({"step": 20, "info_new": 7})
    rows = read_rows(tmp_path / "logs.csv")
    names = ("step", "info_new", "info_lives", "info_old", "novelty_loss")
    cells = [tuple(r[name] for name in names) for r in rows]
    assert cells == [("10", "", "3", "5", "0.5"), ("20", "7", "", "", "")]
    assert counters.Field(**read_rows(tmp_path / "fields.csv")[-1]) == NOVELTY


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
        logs._prepare_csv(tmp_path / "logs.csv", COLUMNS, 10)
    assert (tmp_path / "logs.csv").read_bytes() == old
    assert not list(tmp_path.glob(".*tmp*"))


@pytest.mark.parametrize("columns", [COLUMNS, [*COLUMNS, "more"], COLUMNS[:-1]])
@pytest.mark.parametrize("resume_step", [4_000, 3_999, None])
def test_a_resume_does_not_hold_the_file_in_memory(tmp_path, columns, resume_step):
    path = tmp_path / "logs.csv"
    cells = ",1.2345678" * (len(COLUMNS) - 1)
    rows = "".join(f"{step}{cells}\n" for step in range(1, 4_001))
    path.write_text(",".join(COLUMNS) + "\n" + rows)
    size = path.stat().st_size
    tracemalloc.start()
    logs._prepare_csv(path, columns, resume_step)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 10
    assert len(steps_of(tmp_path)) == (resume_step or 0)


def test_tensorboard_reads_the_same_numbers_as_the_csv(tmp_path):
    rng = random.Random(3)
    with logs.RunLog(tmp_path) as run_log:
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


def test_tensorboard_shows_all_starts_although_the_clock_was_set_back(
    tmp_path, monkeypatch
):
    write_rows(tmp_path, [10, 20])
    now = time.time()
    monkeypatch.setattr(logs.time, "time", lambda: now - 3600)
    write_rows(tmp_path, [30], resume_step=20)
    assert event_steps(tmp_path) == [10, 20, 30]


@pytest.mark.parametrize("error", [errno.EACCES, errno.ENOTCONN, errno.EIO])
def test_a_folder_that_cannot_be_looked_at_for_a_moment_stops_nothing(
    tmp_path, monkeypatch, error
):
    (tmp_path / "meta.json").write_text("{}")
    stat = Path.stat

    def fail(self, **kwargs):
        if self.parent == tmp_path:
            raise OSError(error, os.strerror(error))
        return stat(self, **kwargs)

    with logs.RunLog(tmp_path) as run_log:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", fail)
            run_log.log({"step": 5})
        run_log.log({"step": 6})
    assert steps_of(tmp_path) == [5, 6]


def test_tensorboard_forgets_everything_when_a_run_starts_from_scratch(tmp_path):
    write_rows(tmp_path, [0, 10])
    write_rows(tmp_path, [5])
    assert event_steps(tmp_path) == [5]


def test_threads_begin_with_the_first_row_and_end_with_the_log(tmp_path):
    """Actors are forked before the first row, and a fork copies no threads."""
    before = threading.enumerate()
    with log_setup.setup_logging(tmp_path), logs.RunLog(tmp_path) as run_log:
        logging.getLogger().warning("said before")
        assert threading.enumerate() == before
        run_log.log({"step": 1})
        new = [thread.name for thread in threading.enumerate() if thread not in before]
        assert len(new) == 3 and {"write logs.csv", "write out.log"} < set(new)
        run_log.log({"step": 2})
        assert len(threading.enumerate()) == len(before) + 3
    assert threading.enumerate() == before
