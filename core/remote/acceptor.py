# SPDX-License-Identifier: Apache-2.0
"""Accepts the connections of machines that dial in: polybeast's --listen.

    python -m core.remote.acceptor --listen 0.0.0.0:4431 --folder /tmp/torchbeast-x

The learner starts the acceptor as a separate process (`core.remote.dial_in`). For each
environment server of a machine that has joined, the acceptor has a unix socket in a
private folder. When the learner connects to this socket, the acceptor asks the machine
to dial one more connection, a tunnel, and relays bytes between the two. It writes to
standard output which machines join and leave, for the learner.

The learner connects again if there is no tunnel within OPEN_S. A tunnel takes several
round trips, and many tunnels take longer than OPEN_S. So a tunnel is for a server, not
for one connection of the learner: a tunnel that comes late serves the next connection.

A connection has HELLO_S to show a valid certificate and to send a valid hello. If more
than MAX_SILENT connections have not done so, the acceptor takes the IP address with the
most of these connections and closes its oldest one. So silent connections do not keep
honest machines out.
"""

import argparse
import asyncio
import collections
import contextlib
import errno
import functools
import logging
import os
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.remote import child, tls
from core.remote.addresses import UNIX_PATH_NBYTES, make_private
from core.remote.tunnel import (
    MAX_SERVERS,
    Connection,
    Join,
    ProtocolError,
    Tasks,
    Tunnel,
    first_line,
    handle_lines,
    parse_hello,
    relay_between,
    within,
)

log = logging.getLogger(__name__)

HELLO_S = 5.0  # Limit for first line, TLS and hello: two or three round trips.
MAX_SILENT = 256  # Connections that have not sent their hello yet.
MAX_MACHINES = 1000
# How long a connection of the learner and a tunnel wait for each other. Less than
# kUnixTimeoutMs in csrc/transport_grpc.cc, and more than the pool's longest back-off.
OPEN_S = 3.0
MAX_ASKED = 64  # Tunnels that one machine dials at the same time.
MAX_ASKED_TOTAL = 128  # While all machines dial so many, each may dial only one.
TICKET_S = 15.0  # Then a tunnel counts as lost. More than DIAL_S of the dialer.
LEAVE_S = 10.0  # A machine that joins again within this time keeps its addresses.
BIND_S = 5.0  # Time for the acceptor of an earlier learner to end.
CHECK_S = 1.0  # Interval of looks at the unix sockets and at the certificate.
# The sockets of a machine: a part of its name, then a part of its id. "dialed": the
# learner saves network traffic, as over TCP.
SOCKET_NAME = "dialed-{}-{}"
BACKLOG = 1024  # Connections that the kernel accepts while this process is busy.


class Machine:
    """A machine with environment servers, from its first join until it leaves."""

    def __init__(self, join: Join, path: str):
        self.join = join
        self.path = path  # The path of its unix sockets, without .0, .1 and so on.
        self.control: Connection | None = None  # None while there is no connection.
        self.listeners: list[asyncio.AbstractServer] = []
        self.removal: asyncio.TimerHandle | None = None
        # Connections that wait for their other end, the oldest first, and the indices
        # of their servers: those of the learner, and tunnels.
        self.waiting: dict[Connection, int] = {}
        self.tunnels: dict[Connection, int] = {}

    def sockets(self) -> list[str]:
        return [f"{self.path}.{i}" for i in range(self.join.num_servers)]


