# SPDX-License-Identifier: Apache-2.0
"""PolyBeast on three hosts, which this machine simulates.

Needs Linux, root, the command `ip`, and the package cryptography for certificates.

    sudo .venv/bin/python examples/several_hosts.py

Each host is a network namespace. A cable (a veth pair) connects the host of the learner
with each of the two hosts of environment servers. The connections use TLS:

     host learner                             host env0
    ┌─────────────────────┐                  ┌─────────────────────────┐
    │                     │  cable0          │ python -m polybeast_env │
    │           10.77.0.1 ├──────── ✂ ───────┤ 10.77.0.2:4431          │
    │                     │                  └─────────────────────────┘
    │ python -m polybeast │                   host env1
    │                     │                  ┌─────────────────────────┐
    │                     │  cable1          │ python -m polybeast_env │
    │           10.77.1.1 ├──────────────────┤ 10.77.1.2:4431          │
    └─────────────────────┘                  └─────────────────────────┘

The learner trains on Catch. At step CUT_AT_STEP cable0 is cut for ten seconds: training
goes on with env1, and env0 connects again by itself. The program prints a line each
second and takes half a minute. On real hosts, use the commands that it prints.
"""

import contextlib
import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORT = 4431
STREAMS_PER_HOST = 2
CUT_S = 10.0
TICK_S = 1.0
DEADLINE_S = 90.0  # For the start, and for what follows the cut.
CUT_AT_STEP = 10_000
SOLVED = 0.95
ROWS_BYTES = 50_000  # A cable that carried so many in a tick carried rows.
WAITING_STEPS = 4 * 16 * 20  # A few batches: what the learner may have in store.
STOPPED = 75  # The learner's exit status when a signal ends it, with a checkpoint.


