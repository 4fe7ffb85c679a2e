# SPDX-License-Identifier: Apache-2.0
"""tools/slurm/train.sbatch under a real Slurm: trained, preempted, trained on."""

import contextlib
from pathlib import Path

import psutil
import pytest

from tests.conftest import wait_until
from tests.launching.slurm import require_slurm, running_slurm
from tools import certs
from tools.runs import log_rows, num_rows

END_S = 180.0
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    require_slurm()
    with running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def submit(slurm, folder, nodes, steps):
    """Run the one command that is documented, on nodes of this size; return the job."""
    assert certs.main(["--hosts", "servers", "--out", str(folder / "certs")]) == 0
    flags = f"--savedir {folder} --total_steps {steps} --log_interval_s 0.2"
    flags += " --checkpoint_interval_s 0.5"
    settings = {
        "XPID": "x",
        "ENV_FLAGS": "--env Catch",
        "LEARNER_FLAGS": f"{flags} --batch_size 16 --learning_rate 0.002",
        "SERVER_JOBS": "2",
        "SERVERS_PER_JOB": str(nodes),  # One for each learner.
        "SERVER_OPTIONS": f"--output={folder}/servers-%a.txt",
        "CERTS": str(folder / "certs"),
    }
    size = [f"--nodes={nodes}", "--cpus-per-task=1", f"--output={folder}/output.txt"]
    train = ["sbatch", "--parsable", *size, "tools/slurm/train.sbatch"]
    return slurm.run(*train, env=settings, cwd=ROOT)


def learners_of(job, rank):
    """Return the learner's process in a list, which is empty while there is none."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # It has ended.
            variables = process.environ()
            if (
                "polybeast" in process.cmdline()
                and variables.get("RANK") == rank
                and variables.get("SLURM_JOB_ID") == job
            ):
                found.append(process)
    return found


def kill_learner(folder, job, rank):
    """Kill a learner; wait until all nodes have started theirs again, and learn."""
    output = folder / "output.txt"
    wait_until(lambda: list(folder.glob("x/checkpoints/step-*")))
    starts = output.read_text().count("goes on from step")
    found = []
    wait_until(lambda: found.extend(learners_of(job, rank)) or found)
    found[0].kill()
    wait_until(lambda: output.read_text().count("goes on from step") > starts)
    rows = num_rows(folder / "x")
    wait_until(lambda: num_rows(folder / "x") > rows)


def steps_of(folder):
    return [int(row["step"]) for row in log_rows(folder / "x")]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_trains_to_its_end(slurm, tmp_path, nodes):
    job = submit(slurm, tmp_path, nodes, steps=2_000)
    slurm.wait_until(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), limit_s=END_S)
    assert slurm.state(job) == "COMPLETED"
    assert steps_of(tmp_path)[-1] >= 2_000
    slurm.wait_until(lambda: slurm.run("squeue", "-h") == "")  # Servers have ended.


@pytest.mark.slow
def test_a_preempted_run_is_requeued_and_goes_on(slurm, tmp_path):
    """On two nodes. Each learner is killed before that, one after the other."""
    job = submit(slurm, tmp_path, nodes=2, steps=10**9)
    wait_until(lambda: num_rows(tmp_path / "x") > 1)
    for rank in ("0", "1"):
        kill_learner(tmp_path, job, rank)
    assert slurm.describe(job)["Restarts"] == "0"
    slurm.run(
        "sbatch",
        "--partition=high",
        "--exclusive",
        f"--nodelist={slurm.describe(job)['NodeList']}",
        "--output=/dev/null",
        "--wrap",
        "true",
    )
    slurm.wait_until(lambda: slurm.describe(job)["Restarts"] == "1")
    output = tmp_path / "output.txt"
    assert "Stopped by SIGTERM" in output.read_text()
    starts, last = output.read_text().count("goes on from step"), steps_of(tmp_path)[-1]
    wait_until(lambda: steps_of(tmp_path)[-1] > last)
    assert output.read_text().count("goes on from step") == starts + 1
    steps = steps_of(tmp_path)
    assert steps == sorted({*steps})