class Acceptor:
    """Accepts machines, and connections of the learner to their servers.

    Args:
      folder: a private folder for unix sockets.
      context: for TLS; None: without TLS.
    """

    def __init__(
        self, folder: Path, context: ssl.SSLContext | None, keepalive_s: float
    ):
        self._folder = folder
        self._context = context
        self._keepalive_s = keepalive_s
        self._tasks = Tasks()
        # Connections that have sent no hello, the oldest first, and their IP addresses.
        self._silent: dict[Connection, str] = {}
        self._machines: dict[str, Machine] = {}
        self._joining = asyncio.Lock()  # Held while a machine is added.
        # By ticket: a machine that was asked to dial a tunnel, and the server's index.
        self._tickets: dict[str, tuple[Machine, int]] = {}
        self._listener: asyncio.Server | None = None

    async def listen(self, address: str) -> str:
        """Start to accept connections; return the address with its real port.

        Raises:
          ConfigError: the address cannot be used.
        """
        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + BIND_S
        loop = asyncio.get_running_loop()
        while self._listener is None:
            try:
                self._listener = await loop.create_server(
                    lambda: Connection(
                        lambda c: self._tasks.start(self._serve_connection(c))
                    ),
                    backlog=BACKLOG,
                    **_where(host, int(port)),
                )
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    reason = error.strerror or str(error)
                    raise ConfigError(f"--listen {address}: {reason}") from error
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"--listen {address}: the port is in use by another program. "
                        "Choose another port, or end that program."
                    ) from error
                await asyncio.sleep(0.1)
        port = self._listener.sockets[0].getsockname()[1]
        return f"{host}:{port}"

    def check_sockets(self) -> None:
        """Check that the unix sockets are still there.

        Raises:
          RuntimeError: somebody has deleted some, such as all in /tmp.
        """
        paths = [str(self._folder)]
        for machine in self._machines.values():
            # `_add` may still be creating the others.
            paths += machine.sockets()[: len(machine.listeners)]
        for path in paths:
            if not os.path.exists(path):
                raise RuntimeError(
                    f"somebody has deleted {path}, where the learner connects to "
                    "machines that have dialed in; all machines must dial in again"
                )

    def close(self) -> None:
        """End all machines. The learner keeps them in its list: they may dial again."""
        if self._listener is not None:
            self._listener.close()
        for machine in list(self._machines.values()):
            self._end(machine)

    # Connections from the network.

    async def _serve_connection(self, connection: Connection) -> None:
        """Read the hello of a new connection, then serve a machine or a tunnel."""
        self._silent[connection] = connection.peer
        if len(self._silent) > MAX_SILENT:
            self._end_oldest_silent()
        try:
            hello = await within(HELLO_S, self._receive_hello(connection))
        except (OSError, asyncio.TimeoutError) as error:
            self._log_refusal(connection, error)
            connection.close()
            return
        finally:
            self._silent.pop(connection, None)
        if isinstance(hello, Join):
            await self._serve_machine(connection, hello)
            return
        if (asked := self._tickets.pop(hello.ticket, None)) is None:
            connection.close()  # The tunnel comes too late.
            return
        machine, index = asked
        self._pair(machine, index, machine.tunnels, machine.waiting, connection)

    async def _receive_hello(self, connection: Connection) -> Join | Tunnel:
        line = await connection.line()
        if line not in (first_line(True), first_line(False)):
            raise ProtocolError(f"expected {first_line(True)!r}, got {line!r:.80}")
        wants_tls = line == first_line(True)
        if wants_tls != (self._context is not None):
            reason = "with --insecure, not --tls_dir" if wants_tls else "with --tls_dir"
            connection.send(f"no the learner was started {reason}")
            raise ProtocolError("one side has --tls_dir and the other has not")
        connection.send("go")
        if self._context is not None:
            await connection.encrypt(self._context, is_server=False)
        return parse_hello(await connection.line())

    def _end_oldest_silent(self) -> None:
        host, _ = collections.Counter(self._silent.values()).most_common(1)[0]
        oldest = next(c for c, peer in self._silent.items() if peer == host)
        del self._silent[oldest]
        oldest.error = ProtocolError("too many connections without a hello")
        oldest.transport.abort()

    def _log_refusal(self, connection: Connection, error: Exception) -> None:
        """Log why a connection is refused. Repeated lines are only counted."""
        if isinstance(error, asyncio.TimeoutError):
            reason = f"no hello within {HELLO_S:g} s"
        elif isinstance(error, ssl.SSLError):
            reason = tls.describe(error)
        else:
            reason = str(error)
        log.warning("Refused a connection from %s: %s", connection.peer, reason)

    # Machines.

    async def _serve_machine(self, control: Connection, join: Join) -> None:
        """Serve a machine until its connection ends."""
        try:
            # Another connection of this machine waits until `_add` is done: it may say
            # goodbye at once.
            async with self._joining:
                machine = self._machines.get(join.machine)
                if machine is not None and machine.join != join:
                    self._remove(machine)
                    machine = None
                if machine is None:
                    if len(self._machines) >= MAX_MACHINES:
                        said = f"full {MAX_MACHINES} machines have joined, the maximum"
                        control.send(said)
                        control.close()
                        return
                    machine = await self._add(join)
        except OSError as error:  # Such as too many open files.
            self._log_refusal(control, error)
            control.close()
            return
        if machine.removal is not None:
            machine.removal.cancel()
            machine.removal = None
        old, machine.control = machine.control, control
        self._forget_tickets(machine)
        if old is not None:  # The machine lost a connection that seems alive here.
            old.transport.abort()
        name = control.certificate_name()
        log.info(
            "%s (%s%s) has joined: environment servers %d",
            join.name,
            control.peer,
            f", certificate of {name}" if name else "",
            join.num_servers,
        )
        control.send("welcome")
        self._ask(machine)
        said_goodbye = False

        def handle(line: str) -> None:
            nonlocal said_goodbye
            word, _, ticket = line.partition(" ")
            if word == "bye":
                said_goodbye = True
                raise ConnectionResetError("it has said goodbye")
            if word != "gone":
                raise ProtocolError(f"expected ping, gone or bye, got {line!r:.80}")
            if (asked := self._tickets.pop(ticket, None)) is not None:
                if (waiting := take(machine.waiting, asked[1])) is not None:
                    waiting.close()  # The server is away.
                self._ask(machine)

        try:
            await handle_lines(control, self._keepalive_s, handle)
        except (OSError, asyncio.TimeoutError) as error:
            reason = str(error) or f"silent for {2 * self._keepalive_s:g} s"
        finally:
            control.close()
            if machine.control is control:
                machine.control = None
        # Another `join` of this machine may have replaced the object `machine`.
        is_known = self._machines.get(join.machine) is machine
        if machine.control is None and is_known:
            log.log(
                logging.INFO if said_goodbye else logging.WARNING,
                "%s (%s) has left: %s",
                join.name,
                control.peer,
                reason,
            )
            machine.removal = asyncio.get_running_loop().call_later(
                0.0 if said_goodbye else LEAVE_S, self._remove, machine
            )

    async def _add(self, join: Join) -> Machine:
        """Create the unix sockets of a machine, and tell the learner."""
        name = join.name[: name_nbytes(self._folder)]
        path = self._folder / SOCKET_NAME.format(name, join.machine[:8])
        machine = self._machines[join.machine] = Machine(join, str(path))
        loop = asyncio.get_running_loop()

        try:
            for i, name in enumerate(machine.sockets()):
                pair = functools.partial(
                    self._pair, machine, i, machine.waiting, machine.tunnels
                )
                listener = await loop.create_unix_server(
                    functools.partial(Connection, pair), name, backlog=BACKLOG
                )
                machine.listeners.append(listener)
        except OSError:
            self._remove(machine)
            raise
        child.tell("joined", machine.path, join.num_servers)
        return machine

    def _remove(self, machine: Machine) -> None:
        self._end(machine)
        child.tell("left", machine.path)

    def _end(self, machine: Machine) -> None:
        self._machines.pop(machine.join.machine, None)
        if machine.removal is not None:  # Its timer would remove the successor.
            machine.removal.cancel()
        if machine.control is not None:
            machine.control.close()
        self._forget_tickets(machine)
        for connection in (*machine.waiting, *machine.tunnels):
            connection.close()
        for listener in machine.listeners:
            listener.close()
        for name in machine.sockets():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)

    # Tunnels for the connections of the learner.

    def _pair(
        self,
        machine: Machine,
        index: int,
        same: dict[Connection, int],
        others: dict[Connection, int],
        connection: Connection,
    ) -> None:
        """Relay to a connection that waits in `others`, or wait in `same` for one."""

        def give_up() -> None:
            if same.pop(connection, None) is not None:
                connection.close()

        if (other := take(others, index)) is not None:
            relay_between(connection, other)
        else:
            same[connection] = index
            asyncio.get_running_loop().call_later(OPEN_S, give_up)
        self._ask(machine)

    def _ask(self, machine: Machine) -> None:
        """Ask a machine for the tunnels that the learner waits for, up to a limit."""
        if machine.control is None:
            return
        asked = collections.Counter(
            index
            for asked_machine, index in self._tickets.values()
            if asked_machine is machine
        )
        num_asked = asked.total()
        for connection, index in machine.waiting.items():
            limit = MAX_ASKED if len(self._tickets) < MAX_ASKED_TOTAL else 1
            if num_asked >= limit:
                break
            if connection.error is not None:
                continue  # The learner has given it up.
            if asked[index] > 0:
                asked[index] -= 1
                continue
            ticket = secrets.token_hex(16)
            self._tickets[ticket] = machine, index
            num_asked += 1
            machine.control.send(f"open {ticket} {index}")
            asyncio.get_running_loop().call_later(TICKET_S, self._expire, ticket)

    def _expire(self, ticket: str) -> None:
        if (asked := self._tickets.pop(ticket, None)) is not None:
            self._ask(asked[0])

    def _forget_tickets(self, machine: Machine) -> None:
        """Forget what a machine was asked by a connection that has ended."""
        self._tickets = {t: a for t, a in self._tickets.items() if a[0] is not machine}


