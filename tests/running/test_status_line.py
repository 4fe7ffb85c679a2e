# SPDX-License-Identifier: Apache-2.0
"""The status line, in terminals and elsewhere."""

import io
import logging
import math
import os
import pty
import re
import select
import struct
import sys
import termios
import threading
from fcntl import ioctl
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from core.running import log_setup, status_line
from tests.conftest import DEADLINE_S, Forked, wait_until


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; set `clock.now`."""
    clock = SimpleNamespace(now=1000.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(status_line, "time", fake)
    return clock


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def row(step, sps=1.0, mean_return=None, lag=None):
    """Return the row of a log; a step counts as four frames."""
    return {
        "step": step,
        "frames": 4 * step,
        "sps": sps,
        "mean_episode_return": mean_return,
        "policy_lag_mean": lag,
    }


def test_the_start_of_the_actors_does_not_count_for_the_eta(caplog, clock):
    caplog.set_level(logging.INFO)
    with status_line.StatusLine(10_000) as status:
        for step, sps in ((0, 0.0), (10, 10.0), (1010, 1000.0), (2000, 990.0)):
            clock.now += 10
            status.update(row(step, sps))
    etas = [m.rpartition("  ETA ")[2] for m in messages(caplog)]
    assert etas == ["-", "16m39s", "9s", "8s"]


def test_plain_lines_come_at_once_and_then_every_ten_seconds(caplog, clock):
    caplog.set_level(logging.INFO)
    with status_line.StatusLine(1000) as status:
        for second in range(0, 23, 2):
            clock.now = 1000.0 + second
            status.update(row(second))
            assert len(caplog.records) == 1 + second // 10
    # The last update is shown at the end.
    assert [m.split()[1] for m in messages(caplog)] == [
        "0/1.00k",
        "10/1.00k",
        "20/1.00k",
        "22/1.00k",
    ]


def test_a_plain_line_says_everything(caplog, clock):
    caplog.set_level(logging.INFO)
    with status_line.StatusLine(50_000_000, num_learners=3) as status:
        values = row(1_234_000, 1732.4, -20.346, 2.14)
        status.update(values, "env-bound 71 %")
    assert messages(caplog) == [
        "step 1.23M/50.0M  2.5%  4.94M frames  1,732 SPS  return(100) -20.35  lag 2.1"
        "  env-bound 71 %  ETA 7h49m  3 learners"
    ]


def test_what_is_not_known_yet_is_left_out_or_a_dash(caplog, clock):
    caplog.set_level(logging.INFO)
    with status_line.StatusLine(700) as status:
        status.update(row(0, 0.0))
    assert messages(caplog) == [
        "step 0/700  0.0%  0 frames  0 SPS  return(100) -  ETA -"
    ]


def test_force_color_does_not_make_a_file_a_terminal(caplog, clock, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    caplog.set_level(logging.INFO)
    with status_line.StatusLine(700) as status:
        status.update(row(7))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00k"),
        (45_640, "45.6k"),
        (9_996, "10.0k"),
        (99_960, "100k"),
        (999_400, "999k"),
        (999_600, "1.00M"),
        (50_000_000, "50.0M"),
        (200_000_000, "200M"),
        (8_000_000_000, "8.00G"),
        (2e12, "2000G"),
    ],
)
def test_counts_are_short(number, text):
    assert status_line._short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3725, "1h02m"), (180_000, "2d02h")],
)
def test_durations_are_short(seconds, text):
    assert status_line._duration(seconds) == text


def live_line(run_dir, stdout=None):
    """Be a program that shows a live line, and maybe prints to a file."""
    if stdout is not None:
        os.dup2(os.open(stdout, os.O_WRONLY | os.O_CREAT), 1)
    with log_setup.setup_logging(run_dir), status_line.StatusLine(1000) as status:
        for step in range(100, 800, 100):
            status._shown_at = -1.0  # As if enough time had gone by.
            status.update(row(step, 50.0, -3.25, 1.5), "env-bound 71 %")
            if step == 300:
                logging.getLogger("x").warning("an actor died")
            if step == 500:
                print("printed by the user")
            assert threading.active_count() == 1, threading.enumerate()
    print("after the line")


def outlive_terminal(run_dir):
    with log_setup.setup_logging(run_dir), status_line.StatusLine(1000) as status:
        status.update(row(100, 50.0))
        poll = select.poll()
        poll.register(2, select.POLLHUP)
        assert poll.poll(1000 * DEADLINE_S)
        for step in (200, 300):
            status._shown_at = -1.0
            status.update(row(step, 50.0))
        logging.info("still here")
    os._exit(7)


def with_utf8(function, *args):
    """Call a function in a terminal of any width and of all characters."""
    for name in ("COLUMNS", "NO_COLOR"):
        os.environ.pop(name, None)
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(encoding="utf-8")
    function(*args)


@pytest.fixture
def run_in_terminal(_context):
    """Call a function in a child that has a terminal; return its status and output.

    If `until` is in the output, the terminal goes away.
    """

    def run_in_terminal(function, *args, columns=80, until=None):
        parent, terminal = pty.openpty()
        ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        tty, output = Path(os.ttyname(terminal)), b""
        env = {"TERM": "xterm"}

        def has_ended() -> bool:
            nonlocal output
            is_alive = child.is_alive()
            while select.select([parent], [], [], 0)[0]:
                output += os.read(parent, 65536)
            return not is_alive or (until is not None and until in output)

        try:
            with Forked(_context, tty, with_utf8, function, *args, env=env) as child:
                wait_until(has_ended)
                os.close(parent)
                return child.wait(), output.decode()
        finally:
            os.close(terminal)

    return run_in_terminal


def screen(output):
    """Return the lines that a terminal shows after `output`, and all it ever showed."""
    lines, ever = [""], []
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if token == "\n":
            lines.append("")
        elif token == "\x1b[2K":
            lines[-1] = ""
        elif token == "\x1b[1A":
            lines.pop()
        elif token[0] not in "\x1b\r":
            lines[-1] += token
            ever.append(lines[-1])
    return [line.rstrip() for line in lines], ever


def test_a_terminal_shows_one_live_line_below_what_is_logged_and_printed(
    run_in_terminal, tmp_path
):
    status, output = run_in_terminal(live_line, tmp_path, columns=130)
    assert status == 0, output
    lines, ever = screen(output)
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING  an actor died", lines[0])
    assert lines[1:] == [
        "printed by the user",
        "step 700/1.00k  ━━━━━━━─── 70.0%  2.80k frames  50 SPS  return(100) -3.25"
        "  lag 1.5  env-bound 71 %  ETA 6s",
        "after the line",
        "",
    ]
    assert any(line.startswith("step 100/") for line in ever)
    assert "an actor died" in (tmp_path / "out.log").read_text()


def test_a_narrow_terminal_shows_the_most_important_parts_in_one_line(
    run_in_terminal, tmp_path
):
    columns = 59
    status, output = run_in_terminal(live_line, tmp_path, columns=columns)
    assert status == 0, output
    lines, ever = screen(output)
    assert lines[2] == "step 700/1.00k  50 SPS  return(100) -3.25  ETA 6s"
    drawn = [line for line in ever if line.startswith("step")]
    assert max(map(len, drawn)) < columns


def test_a_terminal_narrower_than_the_shortest_line_does_not_wrap(
    run_in_terminal, tmp_path
):
    columns = 23
    status, output = run_in_terminal(live_line, tmp_path, columns=columns)
    assert status == 0, output
    drawn = [line for line in screen(output)[1] if line.startswith("step")]
    assert drawn and max(map(len, drawn)) <= columns
    assert "\x1b[1A" not in output  # The cursor goes up if the line takes two.


def test_what_is_printed_goes_to_the_file_that_stdout_is(run_in_terminal, tmp_path):
    stdout = tmp_path / "stdout"
    status, output = run_in_terminal(live_line, tmp_path, stdout, columns=130)
    assert status == 0, output
    assert stdout.read_text() == "printed by the user\nafter the line\n"
    assert "step 700/" in output


def test_a_run_outlives_its_terminal(run_in_terminal, tmp_path):
    status, output = run_in_terminal(outlive_terminal, tmp_path, until=b"step 100/")
    assert status == 7, output
    assert "still here" in (tmp_path / "out.log").read_text()


def test_a_terminal_that_cannot_be_written_to_is_left_alone(monkeypatch):
    class Broken(io.StringIO):
        def isatty(self):
            return True

        def write(self, text):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(status_line, "log_console", lambda: Console(file=Broken()))
    monkeypatch.setenv("TERM", "xterm")
    before = sys.stdout, sys.stderr
    with status_line.StatusLine(1000) as status:
        for step in (100, 200):
            status._shown_at = -math.inf
            status.update(row(step, 50.0))
    assert (sys.stdout, sys.stderr) == before
