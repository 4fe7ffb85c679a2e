# SPDX-License-Identifier: Apache-2.0
"""The supervisor of the server processes. The program around it: test_servers."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.context import BaseContext
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

import polybeast
import polybeast_env
from core.errors import ConfigError, Exit
from core.remote import child, local_servers, supervisor
from core.remote.addresses import STREAMS_SUFFIX
from core.running import supervise
from core.running.signals import StopSignal
from core.running.unit import Unit
from tests.conftest import wait_until
from tests.python import run_python

ROOT = Path(__file__).resolve().parents[2]


def create_no_server(flags, address, progress):
    raise AssertionError("no server is started")


@pytest.mark.parametrize(
    "argv, num_cores, expected",
    [
        (["--num_servers", "3"], 3, [1, 4, 6]),
        (["--num_servers", "6"], 3, [1, 4, 6]),
        (["--num_servers", "4"], 3, []),
        (["--num_servers", "1"], 3, []),
        (["--num_servers", "3"], 1, []),
        (["--num_servers", "3", "--with_parent"], 3, []),
    ],
)
def test_servers_keep_to_cores_that_are_theirs(monkeypatch, argv, num_cores, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {6, 1, 4}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", None, raising=False)
    monkeypatch.setattr(supervisor, "num_cores", lambda: num_cores)
    flags = polybeast_env.parse_flags(["--env", "Catch", *argv])
    assert supervisor.own_cores(flags) == expected


def test_a_server_whose_core_is_gone_takes_another(folder, monkeypatch):
    """As when a container loses some cores, and a server is started again."""
    monkeypatch.setattr(supervisor, "own_cores", lambda flags: [10**6])
    address = f"unix:{folder}/s"
    flags = polybeast_env.parse_flags(["--env", "Catch", "--server_address", address])
    with supervisor.Servers(
        flags, polybeast_env.create_server, [address], StopSignal()
    ) as servers:
        (slot,) = servers.slots
        wait_until(lambda: servers.poll(0.1) or slot.has_listened)
        assert slot.budget.quick_deaths == 0


def test_a_server_that_has_served_is_tried_again_if_it_cannot_start():
    slot = SimpleNamespace(has_listened=False, reason=None, pipe=Mock())
    slot.pipe.recv_bytes.return_value = b"config the disk is away"
    with pytest.raises(ConfigError, match="the disk is away"):
        supervisor.Servers._receive(None, slot)
    slot.has_listened = True
    supervisor.Servers._receive(None, slot)
    assert slot.reason == "the disk is away"


def test_sockets_of_servers_that_could_not_say_they_listen_are_removed(folder):
    sockets = Path(folder, "sockets")
    argv = ["--env", "Catch", "--pipes_basename", f"unix:{sockets}/s"]
    for more, left in ([], True), (["--remove_folder"], False):
        sockets.mkdir(exist_ok=True)
        (sockets / "s.0").touch()  # Without the flag it may be another program's.
        flags = polybeast_env.parse_flags([*argv, *more])
        with supervisor.Servers(
            flags, create_no_server, [f"unix:{sockets}/s.0"], StopSignal()
        ):
            pass
        assert sockets.exists() == left


def create_server_that_is_killed(flags, address, progress):
    """Listen, and be killed before the server can say so."""
    sockets = []
    for suffix in ("", STREAMS_SUFFIX):
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(address.removeprefix("unix:") + suffix)
        sockets[-1].listen()
    os.kill(os.getpid(), signal.SIGKILL)


def test_sockets_of_a_server_that_was_killed_at_its_start_are_removed(folder):
    address = f"unix:{folder}/s"
    flags = polybeast_env.parse_flags(["--env", "Catch", "--server_address", address])
    with supervisor.Servers(
        flags, create_server_that_is_killed, [address], StopSignal()
    ) as servers:
        (slot,) = servers.slots
        wait_until(lambda: servers.poll(0.1) or slot.budget.quick_deaths)
        assert len(os.listdir(folder)) == 2
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    "what, number",
    [((Unit, "start"), errno.EAGAIN), ((BaseContext, "Pipe"), errno.EMFILE)],
    ids=["processes", "descriptors"],
)
def test_a_server_that_cannot_be_started_is_tried_again(
    folder, monkeypatch, caplog, what, number
):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*what, fail)
    address = f"unix:{folder}/s"
    flags = polybeast_env.parse_flags(["--env", "Catch", "--server_address", address])
    with (
        supervisor.Servers(flags, create_no_server, [address], StopSignal()) as servers,
        pytest.raises(OSError, match=os.strerror(number)),
    ):
        (slot,) = servers.slots
        while True:
            slot.budget.start_at = 0.0
            servers.poll(0.0)
            assert slot.process is slot.pipe is None
    assert caplog.text.count("Server 0 could not be started") == 4


@pytest.mark.parametrize("folder", ["clone", "a:b"])
def test_servers_have_the_code_of_the_program_that_starts_them(
    tmp_path, monkeypatch, folder
):
    """Not that of another clone, which is installed or in PYTHONPATH."""
    for place in ("other", "a", folder):  # "a": what PYTHONPATH would make of "a:b".
        (tmp_path / place).mkdir()
        (tmp_path / place / "servers.py").write_text(f"print({place!r})\n")
    (tmp_path / folder / "setup.py").touch()
    (tmp_path / "my_env.py").write_text("print('mine')\n")
    monkeypatch.setattr(child, "ROOT", tmp_path / folder)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))

    def run(name: str) -> str:
        with child.start_python(["-m", name]) as process:
            return process.communicate()[0].decode()

    monkeypatch.chdir(tmp_path)
    # No variable of the environment can name a folder with a colon.
    assert run("servers") == ("other\n" if ":" in folder else "clone\n")
    assert run("my_env") == "mine\n"
    monkeypatch.chdir(tmp_path / folder)
    assert run("servers") == f"{folder}\n"


def test_a_folder_whose_name_is_too_long_for_sockets_is_named(tmp_path, monkeypatch):
    (folder := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    flags = polybeast.parse_flags(["--env", "Catch", "--num_servers", "1"])
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter folder"):
        local_servers.LocalServers(flags)
    assert not any(folder.iterdir())


@pytest.mark.parametrize("kind", ["acceptor or dialer", "local servers"])
def test_a_process_that_cannot_be_forked_is_tried_again(kind, monkeypatch, caplog):
    def start(arguments):
        if forks:
            return subprocess.Popen(["cat"], stdin=PIPE, stdout=PIPE)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(child, "start_python", start)
    forks = True
    if kind == "local servers":
        flags = polybeast.parse_flags(["--env", "Catch", "--num_servers", "1"])
        parent = local_servers.LocalServers(flags)
    else:
        parent = child.Child("The helper", [])
        parent.start()
    with parent if kind == "local servers" else contextlib.closing(parent):
        parent._process.kill()
        wait_until(lambda: parent.check() or parent._budget.start_at is not None)
        for forks in False, False, True:
            parent._budget.start_at = 0.0
            parent.check()
            assert (parent._budget.start_at is None) == forks
        assert parent._process.poll() is None
        assert caplog.text.count("could not be started (BlockingIOError(11") == 2
        parent._process.kill()
        forks = False
        wait_until(lambda: parent.check() or parent._budget.start_at is not None)
        with pytest.raises(BlockingIOError):
            while parent._budget.start_at is not None:
                parent._budget.start_at = 0.0
                parent.check()


@pytest.mark.parametrize("line", ["7", '["tell"', "[" * 5000])
def test_lines_of_a_child_that_are_no_messages_are_logged(line, caplog):
    caplog.set_level("INFO", child.__name__)
    child.Child("The helper", [])._handle_line(line)
    assert [record.message for record in caplog.records] == [line]


def test_a_warning_that_a_child_has_counted_is_not_counted_again(caplog):
    caplog.handler.addFilter(repeats := supervise.Repeats())
    try:
        for text in ("no learner", "no learner (2 times so far)") * 2:
            child.Child("The helper", [])._handle_line(json.dumps([30, text, 0]))
    finally:
        caplog.handler.removeFilter(repeats)
    assert [r.message for r in caplog.records] == [
        *["no learner", "no learner (2 times so far)"] * 2
    ]


JUST_STARTED = """
import sys
import polybeast_env
from core.remote.supervisor import Servers
from core.running.signals import StopSignal
from core.running.unit import Unit

