# SPDX-License-Identifier: Apache-2.0
"""Environment servers: the protocol, what they survive, and the program around them."""

import asyncio
import contextlib
import functools
import json
import logging
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import psutil
import pytest

import polybeast_env
from core import nests
from core.environments.stepping import Environments
from core.environments.toys import Catch
from core.environments.vector import from_vector_env
from core.errors import ConfigError, Exit
from core.nests import map_nest
from core.remote import addresses as addresses_module
from core.remote import codec, env_server, frames, messages, places, tls
from core.remote import health as health_module
from core.remote.addresses import check_address, server_addresses
from core.remote.messages import Action, Hello, ToServer
from core.remote.stream import Stream
from core.rollout import row_spec
from core.running import machine, signals
from core.running.machine import num_cores
from core.running.supervise import start_thread
from tests import counting_env, fault_env
from tests.conftest import DEADLINE_S, Program, ended, fill, wait_until
from tests.python import run_python
from tests.trainers import bodies
from tools.nemesis.programs import workplace

grpc = pytest.importorskip("grpc", reason="pip install grpcio")
from tests import hostile  # noqa: E402
from tests.env_client import (  # noqa: E402
    EnvClient,
    Goodbye,
    RawStream,
    ServerFailure,
    describe,
    play,
)

ROOT = Path(__file__).resolve().parents[2]
K = 3


def actions(seed=0):
    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(counting_env.NUM_ACTIONS, size=K)


def direct_rows(make_env, num_steps, actions, num_envs=K, **options):
    """Return rows [T + 1, K, ...] of environments stepped without any server."""
    envs = Environments(make_env, num_envs, **options)
    rows = [_empty(envs.row_spec, num_envs)]
    envs.reset(rows[0])
    for _ in range(num_steps):
        rows.append(_empty(envs.row_spec, num_envs))
        envs.step(next(actions), rows[-1])
    envs.close()
    return map_nest(lambda *leaves: np.stack(leaves), *rows)


def _empty(spec, num_envs):
    return map_nest(lambda s: np.zeros((num_envs, *s.shape), s.dtype), spec)


def assert_equal(a, b):
    map_nest(np.testing.assert_array_equal, a, b)


# ------------------------------------------------------------------------------- rows

HELLO = dict(seed=2**63, first_env_id=11, incarnation=2, info_keys=("half",))


@pytest.mark.parametrize(
    "name", ["make", "make_truncating", "make_lives", "make_nested"]
)
def test_rows_over_the_wire_are_those_of_the_environments(serve, name):
    make_env = getattr(counting_env, name)
    server = serve(make_env, num_envs=K)
    with EnvClient(server.address, **HELLO) as client:
        over_the_wire = play(client, 60, actions())
    assert_equal(over_the_wire, direct_rows(make_env, 60, actions(), **HELLO))


def test_streams_alternate_and_do_not_mix(serve):
    server = serve(counting_env.make_truncating, num_envs=K, num_streams=2)
    hellos = [dict(seed=5, first_env_id=i, run_id=f"{i}") for i in (0, K)]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(EnvClient(server.address, **h)) for h in hellos]
        sources = [actions(seed) for seed in (1, 2)]
        rows = [[map_nest(np.copy, c.rows)] for c in clients]
        for _ in range(50):
            for client, source in zip(clients, sources):
                client.send_actions(next(source))  # Both are under way at once.
            for client, seen in zip(clients, rows):
                client.receive_step()
                seen.append(map_nest(np.copy, client.rows))
    for i in (0, 1):
        got = map_nest(lambda *leaves: np.stack(leaves), *rows[i])
        expected = direct_rows(
            counting_env.make_truncating, 50, actions(i + 1), seed=5, first_env_id=i * K
        )
        assert_equal(got, expected)


class Echo(gym.Env):
    """Shows its last action, which may be any nest."""

    def __init__(self, action_space):
        self.action_space = self.observation_space = action_space
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        self.action_space.seed(0)
        return self.action_space.sample(), {}

    def step(self, action):
        self.steps += 1
        return action, 0.0, False, False, {}


NESTED = gym.spaces.Dict(
    force=gym.spaces.Box(-1, 1, (2,), np.float32),
    keys=gym.spaces.MultiBinary(7),
    move=gym.spaces.Tuple([gym.spaces.Discrete(5, start=-2), gym.spaces.Discrete(2)]),
    wheel=gym.spaces.MultiDiscrete([3, 5]),
)


def nested_actions():
    """Valid ones, in the order of the space's leaves."""
    rng = np.random.default_rng(0)
    return {
        "force": rng.uniform(-1, 1, (K, 2)).astype(np.float32),
        "keys": rng.integers(0, 2, (K, 7)),
        "move/0": rng.integers(-2, 3, K),
        "move/1": rng.integers(0, 2, K),
        "wheel": rng.integers(0, 3, (K, 2)),
    }


def test_nested_actions_arrive(serve):
    server = serve(lambda: Echo(NESTED), num_envs=K)
    with EnvClient(server.address) as client:
        paths = ["/".join(map(str, a.path)) for a in client.welcome.action_arrays]
        assert paths == list(nested_actions())
        rows = client.step(*nested_actions().values())
        for name, leaf in nests.leaves(rows["observation"]):
            np.testing.assert_array_equal(leaf, nested_actions()[name])
        assert_equal(rows["last_action"], rows["observation"])


def test_welcome_says_what_is_served(serve):
    server = serve(
        counting_env.make_nested,
        num_envs=K,
        num_streams=5,
        name="Counting",
        frames_per_step=4,
    )
    with EnvClient(server.address, info_keys=("half",)) as client:
        welcome = client.welcome
    env = counting_env.make_nested()
    assert welcome.protocol == messages.PROTOCOL
    assert (welcome.env, welcome.num_envs, welcome.num_streams) == ("Counting", K, 5)
    assert welcome.frames_per_step == 4
    assert welcome.observation == env.observation_space
    assert welcome.action == env.action_space
    spec = row_spec(env.observation_space, env.action_space, ("half",))
    assert welcome.step_arrays == frames.arrays_of(spec)
    described = describe(server.address, info_keys=("half",))
    assert described.step_arrays == welcome.step_arrays


def test_the_name_is_the_environments_own_by_default(serve):
    server = serve(lambda: gym.make("CartPole-v1"))
    assert describe(server.address).env == "CartPole-v1"


class Counted(counting_env.CountingEnv):
    """Counts itself in `alive`."""

    alive: list = []
    made = 0

    def __init__(self):
        super().__init__()
        self.alive.append(self)
        Counted.made += 1

    def close(self):
        self.alive.remove(self)


