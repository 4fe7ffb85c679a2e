# SPDX-License-Identifier: Apache-2.0
"""Several learners do the updates that one learner does with the whole batch."""

import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

import monobeast
from core import proc, ranks
from core.algorithm import agreement, learners, update
from core.algorithm.batch_counts import BatchCounts
from core.algorithm.counters import BusyTime, EpisodeStats
from core.algorithm.learners import LearnerLost
from core.errors import ConfigError, Exit, UsageError
from core.nests import map_nest
from core.rollout import Spaces
from core.running import precision
from core.running.folder import write_meta
from core.running.supervise import start_thread
from tests.algorithm.test_normalization import ACTIONS, VECTOR, T, random_batch
from tests.conftest import DEADLINE_S, wait_until
from tests.normalization_flags import obeyed
from tests.trainers.several import environments, is_stopped, shorten_limit

COLUMNS, UPDATES = 6, 3
FLAGS = ["--env", "Catch", "--disable_cuda", "--unroll_length", str(T)]
FLAGS += ["--num_actors", "6", "--reward_clipping", "none"]
FLAGS += ["--use_lstm", *obeyed(monobeast)]


def whole_batch(seed):
    batch = random_batch(seed=seed, columns=COLUMNS)
    batch["info"]["game_return"][T, : seed + 1] = 7.0  # Some games end.
    batch["info"]["game_step"][T, : seed + 1] = 70
    batch["policy_version"] -= torch.arange(COLUMNS)  # Each with a lag of its own.
    return batch


