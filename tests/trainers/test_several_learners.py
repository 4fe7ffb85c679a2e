# SPDX-License-Identifier: Apache-2.0
"""Runs of two learners: they end together, and go on with any number of learners."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch.distributed import TCPStore

import monobeast
from core.algorithm import learners
from core.environments.toys import Catch
from core.errors import ConfigError
from core.remote.messages import Option, Welcome
from core.remote.places import Places
from core.running import checkpoint
from core.running.folder import read_meta
from tests.conftest import DEADLINE_S, ended, free_ports, wait_until
from tests.normalization_flags import obeyed
from tests.trainers import impatient
from tests.trainers.several import (
    end_patiently,
    environments,
    shorten_limit,
    start_learners,
)
from tools.nemesis.programs import Program
from tools.runs import log_rows, num_rows

T = 5
FLAGS = ["--env", "Catch", "--batch_size", 4, "--unroll_length", T, "--xpid", "x"]
FLAGS += ["--seed", 7, "--log_interval_s", 0]
MONOBEAST = ["--num_actors", 4, "--envs_per_actor", 2, "--learner_cores", 1]
FORKED = [*MONOBEAST, "--start_method", "fork"]  # Each saves the import of torch.
STEPS = 4 * T * 40


@pytest.fixture
def servers(serve):
    """Two servers, one for each of PolyBeast's learners."""
    pytest.importorskip("polybeast", reason="needs the extension")
    return [serve(Catch, num_envs=2) for _ in range(2)]


def addresses_of(servers):
    return ["--server_addresses", ",".join(server.address for server in servers)]


def newest(folder, name="x"):
    return checkpoint.load(folder / "runs" / name / "checkpoints")


def test_two_serial_learners_are_bitwise_the_same_from_run_to_run(start, tmp_path):
    ends = []
    for name in ("a", "b"):
        flags = [*FLAGS, "--serial", "--num_actors", 4, "--total_steps", STEPS]
        flags += ["--replay_ratio", 1, "--use_lstm", *obeyed()]
        programs = start_learners(start, *flags, "--xpid", name)
        for program in programs:
            assert program.wait() == 0, program.text()
        assert "2 learners" in programs[0].text()
        ends.append(newest(tmp_path, name))
    first, second = ends
    assert first.step == second.step == STEPS
    for name, x in first.tensors["model"].items():
        assert torch.equal(second.tensors["model"][name], x), name
    assert first.state["learner"] == second.state["learner"]
    assert first.state["learner"]["episodes"]["games"] == STEPS // 9 // 4 * 4
    assert first.state["flags"]["batch_size"] == 4


def patient_env():
    """Catch in a process that gives the other learners' last words any time."""
    learners.STOP_S = learners.END_S = DEADLINE_S
    return Catch()


def test_a_signal_to_any_learner_stops_all_and_one_learner_goes_on(start, tmp_path):
    run_dir = tmp_path / "runs" / "x"
    flags = [*FLAGS, "--env", f"{__name__}:patient_env"]
    earlier = 0
    for victim, sizes in ((1, MONOBEAST), (0, FORKED)):
        programs = start_learners(start, *flags, *sizes, "--total_steps", 10**7)
        before = num_rows(run_dir)
        wait_until(lambda: num_rows(run_dir) > before + 3)  # noqa: B023
        os.kill(programs[victim].pid, signal.SIGTERM)
        assert [p.wait() for p in programs] == [75, 75], [p.text() for p in programs]
        assert (victim == 1) == ("Stopped by another learner" in programs[0].text())
        found = newest(tmp_path)
        # The last row has all learners' games; none was lost or counted twice.
        games = found.state["learner"]["episodes"]["games"]
        assert int(log_rows(run_dir)[-1]["games"]) == games
        # So has the sum of received rows.
        ledger = re.search(r"received = (\d+) learned", programs[0].text())
        assert int(ledger[1]) == found.step - earlier
        earlier = found.step
    # One after the first update, one at the end of each start.
    assert len(list((run_dir / "checkpoints").glob("step-*"))) == 3
    # Two starts have ended, each in the middle of the games of 8 environments.
    assert found.step / 9 - 2 * 8 <= games <= found.step / 9

    alone = start(*flags, *FORKED, "--total_steps", found.step + STEPS)
    assert alone.wait() == 0, alone.text()
    steps = [int(row["step"]) for row in log_rows(run_dir)]
    assert steps == sorted({*steps})
    assert steps[-1] >= found.step + STEPS