def test_environments_live_as_long_as_their_stream(serve):
    server = serve(Counted, num_envs=K)
    assert not Counted.alive  # The one that was asked for its spaces is closed.
    made = Counted.made
    describe(server.address)
    assert Counted.made == made
    for _ in range(2):
        with EnvClient(server.address) as client:
            client.step(0)
            assert len(Counted.alive) == K
        wait_until(lambda: not Counted.alive)


def test_global_generators_are_seeded_for_each_stream(serve):
    class Lottery(counting_env.CountingEnv):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, random.random() + np.random.random(), *rest

    server = serve(Lottery)

    def reward(**hello):
        with reconnect(server.address, **hello) as client:
            return float(client.step(0)["reward"][0])

    first = reward(seed=1, first_env_id=0)
    assert reward(seed=1, first_env_id=0) == first
    others = [reward(seed=1, first_env_id=3), reward(seed=1, incarnation=1)]
    assert len({first, *others}) == 3


# --------------------------------------------------------------------------- failures


def test_an_environments_exception_reaches_the_learner(serve, caplog):
    progress = np.zeros((1, 2))
    server = serve(fault_env.make_failing, num_envs=K, progress=progress)
    for _ in range(2):  # It is made anew for each stream.
        with EnvClient(server.address, first_env_id=40) as client:
            for _ in range(6):
                client.step(0)
            with pytest.raises(ServerFailure) as failure:
                client.step(0)
            assert not failure.value.permanent
            text = str(failure.value)
            assert text.startswith("env 40 (FaultEnv) step 7 after reset(seed=")
            assert "KeyError: 'the simulator is out of fuel'" in text
            assert "in fail\n" in text  # The traceback.
            with pytest.raises(grpc.RpcError) as status:
                client.receive()
            assert status.value.code() == grpc.StatusCode.INTERNAL
            assert "env 40" in status.value.details()
        assert progress[0, 1] == 0  # It is not in a step any more.
    assert caplog.text.count("out of fuel'\n\nTraceback") == 2


def test_what_an_environment_returns_wrongly_reaches_the_learner_in_one_line(serve):
    server = serve(bodies.Stuck)
    with EnvClient(server.address) as client:
        with pytest.raises(ServerFailure, match="at least one allowed act") as failure:
            client.step(4)
    assert not failure.value.permanent
    assert "\n" not in str(failure.value)


def test_spaces_that_changed_after_the_server_started_are_permanent(serve):
    num_actions = 3

    def make():
        env = Catch()
        env.action_space = gym.spaces.Discrete(num_actions)
        return env

    server = serve(make)
    num_actions = 4
    said = "Discrete.4.; expected .*Discrete.3."
    with pytest.raises(ServerFailure, match=said) as failure:
        EnvClient(server.address)
    assert failure.value.permanent


def test_a_broken_spec_is_permanent(serve):
    server = serve(lambda: fault_env.FaultEnv(lambda: np.zeros(3)))
    with EnvClient(server.address) as client:
        for _ in range(6):
            client.step(0)
        with pytest.raises(
            ServerFailure,
            match=r"'observation' expected float32\[2\], got float64\[3\]",
        ) as failure:
            client.step(0)
        assert failure.value.permanent
        assert "Traceback" not in str(failure.value)  # It would show none of theirs.


def test_an_environment_that_cannot_be_made_later_is_a_failure(serve):
    envs = iter([counting_env.make()])

    def make():
        for env in envs:
            return env
        raise OSError("no simulator \udcff")  # As in a file's name that is not UTF-8.

    server = serve(make)
    for _ in range(2):
        said = r"OSError: no simulator \\udcff"
        with pytest.raises(ServerFailure, match=said) as failure:
            EnvClient(server.address)
        assert not failure.value.permanent


@pytest.mark.parametrize("call", ["__init__", "reset", "step", "close"])
@pytest.mark.parametrize(
    "error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
)
def test_what_is_no_exception_ends_the_stream_with_its_traceback_too(
    serve, caplog, call, error
):
    class Env(counting_env.CountingEnv):
        pass

    def fail(*_, **__):
        raise error("bye")

    server = serve(Env)
    setattr(Env, call, fail)
    with contextlib.suppress(ServerFailure), EnvClient(server.address) as client:
        client.step(0)
    wait_until(lambda: f"{error.__name__}: bye" in caplog.text)
    assert "in fail\n" in caplog.text
    delattr(Env, call)
    with reconnect(server.address) as client:
        client.step(0)


def test_the_clock_runs_during_each_call_into_an_environment(serve):
    """In the constructor and close too, when the server starts and for a stream."""
    progress, seen = np.zeros((1, 2)), []

    class Env(counting_env.CountingEnv):
        def __init__(self):
            seen.append(("make", progress[0, 1]))
            super().__init__()

        def reset(self, **options):
            seen.append(("reset", progress[0, 1]))
            return super().reset(**options)

        def step(self, action):
            seen.append(("step", progress[0, 1]))
            return super().step(action)

        def close(self):
            seen.append(("close", progress[0, 1]))

    server = serve(Env, num_envs=2, progress=progress)
    assert progress[0, 1] == 0
    with EnvClient(server.address) as client:
        assert progress[0, 1] == 0
        client.step(0)
        assert progress[0, 1] == 0
    wait_until(lambda: len(seen) == 10)
    calls, times = zip(*seen)
    expected = ("make", "close", *("make",) * 2, *("reset",) * 2)
    assert calls == (*expected, *("step",) * 2, *("close",) * 2)
    assert 0 < times[0] and all(a < b for a, b in zip(times, times[1:])), times
    wait_until(lambda: progress[0, 1] == 0)


def test_a_close_that_fails_harms_nobody(serve, caplog):
    class Sticky(counting_env.CountingEnv):
        def close(self):
            raise RuntimeError("stuck")

    server = serve(Sticky, num_streams=2)  # The first may not have left yet.
    for _ in range(2):
        with EnvClient(server.address) as client:
            client.step(0)
    wait_until(lambda: caplog.text.count("could not be closed") == 3)


NAN, INF = np.float32("nan"), np.float32("inf")


@pytest.mark.parametrize(
    "name, index, value",
    [
        ("move/0", 1, -3),
        ("move/0", 2, 3),
        ("move/1", 0, 2**62),
        ("keys", (2, 6), 2),
        ("keys", (0, 0), -1),
        ("wheel", (1, 0), 3),
        ("wheel", (1, 1), -1),
        ("force", (2, 1), NAN),
        ("force", (0, 0), INF),
        ("force", (0, 0), -INF),
    ],
)
def test_an_action_outside_its_space_is_named(serve, name, index, value):
    made = []
    server = serve(lambda: made.append(Echo(NESTED)) or made[-1], num_envs=K)
    arrays = nested_actions()
    arrays[name][index] = value
    k = index if isinstance(index, int) else index[0]
    with EnvClient(server.address) as client:
        said = f"'action/{name}' of environment {k} in this stream: expected .*, got "
        with pytest.raises(ServerFailure, match=said) as failure:
            client.step(*arrays.values())
        assert not failure.value.permanent
        with pytest.raises(grpc.RpcError) as status:
            client.receive()
        assert status.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert all(env.steps == 0 for env in made)


