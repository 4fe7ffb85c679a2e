# SPDX-License-Identifier: Apache-2.0
"""The columns of logs.csv; columns.csv has the name, unit and meaning of each.

The loss may add others.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import ConfigError


class Field(NamedTuple):
    """A column of logs.csv."""

    name: str
    unit: str
    meaning: str


# Not allowed in the name of a column: logs.csv is read and written line by line.
NOT_IN_A_NAME = re.compile('[\n\r",]')


def read_fields(path: Path) -> tuple[Field, ...]:
    """Return the columns that columns.csv, or the fields.csv of a run, describes."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(Field(**row) for row in csv.DictReader(file))


# In their order. "Since the last row" means over all updates between two rows. A test
# holds the table in docs/logs-and-columns.md equal to this.
FIELDS = read_fields(Path(__file__).with_suffix(".csv"))
NAMES = frozenset(field.name for field in FIELDS)


# How columns about actors and servers are combined over several learners.
SUMS = {
    *("buffers_full", "actor_restarts", "rollouts_discarded", "streams"),
    *("server_restarts", "reconnects", "steps_discarded", "learner_queue"),
}
MAXIMA = {"env_step_p99_ms"}


def combine(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum, maximum or mean of each column over several learners."""
    result = {}
    for name in {name: None for row in rows for name in row}:
        values = [row[name] for row in rows if name in row]
        if name in SUMS:
            result[name] = sum(values)
        elif name in MAXIMA:
            result[name] = max(values)
        else:
            result[name] = sum(values) / len(values)
    return result


def info_field(key: str) -> Field:
    """Return the column for one of --info_keys."""
    return Field(
        f"info_{key}", "-", f"info[{key!r}] of the environment, mean since the last row"
    )


def check_names(keys: Iterable[Any], taken: Iterable[str]) -> None:
    """Check the names of the columns that a loss adds to the log.

    Args:
      keys: names, or a `Field` each.
      taken: the names of other columns, besides those of FIELDS.

    Raises:
      ConfigError: a name is that of another column, or has a comma, a double quote or a
        line break.
    """
    for name in (key.name if isinstance(key, Field) else key for key in keys):
        if name in NAMES or name in taken:
            raise ConfigError(
                f"the log has two columns with the name {name}: give the one in the "
                "loss's extra another name"
            )
        if NOT_IN_A_NAME.search(name):
            raise ConfigError(
                f"the loss's extra has a column with the name {name!r}: expected a "
                "name without commas, double quotes and line breaks"
            )
