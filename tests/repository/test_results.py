# SPDX-License-Identifier: Apache-2.0
"""results/: every figure can be traced: ours to a commit, theirs to a source."""

import csv
import json
from pathlib import Path

import pytest

import monobeast
from tools import plot, results_table

RESULTS = Path(__file__).parents[2] / "results"
CLAIMS = [path for path in sorted(RESULTS.iterdir()) if results_table.has_runs(path)]
# Flags of the network, the loss and the optimizer, except --total_steps.
ALGORITHM = (
    *("model", "use_lstm", "unroll_length", "batch_size", "replay_ratio"),
    *("discounting", "vtrace_lambda", "baseline_cost", "entropy_cost"),
    *("reward_clipping", "normalize_observations", "normalize_returns"),
    *("learning_rate", "alpha", "epsilon", "momentum", "grad_norm_clipping"),
    "initial_action_std",
)
METRICS = {"return", "minutes", "frames_per_s"}


@pytest.fixture(scope="module")
def reference():
    with open(RESULTS / "reference.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_there_are_claims_and_references(reference):
    assert {"pong-2cores", "trainers-agree"} <= {claim.name for claim in CLAIMS}
    assert len(reference) > 100


def test_every_published_figure_has_its_source(reference):
    for row in reference:
        assert None not in row and None not in row.values(), row
        assert row["env"] and row["system"], row
        assert row["metric"] in METRICS, row
        float(row["value"])
        assert not row["frames"] or int(row["frames"]) > 0, row
        sources = ("arXiv:", "github.com/", "gymnax ")
        if row["system"] == "random play":
            sources = ("python -m core.environments.check ",)
        assert row["source"].startswith(sources), row


def test_no_published_figure_is_there_twice(reference):
    keys = [(row["env"], row["system"], row["metric"]) for row in reference]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_claim_has_command_commit_versions_raw_data_and_figure(claim):
    readme = (claim / "README.md").read_text()
    assert f"python -m tools.plot results/{claim.name}" in readme
    assert str(Path(__file__).parents[2]) not in readme
    assert "curve.png" in readme or claim.name == "pong-2cores"  # The main README's.
    assert (claim / "curve.png").exists()
    for folder in {path.parent for path in claim.rglob("logs.csv")}:
        meta = json.loads((folder / "meta.json").read_text())
        assert meta["command"] and meta["versions"]["torch"]
        assert len(meta["commit"]) == 40
        assert plot.read_run(folder).rows


@pytest.mark.parametrize(
    "file, claim",
    [
        ("atari", "atari"),
        ("minatar", "minatar"),
        ("classic_control", "classic-control"),
        ("box2d", "box2d"),
        ("mujoco", "mujoco"),
    ],
)
def test_a_settings_file_is_what_its_results_were_trained_with(file, claim):
    paths = list((RESULTS / claim).glob("*/meta.json"))
    assert paths
    usual = vars(monobeast.parse_flags([f"@settings/{file}.txt"]))
    for path in paths:
        used, flags = json.loads(path.read_text())["flags"], dict(usual)
        if used["env"] == "Pendulum-v1":
            flags["discounting"] = 0.9
        for name in ALGORITHM:
            assert used.get(name, flags[name]) == flags[name], (path, name)


def test_the_table_has_a_row_for_each_variant_and_what_others_have_published(reference):
    lines = results_table.table(RESULTS).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    header, _, *rows = rows
    assert header == list(results_table.COLUMNS)
    assert {len(row) for row in rows} == {len(header)}
    claims = {row[-1] for row in rows if "TorchBeast" in row[1]}
    scores = [claim for claim in CLAIMS if not any(claim.glob("*.py"))]
    assert claims == {f"results/{claim.name}" for claim in scores}
    assert len(scores) < len(CLAIMS)
    envs = {row[0] for row in rows}
    theirs = {(row[0], row[1]) for row in rows if "TorchBeast" not in row[1]}
    assert theirs == {(r["env"], r["system"]) for r in reference if r["env"] in envs}


def test_a_row_is_the_median_of_its_seeds(tmp_path):
    for seed, mean, best, hours in (
        (1, 0.5, 0.6, 1),
        (2, 0.25, 0.75, 2),
        (3, 1, "", 3),
    ):
        folder = tmp_path / "claim" / f"CartPole-v1-fast-{seed}"
        folder.mkdir(parents=True)
        (folder / "logs.csv").write_text(
            "step,frames,time_s,mean_episode_return,best_mean_return\n"
            f"5000000,20000000,{3600 * hours},{mean},{best}\n"
        )
        flags = {"env": "CartPole-v1", "seed": seed, "discounting": 0.9}
        (folder / "meta.json").write_text(json.dumps({"flags": flags, "cpu_count": 7}))
        place = {"cores": [2, 3], "gpus": ["1"]}
        (folder / "sweep.json").write_text(json.dumps(place))
    assert results_table.our_rows(tmp_path) == [
        {
            "environment": "CartPole-v1",
            "system": "**TorchBeast** fast",
            "return": "**0.5** (0.25 to 1)",
            "best": "0.675",
            "seeds": "3",
            "steps": "5M",
            "frames": "20M",
            "hours": "2",
            "hardware": "2 of 7 CPU; 1 GPU",
            "protocol": "games while training, actions sampled; discount 0.9",
            "source": "results/claim",
        }
    ]


def test_what_one_system_has_published_of_an_environment_is_one_row(
    tmp_path, monkeypatch
):
    path = tmp_path / "reference.csv"
    path.write_text(
        "env,system,metric,value,spread,frames,hardware,protocol,source\n"
        "Catch,Theirs,return,0.50,0.10,2000000,1 GPU,odd,A\n"
        "Memory,Theirs,return,3,,,,,A\n"
        "Catch,Theirs,minutes,90,,2000000,1 GPU,odd,B\n"
    )
    monkeypatch.setattr(plot, "REFERENCE", path)
    assert results_table.reference_rows("Catch") == [
        {
            "environment": "Catch",
            "system": "Theirs",
            "return": "0.50 ± 0.10",
            "frames": "2M",
            "hours": "1.5",
            "hardware": "1 GPU",
            "protocol": "odd",
            "source": "A; B",
        }
    ]