def test_a_run_goes_on_with_more_learners_each_time(start, tmp_path):
    flags = [*FLAGS, "--serial", "--batch_size", 6, "--num_actors", 6]
    steps = 6 * T * 10  # Of each start: five games in each of the six environments.
    rate, ends = 0.0006, []
    for size in (1, 2, 3):
        flags += ["--learning_rate", rate, "--total_steps", steps * size]
        programs = start_learners(start, *flags, size=size)
        assert [p.wait() for p in programs] == [0] * size, programs[0].text()
        ends.append(newest(tmp_path))
        rate = 0  # From now on the weights must stay those of the checkpoint.
    assert [end.step for end in ends] == [steps, 2 * steps, 3 * steps]
    games = [end.state["learner"]["episodes"]["games"] for end in ends]
    assert games == [30, 60, 90]
    for name, x in ends[0].tensors["model"].items():
        assert torch.equal(ends[2].tensors["model"][name], x), name
    logged = [int(row["step"]) for row in log_rows(tmp_path / "runs" / "x")]
    assert logged == sorted({*logged})


def test_a_killed_learner_ends_the_other_with_a_checkpoint(start, tmp_path):
    programs = start_learners(start, *FLAGS, *FORKED, "--total_steps", 10**7)
    run_dir = tmp_path / "runs" / "x"
    wait_until(lambda: num_rows(run_dir) > 2)
    os.kill(programs[1].pid, signal.SIGKILL)
    assert programs[0].wait() == 70, programs[0].text()
    assert programs[0].text().splitlines()[-1] == (
        f"learner 0: LearnerLost: learner 1 of 2 (process {programs[1].pid}) was killed"
    )
    assert newest(tmp_path).step >= int(log_rows(run_dir)[-1]["step"])


def impatient_env():
    """Catch in a process that soon gives up the other, but not the other's end."""
    learners.STOP_S = learners.END_S = 0.3
    end_patiently()
    return Catch()


def test_a_signal_while_another_learner_is_frozen_leaves_a_checkpoint(start, tmp_path):
    run_dir = tmp_path / "runs" / "x"
    env = "tests.trainers.test_several_learners:impatient_env"
    flags = [*FLAGS, *FORKED, "--total_steps", 10**7, "--env", env]
    programs = start_learners(start, *flags)
    wait_until(lambda: num_rows(run_dir) > 2)
    os.kill(programs[1].pid, signal.SIGSTOP)
    os.kill(programs[0].pid, signal.SIGTERM)
    # The end of learner 0 continues learner 1.
    assert [p.wait() for p in programs] == [75, 75], [p.text() for p in programs]
    assert "waits for another learner: it is given up" in programs[0].text()
    assert newest(tmp_path).step == int(log_rows(run_dir)[-1]["step"])


def test_a_learner_whose_servers_are_away_ends_the_run(start, servers, tmp_path):
    flags = [*FLAGS, *addresses_of(servers), "--total_steps", 10**7]
    programs = start_learners(start, *flags, "0", module=impatient.__name__)
    run_dir = tmp_path / "runs" / "x"
    wait_until((run_dir / impatient.LIMITED).exists)
    servers[1].stop()
    assert [p.wait() for p in programs] == [70, 70], [p.text() for p in programs]
    reason = (
        "learner 1 of 2 did not answer within 1 s (--stall_timeout_s): "
        "its environments or servers do not answer, or its process is stopped"
    )
    ends = [program.text().splitlines()[-1] for program in programs]
    assert ends == [
        f"learner 0: LearnerLost: {reason}",
        f"learner 1: LearnerLost: learner 0 of 2 has ended: {reason}",
    ]
    assert newest(tmp_path).step >= int(log_rows(run_dir)[-1]["step"])


