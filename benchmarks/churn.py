# SPDX-License-Identifier: Apache-2.0
"""Measure what it costs that servers come and go: two runs side by side.

    python -m benchmarks.churn --way list     # 20 minutes, and some to start.
    python -m benchmarks.churn --way dial_in
    python -m benchmarks.churn --minutes 0.2 --num_servers 8 --replaced 3

Both runs play Catch on --num_servers servers. A file has the addresses of the servers
(--way list), or each server dials the learner as a machine of its own (--way dial_in).
In one of the runs a tenth of the servers is replaced every minute, one at a time and at
random: the server is killed, and another one begins at a new address. After --minutes
the runs change roles for the same time, because even two equal runs differ. Both share
the machine, so whatever slows the machine down slows both.

Prints for each run the sum of its rows, and the threads and file descriptors of the
learner and of its acceptor at the beginning and at the end, with the names of threads
whose number has changed. gRPC starts some threads when it needs them and ends them
later (default-executor: at most two per core). So the first count comes after each
server of both runs has been replaced once. With --out a JSON file has the same, and the
steps of both runs about once a second.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import logging
import math
import multiprocessing
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks import ROOT, describe_commit, out_file
from core import flag_types
from core.environments.toys import Catch
from core.remote.acceptor import LEAVE_S
from core.remote.dialer import Link
from core.remote.env_server import Server
from core.running.machine import num_cores
from core.running.supervise import send_at_parents_end, start_thread
from tools.runs import curve, log_rows

START_S = 120.0  # For all servers to be connected.
# For the last replaced servers to be connected, and the killed ones to be given up.
SETTLE_S = LEAVE_S + 5.0
NUM_ENVS = 8  # Of each server.
KEEPALIVE_S = 10.0  # polybeast's default.
LEARNER = (
    *("--batch_size", "32", "--unroll_length", "20", "--total_steps", "1000000000"),
    *("--log_interval_s", "1", "--disable_checkpoint", "--xpid", "churn"),
)


def size_of(pid: int) -> dict[str, Any]:
    """Return how many descriptors a process has, and how many threads of each name."""
    process = psutil.Process(pid)
    names: collections.Counter[str] = collections.Counter()
    for thread in process.threads():
        with contextlib.suppress(OSError):  # It has just ended.
            names[Path(f"/proc/{pid}/task/{thread.id}/comm").read_text().strip()] += 1
    return {"descriptors": process.num_fds(), "threads": dict(sorted(names.items()))}


def serve(address: str, learner: str | None, ready: Any) -> None:
    """Serve until killed. Body of a process that stands for a machine.

    Args:
      learner: where to dial in; None for a server that waits to be called.
      ready: to be told that the server listens.
    """
    send_at_parents_end(signal.SIGKILL)
    logging.disable()  # The end of the learner is no news.
    server = Server(Catch, address, num_envs=NUM_ENVS)
    server.start()
    thread = start_thread("server", server.run)
    ready.send(None)
    if learner is not None:
        path = address.removeprefix("unix:")
        link = Link(learner, [path], secrets.token_hex(16), None, KEEPALIVE_S)
        asyncio.run(link.stay())
    thread.result()


class Servers:
    """Servers, each in a process, and for --way list the file with their addresses."""

    def __init__(self, folder: Path):
        self.learner: str | None = None  # To dial in at; None for --way list.
        self._folder = folder
        self.file = folder / "hosts"
        self._count = 0
        self._running: list[tuple[str, Any]] = []
        # The server of the forks has imported all this: to start a server is cheap.
        self._context = multiprocessing.get_context("forkserver")
        modules = ["core.environments.toys", "core.remote.dialer"]
        self._context.set_forkserver_preload([*modules, "core.remote.env_server"])

    def start(self, num_servers: int) -> None:
        for _ in range(num_servers):
            self._start()
        self._write()

    def replace_one(self, rng: random.Random) -> None:
        """Kill a server at random, and start another one at a new address."""
        self._replace(rng.randrange(len(self._running)))

    def replace_oldest(self) -> None:
        self._replace(0)

    def _replace(self, index: int) -> None:
        _, process = self._running.pop(index)
        process.kill()
        process.join()
        process.close()
        self._start()
        self._write()

    def kill(self) -> None:
        for _, process in self._running:
            process.kill()

    def _start(self) -> None:
        address = f"unix:{self._folder}/{self._count}"
        self._count += 1
        ours, theirs = self._context.Pipe()
        args = (address, self.learner, theirs)
        process = self._context.Process(target=serve, args=args, daemon=True)
        process.start()
        self._running.append((address, process))
        theirs.close()
        with ours:
            ours.recv()  # It listens.

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
        self._run_dir = self._folder / "churn"
        self._num_streams = flags.num_servers
        self.servers = Servers(self._folder)
        command = [sys.executable, "-m", "polybeast", *LEARNER]
        command += ["--savedir", str(self._folder)]
        # A server that was killed keeps its place until the learner knows of its end.
        command += ["--max_streams", str(2 * flags.num_servers)]
        if flags.way == "list":
            self.servers.start(flags.num_servers)
            command += ["--server_addresses", f"@{self.servers.file}"]
        else:
            command += ["--listen", "127.0.0.1:0"]
        with open(self._folder / "log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self._first: tuple[float, int] = (0.0, 0)  # A row of `curve`.

    def dial_in(self, num_servers: int) -> None:
        """Let servers dial the learner."""
        said = re.compile(r"--learner_address (127.0.0.1:\d+)")
        self._wait(lambda: said.search(self._log()))
        match = said.search(self._log())
        assert match is not None
        self.servers.learner = match[1]
        self.servers.start(num_servers)

    def wait_connected(self) -> None:
        """Wait until every server has its stream."""
        self._wait(lambda: self._column("streams") == self._num_streams)

    def _wait(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: {self._log()[-2000:]}")
            time.sleep(0.2)

    def begin(self) -> None:
        self._first = self.curve()[-1]

    def end(self) -> float:
        """Return the steps per second since `begin`."""
        (began, first), (ended, last) = self._first, self.curve()[-1]
        return (last - first) / (ended - began)

    def stop(self) -> dict[str, Any]:
        """Stop the learner; return its ledger."""
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
        }

    def sizes(self) -> dict[str, dict[str, Any]]:
        """Return the size of the learner, and of its acceptor if it has one."""
        sizes = {"learner": size_of(self.process.pid)}
        for child in psutil.Process(self.process.pid).children():
            if "core.remote.acceptor" in child.cmdline():
                sizes["acceptor"] = size_of(child.pid)
        return sizes

    def curve(self) -> list[tuple[float, int]]:
        """Return the time and the step of each row of the log."""
        return curve(self._run_dir)

    def kill(self) -> None:
        self.servers.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def _column(self, name: str) -> int:
        cells = [row[name] for row in log_rows(self._run_dir) if row[name]]
        return int(cells[-1]) if cells else 0


def start_runs(
    flags: argparse.Namespace, root: Path, stack: contextlib.ExitStack
) -> list[Run]:
    """Start both runs; replace each server once, so that threads are counted late."""
    runs = []
    for name in ("run_1", "run_2"):
        runs.append(Run(name, flags, root))
        stack.callback(runs[-1].kill)
    for run in runs:
        if flags.way == "dial_in":
            run.dial_in(flags.num_servers)
        run.wait_connected()
    for _ in range(flags.num_servers):
        for run in runs:
            run.servers.replace_oldest()
    time.sleep(SETTLE_S)
    for run in runs:
        run.wait_connected()
    return runs


def measure(
    flags: argparse.Namespace, root: Path, stack: contextlib.ExitStack
) -> dict[str, Any]:
    """Do both runs side by side, in both roles; print the result and return it."""
    rng = random.Random(flags.seed)
    runs = start_runs(flags, root, stack)
    before = [run.sizes() for run in runs]
    result: dict[str, Any] = {"halves": [], "runs": []}
    ratios = []
    for disturbed in (1, 0):
        half = disturb(runs, disturbed, rng, flags)
        result["halves"].append(half)
        speeds = half["steps_per_s"]
        ratios.append(speeds[disturbed] / speeds[1 - disturbed])
        print("; ".join(f"{name} {value}" for name, value in half.items()), flush=True)
    after = [run.sizes() for run in runs]
    for i, run in enumerate(runs):
        end = run.stop()
        print("; ".join(f"{name} {value}" for name, value in end.items()))
        for program in before[i]:
            print(f"  {program}: {compare(before[i][program], after[i][program])}")
        end |= {"before": before[i], "after": after[i]}
        result["runs"].append(end | {"time_s_and_step": run.curve()})
    print(
        f"--way {flags.way}: disturbed / undisturbed: {ratios[0]:.1%} and "
        f"{ratios[1]:.1%}, mean {math.sqrt(ratios[0] * ratios[1]):.1%}",
        flush=True,
    )
    return result


def disturb(
    runs: list[Run], disturbed: int, rng: random.Random, flags: argparse.Namespace
) -> dict[str, Any]:
    """Replace servers of one run; return how many, and the speed of each run."""
    for run in runs:
        run.begin()
    began = time.monotonic()
    period_s = 60 / (flags.replaced or flags.num_servers / 10)
    num_replaced = 0
    while (now := time.monotonic() - began) < 60 * flags.minutes:
        if now < (num_replaced + 0.5) * period_s:
            time.sleep(0.05)
            continue
        runs[disturbed].servers.replace_one(rng)
        num_replaced += 1
    speeds = [run.end() for run in runs]
    time.sleep(SETTLE_S)
    runs[disturbed].wait_connected()
    name = runs[disturbed].name
    return {"disturbed": name, "replaced": num_replaced, "steps_per_s": speeds}


def compare(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Describe two sizes, with the names of the threads that have become more."""
    more = collections.Counter(after["threads"])
    more.subtract(before["threads"])
    changed = [f"{number:+} {name}" for name, number in more.items() if number]
    return (
        f"descriptors {before['descriptors']} -> {after['descriptors']}, threads "
        f"{sum(before['threads'].values())} -> {sum(after['threads'].values())}"
        + (f" ({', '.join(changed)})" if changed else "")
    )


