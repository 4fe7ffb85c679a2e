# SPDX-License-Identifier: Apache-2.0
"""A Slurm of two nodes, which network namespaces play: its daemons in one folder."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests import namespaces
from tests.conftest import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("node0", "node1")
DEADLINE_S = 30
LOOK_S = 0.2  # Between two questions to Slurm. Each starts programs.
# Preemption as sites have it: jobs of the partition `low` get SIGTERM, GraceTime to
# end, and a place in the queue. A requeued job waits for cred_expire (default: 120 s).
CONFIGURATION = """
ClusterName=test
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[0-1] CPUs=8 RealMemory=1000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL PriorityTier=2
"""

# Runs a command, and reaps the processes that are orphaned below it. Slurm waits for
# the last zombie of a job in steps of 1 and 2 s, and the first process of a container
# may leave zombies for seconds.
REAPER = """
import ctypes, os, signal, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
child = subprocess.Popen(sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: child.terminate())
while os.wait()[0] != child.pid:
    pass
"""


class Slurm:
    """A running cluster of two nodes, with the partitions `low` and `high`."""

    def __init__(self, folder: Path, hosts: namespaces.Hosts):
        self.folder = folder
        self.hosts = hosts
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: object, env: Mapping[str, str] = {}, **options) -> str:
        """Run a command of Slurm's on node0; return what it prints."""
        done = subprocess.run(
            self.hosts.on("node0", *(str(part) for part in command)),
            env={**self.env, **env},
            **options,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def wait_until(self, condition: Callable[[], object], **limit: float) -> None:
        """Poll a condition that asks Slurm."""
        wait_until(condition, poll_s=LOOK_S, **limit)

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
    namespaces.require()


@contextlib.contextmanager
def running_slurm(folder: Path) -> Iterator[Slurm]:
    """Start a cluster; stop its daemons and jobs at the end."""
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    munge = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    munge += [f"--key-file={key}", f"--socket={folder}/munge.socket", "--force"]
    with namespaces.Hosts(NODES, folder) as hosts:
        cluster = Slurm(folder, hosts)
        daemons: list[subprocess.Popen] = []
        try:
            for name, node, *flags in (
                ("munged", "node0", "--foreground", *munge),
                ("slurmctld", "node0", "-D"),
                *(("slurmd", node, "-D") for node in NODES),
            ):
                daemons.append(
                    subprocess.Popen(
                        [sys.executable, "-c", REAPER, *hosts.on(node, name, *flags)],
                        env=cluster.env,
                        stdin=subprocess.DEVNULL,
                        stdout=(folder / f"{name}-{node}.out").open("w"),
                        stderr=subprocess.STDOUT,
                    )
                )
                if name == "munged":
                    wait_until((folder / "munge.socket").exists)
            cluster.wait_until(
                lambda: (
                    cluster.run("sinfo", "-h", "-N", "-o", "%T", "-p", "low")
                    == "idle\nidle"
                )
            )
            yield cluster
        finally:
            try:
                if len(daemons) == 4:
                    _cancel_all(cluster)
            finally:
                for daemon in reversed(daemons):
                    daemon.terminate()
                    daemon.wait(DEADLINE_S)


def _cancel_all(cluster: Slurm) -> None:
    cluster.run("scancel", "--user=root")
    cluster.wait_until(lambda: not cluster.run("squeue", "-h"))
