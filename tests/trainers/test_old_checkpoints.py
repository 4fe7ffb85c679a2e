# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that an earlier version has written resumes.

checkpoint-a71be2e/ is of commit a71be2e, which had another layout of the code, with a
network of 16 units, so that the file is small:

    import monobeast
    monobeast.MLP_SIZE = monobeast.MLPTorso.num_features = 16
    monobeast.main([*FLAGS, "--total_steps", "400", "--savedir", "runs"])
"""

import json
import shutil
from pathlib import Path

import safetensors
import torch

import monobeast
from core.algorithm.torsos import MLPTorso

OLD = Path(__file__).with_name("checkpoint-a71be2e")
STEP, UPDATES = 400, 20
FLAGS = [*("--env", "Catch", "--serial", "--model", "mlp", "--num_actors", "1")]
FLAGS += [*("--envs_per_actor", "2", "--batch_size", "4", "--unroll_length", "5")]
FLAGS += [*("--seed", "3", "--xpid", "old", "--precision", "float32")]


def read(file):
    with safetensors.safe_open(file, "pt") as opened:
        state = json.loads(opened.metadata()["state"])
        return state, {key: opened.get_tensor(key) for key in opened.keys()}


def test_a_checkpoint_of_an_earlier_version_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(MLPTorso, "num_features", 16)
    folder = tmp_path / "old" / "checkpoints"
    shutil.copytree(OLD, folder)
    flags = [*FLAGS, "--savedir", str(tmp_path), "--learning_rate", "1e-9"]
    assert monobeast.main([*flags, "--total_steps", str(STEP + 20)]) == 0
    _, old = read(OLD / f"step-{STEP:012d}.safetensors")
    state, new = read(folder / f"step-{STEP + 20:012d}.safetensors")
    assert state["learner"]["step"] == STEP + 20
    assert state["learner"]["updates"] == UPDATES + 1
    weights = [key for key in old if key.startswith("model/")]
    squares = [key for key in old if key.endswith("/square_avg")]
    assert len(weights) == len(squares) == 8
    for key in weights:  # One update with a tiny learning rate later.
        torch.testing.assert_close(new[key], old[key], rtol=0, atol=1e-7)
    for key in squares:  # RMSProp: 0.99 * old + 0.01 * gradient ** 2.
        assert (new[key] >= 0.98 * old[key]).all(), key
        count = key.replace("square_avg", "step")
        assert new[count] == old[count] + 1 == UPDATES + 1
