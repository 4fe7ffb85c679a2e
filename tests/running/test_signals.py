# SPDX-License-Identifier: Apache-2.0
"""Stop signals, and the stacks of processes that hang."""

import faulthandler
import multiprocessing
import re
import signal
import sys
import threading
import types

import psutil
import pytest

from core.running import signals, unit
from core.running.signals import StopSignal
from core.running.supervise import start_thread
from tests.conftest import wait_until
from tests.python import run_python
from tests.running.conftest import DEADLINE_S


@pytest.mark.parametrize("signum", signals.STOP_SIGNALS)
def test_the_first_signal_is_only_noted(signum):
    with StopSignal() as stop:
        assert stop.received is None
        signal.raise_signal(signum)
        assert stop.received is signum


def test_a_signal_delivered_twice_counts_once():
    done = run_python("""
        import signal, types
        from core.running import signals
        now = [1000.0]
        signals.time = types.SimpleNamespace(monotonic=lambda: now[0])
        with signals.StopSignal() as stop:
            signal.raise_signal(signal.SIGINT)
            now[0] += 0.9 * signals.DUPLICATE_S
            signal.raise_signal(signal.SIGTERM)
            print(stop.received.name)
    """)
    assert (done.returncode, done.stdout) == (0, "SIGINT\n"), done.stderr


def test_the_old_handlers_come_back_afterwards():
    before = signal.getsignal(signal.SIGINT)
    with StopSignal():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before != signal.SIG_DFL


@pytest.mark.parametrize("late, status", [(False, 130), (True, 75)])
def test_a_signal_at_the_very_end_leaves_an_exit_status(late, status):
    done = run_python(f"""
        import atexit, os, signal, sys, threading
        from core.errors import Exit
        from core.running.signals import StopSignal
        # Takes signals that the main thread has blocked, as gRPC's threads do.
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        atexit.register(os.kill, os.getpid(), signal.SIGINT)  # While Python ends.
        with StopSignal():
            signal.raise_signal(signal.SIGINT)
        if not {late}:
            signal.raise_signal(signal.SIGINT)
        sys.exit(Exit.STOPPED)
    """)
    assert done.returncode == status, done.stderr


def test_the_end_of_the_terminal_is_no_second_signal_and_nohup_is_respected():
    done = run_python("""
        import signal, types
        from core.running import signals
        now = [1000.0]
        signals.time = types.SimpleNamespace(monotonic=lambda: now[0])
        with signals.StopSignal() as stop:
            for _ in range(2):  # From the kernel and from the shell.
                signal.raise_signal(signal.SIGHUP)
                now[0] += 7 * signals.DUPLICATE_S
            print(stop.received.name)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with signals.StopSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            print(stop.received)
    """)
    assert (done.returncode, done.stdout) == (0, "SIGHUP\nNone\n"), done.stderr


@pytest.mark.parametrize(
    "first, second, status",
    [
        ("SIGINT", "SIGINT", 130),
        ("SIGINT", "SIGTERM", 143),
        ("SIGHUP", "SIGTERM", 143),
    ],
)
def test_the_second_signal_exits_at_once_and_says_so(first, second, status):
    done = run_python(f"""
        import signal, types
        from core.running import signals
        now = [1000.0]
        signals.time = types.SimpleNamespace(monotonic=lambda: now[0])
        with signals.StopSignal() as stop:
            try:
                signal.raise_signal(signal.{first})
                print(stop.received.name, flush=True)
                now[0] += signals.DUPLICATE_S
                signal.raise_signal(signal.{second})
                print("not reached", flush=True)
            finally:
                print("not reached either", flush=True)
    """)
    assert (done.returncode, done.stdout) == (status, first + "\n")
    assert "Second signal: exiting at once, no checkpoint." in done.stderr


def deep_threads(pipe, output, num, depth):
    """Run in a child: have so many threads, each so deep, that stacks take a while."""
    faulthandler.register(signal.SIGUSR1, output.open("a"), all_threads=True)
    at_the_bottom = threading.Barrier(num + 1)

    def descend(left):
        if left:
            descend(left - 1)
        at_the_bottom.wait()
        threading.Event().wait()

    for _ in range(num):
        threading.Thread(target=descend, args=(depth,), daemon=True).start()
    at_the_bottom.wait()
    pipe.send("ready")
    threading.Event().wait()


