# SPDX-License-Identifier: Apache-2.0
"""What it costs that servers come and go: two runs side by side.

    python -m benchmarks.churn                # ten minutes, and some to start
    python -m benchmarks.churn --minutes 0.2 --num_servers 8 --replaced 3

Both runs play Catch on --num_servers servers, which they know from a file. In one of
the runs a tenth of the servers is replaced every minute, one at a time and at random:
the server ends, another one begins at a new address, and the file changes. Both share
the machine all the while, so what slows the machine down slows both. Printed for each
run: its steps per second, its ledger, and its threads and file descriptors at the
beginning and at the end. With --out a JSON file has the same, and the steps of both
runs about once a second.
"""

import argparse
import contextlib
import csv
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from core import flag_types
from core.environments.toys import Catch
from core.remote.env_server import Server
from core.running.machine import num_cores
from core.running.supervise import start_thread

START_S = 120.0  # For all servers to be connected.
SETTLE_S = 5.0  # For the last replaced servers to be connected.
NUM_ENVS = 8  # Of each server.
LEARNER = (
    *("--batch_size", "32", "--unroll_length", "20", "--total_steps", "1000000000"),
    *("--log_interval_s", "1", "--disable_checkpoint", "--xpid", "churn"),
)


@dataclasses.dataclass
class Size:
    """What a process holds."""

    threads: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> "Size":
        process = psutil.Process(pid)
        return cls(process.num_threads(), process.num_fds())


def serve(commands: multiprocessing.connection.Connection) -> None:
    """Start and stop servers as told. Body of a process that has several."""
    servers = {}
    while True:
        try:
            verb, address = commands.recv()
        except EOFError:
            break
        if verb == "start":
            server = Server(Catch, address, num_envs=NUM_ENVS)
            server.start()
            servers[address] = server, start_thread(address, server.run)
        else:
            server, thread = servers.pop(address)
            server.stop()
            thread.result()
        commands.send(None)
    for server, _ in servers.values():
        server.stop()


