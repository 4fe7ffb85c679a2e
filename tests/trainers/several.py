# SPDX-License-Identifier: Apache-2.0
"""Start several learners as torchrun does, without the seconds that torchrun takes."""

import datetime
from collections.abc import Callable

from torch.distributed.distributed_c10d import _set_pg_timeout

from core import proc
from core.algorithm import learners
from core.algorithm.learners import Learners
from tests.conftest import DEADLINE_S, Program, free_ports


def environments(size: int, port: int | None = None) -> list[dict[str, str]]:
    """Return the environment variables that torchrun sets, for each learner."""
    if port is None:
        port = free_ports(1)
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(size)
    ]


def start_learners(
    start: Callable[..., Program], *argv: object, size: int = 2, **kwargs: object
) -> list[Program]:
    return [start(*argv, env=env, **kwargs) for env in environments(size)]


def shorten_limit(learner: Learners, limit_s: float) -> None:
    """Change --stall_timeout_s of a learner that has connected to the others.

    A short limit from the beginning would make a busy machine fail to start. Only a
    learner whose others answer nothing from now on may have a short limit.
    """
    learner._limit_s = limit_s
    _set_pg_timeout(datetime.timedelta(seconds=limit_s))


def end_patiently() -> None:
    """Make learner 0 keep the store until the others have read how it ended."""
    end = Learners.end

    def wait_and_end(*args) -> None:
        learners.END_S = DEADLINE_S
        end(*args)

    Learners.end = wait_and_end


def is_stopped(learner: Learners, rank: int) -> bool:
    """Say whether another learner of this machine is stopped (SIGSTOP)."""
    pid, _, _ = learner._read(f"process/{rank}").partition(" ")
    return proc.state(int(pid)) == "T"
