# SPDX-License-Identifier: Apache-2.0
"""TLS: who gets in, who does not and is told why, and the certificates of tools.certs.

In the matrix each of learner and server has every kind of wrong certificate, and no TLS
at all; only the pair of right ones connects.
"""

import datetime
import functools
import ipaddress
import os
import re
import shlex
import shutil
import socket
import ssl
import stat
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import libtorchbeast
import polybeast
import polybeast_env
from core.errors import ConfigError
from core.remote import codec, tls
from core.remote import greet as greet_module
from core.remote import pool as pool_module
from core.remote.server_lists import ServerList
from tests import counting_env
from tests.conftest import DEADLINE_S, wait_until

pytest.importorskip("grpc", reason="pip install grpcio")
x509 = pytest.importorskip("cryptography.x509", reason="pip install cryptography")
from cryptography.hazmat.primitives import serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from cryptography.x509.oid import ExtendedKeyUsageOID  # noqa: E402

from tools import certs  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
K = 3


def make(out: Path, *argv: str, hosts: str = "localhost,127.0.0.1,elsewhere") -> None:
    assert certs.main(["--hosts", hosts, "--out", str(out), *argv]) == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Folders for --tls_dir: right ones, and with one thing wrong each."""
    root = tmp_path_factory.mktemp("certs")
    make(root / "right")
    make(root / "other")
    today = certs.now()
    with pytest.MonkeyPatch.context() as patch:
        for name, days in (("expired", -200), ("early", 200)):
            when = today + datetime.timedelta(days=days)
            patch.setattr(certs, "now", functools.partial(lambda when: when, when))
            shutil.copytree(root / "right" / "ca", root / name / "ca")
            make(root / name)
    found = {"right": root / "right" / "localhost", "learner": root / "right/learner"}
    found["ip"] = root / "right" / "127.0.0.1"
    found["elsewhere"] = root / "right" / "elsewhere"
    for name in ("expired", "early", "other"):
        found[name] = root / name / "localhost"
        found[f"{name}-learner"] = root / name / "learner"
    # Such a learner trusts the servers, but they do not trust it.
    both = (root / name / "ca" / "ca.pem" for name in ("right", "other"))
    bundle = b"".join(path.read_bytes() for path in both)
    (found["other-learner"] / "ca.pem").write_bytes(bundle)
    return found


@pytest.fixture
def any_certificate(monkeypatch):
    """Use what would be refused on one's own side already, to see the other side."""
    monkeypatch.setattr(tls, "_check_certificate", lambda paths, is_server: None)


@pytest.fixture
def start_server(serve):
    """Start a server in this process; return its address."""

    def start(tls_dir: Path | None, address: str = "localhost:0") -> str:
        options = {"num_envs": K, "tls_dir": tls_dir and str(tls_dir)}
        return serve(counting_env.make, address=address, **options).address

    return start


def describe(address: str, tls_dir: Path | None, timeout_s: float = 0.3):
    pem_files = tls.files(tls_dir and str(tls_dir))
    raw = libtorchbeast.describe(address, timeout_s=timeout_s, tls=pem_files)
    return codec.decode_welcome(raw)


# ------------------------------------------------------------------------- the matrix

# What the server has; the learner; whether gRPC tells that trying again is of no use;
# and what `diagnose` adds.
MATRIX = [
    ("expired", "learner", True, "its certificate: certificate has expired.*clocks"),
    ("early", "learner", True, "certificate is not yet valid. Check the clocks"),
    ("other", "learner", True, "not signed by the CA in ca.pem"),
    ("elsewhere", "learner", True, "Hostname mismatch.*'localhost'.*--hosts NAME"),
    ("ip", "learner", True, "Hostname mismatch.*'localhost'"),
    ("learner", "learner", True, "certificate purpose.*swapped"),
    (None, "learner", True, "does not speak TLS: start it with --tls_dir"),
    ("right", "expired-learner", False, "hangs up when it sees this learner's"),
    ("right", "early-learner", False, "hangs up when it sees this learner's"),
    ("right", "other-learner", False, "another CA, or its clock is wrong"),
    ("right", "elsewhere", False, "hangs up when it sees this learner's"),
    ("right", None, False, "it speaks TLS and this learner does not: add --tls_dir"),
]


