# SPDX-License-Identifier: Apache-2.0
"""What SECURITY.md says of local surface, pickle and secrets, seen on whole runs."""

import ast
import contextlib
import errno
import itertools
import os
import re
import socket
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

import libtorchbeast
from core.remote import codec, stream
from core.remote.messages import ToLearner
from tests import counting_env
from tests.conftest import Program, wait_until

pytest.importorskip("grpc", reason="pip install grpcio")
from tests.env_client import EnvClient  # noqa: E402
from tools.runs import log_rows, num_rows  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SECRET = "correct-horse-battery-staple"
ENDLESS = 10**9
NOBODY = 65534
RUN = ["--env", "Catch", "--xpid", "x", "--log_interval_s", "0"]
RUN += ["--batch_size", "4", "--unroll_length", "5", "--total_steps", str(ENDLESS)]
LOCAL = ["--num_servers", "2", "--streams_per_server", "1", "--envs_per_stream", "2"]

# Python runs it when it starts, in the learner and in the servers. What an import does
# is left out: its code is this installation's, and reads and runs files of code.
AUDIT = """
import os, sys, time

NOTED = ("pickle.find_class", "marshal.load", "marshal.loads", "exec", "os.system",
         "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.fork")
log = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def is_import():
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def note(event, args):
    if event in NOTED and not is_import():
        write(event, args)


def write(event, args):
    line = f"{time.monotonic()} {os.getpid()} {event} {args!r:.300}"
    os.write(log, line.replace(chr(10), " ").encode() + b"\\n")


sys.addaudithook(note)
write("begin", sys.orig_argv)
"""


class Run(Program):
    """A running `python -m <module>`, with nothing to mask modes."""

    def __init__(self, folder: Path, module: str, *flags: str, **env: str):
        self.folder = folder / "runs" / "x"
        command = [sys.executable, "-m", module, *flags]
        output, env = folder / f"{module}.txt", {**os.environ, **env}
        super().__init__(output, *command, env=env, umask=0)

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.pid), *self.family()]

    def wait_for_rows(self, n: int) -> None:
        """Wait for n more rows of the log."""
        n += num_rows(self.folder)
        self.wait_for(lambda: num_rows(self.folder) >= n)
        assert self.is_alive(), self.text()

    def stop(self) -> int:
        self.process.terminate()
        return self.wait()


def listeners(processes: list[psutil.Process]) -> list[tuple[str, int]]:
    """Return where processes listen for TCP, and any UDP sockets."""
    return [
        tuple(connection.laddr)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    ]


@pytest.fixture(scope="module")
def polybeast_run(tmp_path_factory) -> SimpleNamespace:
    """A run from its first to its last moment, and what was seen in between.

    A server is killed on the way, and replaced.
    """
    folder = tmp_path_factory.mktemp("polybeast")
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(AUDIT)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"PYTHONPATH": path, "AUDIT_LOG": str(folder / "audit"), "MY_TOKEN": SECRET}
    flags = [*RUN, *LOCAL, "--savedir", str(folder / "runs")]
    with Run(folder, "polybeast", *flags, **env) as run:
        run.wait_for_rows(3)
        run.wait_for(lambda: log_rows(run.folder)[-1]["streams"] == "2")
        began = time.monotonic()
        [servers] = psutil.Process(run.pid).children()
        sockets = {c.laddr for p in run.processes() for c in p.net_connections("unix")}
        modes = {
            Path(path): stat.S_IMODE(os.stat(path).st_mode)
            for path in sockets
            if "torchbeast-" in path
        }
        seen = SimpleNamespace(
            began=began,
            listeners=listeners(run.processes()),
            modes=modes,
            folder_modes={stat.S_IMODE(os.stat(p.parent).st_mode) for p in modes},
            connected_as_nobody={connect_as_nobody(path) for path in modes},
            run_folder=run.folder,
        )
        guard = servers.children()[0]
        guard.children()[0].kill()
        run.wait_for_text("connected again")
        run.wait_for_rows(3)
        assert run.stop() == 75, run.text()
    seen.audit = [
        (float(when), int(pid), event, args)
        for when, pid, event, args in (
            line.split(" ", 3) for line in (folder / "audit").read_text().splitlines()
        )
    ]
    return seen


def connect_as_nobody(path: Path) -> int | None:
    """Return the errno of connecting as the user nobody; None if this is not root."""
    if os.geteuid() != 0:
        return None
    with socket.socket(socket.AF_UNIX) as client:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        try:
            return client.connect_ex(str(path))
        finally:
            os.seteuid(0)
            os.setegid(0)


