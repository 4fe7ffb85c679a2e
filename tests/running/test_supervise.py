# SPDX-License-Identifier: Apache-2.0
"""Supervision: worker threads, restarts, stalls, orphans, repeated warnings."""

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import types

import psutil
import pytest

from core.errors import StallError
from core.running import supervise
from core.running.supervise import (
    RestartBudget,
    Watchdog,
    describe_exit,
    exit_with_parent,
    start_thread,
)
from tests.conftest import Forked, ended, wait_until
from tests.python import run_python
from tests.running.conftest import DEADLINE_S


@pytest.fixture
def clock(monkeypatch):
    """A clock for core.running.supervise; set `clock.now`."""
    fake = types.SimpleNamespace(now=1000.0)
    fake.monotonic = lambda: fake.now
    monkeypatch.setattr(supervise, "time", fake)
    return fake


@pytest.mark.parametrize(
    "exitcode, text",
    [
        (None, "still running"),
        (0, "exit status 0"),
        (70, "exit status 70"),
        (-9, "killed by SIGKILL"),
        (-11, "killed by SIGSEGV"),
        (-200, "exit status -200"),  # No such signal.
    ],
)
def test_describe_exit_names_the_signal_or_the_status(exitcode, text):
    assert describe_exit(exitcode) == text


@pytest.mark.parametrize("error", [ValueError("three"), SystemExit(3)])
def test_a_thread_delivers_its_exception(error):
    def fail():
        raise error

    future = start_thread("failer", fail)
    assert future.exception(timeout=DEADLINE_S) is error


def test_a_thread_has_its_name_and_is_daemonic():
    def who():
        return threading.current_thread().name, threading.current_thread().daemon

    future = start_thread("learner-3", who)
    assert future.result(timeout=DEADLINE_S) == ("learner-3", True)


def test_a_running_thread_cannot_be_cancelled():
    proceed = threading.Event()
    future = start_thread("waiter", proceed.wait, DEADLINE_S)
    assert not future.cancel()
    proceed.set()
    assert future.result(timeout=DEADLINE_S) is True


def test_waits_double_up_to_the_limit_until_the_budget_is_spent():
    budget = RestartBudget()
    waits = [budget.died() for _ in range(5)]
    assert waits == [0.1, 0.2, 0.4, 0.8, None]


def test_a_delivery_makes_the_budget_whole_and_four_times_as_large():
    budget = RestartBudget()
    assert [budget.died(), budget.died()] == [0.1, 0.2]
    budget.delivered()
    waits = [budget.died() for _ in range(21)]
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * 13, None]


def test_deaths_after_deliveries_never_spend_the_budget():
    budget = RestartBudget()
    for _ in range(21):
        budget.delivered()
        assert budget.died() == 0.0


def test_a_worker_starts_once_when_its_wait_is_over(clock):
    budget = RestartBudget()
    starts = []
    wait_s = budget.died()
    for seconds in 0.9 * wait_s, 0.2 * wait_s, 7.0:
        clock.now += seconds
        budget.start_if_due("The worker", lambda: starts.append(clock.now))
    assert starts == [pytest.approx(clock.now - 7.0)]


@pytest.fixture
def watchdog(clock):
    made = Watchdog(limit_s=70.0)
    yield made
    made.close()


def test_progress_keeps_the_watchdog_quiet(watchdog, clock):
    for step in range(11):
        clock.now += 69.0
        watchdog.progress(step)


def test_standing_still_up_to_the_limit_is_fine(watchdog, clock):
    watchdog.progress("step 3")
    for _ in range(7):
        clock.now += 10.0
        watchdog.progress("step 3")


def test_standing_still_any_longer_raises_and_shows_every_stack(
    watchdog, clock, caplog
):
    release = threading.Event()

    def stand_still():
        release.wait(DEADLINE_S)

    thread = start_thread("still", stand_still)
    watchdog.progress("step 3")
    clock.now += 70.5
    try:
        with pytest.raises(StallError) as caught:
            watchdog.progress("step 3")
    finally:
        release.set()
        thread.result(timeout=DEADLINE_S)
    for part in ("70 s", "--stall_timeout_s 70", "step 3"):
        assert part in str(caught.value)
    stacks = caplog.text
    assert "in stand_still" in stacks
    assert "in test_standing_still_any_longer" in stacks


