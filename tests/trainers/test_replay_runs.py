# SPDX-License-Identifier: Apache-2.0
"""Runs with --replay_ratio: what they log adds up, in every way to run them."""

import re
from types import SimpleNamespace

import pytest

import monobeast
from core.actors import prepare
from core.errors import ConfigError
from core.remote import messages, pool
from core.remote.greet import complete_flags
from tests.actors.pool import make_flags
from tests.trainers.test_training import differences
from tools.runs import log_rows

NEW, REPLAYED, CAPACITY, T = 2, 4, 12, 5
UPDATES = 40
STEPS = NEW * T * UPDATES
FLAGS = ["--env", "Catch", "--batch_size", NEW + REPLAYED, "--unroll_length", T]
FLAGS += ["--replay_ratio", 2, "--replay_capacity", CAPACITY, "--seed", 7]
FLAGS += ["--log_interval_s", 0, "--total_steps", STEPS]
MONOBEAST = ["--num_actors", 2, "--envs_per_actor", 2]
POLYBEAST = ["--num_servers", 1, "--streams_per_server", 2, "--envs_per_stream", 2]


def replayed_columns(rows):
    return [
        tuple(float(row[f"replay_{name}"]) for name in ("policy_lag_mean", "mean_rho"))
        for row in rows
        if row["replay_mean_rho"]
    ]


@pytest.mark.parametrize(
    "module, flags",
    [
        ("monobeast", [*MONOBEAST, "--start_method", "fork", "--use_lstm"]),
        ("polybeast", [*POLYBEAST, "--use_lstm"]),
    ],
)
def test_what_a_run_with_replay_logs_adds_up(start, tmp_path, module, flags):
    program = start(*FLAGS, *flags, "--xpid", "x", module=module)
    assert program.wait() == 0, program.text()
    text = program.text()
    assert "each batch has 2 new and 4 replayed rollouts, from the last 12" in text
    learned = re.search(r"rows received = (\d+) learned \+ 0 stale", text)
    assert int(learned.group(1)) == STEPS  # Catch truncates nothing.
    rows = log_rows(tmp_path / "runs" / "x")
    last = rows[-1]
    assert (int(last["step"]), int(last["updates"])) == (STEPS, UPDATES)
    columns = replayed_columns(rows)
    assert columns
    new_lags = [float(row["policy_lag_mean"] or 0) for row in rows]
    for lag, rho in columns:
        assert 0 < lag <= CAPACITY // NEW + max(new_lags) + 2  # Threads take turns.
        assert 0 < rho <= 1.0001


def test_a_serial_run_with_replay_is_exact_until_it_is_resumed(start, tmp_path):
    serial = [*FLAGS, *MONOBEAST, "--serial"]
    programs = [start(*serial, "--xpid", xpid) for xpid in "ab"]
    assert [program.wait() for program in programs] == [0, 0], programs[0].text()
    a, b = (tmp_path / "runs" / xpid for xpid in "ab")
    assert differences(a, b) == []
    rows = log_rows(a)
    assert [int(row["step"]) for row in rows] == list(range(10, STEPS + 1, 10))
    # Four rollouts are there when the third update begins. Twelve are there from the
    # seventh on, and they are 1 to 6 updates old.
    assert [bool(row["replay_mean_rho"]) for row in rows[:4]] == [False] * 2 + [
        True
    ] * 2
    lags = [lag for lag, _ in replayed_columns(rows)]
    assert len(lags) == UPDATES - 2
    assert all(1 <= lag <= min(i + 2, 6) for i, lag in enumerate(lags))
    assert 3 < sum(lags[4:]) / len(lags[4:]) < 4  # 3.5 is expected.
    assert all(float(row["policy_lag_mean"]) == 0 for row in rows)
    assert all(float(row["mean_rho"]) == pytest.approx(1, abs=1e-4) for row in rows)
    resumed = start(*serial, "--xpid", "a", "--total_steps", STEPS + 40)
    assert resumed.wait() == 0, resumed.text()
    assert "so this run is not equal to one without the interruption" in resumed.text()
    more = log_rows(a)[len(rows) :]
    assert [bool(row["replay_mean_rho"]) for row in more] == [False] * 2 + [True] * 2


# ------------------------------------------------------------- servers and memory


@pytest.mark.parametrize(
    "replay_ratio, num_envs, said, remedy",
    [
        (0, 8, "--batch_size is 12 but", "Try --batch_size 16, or"),
        (  # 10 new rollouts.
            *(0.5, 5, "rollouts in a batch is 8 (--batch_size 12, --repl"),
            "Try --batch_size 15, or",
        ),
    ],
)
def test_servers_with_streams_of_another_size_are_refused_with_the_remedy(
    replay_ratio, num_envs, said, remedy
):
    flags = SimpleNamespace(batch_size=12, replay_ratio=replay_ratio)
    catch = monobeast.read_env(make_flags("Catch"))[0]
    spaces = {"observation": catch.observation, "action": catch.action}
    with pytest.raises(ConfigError) as error:
        complete_flags(flags, messages.Welcome(num_envs=num_envs, **spaces))
    for part in (said, f"multiple of the servers' --envs_per_stream ({num_envs})"):
        assert part in str(error.value)
    assert remedy in str(error.value)


def test_a_replay_that_does_not_fit_into_shared_memory_is_refused():
    flags = make_flags("Catch", "--replay_ratio", "1", "--replay_capacity", "10G")
    spaces = monobeast.read_env(flags)[0]
    net, outputs = monobeast.create_net(flags, spaces), monobeast.net_outputs(spaces)
    with pytest.raises(ConfigError, match=r"for the replay\).*Lower --replay_capacity"):
        prepare.create_buffers(flags, spaces, net, outputs)


def test_a_replay_that_does_not_fit_into_memory_is_refused(caplog):
    spaces = monobeast.read_env(make_flags("Catch"))[0]
    sizes = {"replay_ratio": 1, "batch_size": 6, "unroll_length": T, "info_keys": ()}
    sizes |= {"num_learner_threads": 2, "max_learner_queue_size": 3}
    outputs = monobeast.net_outputs(spaces)
    flags = SimpleNamespace(**sizes, replay_capacity=60)
    with caplog.at_level("INFO"):
        pool.check_memory(flags, spaces, outputs, 4)
    # 8 and 3, three batches of 3 new ones, 60 and 3 in the replay, two batches of 6.
    assert "memory: 95 rollouts need" in caplog.text
    flags = SimpleNamespace(**sizes, replay_capacity=10**10)
    with pytest.raises(ConfigError, match="Lower --replay_capacity, --max_learner_que"):
        pool.check_memory(flags, spaces, outputs, 4)
    sizes |= {"replay_ratio": 0, "max_learner_queue_size": 10**9}
    with pytest.raises(ConfigError) as error:
        pool.check_memory(SimpleNamespace(**sizes), spaces, outputs, 6)
    # Two of each environment, and three batches of 6.
    said = r"memory: 1000000030 rollouts need ([\d,.]+) MiB, have ([\d,.]+) MiB. "
    said += "Lower --max_learner_queue_size"
    need, have = re.match(said, str(error.value)).groups()
    # A row of Catch: 50 floats, and 67 bytes of all else.
    need, have = (float(mib.replace(",", "")) for mib in (need, have))
    assert need > have > 0 and need > 10**9 * 6 * 200 / 2**20
