# SPDX-License-Identifier: Apache-2.0
"""Connections between machines that dial in and the learner: lines, TLS, then bytes.

`core.remote.acceptor`, beside the learner, and `core.remote.dialer`, beside the
environment servers, use this module. Both are separate processes that run asyncio.

    learner ── unix socket ── acceptor ── network ── dialer ── unix socket ── server
                                 ◄───────── dials ──────┘

The dialer opens all connections. The first line of a connection says whether it will be
encrypted. The next line, the hello, says which kind of connection it is:

    join      stays open while the machine takes part: both sides send lines
    tunnel    carries one gRPC connection; the acceptor has asked for it by a line

In TLS the machine is the server and the learner is the client, as they are when the
learner dials. So both use the certificates that they already have, and nobody can pose
as a learner with a machine's certificate. The learner shows its certificate only after
it has checked the machine's.
"""

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

PROTOCOL = 1
MAX_LINE_BYTES = 512
BUFFER_BYTES = 1 << 20  # While more bytes wait to be sent, reading is paused.
READ_BYTES = 256 << 10
CLOSE_S = 5.0  # Time to send waiting bytes before a connection is closed.
MAX_SERVERS = 10_000  # Servers of one machine.

JOIN = re.compile(r"join ([0-9a-f]{32}) ([1-9]\d{0,4}) ([\w.-]{1,64})", re.ASCII)
TUNNEL = re.compile(r"tunnel ([0-9a-f]{32})", re.ASCII)


class ProtocolError(ConnectionError):
    """The other side sent a line that the protocol does not allow."""


class Join(NamedTuple):
    """A machine wants to take part."""

    machine: str  # A random number, the same whenever this dialer joins.
    num_servers: int
    name: str


class Tunnel(NamedTuple):
    """The connection that an `open` line has asked for."""

    ticket: str


def first_line(encrypt: bool) -> str:
    return f"torchbeast {PROTOCOL} {'tls' if encrypt else 'plain'}"


def parse_hello(line: str) -> Join | Tunnel:
    """Return which kind of connection it is.

    Raises:
      ProtocolError: the line is no hello.
    """
    if match := TUNNEL.fullmatch(line):
        return Tunnel(match[1])
    match = JOIN.fullmatch(line)
    if match is None or int(match[2]) > MAX_SERVERS:
        raise ProtocolError(f"expected a hello, got {line!r:.80}")
    return Join(match[1], int(match[2]), match[3])


