# SPDX-License-Identifier: Apache-2.0
"""Machines that dial in: acceptor and dialer, without environments.

Most tests run both in one event loop; the servers are echoes, and the learner a socket.
"""

import argparse
import asyncio
import contextlib
import gc
import os
import re
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from core.errors import ConfigError, Exit
from core.remote import acceptor as acceptor_module
from core.remote import child, dial_in, dialer, server_lists, tls, tunnel
from core.remote.acceptor import Acceptor
from core.remote.dialer import Link
from core.remote.tunnel import ProtocolError
from tests.conftest import DEADLINE_S, Program, wait_until
from tools.runs import log_rows

MACHINE = "0123456789abcdef" * 2
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Folders for --tls_dir, of two certificate authorities."""
    certs = pytest.importorskip("tools.certs", reason="pip install cryptography")
    root = tmp_path_factory.mktemp("certs")
    for name in ("right", "other"):
        assert certs.main(["--hosts", "env", "--out", str(root / name)]) == 0
    return {
        "machine": str(root / "right" / "env"),
        "learner": str(root / "right" / "learner"),
        "other machine": str(root / "other" / "env"),
        "other learner": str(root / "other" / "learner"),
    }


def context(folder: str | None, *, is_server: bool) -> ssl.SSLContext | None:
    return tls.context(folder, is_server=is_server)


class Scene:
    """An acceptor, and machines with echo servers.

    `told` is what the acceptor has told the learner; `log` all log lines.
    """

    def __init__(self, folder: Path, caplog, monkeypatch):
        self.folder = folder
        (folder / "sockets").mkdir(exist_ok=True)
        self.told: list[tuple] = []
        self._caplog = caplog
        caplog.set_level("INFO")
        monkeypatch.setattr(child, "tell", lambda *what: self.told.append(what))
        self.acceptor: Acceptor | None = None
        self.address = "127.0.0.1:0"
        self.links: list[asyncio.Task] = []
        self.echoes: list[asyncio.AbstractServer] = []

    @property
    def log(self) -> str:
        return self._caplog.text

    async def open(self, tls_dir: str | None = None, keepalive_s: float = 5.0):
        made = context(tls_dir, is_server=False)
        self.acceptor = Acceptor(self.folder / "sockets", made, keepalive_s)
        self.address = await self.acceptor.listen(self.address)

    async def echo(self, name: str) -> str:
        async def answer(reader, writer):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.close()

        path = str(self.folder / name)
        self.echoes.append(await asyncio.start_unix_server(answer, path))
        return path

    def join(self, *sockets: str, tls_dir: str | None = None, keepalive_s: float = 5.0):
        made = context(tls_dir, is_server=True)
        link = Link(self.address, sockets, MACHINE, made, keepalive_s)
        self.links.append(asyncio.ensure_future(link.stay()))
        return self.links[-1]

    async def until(self, condition) -> None:
        async def poll():
            while not condition():
                await asyncio.sleep(0.002)

        await asyncio.wait_for(poll(), DEADLINE_S)

    async def joined(self, times: int = 1) -> str:
        """Wait for a machine; return its path."""
        await self.until(lambda: self.log.count("has joined") >= times)
        return next(what[1] for what in reversed(self.told) if what[0] == "joined")

    async def close(self) -> None:
        for link in self.links:
            link.cancel()
        await asyncio.gather(*self.links, return_exceptions=True)
        if self.acceptor is not None:
            self.acceptor.close()
        for echo in self.echoes:
            echo.close()


@pytest.fixture
def play(tmp_path, caplog, monkeypatch):
    """Run a coroutine with a scene; afterwards no descriptor may be left."""
    monkeypatch.setattr(dialer, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(dialer, "MAX_WAIT_S", 0.02)

    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def run(body) -> None:
        before = num_descriptors()

        async def main():
            scene = Scene(tmp_path, caplog, monkeypatch)
            try:
                await asyncio.wait_for(body(scene), DEADLINE_S)
            finally:
                await scene.close()
            await scene.until(lambda: not acceptor_sockets(tmp_path))

        asyncio.run(main())
        gc.collect()  # What a loop leaves behind is garbage in cycles.
        wait_until(lambda: num_descriptors() <= before)

    return run


def acceptor_sockets(folder: Path) -> list[Path]:
    return list((folder / "sockets").iterdir())


async def ask(path: str, data: bytes) -> bytes:
    """Send bytes to a socket as the learner would, and return as many."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    answer = await reader.readexactly(len(data))
    writer.close()
    return answer


# -------------------------------------------------------------------------- honest