def test_the_stage_is_named(watchdog, clock):
    watchdog.progress("step 3", lambda: "nothing yet")
    clock.now += 70.5
    with pytest.raises(StallError, match="at step 3, waiting for the postman;"):
        watchdog.progress("step 3", lambda: "the postman")


def test_a_stall_may_be_waited_out_and_is_said_each_time(clock, caplog):
    watchdog = Watchdog(limit_s=70.0, on_stall="wait")
    watchdog.progress("step 3")
    for said in (1, 2, 3):
        clock.now += 70.5
        watchdog.progress("step 3")
        assert caplog.text.count("no progress for 70 s") == said
        watchdog.progress("step 3")  # At once again: nothing new.
        assert caplog.text.count("no progress for 70 s") == said
    watchdog.close()


def test_time_at_rest_does_not_count(watchdog, clock):
    watchdog.progress("step 3")
    for _ in range(3):
        clock.now += 69.0
        watchdog.rest()
    clock.now += 69.0
    watchdog.progress("step 3")


def test_rests_do_not_start_the_limit_again(watchdog, clock):
    """Servers that crash again and again are connected for a moment each time."""
    watchdog.progress("step 3")
    for _ in range(6):
        clock.now += 11.0
        watchdog.progress("step 3")
        clock.now += 40.0
        watchdog.rest()
    clock.now += 11.0
    with pytest.raises(StallError, match="no progress for 77 s"):
        watchdog.progress("step 3")


def test_a_main_loop_that_hangs_is_ended_with_its_stack():
    done = run_python("""
        import threading
        from core.running import supervise
        supervise.HANG_GRACE_S = 0.05
        def hang():
            supervise.Watchdog(0.05).progress("step 3")
            threading.Event().wait()
        hang()
    """)
    assert done.returncode == 1
    assert "in hang" in done.stderr


def orphan(pipe):
    """Run in a grandchild: say that the watch stands, then wait forever."""
    exit_with_parent()
    pipe.send(os.getpid())
    threading.Event().wait()


def middle(method):
    """Run in a child: start a grandchild, print its id, wait to be killed."""
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=orphan, args=(theirs,))
    process.start()
    assert ours.poll(DEADLINE_S)
    print(ours.recv(), flush=True)
    threading.Event().wait()


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_child_ends_with_its_killed_parent(method, _context, tmp_path):
    with Forked(_context, tmp_path / "parent.txt", middle, method) as parent:
        parent.wait_for_text("\n")
        child = psutil.Process(int(parent.text()))
        assert not ended([child])
        parent.kill()
        wait_until(lambda: ended([child]))


@pytest.fixture
def told(monkeypatch):
    """Return (a logger, its filter, what each of its two handlers told)."""
    log, repeats = logging.Logger("told"), supervise.Repeats()
    told: list[list[str]] = [[], []]
    for lines in told:
        handler = logging.Handler()
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())
        handler.addFilter(repeats)
        log.addHandler(handler)
    return log, repeats, told


TRACE = "Traceback (most recent call last):\n  File ...\nValueError: at 0x{:x}"