@pytest.mark.parametrize("server, learner, is_permanent, said", MATRIX)
def test_whoever_shows_the_wrong_certificate_is_told_what_is_wrong(
    folders, start_server, any_certificate, server, learner, is_permanent, said
):
    address = start_server(folders.get(server))
    errors: list[Exception] = []

    def has_answered() -> bool:  # Its time may be over before the handshake is.
        with pytest.raises(libtorchbeast.ActorError) as error:
            describe(address, folders.get(learner))
        errors.append(error.value)
        return "DEADLINE_EXCEEDED" not in str(error.value)

    wait_until(has_answered)
    expected = libtorchbeast.ServerUnavailable
    if is_permanent:
        expected = libtorchbeast.ServerMismatch
    assert type(errors[-1]) is expected
    assert address in str(errors[-1])
    learner_dir = str(folders[learner]) if learner else None
    assert re.search(said, tls.diagnose(address, learner_dir) or "nothing")


@pytest.mark.parametrize(
    "server, address",
    [("right", "localhost:0"), ("ip", "127.0.0.1:0"), (None, "localhost:0")],
)
def test_the_right_certificates_connect(folders, start_server, server, address):
    learner = folders["learner"] if server else None
    address = start_server(folders.get(server), address)
    assert describe(address, learner, DEADLINE_S).num_envs == K
    assert tls.diagnose(address, learner and str(learner)) is None


def test_the_name_of_a_certificate_may_stand_behind_the_address(folders, start_server):
    address = start_server(folders["elsewhere"])
    learner = folders["learner"]
    assert "mismatch" in tls.diagnose(address, str(learner))
    named = f"{address}#elsewhere"
    assert describe(named, learner, DEADLINE_S).num_envs == K
    assert tls.diagnose(named, str(learner)) is None


def test_a_learner_without_a_certificate_does_not_get_in(folders, start_server):
    address = start_server(folders["right"])
    ca = str(folders["learner"] / "ca.pem")
    with pytest.raises(libtorchbeast.ServerUnavailable):
        libtorchbeast.describe(address, timeout_s=0.3, tls=(ca, "", ""))


def test_unix_sockets_do_without(folders, start_server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # For a short path.
    address = start_server(folders["right"], "unix:s")
    assert describe(address, folders["learner"], DEADLINE_S).num_envs == K
    assert tls.diagnose(address, str(folders["learner"])) is None


def test_who_is_away_is_not_accused(folders):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
    with pytest.raises(libtorchbeast.ServerUnavailable, match="refused"):
        describe(address, folders["learner"])
    assert tls.diagnose(address, str(folders["learner"])) is None
    for away in (address, "a..b:4431", f"{'a' * 64}:4431", "a\0b:4431"):
        assert tls.diagnose(away, None) is None


@pytest.mark.parametrize("shakes_hands", [True, False])
def test_a_connection_that_is_reset_is_a_refusal_only_after_the_handshake(
    folders, background, shakes_hands
):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folders["right"] / "cert.pem", folders["right"] / "key.pem")
    listener = socket.create_server(("127.0.0.1", 0))

    def reset_one():
        connection, _ = listener.accept()
        if shakes_hands:
            connection = context.wrap_socket(connection, server_side=True)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        connection.close()

    with listener:
        thread = background(reset_one)
        address = f"localhost:{listener.getsockname()[1]}"
        said = tls.diagnose(address, str(folders["learner"]))
        thread.result(DEADLINE_S)
    assert (said is not None) == shakes_hands, said


# --------------------------------------------------------------------------- learners