# ------------------------------------------------------------------------- who listens


def is_loopback(address: tuple[str, int]) -> bool:
    host = address[0].removeprefix("::ffff:")  # An IPv4 address in an IPv6 socket.
    return host == "::1" or host.startswith("127.")


def test_a_polybeast_run_listens_at_unix_sockets_only(polybeast_run):
    assert polybeast_run.listeners == []
    assert len(polybeast_run.modes) == 4  # Of two servers, for gRPC and for streams.


def test_a_monobeast_run_listens_nowhere(start, tmp_path):
    program = start(*RUN, "--num_actors", "1", "--envs_per_actor", "4")
    program.wait_for(lambda: num_rows(tmp_path / "runs" / "x") >= 3)
    processes = [psutil.Process(program.pid), *program.family()]
    assert len(processes) >= 3  # A fork server and an actor, at least.
    assert listeners(processes) == []


def serving(tmp_path: Path, *flags: str) -> Run:
    flags = ("--env", "Catch", "--num_servers", "1", *flags)
    return Run(tmp_path, "polybeast_env", *flags)


def test_environment_servers_listen_to_this_machine_only(tmp_path):
    with serving(tmp_path) as run:  # At the default port.
        wait_until(lambda: "Serving" in run.text() or not run.is_alive())
        if "in use" in run.text():
            pytest.skip("somebody has the default port")
        found = listeners(run.processes())
    assert found and all(map(is_loopback, found)), found


def test_listeners_for_other_machines_would_be_seen(tmp_path):
    """Or the tests above could not fail. They are warned of."""
    with serving(tmp_path, "--server_address", "0.0.0.0:0", "--insecure") as run:
        run.wait_for_text("Serving")
        assert not all(map(is_loopback, listeners(run.processes())))
        assert "INSECURE: anybody who can connect to 0.0.0.0" in run.text()
        assert "neither encrypted nor authenticated" in run.text()


# ------------------------------------------------------------------------------- modes


def test_sockets_are_private_whatever_the_umask(polybeast_run):
    assert polybeast_run.folder_modes == {0o700}
    assert set(polybeast_run.modes.values()) == {0o600}


@pytest.fixture
def _needs_nobody(folder):
    if os.geteuid() != 0:
        pytest.skip("needs root, to become the user nobody")
    os.chmod(folder, 0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/open")
        listener.listen()
        os.chmod(f"{folder}/open", 0o777)
        if connect_as_nobody(folder / "open") != 0:
            pytest.skip("the folder for temporary files is not for everybody")


@pytest.mark.usefixtures("_needs_nobody")
def test_other_users_cannot_connect_to_a_run(polybeast_run):
    assert polybeast_run.connected_as_nobody == {errno.EACCES}


# --------------------------------------------------------------------- what is executed


def events(polybeast_run, *names: str) -> list[tuple]:
    return [entry for entry in polybeast_run.audit if entry[2] in names]


def test_all_processes_of_a_run_are_audited(polybeast_run):
    begun = [args for *_, args in events(polybeast_run, "begin")]
    assert any("'polybeast'" in args for args in begun), begun
    assert any("'polybeast_env'" in args for args in begun), begun
    # Servers have the hook, too. Each of the two, and a replacement, has a guard.
    assert len(events(polybeast_run, "os.fork")) == 2 * (2 + 1)


def test_nothing_is_unpickled_in_a_run(polybeast_run):
    assert events(polybeast_run, "pickle.find_class") == []
    assert events(polybeast_run, "marshal.load", "marshal.loads") == []


def test_no_code_is_made_and_no_program_started_after_the_start(polybeast_run):
    late = [entry for entry in polybeast_run.audit if entry[0] > polybeast_run.began]
    forks = [entry for entry in late if entry[2] == "os.fork"]
    assert len(forks) == 2  # The killed server's replacement, and its guard.
    assert [entry for entry in late if entry not in forks] == []
    started = events(polybeast_run, "subprocess.Popen")
    programs = {args.split("'")[1].rpartition("/")[2] for *_, args in started}
    assert programs <= {"git", "uname", Path(sys.executable).name}


# Module names, and `module.function` of calls.
FORBIDDEN = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN |= {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
FORBIDDEN |= {"torch.load", "torch.save", "yaml.load", "np.load", "numpy.load"}
FORBIDDEN_KEYWORDS = {"allow_pickle": True, "weights_only": False, "shell": True}


def violations(code: str) -> list[str]:
    """Name what a file does that could run code from data.

    What multiprocessing pickles to start a child with `spawn` is Python's business: it
    passes through a pipe from parent to child. But its `Connection.recv()` unpickles.
    """
    found = []
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}", *(f"{node.module}.{a.name}" for a in node.names)]
        elif isinstance(node, ast.Call):
            names = [ast.unparse(node.func)]
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", None)
                if FORBIDDEN_KEYWORDS.get(keyword.arg) is value is not None:
                    found.append(f"{node.lineno}: {keyword.arg}={value}")
            is_method = isinstance(node.func, ast.Attribute)
            if is_method and node.func.attr == "recv" and not node.args:
                found.append(f"{node.lineno}: {names[0]}()")
        for name in names:
            if name in FORBIDDEN or name.partition(".")[0] in FORBIDDEN - {"compile"}:
                found.append(f"{node.lineno}: {name}")
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import a, dill as b",
        "from pickle import loads",
        "from torch import load",
        "import cloudpickle.x",
        "eval('1')",
        "x = exec(code)",
        "compile(a, b, 'exec')",
        "torch.load(path)",
        "np.load(path)",
        "f(path, allow_pickle=True)",
        "g(path, weights_only=False)",
        "yaml.load(text)",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "pipe.recv()",
    ],
)
def test_the_lint_sees(code):
    assert violations(code)


