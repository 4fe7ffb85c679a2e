# SPDX-License-Identifier: Apache-2.0
"""The nemesis is not blind: what it should find is put in its way."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest

from core.environments.stepping import Environments
from core.nests import map_nest
from tests import counting_env
from tests.conftest import DEADLINE_S, wait_until
from tools.nemesis import __main__ as program
from tools.nemesis import clock, hangs, kills, playground, soak
from tools.nemesis.playground import K, Ledger, T
from tools.nemesis.result import Result


def rollouts(num, *, incarnation=0):
    """Return the first rollouts of a stream's life, [T + 1, K, ...] each."""
    envs = Environments(
        counting_env.make, K, seed=3, first_env_id=2, incarnation=incarnation
    )
    rng = np.random.default_rng(0)
    rows = []
    for i in range(num * T + 1):
        rows.append(envs.zero_rows())
        if i == 0:
            envs.reset(rows[0])
        else:
            envs.step(rng.integers(counting_env.NUM_ACTIONS, size=K), rows[-1])
    return [
        map_nest(lambda *x: np.stack(x), *rows[i * T : i * T + T + 1])
        for i in range(num)
    ]


def check(*found):
    ledger = Ledger()
    for rollout in found:
        ledger.check_rollout(rollout)
    return ledger.spliced, ledger.duplicated, len(ledger.gaps())


def test_whole_rollouts_pass_in_any_order():
    a, b, c = rollouts(3)
    d, e, _ = rollouts(3, incarnation=1)
    assert check(a, d, b, e, c) == (0, 0, 0)
    assert check(c, d, a, e, b) == (0, 0, 0)


def test_a_rollout_that_comes_twice_is_seen():
    a, b, c = rollouts(3)
    assert check(a, b, b, c) == (0, 1, 0)
    assert check(a, b, c, a) == (0, 1, 0)


def test_a_missing_rollout_is_seen():
    a, _, c, d, _, f = rollouts(6)
    assert check(a, c, d, f) == (0, 0, 2)


def splice_lives(a, b):
    """Let another life go on in the middle of a rollout."""
    return map_nest(lambda x, y: np.concatenate([x[:9], y[9:]]), a, b)


def splice_columns(a, b):
    return map_nest(lambda x, y: np.concatenate([x[:, :1], y[:, 1:]], axis=1), a, b)


@pytest.mark.parametrize("splice", [splice_lives, splice_columns])
def test_a_rollout_of_two_is_seen(splice):
    a, b = rollouts(2)
    c, d = rollouts(2, incarnation=1)
    assert check(a, splice(b, d)) == (1, 0, 0)
    assert check(c, splice(a, b)) == (1, 0, 0)


def test_a_rollout_that_does_not_begin_where_the_last_one_ended_is_seen():
    a, b = rollouts(2)
    b["info"]["game_return"][0] = 7.0  # Its own rows do not tell.
    assert check(a, b)[0] == 1
    assert check(b, a)[0] == 1


