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
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from types import SimpleNamespace

import pytest
from rich.console import Console

from core.running import status_line
from tests.running.conftest import DEADLINE_S, PRELUDE, ROOT


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


LIVE_LINE = """
import threading
from tests.running.test_status_line import row
run_dir = Path(sys.argv[1])
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
"""


def run_in_terminal(code, *args, columns, stdout_to_terminal=True):
    """Run Python code in a terminal; return its status and what the terminal got."""
    parent, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    child = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, *map(str, args)],
        cwd=ROOT,
        env=env | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
        stdin=subprocess.DEVNULL,
        stdout=terminal if stdout_to_terminal else subprocess.PIPE,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        output = read_terminal(parent)
        stdout = child.stdout.read().decode() if child.stdout else ""
        return child.wait(DEADLINE_S), output, stdout
    finally:
        child.kill()
        child.wait(DEADLINE_S)
        os.close(parent)
        if child.stdout:
            child.stdout.close()


def read_terminal(fd, until=None):
    """Read until everybody has closed the terminal, or `until` is there."""
    data, deadline = b"", time.monotonic() + DEADLINE_S
    while until is None or until not in data:
        left = deadline - time.monotonic()
        assert left > 0 and select.select([fd], [], [], left)[0], data
        try:
            chunk = os.read(fd, 65536)
        except OSError:  # Linux says so at the end.
            break
        if not chunk:
            break
        data += chunk
    return data.decode()


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


def test_a_terminal_shows_one_live_line_below_what_is_logged_and_printed(tmp_path):
    status, output, _ = run_in_terminal(LIVE_LINE, tmp_path, columns=130)
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


def test_a_narrow_terminal_shows_the_most_important_parts_in_one_line(tmp_path):
    columns = 59
    status, output, _ = run_in_terminal(LIVE_LINE, tmp_path, columns=columns)
    assert status == 0, output
    lines, ever = screen(output)
    assert lines[2] == "step 700/1.00k  50 SPS  return(100) -3.25  ETA 6s"
    drawn = [line for line in ever if line.startswith("step")]
    assert max(map(len, drawn)) < columns


def test_a_terminal_narrower_than_the_shortest_line_does_not_wrap(tmp_path):
    columns = 23
    status, output, _ = run_in_terminal(LIVE_LINE, tmp_path, columns=columns)
    assert status == 0, output
    drawn = [line for line in screen(output)[1] if line.startswith("step")]
    assert drawn and max(map(len, drawn)) <= columns
    assert "\x1b[1A" not in output  # The cursor goes up if the line takes two.


def test_what_is_printed_goes_to_the_file_that_stdout_is(tmp_path):
    status, output, stdout = run_in_terminal(
        LIVE_LINE, tmp_path, columns=130, stdout_to_terminal=False
    )
    assert status == 0, output
    assert stdout == "printed by the user\nafter the line\n"
    assert "step 700/" in output


def test_a_run_outlives_its_terminal(tmp_path):
    code = """
from tests.running.test_status_line import row
with log_setup.setup_logging(Path(sys.argv[1])), status_line.StatusLine(1000) as status:
    status.update(row(100, 50.0))
    sys.stdin.read()  # Until the terminal is gone.
    for step in (200, 300):
        status._shown_at = -1.0
        status.update(row(step, 50.0))
    logging.info("still here")
os._exit(7)
"""
    parent, terminal = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"TERM": "xterm"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        read_terminal(parent, until=b"step 100/")
        os.close(parent)
        child.stdin.close()
        assert child.wait(DEADLINE_S) == 7
    finally:
        child.kill()
        child.wait(DEADLINE_S)
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