@pytest.mark.parametrize("dtype, value", [(np.uint8, 9), (np.bool_, 2)])
def test_integer_boxes_have_bounds(serve, dtype, value):
    high = 1 if dtype is np.bool_ else 8
    server = serve(lambda: Echo(gym.spaces.Box(0, high, (2,), dtype)))
    with EnvClient(server.address) as client:
        client.step(1)
        wrong = bytes([0, value])
        client.send(codec.encode(ToServer(action=Action(1, (wrong,)))))
        with pytest.raises(ServerFailure, match=r"'action'.*got \[0, "):
            client.receive()


def test_float_bounds_are_the_environments_business(serve):
    server = serve(lambda: Echo(gym.spaces.Box(-1, 1, (2,), np.float32)))
    with EnvClient(server.address) as client:
        assert client.step(1.5)["last_action"].tolist() == [[1.5, 1.5]]


@pytest.mark.parametrize(
    "keys",
    [
        ("",),
        ("half", "half"),
        ("game_return",),
        ("game_step",),
        tuple(map(str, range(1001))),
    ],
)
def test_info_keys_must_make_sense(serve, keys):
    server = serve(counting_env.make)
    with pytest.raises(ServerFailure, match="info_keys"):
        EnvClient(server.address, info_keys=keys)
    with pytest.raises(grpc.RpcError) as status:
        describe(server.address, info_keys=keys)
    assert status.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("protocol, upgrade", [(0, "learner"), (2, "server")])
def test_another_protocol_is_permanent_and_names_both(serve, protocol, upgrade):
    server = serve(counting_env.make)
    said = rf"protocol 1 .*the learner {protocol} \(torchbeast '7.1'\): .*the {upgrade}"
    with pytest.raises(ServerFailure, match=said) as failure:
        EnvClient(server.address, protocol=protocol, version="7.1")
    assert failure.value.permanent
    with pytest.raises(grpc.RpcError, match="speaks protocol 1") as status:
        describe(server.address, protocol=protocol)
    assert status.value.code() == grpc.StatusCode.FAILED_PRECONDITION


def test_no_hello_in_time_ends_the_stream(serve, monkeypatch):
    monkeypatch.setattr(places, "HELLO_S", 0.05)
    server = serve(counting_env.make)
    with RawStream(server.address) as stream, pytest.raises(grpc.RpcError) as status:
        stream.receive()
    assert status.value.code() == grpc.StatusCode.CANCELLED


def test_streams_without_a_hello_keep_no_honest_learner_waiting(serve, monkeypatch):
    monkeypatch.setattr(places, "HELLO_S", 2 * DEADLINE_S)
    server = serve(counting_env.make)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(RawStream(server.address)) for _ in range(100)]
        # All have come: those beyond what the server waits for have ended.
        waits = server.places.num_streams + places.SPARE_SILENT
        wait_until(lambda: sum(s.call.is_active() for s in silent) <= waits)
        EnvClient(server.address).close()
        ended = [stream for stream in silent if not stream.call.is_active()]
        assert {s.call.code() for s in ended} == {grpc.StatusCode.CANCELLED}
        assert len(ended) >= 100 - waits


