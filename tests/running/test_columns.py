# SPDX-License-Identifier: Apache-2.0
"""The columns of logs.csv and their glossary, fields.csv."""

from core import columns
from core.running import logs
from tests.running.conftest import COLUMNS, read_rows


def test_info_keys_are_the_last_columns(tmp_path):
    logs.RunLog(tmp_path, info_keys=("lives", "x y")).close()
    header = (tmp_path / "logs.csv").read_text().rstrip("\n").split(",")
    assert header == [*COLUMNS, "info_lives", "info_x y"]


def test_fields_csv_explains_every_column(tmp_path):
    logs.RunLog(tmp_path, info_keys=("lives",)).close()
    glossary = read_rows(tmp_path / "fields.csv")
    assert [row["name"] for row in glossary] == [*COLUMNS, "info_lives"]
    assert all(row["unit"] and row["meaning"] for row in glossary)


def test_each_column_of_several_learners_is_a_sum_or_the_largest_or_a_mean():
    """A mean is over the learners that have the column."""
    rows = [
        {"streams": 2, "env_step_p99_ms": 4.0, "learner": 0.5},
        {"streams": 3, "env_step_p99_ms": 7.0},
        {"learner": 0.25},
    ]
    expected = {"streams": 5, "env_step_p99_ms": 7.0, "learner": 0.375}
    assert columns.combine(rows) == expected