def make_pool(address: str, tls_dir: Path, **options) -> libtorchbeast.ActorPool:
    queue = libtorchbeast.BatchingQueue(minimum_batch_size=K, maximum_batch_size=K)
    return libtorchbeast.ActorPool(
        5,
        queue,
        libtorchbeast.DynamicBatcher(timeout_ms=None),
        [address],
        (np.zeros((1, 1, 2), np.float32),),
        tls=tls.files(str(tls_dir)),
        num_envs=K,
        **options,
    )


def test_a_stream_that_connects_again_uses_the_files_of_that_moment(
    folders, start_server, any_certificate, background, tmp_path
):
    mine = shutil.copytree(folders["expired-learner"], tmp_path / "mine")
    pool = make_pool(start_server(folders["right"]), mine, max_failures=1)
    running = background(pool.run)
    events = []

    def has_said(words: str) -> bool:
        events.extend(pool.take_events())
        return any(words in event for event in events) or running.done()

    wait_until(lambda: has_said("UNAVAILABLE"))
    shutil.copy(folders["learner"] / "key.pem", mine)
    wait_until(lambda: has_said("empty address list"))  # The files do not fit together.
    shutil.copy(folders["learner"] / "cert.pem", mine)
    wait_until(lambda: pool.stats()["connected"] == 1 or running.done())
    pool.stop()
    running.result(DEADLINE_S)


def test_files_that_cannot_be_used_any_more_are_named(folders, start_server, tmp_path):
    mine = shutil.copytree(folders["learner"], tmp_path / "mine")
    address = start_server(folders["right"])
    (mine / "ca.pem").unlink()
    with pytest.raises(libtorchbeast.ServerUnavailable):
        paths = tuple(str(mine / name) for name in ("ca.pem", "cert.pem", "key.pem"))
        libtorchbeast.describe(address, timeout_s=DEADLINE_S, tls=paths)
    assert f"cannot read {mine}/ca.pem" in tls.diagnose(address, str(mine))


def test_actors_give_a_wrong_certificate_up_and_say_why(folders, start_server):
    address = start_server(folders["elsewhere"])
    pool = make_pool(address, folders["learner"], max_failures=2)
    flags = SimpleNamespace(server_addresses=(address,), tls_dir=folders["learner"])
    with pytest.raises(ConfigError) as error:
        pool_module.run_actors(flags, pool)
    for part in (f"{address} (stream 0", "failed 2 times in a row", "not in peer cert"):
        assert part in str(error.value)
    assert "Hostname mismatch" in str(error.value)
    assert pool.stats()["failures"] == 2


def greet(address: str, tls_dir: Path):
    argv = ["--server_addresses", address, "--tls_dir", str(tls_dir)]
    flags = polybeast.parse_flags([*argv, "--batch_size", str(K)])
    servers = ServerList([address])
    _, welcome = greet_module.greet(flags, servers, SimpleNamespace(received=None))
    return welcome


def test_the_learner_stops_if_its_certificate_is_refused_again_and_again(
    folders, start_server, monkeypatch
):
    monkeypatch.setattr(greet_module, "DESCRIBE_S", 0.05)
    address = start_server(folders["right"])
    calls = []
    diagnose = tls.diagnose
    monkeypatch.setattr(
        tls, "diagnose", lambda *args: calls.append(args) or diagnose(*args)
    )
    with pytest.raises(ConfigError, match=f"{address}.*hangs up when it sees"):
        greet(address, folders["other-learner"])
    assert len(calls) == greet_module.MAX_REFUSALS
    assert greet(address, folders["learner"]).num_envs == K


def test_the_learner_stops_if_a_servers_certificate_is_wrong(
    folders, start_server, any_certificate, monkeypatch, capfd
):
    monkeypatch.setattr(greet_module, "DESCRIBE_S", 0.05)
    address = start_server(folders["expired"])
    with pytest.raises(ConfigError, match=f"{address}.*certificate has expired"):
        greet(address, folders["learner"])
    assert "Handshake failed" not in capfd.readouterr().err  # gRPC's own words.


