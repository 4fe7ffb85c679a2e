# SPDX-License-Identifier: Apache-2.0
"""The nemesis is not blind: what it looks for, it finds where it has been put."""

import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from core.nests import map_nest
from core.running import checkpoint
from tests.actors.pool import Pool, make_flags
from tests.fault_env import FaultEnv
from tools.nemesis import actors, checkpoints, faulty, learning, signals
from tools.nemesis.programs import came_true, is_saving, wait_for


@pytest.fixture
def rng():
    return random.Random(1)


# ------------------------------------------------------------------------- checkpoints


def save_over_the_old_one(directory, **contents):
    """Save as to a file of one name: from the first byte on the old one is gone."""
    for path in directory.glob("step-*"):
        path.unlink()
    checkpoint.save(directory, **contents)


def test_kills_find_a_save_that_is_not_atomic(tmp_path, rng):
    seen: Counter[str] = Counter()
    while seen["unreadable"] == 0:  # All kills may come after the save's last step.
        folder = tmp_path / f"after-{seen['kills']}"
        seen += checkpoints.kill_in_saves(folder, 5, rng, save_over_the_old_one)
    assert seen["in_a_save"] > 0


def test_mutations_find_a_checkpoint_that_is_not_verified(tmp_path, rng, monkeypatch):
    assert checkpoints.mutate_many(tmp_path / "ours", 30, rng) == {
        "injected": 30,
        "detected": 30,
        "fell_back": 30,
    }
    monkeypatch.setattr(checkpoint, "_digest", lambda data, start, end: data[start:end])
    seen = checkpoints.mutate_many(tmp_path / "theirs", 30, rng)
    assert seen["detected"] < seen["injected"] == 30
    assert seen["fell_back"] < 30


# ----------------------------------------------------------------------------- signals

SAID = "Run x in /tmp\nStopped by SIGTERM at step 60. The same command goes on"


@pytest.mark.parametrize(
    "text, status, before, step, wrong",
    [
        (SAID, 75, 40, 60, None),
        ("", 75, 40, 40, None),  # PolyBeast before it knows its environment.
        ("", -signal.SIGTERM, 40, 40, None),  # While Python imports torch.
        (SAID, 75, 40, 40, "stopped at step 60, the checkpoint is of step 40"),
        (SAID, 0, 40, 60, "exit status 0"),
        ("Run x in /tmp", -signal.SIGTERM, 40, 40, "no handler"),
        ("Run x in /tmp", 75, 40, 40, "did not say"),
        ("", 75, 40, -1, "there was one of step 40"),
        ("", 70, 40, 40, "exit status 70"),
    ],
)
def test_an_end_by_signal_is_judged(text, status, before, step, wrong):
    program = SimpleNamespace(text=lambda: text)
    said = signals.judge(program, status, before, step)
    assert said == wrong if wrong is None else wrong in said


# ------------------------------------------------------------------------------ actors


def test_the_examiner_finds_torn_and_repeated_rollouts():
    with Pool(make_flags("tests.counting_env:make_truncating")) as pool:
        first, second = pool.next_rollout(), pool.next_rollout()
    torn = map_nest(np.copy, second)
    map_nest(lambda x, other: np.copyto(x[3:], other[3:]), torn, first)
    examiner = actors.Examiner()
    examiner.examine(first)
    assert examiner.wrong == []
    examiner.examine(first)
    assert "learned twice" in examiner.wrong.pop()
    examiner.wrong.clear()
    examiner.examine(torn)
    assert "row 3" in examiner.wrong[0]


# ---------------------------------------------------------------------------- learning


class Crash(Exception):
    pass


class Stall(Exception):
    pass


def test_faulty_environments_fail_as_often_as_they_say(tmp_path, monkeypatch):
    def crash(status):
        raise Crash

    def stall(seconds):
        raise Stall

    monkeypatch.setenv("FAULTS", str(tmp_path))
    monkeypatch.setattr(os, "_exit", crash)
    monkeypatch.setattr(time, "sleep", stall)
    env = faulty.Faulty(FaultEnv(print, at_step=0))  # Which never comes.
    env.reset(seed=1)
    steps, crashes, stalls = 200_000, 0, 0
    for _ in range(steps):
        try:
            env.step(1)
        except Crash:
            crashes += 1
        except Stall:
            stalls += 1
    # Six standard deviations.
    assert abs(crashes - 200) < 85 and abs(stalls - 40) < 38
    assert (tmp_path / "crashes").stat().st_size == crashes
    assert (tmp_path / "stalls").stat().st_size == stalls


# A chain of processes: sh chain.sh 3 is the trainer, 0 the server.
CHAIN = """
[ $1 = 0 ] && exec sleep 60
sh "$0" $(($1 - 1))
true
"""


def test_a_server_is_killed_not_its_guard_and_counts_once(tmp_path):
    (tmp_path / "chain.sh").write_text(CHAIN)
    with subprocess.Popen(["sh", tmp_path / "chain.sh", "3"]) as trainer:
        try:
            me = psutil.Process(trainer.pid)
            wait_for(lambda: "sleep" in [p.name() for p in me.children(recursive=True)])
            guard, server = me.children(recursive=True)[1:]
            assert learning.kill_a_server(trainer)
            wait_for(lambda: not server.is_running())
            assert trainer.wait(timeout=60) == 0  # As each of the others.
            assert not guard.is_running()
            assert not learning.kill_a_server(trainer)
        finally:
            trainer.kill()


def test_the_first_step_at_the_threshold_is_found(tmp_path):
    task = learning.TASKS["Catch"]
    assert learning.threshold_step(tmp_path, task) is None
    log = tmp_path / "logs.csv"
    log.write_text("step,best_mean_return\n100,\n200,0.5\n")
    assert learning.threshold_step(tmp_path, task) is None
    log.write_text("step,best_mean_return\n100,\n200,0.5\n300,0.9\n400,0.95\n")
    assert learning.threshold_step(tmp_path, task) == 300


# ----------------------------------------------------------------------------- moments


def test_a_moment_counts_though_it_has_passed():
    saving = iter([False, True, False])
    assert came_true(lambda: next(saving), lambda: True)
    assert not came_true(lambda: False, lambda: False)
    # Between the two looks it became true and the program ended.
    saving = iter([False, True])
    assert came_true(lambda: next(saving), lambda: False)


def test_who_reads_a_checkpoint_does_not_save(tmp_path):
    (tmp_path / "step-000000000005.safetensors").touch()
    with open(tmp_path / "step-000000000005.safetensors"):
        assert not is_saving(os.getpid(), tmp_path)
    with tempfile.TemporaryFile(dir=tmp_path):
        assert is_saving(os.getpid(), tmp_path)