def take(waiting: dict[Connection, int], index: int) -> Connection | None:
    """Remove and return the newest open connection for a server, if there is one."""
    for connection in [c for c, i in reversed(waiting.items()) if i == index]:
        del waiting[connection]
        if connection.error is None:
            return connection
    return None


async def accept(flags: argparse.Namespace) -> None:
    """Accept until the learner ends this process.

    Raises:
      ConfigError: the folder of the unix sockets is not private, or its path too long.
      RuntimeError: see `check_sockets`. Then the learner starts this process again.
    """
    make_private(str(flags.folder))
    if name_nbytes(flags.folder) < 1:
        raise ConfigError(
            f"--listen needs unix sockets in {flags.folder}, but this path is so long "
            f"that theirs would have more than {UNIX_PATH_NBYTES} bytes. Set TMPDIR to "
            "a shorter folder, such as /tmp."
        )
    os.umask(0o177)  # Only this user may connect to the unix sockets.
    context = tls.context(flags.tls_dir, is_server=False)
    acceptor = Acceptor(flags.folder, context, flags.keepalive_s)
    try:
        address = await acceptor.listen(flags.listen)
        child.tell("listening", address)
        log.info(
            "Machines may dial in: python -m polybeast_env --learner_address %s%s",
            describe(address),
            "" if context is None else " --tls_dir ...",
        )
        while True:  # Until it is cancelled.
            await asyncio.sleep(CHECK_S)
            acceptor.check_sockets()
            if context is not None:
                tls.reload(context, flags.tls_dir)
    finally:
        acceptor.close()


def _where(host: str, port: int) -> dict[str, Any]:
    """Return where asyncio's `create_server` listens: [::] means IPv4 as well."""
    if host == "[::]" and socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        both = socket.create_server(("", port), family=family, dualstack_ipv6=True)
        return {"sock": both}
    return {"host": host.strip("[]") or "127.0.0.1", "port": port}


def name_nbytes(folder: Path) -> int:
    """Return how many bytes of a machine's name fit into the paths of its sockets."""
    rest = SOCKET_NAME.format("", 8 * "x") + f".{MAX_SERVERS - 1}"
    return min(24, UNIX_PATH_NBYTES - len(os.fsencode(folder / rest)))


def describe(address: str) -> str:
    """Return an address with this machine's name in place of 0.0.0.0."""
    host, _, port = address.rpartition(":")
    if host in ("0.0.0.0", "[::]", "::"):
        host = socket.gethostname()
    return f"{host}:{port}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m core.remote.acceptor")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tls_dir")
    parser.add_argument("--keepalive_s", type=float, default=10.0)
    flags = parser.parse_args(argv)
    return child.run(accept(flags), flags.folder)


if __name__ == "__main__":
    sys.exit(main())