LAUNCHER = (sys.executable, "-m", "tools.learners", "--standalone")
LAUNCHER += ("--nproc_per_node", "2", "--no_python")


@pytest.mark.slow
def test_a_stopped_learner_0_ends_the_run_under_its_launcher(servers, tmp_path):
    flags = [*FLAGS, *addresses_of(servers), "--total_steps", 10**7]
    flags = [*map(str, flags), "1"]
    module = impatient.__name__
    with Program(module, tmp_path, *flags, prefix=LAUNCHER) as launcher:
        # torchrun's SIGTERM does not reach learner 0, which has stopped itself.
        assert launcher.wait() == 70, launcher.text()
        wait_until(lambda: not launcher.family())
    said = launcher.text().splitlines()
    reason = (
        "learner 0 of 2 did not answer within 1 s (--stall_timeout_s): "
        "its environments or servers do not answer, or its process is stopped"
    )
    assert f"learner 1: LearnerLost: {reason}" in said
    assert f"learner 0: LearnerLost: learner 1 of 2 has ended: {reason}" in said
    # Learner 0 wrote a last checkpoint, although it was the one that was stopped.
    assert newest(tmp_path).step >= int(log_rows(launcher.run_dir)[-1]["step"]) > 0
    for server in servers:
        server.stop()


@contextlib.contextmanager
def noted_ids(monkeypatch):
    """Yield the set of ids of the streams that begin in this process's servers."""
    ids = set()
    take = Places.take

    def noting(places, hello, context):
        ids.add(hello.run_id)
        return take(places, hello, context)

    with monkeypatch.context() as patch:
        patch.setattr(Places, "take", noting)
        yield ids


def test_each_learner_keeps_an_id_of_its_own(start, servers, tmp_path, monkeypatch):
    flags = [*FLAGS, *addresses_of(servers)]
    port = free_ports(1)
    for starts in (1, 2):
        with noted_ids(monkeypatch) as ids:
            programs = []
            for rank, env in enumerate(environments(2, port)):
                more = ["--total_steps", starts * STEPS]
                more += ["--savedir", tmp_path / f"runs-{rank}"]
                programs.append(start(*flags, *more, module="polybeast", env=env))
            assert [p.wait() for p in programs] == [0, 0], [p.text() for p in programs]
        run_id = read_meta(tmp_path / "runs-0" / "x")["run_id"]
        assert ids == {f"x ({run_id})", f"x ({run_id}, learner 1)"}
    assert not (tmp_path / "runs-1").exists()


def test_servers_of_another_environment_are_refused_in_all_learners(
    start, serve, tmp_path
):
    pytest.importorskip("polybeast", reason="needs the extension")
    options = ({"sticky": 0.0}, {"sticky": 0.25})
    servers = [serve(Catch, num_envs=2, name="Catch", options=x) for x in options]
    flags = [*FLAGS[2:], "--total_steps", STEPS]
    flags += addresses_of(servers)
    programs = start_learners(start, *flags, module="polybeast")
    assert [p.wait() for p in programs] == [78, 78], [p.text() for p in programs]
    for i, program in enumerate(programs):
        assert program.text().splitlines()[-1] == (
            f"learner {i}: ConfigError: learner 1's servers have the option sticky "
            "0.25, but learner 0's have 0.0. Start all servers with the same "
            "environment and the same flags."
        )
    assert not (tmp_path / "runs").exists()


def observation(low):
    lows = np.tile(np.array([0, 1], np.float32), 200)
    lows[100] = low  # The text of the space has no room for it.
    return Box(lows, 1, dtype=np.float32)


def welcome(**changes):
    spaces = {"observation": observation(0.25), "action": Discrete(3)}
    options = (Option("size", 5), Option("sticky", 0.0))
    given = {"env": "Catch", "frames_per_step": 1, "options": options, **spaces}
    return Welcome(**{**given, **changes})