def test_hostile_peers_do_not_disturb_a_healthy_stream(serve):
    """Random bytes, mutated messages, wrong methods and plain garbage, all at once."""
    server = serve(counting_env.make, address="127.0.0.1:0", num_envs=K, num_streams=2)
    rng = random.Random(0)
    good = [case.messages[0] for case in hostile.TO_SERVER.values()]
    good = [message for message in good if len(message) < 1000]
    good.append(codec.encode(ToServer(hello=Hello(protocol=1, run_id="x"))))

    def attack():
        for _ in range(60):
            data = bytearray(rng.choice(good) or b"?")
            for _ in range(rng.randrange(4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            with contextlib.suppress(grpc.RpcError, ServerFailure, StopIteration):
                with RawStream(server.address) as stream:
                    stream.send(bytes(data))
                    stream.send(rng.randbytes(20))
                    while True:
                        stream.receive()
        with grpc.insecure_channel(server.address) as channel:
            for method in ("/torchbeast.EnvServer/Nothing", "/x", "/a/b/c"):
                with pytest.raises(grpc.RpcError):
                    channel.unary_unary(method)(b"", timeout=DEADLINE_S)
        host, _, port = server.address.rpartition(":")
        for data in (b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(1000), b""):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(data)

    with EnvClient(server.address, run_id="healthy") as client:
        attacker = start_thread("attacker", attack)
        source, last = actions(), None
        while not attacker.done():
            rows = play(client, 5, source)
            counting_env.check_rollout(rows, last)
            last = map_nest(lambda leaf: leaf[-1], rows)
        attacker.result()


# ------------------------------------------------------------------------ who is served


def test_more_streams_than_places_are_told_who_has_them(serve, caplog):
    server = serve(counting_env.make)
    with EnvClient(server.address, run_id="pong-1"):
        with pytest.raises(grpc.RpcError) as status:
            EnvClient(server.address, run_id="pong-2", first_env_id=6)
    assert status.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "takes 1 streams" in status.value.details()
    assert "run 'pong-1' since" in status.value.details()
    assert "Turned away run 'pong-2' (environments from 6 on): busy" in caplog.text


@pytest.mark.parametrize(
    "peer, where", [("unix:", ""), ("ipv6:%5B::1%5D:52456", " at ipv6:[::1]:52456")]
)
def test_a_stream_is_logged_with_its_address_and_the_start_of_its_run(
    peer, where, caplog
):
    caplog.set_level("INFO")
    service = SimpleNamespace(num_envs=K)
    context = SimpleNamespace(peer=lambda: peer)
    stream = Stream(service, places.Places(1, np.zeros((2, 2))), iter(()), context)
    # Of learner 3, after one earlier start of the run.
    stream._log_start(Hello(run_id="x", first_env_id=6, incarnation=(3 << 48) + 65536))
    assert caplog.messages == [f"Environments 6 to {5 + K}: run 'x'{where}, start 2"]


def test_a_place_is_free_when_its_stream_ends(serve):
    progress = np.zeros((1, 2))
    server = serve(counting_env.make, progress=progress)
    for i in range(3):

        def connect(i=i):
            with contextlib.suppress(grpc.RpcError):
                with EnvClient(server.address, run_id=f"{i}") as client:
                    client.step(0)
                    return True

        wait_until(connect)
    assert progress.tolist() == [[3, 0]]


def test_a_learner_that_comes_back_takes_its_place_over(serve):
    server = serve(Counted, num_envs=K)
    old = EnvClient(server.address, run_id="run", first_env_id=6)
    with old, EnvClient(server.address, run_id="run", first_env_id=6) as new:
        new.step(0)
        with pytest.raises(grpc.RpcError) as status:
            old.step(0)
        assert status.value.code() == grpc.StatusCode.CANCELLED
        assert len(Counted.alive) == K
        with pytest.raises(grpc.RpcError) as status:  # Another of the run's streams.
            EnvClient(server.address, run_id="run", first_env_id=0)
        assert status.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_stream_that_is_closed_does_not_keep_its_own_run_out(serve, monkeypatch):
    monkeypatch.setattr(places, "TAKEOVER_S", 0.1)
    may_close = threading.Event()

    class Slow(counting_env.CountingEnv):
        def close(self):
            may_close.wait(2 * DEADLINE_S)

    may_close.set()  # It is made and closed once to be asked for its spaces.
    server = serve(Slow)
    may_close.clear()
    with EnvClient(server.address, run_id="run") as old:
        old.step(0)
    with reconnect(server.address, run_id="run") as new:
        new.step(0)
        for run_id in ("run", "another"):  # Two places at most, and no other's.
            with pytest.raises(grpc.RpcError) as status:
                EnvClient(server.address, run_id=run_id)
            assert status.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    may_close.set()


def test_a_run_without_a_name_takes_nothing_over(serve):
    server = serve(counting_env.make)
    with EnvClient(server.address) as client:
        with pytest.raises(grpc.RpcError):
            EnvClient(server.address)
        client.step(0)


# ------------------------------------------------------------------- health, stopping


def health(address, service=""):
    with grpc.insecure_channel(address) as channel:
        return channel.unary_unary("/grpc.health.v1.Health/Check")(
            codec.encode(health_module.Request(service)),
            timeout=DEADLINE_S,
            wait_for_ready=True,
        )


SERVING = b"\x08\x01"


@pytest.mark.parametrize("service", ["", "torchbeast.EnvServer"])
def test_health_says_serving(serve, service):
    server = serve(counting_env.make)
    assert health(server.address, service) == SERVING


def test_health_knows_no_other_service(serve):
    server = serve(counting_env.make)
    with pytest.raises(grpc.RpcError) as status:
        health(server.address, "other")
    assert status.value.code() == grpc.StatusCode.NOT_FOUND


def test_stop_finishes_the_step_and_says_goodbye(serve, monkeypatch):
    monkeypatch.setattr(env_server, "GRACE_S", DEADLINE_S)
    stepping, go_on = threading.Event(), threading.Event()

    class Slow(counting_env.CountingEnv):
        def step(self, action):
            stepping.set()
            assert go_on.wait(DEADLINE_S)
            return super().step(action)

    server = serve(Slow)
    with EnvClient(server.address, info_keys=("half",)) as client:
        client.send_actions(0)
        assert stepping.wait(DEADLINE_S)
        server.stop("no more electricity")
        wait_until(lambda: server.places.goodbye)
        go_on.set()
        client.receive_step()
        with pytest.raises(Goodbye, match="no more electricity"):
            client.receive()
        with pytest.raises(StopIteration):
            client.receive()


def test_stop_answers_an_action_with_goodbye(serve):
    server = serve(counting_env.make)
    with EnvClient(server.address) as client:
        server.stop()
        wait_until(lambda: server.places.goodbye)
        client.send_actions(0)
        with pytest.raises(Goodbye):
            client.receive()


def test_stop_does_not_wait_for_a_silent_learner(folder, monkeypatch):
    monkeypatch.setattr(places, "HELLO_S", 2 * DEADLINE_S)
    server = env_server.Server(counting_env.make, f"unix:{folder}/s")
    server.start()
    thread = start_thread("server", server.run)
    with RawStream(server.address) as stream:
        # The clock for the Hello runs.
        wait_until(lambda: any(map(_is_timer, threading.enumerate())))
        server.stop()
        thread.result(DEADLINE_S)
        with pytest.raises(grpc.RpcError):
            stream.receive()
    assert not os.path.exists(f"{folder}/s")


def _is_timer(thread):
    return isinstance(thread, threading.Timer)


def test_stop_before_run_ends_run(folder):
    server = env_server.Server(counting_env.make, f"unix:{folder}/s")
    server.stop()
    server.run()


# -------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "address, num, expected",
    [
        ("host:4431", 3, ["host:4431", "host:4432", "host:4433"]),
        (":4431", 1, ["127.0.0.1:4431"]),
        ("[::1]:7", 2, ["[::1]:7", "[::1]:8"]),
        ("host:0", 2, ["host:0", "host:0"]),
        ("unix:/a/b", 1, ["unix:/a/b"]),
        ("unix:/a/b", 2, ["unix:/a/b.0", "unix:/a/b.1"]),
        ("unix:///a/b", 1, ["unix:/a/b"]),
    ],
)
def test_server_addresses(address, num, expected):
    assert server_addresses(address, num) == expected


@pytest.mark.parametrize("address", ["4431", "host", "host:", "host:x", "/tmp/path"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="expected host:port, :port or unix:/path"):
        server_addresses(address, 1)


@pytest.mark.parametrize(
    "host, said",
    [("x" * 64, "the name of a host"), ("::1", "an IPv6 address in brackets")],
)
def test_a_host_that_is_none_is_refused(host, said):
    with pytest.raises(ConfigError, match=f"--server_address: expected {said}"):
        server_addresses(f"{host}:4431", 1)


def test_ports_end():
    server_addresses(":65535", 1)
    with pytest.raises(ConfigError, match="needs ports up to 65536"):
        server_addresses(":65535", 2)


@pytest.mark.parametrize(
    "address, public",
    [
        ("127.0.0.1:1", False),
        ("127.9.9.9:1", False),
        ("[::1]:1", False),
        ("localhost:1", False),
        ("unix:/a", False),
        ("0.0.0.0:1", True),
        ("[::]:1", True),
        ("10.0.0.7:1", True),
        ("somewhere:1", True),
    ],
)
def test_public_addresses_are_known(address, public):
    assert tls.is_public(address) == public


def refused(address, said, **options):
    server = env_server.Server(counting_env.make, address, **options)
    with pytest.raises(ConfigError, match=said):
        server.start()


def test_a_socket_path_that_cannot_be_used_is_named(folder):
    refused(f"unix:{folder}/{'x' * 107}", "has 1.. bytes, but .* at most 105")
    refused(f"unix:{folder}/none/s", f"no folder {folder}/none")
    for name in "file", "file.s":  # A server at PATH has a socket PATH.s, too.
        Path(folder, name).write_text("precious")
        refused(f"unix:{folder}/file", f"{folder}/{name}: that file is not a socket")
        assert Path(folder, name).read_text() == "precious"
        Path(folder, name).unlink()
    Path(folder, "link").symlink_to("nothing")  # Only gRPC finds out that this fails.
    refused(f"unix:{folder}/link", "link: Address already in use")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(folder):
    os.chmod(folder, 0o500)
    refused(f"unix:{folder}/s", "no permission")


def test_the_longest_path_works(folder):
    path = f"{folder}/".ljust(105, "x")
    server = env_server.Server(counting_env.make, f"unix:{path}")
    server.start()
    server.stop()
    server.run()


def test_a_relative_path_stays_where_the_server_was_started(serve, folder, monkeypatch):
    def make():
        os.chdir(folder / "simulator")  # A simulator may want a folder of its own.
        return counting_env.make()

    (folder / "simulator").mkdir()
    monkeypatch.chdir(folder)
    serve(make, address="unix:s")
    with EnvClient(f"unix:{folder}/s") as client:
        client.step(0)


def test_a_server_needs_no_working_folder_unless_its_path_is_relative(
    serve, folder, monkeypatch
):
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    with EnvClient(serve(counting_env.make).address) as client:
        client.step(0)


def test_a_live_servers_socket_is_left_alone(serve):
    server = serve(counting_env.make)
    refused(server.address, "in use: a live server listens there")
    with EnvClient(server.address) as client:
        client.step(0)


def test_a_dead_servers_socket_is_taken_over(serve, folder):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{folder}/s")
        dead.listen()
    server = serve(counting_env.make, address=f"unix:{folder}/s")
    with EnvClient(server.address) as client:
        client.step(0)


def test_a_dead_owners_socket_is_taken_over_by_one_server_only(
    folder, monkeypatch, background
):
    address = f"unix:{folder}/socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{folder}/socket")
    both_have_looked = threading.Barrier(2)
    check = check_address

    def check_slowly(address, **options):
        check(address, **options)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_looked.wait(timeout=0.5)

    monkeypatch.setattr(addresses_module, "check_address", check_slowly)
    servers = [env_server.Server(counting_env.make, address) for _ in range(2)]
    starts = [background(server.start) for server in servers]
    errors = [start.exception(timeout=DEADLINE_S) for start in starts]
    loser = next(error for error in errors if error is not None)
    assert errors.count(None) == 1
    assert isinstance(loser, ConfigError) and "is in use" in str(loser)
    winner = servers[errors.index(None)]
    with EnvClient(address) as client:
        client.step(0)
    winner.stop()
    winner.run()


def test_a_socket_is_for_its_user_only(serve):
    mask = os.umask(0)
    try:
        server = serve(counting_env.make)
        mode = os.stat(server.address.removeprefix("unix:")).st_mode
        assert stat.S_IMODE(mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(mask)


def test_a_port_in_use_is_named(serve):
    server = serve(counting_env.make, address=":0")
    assert server.address.startswith("127.0.0.1:") and server.address[-2:] != ":0"
    refused(server.address, f"{server.address} is in use by another program")
    with socket.create_server(("127.0.0.1", 0)) as other:
        refused(f":{other.getsockname()[1]}", "in use by another program")
    with EnvClient(server.address) as client:
        client.step(0)


def test_an_address_of_another_machine_is_named():
    said = "cannot listen at 192.0.2.1:4431: Cannot assign"
    refused("192.0.2.1:4431", said, insecure=True)


class OnlyResetAndStep:
    """An environment as TorchBeast asked for, which knows nothing of spaces."""

    def reset(self):
        return np.zeros(2, np.float32)

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, {}


def test_environment_without_spaces_is_refused_with_a_remedy(folder):
    server = env_server.Server(OnlyResetAndStep, f"unix:{folder}/s")
    said = "OnlyResetAndStep has no observation_space, action_space; .* Set"
    with pytest.raises(ConfigError, match=said):
        server.start()


@pytest.mark.filterwarnings("ignore:.* takes no seed")
def test_environment_needs_only_reset_step_and_spaces(folder):
    class Env(OnlyResetAndStep):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Discrete(3)

    server = env_server.Server(env_class=Env, server_address=f"unix:{folder}/s")
    server.start()
    server.stop()
    server.run()


def test_default_address_is_torchbeasts():
    assert env_server.Server(counting_env.make).address == "unix:/tmp/polybeast"


def test_spaces_that_cannot_travel_are_named(folder):
    def make():
        return Echo(gym.spaces.Text(5))

    server = env_server.Server(make, f"unix:{folder}/s")
    with pytest.raises(ConfigError, match="Text"):
        server.start()


def test_an_error_of_the_environments_own_code_is_no_wrong_configuration(folder):
    def make():
        raise ValueError("operands could not be broadcast together")

    server = env_server.Server(make, f"unix:{folder}/s")
    with pytest.raises(ValueError, match="broadcast"):  # Not a ConfigError.
        server.start()


# ------------------------------------------------------------------------ the program


@pytest.fixture
def start(start_program, folder):
    """Start the program with flags; by default it serves at unix:folder/s.*.

    The shell calls its `ulimit` with those words before. No preexec_fn: in a process
    with gRPC's threads no Python code may run between fork and exec.
    """

    def start(*argv, num_servers=2, address=None, ulimit=None, **options) -> Program:
        limit = ["sh", "-c", f'ulimit {ulimit} && exec "$@"', "sh"] if ulimit else []
        where = ("--server_address", address or f"unix:{folder}/s")
        argv = ("--num_servers", num_servers, *where, *argv)
        command = [*limit, sys.executable, "-m", "polybeast_env", *argv]
        return start_program(*command, **options)

    return start


def servers_of(program: Program) -> list[psutil.Process]:
    """Return the processes that serve: each is the child of its guard."""
    guards = psutil.Process(program.pid).children()
    return [server for guard in guards for server in guard.children()]


COUNTING = ("--env", "tests.counting_env:make_truncating")


@pytest.fixture(scope="module")
def serving(tmp_path_factory) -> Iterator[tuple[psutil.Process, list[psutil.Process]]]:
    """Return a supervisor and its servers: two for each core, and few open files."""
    command = ["sh", "-c", 'ulimit -S -n 200 && exec "$@"', "sh", sys.executable, "-m"]
    command += ["polybeast_env", *COUNTING, "--num_servers", 2 * num_cores()]
    output = tmp_path_factory.mktemp("serving") / "out.txt"
    with workplace() as folder:
        address = ("--server_address", f"unix:{folder}/s")
        with Program(output, *command, *address) as program:
            program.wait_for_text("Serving")
            yield psutil.Process(program.pid), servers_of(program)


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) > num_cores(),
    reason="processes here cannot be kept to cores, or have a quota",
)
def test_servers_share_the_cores(serving):
    _, servers = serving
    assert sorted(server.cpu_affinity() for server in servers) == [
        [core] for core in sorted(os.sched_getaffinity(0)) for _ in range(2)
    ]


