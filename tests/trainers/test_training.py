# SPDX-License-Identifier: Apache-2.0
"""Training runs as processes: bit-equal, killed, stopped, broken, resumed, tested."""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import monobeast
import polybeast
from core.algorithm.update import Learner
from core.environments import toys
from core.running import run, signals, supervise, unit
from tests import fault_env, wrong_env
from tests.conftest import DEADLINE_S, Program, ended, fill, wait_until
from tests.normalization_flags import obeyed
from tests.python import run_python
from tools.nemesis import programs
from tools.runs import load, log_rows, num_rows

REPOSITORY = Path(__file__).parents[2]
ENDLESS = 10**9
SIZES = ["--num_actors", 3, "--envs_per_actor", 2, "--batch_size", 4]
SIZES += ["--unroll_length", 5]
BATCH = 4 * 5  # Steps per update.
SERIAL = ["--serial", *SIZES, "--log_interval_s", 0]
# Forked actors start in no time; other start methods are tested where they matter.
ASYNC = [*SIZES, "--start_method", "fork", "--log_interval_s", 0]
SERVERS = ["--num_servers", 2, "--streams_per_server", 1, "--envs_per_stream", 2]
SERVERS += [*SIZES[4:], "--log_interval_s", 0]
PROGRAMS = [("monobeast", ASYNC), ("polybeast", SERVERS)]
# Environments below replace these, each time one is made.
UPDATE, PROGRESS = Learner.update, supervise.Watchdog.progress


def main(argv):
    """Train with both programs as somebody does who calls them from Python."""
    for module in (monobeast, polybeast):
        for total_steps in (100, 200):
            name = ["--xpid", module.__name__, "--total_steps", str(total_steps)]
            status = module.train(module.parse_flags([*argv, *name]))
            print(f"{module.__name__} returned {status!r}")
    return 0


# ------------------------------------------------------------- environments for --env


def misshapen_env():
    return wrong_env.Wrong(lambda result: (result[0][:7], *result[1:]))


# ---------------------------------------------------------------------------- helpers


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def differences(run_dir: Path, other: Path) -> list[str]:
    """Name what is not bit for bit equal in the newest checkpoints of two runs."""
    return programs.differences(run_dir / "checkpoints", other / "checkpoints")


def result_of_test(program: Program) -> dict[str, Any]:
    assert program.wait() == 0, program.text()
    return json.loads(program.text().splitlines()[-1])


# ----------------------------------------------------------------- the same bits again


def test_two_serial_runs_with_one_seed_are_bitwise_equal(start, tmp_path):
    flags = [*SERIAL, "--env", "tests.counting_env:make_truncating", "--use_lstm"]
    flags += ["--info_keys", "half", "--total_steps", 400, "--seed", 7]
    programs = [start(*flags, "--xpid", xpid) for xpid in "ab"]
    assert [program.wait() for program in programs] == [0, 0], programs[0].text()
    a, b = (tmp_path / "runs" / xpid for xpid in "ab")
    assert load(a).state["learner"]["updates"] >= 400 // BATCH  # Resets are no steps.
    assert differences(a, b) == []


def test_a_serial_run_with_another_seed_is_another(start, tmp_path, _trained):
    flags = [*SERIAL, "--env", "Catch", "--seed", 4, "--total_steps", 400]
    program = start(*flags, "--xpid", "x")
    assert program.wait() == 0, program.text()
    names = differences(_trained, tmp_path / "runs" / "x")
    assert any(name.startswith("model/") for name in names)


NUM_KILLS = 8
# What the clock and the machine say; everything else must be equal.
MACHINE_COLUMNS = ["time_s", "sps", "rss_mb"]
MACHINE_COLUMNS += ["learner_busy", "inference_busy", "env_busy"]


def kill_somewhere(
    program: Program, run_dir: Path, kill: int, rng: random.Random, total_steps: int
) -> bool:
    """Kill a run while it starts, saves or trains; return whether it was running."""

    def steps_saved() -> list[str]:
        return [path.name for path in run_dir.glob("checkpoints/step-*")]

    def has_come_far(kill: int) -> bool:
        step = total_steps * 4 // 5 * (kill + 1) // NUM_KILLS
        return max(steps_saved(), default="") > f"step-{step:012d}" or has_ended()

    def is_saving() -> bool:
        # A save may be over before the next look; the run must not be before a kill.
        saves = any(program.is_saving(run_dir) for _ in range(5))
        return saves or has_come_far(min(kill + 4, NUM_KILLS - 1))

    def has_ended() -> bool:
        return not program.is_alive()

    if kill % 4 == 2:
        wait_until(is_saving)
    elif kill % 4 == 3:
        text = rng.choice(["Run", "Preflight: cores"])
        wait_until(lambda: text in program.text() or has_ended())
    else:
        wait_until(lambda: has_come_far(kill))
    for _ in range(rng.randrange(300)):  # Up to some milliseconds more.
        steps_saved()
    program.kill()
    assert program.process.exitcode in (0, -signal.SIGKILL), program.text()
    return program.process.exitcode != 0


