# SPDX-License-Identifier: Apache-2.0
"""PolyBeast as a process: trained, stopped, killed, broken, resumed, tested.

What concerns a run's folder only (checkpoints, logs, flags of a resumed run) is the
same code for both trainers and tested with MonoBeast, in test_training.py. There are
also some tests of both programs.
"""

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from core.environments.stepping import env_seed
from core.environments.toys import Catch, Memory
from tests.conftest import Program, ended, free_ports, wait_until
from tests.wrong_env import make_nan
from tools.runs import load, log_rows, num_rows

REPOSITORY = Path(__file__).parents[2]
ENDLESS = 10**9
N, K = 2, 2  # Servers, and environments in each one's only stream.
SIZES = ["--batch_size", 4, "--unroll_length", 5, "--log_interval_s", 0]
BATCH = 4 * 5  # Steps per update.
LOCAL = ["--num_servers", N, "--streams_per_server", 1, "--envs_per_stream", K, *SIZES]


# ---------------------------------------------------------------------------- helpers


@pytest.fixture
def train(start) -> Callable[..., Program]:
    """Start PolyBeast with flags, as run x."""

    def train(*flags: object) -> Program:
        return start("--xpid", "x", *flags, module="polybeast")

    return train


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return tmp_path / "runs" / "x"


@pytest.fixture
def start_servers(start_program) -> Iterator[Callable[..., Program]]:
    """Start `python -m polybeast_env` with flags; SIGTERM ends it."""
    programs: list[Program] = []

    def start_servers(*flags: object) -> Program:
        command = [sys.executable, "-m", "polybeast_env", *flags]
        programs.append(start_program(*command))
        return programs[-1]

    yield start_servers
    for program in programs:
        program.process.terminate()
    for program in programs:
        program.wait()


@pytest.fixture
def catch_and_memory(serve) -> list[str]:
    """Return the addresses of two servers that run in this process."""
    return [
        serve(env, num_envs=K, name=env.__name__).address for env in (Catch, Memory)
    ]


def meta(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "meta.json").read_text())


def stop(program: Program) -> str:
    """End a run with SIGTERM; return all it said."""
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 75, program.text()
    return program.text()


def servers_of(program: Program) -> psutil.Process:
    """Return the process that `polybeast` started for its local servers."""
    (process,) = filter(is_servers, psutil.Process(program.pid).children())
    return process


def is_servers(process: psutil.Process) -> bool:
    """Not git, which `polybeast` asks for the commit."""
    try:
        return "polybeast_env" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def socket_folder(servers: psutil.Process) -> Path:
    command = servers.cmdline()
    basename = command[command.index("--pipes_basename") + 1]
    return Path(basename.removeprefix("unix:")).parent


# ---------------------------------------------------------------------------- stopping


def is_saving(program: Program, run_dir: Path) -> bool:
    return program.is_saving(run_dir)


def has_said(text: str) -> Callable[[Program, Path], bool]:
    return lambda program, run_dir: text in program.text()


def has_all_streams(program: Program, run_dir: Path) -> bool:
    """Say whether all servers are connected: the run begins with the first one."""
    return num_rows(run_dir) > 0 and int(log_rows(run_dir)[-1]["streams"]) == N


