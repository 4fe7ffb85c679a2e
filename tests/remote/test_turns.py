# SPDX-License-Identifier: Apache-2.0
"""The streams of a server: when they step one after the other, and when together."""

import threading

import pytest

from core.remote import turns
from core.running.supervise import start_thread
from tests.conftest import DEADLINE_S


class Clocks:
    """Stands for the module `time`. `pass_s` lets time pass."""

    def __init__(self):
        self.cpu_s = self.wall_s = 100.0

    def thread_time(self):
        return self.cpu_s

    def perf_counter(self):
        return self.wall_s

    def pass_s(self, *, cpu_s, wall_s):
        self.cpu_s += cpu_s
        self.wall_s += wall_s


@pytest.fixture
def clocks(monkeypatch):
    clocks = Clocks()
    monkeypatch.setattr(turns, "time", clocks)
    return clocks


def step_together(taken: turns.Turns, wait_s: float) -> bool:
    """Say whether a second stream can step while the first one is in a step."""
    inside, leave = threading.Event(), threading.Event()

    def first():
        with taken.take():
            inside.set()
            assert leave.wait(DEADLINE_S)

    def second():
        assert inside.wait(DEADLINE_S)
        with taken.take():
            both.set()

    both = threading.Event()
    threads = [start_thread(f.__name__, f) for f in (first, second)]
    is_together = both.wait(wait_s)
    leave.set()
    for thread in threads:
        thread.result(DEADLINE_S)
    assert both.is_set()  # The second stream's turn comes.
    return is_together


def test_streams_that_compute_step_one_after_the_other(clocks):
    taken = turns.Turns()
    assert not step_together(taken, 0.1)  # Before anything is known.
    for _ in range(5):
        with taken.take():
            clocks.pass_s(cpu_s=0.003, wall_s=0.004)
    assert not step_together(taken, 0.1)


def test_streams_that_wait_step_together_until_they_compute(clocks):
    taken = turns.Turns()
    for _ in range(5):
        with taken.take():
            clocks.pass_s(cpu_s=0.0005, wall_s=0.01)
    assert step_together(taken, DEADLINE_S)
    for _ in range(30):
        with taken.take():
            clocks.pass_s(cpu_s=0.01, wall_s=0.01)
    assert not step_together(taken, 0.1)


def test_a_failed_step_ends_its_turn():
    taken = turns.Turns()
    with pytest.raises(ZeroDivisionError), taken.take():
        _ = 1 / 0
    assert not step_together(taken, 0.1)
