# SPDX-License-Identifier: Apache-2.0
"""examples/appo and examples/impact: the patched trainer has the loss that it names.

Skipped in a fork that has edited what the patches edit, since they do not apply.
"""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from core.actors import prepare
from core.algorithm import losses, update
from core.nests import map_nest
from core.running import checkpoint
from core.running.resume import Snapshots
from tools.runs import log_rows
from tools.sweep import tomllib

ROOT = Path(__file__).parents[2]
T, B, CLIP, GAMMA = 5, 7, 0.3, 0.9
FLAGS = ["--env", "Catch", "--batch_size", str(B), "--unroll_length", str(T)]
FLAGS += ["--clip", str(CLIP), "--discounting", str(GAMMA), "--seed", "1"]


@pytest.fixture(scope="module", params=["appo", "impact"])
def fork(request, tmp_path_factory):
    """A folder with the patched monobeast.py, named after the example."""
    folder = tmp_path_factory.mktemp("fork") / request.param
    folder.mkdir()
    shutil.copy(ROOT / "monobeast.py", folder)
    patch = ROOT / "examples" / request.param / "monobeast.patch"
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    if subprocess.run(["git", "apply", patch], cwd=folder).returncode:
        pytest.skip(f"monobeast.py was edited: {patch} does not apply")
    return folder


def load(path):
    """Import a patched file; modules that it imports are not patched."""
    spec = importlib.util.spec_from_file_location(f"fork_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trainer(fork):
    return load(fork / "monobeast.py")


def main(argv):
    """Run the patched trainer; the last argument is its folder."""
    *argv, folder = argv
    return load(Path(folder, "monobeast.py")).main(argv)


def make_learner(trainer, *argv):
    """Return a learner, and a batch of random rollouts."""
    flags = trainer.parse_flags([*FLAGS, "--disable_cuda", *argv])
    spaces = trainer.read_env(flags)[0]
    torch.manual_seed(0)
    learner = trainer.create_learner(flags, spaces)
    outputs = trainer.net_outputs(spaces)
    row, _ = prepare.rollout_specs(flags, spaces, learner.net, outputs)
    rng = np.random.default_rng(0)

    def random(spec):
        shape = (T + 1, B, *spec.shape)
        if spec.dtype.kind == "f":
            return rng.standard_normal(shape).astype(spec.dtype)
        return rng.integers(0, 3 if spec.dtype.kind == "i" else 2, shape, spec.dtype)

    batch = map_nest(random, row)
    batch["info"] = map_nest(lambda x: np.full_like(x, np.nan), batch["info"])
    batch["done"] &= ~batch["truncated"]
    return learner, map_nest(torch.from_numpy, batch)


def log_probs(logits, actions):
    return torch.log_softmax(logits.double(), -1).gather(-1, actions[..., None])[..., 0]


def old_outputs(net, outputs, batch):
    """Return the older outputs that a fork's targets are computed with.

    Of IMPACT they are the target network's. Of asynchronous PPO they are the actor's,
    which are one row later in the batch. The actor has not seen the last row yet.
    """
    if hasattr(net, "target"):
        return net.target(batch, ())[0]
    keys = ("policy_logits", "baseline")
    return {key: torch.cat([batch[key][1:], outputs[key][-1:]]) for key in keys}


def losses_by_hand(flags, outputs, old, batch):
    """Return the two losses by loops over the equations in the patches' docstrings.

    Args:
      old: the outputs pi' and V' from which the targets are computed.
    """
    actions = batch["action"][1:]
    log_pi = log_probs(outputs["policy_logits"][:-1], actions)
    log_old = log_probs(old["policy_logits"][:-1], actions)
    log_mu = log_probs(batch["policy_logits"][1:], actions)
    pg_loss = baseline_loss = 0.0
    for b in range(B):
        V, v = old["baseline"][:, b].double(), old["baseline"][T, b].double()
        for t in reversed(range(T)):
            gamma = 0.0 if batch["done"][t + 1, b] else GAMMA
            reward = batch["reward"][t + 1, b].double().clamp(-1, 1)
            advantage = reward + gamma * v - V[t]  # v is v_{t+1} here.
            rho = (log_old - log_mu)[t, b].exp().clamp(max=1)
            error = rho * (reward + gamma * V[t + 1] - V[t])
            error += gamma * rho * (v - V[t + 1])
            if batch["truncated"][t, b]:
                error = advantage = 0.0
            v = V[t] + error
            r = (log_pi - log_mu)[t, b].exp()
            r = r * (log_mu - log_old)[t, b].exp().clamp(max=2)
            clipped = min(max(r, 1 - CLIP), 1 + CLIP)
            pg_loss -= min(r * advantage, clipped * advantage)
            if not batch["truncated"][t, b]:
                difference = v - outputs["baseline"][t, b].double()
                baseline_loss += flags.baseline_cost / 2 * difference**2
    return float(pg_loss), float(baseline_loss)


def test_the_losses_are_those_of_the_equations(trainer):
    learner, batch = make_learner(trainer)
    net = learner.net
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if not name.startswith("target."):
                weight += 0.1 * torch.randn_like(weight)
        outputs, _ = net(batch, ())
        old = old_outputs(net, outputs, batch)
        loss = trainer.compute_loss(learner.flags, net, batch, ())
    pg_loss, baseline_loss = losses_by_hand(learner.flags, outputs, old, batch)
    assert float(loss.pg_loss) == pytest.approx(pg_loss, rel=1e-4)
    assert float(loss.baseline_loss) == pytest.approx(baseline_loss, rel=1e-4)
    assert 0 < loss.extra[trainer.CLIPPED] < T * B


def test_on_policy_the_gradient_is_impalas(trainer):
    """Nothing is clipped, and all ratios are 1."""
    learner, batch = make_learner(trainer)
    net, flags = learner.net, learner.flags
    with torch.no_grad():
        outputs = net(batch, ())[0]
        for key in "policy_logits", "baseline":
            batch[key][1:] = outputs[key][:-1]
    gradients = []
    for compute_loss in (trainer.compute_loss, update.compute_loss):
        net.zero_grad()
        compute_loss(flags, net, batch, ()).total_loss.backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.requires_grad])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fork", ["appo"], indirect=True)