def test_the_lint_lets_the_rest_pass():
    assert not violations("import re, json\nre.compile('x'); s.recv(1); p.recv_bytes()")


PACKAGE = [*ROOT.glob("*.py"), *ROOT.glob("core/**/*.py"), *ROOT.glob("tools/**/*.py")]
PACKAGE += [*ROOT.glob("libtorchbeast/**/*.py*"), *ROOT.glob("examples/**/*.py")]
PACKAGE = sorted(path for path in PACKAGE if path.suffix in (".py", ".pyi"))


def test_no_file_of_the_package_could_run_code_from_data():
    assert len(PACKAGE) > 25
    found = [
        f"{path.relative_to(ROOT)}: {where}"
        for path in PACKAGE
        for where in violations(path.read_text())
    ]
    assert not found


# ------------------------------------------------------------------------------ secrets


def test_a_run_writes_nothing_of_the_process_environment(polybeast_run):
    files = [path for path in polybeast_run.run_folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"meta.json", "out.log", "logs.csv"} <= names
    assert any(name.startswith("step-") for name in names)
    for path in files:
        content = path.read_bytes()
        assert SECRET.encode() not in content, path
        assert b"MY_TOKEN" not in content, path


# -------------------------------------------------------------------- hostile strangers


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)


@pytest.mark.parametrize("said", [[PREFACE], [PREFACE[:10], b""]])
def test_200_connections_that_say_no_more_keep_nobody_out(serve, said):
    # Unanswered pings would end these connections, too, but later.
    options = {"address": "127.0.0.1:0", "keepalive_s": 600}
    address = serve(counting_env.make, **options).address
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection((host, int(port))))
            for _ in range(200)
        ]
        for stranger, words in zip(strangers, itertools.cycle(said)):
            stranger.sendall(words)
        with EnvClient(address) as client:
            client.step(0)
        if said == [PREFACE]:  # Then a connection is one. They are all still there.
            assert not any(has_hung_up(stranger) for stranger in strangers)
        else:  # Who does not shake hands is cut off.
            wait_until(lambda: all(has_hung_up(stranger) for stranger in strangers))


def has_hung_up(connection: socket.socket) -> bool:
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            while data := connection.recv(1000):
                assert data
        except ConnectionResetError:
            pass
        return True
    return False


def welcome_once_then_send_too_much(self, hello, place):
    """Welcome a learner once; then send far more than was promised."""
    if hello.incarnation == 0:
        yield codec.encode(ToLearner(welcome=self._service.welcome(hello)))
    else:
        yield bytes(2**20)


def test_a_server_that_sends_more_than_its_spec_is_given_up(serve, monkeypatch):
    monkeypatch.setattr(stream.Stream, "play", welcome_once_then_send_too_much)
    address = serve(counting_env.make, address="127.0.0.1:0").address
    pool = libtorchbeast.ActorPool(
        5,
        libtorchbeast.BatchingQueue(maximum_batch_size=1),
        libtorchbeast.DynamicBatcher(timeout_ms=None),
        [address],
        (np.zeros((1, 1, 2), np.float32),),
        max_failures=2,
    )
    with pytest.raises(libtorchbeast.ActorError, match="failed 2 times in a row") as e:
        pool.run()
    assert re.search(r"larger than max \(1048576 vs. 1\d{5}\)", str(e.value))
