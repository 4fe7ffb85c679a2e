# SPDX-License-Identifier: Apache-2.0
"""One learner and env servers on other hosts, which network namespaces play."""

import importlib.util
import os
import subprocess
import sys

import psutil
import pytest

from examples import several_hosts
from tests import namespaces
from tests.conftest import DEADLINE_S, wait_until
from tests.namespaces import ip
from tools.runs import log_rows

needs_certificates = pytest.mark.skipif(
    importlib.util.find_spec("cryptography") is None, reason="pip install cryptography"
)
# Listens at a port until its stdin is closed.
LISTEN = """
import socket, sys
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("listens", flush=True)
sys.stdin.read()
"""
CONNECT = """
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1)
"""


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
@needs_certificates
def test_training_goes_on_while_a_host_is_cut_off_and_the_host_comes_back(
    tmp_path, monkeypatch
):
    """The example waits longer, until Catch is learned."""
    for name, value in {"CUT_AT_STEP": 1000, "CUT_S": 5.0, "SOLVED": -1.0}.items():
        monkeypatch.setattr(several_hosts, name, value)
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


@pytest.mark.slow
@needs_certificates
def test_servers_behind_a_firewall_dial_in_and_train_a_run_to_its_end(tmp_path):
    several_hosts.make_certificates(tmp_path / "certs", ["envs"])
    port = several_hosts.PORT

    def python(host, *argv):
        return hosts.on(host, sys.executable, *map(str, argv))

    def connect(host):
        """Return the last line of a traceback, such as "TimeoutError: timed out"."""
        done = subprocess.run(
            python(host, "-c", CONNECT, "envs", port), capture_output=True, text=True
        )
        return done.stderr.strip().rpartition("\n")[2]

    with namespaces.Hosts(("learner", "envs"), tmp_path) as hosts:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(python("envs", "-c", LISTEN, port), **pipes) as listener:
            assert listener.stdout.readline() == b"listens\n"
            assert connect("learner") == ""
            hosts.close("envs", port=port)
            assert connect("learner") == "TimeoutError: timed out"
            assert connect("envs") == ""  # It still listens.
        serve = ["--env", "Catch", "--num_servers", 1, "--envs_per_stream", 2]
        serve += ["--learner_address", f"learner:{port}"]
        serve += ["--tls_dir", tmp_path / "certs" / "envs"]
        learn = ["--listen", f"0.0.0.0:{port}"]
        learn += ["--tls_dir", tmp_path / "certs" / "learner"]
        learn += ["--total_steps", 2000, "--batch_size", 4, "--unroll_length", 5]
        learn += ["--savedir", tmp_path / "runs", "--xpid", "x"]
        servers = subprocess.Popen(
            python("envs", "-m", "polybeast_env", *serve), cwd=several_hosts.ROOT
        )
        try:
            done = subprocess.run(
                python("learner", "-m", "polybeast", *learn),
                cwd=several_hosts.ROOT,
                timeout=DEADLINE_S,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        finally:
            status = namespaces.stop(servers)
    assert done.returncode == 0, done.stdout
    assert status == 0
    assert "10.78.0.2" in done.stdout and "certificate of envs" in done.stdout
    assert int(log_rows(tmp_path / "runs" / "x")[-1]["step"]) >= 2000
