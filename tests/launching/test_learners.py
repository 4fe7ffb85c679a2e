# SPDX-License-Identifier: Apache-2.0
"""tools/learners.py: torchrun's exceptions become the exit status of the learners.

torchrun itself ends with 1 for every failure, warns for minutes of a host that does not
resolve, and shows a traceback for a port in use.
"""

import argparse
import faulthandler
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)

from core import ranks
from core.running import program
from tests.conftest import ROOT, free_ports
from tools import learners


def failed(*statuses: int) -> ChildFailedError:
    failures = {}
    for rank, status in enumerate(statuses):
        failures[rank] = ProcessFailure(rank, 100 + rank, status, "")
        failures[rank].timestamp = 1000 + rank
    return ChildFailedError("polybeast", failures)


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--master_addr nowhere.invalid", "--master_addr is nowhere.invalid, which "),
        ("--rdzv_endpoint nowhere.invalid:1", "--rdzv_endpoint is nowhere.invalid, "),
    ],
)
def test_a_host_that_does_not_resolve_is_named(monkeypatch, capsys, flags, said):
    monkeypatch.setattr(ranks, "NAME_S", 0.0)
    argv = ["learners", "--nnodes", "2", "--node_rank", "1", *flags.split()]
    monkeypatch.setattr("sys.argv", [*argv, "-m", "polybeast"])
    assert learners.main() == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ConfigError: {said}")


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--master_addr 127.0.0.1 --master_port {}", "--master_port is {}, "),
        (
            "--rdzv_backend c10d --rdzv_conf is_host=1 --rdzv_endpoint 127.0.0.1:{}",
            "--rdzv_endpoint is 127.0.0.1:{}, ",
        ),
    ],
)
def test_a_port_in_use_is_one_line_that_names_it(monkeypatch, capsys, flags, said):
    monkeypatch.setattr(
        faulthandler, "enable", lambda **kwargs: None
    )  # pytest's stays.
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, "")  # torchrun sets them.
        monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = ["learners", "--nproc_per_node", "2", *flags.format(port).split()]
        monkeypatch.setattr("sys.argv", [*argv, "-m", "polybeast"])
        assert learners.main() == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"ConfigError: {said.format(port)}but another program on {socket.gethostname()}"
    )


def test_after_a_signal_a_learner_that_failed_is_told(monkeypatch, capsys):
    def learner(rank, status):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        flags = argparse.Namespace(mode="test", savedir="")
        program.run_program(lambda argv: flags, None, lambda flags: status, [])

    def torchrun(argv):
        for rank, status in enumerate((75, 74, 70)):
            learner(rank, status)
        raise SignalException("", signal.SIGTERM)

    monkeypatch.setattr(signal, "signal", lambda *args: None)  # It stays as it is.
    monkeypatch.setattr(run, "main", torchrun)
    monkeypatch.setattr("sys.argv", ["learners", "-m", "polybeast"])
    assert learners.main() == 74
    assert "Learner 1 ended with 74" in capsys.readouterr().err


def has_handler(pid: int, signum: int) -> bool:
    """Return whether a process handles a signal. Linux only."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)[1]
    return bool(int(caught, 16) >> (signum - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("moment", ["imports", "rendezvous"])
def test_a_signal_before_there_are_learners_is_a_stop(start_program, tmp_path, moment):
    port = free_ports(1)
    command = f"-m tools.learners --nnodes 2 --master_port {port} -m polybeast"
    program = start_program(
        *(sys.executable, *command.split()),
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )

    def waits_for_the_other_node() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    program.wait_for(lambda: has_handler(program.pid, signal.SIGTERM))
    if moment == "rendezvous":
        program.wait_for(waits_for_the_other_node)
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 75, program.text()
    assert list(tmp_path.glob("tmp*")) == []


LEARNER = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: exit(75))
print("learner runs", flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_after_nohup_the_end_of_the_terminal_stops_no_learner(start_program, tmp_path):
    script = tmp_path / "learner.py"
    script.write_text(LEARNER)
    (tmp_path / "tmp").mkdir()
    program = start_program(
        *("nohup", sys.executable, "-m", "tools.learners"),
        *("--standalone", "--nproc_per_node", "1", script),
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    program.wait_for_text("learner runs")
    for process in (program, *program.family()):
        os.kill(process.pid, signal.SIGHUP)
    os.kill(program.pid, signal.SIGTERM)  # Python would handle SIGHUP first.
    assert program.wait() == 75, program.text()
    assert "closing signal SIGTERM" in program.text()
    assert not any((tmp_path / "tmp").iterdir())  # Also nothing of torchrun.


# It does not stop in time after a signal, so torchrun kills it.
KILLED = """
import os, signal
from core import ranks
ranks.record_status(70)  # As Run.open does.
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_learner_that_could_not_write_its_status_counts_as_failed(
    monkeypatch, capsys
):
    def torchrun(argv):
        statuses = Path(os.environ[ranks.STATUS_DIR])
        (statuses / "0").touch()  # As on a full disk.
        (statuses / "1").write_text("75")
        raise SignalException("", signal.SIGTERM)

    monkeypatch.setattr(run, "main", torchrun)
    monkeypatch.setattr("sys.argv", ["learners", "-m", "polybeast"])
    assert learners.main() == 70
    assert "Learner 0 could not write its status" in capsys.readouterr().err


@pytest.mark.parametrize("has_ended, status", [(True, 75), (False, 70)])
def test_the_folder_of_the_statuses_may_be_deleted(monkeypatch, has_ended, status):
    def torchrun(argv):
        ranks.record_status(70)  # As Run.open does.
        shutil.rmtree(os.environ[ranks.STATUS_DIR])
        if has_ended:
            ranks.record_status(75)
        raise SignalException("", signal.SIGTERM)

    monkeypatch.setattr(run, "main", torchrun)
    monkeypatch.setattr("sys.argv", ["learners", "-m", "polybeast"])
    assert learners.main() == status


def test_after_a_signal_a_learner_that_was_killed_is_told(monkeypatch, capsys):
    def torchrun(argv):
        command = [sys.executable, "-c", KILLED]
        assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
        raise SignalException("", signal.SIGTERM)

    monkeypatch.setattr(run, "main", torchrun)
    monkeypatch.setattr("sys.argv", ["learners", "-m", "polybeast"])
    assert learners.main() == 70
    assert "Learner 0 ended with 70, or was killed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, status",
    [
        (None, 0),
        (SignalException("", signal.SIGTERM), 75),
        (failed(75, 75), 75),
        (failed(2, 70), 2),
        (failed(-9, 70), 137),
    ],
)
def test_the_status_is_that_of_the_learners(monkeypatch, error, status):
    def torchrun(argv):
        assert argv[-2:] == ["-m", "polybeast"]
        if error is not None:
            raise error

    monkeypatch.setattr(run, "main", torchrun)
    monkeypatch.setattr("sys.argv", ["learners", "-m", "polybeast"])
    assert learners.main() == status


@pytest.mark.parametrize("flags", [["--redirects", "3"], ["--tee=1"], ["--log_dir=/x"]])
def test_logs_that_are_asked_for_stay(monkeypatch, flags):
    argv = [*flags, "-m", "polybeast"]
    calls = []
    monkeypatch.setattr(run, "main", calls.append)
    monkeypatch.setattr("sys.argv", ["learners", *argv])
    assert learners.main() == 0
    assert calls == [argv]