def do_updates(flags, rank, size):
    """Return the learner after UPDATES updates with its share of each batch."""
    torch.manual_seed(rank)
    learner = monobeast.create_learner(flags, Spaces(VECTOR, ACTIONS))
    if learner.learners is not None:
        learner.learners.share_weights(learner.net)
        learner.learners._last_report = 1e9  # Only the last update has reports.
    share = slice(rank * COLUMNS // size, (rank + 1) * COLUMNS // size)
    for seed in range(UPDATES):
        batch = map_nest(lambda x: x[:, share].contiguous(), whole_batch(seed))
        learner.update(batch, learner.net.initial_state(COLUMNS // size))
    if learner.learners is not None:
        learner.learners.check_weights(learner.net)
    return learner


def results(learner):
    gradient = torch.cat([p.grad.flatten() for p in learner.net.parameters()])
    state = {**learner.state(), "averages": learner.counts.averages.pop()}
    return {"model": learner.net.state_dict(), "gradient": gradient, "state": state}


def parse(*argv):
    steps = UPDATES * COLUMNS * T - COLUMNS  # The last update finishes the run.
    return monobeast.parse_flags(
        [*FLAGS, "--batch_size", str(COLUMNS), "--total_steps", str(steps), *argv]
    )


def be_learner(env, task, folder, argv):
    """Run in a process of its own: be one of several learners."""
    os.environ.update(env)
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])

    def train(flags):
        return task(flags, rank, size, folder)

    try:
        learners.train_together(train, parse(*argv))
    except (learners.LearnerLost, ConfigError, UsageError, RuntimeError) as error:
        (folder / f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")


def save_updates(flags, rank, size, folder):
    learner = do_updates(flags, rank, size)
    torch.save(results(learner), folder / f"{rank}.pt")
    return Exit.DONE


@pytest.fixture
def together(_context, tmp_path):
    """Run a task in several learners; return the errors of those that had one."""
    processes = []

    def run(task, envs=None, argv=lambda rank: []):
        for env in environments(2) if envs is None else envs:
            args = (env, task, tmp_path, argv(int(env["RANK"])))
            processes.append(_context.Process(target=be_learner, args=args))
            processes[-1].start()
        for process in processes:
            process.join(DEADLINE_S)
            assert process.exitcode is not None, "still running"
        files = {int(path.stem): path for path in tmp_path.glob("*.txt")}
        return {rank: path.read_text() for rank, path in files.items()}

    yield run
    for process in processes:
        process.kill()


@pytest.mark.parametrize("size", [2, 3])
def test_the_updates_of_several_learners_are_those_of_one(together, tmp_path, size):
    assert together(save_updates, environments(size)) == {}
    one = results(do_updates(parse(), 0, 1))
    first, *others = (torch.load(tmp_path / f"{i}.pt") for i in range(size))
    error = (first["gradient"] - one["gradient"]).norm()
    assert error < 1e-6 * one["gradient"].norm()  # Of the last update.
    for name, x in one["model"].items():
        torch.testing.assert_close(first["model"][name], x, rtol=0, atol=1e-5)
        for other in others:  # Bit by bit.
            assert torch.equal(other["model"][name], first["model"][name]), name
    assert one["state"]["episodes"]["games"] == 1 + 2 + 3
    averages = first["state"].pop("averages")
    assert averages == pytest.approx(one["state"].pop("averages"), rel=1e-4)
    assert first["state"].keys() == one["state"].keys()
    for name, value in one["state"].items():
        if name != "episodes":
            assert first["state"][name] == value, name
            assert others[0]["state"][name] == value, name
    for name, value in one["state"]["episodes"].items():
        theirs = first["state"]["episodes"][name]
        if isinstance(value, list):
            theirs, value = sorted(theirs), sorted(value)
        assert theirs == pytest.approx(value), name


def differ(flags, rank, size, folder):
    raise AssertionError("never called")


def test_other_flags_than_learner_0s_are_refused_by_all(together):
    errors = together(differ, argv=lambda rank: ["--entropy_cost", f"0.0{rank + 1}"])
    for rank in range(2):
        assert errors[rank] == (
            "UsageError: learner 1 was started with --entropy_cost 0.02, but learner 0 "
            "with --entropy_cost 0.01. Give all learners the same flags."
        )


def succeed(flags, rank, size, folder):
    return Exit.DONE


def test_learners_may_have_other_numbers_of_processes(together):
    """The default depends on the number of cores."""
    sizes = [["--num_actors", "2", "--envs_per_actor", n] for n in ("1", "3")]
    assert together(succeed, argv=lambda rank: sizes[rank]) == {}


def change_weights(flags, rank, size, folder):
    learner = monobeast.create_learner(flags, Spaces(VECTOR, ACTIONS))
    learner.learners.share_weights(learner.net)
    learner.learners.check_weights(learner.net)
    if rank == 1:
        weights = next(learner.net.parameters()).data.view(-1)
        weights[:2] = weights[:2].flip(0)  # The sum stays the same.
    learner.learners.check_weights(learner.net)
    return Exit.DONE


def test_weights_that_differ_are_noticed(together):
    errors = together(change_weights)
    assert "RuntimeError: the learners' weights differ" in errors[0]
    assert errors.keys() == {0, 1}


def write_to_buffers(flags, rank, size, folder):
    learner = monobeast.create_learner(flags, Spaces(VECTOR, ACTIONS))
    x = torch.full((6,), float(rank + 5))
    buffers = {"mean": x, "strided": x.clone()[::2], "int16": x.to(torch.int16)}
    for name, buffer in buffers.items():
        learner.net.register_buffer(name, buffer)
    learner.net.register_buffer("own", x[:1].clone().expand(3), persistent=False)
    learner.learners.check_weights(learner.net)
    names = [*buffers, "own"]
    values = {name: getattr(learner.net, name).tolist() for name in names}
    (folder / f"{rank}.json").write_text(json.dumps(values))
    return Exit.DONE


def test_learners_get_learner_0s_buffers_as_forward_may_write_to_them(
    together, tmp_path
):
    assert together(write_to_buffers) == {}
    for rank in range(2):
        values = json.loads((tmp_path / f"{rank}.json").read_text())
        assert values.pop("own") == [rank + 5] * 3  # No part of the weights.
        assert values == {"mean": [5] * 6, "strided": [5] * 3, "int16": [5] * 6}


def learn_on_another_processor(flags, rank, size, folder):
    agreement.processor_of = lambda device: f"a CPU (model {rank})"
    learner = monobeast.create_learner(flags, Spaces(VECTOR, ACTIONS))
    learner.learners.share_weights(learner.net)
    return Exit.DONE


def test_learners_on_different_processors_are_refused(together):
    errors = together(learn_on_another_processor)
    assert errors[1].startswith(
        "ConfigError: learner 1 learns on a CPU (model 1), but learner 0 on a CPU "
        "(model 0). These round differently"
    )
    assert errors.keys() == {0, 1}


def settle_precision(flags, rank, size, folder):
    has_bfloat16 = rank == int(os.environ["FAST"])
    precision.bfloat16_unit = lambda device: "a unit" if has_bfloat16 else None
    screen = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    flags = precision.settle_precision(flags, folder, screen, "cpu")
    (folder / f"{rank}.txt").write_text(flags.precision)
    return Exit.DONE


@pytest.mark.parametrize("fast, taken", [(0, "bfloat16"), (1, "float32")])
def test_all_learners_take_the_precision_of_learner_0(together, fast, taken):
    envs = [env | {"FAST": str(fast)} for env in environments(2)]
    assert together(settle_precision, envs) == {0: taken, 1: taken}


def end_at_once(flags, rank, size, folder):
    if rank == 1:
        raise RuntimeError("out of luck")
    learners.current().sum({"x": 1.0})
    return Exit.DONE


def test_the_reason_of_a_learner_that_fails_is_told_to_the_others(together):
    errors = together(end_at_once)
    assert errors[1] == "RuntimeError: out of luck"
    assert errors[0] == (
        "LearnerLost: learner 1 of 2 has ended: RuntimeError: out of luck"
    )


@pytest.fixture
def envs_of():
    """Return variables of learners whose store torchrun keeps; VICTIM is a rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(size, victim):
        own = {"TORCHELASTIC_USE_AGENT_STORE": "True", "VICTIM": str(victim)}
        return [env | own for env in environments(size, store.port)]

    return make


def die(flags, rank, size, folder):
    if rank == int(os.environ["VICTIM"]):
        os.kill(os.getpid(), signal.SIGKILL)
    learners.current().sum({"x": 1.0})
    return Exit.DONE


@pytest.mark.parametrize("victim", [0, 2])
def test_a_learner_that_is_killed_is_named(together, envs_of, victim):
    errors = together(die, envs_of(3, victim))
    assert errors.keys() == {*range(3)} - {victim}
    for error in errors.values():
        assert f"learner {victim} of 3 (process " in error and ") was killed" in error


def wait_for_data(flags, rank, size, folder):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(lambda: learners.current().check_stop(False))
    return Exit.DONE


def test_a_learner_without_data_notices_the_end_of_learner_0(together):
    """Without torchrun: learner 0 keeps the store, which is gone with it."""
    errors = together(wait_for_data, environments(2))
    assert errors == {1: "LearnerLost: learner 0 of 2 has ended"}


def hang(flags, rank, size, folder):
    others = learners.current()
    if rank == int(os.environ["VICTIM"]):
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        wait_until(lambda: is_stopped(others, 1 - rank))
        shorten_limit(others, 1.0)
    # As a run does. The main thread looks whether the other learner has ended: gloo may
    # wait for its whole limit if a connection closes while it begins to send.
    update = start_thread("learner", others.sum, {"x": 1.0})
    wait_until(lambda: others.check_stop(False) or update.done())
    update.result()
    return Exit.DONE


@pytest.mark.parametrize("victim", range(2))
def test_a_learner_that_is_frozen_is_named_after_a_limit(together, envs_of, victim):
    errors = together(hang, envs_of(2, victim))
    reason = f"learner {victim} of 2 did not answer within 1 s (--stall_timeout_s)"
    assert errors[1 - victim].startswith(f"LearnerLost: {reason}")
    # The other learner has continued it.
    assert errors[victim].startswith(
        f"LearnerLost: learner {1 - victim} of 2 has ended: {reason}"
    )


def come_late(flags, rank, size, folder):
    others = learners.current()
    if rank == 0:
        wait_until(lambda: others._read("waits") is not None)
        learners.END_S = 0.0
        shorten_limit(others, 1.0)
    if rank == 2:
        wait_until(lambda: others._read("end/0") is not None)
    else:
        update = start_thread("learner", others.sum, {"x": 1.0})
        wait_until(lambda: others.waits_since or update.done())
        others.check_stop(False)
        others._tell("waits", "")
        update.result()
    return Exit.DONE


def test_a_learner_that_also_waits_is_not_named_for_one_that_does_not_come(
    together, envs_of
):
    """Its own limit is far, since its data came later."""
    errors = together(come_late, envs_of(3, 2))
    assert errors[0].startswith("LearnerLost: learner 2 of 3 did not answer within")


IN_CONTAINERS = """
import sys
from core.algorithm import learners
from tests.trainers.several import shorten_limit
found = learners.Learners(limit_s=60.0)
found.connect()
if found.rank == 1:
    sys.stdin.read()  # It hangs.
shorten_limit(found, 1.0)
try:
    found.collect(0)
except learners.LearnerLost as error:
    print(error)
"""


def test_a_learner_in_another_container_is_not_taken_for_a_killed_one(start_program):
    """The containers share the host's name, but not the numbers of processes."""
    shell = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    shell += ["--mount-proc"]
    if subprocess.run([*shell, "true"], capture_output=True).returncode:
        pytest.skip("needs namespaces of process ids")
    programs = [
        start_program(
            *(*before, sys.executable, "-c", IN_CONTAINERS),
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
        )
        for before, env in zip((shell, ()), environments(2))
    ]
    assert programs[0].wait() == 0, programs[0].text()
    assert "learner 1 of 2 did not answer within 1 s" in programs[0].text()


def agree_to_stop(flags, rank, size, folder):
    others = learners.current()
    has_signal = rank == int(os.environ["VICTIM"])
    wait_until(lambda: others.check_stop(has_signal) or others.wants_stop)
    # Of how many learners the next update knows that they want to stop.
    (folder / f"{rank}.txt").write_text(f"{others.sum({'stop': others.wants_stop})}")
    others.is_over = True
    return Exit.STOPPED


@pytest.mark.parametrize("victim", [0, 2])
def test_all_learners_hear_of_a_signal_to_any(together, envs_of, victim):
    said = together(agree_to_stop, envs_of(3, victim))
    assert said == dict.fromkeys(range(3), "{'stop': 3.0}")


def wait_and_say(flags, rank, size, folder):
    others = learners.current()
    learners.SAY_WAITING_S = 0.0
    if rank == 0:
        waiting = start_thread("learner", others.sum, {"x": 1.0})
        wait_until(lambda: others.waits_since)
        warnings = []
        learners.log.addFilter(lambda record: warnings.append(record.getMessage()))
        wait_until(lambda: others.check_stop(False) or warnings)
        (folder / "0.txt").write_text(warnings[0])
        others._tell("said", "")
        waiting.result(DEADLINE_S)
    else:
        wait_until(lambda: others._read("said") is not None)
        others.sum({"x": 1.0})
    return Exit.DONE


def test_a_learner_that_waits_for_another_says_so(together):
    said = together(wait_and_say)
    assert said.keys() == {0}
    assert re.fullmatch(r"Waiting for another learner for \d+ s", said[0])


class Lost(learners.Learners):
    """The connection to a learner that is killed when statistics are exchanged."""

    def __init__(self):
        self.has_agreed_to_stop = self.is_report_due = False
        self.waits_since = 0.0

    def sum_gradients(self, net):
        pass

    def sum_update(self, sums):
        return sums

    def gather(self, x):
        raise LearnerLost("learner 1 was killed")


def test_a_learner_that_is_killed_within_an_update_leaves_nothing_of_it(monkeypatch):
    monkeypatch.setattr(update, "current", Lost)
    learner = monobeast.create_learner(parse(), Spaces(VECTOR, ACTIONS))
    before = {k: x.clone() for k, x in learner.net.state_dict().items()}
    with pytest.raises(LearnerLost):
        learner.update(whole_batch(0), learner.net.initial_state(COLUMNS))
    assert learner.step == learner.updates == 0
    for name, x in learner.net.state_dict().items():
        assert torch.equal(x, before[name]), name


def say_hello(flags, rank, size, folder):
    assert learners.current().sum({"x": rank + 1.0}) == {"x": 3.0}
    return Exit.DONE


def test_learners_meet_again_when_torchrun_starts_them_again(together):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for restarts in ("0", "1"):  # torchrun keeps its store, and all that is in it.
        agents = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        agents["TORCHELASTIC_RESTART_COUNT"] = restarts
        envs = [env | agents for env in environments(2, store.port)]
        assert together(say_hello, envs=envs) == {}


def test_a_port_in_use_is_one_clear_line(together):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        errors = together(differ, envs=environments(2, port)[:1])
    assert errors[0].startswith(
        "ConfigError: learner 0 of 2 cannot connect to the other learners at "
        f"127.0.0.1:{port}: "
    )
    assert "another --master_port" in errors[0]
    assert "\n" not in errors[0]


def test_an_error_of_this_machine_s_network_is_not_blamed_on_another_learner(
    together, envs_of
):
    envs = [env | {"GLOO_SOCKET_IFNAME": "nowhere"} for env in envs_of(2, 0)]
    errors = together(differ, envs=envs)
    own = [f"ConfigError: learner {rank} of 2 cannot connect" for rank in range(2)]
    for rank, text in errors.items():  # Whoever is late reads what the other one said.
        told = f"LearnerLost: learner {1 - rank} of 2 has ended: {own[1 - rank]}"
        assert text.startswith((own[rank], told))
        assert "nowhere" in text
    assert len(errors) == 2


def test_a_port_of_a_program_that_never_answers_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(learners, "START_S", 0.1)
    monkeypatch.setattr(learners, "END_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, value in environments(2, silent.getsockname()[1])[1].items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=r": no answer within 0.1 s\. If another"):
            learners.train_together(None, parse())


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_of_torchrun_is_one_clear_line(together, name):
    env = environments(2)[0] | {name: ""}
    assert together(say_hello, [env])[0].startswith(
        f"ConfigError: WORLD_SIZE is 2, but {name} is not set. Start several learners"
    )


def test_a_host_that_does_not_resolve_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(ranks, "NAME_S", 0.0)
    (_, env) = environments(2, port=1)
    for name, value in (env | {"MASTER_ADDR": "nowhere.invalid"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        learners.train_together(lambda flags: Exit.DONE, parse())
    assert str(error.value).startswith(
        "--master_addr (MASTER_ADDR) is nowhere.invalid, which "
    )
    assert "\n" not in str(error.value)


def test_a_learner_that_does_not_come_is_named(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(learners, "START_S", 2.0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    flags = parse("--stall_timeout_s", "1")
    for rank, message in (
        (1, "learner 0 and learner 2 of 3 did not connect within 2 s."),
        (2, "learner 1 of 3 has ended: learner 0 and learner 2 of 3 did not connect"),
    ):
        for name, value in environments(3, store.port)[rank].items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LearnerLost) as error:
            learners.train_together(lambda flags: Exit.DONE, flags)
        assert str(error.value).startswith(message)
        assert error.value.status == Exit.INTERNAL


def test_a_learner_that_is_frozen_while_the_learners_connect_is_named(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    PrefixStore("start/0", store).set("process/1", "1 elsewhere")
    monkeypatch.setattr(learners, "END_S", 0.0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for name, value in environments(2, store.port)[0].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LearnerLost, match="^learner 1 of 2 did not answer within 1 s"):
        learners.train_together(None, parse("--stall_timeout_s", "1"))


def test_a_learner_that_ends_while_another_one_opens_the_group_is_named(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = PrefixStore("start/0", store)
    shared.set("process/1", "1 elsewhere")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for name, value in environments(2, store.port)[0].items():
        monkeypatch.setenv(name, value)

    def end_as_learner_1(*args, store, **kwargs):
        shared.set("end/1", f"{int(Exit.INTERNAL)} no network")
        shared.set("ended", "1")
        store.wait(["learner 1"], datetime.timedelta(seconds=DEADLINE_S))

    monkeypatch.setattr(dist, "init_process_group", end_as_learner_1)
    with pytest.raises(LearnerLost, match="^learner 1 of 2 has ended: no network"):
        learners.train_together(None, parse())
    shared.set("group/learner 1", "")


@pytest.mark.parametrize("size", [2, 3])
def test_without_torchrun_learner_0_keeps_the_store_for_its_last_words(
    monkeypatch, size
):
    """Of 2 learners its own network fails it, of 3 the last one does not come."""
    env = environments(size)[0]
    for name, value in (env | {"GLOO_SOCKET_IFNAME": "nowhere"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(learners, "START_S", 0.1)
    monkeypatch.setattr(learners, "END_S", DEADLINE_S)
    connected, open_store = threading.Event(), learners._open_store

    def be_learner_1():
        port = int(env["MASTER_PORT"])
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store = PrefixStore("start/0", store)
        store.set("process/1", f"{os.getpid()} {proc.place()}")
        connected.set()
        store.wait(["end/0"], datetime.timedelta(seconds=DEADLINE_S))
        words = store.get("end/0").decode()
        for rank in range(1, size):
            store.set(f"end/{rank}", str(int(Exit.INTERNAL)))
        return words

    def open_until_learner_1_has_connected(limit_s, **options):
        store = open_store(DEADLINE_S, **options)
        assert connected.wait(DEADLINE_S)
        return store

    monkeypatch.setattr(learners, "_open_store", open_until_learner_1_has_connected)
    learner_1 = start_thread("learner-1", be_learner_1)
    with pytest.raises((LearnerLost, ConfigError)) as error:
        limit_s = {2: DEADLINE_S, 3: 1.0}[size]
        flags = parse("--stall_timeout_s", str(limit_s))
        learners.train_together(lambda flags: Exit.DONE, flags)
    texts = {
        2: "ConfigError: learner 0 of 2 cannot connect to the other learners at ",
        3: "learner 2 of 3 did not connect within 1 s",
    }
    assert str(error.value).startswith(texts[size].removeprefix("ConfigError: "))
    assert learner_1.result().startswith(f"{int(Exit.INTERNAL)} {texts[size]}")


def test_a_learner_with_wrong_flags_ends_after_those_of_other_machines(monkeypatch):
    """Its torchrun may keep the store, which they could not read afterwards."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    for name, value in environments(2, store.port)[0].items():
        monkeypatch.setenv(name, value)
    shared = learners._open_store(DEADLINE_S)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        shared.set("process/1", "1 elsewhere")

    monkeypatch.setattr(learners.time, "sleep", sleep)
    learners.tell_flags_are_wrong()
    assert shared.get("ended") == b"0"
    # At least one look that did not find learner 1, and one that did.
    assert len(waits) >= 3 and waits[-1] == learners.END_S


def tell_trained_env(flags, rank, size, folder):
    from core.remote import greet  # It needs the extension.

    flags.savedir = folder / f"runs-{rank}"
    (folder / f"{rank}.txt").write_text(str(greet._trained_env(flags)))
    return Exit.DONE


def test_all_learners_know_the_environment_of_the_run_in_learner_0s_folder(
    together, tmp_path
):
    pytest.importorskip("libtorchbeast", reason="needs the extension")
    run_dir = tmp_path / "runs-0" / "x"
    (run_dir / "checkpoints" / "step-1").mkdir(parents=True)
    write_meta(run_dir, flags={"env": "Catch"}, extra={})
    found = together(tell_trained_env, argv=lambda rank: ["--xpid", "x"])
    assert found == {0: "Catch", 1: "Catch"}


def test_a_store_that_another_thread_gives_up_during_a_call_is_no_crash(monkeypatch):
    found = object.__new__(learners.Learners)

    class Store:
        def check(self, keys):
            found._store = None
            return True

        def get(self, key):
            return b"1"

    found._store = Store()
    assert found._read("ended") == "1"
    assert found._read("ended") is None
    found.rank, found.size, found._waits = 1, 2, 1
    assert not found._have_all_connected()
    monkeypatch.setattr(learners, "END_S", 0.0)
    lost = found._explain(RuntimeError("Broken pipe"), is_late=False)
    assert str(lost) == "lost learner 0 of 2: Broken pipe"


def test_a_host_may_become_known_late(monkeypatch):
    answers = [socket.gaierror(socket.EAI_NONAME, "not known"), []]

    def getaddrinfo(*args):
        if isinstance(answer := answers.pop(0), OSError):
            raise answer

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    ranks.check_host("--master_addr", "late")
    assert answers == []


def test_learner_0_counts_what_the_others_report_once(monkeypatch):
    flags = parse()
    monkeypatch.setattr(ranks, "size", lambda: 2)
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    first, other = BatchCounts(flags), BatchCounts(flags)
    for counts in (first, other):  # Both have resumed.
        counts.restore({"stale": 7, "episodes": EpisodeStats().state()})
    other.discard_restored()
    ended = {"game_return": np.array([[np.nan], [9.0]])}
    ended |= {"game_step": np.array([[np.nan], [4.0]])}
    game = {"done": np.zeros((2, 1), bool), "episode_return": np.zeros((2, 1))}
    for stale in (3, 5):
        for counts, value in ((first, 1.0), (other, 4.0)):
            counts.stale += stale
            counts.averages.add(x=value)
            counts._add_games({**game, "info": ended})
        learner_1 = SimpleNamespace(rank=1, columns={})
        first.add_reports([other.take_report(learner_1, BusyTime())])
    assert first.stale == 7 + 2 * (3 + 5)
    assert first.averages.pop() == {"x": 2.5}
    assert first.episodes.columns()["games"] == 4


def test_sums_over_learners_keep_the_digits_of_float64(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda sums: sums.mul_(2))
    sums = learners.Learners(limit_s=1.0).sum({"target_square": 1e10 + 1})
    assert sums == {"target_square": 2e10 + 2}


@pytest.mark.parametrize("serial", [False, True])
def test_reports_of_a_serial_run_do_not_come_by_the_clock(monkeypatch, serial):
    """Otherwise the order of games in a checkpoint would depend on a run's speed."""
    for name, value in environments(2, port=1)[0].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(learners.Learners, "connect", lambda self: None)
    monkeypatch.setattr(learners.Learners, "end", lambda self, *_: None)
    monkeypatch.setattr(learners.Learners, "sum", lambda self, numbers: numbers)
    monkeypatch.setattr(learners.agreement, "check_flags", lambda *_: None)
    monkeypatch.setattr(learners.ranks, "record_status", lambda _: None)
    due = []

    def train(flags):
        for _ in range(3):
            learners.current().sum_update({"grad_norm": 1.0})
            due.append(learners.current().is_report_due)

    monkeypatch.setattr(learners, "REPORT_S", 1e9)
    flags = SimpleNamespace(serial=serial, on_stall="stop", stall_timeout_s=1.0)
    learners.train_together(train, flags)
    assert due == [serial] * 3
