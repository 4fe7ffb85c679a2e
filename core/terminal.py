# SPDX-License-Identifier: Apache-2.0
"""Output that holds nobody up: to a terminal that stops reading, from child processes.

A terminal after Ctrl-S, a pager, tmux's copy mode or a stopped `tee` do not read, and
whoever writes to them waits. Training must not.

    with never_waiting():  # Around a whole program: sys.stdout, sys.stderr.
        output = ChildOutput()
        start_processes(output.theirs)  # Each calls redirect_output() with it.
        output.start()

There is no thread in `never_waiting`, so that a program may still fork. What could not
be shown is counted; all that is logged is in the run's out.log, too.
"""

import contextlib
import io
import logging
import multiprocessing
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection
from typing import Any

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 256 << 10  # For a terminal that does not read; then text is lost.
PATIENCE_S = 0.2  # For a terminal to take a text; one that takes longer hangs.
CLOSE_S = 1.0  # For it to take what is left when the program ends.

MAX_LINE_BYTES = 2000  # Of a child's line; the rest of it is left out.
# Of all children's output. Faster than that nobody reads, and a learner that formats
# it does not learn.
BURST_BYTES = 256 << 10
BYTES_PER_S = 64 << 10


# ------------------------------------------------------------------- this program's


class Terminal(io.TextIOBase):
    """A text stream in the place of sys.stdout or sys.stderr. Thread-safe.

    `write` returns within PATIENCE_S, and at once while the terminal hangs. What the
    terminal does not take waits for the next `write` or `flush`; beyond
    MAX_WAITING_BYTES it is lost, and counted where it would have been.
    """

    def __init__(self, stream: Any):
        """Write to where `stream`, which has a file descriptor, does."""
        self._stream = stream
        self._encoding = stream.encoding or "utf-8"
        # Never waits where the system allows that: see `_open_again`.
        self.urgent_fd = _open_again(stream.fileno())
        self._lock = threading.Lock()
        # What follows is guarded by it.
        self._waiting = bytearray()
        self._hangs = False
        self._lost = 0  # Lines, not yet told of.
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._waiting.clear()  # The parent writes it.

    def write(self, text: str) -> int:
        data = text.encode(self._encoding, "backslashreplace")
        with self._lock:
            if len(self._waiting) + len(data) <= MAX_WAITING_BYTES:
                self._waiting += data
            else:
                self._lost += data.count(b"\n") or 1
            self._write_waiting(0.0 if self._hangs else PATIENCE_S)
        return len(text)

    def flush(self, patience_s: float = 0.0) -> None:
        """Show what waits, within `patience_s`."""
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
        except OSError:  # It has gone, for instance with its ssh connection.
            self._waiting.clear()
        self._hangs = False

    # As the stream itself. `pdb` edits lines only where the descriptor is the same.

    def __getattr__(self, name: str) -> Any:  # `buffer`, say: bytes may wait.
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True


def _open_again(fd: int) -> int:
    """Return a descriptor for the same place whose writes never wait, if possible.

    Terminals and pipes only: others do not stop reading. O_NONBLOCK on the descriptor
    that is there would apply to the shell, too, and to all that share it. A terminal
    may belong to another user (after `su`); then `_is_ready` must do.
    """
    if os.isatty(fd) or stat.S_ISFIFO(os.fstat(fd).st_mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            return os.open(f"/dev/fd/{fd}", flags)
    return fd


def _is_ready(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(1000 * timeout_s))


@contextlib.contextmanager
def never_waiting() -> Iterator[None]:
    """Let nobody wait who prints, or logs to stderr, in this process."""
    old = sys.stdout, sys.stderr
    new = [Terminal(x) if _has_descriptor(x) else x for x in old]
    sys.stdout, sys.stderr = new
    try:
        yield
    finally:
        sys.stdout, sys.stderr = old
        for stream in new:
            if isinstance(stream, Terminal):
                stream.flush(CLOSE_S)


def _has_descriptor(stream: Any) -> bool:
    """Say whether it writes to a file descriptor; a test's may not."""
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def urgent_fd() -> int:
    """Return a descriptor of stderr for last words; writing does not wait."""
    fd = getattr(sys.stderr, "urgent_fd", None)
    return (sys.__stderr__ or sys.stderr).fileno() if fd is None else fd


def say_at_once(text: str) -> None:
    """Write to stderr, or do not, but do not wait. For signal handlers."""
    with contextlib.suppress(OSError):
        if _is_ready(urgent_fd(), 0.0):
            os.write(urgent_fd(), text.encode())


# ---------------------------------------------------------------- child processes'


class ChildOutput:
    """Logs, line by line, what child processes write to stdout and stderr.

    One pipe serves them all. A thread reads as fast as they write, so that no child
    waits, whatever the terminal does.
    """

    def __init__(self) -> None:
        # The children's end; as a Connection it reaches them under any start method.
        self._ours, self.theirs = multiprocessing.Pipe(duplex=False)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; calling it again is fine."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="children's output", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        for line in lines_of(self._ours.fileno()):
            log.info("%s", line)

    def close(self) -> None:
        """Log what is left. Children that live on hold it up for CLOSE_S."""
        self.theirs.close()
        if self._thread is not None:
            self._thread.join(CLOSE_S)


def redirect_output(theirs: connection.Connection) -> None:
    """In a child process: let all it writes, C libraries too, go to `ChildOutput`."""
    os.dup2(theirs.fileno(), 1)
    os.dup2(theirs.fileno(), 2)
    theirs.close()
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)


def lines_of(fd: int, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[str]:
    """Yield the lines that processes write into a pipe, until all have closed it.

    Of long lines the end is left out, and of more than BYTES_PER_S, after a burst,
    what is too much; what is left out is counted.
    """
    allowance, since = float(BURST_BYTES), time.monotonic()
    left_out, rest = 0, b""
    while chunk := os.read(fd, 1 << 16):
        now = time.monotonic()
        allowance = min(BURST_BYTES, allowance + (now - since) * BYTES_PER_S)
        since = now
        if len(chunk) > allowance:
            left_out += len(chunk)
            continue
        allowance -= len(chunk)
        if left_out:
            yield f"[{left_out:,} bytes of output left out]"
            left_out, rest = 0, b""
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (_cut(line, max_line_bytes) for line in lines)
        rest = rest[: max_line_bytes + 1]
    if rest:
        yield _cut(rest, max_line_bytes)
    if left_out:
        yield f"[{left_out:,} bytes of output left out]"


def _cut(line: bytes, max_bytes: int) -> str:
    text = line[:max_bytes].decode(errors="replace").rstrip()
    return f"{text} [cut]" if len(line) > max_bytes else text
