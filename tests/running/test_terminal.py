# SPDX-License-Identifier: Apache-2.0
"""core.running.terminal: nobody waits for a terminal that does not read, or for a
child's."""

import contextlib
import ctypes
import errno
import fcntl
import io
import logging
import multiprocessing
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

import monobeast
from core.imports import open_closed_streams
from core.running import supervise, terminal
from core.running.log_file import LogFile
from core.running.terminal import ChildOutput, Terminal, lines_of, never_waiting
from tests.conftest import DEADLINE_S, fill, wait_until

ROOT = Path(__file__).parents[2]


def read(fd: int) -> str:
    """Return what is there to be read now."""
    text = b""
    while select.select([fd], [], [], 0)[0]:
        text += os.read(fd, 1 << 16)
    return text.decode()


@pytest.fixture(params=["pipe", "terminal", "without a second descriptor"])
def reader_and_stream(request, monkeypatch):
    """A descriptor to read from, and the text stream at its other end."""
    if request.param == "terminal":
        ours, theirs = pty.openpty()
        settings = termios.tcgetattr(theirs)
        settings[1] &= ~termios.OPOST  # No carriage returns.
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
    else:
        ours, theirs = os.pipe()
    if request.param == "without a second descriptor":
        monkeypatch.setattr(terminal, "_open_again", lambda fd: fd)
    with open(theirs, "w") as stream:
        yield ours, stream
    os.close(ours)


def test_who_writes_does_not_wait_and_what_is_lost_is_counted(
    reader_and_stream, background
):
    ours, stream = reader_and_stream
    fill(stream.fileno())
    shown = Terminal(stream)
    half = terminal.MAX_WAITING_BYTES // 2

    def write() -> None:
        for text in ("a" * half, "b" * half, "c\n" * half):
            assert shown.write(text) == len(text)

    background(write).result(DEADLINE_S)
    text = read(ours)

    def has_come() -> bool:
        nonlocal text
        shown.flush()
        text += read(ours)
        return "not shown" in text

    wait_until(has_come)
    shown.write("e\n")
    text += read(ours)
    first, rest = text.strip("x").split("\n", 1)
    assert first == "a" * half + "b" * half
    assert rest == f"[{half} lines not shown: the terminal did not read]\ne\n"


def test_a_terminal_after_ctrl_s_holds_nobody_up(background):
    ours, theirs = pty.openpty()
    with open(theirs, "w") as stream:
        shown = Terminal(stream)
        shown.write("before ")
        termios.tcflow(theirs, termios.TCOOFF)  # Ctrl-S.
        background(shown.write, "meanwhile ").result(DEADLINE_S)
        background(terminal.say_at_once, "").result(DEADLINE_S)
        termios.tcflow(theirs, termios.TCOON)
        shown.write("after")
        assert shown.isatty()
        assert read(ours) == "before meanwhile after"
    os.close(ours)


@pytest.fixture
def hanging_file(monkeypatch):
    """A descriptor to read from, and a stream that counts as a file on a disk.

    It is a pipe. `poll` says of each file on a disk that it is ready.
    """
    monkeypatch.setattr(terminal, "may_wait", lambda fd: False)
    monkeypatch.setattr(terminal, "_is_file", lambda fd: True, raising=False)
    monkeypatch.setattr(terminal, "_is_ready", lambda fd, timeout_s: True)
    ours, theirs = os.pipe()
    with open(theirs, "w") as stream:
        yield ours, stream
    os.close(ours)


def wait_for_files(monkeypatch) -> None:
    """Let each write to a file wait for its thread, however busy the machine is."""
    monkeypatch.setattr(LogFile.write, "__defaults__", (DEADLINE_S,))


def test_a_file_on_a_disk_that_hangs_holds_nobody_up(
    hanging_file, background, monkeypatch
):
    ours, stream = hanging_file
    monkeypatch.setattr(sys, "stderr", stream)
    with never_waiting():
        terminal.write_waiting()
        with monkeypatch.context() as patch:
            wait_for_files(patch)
            print("one", file=sys.stderr)
        assert read(ours) == "one\n"  # At once, in case the program is killed.
        fill(stream.fileno())
        for text in "a" * 200, "b\n":
            background(sys.stderr.write, text).result(DEADLINE_S)
        background(terminal.say_at_once, "lost" * 50).result(DEADLINE_S)
        text = ""

        def has_come() -> bool:
            nonlocal text
            text += read(ours)
            return text.endswith("b\n")

        wait_until(has_come)
        assert text.strip("x") == "a" * 200 + "b\n"


