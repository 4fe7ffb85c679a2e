# SPDX-License-Identifier: Apache-2.0
"""tools.sweep: runs that share a machine, are stopped, resumed, and accounted for."""

import contextlib
import csv
import fcntl
import importlib
import io
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from core.running.folder import read_meta
from tests.conftest import DEADLINE_S, Forked, Program, ended, run_module, wait_until
from tools import sweep

FAKE = 'program = "tests.fake_trainer"\n'


@pytest.fixture
def toml(tmp_path) -> Callable[[str], Path]:
    """Write sweep.toml; its savedir is `tmp_path/runs`."""

    def write(text: str) -> Path:
        path = tmp_path / "sweep.toml"
        path.write_text(f'savedir = "{tmp_path}/runs"\n{text}')
        return path

    return write


@pytest.fixture
def start_sweep(_context, tmp_path) -> Iterator[Callable[[Path], Program]]:
    """Start a sweep; at the end it is killed, which stops its runs."""
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def start(path: Path) -> Program:
            output = tmp_path / f"sweep-{next(numbers)}.txt"
            sweep = Forked(_context, output, run_module, "tools.sweep", [str(path)])
            return stack.enter_context(sweep)

        yield start


def starts(folder: Path) -> list[list[str]]:
    """Return what the fake trainer noted: process id, cores, GPUs."""
    path = folder / "starts"
    return [line.split(" ") for line in path.read_text().splitlines()]


def started(folder: Path, times: int = 1) -> Callable[[], bool]:
    return lambda: (folder / "starts").exists() and len(starts(folder)) == times


def pid(folder: Path) -> int:
    return int(starts(folder)[-1][0])


def summary(tmp_path: Path) -> list[dict[str, str]]:
    with open(tmp_path / "runs" / "summary.csv", newline="") as file:
        return list(csv.DictReader(file))


def states(tmp_path: Path) -> list[str]:
    return [row["state"] for row in summary(tmp_path)]


# ----------------------------------------------------------------------- sweep.toml


def help_of(program: str) -> str:
    """Return `program --help` without another import of torch."""
    main = importlib.import_module(program).main
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit):
        main(["--help"])
    return said.getvalue()


def test_every_combination_is_a_run_and_its_seed_ends_the_name(toml, monkeypatch):
    monkeypatch.setattr(sweep, "help_of", help_of)
    runs = sweep.read_sweep(
        toml(
            """
            [flags]
            total_steps = '5M'
            use_lstm = false
            episodic_life = false
            info_keys = ["lives", "score"]
            [flags.monobeast]
            num_actors = 3
            [grid]
            seed = [1, 2]
            program = ["monobeast", "polybeast"]
            env = ["MinAtar/Breakout-v1"]
            learning_rate = [0.001]
            """
        )
    ).runs
    assert [run.name for run in runs] == [
        "monobeast-MinAtar-Breakout-v1-learning_rate=0.001-1",
        "monobeast-MinAtar-Breakout-v1-learning_rate=0.001-2",
        "polybeast-MinAtar-Breakout-v1-learning_rate=0.001-1",
        "polybeast-MinAtar-Breakout-v1-learning_rate=0.001-2",
    ]
    assert [run.program for run in runs] == ["monobeast"] * 2 + ["polybeast"] * 2
    common = "--total_steps=5M --no-episodic_life --info_keys=lives,score"
    point = "--env=MinAtar/Breakout-v1 --learning_rate=0.001 --seed=2"
    assert runs[1].flags == f"{common} --num_actors=3 {point}".split()
    assert runs[3].flags == f"{common} {point}".split()
    assert runs[0].total_steps == 5_000_000


def test_false_turns_off_what_the_program_has_on_by_default(toml):
    text = "[flags]\nwait = false\n[grid]\nshaping = [true, false]\nseed = [1]"
    runs = sweep.read_sweep(toml(FAKE + text)).runs
    assert [run.flags for run in runs] == [
        ["--shaping", "--seed=1"],
        ["--no-shaping", "--seed=1"],
    ]


