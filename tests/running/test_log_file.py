# SPDX-License-Identifier: Apache-2.0
"""Log files on a disk that is full or hangs."""

import contextlib
import errno
import fcntl
import logging
import os
import resource
import sys
import threading
from pathlib import Path

from core.running import log_file, log_setup, logs, terminal
from tests.conftest import wait_until
from tests.running.conftest import event_steps, read_rows, steps_of


def fill_the_disk(run_dir):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with log_setup.setup_logging(run_dir), logs.RunLog(run_dir) as run_log:
        run_log.log({"step": 1, "entropy": 0.5})
        # A file may grow by 17 bytes more: the disk fills up in the middle of a row.
        size = max((run_dir / "logs.csv").stat().st_size, 200) + 17
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        for step in range(2, 7):
            run_log.log({"step": step, "entropy": 0.5})
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not (run_dir / "logs.csv").read_text().endswith("\n")
        run_log.log({"step": 7, "entropy": 0.5})


def test_a_full_disk_delays_rows_but_loses_and_doubles_none(tmp_path, run_forked):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    status, said = run_forked(fill_the_disk, run_dir)
    assert status == 0, said
    assert steps_of(run_dir) == [1, 2, 3, 4, 5, 6, 7]
    assert event_steps(run_dir) == [1, 2, 3, 4, 5, 6, 7]
    for text in (said, (run_dir / "out.log").read_text()):
        assert text.count("Cannot write to") == 1
        assert "Rows that waited: 5, lost so far: 0." in text


def test_what_waits_for_the_disk_is_bounded_and_the_rest_counted(monkeypatch):
    monkeypatch.setattr(log_file, "MAX_WAITING_BYTES", 11)
    file = log_file.LogFile(Path("/dev/full"))
    for _ in range(5):
        file.write(b"seven..")
    assert isinstance(file.error, OSError)
    assert file.lost == 3
    assert file._waiting == 2 * b"seven.."
    file.close()


def test_a_full_disk_is_tried_with_little_data_whatever_waits(monkeypatch):
    tried = []

    def write(fd, data):
        tried.append(len(data))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = log_file.LogFile(Path("/dev/full"))
    monkeypatch.setattr(os, "write", write)
    for _ in range(3):
        file.write(b"x" * log_file.CHUNK_BYTES)
    assert tried == 3 * [log_file.CHUNK_BYTES]
    file.close()


def test_a_file_is_written_also_while_there_can_be_no_thread(tmp_path, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    file = log_file.LogFile(tmp_path / "file")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        file.start()
        file.write(b"one\n")
    assert not file.error
    file.start()
    assert file._thread.is_alive()
    file.write(b"two\n")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"one\ntwo\n"


def test_a_file_that_cannot_be_opened_anew_keeps_its_name(tmp_path, monkeypatch):
    def fail(file):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    file = log_file.LogFile(tmp_path / "out.log")
    file.write(b"one\n")
    with monkeypatch.context() as patch:
        patch.setattr(log_file.LogFile, "_open", fail)
        file.limit(3)
    assert [path.name for path in tmp_path.iterdir()] == ["out.log"]
    assert not file.is_gone()
    file.limit(3)
    assert {path.name for path in tmp_path.iterdir()} == {"out.log", "out.first.log"}
    file.close()


def test_rows_that_never_reach_the_disk_are_reported_at_the_end(tmp_path, caplog):
    run_log = logs.RunLog(tmp_path)
    run_log._csv.close()
    run_log._csv.__init__(Path("/dev/full"))
    run_log.log({"step": 1})
    run_log.close()
    assert "The end of /dev/full is lost" in caplog.text


class Pipe:
    """A file's place taken by a pipe that somebody has open and does not read."""

    def __init__(self, path):
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.size = fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, 4096)

    def read(self):
        """Read all that is there."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._fd, 1 << 20)
        return b""


def test_a_pipe_that_nobody_reads_holds_nobody_up(tmp_path):
    pipe = Pipe(tmp_path / "pipe")
    file = log_file.LogFile(tmp_path / "pipe")
    file.start()
    data = b"".join(b"%7d\n" % i for i in range(2 * pipe.size // 8))
    for i in range(0, len(data), 8):
        file.write(data[i : i + 8])
    assert isinstance(file.error, TimeoutError)
    assert file.lost == 0
    read = bytearray()

    def has_arrived() -> bool:  # Whole, once, in order.
        read.extend(pipe.read())
        return len(read) >= len(data)

    wait_until(has_arrived)
    assert read == data
    file.write(b"more\n")
    wait_until(lambda: file.error is None)
    file.close()
    assert pipe.read().endswith(b"more\n")


def test_a_pipe_that_nobody_reads_does_not_hold_up_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(log_file, "CLOSE_S", 0.01)
    monkeypatch.setattr(log_file, "MAX_WAITING_BYTES", 15_000)
    pipe = Pipe(tmp_path / "pipe")
    file = log_file.LogFile(tmp_path / "pipe")
    file.start()
    file.write(bytes(2 * pipe.size))
    for _ in range(9):
        file.write(bytes(1000))
    assert file.lost == 2
    file.close()
    assert isinstance(file.error, TimeoutError)
    pipe.read()  # Or its thread would wait for ever.


def test_logs_that_hang_are_warned_about_and_rows_are_not_held_up(tmp_path, capsys):
    pipe = Pipe(tmp_path / "out.log")
    with log_setup.setup_logging(tmp_path), logs.RunLog(tmp_path) as run_log:
        run_log.log({"step": 1})
        logging.getLogger().warning("x" * 2 * pipe.size)
        run_log.log({"step": 2})  # A disk may be late for one row.
        assert "Cannot write to" not in capsys.readouterr().err
        for step in (3, 4):
            run_log.log({"step": step})
        assert [row["step"] for row in read_rows(tmp_path / "logs.csv")] == list("1234")
        assert capsys.readouterr().err.count("Cannot write to") == 1
        pipe.read()
        wait_until(lambda: not run_log._out_logs[0].error or pipe.read() is None)
        run_log.log({"step": 5})
        assert "works again" in capsys.readouterr().err


def test_a_full_disk_behind_stderr_is_warned_about(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(terminal, "_is_file", lambda fd: True)
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with terminal.never_waiting(), logs.RunLog(tmp_path) as run_log:
            print("printed", file=sys.stderr)
            run_log.log({"step": 1})
    assert "Cannot write to /dev/full" in caplog.text
    assert "The end of /dev/full is lost" in caplog.text
