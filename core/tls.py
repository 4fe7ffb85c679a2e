# SPDX-License-Identifier: Apache-2.0
"""TLS between learner and environment servers: certificates, and what ails them.

Both sides show a certificate and check the other's, so one folder on each machine holds

    ca.pem     who must have signed the other side's certificate
    cert.pem   this side's own certificate
    key.pem    the key to it, for this user's eyes only

`python -m tools.certs` makes these folders. gRPC does the encryption; this file, which
needs the standard library only, finds what is wrong before and after.
"""

import contextlib
import ipaddress
import os
import socket
import ssl
import stat
from pathlib import Path

from core.supervise import ConfigError

CERTS_COMMAND = "python -m tools.certs --hosts HOST1,HOST2"  # For messages.
DIAGNOSE_S = 2.0  # For a server to shake hands.


def is_public(address: str) -> bool:
    """Say whether other machines may be able to connect to `address`."""
    if address.startswith("unix:"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def read(folder: str | None, *, is_server: bool) -> tuple[bytes, bytes, bytes] | None:
    """Return the contents of ca.pem, cert.pem and key.pem; None without a folder.

    Raises:
      ConfigError: one of them cannot be used, by a server or a learner; it is named.
    """
    if folder is None:
        return None
    paths = _paths(folder)
    try:
        contents = tuple(path.read_bytes() for path in paths)
    except OSError as error:
        raise ConfigError(
            f"--tls_dir {folder}: cannot read {error.filename}: {error.strerror}. A "
            f"folder with ca.pem, cert.pem and key.pem is what {CERTS_COMMAND} makes, "
            "one for each machine."
        ) from error
    _check_permissions(paths[2])
    _check_certificate(paths, is_server=is_server)
    ca, cert, key = contents
    return ca, cert, key


def _paths(folder: str) -> tuple[Path, Path, Path]:
    path = Path(folder).expanduser()
    return path / "ca.pem", path / "cert.pem", path / "key.pem"


def _check_permissions(key: Path) -> None:
    """Refuse a key that other users can read: they could be us.

    Refused, not warned of, as ssh does: nobody reads a warning that changes nothing. If
    the key is somebody else's (root's, say), this user may read it as one of a group.
    """
    status = key.stat()
    allowed = 0o600 if status.st_uid == os.geteuid() else 0o640
    mode = stat.S_IMODE(status.st_mode)
    if mode & ~allowed & 0o077:
        raise ConfigError(
            f"--tls_dir: others can read {key}, or write it (mode {mode:04o}). Make it "
            f"private: chmod 600 {key}. If they may have done so, make a new one."
        )


def _check_certificate(paths: tuple[Path, Path, Path], *, is_server: bool) -> None:
    """Check that our certificate would convince ourselves; gRPC would not say why not.

    One side, in memory, shows it, the other checks it as its peers will.
    """
    ca, cert, key = paths
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # Peers know the name that they have dialled.
    checks, checked = (client, server) if is_server else (server, client)
    checked.verify_mode = ssl.CERT_NONE
    checks.verify_mode = ssl.CERT_REQUIRED
    try:
        checks.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ConfigError(f"--tls_dir: no certificate in {ca}: {error}") from error
    try:
        for context in {server, checked}:  # There is no server without one.
            context.load_cert_chain(cert, key, password="")  # And no question.
    except ssl.SSLError as error:
        raise ConfigError(
            f"--tls_dir: {cert} and {key} do not fit together: {error}. They should "
            "hold a certificate and its key, in PEM, without a password."
        ) from error
    try:
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"--tls_dir: {cert} is of no use here: {error.verify_message}"
            f"{_advice(error.verify_message)}"
        ) from error


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server),
    ]
    for _ in range(10):  # Each turn is one flight of messages; it takes three.
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()


def diagnose(address: str, folder: str | None) -> str | None:
    """Say why TLS keeps a learner from the server at `address`; None if it does not.

    gRPC tells little: of a server that refuses the learner's certificate only that it
    hung up. So this shakes hands once more. A server that is away is None.

    Args:
      folder: the learner's --tls_dir, or None if it speaks no TLS.
    """
    if address.startswith("unix:"):
        return None
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        if folder is None:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        else:
            ca, cert, key = _paths(folder)
            context.load_verify_locations(ca)
            context.load_cert_chain(cert, key, password="")
        with (
            socket.create_connection((host, int(port)), DIAGNOSE_S) as tcp,
            context.wrap_socket(tcp, server_hostname=host) as connection,
        ):
            if folder is None:
                return "it speaks TLS and this learner does not: add --tls_dir"
            # It has yet to judge our certificate. Content, it says something.
            if connection.recv(1):
                return None
    except ssl.SSLCertVerificationError as error:
        return f"its certificate: {error.verify_message}{_advice(error.verify_message)}"
    except ssl.SSLEOFError:
        return None  # It may be dying.
    except ssl.SSLError as error:
        if folder is None:
            return None  # As it should be.
        if error.reason == "WRONG_VERSION_NUMBER":
            return "it does not speak TLS: start it with --tls_dir"
        return f"TLS: {error.reason or error}"
    except OSError:
        return None
    return (
        "it hangs up when it sees this learner's certificate: its ca.pem must be of "
        "another CA, or its clock wrong"
    )


def _advice(problem: str) -> str:
    """Return what to do about a problem in the words of OpenSSL."""
    if "expired" in problem or "not yet valid" in problem:
        return (
            ". Check the clocks of both machines; python -m tools.certs --renew makes "
            "new certificates"
        )
    if "mismatch" in problem:
        return (
            " Use the name in the certificate, or make one for this name: python -m "
            "tools.certs --hosts NAME"
        )
    if "purpose" in problem:
        return (
            ". The learner and each server have a folder of their own; these were "
            "swapped"
        )
    return ": another CA than that of ca.pem signed it"