@pytest.mark.parametrize("encrypt", [True, False], ids=["tls", "plain"])
def test_bytes_reach_the_right_server_and_come_back(play, folders, encrypt):
    async def body(scene: Scene) -> None:
        await scene.open(folders["learner"] if encrypt else None)
        paths = [await scene.echo("a"), await scene.echo("b")]
        scene.join(*paths, tls_dir=folders["machine"] if encrypt else None)
        path = await scene.joined()
        assert scene.told == [("joined", path, 2)]
        data = os.urandom(3_000_001)  # More than all buffers.
        answers = await asyncio.gather(
            *(ask(f"{path}.{i}", data[i:]) for i in (0, 1, 1))
        )
        assert answers == [data, data[1:], data[1:]]
        if encrypt:
            assert "(127.0.0.1, certificate of env) has joined" in scene.log
        # A server that ends its connection ends the learner's.
        reader, writer = await asyncio.open_unix_connection(f"{path}.1")
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()

    play(body)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_all_addresses_of_ipv6_are_those_of_ipv4_too(play):
    """As in a server of gRPC, with --server_address [::]:PORT."""

    async def body(scene: Scene) -> None:
        scene.address = "[::]:0"
        await scene.open()
        port = scene.address.removeprefix("[::]")
        for times, host in enumerate(("127.0.0.1", "[::1]"), start=1):
            scene.address = host + port
            scene.join(await scene.echo(f"echo-{times}"))
            await scene.joined(times)

    play(body)


def test_who_does_not_read_fills_no_memory(play):
    async def body(scene: Scene) -> None:
        async def ignore(reader, writer):
            writer.transport.pause_reading()
            ignored.append(writer)

        ignored: list[asyncio.StreamWriter] = []
        path = str(scene.folder / "deaf")
        scene.echoes.append(await asyncio.start_unix_server(ignore, path))
        await scene.open()
        scene.join(path)
        _, writer = await asyncio.open_unix_connection(f"{await scene.joined()}.0")
        writer.write(bytes(64 << 20))
        await scene.until(lambda: ignored)
        waiting = [-1, 0]
        while waiting[-1] != waiting[-2]:  # Until nothing moves any more.
            await asyncio.sleep(0.1)
            waiting.append(writer.transport.get_write_buffer_size())
        assert waiting[-1] > 32 << 20
        writer.transport.abort()
        ignored[0].transport.abort()

    play(body)


@pytest.mark.parametrize("encrypt", [True, False], ids=["tls", "plain"])
def test_who_says_that_no_more_comes_and_does_not_read_is_ended(
    play, folders, monkeypatch, encrypt
):
    monkeypatch.setattr(tunnel, "CLOSE_S", 0.05)
    relayed: dict[str, tuple[tunnel.Connection, tunnel.Connection]] = {}

    def relay_at_acceptor(*ends) -> None:
        relayed["acceptor"] = ends
        tunnel.relay_between(*ends)

    def relay_at_dialer(server, connection) -> None:
        relayed["dialer"] = (server, connection)
        tunnel.relay_between(server, connection)
        connection.transport.pause_reading()

    monkeypatch.setattr(acceptor_module, "relay_between", relay_at_acceptor)
    monkeypatch.setattr(dialer, "relay_between", relay_at_dialer)

    def are_bytes_waiting() -> bool:
        return any(
            end.transport.get_write_buffer_size() for end in relayed.get("acceptor", ())
        )

    async def body(scene: Scene) -> None:
        await scene.open(folders["learner"] if encrypt else None)
        machine = folders["machine"] if encrypt else None
        scene.join(await scene.echo("a"), tls_dir=machine)
        reader, writer = await asyncio.open_unix_connection(f"{await scene.joined()}.0")
        writer.write(bytes(64 << 20))
        await scene.until(are_bytes_waiting)
        _, connection = relayed["dialer"]
        if encrypt:
            with contextlib.suppress(ssl.SSLWantReadError):
                connection._tls.unwrap()
            connection._flush()
        else:
            connection.transport.write_eof()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.transport.abort()
        connection.transport.abort()

    play(body)


def test_sockets_are_for_this_user_only(play):
    async def body(scene: Scene) -> None:
        old = os.umask(0o177)  # As acceptor.main sets it.
        try:
            await scene.open()
            scene.join(await scene.echo("a"))
            path = await scene.joined()
        finally:
            os.umask(old)
        assert os.stat(f"{path}.0").st_mode & 0o777 == 0o600

    play(body)


def test_a_server_that_is_away_ends_the_learners_connection_at_once(play, monkeypatch):
    monkeypatch.setattr(acceptor_module, "OPEN_S", DEADLINE_S)

    async def body(scene: Scene) -> None:
        await scene.open()
        scene.join(str(scene.folder / "nothing"))
        path = await scene.joined()
        reader, writer = await asyncio.open_unix_connection(f"{path}.0")
        assert await reader.read() == b""  # And not after OPEN_S.
        writer.close()

    play(body)


@pytest.fixture
def slow_dials(monkeypatch) -> list[int]:
    """Let a dial take three times OPEN_S; return how many ran at a time, by dial."""
    monkeypatch.setattr(acceptor_module, "OPEN_S", 0.2)
    dial, running, at_a_time = Link._dial, set(), []

    async def dial_slowly(link: Link, hello: str) -> tunnel.Connection:
        if hello.startswith("tunnel"):
            running.add(hello)
            at_a_time.append(len(running))
            await asyncio.sleep(3 * acceptor_module.OPEN_S)
            running.remove(hello)
        return await dial(link, hello)

    monkeypatch.setattr(Link, "_dial", dial_slowly)
    return at_a_time