@pytest.mark.parametrize(
    "text, says",
    [
        ("program = ", "sweep.toml: Invalid value"),
        (FAKE + "core = 2\n[grid]\nseed = [1]", "unknown key 'core'"),
        (FAKE + "cores = 0\n[grid]\nseed = [1]", "cores >= 1"),
        (FAKE + "cores = '1'\n[grid]\nseed = [1]", "cores: expected a whole number"),
        (
            FAKE + "cores = 99999\n[grid]\nseed = [1]",
            "cores: each run is to have 99999",
        ),
        (FAKE, "[grid] is empty"),
        (FAKE + "[grid]\nseed = []", "grid.seed: expected a list"),
        (
            FAKE + "[grid]\nfail = [false]",
            "fail: tests.fake_trainer has no flag --fail",
        ),
        (FAKE + "[grid]\nseed = [1, 1]", "'1' cannot be the name of one run"),
        (FAKE + "[grid]\nenv = ['a/b', 'a-b']", "'a-b' cannot be the name"),
        (FAKE + "[grid]\nenv = ['..']", "'..' cannot be the name"),
        (
            FAKE + f"[grid]\nenv = ['{'x' * 201}']",
            "expected at most 200 bytes, got 201",
        ),
        (FAKE + "[flags]\nseed = 1\n[grid]\nseed = [1]", "seed: given twice"),
        (FAKE + "[flags]\nxpid = 'a'\n[grid]\nseed = [1]", "xpid: the sweep sets"),
        (FAKE + "[flags.polybeast]\n[grid]\nseed = [1]", "no run has the program"),
        (FAKE + "[flags]\na = 07:00:00\n[grid]\nseed = [1]", "cannot make a flag"),
        ("[grid]\nseed = [1]", "program: expected a text"),
        ("program = 'tests.nobody'\n[grid]\nseed = [1]", "no module 'tests.nobody'"),
        ("[grid]\nprogram = [1]\nseed = [1]", "no module 1"),
        (
            "program = 'json'\n[flags]\nx = false\n[grid]\nseed = [1]",
            "-m json --help ended with 1",
        ),
    ],
)
def test_a_wrong_file_is_refused_before_anything_starts(
    toml, tmp_path, capsys, text, says
):
    assert sweep.main([str(toml(text))]) == 2
    assert says in capsys.readouterr().err
    assert not [p for p in tmp_path.glob("runs/*") if p.name != ".lock"]


def test_a_savedir_that_cannot_be_made_is_told(toml, tmp_path, capsys):
    (tmp_path / "runs").write_text("in the way")
    assert sweep.main([str(toml(FAKE + "[grid]\nseed = [1]"))]) == 78
    assert "sweep.toml: savedir: [Errno" in capsys.readouterr().err


