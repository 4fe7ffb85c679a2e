# SPDX-License-Identifier: Apache-2.0
"""Several learners (torchrun): which one this process is, and its share of the flags.

    torchrun --nproc_per_node 2 -m polybeast --batch_size 32 --num_servers 8

The flags describe the whole run: here each of the two learners takes 16 rollouts of
each batch and starts 4 servers. Numbers that follow from flags (of buffers, for
instance) and defaults are computed from the share.

Needs no torch. `core.algorithm.learners` connects the learners.
"""

import argparse
import contextlib
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from core.errors import ConfigError

# These flags must be multiples of the number of learners.
MULTIPLES = ("batch_size", "num_actors", "num_servers")
# The shares of these flags are rounded up.
LIMITS = ("num_buffers", "max_learner_queue_size", "replay_capacity", "max_streams")
# A folder in which each learner writes its exit status, for tools.learners: torchrun
# does not tell it after a signal. While it trains, the status is that of a failure.
STATUS_DIR = "TORCHBEAST_STATUS_DIR"
# Name servers may need this long to know a machine that has just started.
NAME_S = 10.0
# Only learner 0 obeys these flags.
OUTPUTS = ("wandb", "write_profiler_trace")


def rank() -> int:
    """Return the number of this learner: 0 if it is the only one."""
    return int(os.environ["RANK"]) if size() > 1 else 0


def size() -> int:
    """Return the number of learners. torchrun sets both variables."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def local_rank() -> int:
    """Return the number of this learner among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", rank())) if size() > 1 else 0


def local_size() -> int:
    """Return the number of learners on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if size() > 1 else 1


def first_incarnation() -> int:
    """Return a number by which the environments of this learner get their own seeds.

    The seed of an environment depends on the run's seed, on the environment's number in
    this process, and on its incarnation. This number is added to the incarnation. It is
    0 for learner 0.
    """
    return rank() << 48


def record_status(status: int) -> None:
    """Write the exit status of this learner for tools.learners, if that started it."""
    if (folder := os.environ.get(STATUS_DIR)) is not None:
        with contextlib.suppress(OSError):
            # Some machines delete old files in /tmp.
            Path(folder).mkdir(mode=0o700, exist_ok=True)
            Path(folder, str(rank())).write_text(str(int(status)))


def check_host(flag: str, host: str) -> None:
    """Wait until learner 0's host, which `flag` names, resolves, for up to NAME_S.

    Without this check torch would repeat a warning with a stack for minutes.

    Raises:
      ConfigError: the name does not resolve.
    """
    deadline = time.monotonic() + NAME_S
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                why = getattr(error, "strerror", None) or error
                raise ConfigError(
                    f"{flag} is {host}, which {socket.gethostname()} cannot resolve: "
                    f"{why}. Give the name or IP address of learner 0's machine."
                ) from error
        time.sleep(0.5)


def take_share(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Reduce the flags of a run to this learner's share.

    Does nothing if this is the only learner. If the flags cannot be divided among the
    learners, the program ends with exit status 2.
    """
    n = size()
    if n == 1:
        return
    if flags.mode != "train":
        parser.error(
            f"--mode is {flags.mode} but there are {n} learners (torchrun): testing "
            "takes one process. Start it without torchrun."
        )
    for name in MULTIPLES:
        if (value := getattr(flags, name, None)) is None:
            continue
        if value % n:
            parser.error(
                f"--{name} is {value} but must be a multiple of the number of learners "
                f"({n}): each takes its share. Try --{name} {n * math.ceil(value / n)}."
            )
        setattr(flags, name, value // n)
    for name in LIMITS:
        if (value := getattr(flags, name, None)) is not None:
            setattr(flags, name, math.ceil(value / n))
    addresses = getattr(flags, "server_addresses", None)
    listens = getattr(flags, "listen", None) is not None
    # Lists that change are divided where they are read: core.remote.server_lists.
    if addresses and not any(a.startswith(("dns:", "file:")) for a in addresses):
        if len(addresses) < n and not listens:
            parser.error(
                f"--server_addresses has {len(addresses)} servers but there are {n} "
                "learners (torchrun), and each needs a server of its own. Start more "
                "servers, or fewer learners."
            )
        flags.server_addresses = addresses[rank() :: n]
    if listens:  # Each learner has its own port.
        host, _, port = flags.listen.rpartition(":")
        if int(port) + n - 1 > 65535:
            parser.error(
                f"--listen is {flags.listen} but must leave room for {n} learners, "
                f"each with the next port: expected a port up to {65536 - n}."
            )
        if int(port):  # The system chooses a free port for each learner if it is 0.
            flags.listen = f"{host}:{int(port) + rank()}"
    if getattr(flags, "pipes_basename", None) is not None:
        flags.pipes_basename += f".{rank()}"
    if rank():
        flags.disable_checkpoint = True
        for name in OUTPUTS:
            if hasattr(flags, name):
                setattr(flags, name, False)


def _as_json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def flags_of_run(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of the whole run, from a learner's share, as JSON holds them.

    Raises:
      ConfigError: JSON cannot hold the value of a flag.
    """
    result: dict[str, Any] = {}
    for name, value in vars(flags).items():
        if name in (*MULTIPLES, *LIMITS) and value is not None:
            value *= size()
        result[name] = _as_json(value)
        try:
            json.dumps(result[name])
        except TypeError as error:
            raise ConfigError(
                f"--{name} is {value}, a {type(value).__name__}: meta.json and "
                "checkpoints hold numbers, texts, paths, and lists of these. Give the "
                "flag such a type (type=str), and convert the value where it is used."
            ) from error
    return result


def explain_share() -> str:
    """Return a sentence for error messages about flags; '' if there is one learner."""
    if size() == 1:
        return ""
    return (
        f" (This is learner {rank()} of {size()}. Numbers of rollouts, environments "
        "and servers may be its share of what the flags say.)"
    )
