# SPDX-License-Identifier: Apache-2.0
"""docs/reliability.md names every fault and every status, tests/faults.md its tests.

Every figure is in docs/reliability.md and in results/reliability/README.md.
"""

import json
import re
from pathlib import Path

from core.errors import Exit
from tools.nemesis.__main__ import FIGURES

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "reliability.md").read_text()
TESTS = (REPOSITORY / "tests" / "faults.md").read_text()
RESULTS = REPOSITORY / "results" / "reliability"
NAMED = re.compile(r"`([\w/]+\.(?:py|cc))::(\w+)`")


def test_every_test_that_is_named_exists():
    named = NAMED.findall(TESTS)
    assert len(named) > 100
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(
            rf"^def {name}\(" if file.endswith(".py") else rf"^TEST\({name}\)",
            (REPOSITORY / file).read_text(),
            re.MULTILINE,
        )
    ]
    assert missing == []


def test_every_fault_has_a_row_with_a_test():
    faults = re.findall(r"^\| (\d+) \| .* \| .* \|$", TEXT, re.MULTILINE)
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", TESTS, re.MULTILINE)
    assert len(faults) >= 60
    assert [number for number, _ in rows] == faults
    assert faults == [str(i + 1) for i in range(len(faults))]
    for number, tests in rows:
        assert NAMED.search(tests), number


def test_every_exit_status_is_explained():
    for status in Exit:
        assert re.search(rf"^\| {int(status)} \| \w", TEXT, re.MULTILINE), status


def test_every_figure_is_explained_and_kept():
    kept = (RESULTS / "README.md").read_text()
    for name in FIGURES:
        assert f"\n| `{name}` | " in TEXT, name
        assert f"\n| [{name}]({name}.json) | " in kept, name


def test_the_fuzzed_inputs_are_as_many_as_were_counted():
    kept = json.loads((RESULTS / "hostile.json").read_text())
    count = f"{kept['injected']['executions']:,}"
    assert f" ({count} in " in TEXT
    assert f" {count} fuzz executions" in (RESULTS / "README.md").read_text()
