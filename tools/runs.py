# SPDX-License-Identifier: Apache-2.0
"""Read the folder of a run, which may be in progress."""

import csv
from pathlib import Path
from typing import Any


def load(run_dir: Path) -> Any:
    """Return the newest checkpoint, a `core.running.checkpoint.Checkpoint`."""
    from core.running import checkpoint  # It imports torch, which a log does not need.

    found = checkpoint.load(run_dir / "checkpoints")
    assert found is not None, f"no checkpoint in {run_dir}"
    return found


def log_rows(run_dir: Path) -> list[dict[str, str]]:
    """Return the whole rows of the log, without one that is being written."""
    path = run_dir / "logs.csv"
    text = path.read_text() if path.exists() else ""
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def curve(run_dir: Path) -> list[tuple[float, int]]:
    """Return the time in seconds and the step of each whole row of the log."""
    return [(float(row["time_s"]), int(row["step"])) for row in log_rows(run_dir)]


def num_rows(run_dir: Path) -> int:
    path = run_dir / "logs.csv"
    return max(path.read_bytes().count(b"\n") - 1, 0) if path.exists() else 0
