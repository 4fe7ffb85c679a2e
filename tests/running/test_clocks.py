# SPDX-License-Identifier: Apache-2.0
"""No time limit follows the clock on the wall, which somebody may set at any moment."""

import ast
import re
import time
from pathlib import Path

import pytest

from core.environments import toys

REPOSITORY = Path(__file__).parents[2]
# Where the wall clock is read: to name or to date something, for people.
FOR_PEOPLE = {
    ("core/remote/places.py", "strftime"),  # Since when a stream has its place.
    ("core/running/evaluation.py", "now"),  # The name of a table of results.
    ("core/running/common_flags.py", "strftime"),  # The default name of a run.
    ("core/running/dashboard.py", "time"),  # What TensorBoard calls wall time.
    ("core/running/dashboard.py", "time_ns"),  # The name of a file with a video.
    ("core/running/folder.py", "now"),  # When a run was started, in meta.json.
    ("core/running/logs.py", "time"),  # What TensorBoard calls wall time.
}


def wall_clock_calls(path: Path) -> set[tuple[str, str]]:
    names = {"time", "time_ns", "strftime", "ctime", "localtime", "gmtime"}
    calls = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = node.value.id, node.attr
            if (owner == "time" and name in names) or name in ("now", "utcnow"):
                calls.add((str(path.relative_to(REPOSITORY)), name))
        elif isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow"):
            calls.add((str(path.relative_to(REPOSITORY)), node.attr))
    return calls


def test_python_reads_the_wall_clock_for_people_only():
    files = [
        *REPOSITORY.glob("*.py"),
        *REPOSITORY.glob("core/**/*.py"),
        *REPOSITORY.glob("libtorchbeast/**/*.py"),
    ]
    assert len(files) > 20
    assert set().union(*map(wall_clock_calls, files)) == FOR_PEOPLE


def test_cpp_tells_the_wall_clock_to_grpc_only():
    """gRPC takes absolute times, and makes them relative at once."""
    found = 0
    for path in REPOSITORY.glob("csrc/*.[ch]*"):
        text = re.sub(r"\s+", " ", path.read_text())
        for match in re.finditer("system_clock", text):
            before = text[match.start() - 60 : match.start()]
            after = text[match.end() :]
            calls = r"(AsyncNext\( &tag, &ok,|set_deadline\(|grace_.Set\(queue_,)"
            is_told = re.search(calls + " ?std::chrono::$", before)
            assert is_told and after.startswith("::now() +"), (path.name, before)
            found += 1
    assert found


def jumping_env() -> toys.Catch:
    """Catch in a process whose wall clock is set by a day or more at every look."""
    real, looks = time.time, 0

    def jump() -> float:
        nonlocal looks
        looks += 1
        return real() + (-1) ** looks * looks * 86400.0

    time.time = jump
    return toys.Catch()


@pytest.mark.parametrize("mode", ["--serial", "--start_method=fork"])
def test_a_run_goes_on_whatever_the_clock_says(start, tmp_path, mode):
    program = start(
        *("--env", "tests.running.test_clocks:jumping_env", "--xpid", "x", mode),
        *("--num_actors", 2, "--envs_per_actor", 2, "--batch_size", 4),
        *("--unroll_length", 5, "--total_steps", 200, "--stall_timeout_s", 60),
        *("--checkpoint_interval_s", 0, "--log_interval_s", 0),
    )
    assert program.wait() == 0, program.text()
    rows = (tmp_path / "runs" / "x" / "logs.csv").read_text().splitlines()
    times = [float(row.split(",")[2]) for row in rows[1:]]
    assert times == sorted(times) and 0 < times[-1] < 1000
