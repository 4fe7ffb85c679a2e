# SPDX-License-Identifier: Apache-2.0
"""Shared helpers: deadlines, and MonoBeast as a process that starts in no time."""

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEADLINE_S = 60.0  # For anything awaited; a test that needs it all has failed.
POLL_S = 0.005


def wait_until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Poll `condition` until it is true; the only place in the tests that sleeps."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not true within {deadline_s} s: {condition}")
        time.sleep(POLL_S)


class Program:
    """A running `python -m monobeast`, its output in a file."""

    def __init__(self, context, argv: list[str], output: Path):
        self.output = output
        output.touch()
        self.process = context.Process(target=_run_monobeast, args=(argv, str(output)))
        self.process.start()
        self.pid = self.process.pid

    def text(self) -> str:
        return self.output.read_text()

    def wait(self) -> int:
        """Return the exit status."""
        self.process.join(DEADLINE_S)
        assert self.process.exitcode is not None, f"still running:\n{self.text()}"
        return self.process.exitcode

    def wait_for_text(self, text: str) -> None:
        wait_until(lambda: text in self.text() or not self.process.is_alive())
        assert text in self.text(), self.text()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)


def _run_monobeast(argv: list[str], output: str) -> None:
    fd = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    import monobeast

    try:
        status = monobeast.main(argv)
    except SystemExit as error:  # argparse's.
        status = error.code
    sys.stdout.flush()
    # As at the end of a script, children that are left over would be noticed.
    sys.exit(status)


@pytest.fixture(scope="session")
def _context():
    """A fork server that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["monobeast"])
    return context


@pytest.fixture
def start(_context, tmp_path) -> Iterator[Callable[..., Program]]:
    """Start MonoBeast with flags; --savedir is set. Kills what is left at the end."""
    programs: list[Program] = []

    def start(*argv: object) -> Program:
        program = Program(
            _context,
            [str(a) for a in ("--savedir", tmp_path / "runs", *argv)],
            tmp_path / f"out-{len(programs)}.txt",
        )
        programs.append(program)
        return program

    yield start
    for program in programs:
        with contextlib.suppress(ProcessLookupError):
            program.kill()