address = f"unix:{sys.argv[1]}/s"
flags = polybeast_env.parse_flags(["--env", "Catch", "--server_address", address])
with StopSignal() as stop:
    for _ in range(10):
        with Servers(flags, polybeast_env.create_server, [address], stop) as servers:
            servers.poll(0.0)
            process = servers.slots[0].process
        print(process.exitcode)
"""


def test_servers_that_have_just_started_need_not_be_killed(folder):
    """They are forked with the supervisor's handlers, which swallowed their SIGTERM."""
    pytest.importorskip("grpc", reason="pip install grpcio")
    done = run_python(JUST_STARTED, folder)
    statuses = set(map(int, done.stdout.split()))
    assert statuses and statuses <= {0, -signal.SIGTERM}, done.stdout + done.stderr


def test_a_supervisor_that_is_stopped_at_the_end_is_continued(caplog):
    caplog.set_level("INFO")
    flags = polybeast.parse_flags(["--env", "Catch", "--num_servers", "1"])
    with local_servers.LocalServers(flags) as servers:
        wait_until(lambda: "Serving Catch" in caplog.text)
        supervisor = psutil.Process(servers._process.pid)
        supervisor.suspend()
        wait_until(lambda: supervisor.status() == psutil.STATUS_STOPPED)
    assert "did not stop" not in caplog.text
    assert servers._process.returncode == Exit.DONE


def test_a_supervisor_that_is_always_killed_ends_the_run(folder, monkeypatch):
    killed = Path(folder, "killed")
    killed.write_text("#!/bin/sh\necho last words\nkill -KILL $$\n")
    killed.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(killed))
    flags = polybeast.parse_flags(["--env", "Catch", "--num_servers", "3"])
    with local_servers.LocalServers(flags) as servers:
        said = r"ended \(killed by SIGKILL\); the last line of their output: last words"
        with pytest.raises(RuntimeError, match=said):
            wait_until(lambda: servers.check())
    assert servers.restarts == 4 * 3  # The budget is that of a server.
