# SPDX-License-Identifier: Apache-2.0
"""Connects the servers of this machine to learners that listen: --learner_address.

    python -m core.remote.dialer --learner_address learner:4431 ...

polybeast_env starts the dialer as a separate process. The dialer connects to the
learner's acceptor, sends the number of servers, and keeps this connection open. When
the acceptor asks for a connection to a server, the dialer dials one more connection. If
it cannot reach the learner, it tries for ever.
"""

import argparse
import asyncio
import logging
import random
import re
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from core.errors import ConfigError
from core.remote import child, tls
from core.remote.tunnel import (
    Connection,
    ProtocolError,
    Tasks,
    first_line,
    handle_lines,
    relay_between,
    within,
)

log = logging.getLogger(__name__)

DIAL_S = 10.0  # Limit for TCP, TLS and the first answer.
FIRST_WAIT_S, MAX_WAIT_S = 0.1, 5.0  # Waits between two attempts.
MAX_REFUSALS = 5  # As many refusals in a row before the first welcome end the program.
OPEN = re.compile(r"open ([0-9a-f]{32}) (\d{1,5})", re.ASCII)


class Refused(ConnectionError):
    """The dialer or the acceptor refuses the other side. A retry rarely helps."""


class Link:
    """Connects this machine's servers to one learner.

    Args:
      learner: host:port.
      sockets: paths of the unix sockets of the servers for this learner.
      machine: 32 hexadecimal digits, the name of this machine for the learner.
      context: for TLS; None: without TLS.
    """

    def __init__(
        self,
        learner: str,
        sockets: Sequence[str],
        machine: str,
        context: ssl.SSLContext | None,
        keepalive_s: float,
    ):
        self._learner = learner
        self._sockets = sockets
        name = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
        self._join = f"join {machine} {len(sockets)} {name or 'host'}"
        self._context = context
        self._keepalive_s = keepalive_s
        self._tasks = Tasks()
        self._wait_s = FIRST_WAIT_S
        self._was_welcome = False  # Whether the learner has ever accepted this machine.

    async def stay(self) -> None:
        """Join, and join again whenever the connection is lost. Ends when cancelled.

        Raises:
          ConfigError: the learner has refused this machine MAX_REFUSALS times.
        """
        refusals = 0
        while True:
            try:
                await self._take_part()
            except (OSError, asyncio.TimeoutError) as error:
                refusals = refusals + 1 if isinstance(error, Refused) else 0
                text = self._explain(error)
                if refusals == MAX_REFUSALS and not self._was_welcome:
                    raise ConfigError(text) from error
                log.warning("%s; trying again", text)
            await asyncio.sleep(random.uniform(0.5, 1.0) * self._wait_s)
            self._wait_s = min(2 * self._wait_s, MAX_WAIT_S)

    def _explain(self, error: Exception) -> str:
        if isinstance(error, socket.gaierror):
            host = self._learner.rpartition(":")[0]
            return f"Cannot find the learner's host {host}: {error.strerror}"
        if isinstance(error, Refused):
            return f"The learner at {self._learner}: {error}"
        reason = getattr(error, "strerror", None) or str(error) or "it does not answer"
        return f"No connection to the learner at {self._learner}: {reason}"

    async def _take_part(self) -> None:
        """Join, and dial as the acceptor asks, until the connection ends."""
        control = await within(DIAL_S, self._dial(self._join))
        try:
            answer = await within(DIAL_S, control.line())
            if answer != "welcome":
                raise ProtocolError(f"it said {answer!r:.200} instead of welcome")
            self._wait_s, self._was_welcome = FIRST_WAIT_S, True
            log.info("The learner at %s uses these servers", self._learner)

            def handle(line: str) -> None:
                match = OPEN.fullmatch(line)
                if match is None or int(match[2]) >= len(self._sockets):
                    raise ProtocolError(f"expected open or ping, got {line!r:.80}")
                path = self._sockets[int(match[2])]
                self._tasks.start(self._open(control, match[1], path))

            await handle_lines(control, self._keepalive_s, handle)
        except asyncio.CancelledError:
            control.send("bye")
            raise
        finally:
            control.close()

    async def _open(self, control: Connection, ticket: str, path: str) -> None:
        """Relay between the socket of a server and a new connection to the learner."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        server = None
        try:
            _, server = await loop.create_unix_connection(Connection, path)
            tunnel = await within(DIAL_S, self._dial(f"tunnel {ticket}"))
        except (OSError, asyncio.TimeoutError) as error:
            if server is not None:
                server.close()
                log.warning("%s", self._explain(error))
            control.send(f"gone {ticket}")
            return
        dialed_s = loop.time() - began
        relay_between(server, tunnel)
        await tunnel.end()
        if not tunnel.was_used and server.error is None:
            log.warning(
                "The learner at %s did not use a connection, which took %.1f s to dial",
                self._learner,
                dialed_s,
            )

    async def _dial(self, hello: str) -> Connection:
        """Dial the acceptor, send `hello`, and return the connection."""
        host, _, port = self._learner.rpartition(":")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Connection, host.strip("[]"), int(port), happy_eyeballs_delay=0.25
        )
        try:
            connection.send(first_line(self._context is not None))
            answer = await connection.line()
            if answer.startswith("no "):
                raise Refused(answer.removeprefix("no "))
            if answer != "go":
                raise ProtocolError(f"no learner: it says {answer!r:.80}")
            if self._context is not None:
                await connection.encrypt(self._context, is_server=True)
            connection.send(hello)
        except ssl.SSLError as error:
            connection.close()
            raise Refused(tls.describe(error)) from error
        except BaseException:
            connection.close()
            raise
        return connection


async def dial(flags: argparse.Namespace) -> None:
    """Stay connected to all learners. Each learner gets a share of the servers."""
    context = tls.context(flags.tls_dir, is_server=True)
    sockets = [f"{flags.basename}.{i}" for i in range(flags.num_servers)]
    n = len(flags.learner_address)
    links = [
        Link(learner, sockets[i::n], flags.machines[i], context, flags.keepalive_s)
        for i, learner in enumerate(flags.learner_address)
    ]
    # Raises the first error. At the end, asyncio.run cancels the tasks that are left.
    await asyncio.gather(*(link.stay() for link in links))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m core.remote.dialer")
    parser.add_argument("--learner_address", nargs="+", required=True)
    parser.add_argument("--machines", nargs="+", required=True, help="for each learner")
    parser.add_argument("--basename", required=True, help="of the servers' sockets")
    parser.add_argument("--num_servers", type=int, required=True)
    parser.add_argument("--tls_dir")
    parser.add_argument("--keepalive_s", type=float, default=10.0)
    flags = parser.parse_args(argv)
    return child.run(dial(flags), Path(flags.basename).parent)


if __name__ == "__main__":
    sys.exit(main())
