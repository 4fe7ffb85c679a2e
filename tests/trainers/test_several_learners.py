# SPDX-License-Identifier: Apache-2.0
"""Runs of two learners: they end together, and go on with any number of learners."""

import os
import signal

import torch

from core.running import checkpoint
from tests.conftest import wait_until
from tests.trainers.several import start_learners
from tests.trainers.test_training import log_rows

T = 5
FLAGS = ["--env", "Catch", "--batch_size", 4, "--unroll_length", T, "--xpid", "x"]
FLAGS += ["--seed", 7, "--log_interval_s", 0]
MONOBEAST = ["--num_actors", 4, "--envs_per_actor", 2, "--learner_cores", 1]
STEPS = 4 * T * 40


def newest(folder, name="x"):
    return checkpoint.load(folder / "runs" / name / "checkpoints")


def test_two_serial_learners_are_bitwise_the_same_from_run_to_run(start, tmp_path):
    ends = []
    for name in ("a", "b"):
        flags = [*FLAGS, "--serial", "--num_actors", 4, "--total_steps", STEPS]
        flags += ["--replay_ratio", 1, "--normalize_observations", "--use_lstm"]
        programs = start_learners(start, *flags, "--xpid", name)
        for program in programs:
            assert program.wait() == 0, program.text()
        assert "2 learners" in programs[0].text()
        ends.append(newest(tmp_path, name))
    first, second = ends
    assert first.step == second.step == STEPS
    for name, x in first.tensors["model"].items():
        assert torch.equal(second.tensors["model"][name], x), name
    games = [end.state["learner"]["episodes"]["games"] for end in ends]
    assert games == [STEPS // 9 // 4 * 4] * 2
    assert first.state["flags"]["batch_size"] == 4


def test_a_signal_to_one_learner_stops_all_and_one_learner_goes_on(start, tmp_path):
    flags = [*FLAGS, *MONOBEAST, "--total_steps", 10**7]
    programs = start_learners(start, *flags)
    csv = tmp_path / "runs" / "x" / "logs.csv"
    wait_until(lambda: csv.exists() and csv.read_text().count("\n") > 3)
    os.kill(programs[1].pid, signal.SIGTERM)
    assert [p.wait() for p in programs] == [75, 75], [p.text() for p in programs]
    found = newest(tmp_path)
    assert len(list((tmp_path / "runs" / "x" / "checkpoints").glob("step-*"))) == 1
    assert "Stopped by another learner" in programs[0].text()
    # The last row has all learners' games; none was lost or counted twice.
    games = found.state["learner"]["episodes"]["games"]
    assert int(log_rows(csv.parent)[-1]["games"]) == games
    assert found.step / 9 - 4 <= games <= found.step / 9  # Of 4 environments.

    alone = start(*FLAGS, *MONOBEAST, "--total_steps", found.step + STEPS)
    assert alone.wait() == 0, alone.text()
    steps = [int(row["step"]) for row in log_rows(csv.parent)]
    assert steps == sorted({*steps})
    assert steps[-1] >= found.step + STEPS


def test_a_killed_learner_ends_the_other_with_a_checkpoint(start, tmp_path):
    programs = start_learners(start, *FLAGS, *MONOBEAST, "--total_steps", 10**7)
    csv = tmp_path / "runs" / "x" / "logs.csv"
    wait_until(lambda: csv.exists() and csv.read_text().count("\n") > 3)
    os.kill(programs[1].pid, signal.SIGKILL)
    assert programs[0].wait() == 70, programs[0].text()
    assert programs[0].text().splitlines()[-1] == (
        f"learner 0: LearnerLost: learner 1 of 2 (process {programs[1].pid}) was killed"
    )
    assert newest(tmp_path).step >= int(log_rows(csv.parent)[-1]["step"])
