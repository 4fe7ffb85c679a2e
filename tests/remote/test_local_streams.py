# SPDX-License-Identifier: Apache-2.0
"""Streams without gRPC, for a learner on the same machine: `local_streams`.

The learner's side is csrc/transport_local.cc, with tests in csrc/tests. Here
`LocalClient` plays it.
"""

import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import libtorchbeast
from core.errors import ConfigError
from core.nests import map_nest
from core.remote import codec, env_server, local_streams, messages, places
from core.running.supervise import start_thread
from tests import counting_env
from tests.conftest import wait_until
from tests.env_client import EnvClient, Goodbye, RawStream, ServerFailure, play

DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]


class LocalStream(RawStream):
    """A `RawStream` over a server's socket for streams."""

    def __init__(self, address: str):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(address.removeprefix("unix:") + ".s")
        self._reader = self.socket.makefile("rb")

    def send(self, message: bytes) -> None:
        self.socket.sendall(len(message).to_bytes(4, "little") + message)

    def _receive_bytes(self) -> bytes:
        nbytes = int.from_bytes(self._reader.read(4), "little")
        if nbytes == 0:  # The end of the stream; the rest is the server's reason.
            raise EOFError(self._reader.read().decode())
        return self._reader.read(nbytes)

    def reason(self) -> str:
        """Wait for the end of the stream, and return the reason."""
        while True:
            try:
                self.receive()
            except EOFError as error:
                return str(error)
            except ConnectionResetError:  # The server had not accepted the stream yet.
                return ""
            except Goodbye:  # The stream's thread was between two messages.
                continue

    def close(self) -> None:
        self._reader.close()
        self.socket.close()


class LocalClient(EnvClient, LocalStream):
    """An `EnvClient` over a server's socket for streams."""


@pytest.fixture
def no_socket_is_left(folder):
    yield
    assert os.listdir(folder) == []


@pytest.fixture
def serve(no_socket_is_left, serve):
    """Start servers of counting environments in this process."""
    return lambda make=counting_env.make, **options: serve(make, **options)


def actions(seed=0):
    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(counting_env.NUM_ACTIONS, size=3)


@pytest.mark.parametrize("name", ["make", "make_truncating", "make_nested"])
def test_rows_are_those_that_grpc_brings(serve, name):
    address = serve(getattr(counting_env, name), num_envs=3, num_streams=2).address
    hello = dict(seed=5, first_env_id=11, incarnation=2)
    with LocalClient(address, run_id="a", **hello) as local:
        rows = play(local, 60, actions())
    with EnvClient(address, run_id="b", **hello) as over_grpc:
        map_nest(np.testing.assert_array_equal, rows, play(over_grpc, 60, actions()))


def test_a_stream_without_a_place_hears_why(serve):
    address = serve(num_streams=1).address
    with LocalClient(address, run_id="first") as first:
        with LocalStream(address) as second:
            second.send(codec.encode(messages.ToServer(hello=hello("second"))))
            assert "these have them: run 'first' since" in second.reason()
        first.step(0)


@pytest.mark.parametrize("local", ["listens", "is missing", "is of a killed server"])
def test_a_pool_connects_without_grpc_where_it_can(serve, monkeypatch, local):
    begun = []
    requests = local_streams.Call.requests

    def begin(call):
        begun.append(call)
        return requests(call)

    monkeypatch.setattr(local_streams.Call, "requests", begin)
    address = serve(num_envs=2).address
    if local != "listens":
        os.unlink(address.removeprefix("unix:") + ".s")
    if local == "is of a killed server":
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(address.removeprefix("unix:") + ".s")
            killed.listen()
    queue = libtorchbeast.BatchingQueue(minimum_batch_size=2, maximum_batch_size=2)
    batcher = libtorchbeast.DynamicBatcher(timeout_ms=None)
    actors = libtorchbeast.ActorPool(
        5,
        queue,
        batcher,
        [address],
        (),
        named_rows=True,
        inference_keys=("done",),
        num_envs=2,
    )
    running = start_thread("pool", actors.run)
    answering = start_thread("agent", answer, batcher)
    start_thread("learner", next, queue).result(DEADLINE_S)
    actors.stop()
    batcher.close()
    queue.close()
    running.result(DEADLINE_S)
    answering.result(DEADLINE_S)
    assert bool(begun) == (local == "listens")


def answer(batcher):
    for batch in batcher:
        rows, state = batch.get_inputs()
        shape = rows["done"].shape
        outputs = {
            "action": torch.zeros(shape, dtype=torch.int64),
            "policy_logits": torch.zeros(*shape, counting_env.NUM_ACTIONS),
            "baseline": torch.zeros(shape),
            "policy_version": torch.zeros(shape, dtype=torch.int64),
        }
        batch.set_outputs((outputs, state))


