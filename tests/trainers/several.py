# SPDX-License-Identifier: Apache-2.0
"""Start several learners as torchrun does, without the seconds that torchrun takes."""

from collections.abc import Callable

from tests.conftest import Program, free_ports


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
