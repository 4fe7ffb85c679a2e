# SPDX-License-Identifier: Apache-2.0
"""Exit statuses, and the exceptions that several packages of core raise or catch."""

import enum
import logging
import multiprocessing
import os
import sys
import threading
import time
from typing import NoReturn

LEAVE_S = 1.0  # For threads that end soon after the environment was closed.


class Exit(enum.IntEnum):
    """Exit statuses of every program here (those of sysexits.h where one fits)."""

    DONE = 0
    USAGE = 2  # Bad flags. argparse uses the same status.
    BUSY = 69  # Another process trains in the run's folder. A later try may succeed.
    INTERNAL = 70
    CHECKPOINT = 74  # A checkpoint could not be read or written, or the disk is full.
    STOPPED = 75  # Stopped by a signal; the log says whether the run can go on.
    CONFIG = 78  # Configurations, specs or versions do not match.


class ConfigError(Exception):
    """The run cannot go on as configured; the message says what to change."""


class UsageError(Exception):
    """The flags are wrong, which was found out only after they were parsed."""


class StallError(Exception):
    """No progress for `--stall_timeout_s`, or an update that does not end."""


def one_line(text: str) -> str:
    """Return the first line of a text; for a traceback, its last line too."""
    first, *others = text.strip().splitlines() or [""]
    if others and first.endswith("Traceback (most recent call last):"):
        return f"{first} ... {others[-1]}"
    return first


class MakeError(ValueError):
    """An environment cannot be made or learned from; the message says what to do.

    A ValueError that the environment itself raises is not turned into this one: its
    traceback is shown.
    """


class EnvError(RuntimeError):
    """An environment raised an exception, which is the `__cause__` of this one."""


class EnvValueError(EnvError):
    """A Discrete value, a mask or a reward is wrong, or an integer too large.

    Training does not check the bounds of a Box: core.environments.check does.
    """


class EnvSpecError(ValueError):
    """An environment violates its spec or the Gymnasium API. A retry cannot help."""


def leave(status: int) -> NoReturn:
    """End this program with `status`, also while threads or children still run.

    sys.exit would wait until the last thread has ended that is not a daemon, and the
    last process of multiprocessing, such as an environment's.
    """
    for child in multiprocessing.active_children():
        if not child.daemon:  # Python ends those.
            print(f"Killed at the end: {child.name}, {child.pid}", file=sys.stderr)
            child.kill()
    deadline = time.monotonic() + LEAVE_S
    main = threading.main_thread()
    threads = [t for t in threading.enumerate() if not t.daemon and t is not main]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = [thread.name for thread in threads if thread.is_alive()]
    if not names:
        sys.exit(status)
    print(f"Threads are still running at the end: {', '.join(names)}", file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