def hello(run_id=""):
    return messages.Hello(
        seed=0,
        first_env_id=0,
        incarnation=0,
        run_id=run_id,
        protocol=messages.PROTOCOL,
        version="test",
    )


def test_a_learner_that_vanishes_leaves_its_place(serve):
    address = serve(num_streams=1).address
    for reads_the_answer in (False, True) * 3:
        client = wait_for_a_place(address)
        client.send_actions(0)
        if reads_the_answer:
            client.receive_step()
        client.close()


def wait_for_a_place(address) -> LocalClient:
    clients = []

    def has_a_place() -> bool:
        try:
            clients.append(LocalClient(address))
        except EOFError as error:
            assert "busy" in str(error)
        return bool(clients)

    wait_until(has_a_place)
    return clients[0]


def test_a_message_that_is_too_long_ends_its_stream(serve):
    address = serve().address
    with LocalClient(address) as client:
        client.socket.sendall((1 << 31).to_bytes(4, "little"))
        with pytest.raises(ServerFailure, match="expected a message of at most"):
            client.receive()
        assert "expected a message of at most" in client.reason()


def test_a_silent_stream_is_ended(serve, monkeypatch):
    monkeypatch.setattr(places, "HELLO_S", 0.1)
    with LocalStream(serve().address) as silent:
        assert silent.reason() == ""


def test_streams_that_wait_end_with_their_server(serve):
    server = serve(num_streams=2)
    with LocalClient(server.address) as waiting, LocalStream(server.address) as silent:
        server.stop()
        assert waiting.reason() == silent.reason() == ""


SLOW_TO_CLOSE = """
import sys, threading, time
from core.remote import env_server
from tests import counting_env

def make():
    env = counting_env.make()
    def close():
        time.sleep(0.3)
        print("closed", flush=True)
    env.close = close
    return env

server = env_server.Server(make, sys.argv[1])
server.start()
print("serving", flush=True)
threading.Timer(0, lambda: (sys.stdin.read(), server.stop())).start()
server.run()
"""


def test_a_server_ends_after_its_environments_are_closed():
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        address = f"unix:{folder}/s"
        with subprocess.Popen(
            [sys.executable, "-c", SLOW_TO_CLOSE, address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout.readline() == "closed\n"  # To read the spaces.
            assert process.stdout.readline() == "serving\n"
            with LocalClient(address):
                output, _ = process.communicate(timeout=DEADLINE_S)
        assert output == "closed\n"


def test_a_default_timeout_does_not_end_streams(serve):
    socket.setdefaulttimeout(0.05)
    try:
        address = serve().address
        time.sleep(0.2)
        with LocalClient(address) as client:
            time.sleep(0.2)
            client.step(0)
    finally:
        socket.setdefaulttimeout(None)


def test_a_live_servers_socket_is_left_alone():
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        with socket.socket(socket.AF_UNIX) as live:
            live.bind(f"{folder}/a.s")
            live.listen()
            with pytest.raises(ConfigError, match="a.s is in use: a live server"):
                env_server.Server(counting_env.make, f"unix:{folder}/a").start()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(f"{folder}/a.s")


def test_a_stream_in_a_step_says_goodbye(serve, monkeypatch):
    monkeypatch.setattr(env_server, "GRACE_S", DEADLINE_S)
    server = serve()
    step = counting_env.CountingEnv.step

    def stop_and_step(env, action):
        server.stop("the end")
        wait_until(lambda: server.places.goodbye is not None)
        return step(env, action)

    monkeypatch.setattr(counting_env.CountingEnv, "step", stop_and_step)
    with LocalClient(server.address) as client:
        client.step(0)
        with pytest.raises(Goodbye, match="the end"):
            client.receive()


def test_garbage_ends_only_its_own_stream(serve, caplog):
    address = serve(num_streams=2).address
    rng = random.Random(0)
    with LocalClient(address, run_id="honest") as honest:
        for _ in range(200):
            with LocalStream(address) as stream:
                message = rng.randbytes(rng.randrange(200))
                rest = rng.randbytes(rng.randrange(40))
                header = len(message).to_bytes(4, "little")
                stream.socket.sendall(header + message + rest)
                if rng.random() < 0.5:  # Otherwise the stream ends before its answer.
                    with pytest.raises((EOFError, ServerFailure)):
                        stream.receive()
            honest.step(0)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_learner_that_reads_nothing_is_ended_with_the_server(serve):
    server = serve(counting_env.make_nested)
    with LocalClient(server.address) as client:
        for _ in range(20_000):  # More than the sockets hold.
            client.socket.settimeout(0.5)
            try:
                client.send_actions(*([0] * len(client.welcome.action_arrays)))
            except TimeoutError:
                break
        else:
            pytest.fail("the server took everything")
        server.stop()
        client.socket.settimeout(DEADLINE_S)
        # Only the end of the stream wakes this.
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            client.socket.sendall(bytes(1 << 20))
