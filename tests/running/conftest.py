# SPDX-License-Identifier: Apache-2.0
"""Shared helpers: rows of log files, the root logger as before."""

import csv
import logging

import pytest

from core.columns import FIELDS
from core.running import logs

DEADLINE_S = 30.0  # Of every wait for another thread.

COLUMNS = [field.name for field in FIELDS]


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
    with logs.RunLog(run_dir, **options) as run_log:
        for step in steps:
            run_log.log({"step": step, "frames": 4 * step, "sps": step / 7})


def steps_of(run_dir, name="logs.csv"):
    return [int(row["step"]) for row in read_rows(run_dir / name)]


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