@pytest.mark.parametrize(
    "changes, difference",
    [
        ({"env": "Pitch"}, "env Pitch, but learner 0's have Catch"),
        ({"frames_per_step": 4}, "frames_per_step 4, but learner 0's have 1"),
        ({"options": ()}, "option size (not reported), but learner 0's have 5"),
        ({"options": (Option("size", 5), Option("x", "y"))}, "option sticky (not "),
        ({"action": Discrete(4)}, "action space Discrete(4), but learner 0's have D"),
        (
            {"observation": observation(0.5)},
            "observation space with the checksum ",
        ),
        ({"num_envs": 3, "num_streams": 5, "version": "9"}, None),
    ],
)
def test_differences_of_servers_are_named(monkeypatch, changes, difference):
    greet = pytest.importorskip("core.remote.greet", reason="needs the extension")
    collected = []

    def collect(ours):
        collected.append(ours)
        return [*collected]

    current = SimpleNamespace(collect=collect)
    monkeypatch.setattr(greet.learners, "current", lambda: current)
    greet.check_same_env(welcome())
    greet.check_same_env(welcome())
    if difference is None:
        greet.check_same_env(welcome(**changes))
        return
    with pytest.raises(ConfigError) as error:
        greet.check_same_env(welcome(**changes))
    assert str(error.value).startswith(f"learner 2's servers have the {difference}")


def test_a_difference_counts_although_a_faster_learner_has_ended(monkeypatch):
    greet = pytest.importorskip("core.remote.greet", reason="needs the extension")
    has_ended = threading.Event()

    def check_stop(*args, **kwargs):
        has_ended.set()
        raise learners.LearnerLost("learner 0 of 2 has ended: ConfigError: differs")

    def check_same_env(welcome):
        assert has_ended.wait(DEADLINE_S)
        raise ConfigError("differs")

    current = SimpleNamespace(rank=1, check_stop=check_stop)
    monkeypatch.setattr(greet.learners, "current", lambda: current)
    monkeypatch.setattr(greet.learners, "END_S", DEADLINE_S)
    monkeypatch.setattr(greet, "check_same_env", check_same_env)
    with pytest.raises(ConfigError):
        greet._check_with_others(welcome(), SimpleNamespace(received=None))


# A learner for which the folder --savedir of another machine is empty, and stays so.
ELSEWHERE = """
mount -t tmpfs tmpfs "$1" || exit 99
shift
"$@"
status=$?
[ -z "$(ls -A "$0")" ] || exit 98
exit $status
"""