class Hosts:
    """Network namespaces: `learner`, with a cable to each of `envs`.

    A context manager; at the end the namespaces are gone, with what ran in them.
    """

    def __init__(self) -> None:
        self.learner = f"torchbeast-{os.getpid()}-learner"
        self.envs = [f"torchbeast-{os.getpid()}-env{i}" for i in range(2)]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Hosts":
        with contextlib.ExitStack() as stack:
            for host in (self.learner, *self.envs):
                ip("netns", "add", host)
                stack.callback(ip, "netns", "delete", host)
            for i, host in enumerate(self.envs):
                cable = f"link add cable{i} type veth peer name eth0 netns {host}"
                ip("-n", self.learner, *cable.split())
                for where, device, address in (
                    (self.learner, f"cable{i}", f"10.77.{i}.1/24"),
                    (host, "eth0", f"{self.address(i)}/24"),
                ):
                    ip("-n", where, "address", "add", address, "dev", device)
                    ip("-n", where, "link", "set", device, "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def start(self, host: str, module: str, *flags: str) -> subprocess.Popen:
        """Start `python -m module` on a host. What still runs at the end is killed."""
        print(f"{host}$ python -m {module} {' '.join(flags)}", flush=True)
        command = [sys.executable, "-m", module, *flags]
        process = subprocess.Popen(["ip", "netns", "exec", host, *command], cwd=ROOT)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def address(self, i: int) -> str:
        return f"10.77.{i}.2"

    def received(self, i: int) -> int:
        """Return the bytes that the learner has received over cable i so far."""
        text = ip("-n", self.learner, "-json", "-s", "link", "show", f"cable{i}")
        return json.loads(text)[0]["stats64"]["rx"]["bytes"]

    def cut(self, i: int) -> None:
        ip("-n", self.envs[i], "link", "set", "eth0", "down")

    def mend(self, i: int) -> None:
        ip("-n", self.envs[i], "link", "set", "eth0", "up")


def make_certificates(folder: Path, addresses: list[str]) -> None:
    """Make a folder for each host and the learner; real hosts would get copies."""
    command = ["-m", "tools.certs", "--hosts", ",".join(addresses), "--out"]
    subprocess.run(
        [sys.executable, *command, str(folder)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def ip(*args: str) -> str:
    return subprocess.run(
        ["ip", *args], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


@dataclasses.dataclass(frozen=True)
class Moment:
    """How it went at one time, in one line of the table."""

    cable0: str  # "whole", "cut" or "mended"
    time_s: float
    step: int
    mean_return: float
    streams: int  # Connected, as far as the learner knows.
    reconnects: int
    received: tuple[int, ...]  # Bytes over each cable since the moment before.

    def __str__(self) -> str:
        kilobytes = "  ".join(f"{n / 1000:8.1f}" for n in self.received)
        return (
            f"{self.time_s:6.1f}  {self.cable0:6}  {self.step:8}  {self.streams:7}  "
            f"{self.reconnects:10}  {self.mean_return:6.2f}  {kilobytes}"
        )


HEADER = "time_s  cable0      step  streams  reconnects  return    kB from env0, env1"


class Experiment:
    """Servers on two hosts and the learner on a third; `moments` is what happened."""

    def __init__(self, hosts: Hosts, savedir: Path):
        self.moments: list[Moment] = []
        self._hosts = hosts
        self._logs = savedir / "hosts" / "logs.csv"
        self._began = time.monotonic()
        self._received = [0, 0]
        certs = savedir / "certs"
        make_certificates(certs, [hosts.address(i) for i in range(2)])
        self.servers = [
            hosts.start(
                host,
                "polybeast_env",
                *("--env", "Catch", "--server_address", f"0.0.0.0:{PORT}"),
                *("--num_servers", "1", "--streams_per_server", str(STREAMS_PER_HOST)),
                *("--tls_dir", str(certs / hosts.address(i))),
            )
            for i, host in enumerate(hosts.envs)
        ]
        addresses = ",".join(f"{hosts.address(i)}:{PORT}" for i in range(2))
        self.learner = hosts.start(
            hosts.learner,
            "polybeast",
            *("--server_addresses", addresses, "--tls_dir", str(certs / "learner")),
            *("--batch_size", "16"),
            *("--learning_rate", "0.001", "--epsilon", "0.001"),
            *("--savedir", str(savedir), "--xpid", "hosts", "--log_interval_s", "0.5"),
        )

    def run(self) -> None:
        """Train, cut cable0, mend it, train until all is well.

        Raises:
          RuntimeError: the learner has ended.
          TimeoutError: not all is well after DEADLINE_S.
        """
        print(HEADER)
        total = 2 * STREAMS_PER_HOST
        self._watch(
            "whole", lambda now: now.streams == total and now.step >= CUT_AT_STEP
        )
        self._hosts.cut(0)
        mend_at = time.monotonic() + CUT_S
        self._watch("cut", lambda now: time.monotonic() >= mend_at)
        self._hosts.mend(0)
        self._watch(
            "mended",
            lambda now: (
                now.streams == total
                and min(now.received) >= ROWS_BYTES
                and now.mean_return >= SOLVED
            ),
        )

    def steps_during_cut(self) -> int:
        """Return the steps learned while env0 was away, without those in store."""
        cut = [moment.step for moment in self.moments if moment.cable0 == "cut"]
        return cut[-1] - cut[0] - WAITING_STEPS

    def stop(self) -> list[int]:
        """Stop the learner, then the servers; return their exit statuses."""
        statuses = []
        for process in (self.learner, *self.servers):
            process.terminate()
            statuses.append(process.wait(DEADLINE_S))
        return statuses

    def _watch(self, cable0: str, until: Callable[[Moment], bool]) -> None:
        """Note and print a moment at every tick, until one is as it should be."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            time.sleep(TICK_S)
            moment = self._now(cable0)
            self.moments.append(moment)
            if moment.streams:
                print(moment, flush=True)
            if until(moment):
                return
            if self.learner.poll() is not None:
                raise RuntimeError(f"the learner ended with {self.learner.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"cable0 has been {cable0} for {DEADLINE_S:g} s, and this is how "
                    f"it goes: {moment}"
                )

    def _now(self, cable0: str) -> Moment:
        before = self._received
        self._received = [self._hosts.received(i) for i in range(2)]
        row = self._newest_row()
        return Moment(
            cable0=cable0,
            time_s=time.monotonic() - self._began,
            step=int(row.get("step", 0)),
            mean_return=float(row.get("mean_episode_return") or "nan"),
            streams=int(row.get("streams", 0)),
            reconnects=int(row.get("reconnects", 0)),
            received=tuple(b - a for a, b in zip(before, self._received)),
        )

    def _newest_row(self) -> dict[str, str]:
        """Return the newest row of the run's logs.csv; {} if there is none yet."""
        if not self._logs.exists():
            return {}
        with open(self._logs, newline="") as file:
            rows = list(csv.DictReader(file))
        return rows[-1] if rows else {}


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as savedir, Hosts() as hosts:
        experiment = Experiment(hosts, Path(savedir))
        experiment.run()
        statuses = experiment.stop()
    last = experiment.moments[-1]
    print(
        f"{experiment.steps_during_cut()} steps were learned while env0 was away; "
        f"{last.reconnects} streams connected again, the others never noticed. "
        f"Mean return {last.mean_return:.2f}."
    )
    return 0 if statuses == [STOPPED, 0, 0] else 1


if __name__ == "__main__":
    sys.exit(main())
