# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: create it, lock it, and describe the run in meta.json.

    <savedir>/latest -> <xpid>
    <savedir>/<xpid>/
        meta.json      flags, commit, versions, host; one entry for each start
        logs.csv       one row per --log_interval_s; fields.csv explains the columns
        out.log        log lines, and the output of environments; out.first.log and
                       out.previous.log if there are many
        tensorboard/   the rows of logs.csv as TensorBoard events
        checkpoints/   the last three checkpoints
        test-*.csv     the games of --mode test; video/ has their mp4 files
        .lock          held by the process that trains

Two processes never train in one folder: see `prepare_run_dir`.
"""

import contextlib
import datetime
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.running.atomic import sweep, write_atomically

log = logging.getLogger(__name__)

# Errors of a path that is not the program's to write, or of the wrong kind.
UNUSABLE = (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)


class RunDirBusy(ConfigError):
    """Another process is training in this run's folder."""


def prepare_run_dir(savedir: Path, xpid: str) -> Path:
    """Create `savedir/xpid` and take its locks.

    One lock is a file in the folder. The other lock is beside the folder, in
    `savedir/.locks`, and remains if the folder is deleted. The kernel releases both
    when this process ends. They are POSIX record locks, which child processes do not
    inherit: an actor that outlives its parent for a moment does not hold them. The same
    process may prepare a folder twice.

    Raises:
      RunDirBusy: another process holds a lock.
      ConfigError: the folder cannot be created or written to, or is a link to nothing.
    """
    link, run_dir = savedir / xpid, Path(os.path.realpath(savedir / xpid))
    try:
        if link.is_symlink() and not link.exists():
            raise ConfigError(
                f"{link} is a link to {run_dir}, which does not exist. If the run is "
                "there, mount its disk. For a new run, create that folder, or delete "
                "the link."
            )
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        _lock_name(run_dir)
        run_dir.mkdir(exist_ok=True)
        lock_folder(run_dir)
    except OSError as error:
        bad_name = error.errno in (errno.ENAMETOOLONG, errno.ELOOP)
        if not bad_name and not isinstance(error, UNUSABLE):
            raise
        raise ConfigError(
            f"--savedir is {savedir}, where the folder {xpid} cannot be created or "
            f"written to: {error}. Choose another --savedir."
        ) from error
    sweep(run_dir)
    sweep(run_dir / "checkpoints")
    return run_dir


def link_latest(run_dir: Path) -> None:
    """Make `savedir/latest` a link to `savedir/xpid`.

    Args:
      run_dir: `savedir/xpid`, which may be a link to a folder on another disk.
    """
    link = run_dir.with_name("latest")
    # `sweep` would remove it in the folder. But a rename must stay on one disk.
    where = run_dir.parent if run_dir.is_symlink() else run_dir
    temporary = where / f".latest.tmp-{os.getpid()}"
    try:
        temporary.symlink_to(run_dir.name)
        os.replace(temporary, link)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        log.warning("Cannot make %s point to %s: %s", link, run_dir.name, error)


def remove_unless_recorded(run_dir: Path) -> None:
    """Delete the folder of a new run that has ended before it had a meta.json."""
    with contextlib.suppress(OSError):
        paths = [*run_dir.iterdir()]
        if {path.name for path in paths} <= {".lock", "out.log"}:
            for path in paths:
                path.unlink()
            run_dir.rmdir()


def _lock_name(run_dir: Path) -> None:
    """Lock one byte of `savedir/.locks`, whose position is a hash of the run's name."""
    byte = int.from_bytes(hashlib.sha256(os.fsencode(run_dir.name)).digest()[:7], "big")
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:  # The file stays open, as in `lock_folder`.
        fd = os.open(run_dir.parent / ".locks", flags, 0o666)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except BlockingIOError:
        raise RunDirBusy(_busy(run_dir)) from None
    except OSError:  # --savedir of another user, or a file system without locks.
        pass