def test_all_streams_connect_if_dialing_takes_longer_than_the_learner_waits(
    play, slow_dials, monkeypatch
):
    monkeypatch.setattr(acceptor_module, "MAX_ASKED", 5)
    NUM_SERVERS, STREAMS = 7, 2

    async def body(scene: Scene) -> None:
        await scene.open()
        scene.join(*[await scene.echo(str(i)) for i in range(NUM_SERVERS)])
        path = await scene.joined()
        echoed: list[asyncio.StreamWriter] = []

        async def stream(address: str) -> None:
            """Connect like the pool, until there is an answer; stay connected."""
            while True:
                reader, writer = await asyncio.open_unix_connection(address)
                writer.write(b"x")
                with contextlib.suppress(ConnectionError):
                    if await reader.read(1) == b"x":
                        echoed.append(writer)
                        return
                writer.close()
                await asyncio.sleep(0.02)

        await asyncio.gather(
            *(stream(f"{path}.{i}") for i in range(NUM_SERVERS) for _ in range(STREAMS))
        )
        # Few tunnels were dialed in vain (on a busy machine), and never many at a time.
        assert len(echoed) == NUM_SERVERS * STREAMS <= len(slow_dials)
        assert len(slow_dials) < 2 * len(echoed)
        assert max(slow_dials) == acceptor_module.MAX_ASKED
        for writer in echoed:
            writer.close()

    play(body)


def test_the_machine_says_that_the_learner_did_not_use_a_connection(play, slow_dials):
    async def body(scene: Scene) -> None:
        await scene.open()
        scene.join(await scene.echo("a"))
        _, writer = await asyncio.open_unix_connection(f"{await scene.joined()}.0")
        await scene.until(lambda: slow_dials)
        writer.close()
        await scene.until(lambda: "did not use a connection" in scene.log)
        assert f"The learner at {scene.address} did not use" in scene.log

    play(body)


def test_a_tunnel_that_never_comes_is_asked_for_again(play, monkeypatch):
    monkeypatch.setattr(acceptor_module, "TICKET_S", 0.05)
    monkeypatch.setattr(acceptor_module, "OPEN_S", DEADLINE_S)

    async def body(scene: Scene) -> None:
        await scene.open()
        reader, writer = await asyncio.open_connection(*scene.address.split(":"))
        writer.write(f"torchbeast 1 plain\njoin {MACHINE} 1 x\n".encode())
        _, learner = await asyncio.open_unix_connection(f"{await scene.joined()}.0")
        tickets = set()
        while len(tickets) < 3:
            line = await reader.readline()
            assert line, "the acceptor has closed the connection"
            if match := re.fullmatch(rb"open (\w+) 0\n", line):
                tickets.add(match[1])
        assert len(scene.acceptor._tickets) == 1
        writer.close()
        learner.close()

    play(body)


def test_a_learner_waits_at_a_unix_socket_longer_than_the_acceptor(folder):
    extension = pytest.importorskip("libtorchbeast._C", reason="not built")
    path = f"{folder}/silent"
    limit_s = acceptor_module.OPEN_S + 0.5
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(extension.ActorError, match="DEADLINE_EXCEEDED"):
            extension.describe(f"unix:{path}", timeout_s=limit_s)
        listener.accept()[0].close()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):  # There was no second attempt.
            listener.accept()


def test_a_machine_that_is_back_soon_keeps_its_place_and_its_tunnels(play):
    async def body(scene: Scene) -> None:
        await scene.open()
        scene.join(await scene.echo("a"))
        path = await scene.joined()
        reader, writer = await asyncio.open_unix_connection(f"{path}.0")
        writer.write(b"x")
        await reader.readexactly(1)
        [machine] = scene.acceptor._machines.values()
        machine.control.transport.abort()
        assert await scene.joined(times=2) == path
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y"
        assert await ask(f"{path}.0", b"z") == b"z"
        assert scene.told == [("joined", path, 1)]
        writer.close()

    play(body)


def test_a_machine_that_says_goodbye_leaves_at_once(play, monkeypatch):
    monkeypatch.setattr(acceptor_module, "LEAVE_S", 2 * DEADLINE_S)

    async def body(scene: Scene) -> None:
        await scene.open()
        link = scene.join(await scene.echo("a"))
        path = await scene.joined()
        link.cancel()
        await scene.until(lambda: ("left", path) in scene.told)
        assert not acceptor_sockets(scene.folder)

    play(body)


def test_a_machine_that_falls_silent_leaves_after_a_limit(play, monkeypatch):
    monkeypatch.setattr(acceptor_module, "LEAVE_S", 0.05)

    async def body(scene: Scene) -> None:
        await scene.open(keepalive_s=0.05)
        reader, writer = await asyncio.open_connection(*scene.address.split(":"))
        writer.write(f"torchbeast 1 plain\njoin {MACHINE} 1 frozen\n".encode())
        path = await scene.joined()
        await scene.until(lambda: ("left", path) in scene.told)
        assert "frozen (127.0.0.1) has left: silent for 0.1 s" in scene.log
        writer.close()

    play(body)


def test_a_dialer_notices_a_learner_that_falls_silent(play):
    async def body(scene: Scene) -> None:
        async def answer(reader, writer):
            await reader.readline()
            writer.write(b"go\n")
            await reader.readline()
            writer.write(b"welcome\n")
            await reader.read()  # Python 3.13 closes a writer that nobody holds.
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        scene.echoes.append(server)
        scene.address = "{}:{}".format(*server.sockets[0].getsockname())
        scene.join("/nowhere", keepalive_s=0.05)
        await scene.until(lambda: scene.log.count("uses these servers") >= 2)
        assert "it does not answer; trying again" in scene.log

    play(body)


