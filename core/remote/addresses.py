# SPDX-License-Identifier: Apache-2.0
"""The addresses at which environment servers listen, and whether they are free."""

import argparse
import contextlib
import errno
import fcntl
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Iterator

from core.errors import ConfigError
from core.remote import tls

log = logging.getLogger(__name__)

LOCK_S = 10.0  # Time for other servers to start in the same folder.
# A server at unix:PATH has its local streams (local_streams.py) at PATH.s.
STREAMS_SUFFIX = ".s"
# Limit of Linux's sockaddr_un, without the suffix; other systems allow less.
UNIX_PATH_NBYTES = 107 - len(STREAMS_SUFFIX)
DEFAULT_ADDRESS = "unix:/tmp/polybeast"  # As in TorchBeast.


def addresses_to_serve(flags: argparse.Namespace) -> list[str]:
    """Check and return the address of each server that polybeast_env starts.

    Raises:
      ConfigError: as `server_addresses` and `check_address`.
    """
    basename = flags.pipes_basename
    if basename is not None:  # As in TorchBeast, even a single server has a suffix, .0.
        addresses = [f"{basename}.{i}" for i in range(flags.num_servers)]
    else:
        addresses = server_addresses(flags.server_address, flags.num_servers)
    for address in addresses:
        check_address(address, tls_dir=flags.tls_dir, insecure=flags.insecure)
    if tls.is_public(addresses[0]) and flags.insecure:
        log.warning(
            "INSECURE: anybody who can connect to %s can use these servers, and the "
            "traffic is neither encrypted nor authenticated (--insecure)",
            addresses[0].rpartition(":")[0],
        )
    return addresses


def server_addresses(address: str, num_servers: int) -> list[str]:
    """Return the address of each of `num_servers` servers.

    Servers have consecutive ports. Port 0 stays 0: the system chooses a free port. If
    there are several unix sockets, they end in .0, .1 and so on. The default host is
    127.0.0.1.

    Raises:
      ConfigError: no server can listen there.
    """
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        path = re.sub("^//+", "/", path)  # unix:///path is another spelling.
        if num_servers == 1:
            return [f"unix:{path}"]
        return [f"unix:{path}.{i}" for i in range(num_servers)]
    host, _, port = address.rpartition(":")
    if not (":" in address and port.isdecimal()):
        raise ConfigError(
            f"--server_address is {address!r}; expected host:port, :port or unix:/path"
        )
    if expected := find_wrong_host(host):
        raise ConfigError(f"--server_address: expected {expected}, got {address!r}")
    first = int(port)
    last = first + num_servers - 1 if first else 0
    if last > 65535:
        raise ConfigError(
            f"--server_address {address} with --num_servers {num_servers} needs ports "
            f"up to {last}; the last one is 65535. Choose a lower port."
        )
    ports = range(first, last + 1) if first else [0] * num_servers
    return [f"{host or '127.0.0.1'}:{p}" for p in ports]


def find_wrong_host(host: str) -> str | None:
    """Return what to write in place of the host of HOST:PORT, or None if it is fine."""
    if ":" in host and not re.fullmatch(r"\[[^][]+\]", host):
        # gRPC would take the port for a part of the IP address.
        return "an IPv6 address in brackets, such as [::1]:4431"
    try:
        host.encode("idna")  # Raises UnicodeError, as socket.getaddrinfo does.
        is_name = host.isprintable() and "#" not in host
    except UnicodeError:
        is_name = False
    return None if is_name else "the name of a host and a port"


def check_socket_path(address: str) -> None:
    """Check that the path of a unix socket, unix:/path, is not too long.

    Raises:
      ConfigError: it is.
    """
    path = address.removeprefix("unix:")
    nbytes = len(os.fsencode(path))
    if nbytes > UNIX_PATH_NBYTES:
        raise ConfigError(
            f"the socket path {path} has {nbytes} bytes, but a server's may have at "
            f"most {UNIX_PATH_NBYTES}. Choose a shorter one; for a folder in TMPDIR, "
            "set TMPDIR to a shorter folder."
        )


def check_address(address: str, *, tls_dir: str | None, insecure: bool) -> None:
    """Check that a server may listen at an address. Does not check if a port is free.

    The socket file of a dead server is no error: the new server replaces it.

    Raises:
      ConfigError: other machines can connect and nothing protects the traffic; or the
        path of a unix socket cannot be used, or a live server listens there.
    """
    if tls.is_public(address) and tls_dir is None and not insecure:
        raise ConfigError(
            f"other machines can connect to {address}. Either encrypt the traffic and "
            "accept only your own learners: --tls_dir DIR, with a folder that "
            f"{tls.CERTS_COMMAND} has made. Or accept anybody who can reach the port: "
            "--insecure. For this machine only, listen at 127.0.0.1."
        )
    if not address.startswith("unix:"):
        return
    check_socket_path(address)
    path = address.removeprefix("unix:")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConfigError(
            f"cannot listen at {address}: there is no folder {folder}. Create it."
        )
    for name in path, path + STREAMS_SUFFIX:
        _check_unused(name)


def _check_unused(path: str) -> None:
    """Check that nothing is at the path of a unix socket but the file of a dead server.

    Raises:
      ConfigError: there is something else, or the folder does not let us write.
    """
    address = f"unix:{path}"
    folder = os.path.dirname(path) or "."
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"cannot listen at {address}: no permission to write into {folder}"
            ) from None
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen at {address}: that file is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
        except OSError as error:  # For example a full backlog: a server listens.
            raise ConfigError(f"cannot listen at {address}: {error}") from error
    raise ConfigError(
        f"{address} is in use: a live server listens there. Stop it, or choose another "
        "path."
    )


@contextlib.contextmanager
def claim_address(address: str) -> Iterator[None]:
    """Check a unix socket's path; lock its folder while the block runs.

    gRPC replaces the socket of a live server without an error. The lock prevents this
    if two servers start at the same time.

    Raises:
      ConfigError: as `check_address`; or the folder stays locked for LOCK_S.
    """
    if not address.startswith("unix:"):
        yield
        return
    folder = os.path.dirname(address.removeprefix("unix:")) or "."
    fd = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + LOCK_S
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"cannot listen at {address}: another process has had a lock "
                        f"on {folder} for {LOCK_S:g} s. Choose another folder."
                    ) from None
                time.sleep(0.01)
        check_address(address, tls_dir=None, insecure=False)
        yield
    finally:
        os.close(fd)


def reason_not_bound(address: str) -> str:
    """Say why gRPC could not listen at an address. gRPC itself gives no reason."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(path)
            os.unlink(path)
        except OSError as error:
            return f"cannot listen at {address}: {error.strerror or error}"
        return f"cannot listen at {address}"
    host, _, port = address.rpartition(":")
    try:
        infos = socket.getaddrinfo(
            host.strip("[]"),
            int(port),
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
        for family, kind, protocol, _, where in infos:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"{address} is in use by another program. Choose another port."
        return f"cannot listen at {address}: {error.strerror or error}"
    return f"cannot listen at {address}"


def make_private(folder: str) -> None:
    """Create the private folder of a program's unix sockets again if it was deleted.

    Raises:
      ConfigError: a folder is there that belongs to other users or is open to them.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
        log.warning("%s was deleted; created it again", folder)
    found = os.lstat(folder)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{folder} was deleted, and the folder that is there now is not private. "
            "Start again."
        )
