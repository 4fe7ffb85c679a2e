# SPDX-License-Identifier: Apache-2.0
"""How threads share a GPU.

It does the work of one stream in order. The learner computes in the default stream;
what another thread did there would wait for the update that is under way. So whoever
copies, or chooses actions, has a stream of its own, and waits for its end before others
use what came of it.
"""

import contextlib
import math
from collections.abc import Iterator

import numpy as np
import torch


def create_stream(
    device: str | torch.device, *, urgent: bool = False
) -> torch.cuda.Stream | None:
    """Return a stream for one thread's work on a GPU, None for a CPU.

    It begins after all that the default stream has to do by now.

    Args:
      urgent: its kernels go before those of other streams.
    """
    if torch.device(device).type != "cuda":
        return None
    stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)
    stream.wait_stream(torch.cuda.default_stream(device))
    return stream


@contextlib.contextmanager
def in_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Let this thread's GPU work go to `stream`, and wait for its end; None: no GPU."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def wait_for(device: str | torch.device) -> None:
    """Wait until this thread's present stream has done its work; on a CPU it has."""
    if torch.device(device).type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def allocate_page_locked(num_bytes: int) -> torch.Tensor:
    """Return memory, uint8, that a GPU copies from while the CPU goes on."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def empty_page_locked(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return what `np.empty` does, in such memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return allocate_page_locked(num_bytes).numpy().view(dtype).reshape(shape)