def _busy(run_dir: Path) -> str:
    owner = ""
    with contextlib.suppress(OSError):  # The file was deleted.
        owner = (run_dir / ".lock").read_text(errors="replace")
    return (
        f"{run_dir} is in use by {owner or 'another process'}. Stop that run first, or "
        "choose another --xpid."
    )


def lock_folder(run_dir: Path) -> None:
    """Lock the file `run_dir/.lock`, and write the name of this process into it.

    Raises:
      RunDirBusy: another process holds the lock.
    """
    path = run_dir / ".lock"
    # The file stays open: closing any descriptor of it would release the lock.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(fd)
        raise RunDirBusy(_busy(run_dir)) from None
    except OSError as error:
        # Some cluster file systems have no locks. Then the user must make sure that
        # only one process trains in a folder.
        log.warning("Cannot lock %s: %s", path, error)
    with contextlib.suppress(OSError):  # Only the message of RunDirBusy needs this.
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def write_meta(
    run_dir: Path, *, flags: Mapping[str, Any], extra: Mapping[str, Any]
) -> None:
    """Write meta.json: flags, command, commit, versions and host.

    It has no environment variables, since these may hold secrets. Each start or resume
    of the run adds an entry to `starts`. All other entries describe the latest start.

    Args:
      flags: every flag and its value.
      extra: more entries; `step` is the step at which this start begins.
    """
    starts = recorded_meta(run_dir).get("starts", [])
    now = datetime.datetime.now(datetime.timezone.utc)
    meta = {
        "flags": dict(flags),
        **extra,
        **describe_code(),
        "versions": versions(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        # The command line as typed, but without the path of python.
        "command": [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]],
    }
    start = {"time": now.isoformat(timespec="seconds"), "step": extra.get("step", 0)}
    start |= {key: meta[key] for key in ("commit", "dirty", "host", "command")}
    meta["starts"] = [*starts, start]
    text = json.dumps(meta, indent=2, default=str)
    write_atomically(run_dir / "meta.json", text.encode() + b"\n")


def run_id(recorded: Mapping[str, Any], run_dir: Path) -> str:
    """Return the random id of a run: the one in its meta.json, or a new one.

    Environment servers use this id to recognize a run that connects again, because
    another run may have the same --xpid. The id ends with the device and inode number
    of the folder, because a copy of the folder is another run: if two learners had the
    same id, each would replace the other at the servers, again and again.
    """
    found = run_dir.stat()
    folder = f"-{found.st_dev:x}-{found.st_ino:x}"
    known = recorded.get("run_id", "")
    return known if known.endswith(folder) else secrets.token_hex(8) + folder


def read_meta(run_dir: Path) -> dict[str, Any]:
    """Return the contents of meta.json.

    Raises:
      ConfigError: meta.json is missing or damaged.
    """
    path = run_dir / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(meta, dict) or not {"flags", "starts"} <= meta.keys():
            raise ValueError("it has no flags or no starts")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path}, written at the start of every run: {error}. If there "
            "is no copy of it, delete it and resume with all flags that the run had."
        ) from error
    return meta


def recorded_meta(run_dir: Path) -> dict[str, Any]:
    """Return the contents of meta.json, or {} in a new run."""
    return read_meta(run_dir) if (run_dir / "meta.json").exists() else {}


def describe_code() -> dict[str, Any]:
    """Return the git commit of this file, and whether tracked files have changed.

    Both are None outside a checkout.
    """

    def git(*args: str) -> str:
        return subprocess.check_output(
            ["git", *args],
            cwd=Path(__file__).parent,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=10,
        ).strip()

    try:
        # Fails if this file is only installed inside the checkout of another project.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of packages; None for those not installed."""
    names = ("torch", "gymnasium", "ale-py", "numpy", "grpcio")
    installed = importlib.metadata.distributions
    return {"python": platform.python_version()} | {
        name: next((d.version for d in installed(name=name)), None) for name in names
    }
