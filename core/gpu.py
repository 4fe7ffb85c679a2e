# SPDX-License-Identifier: Apache-2.0
"""How threads share a GPU.

It does the work of one stream in order. The learner computes in the default stream;
what another thread did there would wait for the update that is under way. So whoever
copies, or chooses actions, has a stream of its own, and waits for its end before others
use what came of it.

Python takes longer to launch the kernels of a small batch than a GPU to run them, and
all threads take turns at being Python. `Graphs` launches them at once.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from core.spaces import Nest, leaves, map_nest
from core.supervise import ConfigError

WARM_UPS = 3  # Calls in which libraries choose kernels and take the memory they need.


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


class Graphs:
    """Calls a function of tensors on a GPU by CUDA graphs: records it, then replays.

    A graph is good for one shape. So the function is recorded anew for each number of
    columns, or with `pad` for each power of two, of which the last ones may be unused.

    The function must not wait for the GPU (`.item()`, `.cpu()`, `if tensor:`), must
    launch the same kernels whatever the tensors hold, and writes nothing but what it
    returns and tensors that are there before and after. Nobody may draw random numbers
    on the GPU while it is recorded.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        device: str | torch.device,
        *,
        pad: bool = False,
    ):
        """Wrap `function`, whose arguments are nests of tensors [rows, columns, ...].

        Args:
          pad: columns are independent of each other, and all that is returned is
            [rows, columns, ...] too.
        """
        self._function = function
        self._pad = pad
        self._recorder = Recorder(device)
        # By number of columns: the arguments' tensors, what to call, what it returns.
        self._graphs: dict[int, tuple[Nest, Callable[[], None], Any]] = {}

    def __call__(self, *args: Nest) -> Any:
        """Return what the function does, in tensors that the next call writes anew.

        Args:
          args: on the GPU.

        Raises:
          ConfigError: the function cannot be recorded.
        """
        num = next(leaves(args))[1].shape[1]
        size = 1 << (num - 1).bit_length() if self._pad else num
        if size not in self._graphs:
            self._graphs[size] = self._record(args, size)
        inputs, replay, outputs = self._graphs[size]
        map_nest(lambda to, x: to[:, :num].copy_(x), inputs, args)
        replay()
        return map_nest(lambda x: x[:, :num], outputs) if self._pad else outputs

    def _record(
        self, args: tuple[Nest, ...], size: int
    ) -> tuple[Nest, Callable[[], None], Any]:
        # Columns that are unused must be valid, too: they are the others again.
        inputs = map_nest(lambda x: x[:, torch.arange(size) % x.shape[1]], args)
        try:
            replay, outputs = self._recorder(self._function, inputs)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = error.__context__ or error  # To end a failed recording fails, too.
            raise ConfigError(
                f"--cuda_graphs: the network cannot be recorded: {first}. What it does "
                "must not wait for the GPU (.item(), .cpu(), if tensor:) nor depend "
                "on what tensors hold. Change it, or leave --cuda_graphs out."
            ) from error
        return inputs, replay, outputs


class Recorder:
    """Records graphs that share their memory: no two of them run at the same time."""

    def __init__(self, device: str | torch.device):
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(
        self, function: Callable[..., Any], args: Nest
    ) -> tuple[Callable[[], None], Any]:
        """Record what `function(*args)` does.

        Returns:
          What does it again, in the stream of whoever calls, with what `args` then
          hold; and the tensors that it writes to.
        """
        graph = torch.cuda.CUDAGraph()
        with _recording, torch.cuda.device(self._device):
            self._stream = stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    function(*args)
            # What other threads do to the GPU meanwhile is their own business.
            with torch.cuda.graph(
                graph, self._pool, stream, capture_error_mode="thread_local"
            ):
                outputs = function(*args)
            torch.cuda.current_stream().wait_stream(stream)
        self._pool = graph.pool()
        return graph.replay, outputs


_recording = threading.Lock()  # CUDA's random numbers allow for one at a time.