def test_a_run_learns_over_tls(start, start_program, folders, tmp_path):
    command = [sys.executable, "-m", "polybeast_env", "--env", "Catch"]
    command += ["--server_address", "localhost:0", "--num_servers", 1]
    command += ["--envs_per_stream", 2, "--tls_dir", folders["right"]]
    servers = start_program(*command)
    servers.wait_for_text(": 1 server")
    address = re.search(r"at (localhost:\d+): 1 server", servers.text())
    assert address is not None
    program = start(
        *("--xpid", "x", "--total_steps", 1000, "--batch_size", 4),
        *("--server_addresses", address[1], "--tls_dir", folders["learner"]),
        module="polybeast",
    )
    assert program.wait() == 0, program.text()
    servers.process.terminate()
    servers.wait()
    assert "INSECURE" not in program.text()
    meta = (tmp_path / "runs" / "x" / "meta.json").read_text()
    assert str(folders["learner"]) in meta and "BEGIN" not in meta


def test_a_run_whose_certificate_is_of_no_use_does_not_begin(start, folders, tmp_path):
    folder = folders["expired-learner"]
    flags = ["--server_addresses", "localhost:1", "--tls_dir", folder]
    program = start("--xpid", "x", *flags, module="polybeast")
    assert program.wait() == 78, program.text()
    last = program.text().splitlines()[-1]
    assert f"{folder}/cert.pem" in last and "expired" in last
    assert not (tmp_path / "runs" / "x").exists()


# -------------------------------------------------------------------------- one's own


def change(folder: Path, name: str, to: bytes | Path | None) -> None:
    (folder / name).unlink()
    if to is not None:
        content = to if isinstance(to, bytes) else to.read_bytes()
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)


@pytest.mark.parametrize(
    "name, to, said",
    [
        ("ca.pem", None, "cannot read .*ca.pem: No such file.* python -m tools.certs"),
        ("cert.pem", None, "cannot read .*cert.pem"),
        ("key.pem", None, "cannot read .*key.pem"),
        ("ca.pem", b"?", "no certificate in .*ca.pem"),
        ("cert.pem", b"?", "cert.pem and .*key.pem do not fit"),
        ("key.pem", "other", "cert.pem and .*key.pem do not fit together.*MISMATCH"),
        (
            "ca.pem",
            "other",
            "cert.pem cannot be used here: .*not signed by the CA in ca.pem",
        ),
    ],
)
@pytest.mark.parametrize("is_server", [True, False])
def test_files_that_cannot_be_used_are_named(
    folders, tmp_path, is_server, name, to, said
):
    kind = "right" if is_server else "learner"
    folder = shutil.copytree(folders[kind], tmp_path / "mine")
    assert tls.files(str(folder), is_server=is_server) is not None
    change(folder, name, folders[to] / name if isinstance(to, str) else to)
    with pytest.raises(ConfigError, match=said):
        tls.files(str(folder), is_server=is_server)