def test_only_learner_0_has_the_runs_folder(start, start_program, servers, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    shell = ["unshare", "--user", "--map-root-user", "--mount"]
    shell += ["sh", "-c", ELSEWHERE, runs, runs]
    if subprocess.run([*shell, "true"], capture_output=True).returncode:
        pytest.skip("needs mount namespaces")
    flags = [*FLAGS, "--total_steps", STEPS, "--savedir", runs]
    flags += addresses_of(servers)
    envs = environments(2)
    learner_0 = start(*flags, module="polybeast", env=envs[0])
    command = [*shell, sys.executable, "-m", "polybeast", *flags]
    learner_1 = start_program(*command, env={**os.environ, **envs[1]})
    assert learner_0.wait() == 0, learner_0.text()
    assert learner_1.wait() == 0, learner_1.text()
    assert newest(tmp_path).step == STEPS


@pytest.fixture
def give_learner_0_a_server(start, serve):
    """Start learners of which only learner 0 has one; return them when they wait.

    As under torchrun, which keeps the store.
    """
    pytest.importorskip("polybeast", reason="needs the extension")
    server = serve(Catch, num_envs=2)
    flags = [*FLAGS, "--server_addresses", f"{server.address},{server.address}-away"]

    def give(store):
        torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        envs = [env | torchrun for env in environments(2, store.port)]
        programs = [start(*flags, module="polybeast", env=env) for env in envs]
        programs[0].wait_for_text("Waiting until each learner has a server")
        programs[1].wait_for_text("Waiting for an environment server")
        return programs

    return give


@pytest.fixture
def only_learner_0_has_a_server(give_learner_0_a_server):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield give_learner_0_a_server(store)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_signal_ends_both_while_only_learner_0_has_a_server(
    only_learner_0_has_a_server, stopped
):
    programs = only_learner_0_has_a_server
    os.kill(programs[stopped].pid, signal.SIGTERM)
    assert [p.wait() for p in programs] == [75, 75], [p.text() for p in programs]


def test_a_learner_that_is_killed_before_it_has_a_server_ends_the_other(
    only_learner_0_has_a_server,
):
    programs = only_learner_0_has_a_server
    os.kill(programs[1].pid, signal.SIGKILL)
    assert programs[0].wait() == 70, programs[0].text()
    said = f"LearnerLost: learner 1 of 2 (process {programs[1].pid}) was killed"
    assert programs[0].text().splitlines()[-1] == f"learner 0: {said}"


def test_a_learner_without_a_server_ends_after_learner_0_and_its_torchrun(
    give_learner_0_a_server,
):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    programs = give_learner_0_a_server(store)
    programs[0].kill()
    del store
    assert programs[1].wait() == 70, programs[1].text()
    said = "learner 1: LearnerLost: learner 0 of 2 has ended"
    assert said in programs[1].text().splitlines()


def test_wrong_flags_of_one_learner_are_told_to_those_of_other_machines(start):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    programs = []
    for env, batch_size in zip(environments(2, store.port), (4, 5)):
        env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}
        programs.append(start(*FLAGS, *MONOBEAST, "--batch_size", batch_size, env=env))
    assert [p.wait() for p in programs] == [2, 2], [p.text() for p in programs]
    assert "--batch_size is 5 but must be a multiple" in programs[1].text()
    assert programs[0].text().splitlines() == [
        "learner 0: LearnerLost: learner 1 of 2 has ended: its flags are wrong, as its "
        f"output on {socket.gethostname()} says"
    ]


def main(argv: list[str]) -> int:
    """Be torchrun: start a learner, say who it is, and wait for it."""
    learner = os.fork()
    if learner == 0:
        os._exit(monobeast.main(argv))
    print("learner", learner)
    return os.waitstatus_to_exitcode(os.waitpid(learner, 0)[1])


def test_the_learners_of_a_torchrun_that_is_killed_stop(start, tmp_path):
    flags = [*FLAGS, "--serial", "--total_steps", 10**7]
    env = {"TORCHELASTIC_RUN_ID": "none"}
    torchrun = start(*flags, module=__name__, env=env)
    wait_until(lambda: num_rows(tmp_path / "runs" / "x") > 2)
    said = re.search(r"^learner (\d+)$", torchrun.text(), re.M)
    learner = psutil.Process(int(said[1]))
    torchrun.kill()
    try:
        wait_until(lambda: ended([learner]))
    finally:
        if not ended([learner]):
            learner.kill()
    assert newest(tmp_path).step > 0


class SlowInLearner1(Catch):
    def step(self, action):
        if os.environ["RANK"] == "1":
            time.sleep(60)
        shorten_limit(learners.current(), 1.0)
        return super().step(action)


def test_a_serial_learner_names_the_one_it_waits_for(start, tmp_path):
    env = "tests.trainers.test_several_learners:SlowInLearner1"
    flags = ["--serial", "--num_actors", 4, "--total_steps", 10**7]
    flags += ["--env", env]
    programs = start_learners(start, *FLAGS, *flags)
    assert programs[0].wait() == 70, programs[0].text()
    assert programs[0].text().splitlines()[-1] == (
        "learner 0: LearnerLost: learner 1 of 2 did not answer within 1 s "
        "(--stall_timeout_s): its environments or servers do not answer, or its "
        "process is stopped"
    )
    assert newest(tmp_path) is not None
    programs[1].kill()