def test_a_dialer_waits_for_learners_and_survives_their_restarts(play):
    async def body(scene: Scene) -> None:
        await scene.open()  # For a free port.
        scene.acceptor.close()
        scene.join(await scene.echo("a"))
        await scene.until(lambda: "Connect call failed" in scene.log)
        paths = set()
        for i in (1, 2):
            await scene.open()
            path = await scene.joined(times=i)
            assert await ask(f"{path}.0", b"x") == b"x"
            paths.add(path)
            scene.acceptor.close()
        assert len(paths) == 1

    play(body)


def test_a_host_that_does_not_resolve_is_named(play):
    async def body(scene: Scene) -> None:
        scene.address = "no-such-host.invalid:1"
        scene.join("/nowhere")
        await scene.until(lambda: scene.log.count("Cannot find the learner's host") > 1)
        assert "no-such-host.invalid" in scene.log

    play(body)


# --------------------------------------------------------------------- certificates

# Of the machine; of the learner; what the machine says; what the learner says.
REFUSALS = [
    (
        "other machine",
        "learner",
        "it refuses this side's certificate .*UNKNOWN_CA.*of another CA",
        "127.0.0.1: its certificate: .*it was not signed by the CA in ca.pem",
    ),
    (
        "machine",
        "other learner",
        "it refuses this side's certificate .*UNKNOWN_CA",
        "127.0.0.1: its certificate: .*not signed by the CA",
    ),
    (
        "both",
        "other learner",
        "its certificate: .*not signed by the CA in ca.pem",
        "it refuses this side's certificate .*UNKNOWN_CA",
    ),
    ("machine", None, "started with --insecure, not --tls_dir", "one side has --tls"),
    (None, "learner", "the learner was started with --tls_dir", "one side has --tls_d"),
]


@pytest.mark.parametrize("machine, learner, machine_says, learner_says", REFUSALS)
def test_both_sides_say_why_a_certificate_is_refused(
    play, folders, tmp_path, monkeypatch, machine, learner, machine_says, learner_says
):
    monkeypatch.setattr(tls, "_check_certificate", lambda paths, is_server: None)
    folders = dict(folders)
    if machine == "both":  # The learner trusts this machine, but not the reverse.
        both = tmp_path / "both"
        both.mkdir()
        for name in ("cert.pem", "key.pem"):
            shutil.copy(Path(folders["other learner"], name), both)
        pems = [Path(folders[n], "ca.pem").read_text() for n in ("machine", learner)]
        (both / "ca.pem").write_text("".join(pems))
        folders |= {"both": folders["machine"], "other learner": str(both)}

    async def body(scene: Scene) -> None:
        await scene.open(folders.get(learner))
        link = scene.join("/nowhere", tls_dir=folders.get(machine))
        with pytest.raises(ConfigError, match=machine_says):
            await link
        assert scene.log.count("; trying again") == dialer.MAX_REFUSALS - 1
        await scene.until(lambda: "Refused a connection from" in scene.log)
        assert re.search(learner_says, scene.log), scene.log
        assert scene.told == []

    play(body)


def test_a_learner_uses_the_certificate_that_it_has_now(
    play, folders, tmp_path, monkeypatch
):
    monkeypatch.setattr(tls, "_check_certificate", lambda paths, is_server: None)
    monkeypatch.setattr(dialer, "MAX_REFUSALS", 10**6)
    monkeypatch.setattr(acceptor_module, "CHECK_S", 0.01)
    monkeypatch.setattr(os, "umask", lambda mask: 0)  # It is this process's.
    mine = shutil.copytree(folders["other learner"], tmp_path / "mine")
    shutil.copy(Path(folders["learner"], "ca.pem"), mine)
    flags = argparse.Namespace(
        listen="127.0.0.1:0", tls_dir=str(mine), folder=tmp_path / "sockets"
    )
    flags.keepalive_s = 5.0

    async def body(scene: Scene) -> None:
        scene.folder.joinpath("sockets").chmod(0o700)
        accepting = asyncio.ensure_future(acceptor_module.accept(flags))
        try:
            await scene.until(lambda: scene.told)
            (_, scene.address), *_ = scene.told
            scene.join(await scene.echo("a"), tls_dir=folders["machine"])
            await scene.until(lambda: "it was not signed by the CA" in scene.log)
            for name in ("cert.pem", "key.pem"):
                await asyncio.sleep(0.03)  # For a moment they do not fit together.
                shutil.copy(Path(folders["learner"], name), mine)
            path = await scene.joined()
            assert await ask(f"{path}.0", b"x") == b"x"
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)

    play(body)


def test_a_learner_is_no_machine_nor_the_other_way_round(folders):
    for who, is_server in (("learner", True), ("machine", False)):
        with pytest.raises(ConfigError, match="certificate purpose.*swapped"):
            tls.context(folders[who], is_server=is_server)


# -------------------------------------------------------------------------- strangers


