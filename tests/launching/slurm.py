# SPDX-License-Identifier: Apache-2.0
"""A Slurm of this machine alone: its daemons, configuration and state in one folder."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
DEADLINE_S = 30
# Preemption as sites have it: jobs of the partition `low` get SIGTERM, GraceTime to
# end, and a place in the queue. A requeued job waits for cred_expire (default: 120 s).
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL PriorityTier=2
"""


class Slurm:
    """A running cluster of one node, with the partitions `low` and `high`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: object, env: Mapping[str, str] = {}, **options) -> str:
        """Run a command of Slurm's; return what it prints."""
        done = subprocess.run(
            [str(part) for part in command],
            env={**self.env, **env},
            **options,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def describe(self, job: str) -> dict[str, str]:
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)

    def state(self, job: str) -> str:
        """Return such as "RUNNING", "PENDING", "COMPLETED"."""
        return self.describe(job)["JobState"]


def require_slurm() -> None:
    """Skip the test where no Slurm can be started."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(
            f"there is no {missing[0]} (Debian: apt-get install slurm-wlm munge)"
        )
    if os.geteuid() != 0:
        pytest.skip("needs root, to start Slurm's daemons")


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Start a cluster; stop its daemons and jobs at the end."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        controller_port, node_port = (one.getsockname()[1] for one in sockets)
    configuration = CONFIGURATION.format(
        host=socket.gethostname().partition(".")[0],
        folder=folder,
        controller_port=controller_port,
        node_port=node_port,
    )
    (folder / "slurm.conf").write_text(configuration)
    munge = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    munge += [f"--key-file={key}", f"--socket={folder}/munge.socket", "--force"]
    cluster = Slurm(folder)
    daemons: list[subprocess.Popen] = []
    try:
        for command in (
            ["munged", "--foreground", *munge],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        ):
            daemons.append(
                subprocess.Popen(
                    command,
                    env=cluster.env,
                    stdin=subprocess.DEVNULL,
                    stdout=(folder / f"{command[0]}.out").open("w"),
                    stderr=subprocess.STDOUT,
                )
            )
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists)
        wait_until(
            lambda: cluster.run("sinfo", "-h", "-o", "%T", "-p", "low") == "idle"
        )
        yield cluster
    finally:
        if len(daemons) == 3:
            _cancel_all(cluster)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(DEADLINE_S)


def _cancel_all(cluster: Slurm) -> None:
    subprocess.run(["scancel", "--user=root"], env=cluster.env, timeout=DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and cluster.run("squeue", "-h"):
        time.sleep(0.1)