def test_a_warning_that_comes_again_is_told_in_one_line_whenever_its_count_doubles(
    told,
):
    log, repeats, (lines, others) = told
    for i in range(1, 21):
        log.warning("Actor %d died (%s)", i, TRACE.format(i))
        log.info("step %d", i)  # No warning.
    first, *again = [line for line in lines if "step" not in line]
    assert first == f"Actor 1 died ({TRACE.format(1)})"
    assert [line.partition(" died (Trace")[0] for line in again] == [
        f"Actor {i}" for i in (2, 4, 8, 16)
    ]
    assert again[-1].endswith("last): ... ValueError: at 0x10) (16 times so far)")
    assert len(lines) == 25 and others == lines
    log.warning("Server %d died (exit status %d)", 1, 3)
    log.warning("Server %d died (exit status %d)", 2, 139)
    log.info("stream %d: connected again", 1, extra={"repeats": True})
    for i in (2, 3):
        log.info("stream %d: connected again", i, extra={"repeats": True})
    assert [line.partition(" ")[0] for line in lines[25:]] == [
        *["Server", "Server"],
        *["stream", "stream"],
    ]
    frequent, second = repeats.most_frequent(2)
    assert frequent.startswith("20 x Actor 1 died (Traceback")
    assert second == "1 x Server 1 died (exit status 3)"


def test_a_warning_that_goes_on_coming_is_told_now_and_then(told, clock):
    log, _, (lines, _) = told
    for _ in range(9):
        log.warning("no server")
    clock.now += supervise.REPEAT_S
    log.warning("no server")
    log.warning("no server")
    assert lines[-2:] == [f"no server ({n} times so far)" for n in (8, 10)]


def test_causes_without_end_take_no_memory_without_end(told, monkeypatch):
    monkeypatch.setattr(supervise, "MAX_CAUSES", 3)
    log, repeats, (lines, _) = told
    for i in range(20):
        log.warning("%s is wrong", chr(ord("a") + i))
    assert len(lines) == 3 + 5  # Those, and of 17 others numbers 1, 2, 4, 8 and 16.
    assert repeats.most_frequent(1) == ["17 x d is wrong"]


def test_a_parent_reads_what_a_child_logs_and_what_its_environments_print():
    record = logging.makeLogRecord(
        {"msg": "it\nfailed: %d", "args": (3,), "levelno": logging.WARNING}
    )
    for restarts in (0, 7):
        record.restarts = restarts
        line = supervise.ForParent().format(record)
        told = (logging.WARNING, "it\nfailed: 3", restarts)
        assert supervise.from_child(line + "\n") == told
    for printed in ("loading...", "", "[1, 2]", '{"a": 1}', "[", "7", "[" * 5000):
        assert supervise.from_child(printed + "\n") == (logging.INFO, printed, 0)


@pytest.mark.parametrize("ends", [True, False])
def test_a_program_leaves_a_thread_that_still_runs_and_names_it(ends):
    result = run_python(
        f"""
        import threading
        from core.errors import leave
        ended = threading.Event()
        threading.Thread(target=ended.wait, name="simulator").start()
        if {ends}:
            threading.Timer(0.01, ended.set).start()
        print("Done")
        leave(75)
        """
    )
    assert result.returncode == 75, result.stderr
    assert result.stdout == "Done\n"
    said = "Threads are still running at the end: simulator\n"
    assert result.stderr == ("" if ends else said)


def test_a_program_kills_a_process_of_an_environment_that_still_runs():
    """Otherwise Python would wait for it, deaf to signals."""
    result = run_python(
        """
        import multiprocessing, time
        from core.errors import leave
        context = multiprocessing.get_context("fork")
        process = context.Process(target=time.sleep, args=(10**6,), name="simulator")
        process.start()
        print(process.pid)
        leave(75)
        """
    )
    assert result.returncode == 75, result.stderr
    pid = int(result.stdout)
    assert result.stderr == f"Killed at the end: simulator, {pid}\n"
    assert not psutil.pid_exists(pid)


def test_a_main_program_from_standard_input_is_refused_in_one_line(tmp_path):
    script = "from core.running.supervise import check_main_file; check_main_file()"
    (tmp_path / "script.py").write_text(script)
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    for arguments, refused in (["-"], True), ([tmp_path / "script.py"], False):
        said = subprocess.run(
            [sys.executable, *arguments],
            input=script,
            env=environ,
            capture_output=True,
            text=True,
        ).stderr
        last = (said.splitlines() or [""])[-1]
        assert ("the main program is <stdin>, which is" in last) is refused, said
