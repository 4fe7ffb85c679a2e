# SPDX-License-Identifier: Apache-2.0
"""Output that never blocks this program or its child processes.

A terminal after Ctrl-S, a pager, tmux's copy mode and a stopped `tee` do not read, and
a process that writes to them blocks. Training must not block.

    with never_waiting():  # Around a whole program: sys.stdout, sys.stderr.
        output = ChildOutput()
        start_processes(output.theirs)  # Each calls redirect_output(output.theirs).
        output.start()

`never_waiting` starts no thread, so that a program may still fork. A regular file may
be on a disk that does not answer: after `write_waiting` a thread writes to it. Lines
that cannot be shown are counted. Log records are in the run's out.log in any case. Text
of C libraries is lost if the terminal does not take it: C code may hold the GIL, so no
Python thread could keep the text.
"""

import contextlib
import ctypes
import fcntl
import io
import logging
import multiprocessing
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from core.running.log_file import LogFile

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 256 << 10  # Limit of text that waits; more text is dropped.
PATIENCE_S = 0.2  # A terminal that needs longer for one text counts as hanging.
PIPE_BYTES = 1 << 20  # Size for a pipe, so that C libraries' text waits for a `tee`.
CLOSE_S = 1.0  # How long the end of the program waits for the terminal.

MAX_LINE_BYTES = 2000  # Longer lines of a child are cut.
# Limits of the output of all children together. Nobody can read faster, and more output
# would cost the learner time.
BURST_BYTES = 256 << 10
BYTES_PER_S = 64 << 10


# --------------------------------------------------------- output of this process