def test_a_savedir_that_cannot_be_written_to_is_told(toml, tmp_path, capsys):
    (tmp_path / "runs" / ".lock").mkdir(parents=True)  # As on a read-only disk.
    assert sweep.main([str(toml(FAKE + "[grid]\nseed = [1]"))]) == 78
    assert "sweep.toml: savedir: [Errno" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path, capsys):
    assert sweep.main([str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err


# ----------------------------------------------------------------------- scheduling


def test_the_summary_has_each_run_and_finished_ones_are_not_started_again(
    toml, tmp_path, capfd
):
    path = toml(FAKE + "[flags]\ntotal_steps = 1000\n[grid]\nseed = [1, 2, 3]")
    assert sweep.main([str(path)]) == 0
    assert "3 finished" in capfd.readouterr().out
    rows = summary(tmp_path)
    assert [row["name"] for row in rows] == ["1", "2", "3"]
    assert rows[2] == {
        "name": "3",
        "seed": "3",
        "state": "finished",
        "step": "1000",
        "frames": "4000",
        "hours": "0.0028",
        "steps_per_s": "100.0",
        "mean_return": "2.5",
        "best_mean_return": "3",
        "error": "",
    }
    assert sweep.main([str(path)]) == 0
    assert [len(starts(tmp_path / "runs" / name)) for name in "123"] == [1, 1, 1]
    assert summary(tmp_path) == rows


def test_a_damaged_row_is_not_the_last(tmp_path):
    path = tmp_path / "logs.csv"
    path.write_text("step,sps\n1,10.5\n2,11.5\n\0\0\0\n3,1")
    assert sweep.last_row(path) == {"step": "2", "sps": "11.5"}
    path.write_text("step,sps\n\0\0\0\n")
    assert sweep.last_row(path) == {}


def test_each_run_has_its_cores_and_the_next_one_gets_those_of_the_first_to_end(
    toml, tmp_path, start_sweep
):
    cores = sweep.usable_cores()[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    runs = [tmp_path / "runs" / str(n) for n in range(4)]
    program = start_sweep(
        toml(
            FAKE
            + f"cores = {len(sweep.usable_cores()) // 2}\n"
            + "[flags]\nwait = true\n[grid]\nseed = [0, 1, 2, 3]"
        )
    )
    program.wait_for(lambda: started(runs[0])() and started(runs[1])())
    first, second = (set(starts(run)[0][1].split(",")) for run in runs[:2])
    assert first and second and not first & second
    program.wait_for(lambda: states(tmp_path) == ["running"] * 2 + ["queued"] * 2)
    os.kill(pid(runs[1]), signal.SIGUSR1)
    program.wait_for(started(runs[2]))
    assert set(starts(runs[2])[0][1].split(",")) == second
    assert not runs[3].exists()
    os.kill(pid(runs[0]), signal.SIGUSR1)
    program.wait_for(started(runs[3]))
    assert set(starts(runs[3])[0][1].split(",")) == first
    for run in runs[2:]:
        os.kill(pid(run), signal.SIGUSR1)
    assert program.wait() == 0, program.text()


@pytest.mark.parametrize("gpus, seen", [(1, {"3", "5"}), (2, {"3,5"}), (0, {""})])
def test_runs_see_their_gpus_only(toml, tmp_path, monkeypatch, gpus, seen):
    monkeypatch.setattr(sweep, "visible_gpus", lambda: ["3", "5"])
    cores = sweep.usable_cores()[:1] * 2  # Room for two runs.
    monkeypatch.setattr(sweep, "usable_cores", lambda: cores)
    path = toml(FAKE + f"gpus = {gpus}\n[grid]\nseed = [1, 2]")
    assert sweep.main([str(path)]) == 0
    assert {starts(tmp_path / "runs" / name)[0][2] for name in "12"} == seen


def test_a_run_whose_cores_are_gone_takes_those_that_are_left(
    toml, tmp_path, monkeypatch
):
    """As when a container loses some in the middle of a sweep."""
    left = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    monkeypatch.setattr(sweep, "usable_cores", lambda: [10**6])
    assert sweep.main([str(toml(FAKE + "[grid]\nseed = [1]"))]) == 0
    assert [cores for _, cores, _ in starts(tmp_path / "runs" / "1")] == [left]


def test_a_sweep_goes_on_when_who_reads_its_output_is_gone(toml, tmp_path):
    path = toml(
        FAKE
        + f"cores = {len(sweep.usable_cores())}\n"  # One run after the other.
        + "[flags]\nwait = true\n[grid]\nseed = [1, 2]"
    )
    first, second = (tmp_path / "runs" / name for name in "12")
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.sweep", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_until(started(first))
        assert process.stdout is not None and process.stdout.readline()
        process.stdout.close()
        for folder in first, second:
            wait_until(lambda folder=folder: started(folder)() or process.poll())
            os.kill(pid(folder), signal.SIGUSR1)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
    assert states(tmp_path) == ["finished", "finished"]


def test_a_failed_run_is_reported_does_not_stop_the_others_and_is_tried_again(
    toml, tmp_path, capfd
):
    path = toml(FAKE + "[flags]\nfail_with = 1\n[grid]\nseed = [1, 2]")
    assert sweep.main([str(path)]) == 70
    says = "exit status 70: ValueError: bad luck"
    assert says in capfd.readouterr().out
    assert [(r["state"], r["error"]) for r in summary(tmp_path)] == [
        ("failed", says),
        ("finished", ""),
    ]
    assert sweep.main([str(path)]) == 70
    assert [len(starts(tmp_path / "runs" / name)) for name in "12"] == [2, 1]


# The errors are like those of a full disk, or of a run of another user.
@pytest.mark.parametrize("in_the_way", ["2/sweep.log/x", "2/.lock/x", "2"])
def test_a_run_that_cannot_be_started_fails_and_does_not_stop_the_others(
    toml, tmp_path, in_the_way
):
    path = toml(FAKE + "[grid]\nseed = [1, 2, 3]")
    file = tmp_path / "runs" / in_the_way
    file.parent.mkdir(parents=True)
    file.touch()
    assert sweep.main([str(path)]) == 70
    assert states(tmp_path) == ["finished", "failed", "finished"]
    assert "a directory" in summary(tmp_path)[1]["error"]
    (tmp_path / "runs" / "2").rename(tmp_path / "2")
    assert sweep.main([str(path)]) == 0


def test_what_a_program_says_of_bad_flags_is_kept(toml, tmp_path):
    path = toml(FAKE + "[flags]\nno_such_flag = 1\n[grid]\nseed = [1]")
    assert sweep.main([str(path)]) == 70
    assert "unrecognized arguments: --no_such_flag=1" in summary(tmp_path)[0]["error"]
    assert "usage:" in (tmp_path / "runs" / "1" / "sweep.log").read_text()
    # It was never trained, so its flags may change.
    assert sweep.main([str(toml(FAKE + "[grid]\nseed = [1]"))]) == 0


# ------------------------------------------------------------------ stop and resume


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_sweep_stops_its_runs_and_goes_on_with_them(
    toml, tmp_path, start_sweep, signum
):
    path = toml(FAKE + "[flags]\nwait = true\n[grid]\nseed = [1, 2, 3]")
    first, last = tmp_path / "runs" / "1", tmp_path / "runs" / "3"
    cores = len(sweep.usable_cores())
    program = start_sweep(path)
    program.wait_for(started(first))
    os.kill(program.pid, signum)
    assert program.wait() == 75, program.text()
    assert "The same command goes on" in program.text()
    assert (first / "checkpoint").exists()
    assert states(tmp_path)[0] == "interrupted"
    assert cores >= 3 or (states(tmp_path)[-1] == "queued" and not last.exists())

    program = start_sweep(path)
    program.wait_for(started(first, times=2))
    os.kill(pid(first), signal.SIGUSR1)
    program.wait_for(lambda: states(tmp_path)[0] == "finished")
    os.kill(program.pid, signum)
    assert program.wait() == 75, program.text()
    assert len(starts(first)) == 2


def test_a_killed_sweep_leaves_no_runs_and_they_write_their_checkpoints(
    toml, tmp_path, start_sweep
):
    program = start_sweep(toml(FAKE + "[flags]\nwait = true\n[grid]\nseed = [1]"))
    folder = tmp_path / "runs" / "1"
    program.wait_for(started(folder))
    run = psutil.Process(pid(folder))
    program.kill()
    wait_until(lambda: ended([run]))
    assert (folder / "checkpoint").exists()


def test_a_run_in_use_is_waited_for(toml, tmp_path, start_sweep):
    folder = tmp_path / "runs" / "1"
    folder.mkdir(parents=True)
    with open(folder / ".lock", "w+") as lock:
        lock.write("process 7 on mars")
        lock.flush()
        fcntl.lockf(lock, fcntl.LOCK_EX)
        program = start_sweep(toml(FAKE + "[grid]\nseed = [1, 2]"))
        program.wait_for(lambda: (tmp_path / "runs" / "summary.csv").exists())
        program.wait_for(lambda: states(tmp_path) == ["in use", "finished"])
        assert "in use" in program.text() and "process 7 on mars" in program.text()
        assert not (folder / "starts").exists()
    assert program.wait() == 0, program.text()
    assert len(starts(folder)) == 1


def test_a_second_sweep_of_the_same_runs_is_refused(toml, tmp_path, start_sweep):
    path = toml(FAKE + "[flags]\nwait = true\n[grid]\nseed = [1]")
    first = start_sweep(path)
    first.wait_for(started(tmp_path / "runs" / "1"))
    second = start_sweep(path)
    assert second.wait() == 69
    assert f"is in use by sweep {path}, process {first.pid}" in second.text()
    assert len(starts(tmp_path / "runs" / "1")) == 1
    assert first.is_alive()


def test_runs_are_not_mixed_with_those_of_other_flags(toml, tmp_path, capsys):
    text = FAKE + "[flags]\ntotal_steps = {}\n[grid]\nseed = [1]"
    assert sweep.main([str(toml(text.format(1000)))]) == 0
    assert sweep.main([str(toml(text.format(2000)))]) == 78
    assert "was trained with --total_steps=1000" in capsys.readouterr().err
    assert sweep.main([str(toml(FAKE + "[grid]\nseed = [1]"))]) == 78
    assert "and the sweep now has fewer flags. " in capsys.readouterr().err
    assert len(starts(tmp_path / "runs" / "1")) == 1


@pytest.mark.slow
def test_a_trainer_is_stopped_resumed_and_finished(toml, tmp_path, start_sweep):
    total_steps = 10_000
    path = toml(
        f"""
        program = "monobeast"
        [flags]
        env = "Catch"
        total_steps = {total_steps}
        batch_size = 8
        log_interval_s = 0
        serial = true
        num_actors = 1
        envs_per_actor = 8
        [grid]
        seed = [1]
        """
    )
    run_dir = tmp_path / "runs" / "1"
    program = start_sweep(path)
    program.wait_for((run_dir / "logs.csv").exists)
    family = program.family()
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 75, program.text()
    assert states(tmp_path) == ["interrupted"]
    wait_until(lambda: ended(family))
    assert list((run_dir / "checkpoints").iterdir())

    program = start_sweep(path)
    assert program.wait() == 0, program.text()
    (row,) = summary(tmp_path)
    assert (row["name"], row["state"]) == ("1", "finished")
    assert int(row["step"]) >= total_steps
    assert float(row["mean_return"]) > -1
    assert len(read_meta(run_dir)["starts"]) == 2
