# SPDX-License-Identifier: Apache-2.0
"""What asynchronous runs learn is computed again, from the batches of their updates.

Each update must be a function of the weights before it and of its batch, and each row
must have what a network with the weights that the row names, and with the recurrent
state that the rollout brings, says to the row before. So a batch whose memory is used
again too early, weights that an actor reads while they are written, and a state, a row
or a version that belongs to another environment or time are all found.
"""

import copy
import importlib
import itertools

import pytest
import torch

import polybeast
from core.algorithm import update
from core.nests import leaves, map_nest
from core.rollout import Spaces
from core.running import checkpoint
from tests import counting_env

FLAGS = ["--env", "tests.counting_env:make_lives", "--use_lstm", "--seed", 7]
FLAGS += ["--precision", "float32", "--learning_rate", 0.001, "--epsilon", 0.001]
FLAGS += ["--batch_size", 8, "--unroll_length", 20, "--total_steps", 50 * 8 * 20]
FLAGS += ["--num_learner_threads", 2, "--disable_cuda"]
FLAGS += ["--learner_cores", 1]  # As below: another number of threads rounds otherwise.
# Few buffers: a buffer that is free too early is soon written again.
MONOBEAST = ["--num_actors", 2, "--envs_per_actor", 4, "--num_buffers", 8]
MONOBEAST += ["--start_method", "fork"]
POLYBEAST = ["--num_servers", 2, "--envs_per_stream", 4]
PROGRAMS = [("monobeast", MONOBEAST), ("polybeast", POLYBEAST)]
# One update changes the outputs by more, another size of the batch by less.
NEAR = 1e-4


def main(argv: list[str]) -> int:
    """Train with the trainer named last in `argv`; save the batches of its updates."""
    *argv, path, name = argv
    trainer = importlib.import_module(name)
    compute_gradient = update.compute_gradient
    first, batches = {}, []

    def record(flags, net, loss, rows, state):
        first.setdefault("weights", copy.deepcopy(net.state_dict()))
        batches.append(map_nest(torch.clone, (rows, state)))
        parts = compute_gradient(flags, net, loss, rows, state)
        for (key, now), (_, before) in zip(leaves((rows, state)), leaves(batches[-1])):
            assert torch.equal(now.nan_to_num(), before.nan_to_num()), key
        return parts

    update.compute_gradient = record
    status = trainer.main(argv)
    torch.save((first["weights"], batches), path)
    return status


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name, flags", PROGRAMS)
def test_updates_and_rows_are_what_their_batches_say(
    start, tmp_path, one_thread, name, flags
):
    path = tmp_path / "recorded"
    argv = ["--xpid", "x", *FLAGS, *flags, path, name]
    program = start(*argv, module="tests.trainers.test_recomputed_runs")
    assert program.wait() == 0, program.text()

    first, batches = torch.load(path)
    env = counting_env.make_lives()
    module = importlib.import_module(name)
    learner = module.create_learner(
        module.parse_flags(map(str, [*FLAGS, *flags])),
        Spaces(env.observation_space, env.action_space),
    )
    learner.net.load_state_dict(first)
    nets = []  # By version.
    for batch, state in batches:
        nets.append(copy.deepcopy(learner.net))
        learner.update(batch, state)
    last = checkpoint.load(tmp_path / "runs" / "x" / "checkpoints").tensors["model"]
    for key, value in learner.net.state_dict().items():
        assert torch.equal(value, last[key]), key

    versions = set()
    for batch, state in batches:
        counting_env.check_rollout(map_nest(lambda x: x.numpy(), batch))
        versions |= check_outputs(nets, batch, state)
    assert len(versions) > len(batches) / 4  # So that a wrong version is noticed.


@torch.inference_mode()
def check_outputs(nets, batch, state) -> set[int]:
    """Check what a batch says of the outputs of the network; return the versions."""
    versions = set()
    chosen_by = batch["policy_version"][1:]  # [T, B], for the rows before.
    changes = (chosen_by[1:] != chosen_by[:-1]).any(1).nonzero().flatten() + 1
    ends = [0, *changes.tolist(), len(chosen_by)]
    for start, end in itertools.pairwise(ends):  # Rows with the same versions.
        rows = {key: batch[key][start:end] for key in polybeast.NET_INPUTS}
        next_state = map_nest(torch.clone, state)
        for version in chosen_by[start].unique().tolist():
            columns = chosen_by[start] == version
            outputs, new = nets[version](rows, state)
            for key in ("policy_logits", "baseline"):
                said = batch[key][start + 1 : end + 1]
                error = (outputs[key] - said)[:, columns].abs().max()
                assert error < NEAR, f"{key}, rows {start} to {end}, {version}: {error}"
            for x, y in zip(next_state, new):
                x[:, columns] = y[:, columns]
            versions.add(version)
        state = next_state
    return versions