@pytest.mark.parametrize("num", [100, 300])
def test_silent_connections_keep_no_machine_out(play, monkeypatch, num):
    monkeypatch.setattr(acceptor_module, "HELLO_S", 2 * DEADLINE_S)

    async def body(scene: Scene) -> None:
        await scene.open()
        host, port = scene.address.split(":")
        with contextlib.ExitStack() as stack:
            for _ in range(num):
                stack.enter_context(socket.create_connection((host, int(port))))
            scene.join(await scene.echo("a"))
            path = await scene.joined()
            assert await ask(f"{path}.0", b"x") == b"x"
            # The machine's own connections were silent for a moment, and two more go.
            most = min(num, acceptor_module.MAX_SILENT)
            least = most if num == most else most - 2
            await scene.until(lambda: least <= len(scene.acceptor._silent) <= most)
        await scene.until(lambda: not scene.acceptor._silent)

    play(body)


def test_the_address_with_most_silent_connections_loses_one(play, monkeypatch):
    monkeypatch.setattr(acceptor_module, "MAX_SILENT", 3)

    async def body(scene: Scene) -> None:
        await scene.open()
        host, port = scene.address.split(":")
        with contextlib.ExitStack() as stack:
            for i, last in enumerate((2, 3, 3, 4)):
                source = (f"127.0.0.{last}", 0)
                where = (host, int(port))
                stack.enter_context(socket.create_connection(where, None, source))
                num = min(i + 1, 3)
                await scene.until(lambda num=num: len(scene.acceptor._silent) == num)
            peers = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
            await scene.until(lambda: [*scene.acceptor._silent.values()] == peers)

    play(body)


def test_who_says_no_hello_is_ended(play, monkeypatch):
    monkeypatch.setattr(acceptor_module, "HELLO_S", 0.05)

    async def body(scene: Scene) -> None:
        await scene.open()
        reader, writer = await asyncio.open_connection(*scene.address.split(":"))
        assert await reader.read() == b""
        assert "from 127.0.0.1: no hello within 0.05 s" in scene.log
        writer.close()

    play(body)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls at once": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    "no line": b"x" * 100_000,
    "zeros": bytes(1000),
    "another version": b"torchbeast 2 plain\n",
    "not ASCII": "torchbeast 1 plaín\n".encode(),
    "terminal": b"\x1b[2J\n",
    "long hello": b"torchbeast 1 plain\njoin " + b"0" * 5000,
    "empty hello": b"torchbeast 1 plain\n\n",
    "no servers": f"torchbeast 1 plain\njoin {MACHINE} 0 x\n".encode(),
    "many servers": f"torchbeast 1 plain\njoin {MACHINE} 10001 x\n".encode(),
    "a path": f"torchbeast 1 plain\njoin {MACHINE} 1 ../x\n".encode(),
    "unknown ticket": f"torchbeast 1 plain\ntunnel {MACHINE}\n".encode(),
    "short ticket": b"torchbeast 1 plain\ntunnel 0\n",
    "wrong word": f"torchbeast 1 plain\njoin {MACHINE} 1 x\nopen 1\n".encode(),
    "wrong word, tls": b"torchbeast 1 tls\n",
}


def test_garbage_is_refused_and_disturbs_nobody(play, monkeypatch):
    monkeypatch.setattr(acceptor_module, "LEAVE_S", 0.01)
    monkeypatch.setattr(acceptor_module, "HELLO_S", 2 * DEADLINE_S)

    async def body(scene: Scene) -> None:
        await scene.open()
        for data in GARBAGE.values():
            reader, writer = await asyncio.open_connection(*scene.address.split(":"))
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                while await asyncio.wait_for(reader.read(100), DEADLINE_S):
                    pass  # Ends long before HELLO_S, or this times out.
            writer.close()
        assert "\x1b" not in scene.log and "Internal error" not in scene.log
        scene.join(await scene.echo("a"))
        path = await scene.joined(times=2)  # One of GARBAGE joins before it errs.
        assert await ask(f"{path}.0", b"x") == b"x"

    play(body)


def test_a_machine_that_comes_back_as_another_stays(play, monkeypatch):
    monkeypatch.setattr(acceptor_module, "LEAVE_S", 0.1)

    async def body(scene: Scene) -> None:
        await scene.open()
        link = scene.join(await scene.echo("a"))
        await scene.joined()
        (old,) = scene.acceptor._machines.values()
        link.cancel()
        old.control.transport.abort()  # It leaves without a goodbye.
        await scene.until(lambda: old.removal is not None)
        monkeypatch.setattr(dialer.socket, "gethostname", lambda: "renamed")
        scene.join(await scene.echo("b"))
        await scene.joined(times=2)
        loop = asyncio.get_running_loop()
        await scene.until(lambda: loop.time() > old.removal.when())
        (new,) = scene.acceptor._machines.values()
        assert new is not old
        assert await ask(f"{new.path}.0", b"x") == b"x"

    play(body)


def test_a_machine_that_joins_again_with_more_servers_stays(play, monkeypatch):
    monkeypatch.setattr(acceptor_module, "LEAVE_S", 0.0)

    async def body(scene: Scene) -> None:
        await scene.open()
        ends = []
        for n in 1, 2:
            ends.append(await asyncio.open_connection(*scene.address.split(":")))
            join = f"torchbeast 1 plain\njoin {MACHINE} {n} twice\n"
            ends[-1][1].write(join.encode())
            path = await scene.joined(times=n)
        (first, _), (second, writer) = ends
        await first.read()  # Until it is closed.
        writer.write(b"ping\n")
        await second.readuntil(b"pong\n")
        assert scene.told == [("joined", path, 1), ("left", path), ("joined", path, 2)]
        assert len(acceptor_sockets(scene.folder)) == 2
        for _, writer in ends:
            writer.close()

    play(body)


