# SPDX-License-Identifier: Apache-2.0
"""The `main` of both trainers: train or test; turn each failure into an exit status."""

import argparse
import contextlib
import errno
import faulthandler
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from core import ranks
from core.algorithm.learners import LearnerLost, tell_flags_are_wrong, train_together
from core.errors import ConfigError, EnvSpecError, EnvValueError, Exit, UsageError
from core.running import terminal, wandb_log
from core.running.checkpoint import CheckpointError, CheckpointMismatch
from core.running.folder import UNUSABLE, RunDirBusy
from core.running.supervise import send_at_parents_end


def run_program(
    parse_flags: Callable[..., argparse.Namespace],
    train: Callable[[argparse.Namespace], Exit],
    test: Callable[[argparse.Namespace], Exit],
    argv: Sequence[str] | None,
) -> int:
    """Train or test as the command line says; return the exit status.

    An error that the user can repair is printed as one line, any other error as a
    traceback. A terminal that stops reading does not stop the training.
    """
    status = _run(parse_flags, train, test, argv)
    ranks.record_status(status)
    return status


def _run(
    parse_flags: Callable[..., argparse.Namespace],
    train: Callable[[argparse.Namespace], Exit],
    test: Callable[[argparse.Namespace], Exit],
    argv: Sequence[str] | None,
) -> int:
    savedir = None
    with contextlib.ExitStack() as stack:
        try:
            try:
                flags = parse_flags(argv)
            except SystemExit as error:  # argparse has printed the reason.
                if error.code == Exit.USAGE:
                    tell_flags_are_wrong()
                raise
            # An environment may change the working directory.
            savedir = os.path.realpath(flags.savedir)
            if flags.mode == "train":
                if "TORCHELASTIC_RUN_ID" in os.environ:  # If torchrun is killed, stop.
                    send_at_parents_end(signal.SIGTERM)
                stack.enter_context(terminal.never_waiting(c_code=True))
                if flags.wandb:  # Now: before there is a run, and with these streams.
                    wandb_log.import_package()
            else:  # So that Ctrl-C closes environments and videos.
                signal.signal(signal.SIGINT, signal.default_int_handler)
            faulthandler.enable(terminal.urgent_fd())
            if flags.mode == "train":
                return int(train_together(train, flags))
            try:
                return int(test(flags))
            except KeyboardInterrupt:  # Its environments are closed now.
                return 128 + signal.SIGINT
            except BrokenPipeError:
                if not _has_no_reader(1):
                    raise
                # Otherwise Python would write the rest at its end, and fail again.
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), 1)
                return 128 + signal.SIGPIPE  # As of other programs before `| head`.
        except LearnerLost as error:
            return say(error, error.status)
        except UsageError as error:
            return say(error, Exit.USAGE)
        except RunDirBusy as error:
            return say(error, Exit.BUSY)
        except (ConfigError, EnvSpecError, CheckpointMismatch) as error:
            return say(error, Exit.CONFIG)
        except EnvValueError as error:  # With --serial, and in the test mode.
            return say(error, Exit.INTERNAL)
        except CheckpointError as error:
            return say(error, Exit.CHECKPOINT)
        except Exception as error:
            if (line := describe_full_disk(error)) is not None:
                print(line, file=sys.stderr)
                return int(Exit.CHECKPOINT)
            if savedir is not None:
                line = describe_unusable_path(error, savedir)
            if line is not None:
                print(line, file=sys.stderr)
                return int(Exit.CONFIG)
            traceback.print_exc()
            return int(Exit.INTERNAL)


def _has_no_reader(fd: int) -> bool:
    """Say whether the reader of a pipe has closed it."""
    poll = select.poll()
    poll.register(fd, 0)
    gone = select.POLLERR | select.POLLHUP  # Linux has the first, macOS the second.
    return any(event & gone for _, event in poll.poll(0))


def say(error: Exception, status: Exit) -> int:
    """Print an error as one line; return the exit status."""
    who = f"learner {ranks.rank()}: " if ranks.size() > 1 else ""
    print(f"{who}{type(error).__name__}: {error}", file=sys.stderr)
    return int(status)


def describe_full_disk(error: Exception) -> str | None:
    """Describe the error of a full disk and its remedy in one line; else return None.

    This is for the start of a run. Later, log rows wait in memory, and checkpoints
    raise CheckpointError.
    """
    if not isinstance(error, OSError):
        return None
    if "No usable temporary directory" in str(error):
        remedy = "Free some space there, or set TMPDIR to another folder."
    elif error.errno == errno.EFBIG:
        remedy = "Raise the limit on the size of files (ulimit -f)."
    elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        remedy = "Free some space (df), or choose another --savedir."
        if _has_no_inodes(error.filename):
            remedy = (
                "It has no inodes left (df -i): delete files, or choose another "
                "--savedir."
            )
    else:
        return None
    return f"{type(error).__name__}: {error}. {remedy}"


def describe_unusable_path(error: Exception, savedir: str) -> str | None:
    """Describe in one line a path in --savedir that cannot be written; else None."""
    if not isinstance(error, UNUSABLE):
        return None
    if Path(savedir) not in Path(error.filename or "").parents:
        return None
    return (
        f"{type(error).__name__}: {error}. This program must be able to write there: "
        "change that, or choose another --savedir."
    )


def _has_no_inodes(name: str | None) -> bool:
    for folder in Path(name).parents if name else ():
        with contextlib.suppress(OSError):  # The folder does not exist yet.
            found = os.statvfs(folder)
            return found.f_files > 0 and found.f_favail == 0
    return False
