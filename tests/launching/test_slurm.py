# SPDX-License-Identifier: Apache-2.0
"""tools/slurm/train.sbatch under a real Slurm: trained, preempted, trained to the end.

Seen red: without `scontrol requeue` the job fails, and does not come back.
"""

from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.launching.slurm import require_slurm, running_slurm
from tests.trainers.test_training import log_rows
from tools import certs

STEPS = 60_000
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    require_slurm()
    with running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_preempted_run_is_requeued_and_goes_on_to_its_end(slurm, tmp_path):
    run_dir = tmp_path / "runs" / "x"
    csv = run_dir / "logs.csv"
    output = tmp_path / "output.txt"
    assert certs.main(["--hosts", "servers", "--out", str(tmp_path / "certs")]) == 0
    flags = f"--savedir {run_dir.parent} --total_steps {STEPS} --log_interval_s 1"
    settings = {
        "XPID": "x",
        "ENV_FLAGS": "--env Catch",
        "LEARNER_FLAGS": f"{flags} --batch_size 16 --learning_rate 0.002",
        "SERVER_JOBS": "2",
        "SERVERS_PER_JOB": "1",
        "SERVER_OPTIONS": f"--output={tmp_path}/servers-%a.txt",
        "CERTS": str(tmp_path / "certs"),
    }
    # The one command that is documented, on a node of this size.
    size = ["--cpus-per-task=1", f"--output={output}"]
    train = ["sbatch", "--parsable", *size, "tools/slurm/train.sbatch"]
    job = slurm.run(*train, env=settings, cwd=ROOT)

    wait_until(lambda: csv.exists() and csv.read_text().count("\n") > 2)
    slurm.run(
        "sbatch",
        "--partition=high",
        "--exclusive",
        "--output=/dev/null",
        "--wrap",
        "true",
    )
    wait_until(lambda: slurm.describe(job)["Restarts"] == "1")
    assert "Stopped by SIGTERM" in output.read_text()
    wait_until(lambda: slurm.state(job) == "COMPLETED")

    rows = log_rows(run_dir)
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted({*steps})
    assert steps[-1] >= STEPS
    assert float(rows[-1]["mean_episode_return"]) > 0.8  # Random play: -0.6.
    assert "goes on from step" in output.read_text()
    assert slurm.run("squeue", "-h") == ""