def test_a_machine_that_says_goodbye_while_it_is_added_leaves(play, monkeypatch):
    async def body(scene: Scene) -> None:
        await scene.open()
        loop = asyncio.get_running_loop()
        create, go_on = loop.create_unix_server, asyncio.Event()
        created = []

        async def create_late(factory, path, **kwargs):
            created.append(path)
            await go_on.wait()
            return await create(factory, path, **kwargs)

        monkeypatch.setattr(loop, "create_unix_server", create_late)
        ends = []
        for more in "", "bye\n":
            ends.append(await asyncio.open_connection(*scene.address.split(":")))
            join = f"torchbeast 1 plain\njoin {MACHINE} 1 twice\n{more}"
            ends[-1][1].write(join.encode())
            await scene.until(lambda: created and not scene.acceptor._silent)
        for _ in range(10):  # The second connection comes as far as it can.
            await asyncio.sleep(0)
        go_on.set()
        await scene.until(lambda: len(scene.told) == 2)
        path = created[0].removesuffix(".0")
        assert scene.told == [("joined", path, 1), ("left", path)]
        assert not scene.acceptor._machines
        for _, writer in ends:
            writer.close()

    play(body)


def test_a_connection_that_ends_in_a_handshake_is_no_error(play, folders):
    async def body(scene: Scene) -> None:
        await scene.open(folders["learner"])
        for data in (b"", b"\x16\x03\x03", b"\x15\x03\x03\x00\x02\x02\x28"):
            reader, writer = await asyncio.open_connection(*scene.address.split(":"))
            writer.write(b"torchbeast 1 tls\n")
            assert await reader.readline() == b"go\n"
            assert (await reader.readexactly(1)) == b"\x16"  # TLS: a handshake.
            writer.write(data)
            writer.close()
        await scene.until(lambda: not scene.acceptor._silent)
        assert "Internal error" not in scene.log
        scene.join(await scene.echo("a"), tls_dir=folders["machine"])
        await scene.joined()

    play(body)


def test_no_descriptors_left_is_survived(play):
    async def body(scene: Scene) -> None:
        await scene.open()
        scene.join(await scene.echo("a"))
        path = await scene.joined()
        asyncio.get_running_loop().set_exception_handler(child._log_unhandled)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        silent = [
            await asyncio.open_connection(*scene.address.split(":")) for _ in range(3)
        ]
        wait_fd = os.dup(0)
        os.close(wait_fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wait_fd + 1, hard))
        try:
            more = await asyncio.open_connection(*scene.address.split(":"))
            await scene.until(lambda: "out of system resource" in scene.log)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert await ask(f"{path}.0", b"x") == b"x"
        for _, writer in (*silent, more):
            writer.close()

    play(body)


@pytest.mark.parametrize("outcome", ["result", "error"])
def test_within_loses_no_cancellation_that_comes_with_the_result(outcome):
    async def play():
        future = asyncio.get_running_loop().create_future()

        async def wait():
            return await future  # A coroutine, since `within` then needs a task.

        task = asyncio.ensure_future(tunnel.within(DEADLINE_S, wait()))
        await asyncio.sleep(0)  # `within` starts.
        await asyncio.sleep(0)  # `wait` starts.
        if outcome == "result":
            future.set_result(1)
        else:
            future.set_exception(OSError())
        await asyncio.sleep(0)  # `wait` ends.
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(play())


def test_within_ends_what_takes_too_long():
    async def play():
        future = asyncio.get_running_loop().create_future()
        with pytest.raises(asyncio.TimeoutError):
            await tunnel.within(0.0, future)
        assert future.cancelled()

    asyncio.run(play())


@pytest.mark.parametrize(
    "line",
    ["", "join", f"join {MACHINE} 01 x", f"join {MACHINE} 1 x ", f"tunnel {MACHINE}0"],
)
def test_a_hello_is_right_or_refused(line):
    with pytest.raises(ProtocolError):
        tunnel.parse_hello(line)


def test_right_hellos_say_what_they_are():
    assert tunnel.parse_hello(f"join {MACHINE} 16 h-1.x") == (MACHINE, 16, "h-1.x")
    assert tunnel.parse_hello(f"tunnel {MACHINE}") == (MACHINE,)


# ------------------------------------------------------------------------------ flags