def oom_score(pid):
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_out_of_memory_servers_are_killed_before_their_supervisor(serving):
    supervisor, servers = serving
    assert oom_score(supervisor.pid) == oom_score("self")
    assert [oom_score(server.pid) for server in servers] == [1000] * len(servers)


def test_the_limit_of_open_files_is_raised(serving):
    supervisor, _ = serving
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for process in (supervisor, *supervisor.children(recursive=True)):
        soft, _ = process.rlimit(psutil.RLIMIT_NOFILE)
        assert soft == min(hard, machine.OPEN_FILES)


def kill_group(pid, signum):
    """Signal the whole process group, as a terminal does."""
    os.killpg(pid, signum)


@pytest.mark.parametrize(
    "kill, signum",
    [
        (os.kill, signal.SIGTERM),
        (kill_group, signal.SIGINT),
        (kill_group, signal.SIGTERM),
    ],
)
def test_a_signal_ends_everything(start, folder, kill, signum):
    program = start(*COUNTING, "--envs_per_stream", K, start_new_session=True)
    program.wait_for_text("Serving")
    assert (
        f"Serving tests.counting_env:make_truncating at unix:{folder}/s.0-1: "
        f"2 servers x 2 streams x {K} environments\n"
    ) in program.text()
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(EnvClient(f"unix:{folder}/s.{i}", run_id=f"{j}"))
            for i in (0, 1)
            for j in (0, 1)
        ]
        children = program.family()
        kill(program.pid, signum)
        for client in clients:
            with pytest.raises(Goodbye):
                while True:
                    client.step(0)
        assert program.wait() == Exit.DONE
    wait_until(lambda: ended(children))
    assert os.listdir(folder) == []
    assert f"{signum.name}: stopping" in program.text()
    assert "died" not in program.text() and "Traceback" not in program.text()


