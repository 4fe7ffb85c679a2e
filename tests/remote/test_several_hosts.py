# SPDX-License-Identifier: Apache-2.0
"""One learner and env servers on two other hosts, which network namespaces play.

Seen red: with both cables cut, with a cable that is never mended, with servers that
play other actions than they are told, and with a Hosts that does not clean up.
"""

import importlib.util
import os
import subprocess

import psutil
import pytest

from examples import several_hosts
from tests import namespaces
from tests.conftest import wait_until
from tests.namespaces import ip


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces():
    namespaces.require()


def left_over():
    return [n for n in ip("netns", "list").split() if f"torchbeast-{os.getpid()}" in n]


def processes(hosts):
    pids = [ip("netns", "pids", host).split() for host in (hosts.learner, *hosts.envs)]
    return [psutil.Process(int(pid)) for part in pids for pid in part]


def none_runs(processes):
    return not any(process.is_running() for process in processes)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("cryptography") is None, reason="pip install cryptography"
)
def test_training_goes_on_while_a_host_is_cut_off_and_the_host_comes_back(tmp_path):
    with several_hosts.Hosts() as hosts:
        experiment = several_hosts.Experiment(hosts, tmp_path)
        experiment.run()
        running = processes(hosts)
        assert len(running) >= 5  # The learner; two supervisors and their servers.
        assert experiment.stop() == [several_hosts.STOPPED, 0, 0]
    first, *cut = [m for m in experiment.moments if m.cable0 == "cut"]
    assert cut[-1].time_s - first.time_s >= several_hosts.CUT_S / 2
    assert [m.received[0] for m in cut] == [0] * len(cut)
    assert experiment.steps_during_cut() > 0
    last = experiment.moments[-1]
    assert last.cable0 == "mended"
    assert last.streams == 2 * several_hosts.STREAMS_PER_HOST
    assert min(last.received) >= several_hosts.ROWS_BYTES
    assert last.mean_return >= 0.95
    assert left_over() == []
    assert none_runs(running)


def test_a_failure_leaves_no_namespace_and_no_process():
    running = []

    def fail():
        with several_hosts.Hosts() as hosts:
            server = hosts.start(hosts.envs[0], "polybeast_env", "--num_servers", "1")
            program = psutil.Process(server.pid)
            # A guard, and the server that it guards.
            wait_until(lambda: len(program.children(recursive=True)) == 2)
            running.extend(processes(hosts))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(running) == 3
    assert left_over() == []
    wait_until(lambda: none_runs(running))  # The child hears of the parent's end.


def test_hosts_that_cannot_be_made_leave_no_namespace():
    hosts = several_hosts.Hosts()
    ip("netns", "add", hosts.envs[1])  # Somebody else has that name.
    try:
        with pytest.raises(subprocess.CalledProcessError), hosts:
            pass
        assert left_over() == [hosts.envs[1]]
    finally:
        ip("netns", "delete", hosts.envs[1])
