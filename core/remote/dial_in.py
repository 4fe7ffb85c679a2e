# SPDX-License-Identifier: Apache-2.0
"""Machines that dial in, as the programs on both sides see them.

`DialedIn` is for the learner (--listen), `DialsOut` for polybeast_env
(--learner_address). The connections between them are made by `core.remote.acceptor` and
`dialer`, and `tunnel` says how.
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

LOOK_S = 0.02  # Between two looks at an acceptor that starts.


class DialedIn:
    """The servers of the machines that have dialed in. A context manager.

    Starts the acceptor, and starts it again if it dies. `addresses` is for one thread.

    Raises:
      ConfigError: the acceptor cannot listen.
    """

    def __init__(self, flags: argparse.Namespace):
        self.address = ""  # Where the acceptor listens; "" if it does not yet.
        # The begin of the paths of a machine's sockets, and how many there are.
        self._machines: dict[str, int] = {}
        # Of an acceptor that has died: these machines have not dialed in again yet.
        self._missing: set[str] = set()
        self._missing_until = 0.0
        self._folder = tempfile.mkdtemp(prefix="torchbeast-")  # Mode 0700.
        command = ["core.remote.acceptor", "--listen", flags.listen]
        command += ["--folder", self._folder, "--keepalive_s", str(flags.keepalive_s)]
        if flags.tls_dir is not None:
            command += ["--tls_dir", flags.tls_dir]
        elif tls.is_public(flags.listen):
            log.warning(
                "INSECURE: whoever can connect to %s can take part in this run, and "
                "the traffic is neither encrypted nor authenticated (--insecure)",
                flags.listen,
            )
        self._child = Child("The acceptor", command, self._handle)
        self._child.start()
        try:
            while not self.address:  # Until it listens, or says why it cannot.
                self._child.check()
                time.sleep(LOOK_S)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "DialedIn":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._child.__exit__()
        shutil.rmtree(self._folder, ignore_errors=True)

    def addresses(self) -> list[str]:
        """Return the address of each server of the machines that take part now.

        Raises:
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
      flags: as given; with --learner_address the servers are at unix sockets in a
        private folder.
    """

    def __init__(self, flags: argparse.Namespace):
        self.flags = flags
        self._child: Child | None = None
        if flags.learner_address is None:
            return
        self._folder = tempfile.mkdtemp(prefix="torchbeast-")  # Mode 0700.
        basename = f"{self._folder}/env"
        command = ["core.remote.dialer", "--learner_address", *flags.learner_address]
        command += ["--machine", secrets.token_hex(16), "--basename", basename]
        command += ["--num_servers", str(flags.num_servers)]
        command += ["--keepalive_s", str(flags.keepalive_s)]
        where: dict[str, Any] = {
            "pipes_basename": f"unix:{basename}",
            "remove_folder": True,
        }
        if flags.tls_dir is not None:
            tls.read(flags.tls_dir, is_server=True)  # Before the servers start.
            command += ["--tls_dir", flags.tls_dir]
            where["tls_dir"] = None  # The dialer encrypts, not the servers.
        elif any(map(tls.is_public, flags.learner_address)):
            log.warning(
                "INSECURE: the traffic with the learner is neither encrypted nor "
                "authenticated (--insecure)"
            )
        self.flags = argparse.Namespace(**{**vars(flags), **where})
        self._child = Child("The dialer", command)

    def start(self) -> None:
        if self._child is not None:
            self._child.start()

    def check(self) -> None:
        """Log what the dialer says; start it again if it has died.

        Raises:
          ConfigError: a learner has never let this machine in, and will not.
          RuntimeError: the dialer died too often.
        """
        if self._child is not None:
            self._child.check()

    def __enter__(self) -> "DialsOut":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._child is not None:
            self._child.__exit__()
            shutil.rmtree(self._folder, ignore_errors=True)