@pytest.fixture
def deep_process(tmp_path):
    """Start processes with deep threads, which write their stacks to one file."""
    context = multiprocessing.get_context("forkserver")
    processes = []

    def start(num, depth):
        ours, theirs = context.Pipe()
        args = (theirs, tmp_path / "stacks", num, depth)
        processes.append(context.Process(target=deep_threads, args=args))
        processes[-1].start()
        assert ours.recv() == "ready"
        return psutil.Process(processes[-1].pid)

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they may")
def test_stacks_of_several_processes_do_not_mix(deep_process, tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "DUMP_S", DEADLINE_S)
    num, depth = 80, 90  # faulthandler shows up to 100 of each.
    processes = [deep_process(num, depth) for _ in range(2)]
    for i, process in enumerate(processes):
        signals.show_stacks(process.pid)
        text = (tmp_path / "stacks").read_text()
        assert text.count("in descend") == (i + 1) * num * (depth + 1)


def test_a_process_that_cannot_show_its_stacks_is_not_waited_for_for_ever(
    deep_process, monkeypatch
):
    monkeypatch.setattr(signals, "DUMP_S", 0.01)
    process = deep_process(1, 1)
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    start_thread("show", signals.show_stacks, process.pid).result(DEADLINE_S)


def test_a_process_that_has_just_ended_has_no_stacks(deep_process):
    process = deep_process(1, 1)
    process.kill()
    process.wait(DEADLINE_S)
    signals.show_stacks(process.pid)


def compute_and_list_threads():
    import torch

    torch.set_num_threads(3)
    x = torch.ones(2000, 2000)
    x @ x  # Starts OpenMP's threads.
    lines = list(signals.thread_states())
    assert len(lines) >= 3, lines
    print(*lines, sep="\n")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_without_python_are_listed_too(run_forked):
    status, said = run_forked(compute_and_list_threads)
    assert status == 0, said
    assert re.search(r"^thread \d+ \S+: R \S+, CPU [\d.]+ s$", said, re.M)


PAUSED_PROGRAM = """
import os, signal, subprocess
from core.running import signals, supervise
supervise.HANG_GRACE_S, signals.PAUSE_S = 0.2, 1.0
watchdog = supervise.Watchdog(1.0)
watchdog.progress("step 3")
subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
signal.raise_signal(signal.SIGTSTP)
watchdog.progress("step 3")
watchdog.close()
assert signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL
"""
PAUSED_CALL = """
import os, signal, subprocess, time
from core.running import signals, unit
unit.END_S, signals.PAUSE_S = 0.2, 1.0
with unit.limit_calls(2.0) as clocks:
    clocks[0] = time.monotonic()
    subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
    signal.raise_signal(signal.SIGTSTP)
    time.sleep(2 * unit.LOOK_S)  # The limit is longer, after the pause.
"""


def test_a_paused_program_is_neither_late_nor_ended(start_program):
    """Nor does a call of an environment hang. Both are paused at the same time."""
    codes = PAUSED_PROGRAM, PAUSED_CALL
    for program in [start_program(sys.executable, "-c", code) for code in codes]:
        assert program.wait() == 0, program.text()


def test_an_ignored_pause_stays_ignored():
    old = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        with signals.pausable():
            assert signal.getsignal(signal.SIGTSTP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTSTP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTSTP, old)


def test_only_a_long_gap_is_a_pause(monkeypatch):
    now = [1000.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(signals, "time", clock)
    pauses, ends = signals.Pauses(), []
    for gap in (1, signals.PAUSE_S, signals.PAUSE_S + 1, 1):
        now[0] += gap
        ends.append(pauses.end())
    assert ends == [0, 0, now[0] - 1, now[0] - 1]


def test_without_a_call_nothing_hangs_however_long_ago_a_pause_ended():
    assert not unit.Slot(name="Server 0").kill_if_hung(0.0, 1.0, 0.001)
