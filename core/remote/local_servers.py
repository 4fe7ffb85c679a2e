# SPDX-License-Identifier: Apache-2.0
"""Environment servers that the learner starts on its own machine."""

import argparse
import concurrent.futures
import shutil
import subprocess
import tempfile
import time

from core import flag_types
from core.errors import ConfigError, Exit
from core.proc import continue_if_stopped
from core.remote import child
from core.remote.addresses import check_socket_path
from core.remote.server_flags import passed_on
from core.remote.supervisor import DELIVERED_STEPS
from core.running import terminal
from core.running.supervise import (
    RECORD_BYTES,
    RestartBudget,
    describe_exit,
    from_child,
    start_thread,
)

LAST_LINES_S = 2.0  # Time to read the last output of a process that has ended.


class LocalServers:
    """Environment servers on this machine. They end when this process ends.

    Starts `python -m polybeast_env`, which supervises the server processes. Their
    sockets are in a private folder, or where --pipes_basename says. A context manager.
    """

    is_local = True
    may_change = False

    def __init__(self, flags: argparse.Namespace):
        self._folder = None
        basename = flags.pipes_basename
        command = ["-m", "polybeast_env", "--with_parent"]
        if basename is None:
            self._folder = tempfile.mkdtemp(prefix="torchbeast-")  # Mode 0700.
            basename = f"unix:{self._folder}/env"
            command += ["--remove_folder"]  # In case this process is killed.
        self.addresses = tuple(f"{basename}.{i}" for i in range(flags.num_servers))
        command += flag_types.to_argv(flags, passed_on())
        command += ["--pipes_basename", basename]
        self._command = command
        self._budget = RestartBudget()
        self._delivered = 0  # Steps received before the present supervisor started.
        self._last_line = ""
        self.restarts = 0  # Restarts of servers so far.
        try:
            check_socket_path(self.addresses[-1])
            self._start()
        except BaseException:
            self._remove_folder()
            raise

    def _start(self) -> None:
        # It has a session of its own for one more reason: Linux divides the cores among
        # sessions first (autogroup), so that learner and servers get equal shares.
        self._process = child.start_python(self._command)
        self._reader = start_thread("env-servers", self._log_lines, self._process)

    def __enter__(self) -> "LocalServers":
        return self

    def __exit__(self, *exc_info: object) -> None:
        child.end_process("The supervisor of the servers", self._process)
        concurrent.futures.wait([self._reader], LAST_LINES_S)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _log_lines(self, process: subprocess.Popen) -> None:
        earlier = self.restarts  # Each supervisor counts its restarts from 0.
        assert process.stdout is not None
        for line in terminal.lines_of(process.stdout.fileno(), RECORD_BYTES):
            level, text, restarts = from_child(line)
            self.restarts = max(self.restarts, earlier + restarts)
            self._last_line = text or self._last_line
            terminal.log_output(text, level)

    def check(self, received: int = 0) -> None:
        """Start the supervisor again if it was killed, which also ends its servers.

        Args:
          received: number of environment steps received from the servers so far.

        Raises:
          ConfigError: the servers cannot serve this environment.
          RuntimeError: the servers failed, or the supervisor was killed too often.
          OSError: the supervisor could not be started, too often in a row.
        """
        if self._budget.start_at is not None:
            late_s = time.monotonic() - self._budget.start_at
            # The new servers use the addresses of the old ones. So wait until the last
            # old server has ended, which closes the pipe of their output.
            if self._reader.done() or late_s > child.END_S:
                self._budget.start_if_due("The supervisor of the servers", self._start)
            return
        continue_if_stopped("The supervisor of the servers", self._process.pid)
        status = self._process.poll()
        if status is None:
            return
        concurrent.futures.wait([self._reader], LAST_LINES_S)
        if status in (Exit.CONFIG, Exit.USAGE):
            raise ConfigError(self._last_line)
        if received >= self._delivered + DELIVERED_STEPS:
            self._budget.delivered()
            self._delivered = received
        how = describe_exit(status)
        error = RuntimeError(
            f"the environment servers ended ({how}); the last line of their output: "
            f"{self._last_line}"
        )
        if status > 0:
            raise error
        event = f"The environment servers ended ({how}); starting them again"
        self._budget.plan_restart(event, error)
        self.restarts += len(self.addresses)
