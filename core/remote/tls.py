# SPDX-License-Identifier: Apache-2.0
"""TLS between learner and environment servers: read and check certificates.

Learner and server each show a certificate and check the other's (mutual TLS). So each
machine has a folder with

    ca.pem     certificate of the authority that signed the other side's certificate
    cert.pem   this side's certificate
    key.pem    the private key of cert.pem, readable by this user only

`python -m tools.certs` creates these folders. gRPC encrypts the traffic, but its errors
do not name the cause. This module finds out why a certificate does not work: before a
connection (`files`) and after a connection failed (`diagnose`). It needs only the
standard library.
"""

import contextlib
import ipaddress
import os
import socket
import ssl
import stat
from pathlib import Path

from core.errors import ConfigError

CERTS_COMMAND = "python -m tools.certs --hosts HOST1,HOST2"  # For error messages.
DIAGNOSE_S = 2.0  # Time limit of the TLS handshake with a server.


def is_public(address: str) -> bool:
    """Return whether other machines may be able to connect to `address`."""
    if address.startswith("unix:"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def files(
    folder: str | None, *, is_server: bool = False
) -> tuple[str, str, str] | None:
    """Check ca.pem, cert.pem and key.pem; return their paths, None without a folder.

    Raises:
      ConfigError: a learner (or a server) cannot use one of the files.
    """
    if folder is None:
        return None
    paths = _paths(folder)
    try:
        for path in paths:
            Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--tls_dir {folder}: cannot read {error.filename}: {error.strerror}. "
            f"{CERTS_COMMAND} creates a folder with ca.pem, cert.pem and key.pem for "
            "each machine."
        ) from error
    _check_permissions(paths[2])
    _check_certificate(paths, is_server=is_server)
    return paths


def _paths(folder: str) -> tuple[str, str, str]:
    path = Path(folder).expanduser()
    return str(path / "ca.pem"), str(path / "cert.pem"), str(path / "key.pem")


def _check_permissions(key: str) -> None:
    """Refuse a key that other users can read: they could pretend to be this program.

    This is an error, as in ssh, because users may overlook a warning. A group may read
    a key that belongs to another user, such as root.
    """
    status = os.stat(key)
    allowed = 0o600 if status.st_uid == os.geteuid() else 0o640
    mode = stat.S_IMODE(status.st_mode)
    if mode & ~allowed & 0o077:
        raise ConfigError(
            f"--tls_dir: others can read {key}, or write it (mode {mode:04o}). Make it "
            f"private: chmod 600 {key}. If somebody may have read it, make a new key."
        )


def _check_certificate(paths: tuple[str, str, str], *, is_server: bool) -> None:
    """Check our certificate as the other side will. gRPC would not name the error.

    Does a TLS handshake in memory between a server and a client: one side shows our
    certificate, and the other side checks it.
    """
    ca, cert, key = paths
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # Only the other side knows the name that it dials.
    checks, checked = (client, server) if is_server else (server, client)
    checked.verify_mode = ssl.CERT_NONE
    checks.verify_mode = ssl.CERT_REQUIRED
    try:
        checks.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ConfigError(f"--tls_dir: no certificate in {ca}: {error}") from error
    try:
        for context in {server, checked}:  # A TLS server always needs a certificate.
            # The empty password keeps OpenSSL from asking for one.
            context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"--tls_dir: {cert} and {key} do not fit together: {error}. They must be a "
            "certificate and its key, in PEM, without a password."
        ) from error
    try:
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"--tls_dir: {cert} cannot be used here: {error.verify_message}"
            f"{_advice(error.verify_message)}"
        ) from error


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server),
    ]
    for _ in range(10):  # A handshake takes three turns.
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()


def context(folder: str | None, *, is_server: bool) -> ssl.SSLContext | None:
    """Return the context for Python's own TLS; None without a folder.

    The learner's side does not check a name: it does not dial, and accepts every
    machine with a server's certificate of its CA.

    Raises:
      ConfigError: as `files`.
    """
    if (paths := files(folder, is_server=is_server)) is None:
        return None
    ca, cert, key = paths
    result = ssl.SSLContext(
        ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    )
    result.minimum_version = ssl.TLSVersion.TLSv1_2
    result.check_hostname = False
    result.verify_mode = ssl.CERT_REQUIRED
    result.load_verify_locations(ca)
    result.load_cert_chain(cert, key, password="")
    return result


def reload(context: ssl.SSLContext, folder: str) -> None:
    """Load the certificate that is in the folder now, for new connections.

    Files that are just being written cannot be used; call it again a little later.
    """
    _, cert, key = _paths(folder)
    with contextlib.suppress(OSError):  # An SSLError is an OSError, too.
        context.load_cert_chain(cert, key, password="")


# What TLS's alerts about the other side's certificate have in their names.
CERTIFICATE_ALERTS = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "DECRYPT_ERROR")


def describe(error: ssl.SSLError) -> str:
    """Say what the error of a TLS handshake means, as the end of a sentence."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate: {error.verify_message}{_advice(error.verify_message)}"
    reason = error.reason or str(error)
    if "ALERT" in reason and any(word in reason for word in CERTIFICATE_ALERTS):
        return (
            f"it refuses this side's certificate ({reason}): its ca.pem is of another "
            "CA, or one of the clocks is wrong"
        )
    return f"TLS: {reason}"


def diagnose(address: str, folder: str | None) -> str | None:
    """Return why TLS keeps a learner from connecting to a server, or None.

    gRPC reports only that the server closed the connection. So this function does the
    TLS handshake again. Returns None if that works, or if the server cannot be reached.

    Args:
      folder: the learner's --tls_dir, or None if it does not use TLS.
    """
    if address.startswith("unix:"):
        return None
    place, _, name = address.partition("#")  # See core.remote.server_lists.DnsName.
    host, _, port = place.rpartition(":")
    host = host.strip("[]")
    try:
        ours = context(folder, is_server=False)
        if ours is None:
            ours = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            ours.check_hostname, ours.verify_mode = False, ssl.CERT_NONE
        else:
            ours.check_hostname = True
        ours.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), DIAGNOSE_S) as tcp,
            ours.wrap_socket(tcp, server_hostname=name or host) as connection,
        ):
            if folder is None:
                return "it speaks TLS and this learner does not: add --tls_dir"
            # Now the server checks our certificate. It sends data if it accepts it.
            with contextlib.suppress(ConnectionResetError):  # Up to Python 3.12: b"".
                if connection.recv(1):
                    return None
    except ConfigError as error:  # Since the start these files have changed.
        return str(error)
    except ssl.SSLEOFError:
        return None  # The server may be ending.
    except ssl.SSLError as error:
        if folder is None:
            return None  # The server does not use TLS either.
        if error.reason == "WRONG_VERSION_NUMBER":
            return "it does not speak TLS: start it with --tls_dir"
        return describe(error)
    except (OSError, ValueError):  # ValueError: this can be no name of a host.
        return None
    return (
        "it hangs up when it sees this learner's certificate: its ca.pem is of another "
        "CA, or its clock is wrong"
    )


def _advice(problem: str) -> str:
    """Return the remedy for an OpenSSL error."""
    if "expired" in problem or "not yet valid" in problem:
        return (
            ". Check the clocks of both machines; python -m tools.certs --hosts ... "
            "--renew makes new certificates"
        )
    if "mismatch" in problem:
        return (
            " Use the name in the certificate, or make one for this name: python -m "
            "tools.certs --hosts NAME"
        )
    if "purpose" in problem:
        return (
            ". The learner and each server have a folder of their own; these folders "
            "were swapped"
        )
    return ": it was not signed by the CA in ca.pem"
