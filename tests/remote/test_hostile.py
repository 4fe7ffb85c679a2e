# SPDX-License-Identifier: Apache-2.0
"""The corpus of tests/hostile.py against a real environment server and learner."""

import dataclasses
import re
import socket
import sys
import tempfile
import threading

import numpy as np
import pytest

grpc = pytest.importorskip("grpc", reason="pip install grpcio")
from core.remote.messages import Array  # noqa: E402
from tests import hostile  # noqa: E402
from tests.conftest import DEADLINE_S, wait_until  # noqa: E402
from tests.env_client import EnvClient, describe  # noqa: E402


@pytest.fixture(scope="module")
def folder():
    """A folder with a short name: the path of a unix socket holds about 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        yield folder


@pytest.fixture(scope="module")
def victim(folder):
    victim = hostile.Victim(folder)
    yield victim
    victim.close()


@pytest.fixture(scope="module")
def learner():
    pytest.importorskip("libtorchbeast._C", reason="the extension is not compiled")
    learner = hostile.Learner()
    yield learner
    learner.close()


@pytest.fixture(scope="module")
def evil(folder):
    evil = hostile.EvilServer(f"unix:{folder}/e")
    yield evil
    evil.stop()


@pytest.mark.parametrize("name", hostile.TO_SERVER)
def test_a_hostile_learner_costs_its_own_stream_only(victim, name):
    hostile.server_survives(victim, hostile.TO_SERVER[name])


def test_what_a_server_logs_of_its_attackers_is_printable(victim):
    hello = dict(run_id=hostile.ESCAPES, version=hostile.ESCAPES)
    with EnvClient(victim.address, **hello):
        text = victim.output.read_text()
    assert r"run '\x1b[2J" in text  # It was logged before the Welcome.
    assert hostile.is_printable(text)


@pytest.mark.parametrize("name", hostile.TO_LEARNER)
def test_a_hostile_server_costs_its_own_stream_only(victim, evil, learner, name):
    hostile.learner_survives(learner, victim, evil, hostile.TO_LEARNER[name])


def test_the_reason_why_a_server_ends_a_stream_survives_an_action_under_way(
    victim, background
):
    lib = pytest.importorskip("libtorchbeast", reason="the extension is not compiled")
    num_times, size = 5, 2**22  # The action is more than gRPC takes at once.
    welcome = dataclasses.replace(
        describe(victim.address), action_arrays=(Array((), "float32", (size,)),)
    )
    honest = hostile.Honest(welcome)
    num_actions = threading.Semaphore(0)

    def fail():
        yield honest.greeting()
        yield honest.step()
        assert num_actions.acquire(timeout=DEADLINE_S)
        raise ValueError("no ROM")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server = hostile.EvilServer(f"127.0.0.1:{port}")
    server.forge = fail
    batcher = lib.DynamicBatcher(timeout_ms=1)
    pool = lib.ActorPool(
        *(5, lib.BatchingQueue(), batcher, [server.address], ()),
        num_envs=hostile.K,
        max_failures=10**6,
    )
    running = background(pool.run)
    try:
        for _ in range(num_times):
            batch = next(batcher)
            batch.set_outputs(((np.zeros((1, hostile.K, size), np.float32),), ()))
            num_actions.release()
        ends: list[str] = []

        def have_all_ended() -> bool:
            events = pool.take_events()
            ends.extend(e for e in events if not e.endswith("connected again"))
            return len(ends) >= num_times

        wait_until(have_all_ended)
        assert all(re.search("UNKNOWN: .*: no ROM", end) for end in ends), ends
        assert pool.stats()["failures"] == num_times
    finally:
        pool.stop()
        running.result(DEADLINE_S)
        server.stop()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_compressed_answer_is_refused_before_it_is_inflated(victim, evil, learner):
    inflated = 64 * 2**20  # 64 KB compressed.
    case = hostile.LearnerCase(
        lambda honest: [bytes(inflated)], "Compression algorithm 'gzip' is disabled"
    )
    learner(describe=evil.address)  # Then it has started.
    peak = learner.peak_bytes()
    evil.compression = grpc.Compression.Gzip
    hostile.learner_survives(learner, victim, evil, case)
    evil.compression = grpc.Compression.NoCompression
    assert learner.peak_bytes() < peak + inflated // 2


def test_a_server_refuses_compressed_messages(victim):
    with grpc.insecure_channel(
        victim.address, compression=grpc.Compression.Gzip
    ) as channel:
        describe = channel.unary_unary("/torchbeast.EnvServer/Describe")
        with pytest.raises(grpc.RpcError, match="'gzip' is disabled"):
            describe(bytes(2**20), wait_for_ready=True, timeout=DEADLINE_S)


@pytest.mark.parametrize("name", hostile.TO_DESCRIBE)
def test_a_hostile_description_is_refused(evil, learner, name):
    hostile.description_is_refused(learner, evil, *hostile.TO_DESCRIBE[name])


@pytest.mark.parametrize("code", ["UNAVAILABLE", "UNKNOWN"])
def test_a_refusal_to_describe_is_printable(evil, learner, code):
    evil.status = grpc.StatusCode[code], hostile.NOT_UTF8
    error = learner(describe=evil.address)["error"]
    assert re.search(code + r": \?\[2J\?\?", error) and hostile.is_printable(error)