class Servers:
    """Servers in a few processes, and the file with their addresses."""

    def __init__(self, folder: Path, num_servers: int, num_processes: int):
        self._folder = folder
        self.file = folder / "hosts"
        self._pipes = []
        self._count = 0
        self._running: list[tuple[str, multiprocessing.connection.Connection]] = []
        context = multiprocessing.get_context("spawn")
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(theirs,), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)
        for i in range(num_servers):
            self._start(self._pipes[i % num_processes])
        self._write()

    def replace_one(self, rng: random.Random) -> None:
        address, pipe = self._running.pop(rng.randrange(len(self._running)))
        self._tell(pipe, "stop", address)
        self._start(pipe)
        self._write()

    def _start(self, pipe: multiprocessing.connection.Connection) -> None:
        address = f"unix:{self._folder}/{self._count}"
        self._count += 1
        self._running.append((address, pipe))
        self._tell(pipe, "start", address)

    def _tell(
        self, pipe: multiprocessing.connection.Connection, verb: str, address: str
    ) -> None:
        pipe.send((verb, address))
        pipe.recv()  # It is done.

    def _write(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{address}\n" for address, _ in self._running))
        os.replace(new, self.file)


class Run:
    """A learner with servers of its own."""

    def __init__(self, name: str, flags: argparse.Namespace, root: Path):
        self.name = name
        self._folder = root / name
        self._folder.mkdir()
        self._csv = self._folder / "churn" / "logs.csv"
        self._num_streams = flags.num_servers
        self.servers = Servers(self._folder, flags.num_servers, flags.num_processes)
        command = [sys.executable, "-m", "polybeast", *LEARNER]
        command += ["--savedir", str(self._folder)]
        command += ["--server_addresses", f"@{self.servers.file}"]
        command += ["--max_streams", str(flags.num_servers)]
        with open(self._folder / "log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self._first: tuple[float, int] = (0.0, 0)
        self._before = self._after = Size(0, 0)

    def wait_connected(self) -> None:
        """Wait until every server has its stream."""
        deadline = time.monotonic() + START_S
        while self._column("streams") != self._num_streams:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: {self._log()[-2000:]}")
            time.sleep(0.2)

    def begin(self) -> None:
        self._before = Size.of(self.process.pid)
        self._first = (time.monotonic(), self._column("step"))

    def end(self) -> float:
        """Return the steps per second since `begin`."""
        began, step = self._first
        return (self._column("step") - step) / (time.monotonic() - began)

    def stop(self) -> dict[str, Any]:
        """Stop the learner; return its ledger and its size before and after."""
        self._after = Size.of(self.process.pid)
        discarded = self._column("steps_discarded")
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait()
        ledger = re.findall(r"\d+ rows received = .*", self._log())
        if not ledger:
            raise RuntimeError(f"{self.name}: status {status}: {self._log()[-2000:]}")
        return {
            "run": self.name,
            "status": status,
            "ledger": ledger[-1],
            "steps_discarded": discarded,
            "before": dataclasses.asdict(self._before),
            "after": dataclasses.asdict(self._after),
        }

    def curve(self) -> list[tuple[float, int]]:
        """Return the time and the step of each row of the log since `begin`."""
        with self._csv.open() as file:
            rows = [(float(r["time_s"]), int(r["step"])) for r in csv.DictReader(file)]
        return [row for row in rows if row[1] >= self._first[1]]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def _column(self, name: str) -> int:
        if not self._csv.exists():
            return 0
        with self._csv.open() as file:
            rows = [row[name] for row in csv.DictReader(file) if row.get(name)]
        return int(rows[-1]) if rows else 0


def measure(
    flags: argparse.Namespace, root: Path, stack: contextlib.ExitStack
) -> dict[str, Any]:
    """Do both runs side by side; print the result and return it."""
    rng = random.Random(flags.seed)
    runs = []
    for name in ("undisturbed", "disturbed"):
        runs.append(Run(name, flags, root))
        stack.callback(runs[-1].kill)
    for run in runs:
        run.wait_connected()
    for run in runs:
        run.begin()
    began = time.monotonic()
    period_s = 60 / (flags.replaced or flags.num_servers / 10)
    num_replaced = 0
    while (now := time.monotonic() - began) < 60 * flags.minutes:
        if now < (num_replaced + 0.5) * period_s:
            time.sleep(0.05)
            continue
        runs[1].servers.replace_one(rng)
        num_replaced += 1
    speeds = [run.end() for run in runs]
    time.sleep(SETTLE_S)
    runs[1].wait_connected()
    result: dict[str, Any] = {"replaced": num_replaced, "runs": []}
    for run, speed in zip(runs, speeds, strict=True):
        end = run.stop() | {"steps_per_s": speed}
        print("; ".join(f"{name} {value}" for name, value in end.items()), flush=True)
        result["runs"].append(end | {"time_s_and_step": run.curve()})
    print(
        f"{num_replaced} of {flags.num_servers} servers replaced in {flags.minutes:g} "
        f"minutes; disturbed / undisturbed: {speeds[1] / speeds[0]:.1%}"
    )
    return result


def main() -> int:
    parser = flag_types.Parser(
        prog="python -m benchmarks.churn",
        description=__doc__.splitlines()[0],
        formatter_class=flag_types.HelpFormatter,
    )
    count = flag_types.int_at_least(1)
    parser.add_argument("--num_servers", type=count, default=64, help="of each run")
    parser.add_argument(
        "--num_processes", type=count, default=4, help="that have a run's servers"
    )
    parser.add_argument(
        "--replaced",
        type=flag_types.number(0.1),
        help="servers replaced per minute. Default: a tenth of them",
    )
    parser.add_argument("--minutes", type=flag_types.number(0.01), default=10.0)
    parser.add_argument("--seed", type=flag_types.int_at_least(0), default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the raw figures")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="churn-") as folder:
        with contextlib.ExitStack() as stack:
            result = measure(flags, Path(folder), stack)
    if flags.out:
        settings = {k: v for k, v in vars(flags).items() if k != "out"}
        # Rows that are short: a line for each would be half the repository.
        text = json.dumps({"cores": num_cores(), "settings": settings, **result})
        flags.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
