# SPDX-License-Identifier: Apache-2.0
"""What the learner's main loop says about the actor pool."""

import tempfile
from types import SimpleNamespace

import gymnasium as gym
import pytest

import libtorchbeast
import polybeast
from core.algorithm.counters import BusyTime
from core.environments import toys
from core.errors import ConfigError, StallError
from core.remote import codec, messages, pool
from core.running.supervise import start_thread
from tests.conftest import DEADLINE_S, served


def stats(**changes):
    """What `ActorPool.stats` says of three streams, in part."""
    return {
        "connected": 3,
        "states": ["waiting_for_env", "receiving", "waiting_for_env"],
        "waiting_s": [5.0, 0.0, 7.0],
        "stream_addresses": ["a", "b", "c"],
        "env_s": 0.0,
        **dict.fromkeys(["received", "reconnects", "discarded", "batch_fill"], 0),
        "addresses": {"a": {"steps": 0, "env_s": 0.0}},
        **changes,
    }


def test_the_values_that_rows_may_have_are_those_of_the_servers_spaces():
    flags = polybeast.parse_flags(["--env_step_timeout_s", "7"])
    welcome = messages.Welcome(
        observation=gym.spaces.MultiDiscrete([5, 7]),
        action=gym.spaces.Discrete(3, start=2),
        num_envs=11,
    )
    options = pool.stream_options(flags, welcome)
    assert options["mask_sizes"] == []
    assert options["num_envs"] == 11
    assert options["value_ranges"] == [
        (("observation",), [0, 0], [4, 6]),
        (("last_action",), [2], [4]),
    ]
    assert options["step_timeout_s"] == 11 * 7 + pool.SUPERVISOR_S


@pytest.mark.parametrize("cores, threads", [(1, 1), (2, 1), (7, 1), (8, 2), (96, 4)])
def test_threads_that_receive_are_as_many_as_the_cores_allow(
    monkeypatch, cores, threads
):
    monkeypatch.setattr(pool, "num_cores", lambda: cores)
    space = gym.spaces.Discrete(3)
    options = pool.stream_options(
        polybeast.parse_flags([]), messages.Welcome(observation=space, action=space)
    )
    assert options["num_threads"] == threads


def test_an_environment_that_has_changed_since_it_was_described_ends_the_run():
    flags = polybeast.parse_flags(["--seed", "1"])
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        address = f"unix:{folder}/s"
        with served(toys.Catch, address, num_envs=1, name="Catch"):
            raw = libtorchbeast.describe(address, info_keys=flags.info_keys)
        actors = libtorchbeast.ActorPool(
            5,
            libtorchbeast.BatchingQueue(),
            libtorchbeast.DynamicBatcher(),
            [address],
            (),
            named_rows=True,
            **pool.stream_options(flags, codec.decode_welcome(raw)),
        )
        with served(toys.Catch, address, num_envs=1, name="Pong"):
            running = start_thread("pool", pool.run_actors, flags, actors)
            said = (
                "differs from the server that the model was made for: env is 'Pong', "
            )
            with pytest.raises(ConfigError, match=f"{address} .*{said}expected 'Catch"):
                running.result(DEADLINE_S)
            actors.stop()


def test_lost_contact_is_said_again_and_again_until_there_is_one(monkeypatch, caplog):
    now = 1000.0
    monkeypatch.setattr(pool.time, "monotonic", lambda: now)
    contact = pool.Contact(SimpleNamespace(server_addresses=None))
    assert not contact.is_lost(stats(), "")
    for _ in range(2):  # The second loss is like the first.
        caplog.clear()
        assert contact.is_lost(stats(connected=0), "a: refused")
        now += pool.NO_SERVER_S
        assert contact.is_lost(stats(connected=0), "a: refused")
        assert not caplog.records
        for _ in range(2):
            now += pool.NO_SERVER_S + 1
            assert contact.is_lost(stats(connected=0), "b: reset")
        assert ["b: reset" in r.message for r in caplog.records] == [True, True]
        now += 1
        assert not contact.is_lost(stats(connected=1), "b: reset")


def test_lost_contact_for_a_certificate_says_so(monkeypatch, caplog):
    monkeypatch.setattr(pool, "NO_SERVER_S", 0)
    seen = []
    monkeypatch.setattr(pool.tls, "diagnose", lambda *args: seen.append(args))
    flags = SimpleNamespace(server_addresses=["a:1", "a:12"], tls_dir="certs")
    event = "a:12 (incarnation 3), step 7: Socket closed"
    contact = pool.Contact(flags)
    assert contact.is_lost(stats(connected=0), event)
    assert contact.is_lost(stats(connected=0), event)
    assert caplog.records[-1].message.endswith("error: " + event)
    monkeypatch.setattr(pool.tls, "diagnose", lambda *args: "it hangs up")
    assert contact.is_lost(stats(connected=0), event)
    assert caplog.records[-1].message.endswith(f"error: {event}; it hangs up")
    assert seen == [("a:12", "certs")]


@pytest.mark.parametrize(
    "changes, named",
    [
        ({}, "the environment server c, which has not answered for 7 s (streams: "),
        ({"connected": 0}, "environment servers, none of which is connected"),
        ({"states": ["waiting_for_inference", "receiving"]}, "inference"),
        ({"states": ["waiting_for_room", "waiting_for_inference"]}, "the learner"),
        ({"states": ["waiting_for_room", "unused"]}, "the learner (streams: 1 waiting"),
    ],
)
def test_what_a_run_waits_for_is_named(changes, named):
    queue = libtorchbeast.BatchingQueue()
    text = pool.describe_wait(stats(**changes), queue)
    assert text.startswith(named) and "unused" not in text


