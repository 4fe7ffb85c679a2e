# SPDX-License-Identifier: Apache-2.0
"""The result of a figure, as one line of JSON."""

import dataclasses
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.running import folder
from core.running.machine import num_cores

REPOSITORY = Path(__file__).parents[2]


@dataclasses.dataclass
class Result:
    """The figures of one measurement, and the goals that they miss."""

    injected: dict[str, int]  # Faults, by kind.
    asked: dict[str, int]  # How many there should have been.
    figures: dict[str, Any]
    failures: list[str] = dataclasses.field(default_factory=list)
    late: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        for kind, number in self.asked.items():
            if self.injected.get(kind, 0) < number:
                self.failures.append(
                    f"injected {self.injected.get(kind, 0)} {kind}, asked for {number}"
                )

    def require(self, holds: bool, what: str) -> None:
        """Record a missed goal. `what` has the expected and the actual value."""
        if not holds:
            self.failures.append(what)

    def require_time(self, holds: bool, what: str) -> None:
        """Record a missed time limit, which may be due to a busy machine."""
        if not holds:
            self.late.append(what)


def quantile(values: Sequence[float], part: float) -> float:
    """Return the least of `values` that is >= the share `part` of them."""
    ordered = sorted(values)
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and largest of some seconds."""
    if not values:
        return {}
    return {
        "p50": round(statistics.median(values), 3),
        "p99": round(quantile(values, 0.99), 3),
        "max": round(max(values), 3),
    }


def to_json(figure: str, command: str, result: Result, *, seconds: float) -> str:
    return json.dumps(
        {
            "figure": figure,
            "passed": not (result.failures or result.late),
            "failures": result.failures,
            "late": result.late,
            "injected": result.injected,
            "asked": result.asked,
            **result.figures,
            "seconds": round(seconds),  # How long the command took.
            "command": command,
            **folder.describe_code(),
            "machine": f"{num_cores()} cores, {platform.machine()}, "
            f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 30} GiB",
            "versions": folder.versions(),
        }
    )