@pytest.fixture(scope="module")
def interrupted(start_for_module):
    """Return two runs with equal flags: one unbroken, one killed at random moments."""
    start, runs = start_for_module
    updates = 100
    flags = ["--env", "Memory", *SERIAL, "--seed", 5, "--total_steps", updates * BATCH]
    flags += ["--use_lstm", *obeyed(monobeast)]
    whole, broken = runs / "whole", runs / "broken"
    unbroken = start(*flags, "--xpid", whole.name)
    again = [*flags, "--xpid", broken.name, "--checkpoint_interval_s", 0.1]
    rng = random.Random(11)
    kills = sum(
        kill_somewhere(start(*again), broken, kill, rng, updates * BATCH)
        for kill in range(NUM_KILLS)
    )
    last = start(*again)
    assert last.wait() == 0, last.text()
    assert unbroken.wait() == 0, unbroken.text()
    return whole, broken, updates, kills


def test_a_run_killed_again_and_again_ends_bit_equal_to_the_unbroken_one(interrupted):
    whole, broken, updates, kills = interrupted
    assert kills >= 6
    assert load(broken).state["learner"]["updates"] == updates
    assert differences(whole, broken) == []


def test_a_run_killed_again_and_again_has_every_log_row_once(interrupted):
    whole, broken, updates, _ = interrupted
    assert (broken / "logs.csv").read_text().count("step,frames,") == 1
    rows = log_rows(broken)
    assert [int(row["step"]) for row in rows] == [
        BATCH * (update + 1) for update in range(updates)
    ]
    times = [float(row["time_s"]) for row in rows]
    assert times == sorted(times)
    for row, expected in zip(rows, log_rows(whole), strict=True):
        for machine in MACHINE_COLUMNS:
            del row[machine], expected[machine]
        assert row == expected


@pytest.mark.parametrize("module, sizes", PROGRAMS)
def test_no_action_learned_from_is_older_than_the_maximal_lag(
    start, tmp_path, module, sizes
):
    flags = ["--env", "Catch", "--total_steps", 50 * BATCH, "--xpid", "x"]
    program = start(*flags, *sizes, "--max_policy_lag", 0, module=module)
    assert program.wait() == 0, program.text()
    rows = log_rows(tmp_path / "runs" / "x")
    lags = [row["policy_lag_max"] for row in rows if row["policy_lag_max"]]
    assert lags and set(map(float, lags)) == {0.0}
    last = rows[-1]
    assert int(last["updates"]) >= 50  # Of batches that may be smaller.
    ledger = re.search(
        r"(\d+) rows received = (\d+) learned \+ (\d+) stale \+ (\d+) unused \+ ",
        program.text(),
    )
    received, learned, stale, unused = map(int, ledger.groups())
    assert learned == int(last["step"])
    assert stale == int(last["stale_rollouts"]) * 5 > 0
    assert learned + stale + unused <= received


def test_logs_have_the_documented_header_and_blank_cells(interrupted):
    whole, *_ = interrupted
    text = (whole / "logs.csv").read_text()
    assert text.startswith("step,frames,time_s,sps,mean_episode_return,")
    assert "nan" not in text.lower()
    assert log_rows(whole)[0]["best_mean_return"] == ""  # Before 100 games.
    assert float(log_rows(whole)[-1]["best_mean_return"]) < 1
    assert log_rows(whole)[-1]["actor_restarts"] == ""  # No actor processes.
    for stage in ("learner", "inference", "env"):
        shares = [float(row[f"{stage}_busy"]) for row in log_rows(whole)]
        assert all(0 < share < 1 for share in shares), stage


# ---------------------------------------------------------------------------- stopping


@pytest.mark.parametrize(
    "flags, signum",
    [(ASYNC, signal.SIGINT), (SERIAL, signal.SIGTERM)],
    ids=["async", "serial"],
)
def test_a_signal_ends_a_run_with_a_checkpoint_of_its_last_step(
    start, tmp_path, flags, signum
):
    run_dir = tmp_path / "runs" / "x"
    program = start(*flags, "--env", "Catch", "--total_steps", ENDLESS, "--xpid", "x")
    program.wait_for(lambda: num_rows(run_dir) >= 3)
    family = program.family()
    assert len(family) >= (3 if flags is ASYNC else 0)
    os.kill(program.pid, signum)
    assert program.wait() == 75, program.text()
    step = load(run_dir).step
    name = signal.Signals(signum).name
    said = f"Stopped by {name} at step {step}. The same command with --xpid x goes on"
    assert said in program.text()
    assert int(log_rows(run_dir)[-1]["step"]) == step
    wait_until(lambda: ended(family))


# Python runs this file at its start; it makes the import of NumPy wait.
SITECUSTOMIZE = """
import pathlib, sys, time
def wait(event, args):
    if event == "import" and args[0].endswith("_multiarray_umath"):
        pathlib.Path(__file__).with_name("importing").touch()
        time.sleep(1e6)
sys.addaudithook(wait)
"""


