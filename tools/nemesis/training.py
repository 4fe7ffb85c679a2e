# SPDX-License-Identifier: Apache-2.0
"""A trainer as a user starts it, on Catch, with servers or actors that one can kill."""

import os
import signal
from collections.abc import Mapping

import psutil

from tools.nemesis import playground
from tools.runs import curve


class Training(playground.Program):
    """`python -m polybeast` or `monobeast`, once it has learned something."""

    def __init__(
        self, trainer: str, *argv: str, variables: Mapping[str, str] | None = None
    ):
        self.trainer = trainer
        self.worker = {"polybeast": "server", "monobeast": "actor"}[trainer]
        super().__init__(
            trainer,
            *("--env", "tools.nemesis.environments:make_catch"),
            *("--savedir", "{}", "--xpid", "run", "--total_steps", str(10**12)),
            *("--log_interval_s", "1"),
            *argv,
            variables=variables,
        )

    def __enter__(self) -> "Training":
        with self._stack:
            self.wait_until(lambda: len(self.rows()) > 2)
            self._stack = self._stack.pop_all()
        return self

    def rows(self) -> list[tuple[float, int]]:
        """Return the time and the step of each row of the log."""
        return curve(self.folder / "run")

    def kill(self, worker: int) -> None:
        """Kill a server or actor."""
        os.kill(self.pids[f"{self.worker}-{worker}"], signal.SIGKILL)

    def workers(self) -> dict[str, int]:
        return {n: pid for n, pid in self.pids.items() if n.startswith(self.worker)}

    def processes(self) -> dict[str, int]:
        """Return the process of each part of the run, by name."""
        found = {"learner": self.process.pid, **self.workers()}
        for child in psutil.Process(self.process.pid).children():
            if "polybeast_env" in child.cmdline():
                found["supervisor"] = child.pid
        return found
