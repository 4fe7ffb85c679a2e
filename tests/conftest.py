# SPDX-License-Identifier: Apache-2.0
"""Shared helpers: deadlines, programs as processes, environment servers in threads."""

import contextlib
import fcntl
import functools
import importlib
import itertools
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import psutil
import pytest

# gRPC with the settings of the programs, whichever module of the tests comes first.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # As polybeast.py does.
with contextlib.suppress(ModuleNotFoundError):  # .venv-classic has none.
    import core.remote.grpc_settings  # noqa: F401

from core.running import terminal
from core.running.signals import STOP_SIGNALS
from core.running.supervise import start_thread
from tools.nemesis.programs import DEADLINE_S, came_true, is_saving, workplace
from tools.nemesis.programs import wait_for as wait_until  # noqa: F401  For tests.

ROOT = Path(__file__).parents[1]

with contextlib.suppress(ModuleNotFoundError):  # .venv-classic has none.
    import hypothesis

    # No limits of time: a busy machine is slow. The same examples in each run.
    hypothesis.settings.register_profile(
        "tests",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("tests")


def pytest_configure() -> None:
    """Take signals as in a terminal. `nohup pytest &` begins with some of them ignored.

    Tests send Ctrl-C to themselves and to their children, which would inherit this.
    """
    for signum, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # Not for those that need none.

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


def ended(processes: Iterable[psutil.Process]) -> bool:
    """Say whether none of them runs; one that only waits for its parent does not."""
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            pass
    return True


def free_ports(n: int) -> int:
    """Return the first of `n` consecutive free ports, below the ephemeral ones."""
    while True:
        first = random.randrange(20_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + n):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def fill(fd: int) -> None:
    """Write into a pipe or terminal until it takes nothing more."""
    again = os.open(f"/dev/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with contextlib.suppress(OSError):  # As programs do; a terminal has no size.
        fcntl.fcntl(again, fcntl.F_SETPIPE_SZ, terminal.PIPE_BYTES)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(again, b"x" * 100)
    os.close(again)


class Program:
    """A running program, its output in a file.

    The end of a `with` block kills it and the family that it has then.

    Args:
      command: its words.
      options: of `subprocess.Popen`.
    """

    process: Any  # A subprocess.Popen; of a `Forked`, a process of multiprocessing.

    def __init__(self, output: Path, *command: object, **options: Any):
        self.output = output
        with output.open("w") as file:
            options = {"stdout": file, "stderr": file, **options}
            options = {"cwd": ROOT, "stdin": subprocess.DEVNULL, **options}
            self.process = subprocess.Popen([str(word) for word in command], **options)
        self.pid = self.process.pid

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *exc_info: object) -> None:
        family = []
        if self.is_alive():
            with contextlib.suppress(psutil.NoSuchProcess):  # It has just ended.
                family = self.family()
        try:
            self.kill()
        finally:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def text(self) -> str:
        """Return its output so far."""
        return self.output.read_text()

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Return the exit status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(deadline_s)
        raise AssertionError(f"still running:\n{self.text()}")

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Poll until it is true; fail with the output if the program ends before."""
        assert came_true(condition, self.is_alive), self.text()

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda: text in self.text())

    def is_saving(self, run_dir: Path) -> bool:
        """Say whether it writes a checkpoint of that run now."""
        return is_saving(self.pid, run_dir / "checkpoints")

    def family(self) -> list[psutil.Process]:
        """Return its present children, and theirs."""
        return psutil.Process(self.pid).children(recursive=True)

    def kill(self) -> None:
        """Kill the program alone: its family should notice."""
        self.process.kill()
        self.wait()


class Forked(Program):
    """A function that runs in a child of a fork server that has imported torch.

    Args:
      env: environment variables, besides those of the fork server.
      function: returns the exit status; None is 0.
    """

    def __init__(
        self,
        context,
        output: Path,
        function: Callable[..., int | None],
        *args: object,
        env: Mapping[str, str] = {},
    ):
        self.output = output
        output.touch()
        self.process = context.Process(
            target=_be_program, args=(str(output), env, function, args)
        )
        self.process.start()
        self.pid = self.process.pid

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        self.process.join(deadline_s)
        assert self.process.exitcode is not None, f"still running:\n{self.text()}"
        return self.process.exitcode


def _be_program(
    output: str,
    env: Mapping[str, str],
    function: Callable[..., int | None],
    args: Sequence[object],
) -> None:
    os.environ.update(env)
    fd = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    try:
        status = function(*args)
    except SystemExit as error:  # argparse's.
        status = error.code
    sys.stdout.flush()
    # As at the end of a script, children that are left over would be noticed.
    sys.exit(status)


def run_module(module: str, argv: list[str]) -> int:
    """Be `python -m <module>`, for `Forked`."""
    return importlib.import_module(module).main(argv)


@pytest.fixture(autouse=True)
def _default_handlers():
    """Restore the handlers: `StopSignal` leaves some that end the process at once.

    A process that an environment forks loses a signal if it has such a handler and the
    signal comes before it runs.
    """
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture(scope="session", autouse=True)
def _context() -> Iterator[BaseContext]:
    """A fork server that has imported torch already, and what a run imports later.

    There is one for all of the session, and whoever uses it first starts it.
    """
    context = multiprocessing.get_context("forkserver")
    modules = ["core.actors.fork_server", "monobeast", "polybeast", __name__]
    later = ["torch._dynamo", "tensorboard.summary.writer.record_writer"]  # A second.
    context.set_forkserver_preload([*modules, *later])
    with pytest.MonkeyPatch.context() as patch:
        # MonoBeast's actors in pytest's own process would replace the list by theirs.
        patch.setattr(forkserver, "set_forkserver_preload", lambda modules: None)
        yield context


@contextlib.contextmanager
def starter(context, folder: Path) -> Iterator[Callable[..., Program]]:
    """Yield `start`, which starts a trainer with flags; --savedir is `folder/runs`.

    Kills what is left at the end.
    """
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def start(
            *argv: object, module: str = "monobeast", env: Mapping[str, str] = {}
        ) -> Program:
            words = [str(a) for a in ("--savedir", folder / "runs", *argv)]
            output = folder / f"out-{next(numbers)}.txt"
            program = Forked(context, output, run_module, module, words, env=env)
            return stack.enter_context(program)

        yield start


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with a short name, for unix sockets."""
    with workplace() as folder:
        yield folder


@pytest.fixture
def start(_context, tmp_path) -> Iterator[Callable[..., Program]]:
    """Start a trainer with flags, MonoBeast unless `module=`; runs: `tmp_path/runs`."""
    with starter(_context, tmp_path) as start:
        yield start


@pytest.fixture
def run_forked(_context, tmp_path) -> Callable[..., tuple[int, str]]:
    """Call a function in a child that has torch; return exit status and output."""

    def run_forked(function: Callable[..., int | None], *args: object):
        output = tmp_path / "forked.txt"
        with Forked(_context, output, function, *args) as program:
            return program.wait(), program.text()

    return run_forked


@pytest.fixture(scope="module")
def start_for_module(_context, tmp_path_factory):
    """Like `start`, for what many tests of a file look at; also returns the folder."""
    folder = tmp_path_factory.mktemp("module")
    with starter(_context, folder) as start:
        yield start, folder / "runs"


@pytest.fixture
def start_program(tmp_path) -> Iterator[Callable[..., Program]]:
    """Start a `Program` with its words and options; it is killed at the end."""
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def start_program(*command: object, **options: Any) -> Program:
            output = tmp_path / f"program-{next(numbers)}.txt"
            return stack.enter_context(Program(output, *command, **options))

        yield start_program


@contextlib.contextmanager
def served(env_init: Callable, address: str, **options: Any) -> Iterator[Any]:
    """Yield an environment server that a thread of this process runs."""
    from core.remote.env_server import Server  # It needs grpcio, other tests do not.

    server = Server(env_init, address, **options)
    server.start()
    thread = start_thread("server", server.run)
    try:
        yield server
    finally:
        server.stop()
        thread.result(DEADLINE_S)


@pytest.fixture
def serve(folder) -> Iterator[Callable[..., Any]]:
    """Start environment servers in this process; return each.

    They listen at unix sockets of their own, unless `address=`.
    """
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def serve(env_init: Callable, **options: Any) -> Any:
            options = {"address": f"unix:{folder}/{next(numbers)}", **options}
            return stack.enter_context(served(env_init, **options))

        yield serve


@pytest.fixture
def background() -> Callable[..., futures.Future]:
    """Call something in a daemon thread; the Future has its result or exception."""
    return functools.partial(start_thread, "background")
