# SPDX-License-Identifier: Apache-2.0
"""`core.actors.fork_server`: a fork server ends with its program, and not with less."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tools.nemesis.programs import FLAGS, SIZES, Program, wait_for

ROOT = Path(__file__).parents[2]


def fork_server(program: Program) -> int:
    """Return the fork server's process id: the first of those with its command."""
    (pid, *_) = sorted(
        pid
        for pid in program.family()
        if b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return pid


def test_a_killed_run_leaves_nothing_though_all_is_hung_or_stopped(folder):
    """The actors hang in C. What the nemesis looks for, it finds where it is."""
    flags = [*FLAGS, *SIZES["monobeast"], "--env", "tools.nemesis.faulty:make_hanging"]
    with Program("monobeast", folder, *flags, "--disable_checkpoint") as program:
        program.wait_for(lambda: "about to hang" in program.text())
        found = program.leftovers()
        assert sum(what.startswith("process ") for what in found) >= 4  # And a tracker.
        assert any(what.startswith("tmp/pymp-") for what in found)  # The fork server's.
        os.kill(fork_server(program), signal.SIGSTOP)
        program.process.kill()
        assert program.wait() == -signal.SIGKILL
        wait_for(lambda: not program.leftovers())
        files = {"runs/x/.meta.json.tmp-1", "tmp/torchbeast-x", "runs/x/.tmp-1-half"}
        for name in files:
            (folder / name).touch()
        assert set(program.leftovers()) == files


def actors(program: Program) -> list[int]:
    """Return the fork server's children."""
    return [p.pid for p in psutil.Process(fork_server(program)).children()]


def test_a_run_survives_what_happens_to_its_fork_server(folder):
    flags = [*FLAGS, *SIZES["monobeast"], "--disable_checkpoint"]
    with Program("monobeast", folder, *flags) as program:
        program.wait_for(lambda: program.rows() > 3)
        pid = fork_server(program)
        # As from a terminal, `timeout` or a scheduler: the program ends the actors.
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(pid, signum)
        rows = program.rows()
        program.wait_for(lambda: program.rows() > rows + 3)
        assert fork_server(program) == pid
        assert "restarting it" not in program.text()
        os.kill(pid, signal.SIGKILL)
        program.wait_for(lambda: "restarting it" in program.text())
        rows = program.rows()
        program.wait_for(lambda: program.rows() > rows + 3)
        restarts = program.text().count("restarting it")
        program.wait_for(lambda: len(actors(program)) > 1)
        victim, other = actors(program)[:2]
        # Its socket is deleted, as old files in /tmp are.
        (temporary,) = program.temporary.glob("pymp-*")
        temporary.rename(program.temporary / "deleted")
        os.kill(other, signal.SIGKILL)
        program.wait_for(lambda: program.text().count("restarting it") > restarts)
        rows, restarts = program.rows(), program.text().count("restarting it")
        program.wait_for(lambda: program.rows() > rows + 3)
        (program.temporary / "deleted").rename(temporary)
        os.kill(fork_server(program), signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        program.wait_for(lambda: program.text().count("restarting it") > restarts)
        assert "The fork server (process" in program.text()
        os.kill(fork_server(program), signal.SIGSTOP)
        program.process.terminate()
        assert program.wait() == 75, program.text()
        wait_for(lambda: not program.leftovers())


LATE = """
import multiprocessing, sys

def late():
    import core.actors.fork_server

if __name__ == "__main__":
    process = multiprocessing.get_context("forkserver").Process(target=late)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


def test_a_child_of_another_fork_server_may_import_it_late(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    command = [sys.executable, tmp_path / "late.py"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60
    )
    assert done.returncode == 0