class Terminal(io.TextIOBase):
    """A text stream that replaces sys.stdout or sys.stderr. Thread-safe.

    `write` returns within PATIENCE_S, and at once while the terminal hangs. Text that
    the terminal does not take waits for the next `write` or `flush`. Beyond
    MAX_WAITING_BYTES text is dropped; a note in its place says how many lines. Text for
    a regular file goes to a `LogFile`, which has limits of its own.
    """

    def __init__(self, stream: Any):
        """Write to the same place as `stream`, which must have a file descriptor."""
        self._stream = stream
        self._encoding = stream.encoding or "utf-8"
        fd = stream.fileno()
        # Writes to this descriptor do not block, if possible: see `_open_again`.
        self.urgent_fd = _open_again(fd)
        self.file: LogFile | None = None
        if _is_file(fd):
            self.file = LogFile(Path(os.path.realpath(f"/dev/fd/{fd}")), fd)
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._waiting = bytearray()
        self._hangs = False
        self._lost = 0  # Dropped lines that no note has reported yet.
        os.register_at_fork(after_in_child=self._reset_in_child)

    def _reset_in_child(self) -> None:
        self._lock = threading.Lock()
        self._waiting.clear()  # The parent writes this text.
        if self.file is not None:
            self.file.begin()

    def write(self, text: str) -> int:
        data = text.encode(self._encoding, "backslashreplace")
        if self.file is not None:
            # `print` writes the end of a line separately. The text waits for it, so
            # that lines of several threads are not mixed.
            write = self.file.write if text.endswith("\n") else self.file.add
            write(data)
            return len(text)
        with self._lock:
            if len(self._waiting) + len(data) <= MAX_WAITING_BYTES:
                self._waiting += data
            else:
                self._lost += data.count(b"\n") or 1
            self._write_waiting(0.0 if self._hangs else PATIENCE_S)
        return len(text)

    def flush(self, patience_s: float = 0.0) -> None:
        """Write the waiting text, for at most `patience_s`."""
        if self.file is not None and self.file.has_waiting:
            if patience_s:
                self.file.flush(patience_s)
            else:
                self.file.write(b"")
        with self._lock:
            self._write_waiting(patience_s)

    def _write_waiting(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        try:
            while self._waiting:
                if not _is_ready(self.urgent_fd, max(0.0, deadline - time.monotonic())):
                    self._hangs = True
                    return
                with contextlib.suppress(BlockingIOError):
                    n = os.write(self.urgent_fd, self._waiting[: select.PIPE_BUF])
                    del self._waiting[:n]
                if self._lost and not self._waiting:
                    note = f"[{self._lost} lines not shown: the terminal did not read]"
                    self._waiting += f"\n{note}\n".encode()
                    self._lost = 0
        except OSError:  # The terminal has closed, as when ssh ends.
            self._waiting.clear()
        self._hangs = False

    # All other attributes are the stream's. `pdb` edits lines only if the descriptor is
    # the same.

    def __getattr__(self, name: str) -> Any:  # Such as `buffer`.
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Make writes of C libraries to the stream's descriptor never block.

        The descriptor still refers to the same file (a terminal, for instance), so that
        pdb can edit lines.
        """
        fd, blocking = self.fileno(), os.dup(self.fileno())
        os.dup2(self.urgent_fd, fd)
        with contextlib.suppress(AttributeError, OSError):  # No pipe, or not Linux.
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)  # Writes the buffers of C's stdio.
            os.dup2(blocking, fd)
            os.close(blocking)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"  # If it is None, `input` does not edit lines.

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True


def _open_again(fd: int) -> int:
    """Return a descriptor for the same file whose writes never block, if possible.

    Only terminals and pipes can block. O_NONBLOCK on the old descriptor would also
    change it for the shell and all other processes that share it. A terminal that
    belongs to another user (after `su`) cannot be opened again. Then only `_is_ready`
    prevents blocking.
    """
    if may_wait(fd):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            return os.open(f"/dev/fd/{fd}", flags)
    return fd


def _is_file(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


def _is_ready(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(1000 * timeout_s))


@contextlib.contextmanager
def never_waiting(*, c_code: bool = False) -> Iterator[None]:
    """Make print and logging to stderr never block in this process.

    Args:
      c_code: do the same for C libraries. Child processes inherit this.
    """
    out, err = _never_waiting(sys.stdout), _never_waiting(sys.stderr)
    with contextlib.ExitStack() as stack:
        for stream in (out, err):
            if isinstance(stream, Terminal):
                stack.callback(stream.flush, CLOSE_S)
                if c_code:
                    stack.enter_context(stream.in_place())
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield


def files() -> list[LogFile]:
    """Return the regular files to which stdout and stderr write, if any."""
    return [x.file for x in _terminals() if x.file is not None]


def _terminals() -> list[Terminal]:
    return [x for x in (sys.stdout, sys.stderr) if isinstance(x, Terminal)]


def write_waiting() -> None:
    """Write the text that waits; from now on a thread writes to a regular file.

    Call it now and then, so that text does not wait for the next one.
    """
    for stream in _terminals():
        if stream.file is not None:
            stream.file.start()
        stream.flush()


def _never_waiting(stream: Any) -> Any:
    """Return a `Terminal` for a stream; the stream itself if it has no descriptor."""
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return stream  # Of a test.
    return Terminal(stream)


def urgent_fd() -> int:
    """Return a descriptor of stderr for last messages, which does not block."""
    fd = getattr(sys.stderr, "urgent_fd", None)
    return (sys.__stderr__ or sys.stderr).fileno() if fd is None else fd


def say_at_once(text: str) -> None:
    """Write to stderr if that is possible without blocking. For signal handlers."""
    hangs = any(isinstance(file.error, TimeoutError) for file in files())
    with contextlib.suppress(OSError):
        if not hangs and _is_ready(urgent_fd(), 0.0):
            os.write(urgent_fd(), text.encode())


# ------------------------------------------------------- output of child processes


class ChildOutput:
    """Logs each line that child processes write to stdout and stderr.

    All children share one pipe. After `start`, a thread reads as fast as the children
    write, so that no child blocks, even if the terminal hangs. Without `start`, the
    main loop must call `read` whenever `fileno` is readable.
    """

    def __init__(self) -> None:
        # `theirs` is a Connection, which every start method can send to a child.
        self._ours, self.theirs = multiprocessing.Pipe(duplex=False)
        self._thread: threading.Thread | None = None
        self._lines = Lines(MAX_LINE_BYTES)

    def fileno(self) -> int:
        return self._ours.fileno()

    def read(self) -> None:
        """Log the lines in the pipe. Blocks if the pipe is empty."""
        for line in self._lines.feed(os.read(self.fileno(), 1 << 16)):
            log_output(line)

    def start(self) -> None:
        """Start the thread. A second call does nothing."""
        if self._thread is None:
            thread = threading.Thread(
                target=self._run, name="children's output", daemon=True
            )
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        for line in lines_of(self._ours.fileno()):
            log_output(line)

    def close(self) -> None:
        """Log the last lines. Wait for up to CLOSE_S for children that still run."""
        self.theirs.close()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            return
        if connection.wait([self._ours], 0):
            self.read()
        for line in self._lines.end():
            log_output(line)


def log_output(line: str, level: int = logging.INFO) -> None:
    """Log a line that child processes wrote, unless it is empty.

    A line with the word "warning" is counted when it comes again, like this program's
    own warnings (`core.running.supervise.Repeats`), because a library may print it once
    per environment.
    """
    if line:
        is_warning = "warning" in line.lower()
        log.log(level, "%s", line, extra={"repeats": True} if is_warning else None)


def redirect_output(theirs: connection.Connection) -> None:
    """In a child process: send all output, also of C libraries, to `ChildOutput`."""
    redirect_descriptors(theirs, (1, 2))
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)


def redirect_descriptors(theirs: connection.Connection, fds: Sequence[int]) -> None:
    """In a child process: send the output of C libraries to `ChildOutput`.

    sys.stdout and sys.stderr do not change: a `Terminal` never blocks.
    """
    for fd in fds:
        os.dup2(theirs.fileno(), fd)
    theirs.close()


def may_wait(fd: int) -> bool:
    """Return whether writes may block until somebody reads: to a terminal or a pipe."""
    with contextlib.suppress(OSError):  # The descriptor is closed.
        return os.isatty(fd) or stat.S_ISFIFO(os.fstat(fd).st_mode)
    return False


def lines_of(fd: int, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[str]:
    """Yield the lines that processes write into a pipe, until all close it."""
    lines = Lines(max_line_bytes)
    while chunk := os.read(fd, 1 << 16):
        yield from lines.feed(chunk)
    yield from lines.end()


class Lines:
    """Splits the output of processes into lines.

    Long lines are cut. After a burst of BURST_BYTES, output beyond BYTES_PER_S is left
    out in whole lines, and a line reports the number of bytes. (The rest of a line may
    be half a JSON record.) The last line of all is never left out: it may say why a
    process has ended.
    """

    def __init__(self, max_line_bytes: int):
        self._max_bytes = max_line_bytes
        self._allowance, self._since = float(BURST_BYTES), time.monotonic()
        self._left_out, self._rest = 0, b""
        self._tail = b""  # The end of the text that was left out.
        self._is_in_line = False  # Whether the present line's start was left out.

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the lines that end in `chunk`."""
        now = time.monotonic()
        self._allowance += (now - self._since) * BYTES_PER_S
        self._allowance = min(BURST_BYTES, self._allowance)
        self._since = now
        if len(chunk) > self._allowance:
            self._leave_out(self._rest + chunk)
            self._rest, self._is_in_line = b"", not chunk.endswith(b"\n")
            return
        self._allowance -= len(chunk)
        if self._is_in_line:
            end, newline, chunk = chunk.partition(b"\n")
            self._leave_out(end + newline)
            self._is_in_line = not newline
            if not chunk:  # Nothing to show yet. The last line may be in the tail.
                return
        if self._left_out:
            yield self._tell_left_out()
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[: self._max_bytes + 1]
        for line in lines:
            yield _cut(line, self._max_bytes)

    def end(self) -> Iterator[str]:
        """Yield the text after the last line break, and the report of what was cut."""
        if self._rest:
            yield _cut(self._rest, self._max_bytes)
        if self._left_out:
            tail = self._tail
            yield self._tell_left_out()
            if tail.endswith(b"\n"):
                yield _cut(tail[:-1].rpartition(b"\n")[2], self._max_bytes)

    def _leave_out(self, text: bytes) -> None:
        self._left_out += len(text)
        self._tail = (self._tail + text)[-self._max_bytes :]

    def _tell_left_out(self) -> str:
        text = f"[{self._left_out:,} bytes of output left out]"
        self._left_out, self._tail = 0, b""
        return text


def _cut(line: bytes, max_bytes: int) -> str:
    text = line[:max_bytes].decode(errors="replace").rstrip()
    return f"{text} [cut]" if len(line) > max_bytes else text
