# SPDX-License-Identifier: Apache-2.0
"""Helper processes of the learner (acceptor) and of the servers (dialer).

The program that starts a helper uses `Child`. The helper itself uses `run` and `tell`.
`core.remote.local_servers` starts and ends its servers in the same way.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from core.errors import ConfigError, Exit
from core.proc import continue_if_stopped
from core.running.machine import raise_file_limit
from core.running.supervise import (
    ForParent,
    Repeats,
    RestartBudget,
    describe_exit,
    from_child,
    send_at_parents_end,
)

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]  # The clone, or where pip has installed it.
END_S = 3.0  # Time for the process to end; then it is killed.
QUICK_S = 10.0  # A death within this time after the start counts as quick.


def start_python(arguments: Sequence[str]) -> subprocess.Popen:
    """Start Python in a session of its own, so that Ctrl-C does not reach it.

    Its standard input closes when this process ends, for any reason. Its output is for
    this process. With `-m`, Python searches the working directory first, as always, and
    then the clone that this process runs: not another clone, which may be installed.
    """
    env = dict(os.environ)
    # PYTHONPATH has no way to name a folder with a colon. What pip has installed needs
    # no help, and comes after the standard library.
    if (ROOT / "setup.py").exists() and os.pathsep not in str(ROOT):
        path = [str(ROOT), env.get("PYTHONPATH")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end_process(name: str, process: subprocess.Popen) -> None:
    """End a process by SIGTERM, or, after END_S, by SIGKILL."""
    if process.poll() is not None:
        return  # By now another process may have its id.
    process.terminate()
    continue_if_stopped(name, process.pid)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        log.error("%s did not stop within %g s", name, END_S)
        process.kill()
        process.wait()


class Child:
    """A process `python -m MODULE`. It is restarted if it dies, and ends with this one.

    Starts no thread, so that this process may still fork.

    Args:
      name: for log lines.
      command: MODULE and its arguments. A change applies from the next start on.
      handle: called with the arguments of each `tell` in the process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        handle: Callable[..., Any] = lambda *_: None,
    ):
        self._name = name
        self._command = command
        self._handle = handle
        self._budget = RestartBudget()
        self._process: subprocess.Popen | None = None
        self._last_line = ""

    def start(self) -> None:
        self._process = start_python(["-m", *self._command])
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._rest = b""  # The first part of a line that is not complete yet.
        self._began = time.monotonic()

    def close(self) -> None:
        if self._process is not None:
            with self._process:  # Closes its pipes.
                end_process(self._name, self._process)

    def check(self) -> None:
        """Log and handle the process's output; start the process again if it died.

        Raises:
          ConfigError: the process ended because of its flags or certificates.
          RuntimeError: the process died too often.
          OSError: the process could not be started, too often in a row.
        """
        self._budget.start_if_due(self._name, self.start)
        if self._process is None or self._budget.start_at is not None:
            return
        continue_if_stopped(self._name, self._process.pid)
        status = self._process.poll()
        self._read()
        if status is None:
            return
        with self._process:
            pass  # Closes its pipes.
        if status in (Exit.CONFIG, Exit.USAGE):
            raise ConfigError(self._last_line)
        if time.monotonic() - self._began > QUICK_S:
            self._budget.delivered()
        how = describe_exit(status)
        error = RuntimeError(
            f"{self._name} died too often ({how}); the last line of its output: "
            f"{self._last_line}"
        )
        event = f"{self._name} ended ({how}); starting it again"
        self._budget.plan_restart(event, error)

    def _read(self) -> None:
        """Handle the lines that the process has written. Does not block."""
        assert self._process is not None and self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._process.stdout.fileno(), 1 << 16):
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for line in lines:
                    self._handle_line(line.decode(errors="replace"))

    def _handle_line(self, line: str) -> None:
        with contextlib.suppress(ValueError, RecursionError):  # As in from_child.
            match json.loads(line):
                case ["tell", *what]:
                    self._handle(*what)
                    return
        level, text, _ = from_child(line)
        self._last_line = text or self._last_line
        # The child's `Repeats` has counted it; that of this process must not.
        log.log(level, "%s", text, extra={"is_shown": True})


# ------------------------------------------------------------------ in the process


def tell(*what: Any) -> None:
    """Make the parent, if it still runs, call its `handle` with these arguments."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(["tell", *what]).encode() + b"\n")


def run(main: Coroutine[Any, Any, None], folder: Path) -> int:
    """Run until SIGTERM or the parent's end; return the exit status.

    Args:
      folder: removed if the parent has ended before this process.
    """
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(ForParent())
    handler.addFilter(Repeats())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    send_at_parents_end(signal.SIGCONT)  # Or a stopped process would stay for ever.
    raise_file_limit()
    try:
        is_orphan = asyncio.run(_run(main))
    except ConfigError as error:
        log.error("%s", error)
        return Exit.CONFIG
    if is_orphan:
        shutil.rmtree(folder, ignore_errors=True)
    return Exit.DONE


async def _run(main: Coroutine[Any, Any, None]) -> bool:
    """Run until SIGTERM or the parent's end; return whether the parent has ended."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_unhandled)
    ended = loop.create_future()

    def end(is_orphan: bool) -> None:
        if not ended.done():
            ended.set_result(is_orphan)

    loop.add_signal_handler(signal.SIGTERM, end, False)
    loop.add_reader(0, lambda: None if os.read(0, 4096) else end(True))
    task = loop.create_task(main)
    await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return ended.done() and ended.result()


def _log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that no task handles, such as too many open files."""
    error = context.get("exception")
    log.warning("%s%s", context["message"], f": {error}" if error else "")