class Connection(asyncio.Protocol):
    """One connection, over TCP or a unix socket. For the thread of its event loop.

    Args:
      is_made: called with this object when the connection is made.
    """

    transport: asyncio.Transport

    def __init__(self, is_made: Callable[["Connection"], Any] = lambda _: None):
        self._is_made = is_made
        self.error: Exception | None = None  # Why it ended; None while it is open.
        self._received = bytearray()  # Bytes not yet read as lines or relayed.
        self.was_used = False  # Whether bytes for the other end of the relay have come.
        self._changed: asyncio.Future | None = None  # Wakes a coroutine that waits.
        self._other: Connection | None = None  # The other end of the relay, if any.
        self._tls: ssl.SSLObject | None = None
        self._is_shaken = False  # Whether the TLS handshake is done.
        self._tls_in, self._tls_out = ssl.MemoryBIO(), ssl.MemoryBIO()

    # Called by asyncio.

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self._is_made(self)

    def data_received(self, data: bytes) -> None:
        if self._tls is None:
            self._deliver(data)
        else:
            self._tls_in.write(data)
            self._decrypt()

    def eof_received(self) -> None:
        self.close()  # asyncio closes it too, but without a limit.

    def connection_lost(self, error: Exception | None) -> None:
        self.error = self.error or error or ConnectionResetError("it has hung up")
        self._wake()
        if self._other is not None:
            self._other.close()

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.transport.resume_reading()

    # For coroutines.

    @property
    def peer(self) -> str:
        """The other side's IP address; "" at a unix socket."""
        name = self.transport.get_extra_info("peername")
        return name[0] if isinstance(name, tuple) else ""

    async def line(self) -> str:
        """Wait for a line; return it without its end.

        Raises:
          ProtocolError: the line is longer than MAX_LINE_BYTES, or not ASCII.
          OSError: the connection has ended.
        """
        while (end := self._received.find(b"\n", 0, MAX_LINE_BYTES)) < 0:
            if len(self._received) >= MAX_LINE_BYTES:
                raise ProtocolError(f"a line of more than {MAX_LINE_BYTES} bytes")
            await self._change()
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        if len(self._received) < MAX_LINE_BYTES:
            self.transport.resume_reading()
        if not line.isascii():
            raise ProtocolError(f"expected ASCII, got {line!r:.80}")
        return line.decode("ascii")

    async def encrypt(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        """Do a TLS handshake; from then on the connection is encrypted.

        Raises:
          ssl.SSLError: one of the sides refuses the other's certificate or TLS.
          OSError: the connection has ended.
        """
        self._tls = context.wrap_bio(self._tls_in, self._tls_out, server_side=is_server)
        self._tls_in.write(bytes(self._received))
        self._received.clear()
        self.transport.resume_reading()
        self._decrypt()
        while not self._is_shaken:
            await self._change()

    async def end(self) -> None:
        """Wait until the connection has ended."""
        while self.error is None:
            await self._change()

    def certificate_name(self) -> str:
        """Return the name in the other side's certificate; "" without TLS."""
        certificate = self._tls.getpeercert() if self._tls is not None else None
        names: Any = (certificate or {}).get("subjectAltName", ())
        return names[0][1] if names else ""

    def send(self, line: str) -> None:
        self.write(f"{line}\n".encode("ascii"))

    def write(self, data: bytes) -> None:
        if self.error is not None:
            return
        if self._tls is None:
            self.transport.write(data)
        else:
            self._tls.write(data)
            self._flush()

    def close(self) -> None:
        """Send waiting bytes, for at most CLOSE_S, and end the connection."""
        if self.error is None and not self.transport.is_closing():
            self.transport.close()
            loop = asyncio.get_running_loop()
            loop.call_later(CLOSE_S, self.transport.abort)

    # Of this class.

    async def _change(self) -> None:
        """Wait for bytes or the end; raise the error of an ended connection."""
        if self.error is not None:
            raise self.error
        self._changed = asyncio.get_running_loop().create_future()
        await self._changed

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _deliver(self, data: bytes) -> None:
        if self._other is not None:
            self.was_used = True
            self._other.write(data)
            return
        self._received += data
        if len(self._received) >= MAX_LINE_BYTES:  # Limits the memory.
            self.transport.pause_reading()
        self._wake()

    def _decrypt(self) -> None:
        assert self._tls is not None
        pieces: list[bytes] = []
        error: OSError | None = None
        try:
            if not self._is_shaken:
                self._tls.do_handshake()
                self._is_shaken = True
                self._wake()
            while piece := self._tls.read(READ_BYTES):
                pieces.append(piece)
            error = ConnectionResetError("it has hung up")
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as ssl_error:
            error = ssl_error
        if pieces:
            self._deliver(b"".join(pieces))
        self._flush()  # If the handshake failed, tells the other side why.
        if error is not None:
            self.close()
            self.error = error
            self._wake()

    def _flush(self) -> None:
        if self._tls_out.pending:
            self.transport.write(self._tls_out.read())


def relay_between(a: Connection, b: Connection) -> None:
    """Relay all bytes between two connections; when one ends, end the other."""
    a._other, b._other = b, a
    for one, other in ((a, b), (b, a)):
        if one._received:
            one.was_used = True
            other.write(bytes(one._received))
            one._received.clear()
        one.transport.resume_reading()
        if one.error is not None:
            other.close()


async def within(limit_s: float, awaitable: Awaitable[T]) -> T:
    """Return the awaitable's result; cancel it after `limit_s` seconds.

    Before Python 3.12 asyncio.wait_for loses a cancellation that comes together with
    the result, and the cancelled task goes on for ever. This function never loses one.

    Raises:
      asyncio.TimeoutError: there is no result within the limit.
    """
    task = asyncio.ensure_future(awaitable)
    # Looks at the error, if there is one: asyncio warns of errors that nobody looks at.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    finally:
        task.cancel()  # Without effect if it is done.
    if not done:
        raise asyncio.TimeoutError
    return task.result()


class Tasks:
    """Tasks of an event loop that nobody awaits. Their exceptions are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task] = set()  # asyncio keeps only weak references.

    def start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._is_done)

    def _is_done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("Internal error", exc_info=task.exception())


async def handle_lines(
    connection: Connection, keepalive_s: float, handle: Callable[[str], Any]
) -> None:
    """Call `handle` with each line until the connection ends. Sends and answers pings.

    Raises:
      asyncio.TimeoutError: no line has come for twice `keepalive_s`.
      OSError: the connection has ended.
    """

    async def ping() -> None:
        while True:
            await asyncio.sleep(keepalive_s)
            connection.send("ping")

    task = asyncio.get_running_loop().create_task(ping())
    try:
        while True:
            line = await within(2 * keepalive_s, connection.line())
            if line == "ping":
                connection.send("pong")
            elif line != "pong":
                handle(line)
    finally:
        task.cancel()