@pytest.mark.parametrize(
    "program, argv, said",
    [
        ("polybeast", "--listen 0.0.0.0:1", "--listen has 0.0.0.0:1, which is not on"),
        ("polybeast", "--listen 4431", "expected host:port, got '4431'"),
        ("polybeast", "--listen unix:/x", "expected host:port, got 'unix:/x'"),
        ("polybeast", f"--listen {'x' * 64}:1", "expected the name of a host and a"),
        ("polybeast", "--listen ::1:4431", "in brackets, such as [::1]:4431, got"),
        (
            "polybeast",
            "--listen :1 --num_servers 2",
            "--listen is for servers that this",
        ),
        (
            "polybeast",
            "--listen :1 --tls_dir x --insecure",
            "they contradict each other",
        ),
        ("polybeast_env", "--learner_address h:1", "h:1, which is not on this machine"),
        ("polybeast_env", "--learner_address unix:/x", "expected host:port"),
        (
            "polybeast_env",
            "--learner_address :1 --server_address :2",
            "expected host:port",
        ),
        (
            "polybeast_env",
            "--learner_address localhost:1 --server_address :2",
            "servers either listen or dial the learner. Leave one out",
        ),
        (
            "polybeast_env",
            "--learner_address localhost:1-3 --num_servers 2",
            "names 3 learners, and each needs at least one server",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(program, argv, said, capsys):
    module = pytest.importorskip(program, reason="needs the extension")
    with pytest.raises(SystemExit) as end:
        module.parse_flags(argv.split())
    assert end.value.code == Exit.USAGE
    assert said in capsys.readouterr().err


def test_several_learners_listen_at_ports_of_their_own(monkeypatch, capsys):
    polybeast = pytest.importorskip("polybeast", reason="needs the extension")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert polybeast.parse_flags(["--listen", ":4431"]).listen == "127.0.0.1:4432"
    assert polybeast.parse_flags(["--listen", ":0"]).listen == "127.0.0.1:0"  # Any.
    assert polybeast.parse_flags(["--listen", ":65534"]).listen == "127.0.0.1:65535"
    with pytest.raises(SystemExit) as end:
        polybeast.parse_flags(["--listen", ":65535"])
    assert end.value.code == Exit.USAGE
    assert "expected a port up to 65534" in capsys.readouterr().err


# -------------------------------------------------------------------------- processes


@pytest.fixture
def learner():
    """Start what a learner starts; ended at the end."""
    started = []

    def start(listen: str = "127.0.0.1:0") -> dial_in.DialedIn:
        flags = argparse.Namespace(listen=listen, tls_dir=None, keepalive_s=5.0)
        started.append(dial_in.DialedIn(flags))
        return started[-1]

    yield start
    for dialed_in in started:
        dialed_in.close()


@pytest.fixture
def impatient(monkeypatch):
    """Acceptors do not wait for an earlier learner's acceptor to end."""
    code = "import sys; from core.remote import acceptor as a; a.BIND_S = 0; "
    code += "sys.exit(a.main())"
    start_python = child.start_python

    def start(arguments):
        _, _, *args = arguments  # -m core.remote.acceptor ARGS
        return start_python(["-c", code, *args])

    monkeypatch.setattr(child, "start_python", start)


def acceptor_of(dialed_in: dial_in.DialedIn) -> psutil.Process:
    return psutil.Process(dialed_in._child._process.pid)


@pytest.mark.parametrize("harm", ["kill", "delete folder", "delete a socket"])
def test_both_processes_are_replaced_and_the_machine_keeps_its_addresses(
    learner, caplog, harm
):
    dialed_in = learner()
    caplog.set_level("INFO")
    assert dialed_in.addresses() == []
    flags = argparse.Namespace(
        learner_address=[dialed_in.address], num_servers=2, tls_dir=None, keepalive_s=5
    )
    with dial_in.DialsOut(flags) as machine:
        machine.start()
        dialer_process = machine._child
        wait_until(lambda: len(dialed_in.addresses()) == 2)
        addresses = dialed_in.addresses()
        assert re.fullmatch(r"unix:/.*/torchbeast-\w+/dialed-.*\.0", addresses[0])
        # The acceptor logs this line after it has told the addresses.
        wait_until(lambda: "has joined" in caplog.text)
        if harm == "kill":
            acceptor_of(dialed_in).kill()
        elif harm == "delete folder":
            shutil.rmtree(dialed_in._folder)
        else:
            Path(addresses[1].removeprefix("unix:")).unlink()
        psutil.Process(dialer_process._process.pid).suspend()
        wait_until(lambda: dialed_in.addresses() == addresses and dialed_in._missing)

        def is_back() -> bool:
            machine.check()  # Continues it.
            return dialed_in.addresses() == addresses and not dialed_in._missing

        wait_until(is_back)
        assert all(Path(a.removeprefix("unix:")).is_socket() for a in addresses)
        dialer_process._process.kill()
        wait_until(lambda: is_back() and caplog.text.count("has joined") == 3)
    assert ("somebody has deleted" in caplog.text) == (harm != "kill")
    wait_until(lambda: dialed_in.addresses() == [])
    folder = Path(dialed_in._folder)
    dialed_in.close()
    assert not folder.exists()


def test_a_learner_that_has_two_addresses_gets_all_servers(learner):
    dialed_in = learner()
    addresses = [dialed_in.address, dialed_in.address.replace("127.0.0.1", "localhost")]
    flags = argparse.Namespace(
        learner_address=addresses, num_servers=3, tls_dir=None, keepalive_s=5
    )
    with dial_in.DialsOut(flags) as machine:
        machine.start()
        wait_until(lambda: len(dialed_in.addresses()) == 3)


def test_a_folder_with_no_room_for_the_names_of_sockets_is_named(tmp_path):
    folder = tmp_path / ("x" * 90)
    folder.mkdir(mode=0o700)
    flags = argparse.Namespace(folder=folder)
    with pytest.raises(ConfigError, match=f"unix sockets in {folder}, .* TMPDIR"):
        asyncio.run(acceptor_module.accept(flags))
    assert acceptor_module.name_nbytes(Path("/" + 80 * "x")) == 105 - 81 - len(
        "/dialed--01234567.9999"
    )
    assert acceptor_module.name_nbytes(Path("/tmp")) == 24


def test_a_port_in_use_is_named(learner, impatient):
    first = learner()
    with pytest.raises(ConfigError, match=f"--listen {first.address}: the port is in"):
        learner(first.address)


def test_an_acceptor_that_cannot_listen_again_ends_the_run_with_its_reason(
    learner, impatient, monkeypatch
):
    monkeypatch.setattr(server_lists, "ASK_S", 0.01)
    dialed_in = learner()
    host, _, port = dialed_in.address.rpartition(":")
    acceptor_of(dialed_in).kill()
    with (
        contextlib.closing(taken(host, int(port))),
        server_lists.ServerList(dialed_in=dialed_in) as servers,
    ):
        (watch,) = servers._threads.values()
        with pytest.raises(ConfigError, match=f"{dialed_in.address}: the port is in"):
            watch.result(DEADLINE_S)
        with pytest.raises(ConfigError, match=f"{dialed_in.address}: the port is in"):
            servers.check()


def taken(host: str, port: int) -> socket.socket:
    """Return a socket of another program that listens at a port, once it is free."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def is_bound() -> bool:
        try:
            listener.bind((host, port))
        except OSError:
            return False
        return True

    wait_until(is_bound)
    listener.listen()
    return listener


def test_both_processes_end_with_their_program(start_program):
    code = """
import argparse, time
from core.remote import dial_in
flags = argparse.Namespace(listen="127.0.0.1:0", tls_dir=None, keepalive_s=5,
    num_servers=1)
a = dial_in.DialedIn(flags)
flags.learner_address = [a.address]
b = dial_in.DialsOut(flags)
b.start()
while not a.addresses():  # Processes that start would not notice an end.
    b.check()
print("folders:", a._folder, b._folder, flush=True)
time.sleep(1000)
"""
    program = start_program(sys.executable, "-c", code)
    said = re.compile("folders: (.+) (.+)\n")
    program.wait_for(lambda: said.search(program.text()))
    folders = said.search(program.text()).groups()
    assert all(Path(folder).exists() for folder in folders)
    family = psutil.Process(program.pid).children()
    assert len(family) == 2
    for process in family:
        process.suspend()
    program.kill()
    wait_until(lambda: not any(p.is_running() for p in family))
    wait_until(lambda: not any(Path(folder).exists() for folder in folders))


def test_status_78_for_a_certificate_that_is_of_no_use(folders, tmp_path):
    argv = ["--listen", "127.0.0.1:0", "--folder", str(tmp_path / "s")]
    argv += ["--tls_dir", folders["machine"]]
    done = subprocess.run(
        [sys.executable, "-m", "core.remote.acceptor", *argv],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
    )
    assert done.returncode == Exit.CONFIG and "swapped" in done.stdout


def test_certificates_of_no_use_leave_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flags = argparse.Namespace(
        learner_address=["127.0.0.1:1"],
        num_servers=1,
        tls_dir=str(tmp_path / "missing"),
        keepalive_s=5,
    )
    with pytest.raises(ConfigError, match="cannot read"):
        dial_in.DialsOut(flags)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------- runs


def test_a_run_outlives_its_machines_and_a_machine_its_learners(
    start, start_program, folders, tmp_path
):
    pytest.importorskip("libtorchbeast._C", reason="the extension is not built")

    def start_machine(learner: str) -> Program:
        flags = ["--env", "Catch", "--learner_address", learner, "--num_servers", 2]
        flags += ["--envs_per_stream", 2, "--tls_dir", folders["machine"]]
        return start_program(sys.executable, "-m", "polybeast_env", *flags)

    def learn(listen: str):
        return start(
            *("--xpid", "x", "--total_steps", 10**9, "--batch_size", 4),
            *("--unroll_length", 5, "--log_interval_s", 0, "--listen", listen),
            *("--tls_dir", folders["learner"]),
            module="polybeast",
        )

    def learns(program, after: str) -> None:
        """Wait for rows of the log with four streams, after a text in the output."""
        program.wait_for_text(after)

        def streams() -> list[str]:
            return [row["streams"] for row in log_rows(tmp_path / "runs" / "x")]

        before = len(streams())
        program.wait_for(lambda: "4" in streams()[before:])

    program = learn("127.0.0.1:0")
    said = re.compile(r"--learner_address (127.0.0.1:\d+)")
    program.wait_for(lambda: said.search(program.text()))
    address = said.search(program.text())[1]
    program.wait_for_text(f"no machine has dialed in at {address}")
    first = start_machine(address)
    learns(program, "2 servers")
    first.kill()
    program.wait_for_text("left; now 0")
    second = start_machine(address)
    learns(program, "left; now 0")
    program.kill()
    program = learn(address)
    learns(program, "certificate of env) has joined")
    second.process.terminate()
    assert second.wait() == 0
    program.wait_for_text("has left: it has said goodbye")
    program.process.terminate()
    assert program.wait() == Exit.STOPPED, program.text()
