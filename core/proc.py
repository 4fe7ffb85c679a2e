# SPDX-License-Identifier: Apache-2.0
"""The states of other processes, as Linux's /proc shows them."""

import contextlib
import logging
import os
import signal
import socket
from pathlib import Path

log = logging.getLogger(__name__)


def state(pid: int) -> str:
    """Return a process's state: "T" stopped, "Z" or "X" ended, "?" unknown.

    See proc_pid_stat(5) for the other letters.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat.rpartition(b")")[2].split()[0].decode()
    except FileNotFoundError:
        return "X" if os.path.exists("/proc/self/stat") else "?"
    except OSError:
        return "?"


def place() -> str:
    """Return the host and the namespace of process ids in which this process runs.

    Containers may share the host's name, but not the ids of their processes.
    """
    namespace = ""
    with contextlib.suppress(OSError):  # Not on Linux.
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace}"


def continue_if_stopped(name: str, pid: int) -> None:
    """Continue a process that this one needs, if it is stopped. Linux only."""
    if state(pid) == "T":
        log.warning("%s (process %d) was stopped; continuing it", name, pid)
        with contextlib.suppress(OSError):  # The process has just ended.
            os.kill(pid, signal.SIGCONT)
