# SPDX-License-Identifier: Apache-2.0
"""Both programs act in a space of every kind at once, with a mask, in every mode."""

import json
import sys
from pathlib import Path

import pytest
import torch

import monobeast
import polybeast
from core.errors import Exit
from tests.normalization_flags import obeyed
from tests.trainers import bodies
from tools.nemesis import programs
from tools.runs import log_rows

ENV = "tests.trainers.bodies:masked"
FLAGS = [*("--batch_size", "4", "--unroll_length", "5", "--seed", "3")]
FLAGS += ["--use_lstm", "--precision", "bfloat16", "--replay_ratio", "1"]
FLAGS += [*obeyed(), "--log_interval_s", "0"]


@pytest.fixture(autouse=True)
def one_torch_thread():
    """As in the programs, which set OMP_NUM_THREADS: initial weights depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(module, *flags):
    assert module.main([str(flag) for flag in flags]) == 0


def play_greedily(module, folder, capsys):
    flags = ["--mode", "test", "--savedir", folder, "--xpid", "x", "--greedy"]
    run(module, *flags, "--num_episodes", 2, "--video")
    assert len(list((folder / "x" / "video").glob("*.mp4"))) == 2
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["episodes"], result["env"]) == (2, ENV)
    assert result["greedy"] is True


def test_monobeast_acts_in_every_kind_of_space_with_the_same_bits(tmp_path, capsys):
    flags = ["--env", ENV, "--serial", "--num_actors", 2, "--envs_per_actor", 1]
    flags += [*FLAGS, "--savedir", tmp_path]
    for xpid in ("x", "y"):
        run(monobeast, *flags, "--xpid", xpid, "--total_steps", 30)
    x, y = (tmp_path / xpid / "checkpoints" for xpid in ("x", "y"))
    assert programs.differences(x, y) == []
    run(monobeast, *flags, "--xpid", "x", "--total_steps", 60)  # Goes on.
    play_greedily(monobeast, tmp_path, capsys)


def test_polybeast_acts_in_every_kind_of_space(serve, tmp_path, capsys):
    address = serve(bodies.masked, num_envs=2, name=ENV).address
    flags = [*FLAGS, "--server_addresses", address, "--savedir", tmp_path]
    for total_steps in (30, 60):
        run(polybeast, *flags, "--xpid", "x", "--total_steps", total_steps)
    # An illegal action would have ended a stream.
    last = log_rows(tmp_path / "x")[-1]
    assert (last["reconnects"], last["steps_discarded"]) == ("0", "0")
    play_greedily(polybeast, tmp_path, capsys)


@pytest.fixture
def another_make(start_program, folder):
    """Start a server of another make; return its address."""
    pytest.importorskip("grpc_tools", reason="pip install grpcio-tools")
    script = Path(__file__).with_name("foreign_body.py")

    def start(*args) -> str:
        start_program(sys.executable, script, address := f"unix:{folder}/s", *args)
        return address

    return start


def test_polybeast_acts_in_every_kind_of_space_of_a_server_of_another_make(
    another_make, tmp_path
):
    flags = [*FLAGS, "--savedir", tmp_path, "--xpid", "x", "--total_steps", 100]
    run(polybeast, *flags, "--server_addresses", another_make())
    # The server's failure after an illegal action would have ended the run.
    last = log_rows(tmp_path / "x")[-1]
    assert (last["reconnects"], last["mean_episode_return"]) == ("0", "5")


def test_a_server_of_another_make_whose_mask_allows_nothing_is_named(
    another_make, tmp_path, capsys
):
    flags = [*FLAGS, "--savedir", tmp_path, "--xpid", "x", "--total_steps", 100]
    flags += ["--server_addresses", another_make("stuck")]
    assert polybeast.main([str(flag) for flag in flags]) == Exit.INTERNAL
    last = capsys.readouterr().err.splitlines()[-1]
    assert "action_mask of environment 0 in this stream allows none of 3 values" in last
