# SPDX-License-Identifier: Apache-2.0
"""Make certificates for environment servers on other machines and for their learner.

    python -m tools.certs --hosts host1,host2,10.0.0.7 --out certs

makes a private certificate authority (CA), and a folder for each machine, which is the
value of `--tls_dir` there:

    certs/ca        ca.pem, ca-key.pem       stays here: its key makes certificates
    certs/host1     ca.pem, cert.pem, key.pem    for host1; and so on
    certs/learner   ca.pem, cert.pem, key.pem    for the learner

Another call with more hosts uses the same CA and leaves all existing files as they are.
With `--renew` it replaces the certificates of the named hosts and of the learner. Needs
the package cryptography.
"""

import argparse
import datetime
import ipaddress
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ModuleNotFoundError as error:
    sys.exit(f"python -m tools.certs: {error}. pip install cryptography")

CA, LEARNER = "ca", "learner"  # Folders that do not belong to a host.
CA_DAYS = 3650  # Long, since all machines need a copy of a new ca.pem.
SLACK = datetime.timedelta(hours=1)  # Clocks of other machines may be behind.


class CertsError(Exception):
    """The certificates cannot be made; the message says what to change."""


def hosts(text: str) -> list[str]:
    """Parse a comma list of host names and IP addresses, for `type=`."""
    result = [host for host in text.split(",") if host]
    for host in result:
        if host in (CA, LEARNER):
            raise argparse.ArgumentTypeError(
                f"{host!r} is a folder of its own; give the host another name"
            )
        label = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
        if not (is_ip(host) or re.fullmatch(rf"{label}(\.{label})*", host)):
            raise argparse.ArgumentTypeError(
                f"expected host names and IP addresses, without ports, got {host!r}"
            )
    if not result:
        raise argparse.ArgumentTypeError(f"expected a host, got {text!r}")
    return list(dict.fromkeys(result))


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def days(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) < CA_DAYS):
        raise argparse.ArgumentTypeError(f"expected 1 to {CA_DAYS - 1}, got {text!r}")
    return int(text)


def make_all(out: Path, names: Sequence[str], *, num_days: int, renew: bool) -> None:
    """Make what is not there of a CA and of a folder for each host and the learner.

    Raises:
      CertsError: the CA that is there cannot be used.
    """
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (out / CA).exists():
        make_ca(out)
    ca, ca_key = load_ca(out / CA)
    for name in (*names, LEARNER):
        folder = out / name
        if folder.exists() and not renew:
            until = load_certificate(folder / "cert.pem").not_valid_after_utc
            past = " (EXPIRED)" if until < now() else ""
            print(f"{folder}: left as it is, valid until {until:%Y-%m-%d}{past}")
            continue
        until = make_leaf(out, name, ca, ca_key, num_days)
        print(f"{folder}: valid until {until:%Y-%m-%d}")


def make_ca(out: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "TorchBeast CA")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        certificate(name, name, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    ca = builder.sign(key, hashes.SHA256())
    write_folder(out / CA, {"ca.pem": pem(ca), "ca-key.pem": pem_key(key)})
    print(f"{out / CA}: a new CA. Keep it: whoever has ca-key.pem can be any machine.")


def load_ca(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    ca = load_certificate(folder / "ca.pem")
    path = folder / "ca-key.pem"
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CertsError(f"{path} is no private key, or encrypted: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or (
        key.public_key() != ca.public_key()
    ):
        raise CertsError(f"ca-key.pem is not the key of ca.pem, both in {folder}")
    return ca, key


def make_leaf(
    out: Path,
    name: str,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    num_days: int,
) -> datetime.datetime:
    """Make the folder of one machine; return until when its certificate is valid."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    san = x509.IPAddress(ipaddress.ip_address(name)) if is_ip(name) else None
    # A host's certificate is of no use to pose as a learner, nor the other way round.
    purpose = ExtendedKeyUsageOID.SERVER_AUTH
    if name == LEARNER:
        purpose = ExtendedKeyUsageOID.CLIENT_AUTH
    public = ca_key.public_key()
    leaf = (
        certificate(subject, ca.subject, key.public_key(), num_days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([san or x509.DNSName(name)]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    if leaf.not_valid_after_utc > ca.not_valid_after_utc:
        raise CertsError(
            f"the CA in {out / CA} ends on {ca.not_valid_after_utc:%Y-%m-%d}, before "
            "such a certificate would. Choose fewer --days, or another --out for a new "
            "CA."
        )
    files = {"ca.pem": pem(ca), "cert.pem": pem(leaf), "key.pem": pem_key(key)}
    write_folder(out / name, files)
    return leaf.not_valid_after_utc


def certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    num_days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - SLACK)
        .not_valid_after(now() + datetime.timedelta(days=num_days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Put a folder in place as a whole, readable for this user only."""
    temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))  # Mode 0700.
    for name, content in files.items():
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(temporary / name, flags, 0o600), "wb") as file:
            file.write(content)
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise CertsError(f"{path} is no certificate: {error}") from error


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def instructions(out: Path, names: Sequence[str]) -> str:
    """Say what to copy where, and the commands that use it."""
    where = {name: f"[{name}]" if ":" in name else name for name in names}
    copies = "\n".join(
        f"  rsync -a {out / n}/ {where[n]}:torchbeast-certs/" for n in names
    )
    addresses = ",".join(f"{where[name]}:4431-4434" for name in names)
    return f"""
Copy to each host its own folder, and nothing else:

{copies}

On each host, with your --env, for four servers:

  python -m polybeast_env --num_servers 4 --server_address 0.0.0.0:4431 \\
      --tls_dir ~/torchbeast-certs

Where the learner is, here or wherever {out / LEARNER} is copied to (hosts must be named
as they are in their certificates):

  python -m polybeast --server_addresses {addresses} \\
      --tls_dir {out / LEARNER}"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.certs",
        description="Make certificates for --tls_dir.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--hosts",
        type=hosts,
        required=True,
        help="comma list of the hosts of environment servers, by the names or IP "
        "addresses that the learner will dial",
    )
    parser.add_argument("--out", type=Path, default=Path("certs"), help="folder")
    parser.add_argument(
        "--days", type=days, default=90, help="how long certificates are valid"
    )
    parser.add_argument(
        "--renew",
        action="store_true",
        help="replace the certificates of these hosts and of the learner",
    )
    flags = parser.parse_args(argv)
    try:
        make_all(flags.out, flags.hosts, num_days=flags.days, renew=flags.renew)
    except (CertsError, OSError) as error:
        print(f"python -m tools.certs: {error}", file=sys.stderr)
        return 1
    print(instructions(flags.out, flags.hosts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