def test_servers_leave_ctrl_c_to_their_parent(start, folder):
    program = start(*COUNTING, num_servers=1)
    program.wait_for_text("Serving")
    [server] = servers_of(program)
    with EnvClient(f"unix:{folder}/s") as client:
        started = time.monotonic()
        while time.monotonic() - started < 3 * signals.DUPLICATE_S:
            server.send_signal(signal.SIGINT)
            client.step(0)


def test_servers_end_when_standard_input_closes(start, folder):
    program = start(*COUNTING, "--with_parent", stdin=subprocess.PIPE)
    program.wait_for_text("Serving")
    children = program.family()
    program.process.stdin.close()
    assert program.wait() == Exit.DONE
    assert ended(children)
    assert os.listdir(folder) == []
    first, *_ = program.text().splitlines()
    level, text, _ = json.loads(first)  # The parent adds the time, and shows it.
    assert level == logging.INFO and text.startswith("Serving")


def test_a_parent_reads_a_failure_in_one_line(start, folder):
    """The learner, which has started the servers, logs the whole traceback."""
    failing = ("--env", "tests.fault_env:make_failing", "--with_parent")
    program = start(*failing, num_servers=1, stdin=subprocess.PIPE)
    program.wait_for_text("Serving")
    with EnvClient(f"unix:{folder}/s") as client:
        with pytest.raises(ServerFailure, match="in fail\n"):
            for _ in range(7):
                client.step(0)
    program.wait_for_text("KeyError: 'the simulator is out of fuel'")
    program.process.stdin.close()
    assert program.wait() == Exit.DONE
    assert "Traceback" not in program.text()


def test_other_machines_are_refused_without_protection(start):
    program = start(*COUNTING, address="0.0.0.0:0")
    assert program.wait() == Exit.CONFIG
    for way_out in ("--tls_dir", "python -m tools.certs", "--insecure"):
        assert way_out in program.text()
    refused("0.0.0.0:0", "other machines can connect to 0.0.0.0:0")


def reconnect(address, **hello) -> EnvClient:
    """Connect as a learner does: again and again."""
    client = None

    def connect():
        nonlocal client
        with contextlib.suppress(grpc.RpcError):
            client = EnvClient(address, **hello)
            return True

    wait_until(connect)
    assert client is not None
    return client


def test_a_killed_server_comes_back_and_others_go_on(start, folder):
    program = start(*COUNTING, "--envs_per_stream", K)
    program.wait_for_text("Serving")
    addresses = [f"unix:{folder}/s.{i}" for i in (0, 1)]
    with (
        EnvClient(addresses[0], info_keys=("half",)) as steady,
        EnvClient(addresses[1]) as client,
    ):
        before = play(steady, 25, actions())
        play(client, 25, actions())
        assert psutil.Process(program.pid).num_threads() == 1
        servers_of(program)[1].kill()
        with pytest.raises(grpc.RpcError):
            while True:
                client.step(0)
        program.wait_for_text("Server 1 died (killed by SIGKILL)")
        # A fork copies one thread, and the locks that others hold.
        assert psutil.Process(program.pid).num_threads() == 1
        with reconnect(addresses[1], incarnation=1) as again:
            counting_env.check_rollout(
                play(again, 25, actions()) | {"info": {}}  # Its keys are not asked for.
            )
        last = map_nest(lambda leaf: leaf[-1], before)
        counting_env.check_rollout(play(steady, 25, actions()), last)
    program.process.terminate()
    assert program.wait() == Exit.DONE


def test_a_server_ends_with_all_that_its_environments_started(start, folder):
    program = start("--env", "tests.fault_env:Forking", num_servers=1)
    program.wait_for_text("Serving")
    for _ in range(2):
        with reconnect(f"unix:{folder}/s") as client:
            client.step(0)
            children = program.family()
            [server] = servers_of(program)
            for worker in server.children():
                names = [c.laddr for c in worker.net_connections("unix")]
                assert f"{folder}/s" not in names  # It has no socket of the server's.
                assert worker.num_threads() == 1  # None of gRPC's, which would read.
            server.kill()
            wait_until(functools.partial(ended, children))
    program.wait_for_text("died (killed by SIGKILL)")
    with reconnect(f"unix:{folder}/s") as client:
        client.step(0)
        children = program.family()
        program.process.kill()
        wait_until(lambda: ended(children))