def run(capsys, *argv):
    """Run a figure; return its exit status and its line."""
    status = program.main([*argv, "--num_servers", "2"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_learner_that_learns_twice_and_loses_fails(capsys, monkeypatch):
    whole = Ledger.check
    times = itertools.chain([1, 1, 0, 1, 2], itertools.repeat(1))

    def unsound(self, batch):
        for _ in range(next(times)):
            whole(self, batch)

    monkeypatch.setattr(Ledger, "check", unsound)
    monkeypatch.setattr(playground, "QUIET_S", 0.1)  # What leaks is not the point.
    status, line = run(capsys, "kills", "--count", "1")
    assert status == 1
    lanes = playground.LANES
    assert line["rollouts_duplicated"] == line["rollouts_missing"] == lanes
    assert line["steps_lost"] == lanes * T * K


def test_too_few_faults_fail(capsys, monkeypatch):
    few = Result({"kills": 2}, {"kills": 3}, {})
    monkeypatch.setattr(kills, "measure", lambda flags: few)
    status, line = run(capsys, "kills", "--count", "3")
    assert status == 1
    assert line["failures"] == ["injected 2 kills, asked for 3"]


def test_a_folder_may_have_the_name_of_the_figure(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kills, "measure", lambda flags: Result({}, {}, {}))
    status, line = run(capsys, "--out", "kills", "kills", "--count", "3")
    assert status == 0
    assert line["command"].endswith(" kills --count 3 --num_servers 2")
    assert (tmp_path / "kills" / "kills.json").exists()


@pytest.mark.parametrize("form, status", [([], 1), (["--short"], 0)])
def test_to_be_late_fails_but_in_the_short_form(capsys, monkeypatch, form, status):
    late = Result({}, {}, {})
    late.require_time(False, "back after 3 s")
    monkeypatch.setattr(kills, "measure", lambda flags: late)
    assert run(capsys, *form, "kills")[0] == status
    monkeypatch.setattr(program, "FIGURES", {"kills": []})
    assert program.main(form or ["--all"]) == status
    *_, line = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["passed"], line["late"]) == (False, ["back after 3 s"])


def test_hangs_that_are_not_found_and_stacks_that_are_missing_are_seen():
    lines = [
        (11.5, "server-0 hangs in python at 11.0"),
        (11.6, "server-1 hangs in c at 11.5"),
        (12.0, "Server 3 hangs: a step has taken 1 s"),
        (12.25, "Server 0 hangs: a step has taken 1 s"),
        (12.5, '  File "environments.py", line 7 in hang_in_python'),
    ]
    hung, found_s, stacks = hangs.read(lines)
    assert hung == {"python": 1, "c": 1}
    assert found_s == [1.25]
    assert stacks == {"python": 1, "c": 0}


def test_a_process_that_grows_is_seen_among_noise():
    rng = np.random.default_rng(0)
    hours = np.linspace(0, 1, 500)
    mb = 100 + 5 * hours + rng.normal(size=500) / 10
    samples = [(h, m, 20 + (h > 0.5)) for h, m in zip(hours, mb, strict=True)]
    grown = soak.slope(samples, length_s=3600)
    assert abs(grown["mb_per_hour"] - 5) < 4 * grown["+-"] < 0.5
    assert grown["fds_grown"] == 1


READS_AND_WAITS = """
import ctypes, time
print(time.time(), time.monotonic(), flush=True)
input()
print(time.time(), time.monotonic(), flush=True)
in_an_hour = (ctypes.c_long * 2)(int(time.time()) + 3600, 0)
print("waits", flush=True)
ctypes.CDLL(None).sem_timedwait(ctypes.create_string_buffer(32), in_an_hour)
print("waited", flush=True)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="preloads a library"
)
def test_a_wall_clock_that_is_set_moves_what_is_read_and_what_waits_and_no_other():
    with (
        clock.WallClock() as wall_clock,
        subprocess.Popen(
            [sys.executable, "-c", READS_AND_WAITS],
            env={**os.environ, **wall_clock.variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        first = [float(word) for word in process.stdout.readline().split()]
        wall_clock.set_shift(-clock.DAY_S)
        process.stdin.write("\n")
        process.stdin.flush()
        second = [float(word) for word in process.stdout.readline().split()]
        assert process.stdout.readline() == "waits\n"
        wall_clock.set_shift(clock.DAY_S)
        assert process.communicate(timeout=60)[0] == "waited\n"
    elapsed = second[1] - first[1]
    assert 0 <= elapsed < clock.DAY_S / 2
    assert abs(second[0] - first[0] - elapsed + clock.DAY_S) < clock.DAY_S / 2


def test_jumps_of_a_clock_are_read_from_the_dates_of_a_log():
    days = ["2026-11-23", "2026-11-23", "2026-11-24", "2026-11-23"]
    lines = [f"{day} 10:00:00 INFO    step 1" for day in days]
    assert clock.jumps_in([*lines[:3], "Traceback", *lines[3:]]) == 2
    assert clock.jumps_in(lines[:2]) == 0


def test_sigterm_ends_the_runs_of_a_figure_too(tmp_path):
    command = [sys.executable, "-m", "tools.nemesis", "signals"]
    nemesis = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)})
    wait_until(lambda: any(tmp_path.glob("tb*/runs/*/out.log")))
    (run,) = psutil.Process(nemesis.pid).children()
    nemesis.terminate()
    assert nemesis.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert not run.is_running()
    assert not any(tmp_path.iterdir())
