# SPDX-License-Identifier: Apache-2.0
"""Supervision: signals, worker threads, restarts, stalls, orphans, resources."""

import collections
import faulthandler
import logging
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import psutil
import pytest

from core import supervise
from core.supervise import (
    ConfigError,
    Exit,
    RestartBudget,
    StallError,
    StopSignal,
    Watchdog,
    check_resources,
    describe_exit,
    exit_with_parent,
    start_thread,
)
from tests.conftest import ended, wait_until

DEADLINE_S = 30.0  # Of every wait for another thread or process.
ROOT = Path(__file__).parent.parent


def run_python(code):
    """Run Python code in a fresh interpreter at the root of the repository."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.fixture
def clock(monkeypatch):
    """A clock for core.supervise; set `clock.now`."""
    fake = types.SimpleNamespace(now=1000.0)
    fake.monotonic = lambda: fake.now
    monkeypatch.setattr(supervise, "time", fake)
    return fake


# ------------------------------------------------------------------------ exit status


def test_exit_statuses_are_those_documented():
    assert {e.name: e.value for e in Exit} == {
        "DONE": 0,
        "USAGE": 2,
        "INTERNAL": 70,
        "CHECKPOINT": 74,
        "STOPPED": 75,
        "CONFIG": 78,
    }


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


# ------------------------------------------------------------------------- StopSignal


@pytest.mark.parametrize("signum", supervise.STOP_SIGNALS)
def test_the_first_signal_is_only_noted(signum):
    with StopSignal() as stop:
        assert stop.received is None
        signal.raise_signal(signum)
        assert stop.received is signum


def test_a_signal_delivered_twice_counts_once():
    done = run_python("""
        import signal, types
        from core import supervise
        now = [1000.0]
        supervise.time = types.SimpleNamespace(monotonic=lambda: now[0])
        with supervise.StopSignal() as stop:
            signal.raise_signal(signal.SIGINT)
            now[0] += 0.9 * supervise.DUPLICATE_S
            signal.raise_signal(signal.SIGTERM)
            print(stop.received.name)
    """)
    assert (done.returncode, done.stdout) == (0, "SIGINT\n"), done.stderr


def test_the_old_handlers_come_back_afterwards(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    with StopSignal():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before != signal.SIG_DFL


@pytest.mark.parametrize("late, status", [(False, 130), (True, 75)])
def test_a_signal_at_the_very_end_leaves_an_exit_status(late, status):
    done = run_python(f"""
        import atexit, signal, sys
        from core.supervise import Exit, StopSignal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        atexit.register(signal.raise_signal, signal.SIGINT)  # While Python ends.
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
        from core import supervise
        now = [1000.0]
        supervise.time = types.SimpleNamespace(monotonic=lambda: now[0])
        with supervise.StopSignal() as stop:
            for _ in range(2):  # From the kernel and from the shell.
                signal.raise_signal(signal.SIGHUP)
                now[0] += 7 * supervise.DUPLICATE_S
            print(stop.received.name)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with supervise.StopSignal() as stop:
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
        from core import supervise
        now = [1000.0]
        supervise.time = types.SimpleNamespace(monotonic=lambda: now[0])
        with supervise.StopSignal() as stop:
            try:
                signal.raise_signal(signal.{first})
                print(stop.received.name, flush=True)
                now[0] += supervise.DUPLICATE_S
                signal.raise_signal(signal.{second})
                print("not reached", flush=True)
            finally:
                print("not reached either", flush=True)
    """)
    assert (done.returncode, done.stdout) == (status, first + "\n")
    assert "Second signal: exiting at once, no checkpoint." in done.stderr


# ----------------------------------------------------------------------- start_thread


def test_a_thread_delivers_its_result():
    future = start_thread("adder", lambda a, b: a + b, 3, 4)
    assert future.result(timeout=DEADLINE_S) == 7


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


# ---------------------------------------------------------------------- RestartBudget


def test_waits_double_up_to_the_limit_until_the_budget_is_spent():
    budget = RestartBudget(max_quick_deaths=7, first_wait_s=0.5, max_wait_s=5.0)
    waits = [budget.died() for _ in range(7)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, None]


def test_a_worker_that_had_delivered_restarts_at_once():
    budget = RestartBudget()
    budget.delivered()
    assert budget.died() == 0.0


def test_a_delivery_makes_the_budget_whole_and_four_times_as_large():
    budget = RestartBudget(max_quick_deaths=3, first_wait_s=0.5, max_wait_s=2.0)
    assert [budget.died(), budget.died()] == [0.5, 1.0]
    budget.delivered()
    waits = [budget.died() for _ in range(13)]
    assert waits == [0.0, 0.5, 1.0, *[2.0] * 9, None]


def test_deaths_after_deliveries_never_spend_the_budget():
    budget = RestartBudget(max_quick_deaths=3)
    for _ in range(17):
        budget.delivered()
        assert budget.died() == 0.0


# --------------------------------------------------------------------------- Watchdog


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
    monkeypatch.setattr(supervise, "DUMP_S", DEADLINE_S)
    num, depth = 80, 90  # faulthandler shows up to 100 of each.
    processes = [deep_process(num, depth) for _ in range(2)]
    for i, process in enumerate(processes):
        supervise.show_stacks(process.pid)
        text = (tmp_path / "stacks").read_text()
        assert text.count("in descend") == (i + 1) * num * (depth + 1)


def test_a_process_that_cannot_show_its_stacks_is_not_waited_for_for_ever(
    deep_process, monkeypatch
):
    monkeypatch.setattr(supervise, "DUMP_S", 0.01)
    process = deep_process(1, 1)
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    start_thread("show", supervise.show_stacks, process.pid).result(DEADLINE_S)


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_without_python_are_listed_too():
    done = run_python("""
        import torch
        from core.supervise import thread_states
        torch.set_num_threads(3)
        x = torch.ones(2000, 2000); x @ x  # Starts OpenMP's threads.
        lines = list(thread_states())
        assert len(lines) >= 3, lines
        print(*lines, sep="\\n")
    """)
    assert done.returncode == 0, done.stderr
    assert re.match(r"thread \d+ python\S*: R \S+, CPU [\d.]+ s$", done.stdout, re.M)


def test_a_main_loop_that_hangs_is_ended_with_its_stack():
    done = run_python("""
        import threading
        from core import supervise
        supervise.HANG_GRACE_S = 0.05
        supervise.Watchdog(0.05).progress("step 3")
        def hang():
            threading.Event().wait()
        hang()
    """)
    assert done.returncode == 1
    assert "in hang" in done.stderr


# ------------------------------------------------------------------- exit_with_parent


def orphan(pipe, by_thread):
    """Run in a grandchild: say that the watch stands, then wait forever."""
    if by_thread:
        sys.platform = "unknown"  # Elsewhere the kernel does not do it.
    exit_with_parent()
    pipe.send(os.getpid())
    threading.Event().wait()


def middle(method, by_thread):
    """Run in a child: start a grandchild, print its id, wait to be killed."""
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=orphan, args=(theirs, by_thread))
    process.start()
    assert ours.poll(DEADLINE_S)
    print(ours.recv(), flush=True)
    threading.Event().wait()


@pytest.mark.parametrize(
    "method, by_thread",
    [(method, False) for method in multiprocessing.get_all_start_methods()]
    + [("spawn", True)],
)
def test_a_child_ends_with_its_killed_parent(method, by_thread):
    code = f"from tests.test_supervise import middle; middle({method!r}, {by_thread})"
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    child = None
    try:
        child = psutil.Process(int(parent.stdout.readline()))
        assert not ended([child])
        parent.kill()
        parent.wait(DEADLINE_S)
        wait_until(lambda: ended([child]))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        if child is not None and not ended([child]):
            child.kill()


# -------------------------------------------------------------------- check_resources

MIB = 2**20
Usage = collections.namedtuple("Usage", "total used free")


def check(**changes):
    needs = dict(shared_bytes=3 * MIB, memory_folder=None, files=71, processes=2)
    return list(check_resources(**(needs | changes)))


@pytest.fixture
def machine(monkeypatch):
    """A machine with 1,009 MiB of memory, 89 MiB in a folder, 5 cores, 128 files."""
    monkeypatch.setattr(supervise, "available_memory", lambda: 1009 * MIB)
    monkeypatch.setattr(supervise, "num_cores", lambda: 5)
    usage = {"/folder": Usage(100 * MIB, 11 * MIB, 89 * MIB)}
    monkeypatch.setattr(supervise.shutil, "disk_usage", usage.__getitem__)
    limits = [128, 256]
    no_limit = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda which: tuple(limits) if which == resource.RLIMIT_NOFILE else no_limit,
    )
    monkeypatch.setattr(
        resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new)
    )
    return limits


def test_what_fits_is_said_with_both_numbers(machine):
    memory, files, cores = check()
    assert "need 3.0 MiB, have 1,009.0 MiB" in memory
    assert "need 71, have 128" in files
    assert "2 busy processes or threads on 5" in cores


def test_a_need_that_fits_exactly_is_fine(machine):
    check(shared_bytes=1009 * MIB, files=256)
    check(shared_bytes=89 * MIB, memory_folder="/folder")


def test_too_little_memory_is_refused_with_both_numbers_and_the_remedy(machine):
    with pytest.raises(ConfigError) as caught:
        check(shared_bytes=1010 * MIB)
    for part in ("1,010.0 MiB", "1,009.0 MiB", "Lower --num_buffers"):
        assert part in str(caught.value)


def test_a_folder_too_small_is_refused_with_both_numbers_and_the_remedy(machine):
    with pytest.raises(ConfigError) as caught:
        check(shared_bytes=90 * MIB, memory_folder="/folder")
    for part in ("90.0 MiB", "89.0 MiB", "Lower --num_buffers", "enlarge /folder"):
        assert part in str(caught.value)


def test_shared_memory_beyond_the_limit_on_files_is_refused_with_both_numbers():
    """The limit is real, since the kernel counts shared memory as a file."""
    done = run_python("""
        import resource
        from core import rollouts, supervise
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
        rollouts._open_anonymous(2 << 20)
        try:
            rollouts._open_anonymous((2 << 20) + 1)
        except OSError as error:
            print(error.strerror)
        try:
            list(supervise.check_resources(
                shared_bytes=3 << 20, memory_folder=None, files=67, processes=1
            ))
        except supervise.ConfigError as error:
            print(error)
    """)
    kernels, ours = done.stdout.splitlines()
    assert kernels == "File too large"
    for part in ("need 3.0 MiB", "more than 2.0 MiB (ulimit -f)", "Raise the limit"):
        assert part in ours


def test_too_few_files_are_refused_with_both_numbers_and_the_remedy(machine):
    with pytest.raises(ConfigError) as caught:
        check(files=257)
    for part in ("257", "128", "256", "Lower --num_actors", "ulimit -Hn"):
        assert part in str(caught.value)
    assert machine == [128, 256]


def test_the_soft_limit_on_files_is_raised_to_the_need(machine):
    _, files, _ = check(files=199)
    assert "raised to 199" in files
    assert machine == [199, 256]


def test_a_soft_limit_that_is_enough_stays(machine):
    _, files, _ = check(files=128)
    assert "raised" not in files
    assert machine == [128, 256]


def test_no_limit_on_files_is_enough(machine):
    machine[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    check(files=10**6)
    assert machine == [resource.RLIM_INFINITY] * 2


def test_the_soft_limit_really_is_raised():
    done = run_python("""
        import resource
        from core.supervise import check_resources
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        list(check_resources(shared_bytes=1, memory_folder="/", files=67, processes=1))
        print(resource.getrlimit(resource.RLIMIT_NOFILE) == (67, hard))
    """)
    assert done.stdout == "True\n", done.stderr


# --------------------------------------------------------------- what comes again


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
    line = supervise.ForParent().format(record)
    assert supervise.from_child(line + "\n") == (logging.WARNING, "it\nfailed: 3")
    for printed in ("loading...", "", "[1, 2]", '{"a": 1}', "[", "7"):
        assert supervise.from_child(printed + "\n") == (logging.INFO, printed)


def test_many_more_processes_than_cores_are_remarked_on(machine):
    assert "fewer --num_actors" not in check(processes=10)[2]
    assert "fewer --num_actors" in check(processes=11)[2]


def test_available_memory_is_some_of_the_machine_s():
    assert 0 < supervise.available_memory() <= psutil.virtual_memory().total


def test_who_lets_the_learner_go_first_is_a_nicer_batch_process():
    done = run_python("""
        import os
        from core.supervise import let_learner_go_first
        let_learner_go_first()
        print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_BATCH)
    """)
    assert done.stdout == "19 True\n", done.stderr


def test_num_cores_heeds_the_affinity():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no sched_setaffinity on this system")
    done = run_python("""
        import os
        from core.supervise import num_cores
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        print(num_cores())
    """)
    assert done.stdout == "1\n", done.stderr


@pytest.fixture
def container(monkeypatch, tmp_path):
    """A container on a machine of 1,009 MiB and 64 cores: a folder for its limits."""
    memory = types.SimpleNamespace(available=1009 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.setattr(supervise, "CGROUP", tmp_path)
    return tmp_path


def limit_memory(container, limit, *, used, files, shared):
    (container / "memory.max").write_text(f"{limit}\n")
    (container / "memory.current").write_text(f"{used}\n")
    stat = f"anon 12345\nfile {files}\nkernel 17\nshmem {shared}\n"
    (container / "memory.stat").write_text(stat)


def test_a_container_s_memory_limit_counts(container):
    limit_memory(container, 499 * MIB, used=97 * MIB, files=0, shared=0)
    assert supervise.available_memory() == (499 - 97) * MIB


def test_cached_files_count_as_available_but_shared_memory_does_not(container):
    limit_memory(container, 499 * MIB, used=97 * MIB, files=53 * MIB, shared=11 * MIB)
    assert supervise.available_memory() == (499 - 97 + 53 - 11) * MIB


def test_a_limit_above_what_the_machine_has_gives_no_more(container):
    limit_memory(container, 4999 * MIB, used=97 * MIB, files=0, shared=0)
    assert supervise.available_memory() == 1009 * MIB


def test_a_container_without_a_memory_limit_has_the_machine_s(container):
    limit_memory(container, "max", used=97 * MIB, files=0, shared=0)
    assert supervise.available_memory() == 1009 * MIB


@pytest.mark.parametrize(
    "quota, cores",
    [
        ("300000 100000", 3),
        ("250000 100000", 3),
        ("10000 100000", 1),
        ("9900000 100000", 64),
        ("max 100000", 64),
    ],
)
def test_a_container_s_cpu_limit_counts(container, quota, cores):
    (container / "cpu.max").write_text(quota + "\n")
    assert supervise.num_cores() == cores


def test_without_a_container_the_machine_counts(container):
    assert supervise.num_cores() == 64
    assert supervise.available_memory() == 1009 * MIB


# ------------------------------------------------------------------ keep_freed_memory


def page_faults(*, keep):
    """Return the page faults of 5 rounds of two 40 MB arrays, and whether glibc."""
    done = run_python(f"""
        import platform, resource, threading
        import numpy as np
        from core.supervise import keep_freed_memory
        if {keep}: keep_freed_memory()
        def round():
            arrays = [np.ones(5 * 2**20) for _ in range(2)]
        round()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):  # In learner threads, which share what is kept.
            thread = threading.Thread(target=round)
            thread.start()
            thread.join({DEADLINE_S})
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        print(faults, platform.libc_ver()[0])
    """)
    assert done.returncode == 0, done.stderr
    faults, *libc = done.stdout.split()
    return int(faults), libc


def test_freed_memory_comes_back_without_page_faults():
    faults, libc = page_faults(keep=False)
    if libc != ["glibc"]:
        pytest.skip("only glibc's malloc can be told to keep memory")
    kept, _ = page_faults(keep=True)
    # Without it each page faults each round: 4 KB pages, or 2 MB ones (40 per round).
    assert faults >= 5 * 40
    assert kept < faults / 10


def test_a_main_program_from_standard_input_is_refused_in_one_line(tmp_path):
    script = "from core.supervise import check_main_file; check_main_file()"
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
        assert ("the main program is <stdin>, no file" in last) is refused, said