@pytest.fixture
def start_importing(start_program, tmp_path):
    """Start a program that comes no further than to its import of NumPy."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)

    def start_importing(*command: object) -> Program:
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        program = start_program(*command, env=env)
        program.wait_for((tmp_path / "importing").exists)
        return program

    return start_importing


@pytest.mark.parametrize("module", ["monobeast", "polybeast", "polybeast_env"])
def test_ctrl_c_while_python_imports_ends_a_program_without_a_word(
    start_importing, module
):
    program = start_importing(sys.executable, "-m", module)
    program.process.send_signal(signal.SIGINT)
    assert (program.wait(), program.text()) == (-signal.SIGINT, "")


@pytest.mark.parametrize("module", ["monobeast", "polybeast_env"])
def test_a_signal_while_python_imports_ends_the_first_process_of_a_container(
    start_importing, module
):
    shell = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*shell, "true"], capture_output=True).returncode:
        pytest.skip("needs namespaces of process ids")
    program = start_importing(*shell, sys.executable, "-m", module)
    (first,) = psutil.Process(program.pid).children()
    first.send_signal(signal.SIGTERM)
    assert (program.wait(), program.text()) == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize("module, sizes", PROGRAMS)
def test_a_signal_to_the_whole_process_group_is_one_to_the_run(
    start_program, tmp_path, module, sizes
):
    """As by Ctrl-C in a terminal, and by its end: real programs, as a user starts them.

    The terminal has not read for a long time, and the environments talk a lot.
    """
    command = [sys.executable, "-m", module, "--env", "tests.wrong_env:make_chatty"]
    command += [*sizes, "--total_steps", ENDLESS, "--xpid", "x", "--savedir", tmp_path]
    if module == "monobeast":
        command += ["--start_method", "forkserver"]
    unread, stderr = os.pipe()
    fill(stderr)
    group = {"start_new_session": True}  # A process group, as a shell would make.
    program = start_program(*command, **group, stdout=stderr, stderr=stderr)
    os.close(stderr)
    program.wait_for(lambda: num_rows(tmp_path / "x") >= 3)
    family = program.family()
    # Three actors, fork server, resource tracker; or a supervisor, and two servers
    # with a guard each.
    assert len(family) >= 5
    for signum in (signal.SIGINT, signal.SIGHUP):
        os.killpg(program.pid, signum)
    status = program.wait()
    os.close(unread)
    text = (tmp_path / "x" / "out.log").read_text()
    assert status == 75, text
    # Of two signals at once Python handles the one with the lower number first.
    assert re.search("Stopped by SIG(INT|HUP)", text) and "chatter" in text
    # The servers are in another session, and do not hear them.
    assert not re.search("SIG(INT|HUP): stopping", text)
    assert "Traceback" not in text
    wait_until(lambda: ended(family))


def test_a_stopped_run_goes_on_with_its_step_best_and_recent_returns(start, tmp_path):
    run_dir = tmp_path / "runs" / "x"
    flags = [*ASYNC, "--env", "Catch", "--xpid", "x"]
    program = start(*flags, "--total_steps", ENDLESS)

    def has_played_enough() -> bool:
        rows = log_rows(run_dir) if num_rows(run_dir) else []
        return bool(rows and rows[-1]["best_mean_return"])

    program.wait_for(has_played_enough)
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 75, program.text()
    before, rows_before = load(run_dir), log_rows(run_dir)

    more = 10 * BATCH  # 200 steps: 22 games or fewer, with those that had begun.
    program = start(*flags, "--total_steps", before.step + more)
    assert program.wait() == 0, program.text()
    assert f"goes on from step {before.step}" in program.text()
    after, rows = load(run_dir), log_rows(run_dir)
    assert after.step == before.step + more
    assert rows[: len(rows_before)] == rows_before
    assert len(rows) > len(rows_before)
    for name in ("step", "frames", "time_s", "games", "best_mean_return", "updates"):
        values = [float(row[name]) for row in rows if row[name] != ""]
        assert values == sorted(values), name
    ours = after.state["learner"]["episodes"]
    theirs = before.state["learner"]["episodes"]
    new = ours["games"] - theirs["games"]
    assert 0 < new < 40
    assert ours["returns"][:-new] == theirs["returns"][new:]


@pytest.mark.parametrize("module, sizes", PROGRAMS)
def test_a_run_whose_updates_take_long_is_stopped_after_the_present_one(
    start, tmp_path, module, sizes
):
    flags = [*sizes, "--env", "Catch", "--total_steps", ENDLESS, "--xpid", "x"]
    flags += ["--num_learner_threads", 2]  # The other one has a batch and waits.
    program = start(*flags, "slow", module, module="tests.trainers.slow_updates")
    begins = "an update begins"
    program.wait_for(lambda: program.text().count(begins) == 2)
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 75, program.text()
    assert program.text().count(begins) == 2
    found = load(tmp_path / "runs" / "x")
    assert found.state["learner"]["updates"] == 2
    assert f"Stopped by SIGTERM at step {found.step}." in program.text()


@pytest.mark.parametrize("module, sizes", PROGRAMS)
def test_a_second_signal_ends_the_wait_for_an_update(start, module, sizes):
    flags = [*sizes, "--env", "Catch", "--total_steps", ENDLESS, "--xpid", "x"]
    flags += ["--checkpoint_interval_s", 0]
    program = start(*flags, "hangs", module, module="tests.trainers.slow_updates")
    program.wait_for_text("about to hang")
    family = program.family()
    os.kill(program.pid, signal.SIGTERM)
    program.wait_for_text("to stop, for up to 3")
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 128 + signal.SIGTERM, program.text()
    assert "Second signal: exiting at once, no checkpoint." in program.text()
    wait_until(lambda: ended(family))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_no_process_outlives_a_killed_run(start, method):
    """An actor that hangs hears of nothing: whatever ends it ends one that plays.

    With a fork server: tests/actors/test_fork_server.py.
    """
    flags = [*ASYNC, "--start_method", method, "--num_actors", 1]
    flags += ["--env", "tests.wrong_env:make_hanging", "--xpid", "x"]
    program = start(*flags, "--total_steps", ENDLESS)
    program.wait_for_text("about to hang")
    family = program.family()
    assert len(family) >= 2, program.text()
    program.kill()
    wait_until(lambda: ended(family))


def test_both_programs_train_and_go_on_when_called_from_python(start, tmp_path):
    flags = ["--env", "Catch", "--batch_size", 4, "--unroll_length", 5]
    program = start(*flags, module="tests.trainers.test_training")
    assert program.wait() == 0, program.text()
    for module in ("monobeast", "polybeast"):
        assert program.text().count(f"{module} returned <Exit.DONE: 0>") == 2
        assert load(tmp_path / "runs" / module).step >= 200
        assert "goes on from step 100" in program.text()


# ---------------------------------------------------------------------------- failures


def test_an_environment_that_always_raises_ends_the_run_with_its_traceback(
    start, tmp_path
):
    env = "tests.wrong_env:make_raising"
    # Four restarts: a fork server has torch imported.
    fast = ("--start_method", "forkserver", "--num_actors", 1)
    program = start(*ASYNC, *fast, "--env", env, "--xpid", "x")
    assert program.wait() == 70, program.text()
    text = program.text()
    assert "Actors: 1, each a process; environments in each: 2, in all: 2" in text
    assert "ActorError" in text and "5 times in a row" in text
    assert "OSError: the simulator is out of coffee" in text
    assert load(tmp_path / "runs" / "x").step == 0


def test_a_serial_run_goes_on_after_an_error_in_the_middle_of_a_rollout(
    start, tmp_path
):
    flags = [*SERIAL, "--env", "tests.fault_env:make_failing_once", "--xpid", "x"]
    flags += ["--total_steps", 10 * BATCH]
    env = {"FAILED": str(tmp_path / "failed")}
    run_dir = tmp_path / "runs" / "x"
    program = start(*flags, env=env)
    assert program.wait() == 70, program.text()
    assert "KeyError: 'the simulator is out of fuel'" in program.text()
    assert load(run_dir).step > 0
    seeds = json.loads((run_dir / "meta.json").read_text())["first_env_seeds"]
    program = start(*flags, env=env)
    assert program.wait() == 0, program.text()
    assert "The checkpoint holds no actors for --serial" in program.text()
    again = json.loads((run_dir / "meta.json").read_text())["first_env_seeds"]
    assert not {*seeds} & {*again}  # Other games, which may have no error.


@pytest.mark.parametrize("flags", [SERIAL, ASYNC], ids=["serial", "async"])
def test_an_environment_that_breaks_its_spec_is_told_what_was_expected(start, flags):
    env = "tests.trainers.test_training:misshapen_env"
    program = start(*flags, "--env", env, "--xpid", "x")
    assert program.wait() == 78, program.text()
    said = (
        r"Error: env \d \(Wrong\) step 1: 'observation' expected float32\[10,5\], got"
    )
    assert re.search(said, program.text().splitlines()[-1]), program.text()
    assert "Traceback" not in program.text()


def test_an_unknown_environment_is_one_line_not_a_traceback(start):
    program = start(*ASYNC, "--env", "Catsh", "--xpid", "x")
    assert program.wait() == 78, program.text()
    assert "--env Catsh" in program.text()
    assert "Traceback" not in program.text()


@pytest.mark.parametrize("module, sizes", PROGRAMS)
def test_losses_that_are_not_finite_stop_the_run_and_spare_the_weights(
    start, tmp_path, module, sizes
):
    flags = ["--env", "tests.wrong_env:make_boundless", "--reward_clipping", "none"]
    program = start(*sizes, *flags, "--xpid", "x", module=module)
    assert program.wait() == 70, program.text()
    text = program.text()
    assert text.splitlines()[-1].startswith("FloatingPointError: 10 updates in a row")
    assert "in learn_loop" in text
    found = load(tmp_path / "runs" / "x")
    # The second learner thread may have got one in before the end.
    assert found.state["learner"]["skipped"] in (10, 11)
    assert found.state["learner"]["updates"] == 0
    for name, tensor in found.tensors["model"].items():
        assert torch.isfinite(tensor).all(), name


def test_observations_that_are_not_finite_are_named_as_the_cause(start, tmp_path):
    program = start(*SERIAL, "--env", "tests.wrong_env:make_nan", "--xpid", "x")
    assert program.wait() == 70, program.text()
    assert "FloatingPointError: no action can be sampled" in program.text()
    assert "check the environment's observations" in program.text()
    assert load(tmp_path / "runs" / "x").step == 0


def hanging_actors_env():
    """Hang in the first step, in a process that has a short limit from then on."""
    hangs = Path(os.environ["HANGS"])

    def hang_forever(result):
        hangs.touch()
        time.sleep(1e6)  # Until killed.

    def progress_impatiently(watchdog, *args):
        if hangs.exists():
            watchdog._limit_s = 1.0
        PROGRESS(watchdog, *args)

    supervise.Watchdog.progress = progress_impatiently
    signals.DUMP_S = DEADLINE_S  # An actor may need time to show its stack.
    return wrong_env.Wrong(hang_forever)


def test_an_environment_that_hangs_ends_the_run_with_every_stack(start, tmp_path):
    env, hangs = "tests.trainers.test_training:hanging_actors_env", tmp_path / "hangs"
    program = start(*ASYNC, "--env", env, "--xpid", "x", env={"HANGS": str(hangs)})
    program.wait_for(hangs.exists)
    family = program.family()
    assert program.wait() == 70, program.text()
    text = program.text()
    assert "in hang_forever" in text  # The actor's stack,
    assert "in train_async" in text  # the main thread's
    assert "in learn_loop" in text  # and a learner's.
    assert "StallError: no progress for" in text
    assert "(--stall_timeout_s 1) at step 0" in text
    assert load(tmp_path / "runs" / "x").step == 0
    wait_until(lambda: ended(family))


# ------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def _trained(start_for_module) -> Path:
    start, runs = start_for_module
    flags = [*SERIAL, "--env", "Catch", "--seed", 3, "--xpid", "trained"]
    flags += ["--total_steps", 400, "--checkpoint_interval_s", 0]
    assert (program := start(*flags)).wait() == 0, program.text()
    return runs / "trained"


@pytest.fixture
def trained(_trained, tmp_path) -> Path:
    """Return a run of 20 updates, with checkpoints of the last three."""
    run_dir = tmp_path / "runs" / "x"
    shutil.copytree(_trained, run_dir)
    return run_dir


def checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step-*"))


def test_precision_auto_is_settled_at_the_start_and_recorded(_trained):
    """What auto takes: tests/running/test_precision.py."""
    assert "--precision auto takes float32: " in (_trained / "out.log").read_text()
    meta = json.loads((_trained / "meta.json").read_text())
    assert meta["flags"]["precision"] == "float32"
    assert load(_trained).state["flags"]["precision"] == "float32"


def spoil(path: Path) -> None:
    """Flip one bit in the middle of the weights."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_spoiled_checkpoint_is_named_and_the_one_before_is_used(
    start, trained, _trained
):
    *_, before, newest = checkpoints(trained)
    spoil(newest)
    flags = [*SERIAL, "--env", "Catch", "--seed", 3, "--xpid", "x"]
    program = start(*flags, "--total_steps", 400)
    assert program.wait() == 0, program.text()
    text = program.text()
    assert f"Checkpoint not used: {newest}: has another sha256" in text
    assert f"goes on from step {int(before.name[5:17])}" in text
    assert differences(trained, _trained) == []