def test_a_file_on_a_disk_that_hangs_does_not_hold_up_the_end(
    hanging_file, background, monkeypatch
):
    ours, stream = hanging_file
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(terminal, "CLOSE_S", 0.01)

    def program() -> None:
        with never_waiting():
            terminal.write_waiting()
            fill(stream.fileno())
            print("late" * 50, file=sys.stderr)

    background(program).result(DEADLINE_S)
    wait_until(lambda: read(ours).endswith("late\n"))  # Its thread, which still waits.


def test_a_file_on_a_full_disk_gets_what_waits_once_there_is_room(
    tmp_path, monkeypatch
):
    def write(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    wait_for_files(monkeypatch)
    with open(tmp_path / "file", "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with never_waiting():
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", write)
                print("late", file=sys.stderr)
            terminal.write_waiting()
            assert (tmp_path / "file").read_text() == "late\n"


def test_lines_that_two_threads_print_to_a_file_are_not_mixed(tmp_path, monkeypatch):
    pieces = []

    def write(fd, data):
        pieces.append(data)
        return len(data)

    with open(tmp_path / "file", "w") as stream:
        shown = Terminal(stream)
        monkeypatch.setattr(os, "write", write)
        print("a", "b", file=shown)
        print("no end", end="", flush=True, file=shown)
    assert pieces == [b"a b\n", b"no end"]


FORK = """
import os, sys
from core.running import log_file, terminal
log_file.LogFile.write.__defaults__ = (60.0,)
with terminal.never_waiting():
    terminal.write_waiting()
    print("parent", flush=True)
    if os.fork() == 0:
        print("child", flush=True)
        os._exit(0)
    os.wait()
"""


def test_what_a_forked_child_prints_is_in_the_file(tmp_path):
    with open(tmp_path / "out", "w") as out:
        subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "parent\nchild\n"


def test_what_others_do_with_the_descriptor_stays_as_it_is(reader_and_stream):
    _, stream = reader_and_stream
    shown = Terminal(stream)
    assert not fcntl.fcntl(stream.fileno(), fcntl.F_GETFL) & os.O_NONBLOCK
    assert shown.fileno() == stream.fileno()
    assert shown.buffer is stream.buffer  # Some libraries write bytes.


def test_a_file_is_written_in_turn_with_who_else_has_it(tmp_path):
    with open(tmp_path / "file", "w") as stream:
        shown = Terminal(stream)
        for i in range(3):
            shown.write(f"ours {i}\n")
            os.write(stream.fileno(), f"theirs {i}\n".encode())
    lines = (tmp_path / "file").read_text().splitlines()
    assert lines == [f"{who} {i}" for i in range(3) for who in ("ours", "theirs")]


def test_a_reader_that_has_gone_is_no_error():
    ours, theirs = os.pipe()
    with open(theirs, "w") as stream:
        shown = Terminal(stream)
        os.close(ours)
        assert shown.write("nobody reads this\n") == 18
        shown.flush()


def test_what_is_printed_in_the_block_reaches_the_reader_until_its_end(monkeypatch):
    ours, theirs = os.pipe()
    with open(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", unknown := io.StringIO())
        with never_waiting():
            assert sys.stdout is unknown  # It has no descriptor.
            print("one é", file=sys.stderr)
            fill(theirs)
            print("two", file=sys.stderr)
            assert read(ours).startswith("one é\nx")
        assert read(ours).endswith("two\n") and sys.stderr is stream
    os.close(ours)


def test_c_code_does_not_wait_in_the_block(reader_and_stream, monkeypatch, background):
    ours, stream = reader_and_stream
    if terminal._open_again(stream.fileno()) == stream.fileno():
        pytest.skip("without a second descriptor C code waits")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", stream)
    write = ctypes.CDLL(None).write
    with never_waiting(c_code=True):
        write(stream.fileno(), b"from C", 6)
        assert read(ours) == "from C"
        fill(stream.fileno())
        background(write, stream.fileno(), b"lost" * 999, 4 * 999).result(DEADLINE_S)
    assert os.get_blocking(stream.fileno())


INPUT = """
import readline
from core.running.terminal import never_waiting
with never_waiting(c_code=True):
    print("read", input("? "))  # As pdb reads.
"""


def test_a_user_of_pdb_can_edit_lines():
    pytest.importorskip("readline")
    ours, theirs = pty.openpty()
    shown = ""
    with subprocess.Popen(
        [sys.executable, "-c", INPUT], cwd=ROOT, stdin=theirs, stdout=theirs
    ) as process:
        os.close(theirs)
        while "? " not in shown:
            shown += os.read(ours, 100).decode()
        os.write(ours, b"ac\x1b[Db\r")  # The left arrow, then the letter between.
        with contextlib.suppress(OSError):  # The process has ended.
            while True:
                shown += os.read(ours, 100).decode()
        assert process.wait(DEADLINE_S) == 0
    os.close(ours)
    assert "read abc" in shown


def test_last_words_do_not_wait(monkeypatch, background):
    ours, theirs = os.pipe()
    fill(theirs)
    with open(theirs, "w") as stream:
        for stderr in (stream, Terminal(stream)):
            monkeypatch.setattr(sys, "stderr", stderr)
            monkeypatch.setattr(sys, "__stderr__", stream)
            background(terminal.say_at_once, "?").result(DEADLINE_S)
            assert "?" not in read(ours)
            terminal.say_at_once("now")
            assert read(ours) == "now"
            fill(theirs)
    os.close(ours)


# ------------------------------------------------------------------- child processes


def piped(*chunks: bytes):
    """Yield the lines of what is written into a pipe, chunk by chunk."""
    ours, theirs = os.pipe()
    os.write(theirs, chunks[0])
    lines = lines_of(ours)
    for chunk in chunks[1:]:
        yield next(lines)
        os.write(theirs, chunk)
    os.close(theirs)
    yield from lines
    os.close(ours)


def test_lines_come_one_by_one_the_last_without_an_end_too():
    lines = piped(b"one\nhalf", b" two\r\n\nthree \xff")
    assert list(lines) == ["one", "half two", "", "three \ufffd"]


def test_the_end_of_a_long_line_is_left_out():
    long = b"a" * (terminal.MAX_LINE_BYTES + 1)
    cut = "a" * terminal.MAX_LINE_BYTES + " [cut]"
    assert list(piped(long + b"\nb\n" + long[1:] + b"\n" + long)) == [
        *(cut, "b", cut.removesuffix(" [cut]"), cut)
    ]


def test_more_than_anybody_reads_is_left_out_and_counted_but_the_last_line(monkeypatch):
    """The last line may say why a process has ended."""
    monkeypatch.setattr(terminal, "BURST_BYTES", 10)
    monkeypatch.setattr(terminal, "BYTES_PER_S", 0)
    lines = terminal.Lines(terminal.MAX_LINE_BYTES)
    assert list(lines.feed(b"12345678\n")) == ["12345678"]
    for chunk in b"too much\nand", b" too", b" long\n":
        assert list(lines.feed(chunk)) == []
    assert list(lines.end()) == ["[22 bytes of output left out]", "and too long"]
    monkeypatch.setattr(terminal, "BYTES_PER_S", 1e12)  # 10 at a time.
    for chunk in b"too much\nwhy", b" it\n":
        assert list(lines.feed(chunk)) == []
    assert list(lines.end()) == ["[16 bytes of output left out]", "why it"]


def test_no_part_of_a_line_is_shown_after_output_was_left_out(monkeypatch):
    monkeypatch.setattr(terminal, "BURST_BYTES", 20)  # So longer chunks are left out.
    monkeypatch.setattr(terminal, "BYTES_PER_S", 1e12)
    lines, long = terminal.Lines(terminal.MAX_LINE_BYTES), b"x" * 21
    chunks = b'one\n{"a', long, b" half", b' half"}\n{"b": 2}\n', b"{", long[1:] + b"\n"
    assert [list(lines.feed(chunk)) for chunk in chunks] == [
        *(["one"], [], [], ["[37 bytes of output left out]", '{"b": 2}'], [], [])
    ]
    assert list(lines.feed(b"two\nthr")) == ["[22 bytes of output left out]", "two"]
    assert list(lines.feed(long)) == []
    assert list(lines.end()) == ["[24 bytes of output left out]"]


def chatter(theirs) -> None:
    terminal.redirect_output(theirs)
    print("from Python")
    subprocess.run(["sh", "-c", "echo from C >&2"], check=True)
    os.write(2, b"blob " * 200_000)


def test_what_child_processes_write_is_logged_and_they_do_not_wait(caplog):
    caplog.set_level(logging.INFO)
    output = ChildOutput()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=chatter, args=(output.theirs,), daemon=True)
    child.start()
    output.start()
    child.join(DEADLINE_S)
    assert child.exitcode == 0
    output.close()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == ["from Python", "from C"]
    assert "left out" in lines[-1] or lines[-1].endswith("[cut]")
    assert sum(map(len, lines)) < 10_000


def test_what_child_processes_write_can_be_closed_if_no_thread_can_start(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    output = ChildOutput()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        output.start()
    output.close()  # So that the run's error is the one above.


def test_a_warning_that_each_environment_prints_does_not_fill_the_log():
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    handler.addFilter(supervise.Repeats())
    logger = logging.getLogger("core.running.terminal")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        output = ChildOutput()
        printed = b"WARNING: NaN in body 7\n\n" * 20 + b"a step\n" * 3  # As MuJoCo.
        os.write(output.theirs.fileno(), printed)
        output.read()
        output.close()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    first, *again = lines[:5]
    assert first == "WARNING: NaN in body 7"
    assert again == [f"{first} ({n} times so far)" for n in (2, 4, 8, 16)]
    assert lines[5:] == ["a step"] * 3  # Somebody may count these.


def test_a_main_loop_may_log_what_child_processes_write_without_a_thread(caplog):
    caplog.set_level(logging.INFO)
    output = ChildOutput()
    for text in (b"one\nhalf", b" two\nlast"):
        os.write(output.theirs.fileno(), text)
        output.read()
    assert [record.getMessage() for record in caplog.records] == ["one", "half two"]
    output.close()
    assert caplog.records[-1].getMessage() == "last"


def train_without_streams(argv) -> int:
    os.closerange(0, 3)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, name, None)
    open_closed_streams()
    return monobeast.main(argv)


def test_a_run_needs_no_open_standard_streams(tmp_path, run_forked):
    flags = f"--env Catch --serial --total_steps 640 --savedir {tmp_path} --xpid x"
    assert run_forked(train_without_streams, flags.split()) == (0, "")
    assert "Done" in (tmp_path / "x/out.log").read_text()


CLOSED = "exec {} {} <&- >&- 2>&-"  # The shell closes the three streams.
# It ends a program that imports it, before the program has imported torch.
HAS_NULL = """
import os
fds = [os.readlink(f"/proc/self/fd/{i}") for i in range(3)]
os._exit(0 if fds == 3 * [os.devnull] else 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    "program", ["-m monobeast", "-m polybeast", "-c 'import tools, gymnasium'"]
)
def test_no_file_of_a_program_gets_the_descriptor_of_a_closed_stream(program, tmp_path):
    (tmp_path / "gymnasium.py").write_text(HAS_NULL)
    command = ["sh", "-c", CLOSED.format(sys.executable, program)]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run(command, cwd=ROOT, env=env).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_file_of_a_server_gets_the_descriptor_of_a_closed_stream(
    start_program, folder
):
    flags = f"--env Catch --num_servers 1 --server_address unix:{folder}/env"
    command = CLOSED.format(sys.executable, f"-m polybeast_env {flags}")
    program = start_program("sh", "-c", command)
    program.wait_for((folder / "env").exists)
    for process in (program, *program.family()):
        for fd in (0, 1, 2):
            assert os.readlink(f"/proc/{process.pid}/fd/{fd}") == os.devnull
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 0
