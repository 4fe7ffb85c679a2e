# SPDX-License-Identifier: Apache-2.0
"""Lists of servers that change while the learner runs."""

import argparse
import logging
import os
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import hypothesis
import pytest
from hypothesis import strategies as st

import polybeast
from core.errors import ConfigError
from core.remote import greet, messages, server_flags, server_lists
from core.remote.frames import arrays_of
from core.remote.server_lists import AddressFile, DnsName, ServerList, Unavailable
from core.rollout import row_spec, spec_of
from core.running import folder
from libtorchbeast import (
    ActorError,
    ActorPool,
    BatchingQueue,
    DynamicBatcher,
    ServerMismatch,
    ServerUnavailable,
)
from tests.conftest import DEADLINE_S, wait_until

INSECURE = SimpleNamespace(tls_dir=None, insecure=True)
LOCAL = SimpleNamespace(tls_dir=None, insecure=False)
WITH_TLS = SimpleNamespace(tls_dir="certs", insecure=False)


class FakeSource:
    """A list that the test sets. Raises what it is set to raise."""

    def __init__(self, result):
        self.result = result
        self.asked = 0

    def addresses(self):
        self.asked += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server_lists, "ASK_S", 0.01)


# --- Files ------------------------------------------------------------------------


def test_a_file_has_addresses_commas_ranges_and_comments(tmp_path):
    path = tmp_path / "hosts"
    text = "# two hosts\n\nh1:4431-4432,h2:7  # fast\n unix:/s.0 h2:7\n"
    path.write_text(text, encoding="utf-8-sig")  # As editors on Windows do.
    expected = ["h1:4431", "h1:4432", "h2:7", "unix:/s.0"]
    assert AddressFile(str(path), INSECURE).addresses() == expected