def test_nothing_is_trained_or_overwritten_when_every_checkpoint_is_spoiled(
    start, trained
):
    for path in checkpoints(trained):
        spoil(path)
    before = contents(trained)
    program = start(*SERIAL, "--env", "Catch", "--xpid", "x", "--total_steps", 800)
    assert program.wait() == 74, program.text()
    assert "no checkpoint in" in program.text()
    assert all(str(path) in program.text() for path in checkpoints(trained))
    after = contents(trained)
    for name in (".lock", "out.log"):
        del before[name], after[name]
    assert before == after


@pytest.mark.parametrize(
    "flags, old, new",
    [
        (("--env", "Memory"), "Catch", "Memory"),
        (("--env", "Catch", "--seed", 4), "3", "4"),
    ],
)
def test_a_run_does_not_go_on_as_another(start, trained, flags, old, new):
    before = contents(trained)
    program = start(*SERIAL, "--xpid", "x", "--total_steps", 800, *flags)
    assert program.wait() == 78, program.text()
    line = program.text().splitlines()[-1]
    assert line.startswith("ConfigError: --") and "Traceback" not in program.text()
    assert f" is {new} " in line and f" {old}" in line
    assert "Choose another --xpid, or " in line
    after = contents(trained)
    for name in before:
        if "step-" in name or name == "meta.json":  # The seed, for the next start.
            assert after[name] == before[name], name


