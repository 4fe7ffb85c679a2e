# SPDX-License-Identifier: Apache-2.0
"""`LocalStreams`: streams for a learner on this machine, without gRPC.

gRPC's Python server hands each message from thread to thread, which takes longer than
a step of 32 CartPoles. Here the thread of a stream reads and writes a unix socket
itself: two system calls for each message. The other end is csrc/transport_local.cc.

A message is its length, 4 bytes in little-endian order, and its bytes. The server ends
a stream with the length 0 and, until it closes the connection, a text that says why.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from core.errors import ConfigError
from core.remote import messages

log = logging.getLogger(__name__)

HEADER_NBYTES = 4
BACKLOG = 256
ACCEPT_AGAIN_S = 0.5


class Call:
    """One stream's connection, with the methods of gRPC's context that are used."""

    def __init__(self, connection: socket.socket, max_nbytes: int) -> None:
        self._connection = connection
        self._max_nbytes = max_nbytes
        self._details = ""

    def peer(self) -> str:
        return "unix:"  # As gRPC says: somebody on this machine.

    def set_code(self, code: Any) -> None:
        """Do nothing: a learner needs only the text."""

    def set_details(self, details: str) -> None:
        self._details = details

    def cancel(self) -> None:
        """End the stream soon. Any thread may call it, more than once."""
        with contextlib.suppress(OSError):  # It has ended already.
            self._connection.shutdown(socket.SHUT_RDWR)

    def requests(self) -> Iterator[bytes]:
        """Yield the learner's messages, until the learner or `cancel` ends the stream.

        Raises:
          WireError: a message is too long.
        """
        with self._connection.makefile("rb") as reader, contextlib.suppress(OSError):
            while len(header := reader.read(HEADER_NBYTES)) == HEADER_NBYTES:
                nbytes = int.from_bytes(header, "little")
                if nbytes > self._max_nbytes:
                    raise messages.WireError(
                        f"expected a message of at most {self._max_nbytes} bytes, got "
                        f"one of {nbytes}"
                    )
                message = reader.read(nbytes)
                if len(message) < nbytes:
                    return
                yield message

    def send(self, message: bytes) -> None:
        """Send a message. Blocks while the learner does not read.

        Raises:
          OSError: the stream has ended.
        """
        header = len(message).to_bytes(HEADER_NBYTES, "little")
        sent = self._connection.sendmsg([header, message])
        if sent < HEADER_NBYTES + len(message):  # A signal came.
            rest = memoryview(header + message)[sent:]
            self._connection.sendall(rest)

    def end(self) -> None:
        """Send the reason why the stream ends, and close the connection."""
        with contextlib.suppress(OSError):
            self._connection.sendall(bytes(HEADER_NBYTES) + self._details.encode())
        self.cancel()  # Or the socket would stay open while `requests` reads it.
        self._connection.close()


class LocalStreams:
    """Serves streams at a unix socket, each in a thread of its own.

    Args:
      path: of the socket. It is replaced; `check_address` has found nobody there.
      serve: called with a stream's requests and its `Call`; yields the answers.
      max_nbytes: limit for a received message.

    Raises:
      ConfigError: the path cannot be used.
    """

    def __init__(
        self,
        path: str,
        serve: Callable[[Iterator[bytes], Call], Generator[bytes, None, None]],
        *,
        max_nbytes: int,
    ) -> None:
        self._path = path
        self._serve = serve
        self._max_nbytes = max_nbytes
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._calls: dict[threading.Thread, Call] = {}
        self._is_stopping = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(None)  # An environment may have set a default.
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # Of a server that was killed.
            self._listener.bind(path)
            self._listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen at {path}: {error}") from error
        threading.Thread(target=self._accept, name="local-streams", daemon=True).start()

    def stop(self, grace_s: float) -> None:
        """End all streams: after `grace_s` also those that wait for the learner."""
        deadline = time.monotonic() + grace_s
        with self._lock:
            self._is_stopping = True
            calls = dict(self._calls)
        # Before the listener closes. After that another server may create its socket
        # here, which this would delete.
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        with contextlib.suppress(OSError):  # Not on Linux.
            self._listener.shutdown(socket.SHUT_RDWR)  # Ends _accept.
        self._listener.close()
        for thread in calls:
            thread.join(max(0.0, deadline - time.monotonic()))
        for call in calls.values():
            call.cancel()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._is_stopping:
                    return
                log.warning("Cannot accept a stream at %s: %s", self._path, error)
                time.sleep(ACCEPT_AGAIN_S)  # Until descriptors are free.
                continue
            connection.settimeout(None)
            call = Call(connection, self._max_nbytes)
            # No daemon: the process waits until the environments are closed.
            thread = threading.Thread(
                target=self._run, args=(call,), name="stream", daemon=False
            )
            with self._lock:
                if self._is_stopping:
                    connection.close()
                    return
                try:
                    thread.start()
                except RuntimeError as error:  # The system has no thread left.
                    log.warning("Turned away a stream at %s: %s", self._path, error)
                    connection.close()
                    continue
                self._calls[thread] = call

    def _run(self, call: Call) -> None:
        try:
            answers = self._serve(call.requests(), call)
            with contextlib.closing(answers), contextlib.suppress(OSError):
                for message in answers:
                    call.send(message)
        finally:
            call.end()
            with self._lock:
                del self._calls[threading.current_thread()]