class FakeServers:
    """Servers that are always well."""

    restarts = 0

    def __init__(self, is_local, addresses=("a", "b", "c"), may_change=False):
        self.is_local = is_local
        self.addresses = tuple(addresses)
        self.may_change = may_change

    def check(self, received):
        pass


class FakeActors:
    """A pool with two places."""

    def __init__(self, **changes):
        self.stats = lambda: stats(**changes)
        self.take_events = list
        self.calls = []

    def set_addresses(self, addresses):
        self.calls.append(addresses)
        return max(0, len(addresses) - 2)


@pytest.mark.parametrize(
    "is_local, connected, is_stall",
    [(False, 0, False), (False, 3, True), (True, 0, True)],
)
def test_only_servers_elsewhere_may_be_away_for_longer_than_the_stall_timeout(
    monkeypatch, is_local, connected, is_stall
):
    now = 1000.0
    monkeypatch.setattr(pool.time, "monotonic", lambda: now)
    flags = SimpleNamespace(
        stall_timeout_s=10.0, on_stall="stop", server_addresses=None
    )
    learner = SimpleNamespace(progress=lambda: "step 7", busy=BusyTime())
    actors = FakeActors(connected=connected)
    queue = libtorchbeast.BatchingQueue()
    watch = pool.PoolWatch(flags, learner, actors, queue, 1, FakeServers(is_local))
    try:
        assert watch.tick()["streams"] == connected
        now += 11.0
        if is_stall:
            with pytest.raises(StallError, match="at step 7, waiting for .*environm"):
                watch.tick()
        else:
            watch.tick()
    finally:
        watch.close()


def test_the_columns_are_the_median_and_the_slowest_of_the_servers():
    server = {"steps": 1, "env_s": 0.0}
    addresses = {
        "a": {**server, "p50_ms": 2.0, "p99_ms": 9.0},
        "b": {**server, "p50_ms": 3.0, "p99_ms": 8.0},
        "c": {**server, "p50_ms": 7.0, "p99_ms": 7.5},
        "new": {**server, "steps": 0, "p50_ms": 99.0, "p99_ms": 99.0},
    }
    actors = FakeActors(addresses=addresses)
    flags = SimpleNamespace(stall_timeout_s=10.0, on_stall="stop")
    queue = libtorchbeast.BatchingQueue()
    watch = pool.PoolWatch(flags, None, actors, queue, 1, FakeServers(is_local=False))
    row = watch.columns()
    assert (row["env_step_p50_ms"], row["env_step_p99_ms"]) == (3.0, 9.0)
    assert "server_restarts" not in row and "inference_batch" not in row


def test_the_pool_follows_the_list_of_servers_and_one_line_says_so(caplog):
    caplog.set_level("INFO", "core.remote.pool")
    flags = SimpleNamespace(stall_timeout_s=10.0, on_stall="stop")
    servers = FakeServers(is_local=False, addresses=["a"], may_change=True)
    actors = FakeActors()
    watch = pool.PoolWatch(flags, None, actors, None, 2, servers)
    assert actors.calls == [["a", "a"]]
    watch.follow_servers()
    assert len(actors.calls) == 1  # There was no change.
    servers.addresses = ("b", "c")
    watch.follow_servers()
    servers.addresses = ("b", "c", "d")
    watch.follow_servers()
    servers.addresses = ()
    watch.follow_servers()
    servers.addresses = ("a", "b")
    watch.follow_servers()
    assert actors.calls[1:3] == [["b", "b", "c", "c"], ["b", "b", "c", "c", "d", "d"]]
    full = "2 streams of the 2 servers have no place and wait for one: raise --max_"
    assert [record.message.removesuffix("streams") for record in caplog.records] == [
        "Servers: 1 server (a) joined; 0 servers left; now 1",
        "Servers: 2 servers (b, c) joined; 1 server (a) left; now 2",
        full,  # Once, until all have had a place.
        "Servers: 1 server (d) joined; 0 servers left; now 3",
        "Servers: 0 servers joined; 3 servers (b, c, d) left; now 0",
        "Servers: 2 servers (a, b) joined; 0 servers left; now 2",
        full,
    ]


def test_the_time_of_servers_that_left_counts_once():
    flags = SimpleNamespace(stall_timeout_s=10.0, on_stall="stop")
    learner = SimpleNamespace(progress=lambda: 7, busy=BusyTime())
    actors = FakeActors()
    servers = FakeServers(is_local=False)
    watch = pool.PoolWatch(flags, learner, actors, None, 2, servers)
    for env_s, addresses in ((4.0, ["a", "b"]), (7.0, ["b"]), (7.0, [])):
        servers_now = {name: {"steps": 0, "env_s": 0.0} for name in addresses}
        now = stats(connected=0, env_s=env_s, addresses=servers_now)
        watch._count_env_time(now)
    assert learner.busy._seconds == {"env": 4.0 / (2 * 2) + 3.0 / 2}
    watch.close()


@pytest.mark.parametrize(
    "flag, may_change, num_servers, expected",
    [
        (None, False, 3, 6),
        (5, False, 3, 5),
        (None, True, 3, 128),
        (None, True, 100, 400),
        (7, True, 100, 7),
    ],
)
def test_the_largest_number_of_streams(flag, may_change, num_servers, expected):
    flags = SimpleNamespace(max_streams=flag)
    servers = FakeServers(False, ["a"] * num_servers, may_change)
    welcome = SimpleNamespace(num_streams=2)
    assert pool.max_streams(flags, servers, welcome) == expected
