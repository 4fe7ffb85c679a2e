# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: programs that fail give no figures, and figures say where they are from.

Nothing is timed here.
"""

import functools
import json
import sys

import psutil
import pytest

from benchmarks import ceilings, write_figures
from benchmarks.peers import run as peers
from benchmarks.peers import score as peers_score

# A trainer that logs three rows and then fails.
CRASHES = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--savedir") + 1], "speed")
folder.mkdir()
rows = "".join(f"{10 * i},{100 * i},0.5,0.5,0.5\\n" for i in range(3))
(folder / "logs.csv").write_text(
    "time_s,step,env_busy,inference_busy,learner_busy\\n" + rows
)
time.sleep(0.5)
sys.exit("out of luck")
"""


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch):
    monkeypatch.setattr(ceilings.time, "sleep", lambda _: None)


@pytest.fixture
def trainer(tmp_path, monkeypatch) -> str:
    """Return the name of the program above."""
    (tmp_path / "crashing_trainer.py").write_text(CRASHES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "crashing_trainer"


def test_a_program_that_refuses_its_flags_is_quoted():
    with pytest.raises(RuntimeError, match="ended with 2 after .*") as caught:
        ceilings.measure_whole("json.tool", ["--batch_size", "0"], whole_s=1.0)
    assert "json.tool: error: " in str(caught.value).splitlines()[-1]


def test_a_trainer_that_crashes_has_no_speed(trainer):
    with pytest.raises(RuntimeError, match="ended with 1 after .*") as caught:
        ceilings.measure_whole(trainer, [], whole_s=60.0, warm_up_s=0.0)
    assert str(caught.value).endswith("out of luck")


def test_an_interrupted_measurement_ends_the_trainer(trainer, monkeypatch):
    pids = []

    def interrupt(pid):
        pids.append(pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(ceilings, "tree_pss", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ceilings.measure_whole(trainer, [], whole_s=60.0)
    assert not psutil.pid_exists(pids[0])


@pytest.mark.parametrize("status", [0, 3])
def test_a_peer_that_ends_early_has_no_speed(status, monkeypatch):
    monkeypatch.setattr(peers, "WARM_UP_S", 0.0)
    script = "import time\nfor i in range(5): print(i, 100 * i, flush=True)\n"
    script += f"time.sleep(0.5)\nraise SystemExit({status})"
    command = [sys.executable, "-c", script]
    with pytest.raises(RuntimeError, match=f"ended with {status}, with 4 reports"):
        peers.watch(command, peers.read_seconds_and_steps)


def test_a_peer_that_reaches_the_score_is_stopped_there(tmp_path):
    script = "import time\nprint(0.1, 100, flush=True)\n"  # No 100 games yet.
    script += "for i in range(1, 9): print(i, 100 * i, -50 + 10.5 * i, flush=True)\n"

    def measure(score: float, then: str = "") -> dict:
        command = [sys.executable, "-c", script + then]
        return peers_score.measure(
            command, tmp_path, peers_score.follow_lines, score, limit_s=20.0
        )

    found = measure(-10.0, "time.sleep(600)")
    assert found["seconds"] > 0
    assert (found["steps"], found["best"]) == (400, -8.0)
    found = measure(35.0)
    assert (found["seconds"], found["best"], found["last_steps"]) == (None, 34.0, 800)
    with pytest.raises(RuntimeError, match="ended with 3 after 800 steps"):
        measure(35.0, "raise SystemExit(3)")
    script = "pass"
    with pytest.raises(RuntimeError, match="ended with 0 after 0 steps"):
        measure(1.0)


def test_our_programs_reach_a_score_after_a_hundred_games(tmp_path):
    script = f"""
import time
from pathlib import Path
path = Path({str(tmp_path)!r}, "logs.csv")
rows = ["step,games,mean_episode_return", "0,0,", "10,99,5.0", "20,100,4.0"]
for i, row in enumerate(rows):
    path.write_text("\\n".join(rows[: i + 1]) + "\\n")
    time.sleep(0.3)
time.sleep(600)
"""
    follow = functools.partial(peers_score.follow_log, tmp_path)
    command = [sys.executable, "-c", script]
    found = peers_score.measure(command, tmp_path, follow, 4.0, limit_s=20.0)
    assert (found["steps"], found["best"]) == (20, 4.0)


def test_a_data_path_without_servers_says_how_many_streams_are_connected(
    run_forked, tmp_path
):
    script = "from benchmarks import transport\ntransport.START_S = 0.5\n"
    script += f"transport.learn('unix:{tmp_path}/none', 4, 2, 1.0, 5, None, 1)"
    _, said = run_forked(exec, script)
    last = said.splitlines()[-1]
    assert last.startswith("TimeoutError: ") and "0 of 2 streams are connected" in last


def test_memory_is_measured_where_the_kernel_has_no_pss(monkeypatch):
    without_pss = psutil.Process.memory_info
    monkeypatch.setattr(psutil.Process, "memory_full_info", without_pss)
    assert ceilings.tree_pss(psutil.Process().pid) > 1 << 20


def test_figures_name_their_command_and_commit(tmp_path, monkeypatch):
    command = ["-m", "benchmarks.x", "--out", "f.json"]
    monkeypatch.setattr(sys, "orig_argv", ["python", *command])
    write_figures(tmp_path / "f.json", **{"steps/s": [1.5]})
    found = json.loads((tmp_path / "f.json").read_text())
    assert found.pop("commit") and found.pop("cores") >= 1
    assert found == {"command": command, "steps/s": [1.5]}
    write_figures(None, x=1)  # Without --out.
