# SPDX-License-Identifier: Apache-2.0
"""A log file that cannot stop the run, even if the disk is full or does not answer.

The classes of `logging` and TensorBoard do not suffice: the handlers of `logging` write
in the thread that logs, so a disk that hangs would block training. The thread of
TensorBoard's writer ends if the disk is full.
"""

import contextlib
import errno
import logging
import os
import threading
from pathlib import Path

log = logging.getLogger(__name__)


# Limit of the data that waits in memory while it cannot be written. A row has about 300
# bytes, so this is enough for days. Further rows are dropped and counted.
MAX_WAITING_BYTES = 16 << 20
CHUNK_BYTES = 64 << 10  # Of one write: to try again costs little, whatever waits.
PATIENCE_S = 0.2  # A disk that needs longer for one row counts as hanging.
CLOSE_S = 2.0  # How long the end of the run waits for the disk.


class LogFile:
    """Appends to a file; data that cannot be written waits in memory. Thread-safe.

    The next `write` also writes the data that waits. After `start`, a separate thread
    writes to the file: if the disk hangs (a network file system that does not answer, a
    pipe that nobody reads), only this thread waits. `write` returns when the data is in
    the file, or after PATIENCE_S. There is no other buffer, so that written data
    survives the death of this process.
    """

    def __init__(self, path: Path, fd: int | None = None):
        """Open the file, or write to `fd`, a descriptor that already belongs to it."""
        self.path = path
        self._fd = self._open() if fd is None else fd
        self.begin()

    def begin(self) -> None:
        """Begin without a thread and without data.

        Also in a forked process: it lacks the thread, and its parent writes the data.
        """
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # Guarded by _changed:
        self.error: OSError | None = None  # Of the latest write; None if it worked.
        self.lost = 0  # Writes dropped because MAX_WAITING_BYTES were waiting.
        self._waiting = bytearray()
        # The number of the latest write asked for, and of the latest one tried.
        self._asked = self._answered = 0
        self._closing = False

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self.path, flags, 0o644)

    def is_gone(self) -> bool:
        """Return whether the file was deleted or replaced."""
        if is_missing(self.path):
            return True
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError as error:  # The file is closed, or the disk does not answer.
            return error.errno == errno.ESTALE  # NFS: the server has another file now.

    def reopen(self) -> None:
        """Create the file again, and write to the new file from now on."""
        fd = self._open()
        # The descriptor keeps its number, since the thread may be using it.
        os.dup2(fd, self._fd, inheritable=False)
        os.close(fd)

    def limit(self, max_bytes: int) -> None:
        """If the file is larger, rename it, and begin a new one.

        The first one is kept as NAME.first.log, the latest one as NAME.previous.log.
        After an error the file has its name again, and the next call tries again.
        """
        with contextlib.suppress(OSError):
            if self.path.stat().st_size > max_bytes:
                kept = self.path.with_suffix(".first.log")
                if kept.exists():
                    kept = self.path.with_suffix(".previous.log")
                os.replace(self.path, kept)
                try:
                    self.reopen()
                except OSError:
                    os.replace(kept, self.path)

    def start(self) -> None:
        """Write in a separate thread from now on. A second call does nothing.

        If there cannot be another thread at the moment, the next call tries again.
        """
        if self._thread is None and not self._closing:
            thread = threading.Thread(
                target=self._run, name=f"write {self.path.name}", daemon=True
            )
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    @property
    def has_waiting(self) -> bool:
        """Whether there is data in memory that is not in the file yet."""
        return bool(self._waiting)

    def add(self, data: bytes) -> None:
        """Keep data in memory for the next write."""
        with self._changed:
            if len(self._waiting) < MAX_WAITING_BYTES:
                self._waiting += data
            else:
                self.lost += 1

    def write(self, data: bytes, patience_s: float = PATIENCE_S) -> None:
        """Write data, or keep it in memory for the next write and set `error`."""
        with self._changed:
            self.add(data)
            if self._thread is None:
                self.error = self._try(len(self._waiting))
                return
            self._asked += 1
            number = self._asked
            self._changed.notify_all()
            if isinstance(self.error, TimeoutError):
                return  # The disk hangs already: do not wait again for each row.
            if not self._changed.wait_for(lambda: self._answered >= number, patience_s):
                self.error = TimeoutError(f"no answer for {patience_s:g} s")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or self._asked > self._answered
                )
                if self._asked == self._answered:
                    return
                number, num_bytes = self._asked, len(self._waiting)
            error = self._try(num_bytes)
            with self._changed:
                self.error, self._answered = error, number
                self._changed.notify_all()

    def _try(self, num_bytes: int) -> OSError | None:
        """Write so much of the data that waits; return the error, if any."""
        try:
            while num_bytes:
                with self._changed:
                    chunk = bytes(self._waiting[: min(CHUNK_BYTES, num_bytes)])
                # A write may be partial: the disk can fill up in the middle of a row.
                written = os.write(self._fd, chunk)
                with self._changed:
                    del self._waiting[:written]
                num_bytes -= written
        except OSError as error:
            return error
        return None

    def flush(self, patience_s: float) -> None:
        """Wait for the data that waits, for at most `patience_s`."""
        if isinstance(self.error, TimeoutError):
            self.error = None  # So that `write` waits again.
        self.write(b"", patience_s)

    def close(self) -> None:
        if self._closing:
            return
        self.flush(CLOSE_S)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if isinstance(self.error, TimeoutError):
            return  # The thread still uses the file. It ends with this process.
        if self._thread is not None:
            self._thread.join()
        try:
            os.close(self._fd)
        except OSError as error:  # NFS may report a full disk only now.
            self.error = error


def is_missing(path: Path) -> bool:
    """Return whether there is no such file; False if the disk does not say."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def report_lost(file: LogFile) -> None:
    """Warn about data that a closed file did not get."""
    if file.error:
        log.warning("The end of %s is lost: %s", file.path, file.error)
    if file.lost:
        log.warning("%s lacks %d rows or lines", file.path, file.lost)