MOMENTS = {
    "servers-start": has_said("about to hang"),
    "servers-serve": has_said("Serving Catch"),
    "run-begins": has_said("Run x in"),
    "streams-connect": has_said("step 0/"),
    "streams-are-connected": has_all_streams,
    "environments-hang": has_said("about to hang"),
    "saving": is_saving,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_ends_a_run_and_leaves_nothing(train, run_dir, moment):
    wrong = {"servers-start": "make_never", "environments-hang": "make_hanging"}
    env = f"tests.wrong_env:{wrong[moment]}" if moment in wrong else "Catch"
    often = ["--checkpoint_interval_s", 0] if moment == "saving" else []
    program = train(*LOCAL, "--env", env, "--total_steps", ENDLESS, *often)
    program.wait_for(lambda: MOMENTS[moment](program, run_dir))
    family, sockets = program.family(), socket_folder(servers_of(program))
    if moment == "streams-are-connected":
        assert len(family) == 1 + 2 * N and len(list(sockets.iterdir())) == 2 * N
    stop(program)
    assert "Traceback" not in program.text()
    assert ended(family)
    assert not sockets.exists()
    assert not list(run_dir.glob("checkpoints/.*tmp-*"))
    # Before the servers have said what they serve, there is no run.
    assert run_dir.exists() or moment.startswith("servers")
    if run_dir.exists():
        step = load(run_dir).step
        said = f"Stopped by SIGTERM at step {step}. The same command with --xpid x"
        assert said in program.text()
        assert "Traceback" not in (run_dir / "out.log").read_text()
        assert not num_rows(run_dir) or int(log_rows(run_dir)[-1]["step"]) == step


def test_a_signal_ends_the_wait_for_servers_elsewhere(train, run_dir, folder):
    program = train(*SIZES, "--server_addresses", f"unix:{folder}/s.0-1")
    program.wait_for_text("Waiting for an environment server")
    assert f"{folder}/s.0" in program.text()
    stop(program)
    assert "Traceback" not in program.text()
    assert not run_dir.exists()


def test_nothing_outlives_a_killed_run_and_it_resumes(train, run_dir):
    flags = [*LOCAL, "--env", "Catch", "--checkpoint_interval_s", 0.1]
    program = train(*flags, "--total_steps", ENDLESS)
    program.wait_for(lambda: list(run_dir.glob("checkpoints/step-*")))
    family, sockets = program.family(), socket_folder(servers_of(program))
    program.kill()
    wait_until(lambda: ended(family))
    wait_until(lambda: not sockets.exists())
    total = load(run_dir).step + 10 * BATCH
    program = train(*flags, "--total_steps", total)
    assert program.wait() == 0, program.text()
    steps = [int(row["step"]) for row in log_rows(run_dir)]
    assert steps == sorted(set(steps))
    assert steps[-1] == total


# ---------------------------------------------------------------------------- resuming


def begun(program: Program, seeds: list[int]) -> list[int]:
    """Return those with which a game of `wrong_env.Telling` has begun."""
    text = program.text()
    return [seed for seed in seeds if f"begins with seed {seed}\n" in text]


def test_a_stopped_run_goes_on_and_plays_other_games(train, run_dir):
    flags = [*LOCAL, "--env", "tests.wrong_env:Telling", "--use_lstm", "--seed", 5]
    program = train(*flags, "--total_steps", ENDLESS)
    program.wait_for(lambda: num_rows(run_dir) and log_rows(run_dir)[-1]["games"] > "0")
    seeds = [env_seed(5, i, 0, 0) for i in range(N * K)]
    program.wait_for(lambda: begun(program, seeds) == seeds)
    stop(program)
    run_id = meta(run_dir)["run_id"]
    before, rows_before = load(run_dir), log_rows(run_dir)
    assert meta(run_dir)["first_env_seeds"] == seeds
    total = before.step + 10 * BATCH
    program = train(*flags, "--total_steps", total)
    assert program.wait() == 0, program.text()
    text = program.text()
    assert f"goes on from step {before.step}" in text
    assert meta(run_dir)["run_id"] == run_id
    others = [env_seed(5, i, 1 << 16, 0) for i in range(N * K)]
    assert meta(run_dir)["first_env_seeds"] == others
    # The second server may come after the last update.
    assert begun(program, others) and not begun(program, seeds)
    after, rows = load(run_dir), log_rows(run_dir)
    assert after.step == total
    assert after.state["learner"]["updates"] == before.state["learner"]["updates"] + 10
    assert rows[: len(rows_before)] == rows_before


# ----------------------------------------------------------------- servers that go away


def last_row_of_all_streams(run_dir) -> dict[str, str]:
    """Return the newest row before the end, which cuts every stream's rollout short."""
    return [row for row in log_rows(run_dir) if row["streams"] == str(N)][-1]


def test_a_killed_server_is_replaced_and_training_goes_on(train, run_dir):
    program = train(*LOCAL, "--env", "Catch", "--total_steps", ENDLESS)
    program.wait_for(lambda: has_all_streams(program, run_dir))
    victim, survivor = servers_of(program).children()
    victim.kill()

    def has_come_back() -> bool:
        row = log_rows(run_dir)[-1]
        return int(row["reconnects"]) == 1 and int(row["streams"]) == N

    program.wait_for(has_come_back)
    rows = num_rows(run_dir)
    program.wait_for(lambda: num_rows(run_dir) > rows + 3)
    assert survivor.is_running()
    text = stop(program)
    assert re.search(r"Server \d died \(killed by SIGKILL\); starting it again", text)
    assert "Not normal since the start: 1 server restarts, 1 reconnects" in text
    assert re.search(r"WARNING +unix:\S+env\.\d", text)  # What the actor pool saw.
    assert (run_dir / "out.log").read_text().count("WARNING") >= 1
    # A loss costs at most what was under way on this stream.
    assert int(last_row_of_all_streams(run_dir)["steps_discarded"]) <= 5 * K


def test_a_hung_server_is_replaced_and_training_goes_on(train, run_dir):
    env = "tests.fault_env:make_hanging"  # In its 25th step, every time.
    program = train(
        *LOCAL, "--env", env, "--env_step_timeout_s", 1, "--total_steps", 200
    )
    assert program.wait() == 0, program.text()
    assert "(--env_step_timeout_s)" in program.text()
    assert "(its environment hung)" in program.text()
    assert int(log_rows(run_dir)[-1]["reconnects"]) >= N


def test_a_learner_gives_up_on_a_server_whose_own_supervisor_does_not(
    train, start_servers, run_dir, folder, monkeypatch
):
    flags = ["--env", "tests.fault_env:make_hanging_in_some", "--num_servers", 1]
    flags += ["--streams_per_server", 1, "--envs_per_stream", K, "--server_address"]
    start_servers(*flags, f"unix:{folder}/plays")
    monkeypatch.setenv("HANGS", "")
    start_servers(*flags, f"unix:{folder}/hangs")
    addresses = f"unix:{folder}/hangs,unix:{folder}/plays"
    options = ["--env_step_timeout_s", 1, "--total_steps", ENDLESS]
    program = train(*SIZES, "--server_addresses", addresses, *options)
    program.wait_for_text("/hangs (stream 0, environments 0 to 1), step 25: the server")
    program.wait_for_text("has not answered for 4 s; connecting anew")
    rows = num_rows(run_dir)
    program.wait_for(lambda: num_rows(run_dir) > rows + 3)
    assert re.search(r"\n.*INFO *\d+ rows received = \d+ learned \+", stop(program))


def test_recycled_environments_leak_for_ever_and_no_stream_ends(train, run_dir):
    env = "tests.fault_env:LeakingEnv"  # Its fourth game would be the end.
    program = train(
        *LOCAL, "--env", env, "--recycle_games", 3, "--total_steps", ENDLESS
    )
    program.wait_for(lambda: has_all_streams(program, run_dir))
    games = int(log_rows(run_dir)[-1]["games"])
    program.wait_for(lambda: int(log_rows(run_dir)[-1]["games"]) > games + 100)
    stop(program)
    last = last_row_of_all_streams(run_dir)
    assert (last["reconnects"], last["steps_discarded"]) == ("0", "0")


def test_a_server_that_always_dies_ends_the_run_with_its_last_words(train, run_dir):
    env = "tests.fault_env:make_crashing"
    program = train(*LOCAL, "--num_servers", 1, "--batch_size", K, "--env", env)
    assert program.wait() == 70, program.text()
    last = program.text().splitlines()[-1]
    assert last.startswith("RuntimeError: the environment servers ended")
    assert "died 5 times in a row" in last and "killed by SIGSEGV" in last
    load(run_dir)


def test_killed_and_stopped_supervisors_and_deleted_sockets_cost_no_run(train, run_dir):
    program = train(*LOCAL, "--env", "Catch", "--total_steps", ENDLESS)
    program.wait_for(lambda: has_all_streams(program, run_dir))
    old, first = program.family(), servers_of(program)
    sockets = socket_folder(first)
    first.kill()
    program.wait_for_text("ended (killed by SIGKILL); starting them again")
    program.wait_for(lambda: program.text().count("Serving Catch") == 2)
    wait_until(lambda: ended(old))
    rows = num_rows(run_dir)
    program.wait_for(lambda: num_rows(run_dir) > rows + 2)
    assert log_rows(run_dir)[-1]["server_restarts"] == str(N)

    shutil.rmtree(sockets)
    program.wait_for_text("was deleted; created it again")
    program.wait_for(lambda: len(list(sockets.iterdir())) == 2 * N)
    assert sockets.stat().st_mode & 0o777 == 0o700
    rows = num_rows(run_dir)
    program.wait_for(lambda: num_rows(run_dir) > rows + 2)

    servers_of(program).suspend()
    program.wait_for_text("The supervisor of the servers (process")
    os.kill(program.pid, signal.SIGSTOP)  # So that it does not continue these.
    family = program.family()
    for process in family:
        process.suspend()
    program.kill()
    wait_until(lambda: ended(family) and not sockets.exists())


# -------------------------------------------------------------------- servers elsewhere


def test_servers_elsewhere_may_come_late_and_come_again(train, start_servers, run_dir):
    first = f"127.0.0.1:{(port := free_ports(N))}"
    addresses = f"{first}-{port + N - 1}"
    program = train(*SIZES, "--server_addresses", addresses, "--total_steps", ENDLESS)
    program.wait_for_text("Waiting for an environment server")

    flags = ["--env", "Catch", "--server_address", first, "--num_servers", N]
    flags += ["--streams_per_server", 1, "--envs_per_stream", K]
    servers = start_servers(*flags)

    program.wait_for(lambda: has_all_streams(program, run_dir))
    assert meta(run_dir)["flags"]["env"] == "Catch"

    servers.process.terminate()
    assert servers.wait() == 0
    servers = start_servers(*flags)

    def has_come_back() -> bool:
        row = log_rows(run_dir)[-1]
        return int(row["reconnects"]) == N and int(row["streams"]) == N

    program.wait_for(has_come_back)
    rows = num_rows(run_dir)
    program.wait_for(lambda: num_rows(run_dir) > rows + 3)
    stop(program)
    assert servers.is_alive()  # They serve the next learner.


# gRPC starts and ends these threads when it likes: one more timer thread whenever a
# timer is due and no other thread waits.
GRPC_THREADS = "default-exec", "event_engine", "grpc_", "resolver-exec", "timer_manager"


def threads_and_files(program: Program) -> tuple[int, int]:
    """Count a program's threads, without gRPC's, and its open files."""
    process, names = psutil.Process(program.pid), []
    for thread in process.threads():
        with contextlib.suppress(OSError):  # It has just ended.
            path = Path(f"/proc/{process.pid}/task/{thread.id}/comm")
            names.append(path.read_text())
    num_threads = sum(not name.startswith(GRPC_THREADS) for name in names)
    return num_threads, process.num_fds()


def test_servers_come_and_go_with_a_file(train, serve, run_dir, tmp_path):
    addresses = [serve(Catch, num_envs=K).address for _ in range(2)]
    hosts = tmp_path / "hosts"
    hosts.write_text("# None yet.\n")
    program = train(
        *("--server_addresses", f"@{hosts}", "--max_streams", 5),
        *(*SIZES, "--total_steps", ENDLESS),
    )
    program.wait_for_text("hosts names no server")

    def streams() -> int:
        return int(log_rows(run_dir)[-1]["streams"]) if num_rows(run_dir) else 0

    hosts.write_text("\n".join(addresses))
    program.wait_for(lambda: streams() == 2)
    # A thread that writes a row exists for a moment only: the smallest counts until the
    # next row are without this thread.
    looks, rows = [threads_and_files(program)], num_rows(run_dir)

    def look_until_next_row() -> bool:
        looks.append(threads_and_files(program))
        return num_rows(run_dir) > rows

    program.wait_for(look_until_next_row)
    fewest_threads, fewest_files = map(min, zip(*looks))
    for content, now in ((addresses[1], 1), ("\n".join(addresses), 2)):
        hosts.write_text(content)
        program.wait_for(lambda now=now: streams() == now)

    def is_as_before() -> bool:  # A leaked thread or file would stay for ever.
        threads, files = threads_and_files(program)
        return threads <= fewest_threads and files <= fewest_files

    program.wait_for(is_as_before)
    for line in (
        "Servers: 2 servers (",
        f"Servers: 0 servers joined; 1 server ({addresses[0]}) left; now 1",
        f"Servers: 1 server ({addresses[0]}) joined; 0 servers left; now 2",
    ):
        assert line in program.text()
    hosts.write_text(f"{addresses[0]}\nnonsense\n")
    program.wait_for_text("hosts, line 2: expected host:port")
    program.wait_for_text("going on with the last 2 servers")
    assert re.search(r"\n.*INFO *\d+ rows received = \d+ learned \+", stop(program))
    assert int(log_rows(run_dir)[-1]["reconnects"]) == 0


def test_servers_of_another_environment_are_refused_with_both_names(
    train, serve, run_dir
):
    address = serve(Catch, name="Catch").address
    env = "PongNoFrameskip-v4"  # What it would be without --server_addresses.
    program = train("--server_addresses", address, "--env", env)
    assert program.wait() == 78, program.text()
    assert f"--env is {env} but the servers serve Catch" in program.text()
    assert "Traceback" not in program.text()
    assert not run_dir.exists()


def test_servers_that_differ_end_the_run_with_a_checkpoint(
    train, catch_and_memory, run_dir
):
    both = ",".join(catch_and_memory)
    program = train(*SIZES, "--server_addresses", both, "--total_steps", ENDLESS)
    assert program.wait() == 78, program.text()
    last = program.text().splitlines()[-1]
    assert any(address in last for address in catch_and_memory)
    assert "this server differs" in last
    assert "'Catch'" in last and "'Memory'" in last
    assert load(run_dir).step >= 0


def test_a_newcomer_that_differs_is_refused_and_the_run_goes_on(
    train, catch_and_memory, run_dir, tmp_path
):
    catch, memory = catch_and_memory
    hosts = tmp_path / "hosts"
    hosts.write_text(catch)
    program = train(*SIZES, "--server_addresses", f"@{hosts}", "--total_steps", ENDLESS)
    program.wait_for(lambda: num_rows(run_dir) >= 1)
    hosts.write_text(f"{catch}\n{memory}")
    program.wait_for_text("refused; the run goes on without it")
    rows = num_rows(run_dir)
    program.wait_for(lambda: num_rows(run_dir) >= rows + 3)
    said = stop(program)
    refused = rf"WARNING *{memory} \(stream 1, .*refused; .*this server differs"
    assert re.search(refused + ".*env is 'Memory', expected 'Catch'", said), said


def test_a_first_server_that_differs_is_refused_and_the_start_waits_for_others(
    train, catch_and_memory, run_dir, tmp_path
):
    catch, memory = catch_and_memory
    hosts = tmp_path / "hosts"
    hosts.write_text(catch)
    flags = [*SIZES, "--server_addresses", f"@{hosts}", "--total_steps", ENDLESS]
    first = train(*flags)
    first.wait_for(lambda: num_rows(run_dir) >= 1)
    stop(first)
    hosts.write_text(memory)
    program = train(*flags)
    reason = f"{memory}: the servers serve Memory but run x was trained "
    program.wait_for_text(f"Refused until it fits the run: {reason}with Catch")
    rows = num_rows(run_dir)
    hosts.write_text(f"{catch}\n{memory}")
    program.wait_for(lambda: num_rows(run_dir) >= rows + 3)
    stop(program)


def test_frames_options_and_the_runs_name_are_as_the_servers_say(
    start, serve, tmp_path
):
    options = {"frame_skip": 3, "sticky_actions": 0.25, "difficulty": "hard"}
    server = serve(Catch, num_envs=4, frames_per_step=3, options=options)
    program = start(
        *("--xpid", "{env}-1", *SIZES, "--total_steps", 3 * BATCH),
        *("--server_addresses", server.address),
        module="polybeast",
    )
    assert program.wait() == 0, program.text()
    run_dir = tmp_path / "runs" / "Catch-1"
    last = log_rows(run_dir)[-1]
    assert (int(last["step"]), int(last["frames"])) == (60, 180)
    assert meta(run_dir)["flags"]["env"] == "Catch"
    assert meta(run_dir)["flags"]["xpid"] == "Catch-1"
    assert meta(run_dir)["env_options"] == options
    told = "Environment options: frame_skip 3, sticky_actions 0.25, difficulty hard"
    assert told in program.text()


# ---------------------------------------------------------------------------- failures


def test_an_unknown_environment_is_one_line_and_no_run(train, run_dir):
    program = train(*LOCAL, "--env", "Catsh")
    assert program.wait() == 78, program.text()
    last = program.text().splitlines()[-1]
    assert last.startswith("ConfigError: ") and "--env Catsh" in last
    assert "Traceback" not in program.text()
    assert not run_dir.parent.exists()


def test_an_environment_that_always_raises_ends_the_run_with_its_traceback(
    train, run_dir
):
    program = train(*LOCAL, "--env", "tests.wrong_env:make_raising")
    assert program.wait() == 70, program.text()
    text = program.text()
    report = text[text.rindex("ActorError: ") :]
    assert "OSError: the simulator is out of coffee" in report
    assert ", in fail\n" in report  # The environment's own traceback.
    assert re.search(r"unix:\S+env\.\d", report)
    assert load(run_dir).step == 0


def test_an_environment_that_raises_does_not_end_the_run_nor_flood_its_log(
    train, run_dir
):
    env = "tests.fault_env:make_failing"  # In its 7th step, every time.
    program = train(*LOCAL, "--env", env, "--total_steps", 50 * BATCH)
    assert program.wait() == 0, program.text()
    text, last = program.text(), log_rows(run_dir)[-1]
    assert int(last["reconnects"]) >= 32
    assert text.count("connected again") < 10
    assert text.count("out of fuel") < 40  # With what two tracebacks say.
    normal = r"Not normal since the start: (\d+) reconnects, (\d+) rows discarded\n"
    reconnects, discarded = map(int, re.search(normal, text).groups())
    assert reconnects >= int(last["reconnects"])  # More after the last update.
    assert discarded >= int(last["steps_discarded"])
    assert re.search(r"most frequent warnings: \d+ x .*out of fuel", text)


def test_an_exception_in_inference_ends_the_run_with_its_traceback(
    train, serve, run_dir
):
    address = serve(make_nan, num_envs=K).address
    program = train(*SIZES, "--server_addresses", address)
    assert program.wait() == 70, program.text()
    text = program.text()
    assert text.splitlines()[-1].startswith(
        "FloatingPointError: no action can be sampled"
    )
    report = text[text.rindex("Traceback") :]
    assert "in inference" in text and "AsyncError" not in report
    assert load(run_dir).step == 0
    assert "FloatingPointError" in (run_dir / "out.log").read_text()


def test_local_servers_that_are_never_ready_end_the_run(train, run_dir):
    env = "tests.wrong_env:make_never"
    program = train(*LOCAL, "--env", env, "--stall_timeout_s", 1)
    assert program.wait() == 70, program.text()
    assert (
        "no environment server was ready within 1 s (--stall_timeout_s)"
        in (program.text().splitlines()[-1])
    )
    assert not run_dir.exists()


def test_an_environment_that_hangs_ends_the_run_with_every_stack(
    train, start_servers, run_dir, folder
):
    flags = ["--env", "tests.wrong_env:make_hanging", "--num_servers", N]
    flags += ["--streams_per_server", 1, "--envs_per_stream", K]
    start_servers(*flags, "--server_address", f"unix:{folder}/s")
    # Unlike that of local servers, the start of these has no limit.
    addresses = ["--server_addresses", f"unix:{folder}/s.0-{N - 1}"]
    program = train(*SIZES, *addresses, "--stall_timeout_s", 2)
    assert program.wait() == 70, program.text()
    text = program.text()
    for function in ("train_async", "learn_loop", "inference"):
        assert f"in {function}" in text
    last = text.splitlines()[-1]
    assert "StallError: no progress for" in last
    # On a busy machine this limit may pass before both servers have answered.
    waits_for = r"at step 0, waiting for (the )?environment server.*"
    assert re.search(waits_for + r"\(streams: [\w, ]+; learner queue: 0\)", last), last
    assert load(run_dir).step == 0


# ------------------------------------------------------------------- what a run writes


def test_a_run_writes_what_it_did(train, run_dir):
    env = "tests.counting_env:make_lives"
    flags = ["--env", env, "--info_keys", "half", "--max_learner_queue_size", 12]
    program = train(*LOCAL, *flags, "--total_steps", 20 * BATCH)
    assert program.wait() == 0, program.text()
    # The status line, and what is running.
    text = program.text()
    assert re.search(
        r"step 400/400  100.0%  400 frames  [\d,]+ SPS  return\(100\)", text
    )
    assert "Done: 400 steps." in text
    assert "Network MLPTorso" in text and "learning on cpu, acting on cpu" in text
    assert "Preflight: memory: 32 rollouts need" in text  # 8, 12 and three batches.

    rows = log_rows(run_dir)
    assert [int(row["step"]) for row in rows] == sorted(
        {int(row["step"]) for row in rows}
    )
    last = rows[-1]
    assert int(last["step"]) == int(last["frames"]) == 400
    assert int(last["updates"]) == 20
    assert any(float(row["info_half"] or 0) > 0 for row in rows)
    # The second server may come after the last update.
    assert 1 <= int(last["streams"]) <= N and int(last["reconnects"]) == 0
    assert 0 < float(last["env_step_p50_ms"]) <= float(last["env_step_p99_ms"])
    assert K <= float(last["inference_batch"]) <= N * K
    for stage in ("learner", "inference", "env"):
        shares = [float(row[f"{stage}_busy"]) for row in rows]
        assert all(0 <= share <= 1 for share in shares) and any(shares), stage
    assert re.search(r"(learner|inference|env)-bound \d+%", text)
    assert last["actor_restarts"] == ""  # MonoBeast's.
    assert "info_half" in (run_dir / "fields.csv").read_text()
    assert list((run_dir / "tensorboard").iterdir())

    written = meta(run_dir)
    assert written["flags"]["env"] == env
    assert written["flags"]["info_keys"] == ["half"]
    assert written["flags"]["num_actors"] == N * K
    assert written["flags"]["max_learner_queue_size"] == 12
    # --precision auto is settled.
    assert "--precision auto takes float32: " in text
    assert written["flags"]["precision"] == "float32"
    assert load(run_dir).state["flags"]["precision"] == "float32"
    assert isinstance(written["flags"]["seed"], int)
    assert len(written["first_env_seeds"]) == N * K
    assert [start["step"] for start in written["starts"]] == [0]
    assert written["versions"]["torch"] and written["host"]


def test_the_name_of_a_run_may_be_no_utf_8(train, run_dir):
    name = os.fsdecode(b"caf\xe9")
    program = train(*LOCAL, "--env", "Catch", "--total_steps", BATCH, "--xpid", name)
    assert program.wait() == 0, program.text()
    assert load(run_dir.with_name(name)).step == BATCH


def test_sockets_are_where_pipes_basename_says(train, run_dir, folder):
    basename = f"unix:{folder}/polybeast"
    program = train(
        *LOCAL, "--env", "Catch", "--total_steps", ENDLESS, "--pipes_basename", basename
    )
    program.wait_for(lambda: has_all_streams(program, run_dir))
    names = [f"polybeast.{i}" for i in range(N)]
    assert sorted(os.listdir(folder)) == sorted(names + [f"{x}.s" for x in names])
    stop(program)
    assert os.listdir(folder) == []


def test_the_profiler_trace_shows_inference_and_learning(train, serve, run_dir):
    address = serve(Catch, num_envs=K).address
    flags = [*SIZES, "--server_addresses", address, "--write_profiler_trace"]
    program = train(*flags, "--total_steps", ENDLESS)
    program.wait_for_text("Wrote")
    stop(program)
    trace = run_dir / "trace.json"
    assert f"Wrote {trace}" in program.text()
    # The chrome trace format: complete events have phase X.
    events = json.loads(trace.read_text())["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    assert all(event["dur"] >= 0 for event in events)

    def spans_with(name: str, operator: str) -> list[int]:
        """Return the threads of the spans that have such an operator inside."""
        return [
            span["tid"]
            for span in events
            if span["name"] == name
            and any(
                operator in event["name"]
                and event["tid"] == span["tid"]
                and 0 <= event["ts"] - span["ts"] <= span["dur"]
                for event in events
            )
        ]

    infers = spans_with("inference", "aten::exponential_")
    learns = spans_with("learn", "Backward")
    assert len(infers) >= 3 and len(learns) >= 3
    assert not set(infers) & set(learns)


# --------------------------------------------------------------------------- test mode


def test_test_mode_plays_what_was_trained(train):
    """The flags of training are found in meta.json: only --xpid is repeated."""
    flags = [*LOCAL, "--env", "Catch", "--seed", 1, "--total_steps", 20 * BATCH]
    program = train(*flags)
    assert program.wait() == 0, program.text()
    program = train("--mode", "test", "--num_episodes", 20, "--seed", 3)
    assert program.wait() == 0, program.text()
    assert "Serving" not in program.text()  # No servers are needed.
    result = json.loads(program.text().splitlines()[-1])
    with open(result["csv"], newline="") as file:
        returns = [float(row["return"]) for row in csv.DictReader(file)]
    assert len(returns) == 20 and set(returns) <= {-1.0, 1.0}
    assert (result["env"], result["greedy"]) == ("Catch", False)
    assert (result["step"], result["episodes"]) == (20 * BATCH, 20)