def fork_beside_a_socket() -> int:
    """Fork, as an environment with a time limit for sockets; return the child's status.

    The child reads a pipe to its end. Prints whether sockets of this process block.
    """
    sockets = socket.socketpair()
    socket.setdefaulttimeout(DEADLINE_S)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        signal.alarm(int(DEADLINE_S))
        os.close(writer)
        os._exit(len(os.read(reader, 1)))
    os.close(writer)
    _, status = os.waitpid(child, 0)
    print(*(os.get_blocking(end.fileno()) for end in sockets))
    return status


def test_a_fork_changes_neither_pipes_nor_the_sockets_of_the_server(run_forked):
    assert run_forked(fork_beside_a_socket) == (0, "True True\n")


def test_a_child_of_a_process_with_grpc_has_none_of_its_threads(folder):
    """gRPC's own support for fork restarts them in the child, even before an `exec`.

    `subprocess` then closes their files, and such a thread may abort the child, as it
    did with ffmpeg, which imageio starts with a preexec_fn.
    """
    server = env_server.Server(counting_env.make, f"unix:{folder}/s")
    server.start()
    try:
        child = subprocess.Popen(
            ["true"], preexec_fn=lambda: os._exit(len(os.listdir("/proc/self/task")))
        )
        assert child.wait(DEADLINE_S) == 1
    finally:
        server.stop()


def test_grpc_has_the_settings_of_a_server_before_a_users_package_imports_it():
    done = run_python(
        """
import importlib.abc, runpy, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numpy":  # The first import that a user may put another before.
            print("core.remote.grpc_settings" in sys.modules, "grpc" in sys.modules)

sys.meta_path.insert(0, Finder())
sys.argv = ["polybeast_env.py", "--help"]
runpy.run_module("polybeast_env", run_name="__main__")
"""
    )
    assert done.stdout.startswith("True True\n"), done


def test_a_server_that_achieves_something_is_restarted_for_ever(start, folder):
    program = start("--env", "tests.fault_env:make_crashing_late", num_servers=1)
    for _ in range(7):
        with reconnect(f"unix:{folder}/s") as client, pytest.raises(grpc.RpcError):
            for _ in range(30):
                client.step(0)
    program.wait_for_text("starting it again in 0.0 s")
    assert program.process.poll() is None


def test_a_hung_environment_is_shown_killed_and_replaced(start, folder):
    program = start(
        *("--env", "tests.fault_env:make_hanging_in_c", "--env_step_timeout_s", 1),
        num_servers=1,
    )
    for _ in range(2):
        with reconnect(f"unix:{folder}/s") as client, pytest.raises(grpc.RpcError):
            for _ in range(30):
                client.step(0)
    program.wait_for_text("Server 0 hangs: one call of its environment has taken 1 s")
    program.wait_for_text("Server 0 died (its environment hung)")
    assert "fault_env.py" in program.text()  # Its stack.


def test_a_stopped_server_is_continued(start, folder):
    program = start("--env", "Catch", num_servers=1)
    with reconnect(f"unix:{folder}/s") as client:
        client.step(0)
        (server,) = servers_of(program)
        processes = server, server.parent()  # Its guard.
        for process in processes:
            process.suspend()
        client.step(0)
        for process in processes:
            wait_until(lambda: process.status() != psutil.STATUS_STOPPED)  # noqa: B023
    program.wait_for(lambda: program.text().count("was stopped; continuing it") == 2)


def test_a_server_without_grpcio_says_so_in_one_line(start, folder, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['grpc'] = None")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    program = start("--env", "Catch", num_servers=1, env=env)
    assert program.wait() == Exit.CONFIG
    assert "pip install grpcio" in program.text().splitlines()[-1]
    assert "Traceback" not in program.text()


def test_an_option_that_no_message_can_hold_is_named(folder):
    options = {"skip": 4, "size": [5]}
    with pytest.raises(ConfigError, match=r"env_options: size is \[5\] \(list\), ex"):
        env_server.Server(Catch, f"unix:{folder}/s", options=options).start()


def test_an_environment_that_cannot_be_made_ends_the_program(start):
    program = start("--env", "tests.fault_env:make_broken", num_servers=1)
    assert program.wait() == Exit.INTERNAL
    assert "RuntimeError: no licence for this simulator" in program.text()
    # The same warning is told the first, second and fourth time.
    assert program.text().count("starting it again") == 3
    assert "4 times" in program.text()


def test_an_address_in_use_is_exit_78(start, serve, folder):
    first = start(*COUNTING)
    first.wait_for_text("Serving")
    second = start(*COUNTING)
    assert second.wait() == Exit.CONFIG
    assert f"unix:{folder}/s.0 is in use: a live server" in second.text()
    server = serve(counting_env.make, address=":0")
    third = start(*COUNTING, num_servers=1, address=server.address)
    assert third.wait() == Exit.CONFIG
    lines = third.text().splitlines()
    assert len(lines) == 1, third.text()  # gRPC's own words are kept back.
    assert lines[0].endswith(
        f"{server.address} is in use by another program. Choose another port."
    )
    first.process.terminate()
    assert first.wait() == Exit.DONE


def test_sockets_of_a_killed_program_are_taken_over(start, folder):
    first = start(*COUNTING)
    first.wait_for_text("Serving")
    children = first.family()
    assert len(children) == 2 * 2
    first.kill()
    wait_until(lambda: ended(children))
    assert len(os.listdir(folder)) == 4  # Two for each server.
    start(*COUNTING).wait_for_text("Serving")
    with EnvClient(f"unix:{folder}/s.1") as client:
        client.step(0)


# A machine of environment servers: it has grpcio, numpy and gymnasium only.
SMALL_MACHINE = """
import runpy, sys
names = "torch libtorchbeast psutil rich ale_py safetensors google.protobuf"
sys.modules |= dict.fromkeys(names.split())  # None: `import` raises an exception.
sys.argv = ["polybeast_env", *sys.argv[1:]]
runpy.run_module("polybeast_env", run_name="__main__")
"""


def test_servers_need_grpcio_numpy_and_gymnasium_only(start_program, folder):
    flags = ["--env", "CartPole-v1", "--num_servers", 1]
    flags += ["--server_address", f"unix:{folder}/s"]
    program = start_program(sys.executable, "-c", SMALL_MACHINE, *flags)
    program.wait_for(lambda: os.path.exists(f"{folder}/s"))
    with EnvClient(f"unix:{folder}/s") as client:
        client.step(1)
    program.process.terminate()
    assert program.wait() == Exit.DONE


def test_servers_without_ale_py_say_what_atari_needs(folder):
    flags = ["--env", "PongNoFrameskip-v4", "--num_servers", 1]
    done = run_python(SMALL_MACHINE, *flags, "--server_address", f"unix:{folder}/s")
    assert done.returncode == Exit.CONFIG, done.stderr
    (line,) = done.stderr.splitlines()
    assert "--env PongNoFrameskip-v4" in line
    assert "pip install ale-py)" in line


def test_servers_recover_from_running_out_of_files(start, folder):
    program = start(*COUNTING, num_servers=1, ulimit="-n 64")
    program.wait_for_text("Serving")
    with contextlib.ExitStack() as stack:
        for _ in range(150):
            attacker = stack.enter_context(socket.socket(socket.AF_UNIX))
            attacker.setblocking(False)
            with contextlib.suppress(OSError):
                attacker.connect(f"{folder}/s")
        server = servers_of(program)[0]
        wait_until(lambda: server.num_fds() >= 60)
    with reconnect(f"unix:{folder}/s") as client:
        client.step(0)


def test_c_code_that_prints_does_not_wait_for_a_pipe_that_nobody_reads(start, folder):
    ours, theirs = os.pipe()
    fill(theirs)
    env = "tests.fault_env:make_printing_in_c"
    program = start("--env", env, num_servers=1, stdout=theirs, stderr=theirs)
    os.close(theirs)
    with reconnect(f"unix:{folder}/s") as client:
        for _ in range(5):
            client.step(0)
    text = b""
    while b"from C" not in text:  # It is shown when somebody reads.
        text += os.read(ours, 1 << 16)
    program.process.terminate()
    assert program.wait() == Exit.DONE
    os.close(ours)


# ------------------------------------------------------------------------------ flags


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--num_servers", "0"], "whole number >= 1"),
        (["--server_address", ":1", "--pipes_basename", "unix:/a"], "Leave one out"),
        (["--pipes_basename", "host:1"], "must be unix:/path"),
        (["--pipes_basename", "unix:/%41"], "--pipes_basename: expected a path with"),
        (["--server_address", "unix:/%41"], "--server_address: expected a path with"),
        (["--env", "Catch", "--noop_max", "3"], "not an Atari"),
        (["--server_address", "unix:/a", "--tls_dir", "c"], "is for TCP"),
        (["--pipes_basename", "unix:/a", "--tls_dir", "c"], "is for TCP"),
        (["--tls_dir", "c", "--insecure"], "contradict each other"),
    ],
)
def test_bad_flags_are_exit_2(argv, said, capsys):
    with pytest.raises(SystemExit) as status:
        polybeast_env.main(argv)
    assert status.value.code == Exit.USAGE
    assert said in " ".join(capsys.readouterr().err.split())