@pytest.mark.parametrize(
    "name, is_server, said",
    [
        (
            "expired",
            True,
            "cert.pem cannot be used here: certificate has expired.*clocks",
        ),
        ("expired-learner", False, "certificate has expired"),
        ("early", True, "not yet valid. Check the clocks"),
        ("early-learner", False, "not yet valid"),
        ("learner", True, "purpose.*swapped"),
        ("right", False, "purpose.*swapped"),
    ],
)
def test_a_certificate_that_others_would_refuse_is_refused_at_once(
    folders, name, is_server, said
):
    with pytest.raises(ConfigError, match=said):
        tls.files(str(folders[name]), is_server=is_server)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_key_that_others_can_read_is_refused(folders, tmp_path, mode):
    folder = shutil.copytree(folders["learner"], tmp_path / "mine")
    (folder / "key.pem").chmod(mode)
    with pytest.raises(ConfigError, match=f"key.pem.*mode {mode:04o}.*chmod 600"):
        tls.files(str(folder), is_server=False)
    (folder / "key.pem").chmod(0o400)
    tls.files(str(folder), is_server=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
def test_somebody_elses_key_may_be_for_our_group(folders, tmp_path):
    folder = shutil.copytree(folders["learner"], tmp_path / "mine")
    os.chown(folder / "key.pem", 1, 0)
    (folder / "key.pem").chmod(0o640)
    tls.files(str(folder), is_server=False)
    (folder / "key.pem").chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        tls.files(str(folder), is_server=False)


def test_a_servers_program_says_what_is_wrong_with_its_files(folders):
    argv = ["--env", "Catch", "--num_servers", "1", "--server_address", "0.0.0.0:0"]
    argv += ["--tls_dir", str(folders["expired"])]
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        # It would filter repeated warnings out of pytest's own handler, for good.
        patch.setattr(polybeast_env, "setup_logging", lambda flags: None)
        patch.setattr(
            polybeast_env.log, "error", lambda *args: errors.append(args[0] % args[1:])
        )
        assert polybeast_env.main(argv) == 78
    assert "cert.pem cannot be used here: certificate has expired" in errors[0]


# ------------------------------------------------------------------------ tools.certs


def load(path: Path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def extension(certificate, kind):
    return certificate.extensions.get_extension_for_class(kind).value


def test_certificates_say_who_and_what_for(tmp_path):
    make(tmp_path / "c", hosts="host1,a.b-c.org,10.0.0.7,fd00::7")
    names = {
        "host1": x509.DNSName("host1"),
        "a.b-c.org": x509.DNSName("a.b-c.org"),
        "10.0.0.7": x509.IPAddress(ipaddress.ip_address("10.0.0.7")),
        "fd00::7": x509.IPAddress(ipaddress.ip_address("fd00::7")),
        "learner": x509.DNSName("learner"),
    }
    ca = load(tmp_path / "c" / "ca" / "ca.pem")
    for name, expected in names.items():
        folder = tmp_path / "c" / name
        assert (folder / "ca.pem").read_bytes() == (
            tmp_path / "c" / "ca" / "ca.pem"
        ).read_bytes()
        leaf = load(folder / "cert.pem")
        leaf.verify_directly_issued_by(ca)
        assert isinstance(leaf.public_key().curve, ec.SECP256R1)
        days = leaf.not_valid_after_utc - certs.now()
        assert datetime.timedelta(89.9) < days < datetime.timedelta(90.1)
        assert list(extension(leaf, x509.SubjectAlternativeName)) == [expected]
        purpose = ExtendedKeyUsageOID.SERVER_AUTH
        if name == "learner":
            purpose = ExtendedKeyUsageOID.CLIENT_AUTH
        assert list(extension(leaf, x509.ExtendedKeyUsage)) == [purpose]
        assert not extension(leaf, x509.BasicConstraints).ca
        tls.files(str(folder), is_server=name != "learner")


def test_certificates_are_as_strict_as_openssl_can_be(folders):
    context = ssl.create_default_context(cafile=folders["right"] / "ca.pem")
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.check_hostname = False
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folders["right"] / "cert.pem", folders["right"] / "key.pem")
    tls._shake_hands(server, context)


def test_files_are_for_their_user_only_whatever_the_umask(tmp_path):
    mask = os.umask(0)
    try:
        make(tmp_path / "c")
    finally:
        os.umask(mask)
    modes = {
        p: stat.S_IMODE(p.stat().st_mode)
        for p in (tmp_path / "c", *(tmp_path / "c").rglob("*"))
    }
    assert len(modes) == 1 + 5 + 4 * 3 + 2
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_more_hosts_join_the_same_ca_and_nothing_is_overwritten(tmp_path, capsys):
    make(tmp_path, hosts="host1")
    before = contents(tmp_path)
    make(tmp_path, hosts="host1,host2")
    after = contents(tmp_path)
    assert before.items() < after.items()
    ca, leaf = (load(tmp_path / name) for name in ("ca/ca.pem", "host2/cert.pem"))
    leaf.verify_directly_issued_by(ca)  # Or it raises.
    assert f"{tmp_path}/host1: left as it is, valid until" in capsys.readouterr().out


def test_renew_replaces_the_certificates_of_hosts_and_learner(tmp_path):
    make(tmp_path, hosts="host1,host2")
    before = contents(tmp_path)
    make(tmp_path, "--renew", "--days", "7", hosts="host1")
    after = contents(tmp_path)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        f"{who}/{name}"
        for who in ("host1", "learner")
        for name in ("cert.pem", "key.pem")
    }
    until = load(tmp_path / "host1" / "cert.pem").not_valid_after_utc
    assert until - certs.now() < datetime.timedelta(7.1)


