# SPDX-License-Identifier: Apache-2.0
"""Lists of environment servers that change while the learner runs.

    --server_addresses dns:envs:4431          every address behind a name
    --server_addresses file:hosts.txt         the addresses in a file; also @hosts.txt

A `Source` knows one list. `ServerList` has a thread for each source that may change,
reads that source about once a second, and holds the present list of all servers. The
learner's main thread (core.remote.pool) takes the list from there and gives it to the
actor pool. So a slow name server or a slow disk delays only the thread of its source.

With several learners (torchrun), each computes from the same list which servers are its
own (`own_share`).
"""

import argparse
import concurrent.futures
import functools
import hashlib
import itertools
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from core import ranks
from core.errors import ConfigError
from core.remote import server_flags
from core.remote.dial_in import DialedIn
from core.running.supervise import raise_failures, start_thread

log = logging.getLogger(__name__)

ASK_S = 1.0  # Interval in which a source is read.
DNS_S = 5.0  # Interval in which a name is resolved; ASK_S after an error.
CLOSE_S = 1.0  # Time for a source that is just being read; DNS may take longer.
MAX_FILE_BYTES = 1 << 20
MAX_LOOKS = 5  # A file that changes in every read is used after as many reads.
SHOWN = 8  # Servers named in one log line.


class Source(Protocol):
    """A list of servers that may change."""

    def addresses(self) -> Sequence[str]:
        """Return the addresses of all servers now. May block. Called in one thread.

        Raises:
          ConfigError: the list cannot be used. A learner that starts ends. A learner
            that runs warns once and continues with the last list, but ends if machines
            can no longer dial in.
          Unavailable: there is no list yet. A learner that starts waits for the list.
            A learner that runs warns once and continues with the last list.
        """


class Unavailable(Exception):
    """There is no list yet. The message names the list and the reason."""


class AddressFile:
    """The addresses in a file: one per line or separated by commas; # is a comment.

    A program may be writing the file at the moment. So a change is used after two reads
    in a row gave the same content. A new file in its place (mv, os.replace) is used at
    once. A file that changes all the time is used after MAX_LOOKS reads.
    """

    def __init__(self, path: str, flags: argparse.Namespace):
        self._path = Path(path)
        self._flags = flags
        self._text: str | None = None  # The text that `_addresses` is from.
        self._last_look: tuple[int, str] | None = None  # Inode and text.
        self._num_looks = 0  # Reads in a row that differ from `_text`.
        self._addresses: list[str] = []

    def addresses(self) -> Sequence[str]:
        inode, text = self._read()
        last, self._last_look = self._last_look, (inode, text)
        if text == self._text:
            self._num_looks = 0
            return self._addresses
        self._num_looks += 1
        is_written = last is None or last[0] != inode or last[1] == text
        if is_written or self._num_looks >= MAX_LOOKS:
            self._addresses = self._parse(text)
            self._text, self._num_looks = text, 0
        return self._addresses

    def _read(self) -> tuple[int, str]:
        try:
            with open(self._path, "rb", opener=_open_without_waiting) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ConfigError(
                        f"--server_addresses: {self._path} is not a regular file, but "
                        "the list is read again and again. Write it to a file."
                    )
                raw = file.read(MAX_FILE_BYTES + 1)
            text = raw.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--server_addresses: cannot read {self._path}: {why}. Write the "
                "servers' addresses there, one per line; if there are none yet, create "
                "an empty file."
            ) from error
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(
                f"--server_addresses: {self._path} is larger than {MAX_FILE_BYTES} "
                "bytes, too large for a list of servers. Name another file."
            )
        return status.st_ino, text

    def _parse(self, text: str) -> list[str]:
        result: list[str] = []
        for number, line in enumerate(text.splitlines(), start=1):
            where = f"--server_addresses: {self._path}, line {number}"
            for part in line.partition("#")[0].replace(",", " ").split():
                try:
                    addresses = server_flags.plain_addresses(part)
                except argparse.ArgumentTypeError as error:
                    raise ConfigError(f"{where}: {error}.") from error
                if problem := server_flags.find_unprotected(addresses, self._flags):
                    raise ConfigError(f"{where} has {problem}")
                result += addresses
        if not result:
            raise Unavailable(f"{self._path} names no server")
        return list(dict.fromkeys(result))