def test_defaults_are_said_in_the_help(capsys):
    flags = polybeast_env.parse_flags(["--env", "Catch"])
    assert (flags.envs_per_stream, flags.streams_per_server) == (8, 2)
    with pytest.raises(SystemExit):
        polybeast_env.parse_flags(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "carries the rows of all. Default: 8" in text
    assert "another one steps its environments. Default: 2" in text
    assert f"Default: {polybeast_env.SERVER_ADDRESS}" in text
    assert "--with_parent" not in text and "--remove_folder" not in text


def test_atari_is_served_as_the_flags_say(serve):
    pytest.importorskip("ale_py")
    flags = polybeast_env.parse_flags(
        ["--env", "PongNoFrameskip-v4", "--frame_skip", "3", "--full_action_space"]
    )
    server = serve(
        lambda num_envs, **options: polybeast_env.create_environments(
            flags, num_envs, **options
        ),
        vector=True,
        num_envs=2,
        name=flags.env,
        options=functools.partial(polybeast_env.env_options, flags),
    )
    with EnvClient(server.address) as client:
        assert client.welcome.frames_per_step == 3
        assert client.welcome.action == gym.spaces.Discrete(18)
        told = {option.name: option.value for option in client.welcome.options}
        assert told == {
            "atari_protocol": "impala",
            "noop_max": 30,
            "fire_reset": True,
            "episodic_life": True,
            "frame_skip": 3,
            "sticky_actions": 0.0,
            "full_action_space": True,
            "max_frames": 108_000,
        }
        rows = client.step(0)
        assert rows["observation"].shape == (2, 4, 84, 84)
        assert rows["observation"].any()


def vectorized(flags, num_envs, **options):
    envs = gym.make_vec("CartPole-v1", num_envs, vectorization_mode="sync")
    return from_vector_env(envs, **options)


@pytest.mark.parametrize(
    "edited, new, made",
    [
        ("create_env", lambda flags, render_mode=None: Catch(), "Catch"),
        ("create_environments", vectorized, "CartPole-v1"),
    ],
)
def test_a_fork_that_ignores_env_serves_no_atari(
    edited, new, made, monkeypatch, folder
):
    pytest.importorskip("ale_py")
    monkeypatch.setattr(polybeast_env, edited, new)
    flags = polybeast_env.parse_flags([])
    progress = np.zeros((2 * flags.streams_per_server, 2))
    server = polybeast_env.create_server(flags, f"unix:{folder}/s", progress)
    server.start()
    welcome = describe(server.address)
    server.stop()
    server.run()
    assert (welcome.env, welcome.frames_per_step) == ("PongNoFrameskip-v4", 1)
    assert welcome.options == (messages.Option("create_env", made),)


# ------------------------------------------------------------------ somebody else's


def test_a_foreign_server_speaks_the_protocol(start_program, folder):
    pytest.importorskip("grpc_tools", reason="pip install grpcio-tools")
    address = f"unix:{folder}/f"
    script = ROOT / "examples" / "foreign_server.py"
    start_program(sys.executable, script, address, cwd="/")
    assert describe(address).env == "Echo"
    assert describe(address).options == ()  # It may leave them out.
    with pytest.raises(ServerFailure, match="speaks protocol 1, not 2"):
        EnvClient(address, protocol=2)
    with EnvClient(address, seed=3) as client:
        assert client.rows["done"].all()
        for step in range(1, 21):
            bits = client.rows["observation"][:, 1].astype(int)
            rows = client.step(bits)
            assert (rows["reward"] == 1).all()
            assert (rows["last_action"] == bits).all()
            assert (rows["episode_step"] == (step - 1) % 10 + 1).all()
            assert (rows["done"] == (step % 10 == 0)).all()
            assert (rows["episode_return"] == rows["episode_step"]).all()
        assert (rows["info"]["game_return"] == 10).all()
        rows = client.step(1 - rows["observation"][:, 1].astype(int))
        assert (rows["reward"] == 0).all()
        assert np.isnan(rows["info"]["game_return"]).all()