def test_what_it_prints_to_run_is_what_the_programs_take(tmp_path, capsys):
    make(tmp_path / "c", hosts="host1,fd00::7")
    lines = capsys.readouterr().out.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("  ")]
    copies = [command for command in commands if command[0] == "rsync"]
    assert [command[2] for command in copies] == [
        f"{tmp_path / 'c' / name}/" for name in ("host1", "fd00::7")
    ]
    servers, learner = (c[3:] for c in commands if c[:2] == ["python", "-m"])
    assert polybeast_env.parse_flags(servers).num_servers == 4
    flags = polybeast.parse_flags(learner)
    assert flags.server_addresses[3:5] == ("host1:4434", "[fd00::7]:4431")
    assert tls.files(flags.tls_dir, is_server=False)


@pytest.mark.parametrize(
    "hosts, said",
    [
        ("", "expected a host"),
        ("ca", "'ca' is a folder of its own"),
        ("host1,learner", "'learner' is a folder of its own"),
        ("host1:4431", "without ports, got 'host1:4431'"),
        ("../host1", "got '../host1'"),
        ("*.org", "got '*.org'"),
    ],
)
def test_hosts_that_are_none_are_refused(tmp_path, capsys, hosts, said):
    with pytest.raises(SystemExit):
        certs.main(["--hosts", hosts, "--out", str(tmp_path)])
    assert said in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_a_ca_that_is_not_whole_is_named(tmp_path, capsys):
    make(tmp_path / "a")
    make(tmp_path / "b")
    shutil.copy(tmp_path / "a/ca/ca-key.pem", tmp_path / "b/ca/ca-key.pem")
    for out, said in (("b", "is not the key of ca.pem"), ("a", "No such file")):
        assert certs.main(["--hosts", "new", "--out", str(tmp_path / out)]) == 1
        assert said in capsys.readouterr().err
        (tmp_path / "a/ca/ca-key.pem").unlink(missing_ok=True)
    path = tmp_path / "b/ca/ca-key.pem"
    whole = path.read_bytes()
    key = serialization.load_pem_private_key(whole, None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"x"),
    )
    for damaged in whole[:99], b"\xff" + whole[:40] + b"\xff" + whole[41:], locked:
        path.write_bytes(damaged)
        assert certs.main(["--hosts", "new", "--out", str(tmp_path / "b")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{path} is no private key, or encrypted: " in line
    assert not list(tmp_path.glob("*/new"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert certs.main(["--hosts", "new", "--out", str(tmp_path / "file")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"File exists: '{tmp_path / 'file'}'")


def test_certificates_that_outlive_their_ca_are_refused(tmp_path, capsys, monkeypatch):
    make(tmp_path)
    later = certs.now() + datetime.timedelta(days=3600)
    monkeypatch.setattr(certs, "now", lambda: later)
    assert certs.main(["--hosts", "new", "--out", str(tmp_path)]) == 1
    assert "another --out for a new CA" in capsys.readouterr().err
    make(tmp_path, "--days", "30", hosts="new")


def test_keys_have_no_password_and_are_p_256(folders):
    key = serialization.load_pem_private_key(
        (folders["right"] / "key.pem").read_bytes(), None
    )
    assert isinstance(key.curve, ec.SECP256R1)
