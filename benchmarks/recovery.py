# SPDX-License-Identifier: Apache-2.0
"""Measure how soon several learners go on after one of them is killed.

    python -m benchmarks.recovery --out recovery.json

torchrun runs --num_learners PolyBeasts, which play Catch on servers that the benchmark
has started. --kills times one learner is killed (kill -9), each in turn, and torchrun
starts all learners again. The result is the time from the kill to the first update
after the restart, including all imports, the checkpoint and the connections to the
servers. At the end each step must be in logs.csv once, and the servers must be the same
processes as at the start.
"""

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks import out_file, write_figures
from core import flag_types
from tools.runs import curve

LIMIT_S = 120.0  # For anything awaited.
POLL_S = 0.02
NUM_ROWS = 5  # Of the log, from each start, before the next kill.
LEARNER = (
    *("-m", "polybeast", "--xpid", "recovery", "--total_steps", "1000000000"),
    *("--unroll_length", "20", "--log_interval_s", "0"),
    *("--checkpoint_interval_s", "2"),
)


@contextlib.contextmanager
def program(command: list[str], log: Path) -> Iterator[psutil.Popen]:
    """Run a program; end it at last."""
    with log.open("wb") as file:
        process = psutil.Popen(
            [sys.executable, "-m", *command], stdout=file, stderr=file
        )
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(LIMIT_S)
            except psutil.TimeoutExpired:
                process.kill()


class Run:
    """The run of the learners, as its folder and its processes show it."""

    def __init__(self, torchrun: psutil.Popen, log: Path, folder: Path):
        self._torchrun = torchrun
        self._log = log
        self._run_dir = folder / "recovery"

    def rows(self) -> list[tuple[float, int]]:
        """Return the time and the step of each row of the log."""
        return curve(self._run_dir)

    def steps(self) -> list[int]:
        return [step for _, step in self.rows()]

    def learners(self) -> dict[int, psutil.Process]:
        """Return the learners' processes by rank."""
        found = {}
        for process in self._torchrun.children():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if "polybeast" in process.cmdline():
                    found[int(environment["RANK"])] = process
        return found

    def wait(self, what: str, condition: Any) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if self._torchrun.poll() is not None or time.monotonic() > deadline:
                tail = self._log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"waited for {what}: {tail}")
            time.sleep(POLL_S)

    def saved(self) -> int:
        """Return the step of the newest checkpoint, 0 if there is none."""
        folder = self._run_dir / "checkpoints"
        return max((int(p.stem[5:]) for p in folder.glob("step-*")), default=0)

    def starts(self) -> list[int]:
        """Return the step that each start but the first went on from."""
        lines = self._log.read_text(errors="replace").splitlines()
        mark = "goes on from step "
        return [int(x.partition(mark)[2].split()[0]) for x in lines if mark in x]


def measure(run: Run, flags: argparse.Namespace) -> list[dict[str, float]]:
    """Kill learners; return for each kill who it was and how long it took."""
    kills = []
    run.wait("the first updates", lambda: len(run.steps()) > NUM_ROWS)
    for i in range(flags.kills):
        rank = i % flags.num_learners
        steps = [0, *run.starts()]
        run.wait("a checkpoint of this start", lambda: run.saved() > steps[-1])  # noqa: B023
        # And rows after it, which the restarted run must drop.
        run.wait("rows", lambda: run.steps()[-2] > run.saved())
        last = run.steps()[-1]
        run.learners()[rank].kill()
        began = time.monotonic()
        run.wait("the restart", lambda: len(run.starts()) > i)  # noqa: B023
        restarted = time.monotonic()
        # The new learners have not dropped the rows after their checkpoint yet.
        old = {*run.rows()}
        run.wait("an update", lambda: {*run.rows()} - old)  # noqa: B023
        kills.append(
            {
                "rank": rank,
                "restarted_s": restarted - began,
                "first_update_s": time.monotonic() - began,
                "steps_lost": max(0, last - run.starts()[i]),
            }
        )
        count = len(run.steps())
        run.wait("updates", lambda: len(run.steps()) > count + NUM_ROWS)  # noqa: B023
        print(
            f"learner {rank} of {flags.num_learners} killed: the first update after "
            f"{kills[-1]['first_update_s']:.1f} s",
            flush=True,
        )
    return kills


def main() -> int:
    parser = flag_types.Parser(
        prog="python -m benchmarks.recovery",
        description=__doc__.splitlines()[0],
        formatter_class=flag_types.HelpFormatter,
    )
    count = flag_types.int_at_least(1)
    parser.add_argument("--num_learners", type=count, default=2)
    parser.add_argument("--num_servers", type=count, default=2)
    parser.add_argument("--kills", type=count, default=6)
    parser.add_argument("--out", type=out_file, help="JSON file for the raw figures")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        path = f"unix:{folder}/env"
        servers = ["polybeast_env", "--env", "Catch", "--pipes_basename", path]
        servers += ["--num_servers", str(flags.num_servers)]
        torchrun = ["torch.distributed.run", "--standalone", "--monitor_interval=0.1"]
        torchrun += [f"--nproc_per_node={flags.num_learners}"]
        torchrun += [f"--max_restarts={flags.kills}", *LEARNER]
        torchrun += ["--savedir", name, "--batch_size", str(16 * flags.num_learners)]
        torchrun += ["--server_addresses", f"{path}.0-{flags.num_servers - 1}"]
        with program(servers, folder / "servers.txt") as environments:
            with program(torchrun, folder / "learners.txt") as learners:
                run = Run(learners, folder / "learners.txt", folder)
                run.wait("updates", lambda: run.steps())
                before = {p.pid for p in environments.children(recursive=True)}
                kills = measure(run, flags)
                after = {p.pid for p in environments.children(recursive=True)}
            steps = run.steps()
    assert steps == sorted({*steps}), "a step stands in logs.csv twice"
    assert before == after, "a server was started again"
    times = [kill["first_update_s"] for kill in kills]
    print(
        f"from kill to the first new update: median {statistics.median(times):.1f} s, "
        f"longest {max(times):.1f} s; {len(steps)} rows of logs.csv, each step once"
    )
    settings = {k: v for k, v in vars(flags).items() if k not in ("out", "kills")}
    write_figures(flags.out, **settings, kills=kills)
    return 0


if __name__ == "__main__":
    sys.exit(main())