def test_the_settings_for_mujoco_are_those_of_the_published_runs(trainer):
    files = "settings/mujoco.txt", "examples/appo/mujoco.txt"
    argv = [f"@{ROOT / file}" for file in files]
    text = (ROOT / "results" / "mujoco-appo" / "sweep.toml").read_text()
    swept = tomllib.loads(text)["flags"]
    for key in "serial", "total_steps", "log_interval_s":
        del swept[key]
    flags = vars(trainer.parse_flags([*argv, "--env", "Pendulum-v1"]))
    assert {key: flags[key] for key in swept} == swept


@pytest.mark.parametrize("fork", ["appo"], indirect=True)
def test_the_learning_rate_falls_while_the_policy_is_too_far_away(trainer):
    rates = {}
    for target in (None, 0, 0.001, 1000):
        flags = [] if target is None else ["--target_kl", str(target)]
        learner, batch = make_learner(trainer, *flags)
        for _ in range(5):
            learner.update(map_nest(np.asarray, batch), ())
        (group,) = learner.optimizers[0].param_groups
        rates[target] = group["lr"]
    assert rates[1000] == rates[None]
    assert rates[0] == rates[0.001] == pytest.approx(rates[None] / 1.01**5)


@pytest.mark.parametrize("fork", ["appo"], indirect=True)
def test_a_resumed_run_keeps_the_learning_rate_that_target_kl_has_lowered(trainer):
    learner, batch = make_learner(trainer, "--target_kl", "0")
    snapshots = Snapshots(learner.flags, learner)
    for _ in range(5):
        learner.update(map_nest(np.asarray, batch), ())
    mean = learner.optimizers[0].param_groups[0]["kl"]
    state, tensors = snapshots.take()
    resumed, _ = make_learner(trainer, "--target_kl", "0")
    found = checkpoint.Checkpoint(Path(), 0, tensors, state)
    Snapshots(resumed.flags, resumed).restore(found)
    (group,) = resumed.optimizers[0].param_groups
    assert group["rate"] == pytest.approx(1 / 1.01**5)
    assert group["kl"] == mean > 0


@pytest.mark.parametrize("fork", ["appo"], indirect=True)
def test_the_distance_to_the_policies_that_acted_is_the_kl_divergence(trainer):
    learner, batch = make_learner(trainer, "--target_kl", "1")
    net = learner.net
    with torch.no_grad():
        trainer.compute_loss(learner.flags, net, batch, ())
        logits = net(batch, ())[0]["policy_logits"]
    actions = batch["action"][1:]
    log_pi = log_probs(logits[:-1], actions)
    log_mu = log_probs(batch["policy_logits"][1:], actions)
    kl = (log_pi - log_mu).exp() - 1 - (log_pi - log_mu)
    total, size = net.kl.tolist()
    assert total / size == pytest.approx(float(kl.clamp(max=1).mean()), rel=1e-4)


@pytest.mark.parametrize("fork", ["appo"], indirect=True)
def test_the_mean_divergence_does_not_depend_on_the_groups_of_columns(
    trainer, monkeypatch
):
    """An update counts once, however many groups it is computed in."""
    means = []
    for piece in (losses.PIECE_BYTES, 1):  # All columns, then one column at a time.
        monkeypatch.setattr(losses, "PIECE_BYTES", piece)
        learner, batch = make_learner(trainer, "--target_kl", "1000")
        for _ in range(3):
            learner.update(map_nest(np.asarray, batch), ())
        means.append(learner.optimizers[0].param_groups[0]["kl"])
    assert means[0] > 0
    assert means[1] == pytest.approx(means[0], rel=1e-3)


@pytest.mark.parametrize("fork", ["impact"], indirect=True)
def test_the_target_network_follows_every_few_updates(trainer):
    learner, batch = make_learner(trainer, "--target_updates", "3")
    net = learner.net

    def weights(network):
        layers = (network.torso, network.policy, network.baseline)
        return [p.detach().clone() for layer in layers for p in layer.parameters()]

    expected = weights(net)
    for number in range(1, 8):
        learner.update(map_nest(np.asarray, batch), ())
        if number % 3 == 0:
            expected = weights(net)
        torch.testing.assert_close(weights(net.target), expected, rtol=0, atol=0)


def test_a_run_with_replay_logs_what_was_clipped_and_can_be_tested(
    fork, start, tmp_path
):
    sizes = ["--batch_size", 8, "--learning_rate", 0.002, "--log_interval_s", 0]
    flags = [*sizes, "--env", "Catch", "--serial", "--replay_ratio", 3]
    if fork.name == "appo":
        flags += ["--target_kl", 1e-9]
    for mode in (["--total_steps", 2000], ["--mode", "test", "--num_episodes", 1]):
        program = start(*flags, "--xpid", "x", *mode, fork, module=__name__)
        assert program.wait() == 0, program.text()
    rows = log_rows(tmp_path / "runs" / "x")
    assert any(float(row["clipped"]) > 0 for row in rows)
    assert 0 < float(rows[-1]["replay_mean_rho"]) <= 1.0001
