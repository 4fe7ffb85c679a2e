# SPDX-License-Identifier: Apache-2.0
"""Units: a worker and all that its environments start end together."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import connection
from pathlib import Path

import psutil
import pytest

from core.running import unit as unit_module
from core.running.unit import Unit
from tests.conftest import DEADLINE_S, ended, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="guards need Linux")


def start_others(pipe):
    """Start what environments may start; say who they are. A worker's work."""
    forked = multiprocessing.get_context("fork").Process(target=pause_with_cut_name)
    forked.start()
    session = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    command = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
    orphan = int(subprocess.run(["sh", "-c", command], capture_output=True).stdout)
    pids = (os.getppid(), os.getpid(), forked.pid, session.pid, orphan)
    pipe.send(dict(zip(("guard", "worker", "forked", "session", "orphan"), pids)))
    signal.pause()


def pause_with_cut_name():
    """Have a name that Linux has cut inside a character, as it does after 15 bytes."""
    Path("/proc/self/comm").write_bytes("café".encode()[:-1])
    signal.pause()


def run_unit(method, pipe):
    """Be the program: start a unit, kill it when told to, say how it ended."""
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["core.actors.fork_server"])  # Or it stays.
    ours, theirs = context.Pipe()
    unit = Unit(context, start_others, (theirs,), name="unit")
    unit.start()
    theirs.close()
    pipe.send(ours.recv())
    if pipe in connection.wait([unit.sentinel, pipe]):
        unit.kill()
    unit.join()
    pipe.send(unit.exitcode)
    unit.close()


@pytest.fixture(params=["fork", "forkserver"])
def program(_context, request):
    """Start a program with a unit; return the program, its pipe, and all processes."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=run_unit, args=(request.param, theirs))
    process.start()
    theirs.close()
    assert ours.poll(DEADLINE_S)
    pids = ours.recv()
    unit = {name: psutil.Process(pid) for name, pid in pids.items()}
    wait_until(lambda: unit["orphan"].ppid() == pids["guard"])
    yield process, ours, unit
    process.kill()
    process.join()
    for member in unit.values():
        if not ended([member]):
            member.kill()


@pytest.mark.parametrize("victim", ["worker", "guard"])
def test_all_of_a_unit_ends_with_its_worker_and_with_its_guard(program, victim):
    process, pipe, unit = program
    unit[victim].kill()
    assert pipe.poll(DEADLINE_S) and pipe.recv() == -signal.SIGKILL
    wait_until(lambda: ended(unit.values()))


def test_all_of_a_unit_ends_when_its_program_says_so(program):
    process, pipe, unit = program
    for name in ("guard", "worker"):
        unit[name].suspend()
    pipe.send("kill")
    assert pipe.poll(DEADLINE_S) and pipe.recv() == -signal.SIGKILL
    assert ended(unit.values())


@pytest.mark.parametrize("frozen", [False, True])
def test_all_of_a_unit_ends_with_its_killed_program(program, frozen):
    process, pipe, unit = program
    for name in ("guard", "worker", "forked") if frozen else ():
        unit[name].suspend()
    process.kill()
    wait_until(lambda: ended(unit.values()))


def test_a_unit_that_cannot_be_watched_is_ended(monkeypatch):
    def open_pidfd(pid):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(unit_module, "_open_pidfd", open_pidfd)
    ours, theirs = multiprocessing.Pipe()
    unit = Unit(multiprocessing.get_context("fork"), signal.pause, (), name="unit")
    try:
        with pytest.raises(OSError, match="open files"):
            unit.start()
        theirs.close()
        assert unit.exitcode == -signal.SIGKILL
        assert ours.poll(DEADLINE_S)  # No process has the other end any more.
    finally:
        unit.kill()
        unit.join()


@pytest.mark.parametrize("lacking", ["Python", "Linux"])
def test_a_unit_ends_where_there_is_no_pidfd(lacking, monkeypatch):
    """The Pythons of conda and uv lack the function, and old kernels the call."""
    if lacking == "Python":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    else:
        monkeypatch.setattr(unit_module, "_open_pidfd", lambda pid: None)
    unit = Unit(multiprocessing.get_context("fork"), signal.pause, (), name="unit")
    unit.start()
    wait_until(lambda: unit.pid is not None)
    unit.kill()
    unit.join(DEADLINE_S)
    assert unit.exitcode == -signal.SIGKILL
    unit.close()


def test_an_error_of_the_kernel_is_raised():
    with pytest.raises(ProcessLookupError):
        unit_module._open_pidfd(2**22 + 1)  # Above the largest number of a process.


def test_the_end_of_a_killed_unit_is_seen_without_a_free_descriptor(monkeypatch):
    def listdir(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    unit = Unit(multiprocessing.get_context("fork"), signal.pause, (), name="unit")
    unit.start()
    wait_until(lambda: unit.pid is not None)
    monkeypatch.setattr(os, "listdir", listdir)
    unit.kill()
    unit.join(DEADLINE_S)
    assert unit.exitcode == -signal.SIGKILL
    unit.close()