def test_a_full_disk_is_survived_while_training_and_fatal_at_the_end(start, tmp_path):
    run_dir = tmp_path / "runs" / "x"
    program = start(
        *ASYNC,
        *("--env", "Catch", "--total_steps", ENDLESS, "--xpid", "x"),
        *("--checkpoint_interval_s", 0.2, "--log_interval_s", 0.1),
    )

    def newest() -> str:
        assert program.is_alive(), program.text()
        return max((path.name for path in checkpoints(run_dir)), default="")

    def set_file_size(limit: int) -> None:
        no_limit = resource.RLIM_INFINITY
        resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (limit, no_limit))

    wait_until(newest)
    set_file_size(200_000)  # Logs fit, weights (320 kB) do not.
    program.wait_for_text("Training goes on.")
    old, rows = newest(), num_rows(run_dir)
    wait_until(lambda: num_rows(run_dir) > rows + 2)
    set_file_size(resource.RLIM_INFINITY)  # There is room again.
    wait_until(lambda: newest() > old)
    set_file_size(200_000)
    count = program.text().count("Training goes on.")
    wait_until(lambda: program.text().count("Training goes on.") > count)
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 74, program.text()
    assert "CheckpointError: saving" in program.text()
    assert load(run_dir).path.name > old


def test_a_run_ends_although_a_thread_of_the_environment_runs(tmp_path):
    """In the actors, and in the program, which has asked for its spaces."""
    command = [sys.executable, "-m", "monobeast", "--savedir", tmp_path, *ASYNC]
    command += ["--env", "tests.counting_env:make_with_thread"]
    command += ["--num_actors", 1, "--total_steps", 40]
    done = subprocess.run(
        [str(word) for word in command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Threads are still running at the end: s")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


TOO_MUCH = ["--replay_ratio", 1, "--replay_capacity", "10G"]  # Of shared memory.


def test_a_start_that_is_refused_leaves_no_folder_and_latest_as_it_was(start, tmp_path):
    def status(*flags: object) -> int:
        return start(*SERIAL, "--env", "Catch", *flags).wait()

    runs = tmp_path / "runs"
    refused = ["--init_from", "nothing"]
    for flags in (refused, TOO_MUCH):
        assert status(*flags, "--xpid", "new") == 78
        assert names(runs) == {".locks"}
    assert status("--total_steps", BATCH, "--xpid", "old") == 0
    assert status(*refused, "--xpid", "new") == 78
    (runs / "mine").mkdir()
    assert status(*refused, "--xpid", "mine") == 78
    assert names(runs) == {".locks", "latest", "old", "mine"}
    assert os.readlink(runs / "latest") == "old"


def test_a_start_of_polybeast_that_is_refused_leaves_no_folder(start, tmp_path):
    flags = [*SERVERS, "--env", "Catch", "--init_from", "nothing", "--xpid", "new"]
    program = start(*flags, module="polybeast")
    assert program.wait() == 78, program.text()
    assert names(tmp_path / "runs") == {".locks"}


FULL_DISKS = {
    "inodes": ("nr_inodes=2", "No space left on device", "no inodes left (df -i)"),
    "space": ("size=4k", "No space left on device", "Free some space (df)"),
    "read-only": ("ro", "Read-only file system", "choose another --savedir"),
}


# Starts a run on each of these disks.
TRAIN_ON_DISKS = """
import sys, monobeast
for disk in sys.argv[1].split():
    print(monobeast.main(["--savedir", disk, *sys.argv[2:]]), file=sys.stderr)
    print("next", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def said_of_full_disks(tmp_path_factory) -> dict[str, list[str]]:
    """Return what a run says of each of FULL_DISKS; the last line is its status."""
    folder = tmp_path_factory.mktemp("disks")
    disks = [folder / kind for kind in FULL_DISKS]
    mounts = []
    for disk, (options, *_) in zip(disks, FULL_DISKS.values()):
        disk.mkdir()
        mounts.append(f"mount -t tmpfs -o {options} none {disk}")
    mount = " && ".join(mounts)
    unshare = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, mount]).returncode:
        pytest.skip("may not mount a tmpfs here")
    python = [*unshare, mount + ' && exec "$@"', "sh", sys.executable]
    done = run_python(
        TRAIN_ON_DISKS, " ".join(map(str, disks)), "--env=Catch", *SERIAL, python=python
    )
    said = [text.splitlines() for text in done.stderr.split("next\n")]
    return dict(zip([*FULL_DISKS, "end"], said, strict=True))


@pytest.mark.parametrize("kind", FULL_DISKS)
def test_a_disk_that_is_full_at_the_start_is_one_line(said_of_full_disks, kind):
    _, error, remedy = FULL_DISKS[kind]
    *_, last, status = said_of_full_disks[kind]
    assert status == "74", said_of_full_disks
    assert error in last and remedy in last
    assert not any("Traceback" in line for line in said_of_full_disks[kind])


def test_a_log_that_hangs_stops_neither_training_nor_checkpoints(start, tmp_path):
    run_dir = tmp_path / "runs" / "x"
    run_dir.mkdir(parents=True)
    os.mkfifo(run_dir / "out.log")
    pipe = os.open(run_dir / "out.log", os.O_RDWR | os.O_NONBLOCK)
    program = start(
        *ASYNC,
        *("--env", "Catch", "--total_steps", ENDLESS, "--xpid", "x"),
        *("--checkpoint_interval_s", 0.2),
    )
    program.wait_for(lambda: num_rows(run_dir))
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(1000))  # Nobody reads it.
    rows, saved = num_rows(run_dir), load(run_dir).step if checkpoints(run_dir) else 0
    program.wait_for(lambda: num_rows(run_dir) > rows + 3)
    program.wait_for(lambda: checkpoints(run_dir) and load(run_dir).step > saved)
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 75, program.text()
    assert f"The end of {run_dir}/out.log is lost: no answer for" in program.text()
    os.close(pipe)


def stuck_learner_env():
    """Catch in a process whose learner thread hangs once there is a checkpoint."""
    run.JOIN_S = run.LOCK_S = 0.1

    def hang_with_the_lock(learner, *args):
        if checkpoints(Path(learner.flags.savedir) / learner.flags.xpid):
            with learner.lock:
                os.write(2, b"about to hang\n")
                time.sleep(1e6)
        UPDATE(learner, *args)

    Learner.update = hang_with_the_lock
    return toys.Catch()


def test_a_learner_that_hangs_with_the_lock_does_not_hold_up_the_end(start, tmp_path):
    env = "tests.trainers.test_training:stuck_learner_env"
    flags = ["--env", env, "--xpid", "x", "--num_learner_threads", 1]
    program = start(*ASYNC, *flags, "--checkpoint_interval_s", 0.1)
    program.wait_for_text("about to hang")
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 70, program.text()
    text = program.text()
    assert "learner-0 did not stop within" in text
    assert "in hang_with_the_lock" in text  # Its stack.
    assert "The last checkpoint is missing: an update has not ended within" in text
    assert text.splitlines()[-1].startswith("core.errors.StallError: an update has")
    load(tmp_path / "runs" / "x")  # One from before that.


def test_hung_actors_show_their_stack_and_are_replaced(start, tmp_path):
    program = start(
        *ASYNC,
        *("--env", "tests.fault_env:make_hanging_in_c", "--xpid", "x"),
        *("--env_step_timeout_s", 1, "--num_actors", 1),
        *("--total_steps", 80),  # More than the first actor lives to make.
    )
    assert program.wait() == 0, program.text()
    text = program.text()
    assert "call of its environment has taken 1 s (--env_step_timeout_s)" in text
    assert re.search(
        r"Current thread .*\n(.*  File .*\n)*.*  File .*fault_env.py", text
    )
    last = log_rows(tmp_path / "runs" / "x")[-1]
    assert int(last["actor_restarts"]) >= 1
    sums = (
        r"Not normal since the start: (\d+) actor restarts, (\d+) rollouts discarded\n"
    )
    restarts, discarded = map(int, re.search(sums, text).groups())
    assert restarts >= int(last["actor_restarts"])  # More after the last update.
    assert discarded >= int(last["rollouts_discarded"])
    assert re.search(r"most frequent warnings: .*Actor \d hangs: ", text)


def test_an_environment_that_hangs_in_the_programs_own_process_ends_it(start):
    """At the start, where it is asked for its spaces, and in test mode."""
    limit = ("--env_step_timeout_s", 1)
    hangs = ("--env", "tests.fault_env:make_hanging", "--xpid", "x")  # In step 25.
    module = "tests.trainers.slow_calls"
    trains = start(*SERIAL, *hangs, "--total_steps", 40)
    closes = ("--env", "tests.fault_env:make_hanging_in_close")
    asks = start(*closes, *limit, module=module)
    assert asks.wait() == 70, asks.text()
    assert trains.wait() == 0, trains.text()
    plays = start("--mode", "test", *hangs, *limit, module=module)
    assert plays.wait() == 70, plays.text()
    for program, function in ((asks, "close"), (plays, "<lambda>")):
        assert "has taken 1 s (--env_step_timeout_s)" in program.text()
        assert re.search(rf"fault_env.py.*in {function}", program.text())


def test_each_call_of_an_environment_has_its_limit_in_lock_step_too(start, tmp_path):
    programs = {
        call: start(
            *(*SERIAL, "--env", f"tests.fault_env:make_hanging_later_in_{call}"),
            *("--env_step_timeout_s", 1, "--total_steps", 2 * BATCH, "--xpid", call),
            module="tests.trainers.slow_calls",
        )
        for call in ("constructor", "reset", "step", "close")
    }
    for call, program in programs.items():
        assert program.wait() == 70, program.text()
        text = program.text()
        said = "One call of the environment has taken 1 s (--env_step_timeout_s)"
        assert said in text, call
        assert re.search(r"fault_env.py.* in _hang", text), call
    # What was learned is safe by then.
    assert load(tmp_path / "runs" / "close").step == 2 * BATCH


def env_that_hangs_in_c():
    unit.END_S = 0.5
    return fault_env.make_hanging_in_c_at_once()


def test_a_call_that_holds_the_gil_has_its_limit_in_lock_step_too(start):
    env = "tests.trainers.test_training:env_that_hangs_in_c"
    program = start(*SERIAL, "--env", env, "--env_step_timeout_s", 1)
    assert program.wait() == 1, program.text()  # faulthandler's own.
    assert "Timeout (0:00:01.5" in program.text()
    assert "fault_env.py" in program.text()  # Its stack.


def hanging_update_env():
    """Catch in a process in which updates hang."""

    def hang_in_update(*args):
        time.sleep(1e6)

    Learner.update = hang_in_update
    return toys.Catch()


def test_an_update_in_lock_step_that_hangs_shows_its_stack_and_ends(start):
    env = "tests.trainers.test_training:hanging_update_env"
    program = start(*SERIAL, "--env", env, "--stall_timeout_s", 1)
    assert program.wait() == 70, program.text()
    assert "has taken 1 s (--stall_timeout_s)" in program.text()
    assert "in hang_in_update" in program.text()


# --------------------------------------------------------------------- one run, twice


def test_a_finished_run_has_nothing_more_to_do(start, trained):
    before = contents(trained / "checkpoints")
    program = start(*SERIAL, "--env", "Catch", "--xpid", "x", "--total_steps", 400)
    assert program.wait() == 0, program.text()
    assert "Nothing to do: run x is at step 400 of --total_steps 400" in program.text()
    assert contents(trained / "checkpoints") == before


def test_a_run_that_is_in_progress_is_not_started_again(start, tmp_path):
    flags = [*ASYNC, "--env", "Catch", "--total_steps", ENDLESS, "--xpid", "x"]
    first = start(*flags)
    first.wait_for(lambda: num_rows(tmp_path / "runs" / "x"))
    second = start(*flags)
    assert second.wait() == 69  # Not 78: a scheduler may try it again later.
    assert f"is in use by process {first.pid} on " in second.text()
    assert first.is_alive()


# --------------------------------------------------------------------------- test mode


def test_test_mode_plays_a_recurrent_policy(start_for_module, interrupted):
    start, _ = start_for_module
    whole, *_ = interrupted
    result = result_of_test(
        start("--mode", "test", "--xpid", whole.name, "--num_episodes", 3)
    )
    assert result["env"] == "Memory"
    assert result["episodes"] == 3
    assert {"mean_return", "stderr", "min", "max"} <= result.keys()


def test_test_mode_writes_videos(start, trained):
    program = start("--mode", "test", "--xpid", "x", "--num_episodes", 2, "--video")
    assert result_of_test(program)["episodes"] == 2
    videos = sorted((trained / "video").glob("*.mp4"))
    assert [path.name for path in videos] == ["game-000.mp4", "game-001.mp4"]
    assert all(path.read_bytes()[4:8] == b"ftyp" for path in videos)
    (event,) = EventAccumulator(str(trained / "video")).Reload().Images("video")
    assert event.step == load(trained).step


def test_test_mode_names_a_checkpoint_that_it_cannot_use(start, trained):
    *_, newest = checkpoints(trained)
    spoil(newest)
    program = start("--mode", "test", "--xpid", "x", "--num_episodes", 1)
    assert program.wait() == 0, program.text()
    assert f"Checkpoint not used: {newest}: has another sha256" in program.text()


def test_test_mode_without_a_checkpoint_says_so(start, trained):
    shutil.rmtree(trained / "checkpoints")
    program = start("--mode", "test", "--xpid", "x")
    assert program.wait() == 78, program.text()
    assert "holds no checkpoint yet" in program.text()
    assert "Traceback" not in program.text()


def slow_learner_env():
    """Catch in a process whose first update takes longer than --stall_timeout_s."""

    def update_slowly(learner, *args):
        if learner.updates == 0:
            time.sleep(2 * learner.flags.stall_timeout_s)
        UPDATE(learner, *args)

    Learner.update = update_slowly
    return toys.Catch()


def test_a_serial_run_waits_for_a_slow_update_if_asked(start):
    env = "tests.trainers.test_training:slow_learner_env"
    wait = ["--env", env, "--stall_timeout_s", 1, "--on_stall", "wait"]
    program = start(*SERIAL, *wait, "--total_steps", BATCH)
    assert program.wait() == 0, program.text()