def main() -> int:
    parser = flag_types.Parser(
        prog="python -m benchmarks.churn",
        description=__doc__.splitlines()[0],
        formatter_class=flag_types.HelpFormatter,
    )
    count = flag_types.int_at_least(1)
    parser.add_argument("--num_servers", type=count, default=64, help="of each run")
    parser.add_argument(
        "--way",
        choices=("list", "dial_in"),
        default="list",
        help="how the learner finds its servers: by a file, or they dial in",
    )
    parser.add_argument(
        "--replaced",
        type=flag_types.number(0.1),
        help="servers replaced per minute. Default: a tenth of them",
    )
    parser.add_argument(
        "--minutes", type=flag_types.number(0.1), default=10.0, help="in each role"
    )
    parser.add_argument("--seed", type=flag_types.int_at_least(0), default=1)
    parser.add_argument("--out", type=out_file, help="JSON file for the raw figures")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="churn-") as folder:
        with contextlib.ExitStack() as stack:
            result = measure(flags, Path(folder), stack)
    if flags.out:
        settings = {k: v for k, v in vars(flags).items() if k != "out"}
        # Rows that are short: a line for each would be half the repository.
        origin = {"commit": describe_commit(ROOT), "cores": num_cores()}
        text = json.dumps({**origin, "settings": settings, **result})
        flags.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