def test_a_change_of_a_file_counts_once_two_looks_agree(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("h1:1\nh2:2\n")
    source = AddressFile(str(path), INSECURE)
    assert source.addresses() == ["h1:1", "h2:2"]
    path.write_text("h1")  # Half written.
    assert source.addresses() == ["h1:1", "h2:2"]
    path.write_text("h1:1\n")
    assert source.addresses() == ["h1:1", "h2:2"]
    assert source.addresses() == ["h1:1"]
    assert source.addresses() == ["h1:1"]


def test_a_file_that_takes_the_place_of_the_last_one_counts_at_once(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("h1:1\n")
    source = AddressFile(str(path), INSECURE)
    assert source.addresses() == ["h1:1"]
    for i in range(3):
        (tmp_path / "new").write_text(f"h2:{i + 1}\n")
        (tmp_path / "new").replace(path)
        assert source.addresses() == [f"h2:{i + 1}"]


def test_a_file_that_never_stands_still_is_followed_too(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("h:9")
    source = AddressFile(str(path), INSECURE)
    seen = []
    for i in range(1, 12):
        seen.append(source.addresses()[0])
        path.write_text(f"h:{i}")
    assert seen == ["h:9"] * 5 + ["h:5"] * 5 + ["h:10"]


@pytest.mark.parametrize(
    "content, flags, said",
    [
        ("h1:1\nh2\n", INSECURE, "hosts, line 2: expected host:port.*got 'h2'"),
        ("h1:1,h2:99999", INSECURE, "hosts, line 1: expected ports from 1 to 65535"),
        ("dns:envs:1", INSECURE, "line 1: expected host:port.*got 'dns:envs:1'"),
        (f"unix:/a\nunix:/{'d' * 107}", LOCAL, "line 2: .* 107 bytes, got 'unix:/ddd"),
        (f"unix:/{'é' * 53}.0-9", LOCAL, "line 1: .* 107 bytes, got 'unix:/ééé"),
        ("a..b:1", INSECURE, "line 1: expected the name of a host.*got 'a..b:1'"),
        (f"{'a' * 64}:1", INSECURE, "line 1: expected the name of a host.*got 'aaa"),
        ("a\0b:1", INSECURE, r"line 1: expected the name of a host.*got 'a\\x00b:1'"),
        ("unix:/a.0-65536", LOCAL, "line 1: expected a range of at most 65536 addr"),
        (f"unix:/{'9' * 500_000}", LOCAL, "line 1: .* 107 bytes, got 'unix:/999"),
        (f"h:{'9' * 5000}", INSECURE, "line 1: expected host:port, .*got 'h:999"),
        ("\nh1:1", LOCAL, "hosts, line 2 has h1:1, which is not on this machine"),
        (b"\xff\xfe", INSECURE, "cannot read .*hosts"),
        ("#" * 2_000_000, INSECURE, "hosts is larger than 1048576 bytes"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, content, flags, said):
    path = tmp_path / "hosts"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=said):
        AddressFile(str(path), flags).addresses()


@hypothesis.given(
    st.from_regex(
        r"(unix:/?|\[)?[a.é\0/%#:\] -]{0,4}(é{53})?:?([0-9]{1,6}-)?[0-9]{0,6}"
    )
)
@hypothesis.example(f"unix:/{'é' * 53}")
@hypothesis.example("a#b:1")
def test_a_pool_takes_all_addresses_that_a_list_may_have(text):
    try:
        addresses = server_flags.plain_addresses(text)
    except argparse.ArgumentTypeError:
        return
    pool = ActorPool(3, BatchingQueue(), DynamicBatcher(), (), (), max_streams=1)
    pool.set_addresses([addresses[0], addresses[-1]])


@pytest.mark.parametrize("name", ["no-such-file", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot read.*(No such file|Is a directory)"):
        AddressFile(str(tmp_path / name), LOCAL).addresses()


def test_a_named_pipe_in_place_of_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "hosts")
    with pytest.raises(ConfigError, match="hosts is not a regular file"):
        AddressFile(str(tmp_path / "hosts"), LOCAL).addresses()


def test_this_machines_servers_in_a_file_need_no_tls(tmp_path):
    (tmp_path / "hosts").write_text("127.0.0.1:1 localhost:2 unix:/a")
    assert len(AddressFile(str(tmp_path / "hosts"), LOCAL).addresses()) == 3


# --- Names ------------------------------------------------------------------------


@pytest.fixture
def resolver(monkeypatch):
    """A name server whose answer the test sets: numbers, or an exception."""
    answers = SimpleNamespace(hosts=[], asked=[])

    def getaddrinfo(name, port, **kwargs):
        answers.asked.append((name, port))
        if isinstance(answers.hosts, Exception):
            raise answers.hosts
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (host, port)) for host in answers.hosts]

    monkeypatch.setattr(server_lists.socket, "getaddrinfo", getaddrinfo)
    return answers


def test_a_name_stands_for_all_addresses_behind_it(resolver):
    resolver.hosts = ["10.0.0.9", "10.0.0.7", "10.0.0.9"]
    expected = ["10.0.0.7:4431", "10.0.0.9:4431"]
    assert DnsName("dns:envs.jobs:4431", INSECURE).addresses() == expected
    assert resolver.asked == [("envs.jobs", 4431)]
    # The IPv6 addresses may be those of the same servers.
    resolver.hosts += ["fd00::7"]
    assert DnsName("dns:envs.jobs:4431", INSECURE).addresses() == expected
    resolver.hosts = ["fd00::9", "fd00::7"]
    expected = ["[fd00::7]:4431", "[fd00::9]:4431"]
    assert DnsName("dns:envs.jobs:4431", INSECURE).addresses() == expected
    resolver.hosts = ["10.0.0.7"]
    # With TLS, the servers' certificates have the name.
    assert DnsName("dns:envs:1", WITH_TLS).addresses()[0] == "10.0.0.7:1#envs"


def test_a_name_is_asked_again_after_some_seconds(resolver, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(server_lists.time, "monotonic", lambda: now)
    resolver.hosts = ["10.0.0.7"]
    source = DnsName("dns:envs:1", INSECURE)
    assert source.addresses() == ["10.0.0.7:1"]
    resolver.hosts = ["10.0.0.8"]
    now += server_lists.DNS_S - 0.5
    assert source.addresses() == ["10.0.0.7:1"]
    now += 1
    assert source.addresses() == ["10.0.0.8:1"]
    resolver.hosts = socket.gaierror(-2, "Name or service not known")
    now += server_lists.DNS_S
    with pytest.raises(Unavailable, match="resolve the name envs: Name or service not"):
        source.addresses()


# --- All servers ------------------------------------------------------------------


def watching():
    return [t for t in threading.enumerate() if t.name.startswith("server-list-")]


def test_the_list_follows_its_sources_and_leaves_no_thread():
    sources = [FakeSource(["b:1", "a:1"]), FakeSource(["c:1"])]
    with ServerList(["a:1"], sources) as servers:
        assert servers.may_change and not servers.is_local
        assert servers.addresses == ("a:1", "b:1", "c:1")
        sources[1].result = ["d:1"]
        wait_until(lambda: servers.addresses == ("a:1", "b:1", "d:1"))
        assert len(watching()) == 2
    # A thread's future is done a moment before the thread.
    wait_until(lambda: not watching())
    with ServerList(["a:1"]) as servers:
        assert not servers.may_change and servers.addresses == ("a:1",)
        assert not watching()


@pytest.mark.parametrize("error", [ConfigError("bad line"), Unavailable("no name")])
def test_a_list_that_fails_leaves_the_servers_and_is_warned_of_once(error, caplog):
    caplog.set_level("INFO", "core.remote.server_lists")
    source = FakeSource(["a:1"])
    with ServerList([], [source]) as servers:
        source.result = error
        asked = source.asked
        wait_until(lambda: source.asked > asked + 3)
        assert servers.addresses == ("a:1",)
        assert [r.message for r in caplog.records if str(error) in r.message] == [
            *(m.message for m in caplog.records)
        ]
        assert len(caplog.records) == 1
        assert "going on with the last 1 servers" in caplog.text
        source.result = ["b:1"]
        wait_until(lambda: servers.addresses == ("b:1",))
    assert "is usable again" in caplog.text


def test_a_source_that_breaks_ends_the_run():
    source = FakeSource(["a:1"])
    with ServerList([], [source]) as servers:
        source.result = ZeroDivisionError()

        def has_failed():
            try:
                servers.check()
            except ZeroDivisionError:
                return True

        wait_until(has_failed)


def test_a_bad_list_ends_the_start_and_a_list_to_come_does_not():
    with pytest.raises(ConfigError, match="bad line"):
        ServerList([], [FakeSource(ConfigError("bad line"))])
    with ServerList([], [FakeSource(Unavailable("hosts names no server"))]) as servers:
        assert servers.addresses == ()
        assert "hosts names no server" in servers.problem()


def of_rank(monkeypatch, rank, size=3):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


def shares_of(monkeypatch, hosts, size):
    """Return the learners' servers, a tuple for each learner."""
    shares = []
    for rank in range(size):
        of_rank(monkeypatch, rank, size)
        with ServerList([], [FakeSource(hosts)]) as servers:
            shares.append(servers.addresses)
    assert sorted(sum(shares, ())) == sorted(hosts)
    return shares


@pytest.mark.parametrize("num, size", [(64, 4), (16, 8), (17, 4), (3, 3), (2, 3)])
def test_learners_divide_a_list_evenly_and_few_servers_change_their_learner(
    monkeypatch, num, size
):
    hosts = [f"10.0.0.{i}:4431" for i in range(1, num + 1)]
    shares = shares_of(monkeypatch, hosts, size)
    counts = {len(share) for share in shares}
    assert counts <= {num // size, -(-num // size)}
    # One server is replaced: most servers keep their learner, whatever their order.
    after = shares_of(monkeypatch, ["10.0.9.9:4431", *hosts[:0:-1]], size)
    kept = sum(len({*old} & {*new}) for old, new in zip(shares, after))
    assert kept >= 0.7 * (num - 1) - 1


class FakeDialedIn(FakeSource):
    """Machines that have dialed in, whose list the test sets."""

    address = "here:4431"

    def close(self):
        pass


@pytest.mark.parametrize("more", [(), ("file",)])
def test_learners_divide_fixed_servers_once_whoever_dials_in(
    tmp_path, monkeypatch, more
):
    hosts = [f"127.0.0.1:{i}" for i in range(1, 41)]
    (tmp_path / "hosts").write_text("127.0.0.1:99")
    named = [f"@{tmp_path}/hosts"] if more else []
    shares = []
    for rank in range(3):
        of_rank(monkeypatch, rank)
        flags = polybeast.parse_flags(
            ["--server_addresses", ",".join(hosts + named), "--batch_size", "3"]
        )
        dialed_in = FakeDialedIn([f"unix:/dialed-{rank}"])
        with ServerList.of_flags(flags, dialed_in) as servers:
            *share, last = servers.addresses
            assert last == f"unix:/dialed-{rank}"
            shares.append(share)
    assert sorted(sum(shares, [])) == sorted(hosts + ["127.0.0.1:99"] * len(more))
    assert all(shares)


def test_a_learner_without_a_server_says_that_others_have_them(monkeypatch, caplog):
    shares = shares_of(monkeypatch, ["h0:1", "h1:1"], size=3)
    of_rank(monkeypatch, shares.index(()), size=3)
    source = FakeSource(["h0:1", "h1:1"])
    with ServerList([], [source], FakeDialedIn([])) as servers:
        monkeypatch.setattr(
            Stop, "received", property(lambda _: caplog.records or None)
        )
        assert start(servers, 60) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING  # Learner 1 prints nothing else.
    assert (
        "the list has 2 servers but there are 3 learners, and each needs a server of "
        "its own; add servers or start fewer learners; no machine has dialed in at "
        "here:4431"
    ) in record.message


# --- The start --------------------------------------------------------------------


class Stop:
    """A signal to stop that comes when a test has taken too long."""

    def __init__(self):
        self._deadline = time.monotonic() + DEADLINE_S

    @property
    def received(self):
        return 15 if time.monotonic() > self._deadline else None


def start(servers, stall_timeout_s=60, **flags):
    """Return the Welcome with which a learner starts."""
    given = {"tls_dir": None, "info_keys": (), "savedir": "/none", "xpid": "x"}
    given |= {"stall_timeout_s": stall_timeout_s, **flags}
    found = greet.greet(SimpleNamespace(**given), servers, Stop())
    return None if found is None else found[1]


def serve(monkeypatch, **answers):
    """Let the servers a, b... answer so: with an env, or an exception that is raised.

    Each list of answers ends with one that is given for ever. Returns who was asked.
    """
    asked = []

    def describe(address, **kwargs):
        asked.append(address)
        mine = answers[address[0]]
        answer = mine.pop(0) if len(mine) > 1 else mine[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(greet.libtorchbeast, "describe", describe)
    monkeypatch.setattr(
        greet.codec, "decode_welcome", lambda env: SimpleNamespace(env=env)
    )

    def complete_flags(flags, welcome):
        if welcome.env == "Wrong":
            raise ConfigError("the servers serve Wrong")
        return flags

    monkeypatch.setattr(greet, "complete_flags", complete_flags)
    return asked


def test_a_name_that_never_resolves_ends_the_start(resolver):
    resolver.hosts = socket.gaierror(-2, "Name or service not known")
    source = DnsName("dns:envs:1", INSECURE)
    with ServerList([], [source]) as servers:
        with pytest.raises(ConfigError, match="the name envs: Name or.*for 0.1 s"):
            start(servers, 0.1)


def test_the_start_waits_for_the_first_server_of_an_empty_list(
    monkeypatch, caplog, background
):
    caplog.set_level("INFO", "core.remote.greet")
    source = FakeSource(Unavailable("hosts names no server"))
    asked = serve(monkeypatch, a=["Catch"])

    def add_server() -> None:
        wait_until(lambda: "Waiting for an environment server: " in caplog.text)
        source.result = ["a:1"]

    with ServerList([], [source]) as servers:
        later = background(add_server)
        assert start(servers, 0.0).env == "Catch"  # The limit is not for lists.
        later.result(DEADLINE_S)
    assert asked == ["a:1"]
    assert "hosts names no server" in caplog.text


OTHER_PROTOCOL = ServerMismatch("The environment server b:1 speaks protocol 2")
AWAY = ServerUnavailable("The environment server b:1 is away")


def test_servers_of_a_changing_list_that_do_not_fit_are_refused_once(
    monkeypatch, caplog
):
    asked = serve(
        monkeypatch,
        a=["Wrong"],
        b=[OTHER_PROTOCOL],
        c=[messages.WireError("damaged")] * 2 + ["Catch"],
    )
    with ServerList([], [FakeSource(["a:1", "b:1", "c:1"])]) as servers:
        assert start(servers).env == "Catch"
    assert asked == ["a:1", "b:1", "c:1"] * 3
    reasons = [
        "a:1: the servers serve Wrong",
        "The environment server b:1 speaks protocol 2",
        "c:1: damaged",
    ]
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("WARNING", f"Refused until it fits the run: {reason}") for reason in reasons
    ]


def test_a_refused_server_is_named_again_if_it_came_back_and_still_does_not_fit(
    monkeypatch, caplog
):
    serve(monkeypatch, b=[OTHER_PROTOCOL, OTHER_PROTOCOL, AWAY, OTHER_PROTOCOL, "X"])
    with ServerList([], [FakeSource(["b:1"])]) as servers:
        assert start(servers).env == "X"
    assert len(caplog.records) == 2


@pytest.mark.parametrize("others", [[], ["b:1"]])
def test_a_start_that_waits_names_the_servers_that_it_has_refused(
    monkeypatch, caplog, others
):
    caplog.set_level("INFO", "core.remote.greet")
    monkeypatch.setattr(greet, "SAY_WAITING_S", 0)
    serve(monkeypatch, a=["Wrong"] * 6 + ["Catch"], b=[AWAY])
    with ServerList([], [FakeSource(["a:1", *others])]) as servers:
        assert start(servers).env == "Catch"
    waits = [r.message for r in caplog.records if r.message.startswith("Waiting for")]
    assert len(waits) == 6 * (1 + len(others))
    assert all("a:1: the servers serve Wrong" in message for message in waits)
    assert sum("b:1 is away; 1 refused: " in message for message in waits) == (
        6 * len(others)
    )


@pytest.mark.parametrize("answer", ["Wrong", OTHER_PROTOCOL, messages.WireError("!")])
def test_a_server_of_a_fixed_list_that_does_not_fit_ends_the_start(monkeypatch, answer):
    asked = serve(monkeypatch, a=[answer], b=["Catch"])
    with ServerList(["a:1", "b:1"]) as servers, pytest.raises(ConfigError):
        start(servers)
    assert asked == ["a:1"]


def test_a_resumed_run_takes_only_servers_of_its_environment(
    monkeypatch, tmp_path, caplog
):
    folder.write_meta(tmp_path, flags={"env": "Catch"}, extra={})
    serve(monkeypatch, a=["Memory"], b=["Catch"])
    changing = FakeSource(["a:1", "b:1"])
    flags = {"savedir": tmp_path.parent, "xpid": tmp_path.name}
    with ServerList([], [changing]) as servers:
        assert start(servers, **flags).env == "Memory"  # There is no checkpoint.
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "step-000000000000.safetensors").touch()
        assert start(servers, **flags).env == "Catch"
    (record,) = caplog.records
    said = f"a:1: the servers serve Memory but run {tmp_path.name} was trained with Cat"
    assert said in record.message


def test_a_server_that_is_slow_to_describe_itself_gets_more_time(monkeypatch):
    limits = []
    serve(monkeypatch)

    def describe(address, *, timeout_s, **kwargs):
        limits.append(timeout_s)
        if timeout_s < 10:
            raise ActorError(f"{address} DEADLINE_EXCEEDED: Deadline Exceeded")
        return "Catch"

    monkeypatch.setattr(greet.libtorchbeast, "describe", describe)
    with ServerList(["a:1"], []) as servers:
        assert start(servers).env == "Catch"
    assert limits == [5, 10]


OBSERVATION, ACTION = gym.spaces.Box(0, 1, (3,)), gym.spaces.Discrete(2)


def arrays(**changes):
    """Return the arrays of a row with these spaces; None leaves one out."""
    result = arrays_of(row_spec(OBSERVATION, ACTION, ("lives",)))
    for name, change in changes.items():
        result = [
            array if array.path[-1] != name else change and replace(array, **change)
            for array in result
        ]
    return tuple(array for array in result if array is not None)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"truncated": None}, "has none for 'truncated', .* need bool"),
        ({"lives": None}, "has none for 'info/lives', but their spaces and --info_k"),
        (
            {"observation": {"shape": (2,)}},
            "has float32.2. for 'observation', .*float32.3",
        ),
        ({"observation": {"dtype": "uint8"}}, "has uint8.3. for 'observation'"),
    ],
)
def test_a_server_must_send_what_its_spaces_say(changes, said):
    welcome = messages.Welcome(
        observation=OBSERVATION,
        action=ACTION,
        step_arrays=arrays(),
        action_arrays=arrays_of(spec_of(ACTION)),
    )
    greet.check_arrays(welcome, ("lives",))
    with pytest.raises(ConfigError, match=f"Welcome.step_arrays {said}"):
        greet.check_arrays(replace(welcome, step_arrays=arrays(**changes)), ("lives",))
    wrong = arrays_of(spec_of(gym.spaces.Box(-1, 1)))
    with pytest.raises(ConfigError, match="Welcome.action_arrays has float32"):
        greet.check_arrays(replace(welcome, action_arrays=wrong), ("lives",))