class DnsName:
    """All addresses of a DNS name, for example of a Kubernetes headless service.

    Only the IPv4 addresses if there are any: a server may have an IPv6 address, too.

    With TLS the addresses end in #NAME, the name in the servers' certificates: the IP
    addresses change, so certificates cannot contain them.
    """

    def __init__(self, entry: str, flags: argparse.Namespace):
        self._name, _, self._port = entry.removeprefix("dns:").rpartition(":")
        self._suffix = f"#{self._name}" if flags.tls_dir else ""
        self._ask_at = 0.0  # `time.monotonic`.
        self._addresses: list[str] = []

    def addresses(self) -> Sequence[str]:
        if (now := time.monotonic()) >= self._ask_at:
            self._addresses = self._resolve()
            self._ask_at = now + DNS_S
        return self._addresses

    def _resolve(self) -> list[str]:
        try:
            infos = socket.getaddrinfo(
                self._name, int(self._port), type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise Unavailable(f"cannot resolve the name {self._name}: {why}") from error
        hosts = {str(where[0]) for *_, where in infos}
        ipv4 = {host for host in hosts if ":" not in host}
        return [
            f"{host}:{self._port}{self._suffix}"
            # Sorted, since name servers return them in any order.
            for host in sorted(ipv4 or {f"[{host}]" for host in hosts})
        ]


class ServerList:
    """The servers of --server_addresses. A context manager.

    Args:
      fixed: addresses that do not change.
      sources: lists of addresses that may change.
      dialed_in: machines that have dialed in. This list closes it.

    Raises:
      ConfigError: a source cannot be used.
    """

    is_local = False  # This program does not start these servers.

    def __init__(
        self,
        fixed: Iterable[str] = (),
        sources: Sequence[Source] = (),
        dialed_in: DialedIn | None = None,
    ):
        self._fixed = tuple(fixed)
        self._dialed_in = dialed_in
        # Whether this list is divided here. Otherwise core.ranks has divided `fixed`.
        self._is_divided = bool(sources) and ranks.size() > 1
        if dialed_in is not None:
            sources = [*sources, dialed_in]
        self._sources = sources
        self._lock = threading.Lock()
        # Guarded by the lock. By source: the last list, and the latest error.
        self._lists: list[tuple[str, ...]] = [() for _ in sources]
        self._problems: list[str | None] = [None for _ in sources]
        self._stop = threading.Event()
        self._threads: dict[str, concurrent.futures.Future] = {}
        for i in range(len(sources)):
            self._ask(i, is_start=True)
        for i in range(len(sources)):
            name = f"server-list-{i}"
            self._threads[name] = start_thread(name, self._watch, i)

    @classmethod
    def of_flags(
        cls, flags: argparse.Namespace, dialed_in: DialedIn | None
    ) -> "ServerList":
        """Return the servers of --server_addresses and the servers that dial in."""
        fixed: list[str] = []
        sources: list[Source] = []
        for entry in flags.server_addresses or ():
            if entry.startswith("dns:"):
                sources.append(DnsName(entry, flags))
            elif entry.startswith("file:"):
                sources.append(AddressFile(entry.removeprefix("file:"), flags))
            else:
                fixed.append(entry)
        try:
            return cls(fixed, sources, dialed_in)
        except BaseException:
            if dialed_in is not None:
                dialed_in.close()
            raise

    @property
    def may_change(self) -> bool:
        return bool(self._sources)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the present addresses. Does not block."""
        with self._lock:
            lists = [self._fixed, *self._lists]
        dialed_in = lists.pop() if self._dialed_in is not None else ()
        result = tuple(dict.fromkeys(itertools.chain(*lists)))
        if self._is_divided:
            result = own_share(result, ranks.rank(), ranks.size())
        return (*result, *dialed_in)

    def problem(self) -> str:
        """Return the reason why there is no server for this learner."""
        with self._lock:
            problems = [problem for problem in self._problems if problem]
            lists = self._lists if self._dialed_in is None else self._lists[:-1]
            num = len(set(itertools.chain(self._fixed, *lists)))
        if num and self._is_divided:
            problems.append(
                f"the list has {num} server{'s' * (num > 1)} but there are "
                f"{ranks.size()} learners, and each needs a server of its own; add "
                "servers or start fewer learners"
            )
        if self._dialed_in is not None:
            problems.append(f"no machine has dialed in at {self._dialed_in.address}")
        return "; ".join(problems) or "the list of servers is empty"

    def check(self, received: int = 0) -> None:
        """Raise the exception of a thread that has failed."""
        raise_failures(self._threads)

    def _watch(self, i: int) -> None:
        while not self._stop.wait(ASK_S):
            self._ask(i)

    def _ask(self, i: int, *, is_start: bool = False) -> None:
        addresses, problem = None, None
        try:
            addresses = tuple(self._sources[i].addresses())
        except ConfigError as error:
            if is_start or self._sources[i] is self._dialed_in:
                raise
            problem = str(error)
        except Unavailable as error:
            problem = f"--server_addresses: {error}"
        with self._lock:
            before, self._problems[i] = self._problems[i], problem
            last = self._lists[i]
            if addresses is not None:
                self._lists[i] = addresses
        if problem and problem != before:
            kept = f"; going on with the last {len(last)} servers" if last else ""
            log.warning("%s%s", problem, kept)
        if before and not problem:
            log.info("The list of servers is usable again")

    def __enter__(self) -> "ServerList":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        # A thread that waits for a name server cannot be woken. It ends when the answer
        # comes or the process ends.
        concurrent.futures.wait(self._threads.values(), CLOSE_S)
        if self._dialed_in is not None:
            self._dialed_in.close()


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file. A named pipe would otherwise wait until a program writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


@functools.lru_cache(maxsize=1)
def own_share(addresses: tuple[str, ...], rank: int, size: int) -> tuple[str, ...]:
    """Return the servers of one learner, in the list's order.

    The learners' numbers of servers differ by at most one. If a server joins or leaves,
    only a few of the others change their learner: each server has its own order of
    learners, by hashes, and goes to the first of them that has room. While learners
    see different lists, two may want the same server: the second one waits for it.

    Args:
      rank: the number of the learner.
      size: the number of learners.
    """
    fewest, num_larger = divmod(len(addresses), size)
    counts = [0] * size
    own = set()
    for address in sorted(addresses, key=_hash):
        for learner in sorted(range(size), key=lambda i: _hash(f"{i} {address}")):
            is_larger = counts[learner] == fewest and num_larger > 0
            if counts[learner] < fewest or is_larger:
                break
        num_larger -= is_larger
        counts[learner] += 1
        if learner == rank:
            own.add(address)
    return tuple(address for address in addresses if address in own)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def describe_change(before: Iterable[str], after: Iterable[str]) -> str:
    """Say in one line which servers joined and which left."""
    old, new = set(before), set(after)
    joined = [address for address in after if address not in old]
    left = [address for address in before if address not in new]
    return f"{_count(joined)} joined; {_count(left)} left; now {len(new)}"


def _count(addresses: Sequence[str]) -> str:
    if not addresses:
        return "0 servers"
    shown = ", ".join(addresses[:SHOWN])
    if len(addresses) > SHOWN:
        shown += f" and {len(addresses) - SHOWN} more"
    return f"{len(addresses)} server{'s' * (len(addresses) > 1)} ({shown})"
