# SPDX-License-Identifier: Apache-2.0
"""Machines that dial in: the classes that the two programs use.

The learner uses `DialedIn` (--listen), and polybeast_env uses `DialsOut`
(--learner_address). `core.remote.acceptor` and `core.remote.dialer` make the
connections; `core.remote.tunnel` describes them.
"""

import argparse
import logging
import secrets
import shutil
import tempfile
import time
from typing import Any

from core.remote import tls
from core.remote.acceptor import LEAVE_S
from core.remote.child import Child

log = logging.getLogger(__name__)

LOOK_S = 0.02  # Interval of checks while the acceptor starts.


class DialedIn:
    """The servers of the machines that have dialed in.

    Starts the acceptor, and starts it again if it dies. Only one thread may call
    `addresses`.

    Raises:
      ConfigError: the acceptor cannot listen.
    """

    def __init__(self, flags: argparse.Namespace):
        self.address = ""  # Where the acceptor listens; "" before it listens.
        # By machine: its sockets' path without .0, .1..., and the number of sockets.
        self._machines: dict[str, int] = {}
        # Machines that have not dialed in again since the acceptor died.
        self._missing: set[str] = set()
        self._missing_until = 0.0
        self._folder = tempfile.mkdtemp(prefix="torchbeast-")  # Mode 0700.
        command = ["core.remote.acceptor", "--folder", self._folder]
        command += ["--keepalive_s", str(flags.keepalive_s)]
        if flags.tls_dir is not None:
            command += ["--tls_dir", flags.tls_dir]
        elif tls.is_public(flags.listen):
            log.warning(
                "INSECURE: anybody who can connect to %s can take part in this run, "
                "and the traffic is neither encrypted nor authenticated (--insecure)",
                flags.listen,
            )
        self._command = [*command, "--listen", flags.listen]
        self._child = Child("The acceptor", self._command, self._handle)
        try:
            self._child.start()
            while not self.address:  # `check` raises if the acceptor cannot listen.
                self._child.check()
                time.sleep(LOOK_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._child.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def addresses(self) -> list[str]:
        """Return the addresses of all servers of the machines that have joined.

        Raises:
          ConfigError: the acceptor died and cannot listen any more.
          RuntimeError: the acceptor died too often.
        """
        self._child.check()
        if self._missing and time.monotonic() > self._missing_until:
            for path in self._missing:
                del self._machines[path]
            self._missing = set()
        return [
            f"unix:{path}.{i}"
            for path, num_servers in self._machines.items()
            for i in range(num_servers)
        ]

    def _handle(self, what: str, *args: Any) -> None:
        match what, *args:
            case "listening", address:
                self.address = address
                # If the port is 0, the next acceptor must have the same port as this.
                self._command[-1] = address
                self._missing = set(self._machines)
                self._missing_until = time.monotonic() + LEAVE_S
            case "joined", path, num_servers:
                self._machines[path] = num_servers
                self._missing.discard(path)
            case "left", path:
                self._machines.pop(path, None)
                self._missing.discard(path)


class DialsOut:
    """Dials the learners of --learner_address, if there are any. A context manager.

    Attributes:
      flags: the program's flags; with --learner_address changed such that the servers
        listen at unix sockets in a private folder.
    """

    def __init__(self, flags: argparse.Namespace):
        self.flags = flags
        self._child: Child | None = None
        if flags.learner_address is None:
            return
        tls.files(flags.tls_dir, is_server=True)  # Raises before the folder exists.
        self._folder = tempfile.mkdtemp(prefix="torchbeast-")  # Mode 0700.
        basename = f"{self._folder}/env"
        command = ["core.remote.dialer", "--learner_address", *flags.learner_address]
        # A name for each address: two addresses may lead to the same learner.
        machines = [secrets.token_hex(16) for _ in flags.learner_address]
        command += ["--machines", *machines, "--basename", basename]
        command += ["--num_servers", str(flags.num_servers)]
        command += ["--keepalive_s", str(flags.keepalive_s)]
        if flags.tls_dir is not None:
            command += ["--tls_dir", flags.tls_dir]
        elif any(map(tls.is_public, flags.learner_address)):
            log.warning(
                "INSECURE: the traffic with the learner is neither encrypted nor "
                "authenticated (--insecure)"
            )
        where = {"pipes_basename": f"unix:{basename}", "remove_folder": True}
        # The dialer does TLS; the servers do not.
        self.flags = argparse.Namespace(**{**vars(flags), **where, "tls_dir": None})
        self._child = Child("The dialer", command)

    def start(self) -> None:
        if self._child is not None:
            self._child.start()

    def check(self) -> None:
        """Log the dialer's output; start the dialer again if it died.

        Raises:
          ConfigError: a learner has refused this machine several times from the start.
          RuntimeError: the dialer died too often.
        """
        if self._child is not None:
            self._child.check()

    def __enter__(self) -> "DialsOut":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._child is not None:
            self._child.close()
            shutil.rmtree(self._folder, ignore_errors=True)
