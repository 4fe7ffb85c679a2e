# SPDX-License-Identifier: Apache-2.0
"""`make coverage` counts what a program's child processes run."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import coverage
import pytest

from core.running import unit

ROOT = Path(__file__).parents[2]
PROGRAM = """
import multiprocessing
from core.running import unit

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    worker = unit.Unit(context, print, (), name="worker")
    worker.start()
    worker.join()
"""


def lines_of(function, *texts):
    """Return the numbers of a function's lines that have one of these texts."""
    lines, first = inspect.getsourcelines(function)
    found = [n for n, line in enumerate(lines, first) if any(t in line for t in texts)]
    assert len(found) == len(texts)
    return set(found)


@pytest.mark.skipif(not unit.HAS_GUARD, reason="guards are Linux's")
def test_a_worker_and_its_guard_are_counted(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    # Not the session's own, when `make coverage` runs this.
    env = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
    env |= {"COVERAGE_FILE": str(tmp_path / "data"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "coverage"]
    config = f"--rcfile={ROOT / 'pyproject.toml'}"
    for words in (["run", config, "program.py"], ["combine", config, "--quiet"]):
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
    data = coverage.CoverageData(str(tmp_path / "data"))
    data.read()
    counted = set(data.lines(unit.__file__) or [])
    assert lines_of(unit._run, "os.environ[MARK] = mark", "target(*args)") <= counted
    assert lines_of(unit._guard, "status = _reap(worker)", "os._exit(code)") <= counted
