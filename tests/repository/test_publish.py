# SPDX-License-Identifier: Apache-2.0
"""tools.publish: a small checkpoint, with which others play and train on."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import monobeast
from core.running import checkpoint
from tools import publish

PLAY = Path(__file__).parents[2] / "results" / "play"
SERIAL = ["--serial", "--num_actors", 1, "--envs_per_actor", 2, "--batch_size", 2]


@pytest.fixture(scope="module")
def runs(start_for_module):
    """Return a folder of runs; `x` is one that has caught its ball for a while."""
    start, runs = start_for_module
    flags = [*SERIAL, "--env", "Catch", "--xpid", "x", "--total_steps", 400]
    assert (program := start(*flags)).wait() == 0, program.text()
    return runs


@pytest.fixture(scope="module")
def published(runs):
    publish.main([str(runs / "x"), str(runs / "small")])
    return runs / "small"


def test_a_folder_with_checkpoints_is_refused(runs, published):
    for out in (published, runs / "x"):
        with pytest.raises(SystemExit, match=f"{out} has checkpoints already"):
            publish.main([str(runs / "x"), str(out)])


def test_a_new_checkpoint_is_told(runs, capsys):
    out = runs / "told"
    (out / "checkpoints").mkdir(parents=True)  # As a full disk leaves it.
    publish.main([str(runs / "x"), str(out)])
    (path,) = (out / "checkpoints").iterdir()
    assert re.fullmatch(rf"{path}: 0\.\d\d MB\n", capsys.readouterr().out)


def test_only_the_weights_are_published_in_half_precision(runs, published):
    (path,) = (published / "checkpoints").iterdir()
    original = checkpoint.load(runs / "x" / "checkpoints")
    found = checkpoint.load(published / "checkpoints")
    assert found.step == original.step == 400
    assert found.tensors.keys() == {"model"}
    for name, tensor in original.tensors["model"].items():
        assert found.tensors["model"][name].equal(tensor.half())
    off = ("use_lstm", "normalize_observations", "normalize_returns")
    flags = {"env": "Catch", "model": "auto", **dict.fromkeys(off, False)}
    assert found.state == {"flags": flags}
    assert path.stat().st_size < original.path.stat().st_size / 3


def test_a_tensor_too_large_for_half_precision_is_published_as_it_is(tmp_path):
    mask = torch.tensor([0.0, -torch.inf])
    model = {"mask": mask, "count": torch.tensor([1e5, 3.0]), "w": torch.ones(3)}
    state = {"flags": {}}
    checkpoint.save(
        tmp_path / "checkpoints", step=1, tensors={"model": model}, state=state
    )
    (tmp_path / "meta.json").touch()
    publish.publish(tmp_path, tmp_path / "small")
    found = checkpoint.load(tmp_path / "small" / "checkpoints").tensors["model"]
    assert found["count"].equal(model["count"])
    for name in ("mask", "w"):
        assert found[name].dtype == torch.float16 and found[name].equal(
            model[name].half()
        )


def test_it_plays_as_what_it_was_made_of(start_for_module, runs, published):
    start, _ = start_for_module
    results = []
    for xpid in ("x", "small"):
        flags = ["--mode", "test", "--xpid", xpid, "--greedy", "--seed", 1]
        program = start(*flags, "--env", "Catch", "--num_episodes", 20)
        assert program.wait() == 0, program.text()
        results.append(json.loads(program.text().splitlines()[-1]))
    first, second = ({k: v for k, v in r.items() if k != "csv"} for r in results)
    assert first == second


def test_training_goes_on_from_its_weights(start_for_module, runs, published):
    start, _ = start_for_module
    flags = [*SERIAL, "--env", "Catch", "--xpid", "new", "--total_steps", 40]
    program = start(*flags, "--init_from", published, "--learning_rate", 1e-9)
    assert program.wait() == 0, program.text()
    new = checkpoint.load(runs / "new" / "checkpoints").tensors["model"]
    old = checkpoint.load(published / "checkpoints").tensors["model"]
    for name, tensor in new.items():
        assert tensor.dtype == torch.float32
        assert torch.allclose(tensor, old[name].float(), atol=1e-6), name


def skip_if_net_was_edited(name):
    """A fork has edited MonoBeast's Net or create_env, and keeps our agents."""
    found = checkpoint.load(PLAY / name / "checkpoints")
    flags = monobeast.parse_flags([])
    vars(flags).update(found.state["flags"])
    net = monobeast.create_net(flags, monobeast.read_env(flags)[0])
    try:
        checkpoint.weights_for(net, found)
    except checkpoint.CheckpointMismatch as error:
        pytest.skip(f"the weights are not of the Net in monobeast.py: {error}")


@pytest.mark.parametrize(
    "name, games, least", [("pong", 1, 10), ("minatar-breakout", 5, 10)]
)
def test_the_agents_in_this_repository_play(start, tmp_path, name, games, least):
    skip_if_net_was_edited(name)
    shutil.copytree(PLAY / name, tmp_path / "runs" / name)
    (path,) = (PLAY / name / "checkpoints").iterdir()
    assert path.stat().st_size < 5e6
    program = start(
        "--mode", "test", "--xpid", name, "--num_episodes", games, "--seed", 1
    )
    assert program.wait() == 0, program.text()
    assert json.loads(program.text().splitlines()[-1])["mean_return"] >= least


def test_a_run_without_a_checkpoint_is_told(tmp_path):
    with pytest.raises(SystemExit, match="no checkpoint"):
        publish.main([str(tmp_path), str(tmp_path / "out")])


def test_a_run_whose_checkpoints_are_all_damaged_is_told(tmp_path):
    checkpoint.save(tmp_path / "checkpoints", step=1, tensors={}, state={})
    for file in (tmp_path / "checkpoints").glob("step-*"):
        file.write_bytes(b"")
    with pytest.raises(SystemExit, match="no checkpoint in .* is good"):
        publish.main([str(tmp_path), str(tmp_path / "out")])


def test_a_run_without_meta_json_is_told_and_nothing_is_made(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    checkpoint.save(run / "checkpoints", step=1, tensors={}, state={"flags": {}})
    with pytest.raises(SystemExit, match=f"{run}: no meta.json"):
        publish.main([str(run), str(out)])
    assert not out.exists()


def test_a_folder_that_cannot_be_made_is_told(runs, tmp_path):
    (tmp_path / "file").touch()
    out = str(tmp_path / "file/new")
    with pytest.raises(SystemExit, match=f"^{out}: .*Not a directory"):
        publish.main([str(runs / "x"), out])
