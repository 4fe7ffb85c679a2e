# SPDX-License-Identifier: Apache-2.0
"""Start several learners as torchrun does, without the seconds that torchrun takes."""

import contextlib
import socket
from collections.abc import Callable, Iterator

from tests.conftest import Program


@contextlib.contextmanager
def bound_port() -> Iterator[int]:
    """Yield a port of this machine that is in use."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def environments(size: int, port: int | None = None) -> list[dict[str, str]]:
    """Return the environment variables that torchrun sets, for each learner."""
    if port is None:
        with bound_port() as port:
            pass
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
