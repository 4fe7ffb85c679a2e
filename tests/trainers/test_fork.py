# SPDX-License-Identifier: Apache-2.0
"""A fork in which a researcher has edited Net and create_env, and nothing else, learns.

Skipped in a fork that has edited what the patches edit, since they do not apply.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import libtorchbeast._C
from tools.runs import log_rows

pytest.importorskip("minatar")

ROOT = Path(__file__).parents[2]
EDITED = {"polybeast.py": "Net", "polybeast_env.py": "create_env"}
TRAIN = ["--xpid", "minatar", "--env", "Breakout", "--total_steps", "60_000"]
TRAIN += ["--num_servers", "1", "--envs_per_stream", "16", "--batch_size", "16"]
TRAIN += ["--learning_rate", "0.005"]
TEST = ["--xpid", "minatar", "--mode", "test", "--num_episodes", "10"]
DEADLINE_S = 200.0


def run(*command, cwd):
    """Run a command in the fork, as its owner would; return what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        # With it a fork would run modules of this repository.
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def clone(folder):
    """Copy this repository as it is now, built, to a folder."""
    listed = run(
        *("git", "ls-files", "--cached", "--others", "--exclude-standard"), cwd=ROOT
    )
    for name in filter(lambda name: (ROOT / name).exists(), listed.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(libtorchbeast._C.__file__, folder / "libtorchbeast")
    run("git", "init", "--quiet", cwd=folder)


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A clone of this repository with both patches applied."""
    folder = tmp_path_factory.mktemp("fork")
    clone(folder)
    patches = sorted((folder / "examples" / "minatar").glob("*.patch"))
    assert len(patches) == 2
    applies = ["git", "apply", "--check", *patches]
    if subprocess.run(applies, cwd=folder, capture_output=True).returncode:
        pytest.skip("Net or create_env was edited: examples/minatar does not apply")
    run("git", "apply", *patches, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def explorer(fork):
    """The same clone, with rewards for what is new in MonoBeast."""
    patch = fork / "examples" / "exploration" / "monobeast.patch"
    applies = ["git", "apply", "--check", patch]
    if subprocess.run(applies, cwd=fork, capture_output=True).returncode:
        pytest.skip("monobeast.py was edited: examples/exploration does not apply")
    run("git", "apply", patch, cwd=fork)
    return fork


@pytest.mark.parametrize("name", EDITED)
def test_a_fork_edits_one_place_in_each_of_two_files(fork, name):
    before, after = (
        {
            getattr(node, "name", i): ast.dump(node)
            for i, node in enumerate(ast.parse((folder / name).read_text()).body)
        }
        for folder in (ROOT, fork)
    )
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] != after[key]] == [EDITED[name]]


def test_a_fork_runs_its_own_modules(fork):
    """Where this repository is installed too, for whoever tests it."""
    modules = ["polybeast", "polybeast_env", "core", "libtorchbeast"]
    find = "import importlib.util as u, sys; print(u.find_spec(sys.argv[1]).origin)"
    for module in modules:
        (origin,) = run(sys.executable, "-c", find, module, cwd=fork).split()
        assert Path(origin).is_relative_to(fork), origin


# Two layers in each head of Net, under other names, and a wrapper in create_env.
EDITS = {
    "PolicyHead(head_size, self.distribution, initial_std)": "nn.Sequential("
    "nn.Linear(head_size, 64), nn.ReLU(), PolicyHead(64, self.distribution, 1.0))",
    "orthogonal(linear(head_size, 1), gain=1.0)": "nn.Sequential("
    "nn.Linear(head_size, 64), nn.ReLU(), nn.Linear(64, 1))",
    "self.policy": "self.actor",
    "self.baseline": "self.critic",
}
MAKE = "make(flags.env, render_mode=render_mode)"
# Those that look into a network, but for many alike, for whole programs, and for slow
# ones that look into a part of it.
TESTS = ["tests/running/test_run.py", "tests/test_action_spaces.py"]
TESTS += ["tests/algorithm/test_normalization.py"]
OTHERS = ["strangers", "such_an_environment", "such_a_column"]
OTHERS += ["checker", "millions", "thousand_small", "targets_of_the_first"]
TESTS += ["-k", " and ".join(f"not {name}" for name in OTHERS)]


@pytest.mark.slow
def test_a_fork_with_other_heads_and_environments_keeps_its_tests(tmp_path):
    clone(tmp_path)
    edits = {
        "monobeast.py": {**EDITS, MAKE: f"gym.Wrapper({MAKE})"},
        "polybeast.py": EDITS,
        "polybeast_env.py": {MAKE: f"stepping.gym.Wrapper({MAKE})"},
    }
    for name, changes in edits.items():
        text = (tmp_path / name).read_text()
        for old, new in changes.items():
            if old not in text:
                pytest.skip(f"Net or create_env was edited: no {old!r} in {name}")
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)
    run(sys.executable, "-m", "pytest", "-q", "-x", *TESTS, cwd=tmp_path)


@pytest.mark.slow
def test_a_fork_learns_minatar_and_plays_it(fork):
    """Three seeds made 4.8 to 5.4 in training; a random player makes 0.5."""
    polybeast = [sys.executable, "-m", "polybeast", "--savedir", fork / "runs"]
    said = run(*polybeast, *TRAIN, "--seed", "1", cwd=fork)
    assert "Network Sequential" in said
    last = log_rows(fork / "runs" / "minatar")[-1]
    assert float(last["mean_episode_return"]) >= 3
    played = run(*polybeast, *TEST, "--seed", "1", cwd=fork)
    assert json.loads(played.splitlines()[-1])["mean_return"] >= 2  # 10 games only.


TWICE = """
import sys, monobeast
for total_steps in ("4_000", "8_000"):
    assert monobeast.main([*sys.argv[1:], "--total_steps", total_steps]) == 0
"""


def test_a_fork_s_loss_has_a_flag_a_column_and_a_parameter_group(explorer):
    """And the run goes on from a checkpoint."""
    monobeast = [sys.executable, "-c", TWICE, "--savedir", explorer / "runs"]
    monobeast += ["--env", "Catch", "--xpid", "new", "--serial"]
    monobeast += ["--log_interval_s", "0"]
    monobeast += ["--learning_rate", "0.001", "--bonus", "0.5"]
    run(*monobeast, cwd=explorer)
    rows = log_rows(explorer / "runs" / "new")
    novelty = [float(row["novelty"]) for row in rows]
    assert 0 < novelty[-1] < novelty[0]
    assert "novelty" in (explorer / "runs" / "new" / "fields.csv").read_text()
