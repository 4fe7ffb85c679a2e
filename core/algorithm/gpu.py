# SPDX-License-Identifier: Apache-2.0
"""How threads share a GPU: streams, page-locked memory, CUDA graphs.

A GPU runs one stream's kernels in order. The learner computes in the default stream. If
another thread used the default stream too, it would wait for the present update. So
each thread that copies batches or chooses actions has its own stream, and waits for the
end of this stream's work before another thread uses the results.

For a small batch, Python takes longer to launch the kernels than the GPU takes to run
them, and all threads share the GIL. `Graphs` launches all kernels of a function at
once.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from core.errors import ConfigError
from core.nests import Nest, leaves, map_nest

WARM_UPS = 3  # Calls in which libraries choose kernels and take the memory they need.
# Without `pad`: each graph keeps a batch in memory. Further sizes are not recorded.
MAX_GRAPHS = 4
# Older versions cannot replay a graph while another thread records one.
CAN_RECORD = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)


def create_stream(
    device: str | torch.device, *, urgent: bool = False
) -> torch.cuda.Stream | None:
    """Return a stream for one thread's work on a GPU; None for a CPU.

    Its first kernel waits for all work that is now in the default stream.

    Args:
      urgent: the kernels of this stream run before those of other streams.
    """
    if torch.device(device).type != "cuda":
        return None
    stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)
    stream.wait_stream(torch.cuda.default_stream(device))
    return stream


@contextlib.contextmanager
def in_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Send this thread's GPU work to `stream`, and wait for it at the end."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield
        wait_for(stream.device)


def wait_for(device: str | torch.device) -> None:
    """Wait until this thread's current stream has finished; on a CPU return at once.

    The thread sleeps. `stream.synchronize()` polls, which takes a core from the
    environments and makes other threads wait that launch kernels.
    """
    if torch.device(device).type == "cuda":
        finished = torch.cuda.Event(blocking=True)
        finished.record(torch.cuda.current_stream(device))
        finished.synchronize()


def allocate_page_locked(num_bytes: int) -> torch.Tensor:
    """Return uint8 memory that a GPU copies from while the CPU continues."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def empty_page_locked(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array like `np.empty` does, in page-locked memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return allocate_page_locked(num_bytes).numpy().view(dtype).reshape(shape)


_Graph = tuple[Nest, Callable[[], None], Any]  # Inputs, replay function, outputs.


class Graphs:
    """Runs a function of GPU tensors as CUDA graphs: records it once, then replays it.

    A graph works for one shape. So the function is recorded once for each number of
    columns. With `pad` it is recorded once for each power of two, and the last columns
    may be unused.

    The function must not wait for the GPU (`.item()`, `.cpu()`, `if tensor:`). It must
    launch the same kernels in each call. Python numbers keep the values that they have
    during the recording. The function may write only to the tensors that it returns and
    to tensors that exist before and after the call. (The first call with a number of
    columns runs it some times more.) No thread may draw random numbers on the GPU
    during the recording.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        device: str | torch.device,
        *,
        pad: bool = False,
        record: bool = True,
    ):
        """Wrap `function`, whose arguments are nests of tensors [rows, columns, ...].

        Args:
          record: if False, call the function each time.
          pad: round the number of columns up to a power of two. The columns must be
            independent of each other, and all results must be [rows, columns, ...].
        """
        self._function = function
        self._device = device
        self._pad = pad
        self._max_graphs = math.inf if pad else MAX_GRAPHS
        if not (record and CAN_RECORD):
            self._max_graphs = 0
        self._recorder = Recorder(device)
        # By number of columns.
        self._graphs: dict[int, _Graph] = {}
        # The same for calls with fewer columns, with the parts of the tensors they use.
        self._parts: dict[int, _Graph] = {}

    def __call__(self, *args: Nest) -> Any:
        """Return the function's result, in tensors that the next call overwrites.

        Args:
          args: nests of tensors, on the GPU or in page-locked memory.

        Raises:
          ConfigError: the function cannot be recorded.
        """
        num = next(leaves(args))[1].shape[1]
        if num not in self._parts:
            size = 1 << (num - 1).bit_length() if self._pad else num
            if size not in self._graphs:
                if len(self._graphs) >= self._max_graphs:
                    return self._function(*map_nest(self._to_gpu, args))
                self._graphs[size] = self._record(args, size)
            inputs, replay, outputs = self._graphs[size]
            if size > num:
                inputs, outputs = map_nest(lambda x: x[:, :num], (inputs, outputs))
            self._parts[num] = inputs, replay, outputs
        inputs, replay, outputs = self._parts[num]
        map_nest(lambda to, x: to.copy_(x, non_blocking=True), inputs, args)
        replay()
        return outputs

    def _to_gpu(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._device, non_blocking=True)

    def _record(self, args: tuple[Nest, ...], size: int) -> _Graph:
        # Unused columns must hold valid values, too: they repeat the other columns.
        repeat = lambda x: x[:, torch.arange(size) % x.shape[1]]  # noqa: E731
        inputs = map_nest(lambda x: self._to_gpu(repeat(x)), args)
        return inputs, *self._recorder(self._function, inputs)


class Recorder:
    """Records graphs that share their memory: no two of them run at the same time."""

    def __init__(self, device: str | torch.device):
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(
        self, function: Callable[..., Any], args: Nest
    ) -> tuple[Callable[[], None], Any]:
        """Record the GPU operations of `function(*args)`.

        Returns:
          A function that runs the recording again, in the caller's stream and with the
          values that `args` hold at that time; and the tensors for its results.

        Raises:
          ConfigError: the function cannot be recorded.
        """
        graph = torch.cuda.CUDAGraph()
        with recording, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            if self._stream is None:  # A graph's kernels keep the priority of this one.
                self._stream = torch.cuda.Stream(priority=current.priority)
            stream = self._stream
            stream.wait_stream(current)
            # The outer block: a failed recording does not leave its stream by itself.
            with torch.cuda.stream(current):
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UPS):
                        function(*args)
                # "thread_local": GPU calls of other threads do not break the recording.
                to_graph = torch.cuda.graph(
                    graph, self._pool, stream, capture_error_mode="thread_local"
                )
                with explain_failed_recording(), to_graph:
                    outputs = function(*args)
            current.wait_stream(stream)
        self._pool = graph.pool()
        return graph.replay, outputs


@contextlib.contextmanager
def explain_failed_recording() -> Iterator[None]:
    """If the block cannot be recorded as a CUDA graph, say what to change.

    Raises:
      ConfigError: instead of CUDA's error.
    """
    try:
        yield
    except RuntimeError as error:
        # The end of a failed recording fails, too. Report the first error.
        first = error.__context__ or error
        if isinstance(first, torch.cuda.OutOfMemoryError):
            raise first from None
        reason = str(first).partition("\n")[0]  # Hints for CUDA programmers follow.
        raise ConfigError(
            "the network's GPU operations cannot be recorded as a CUDA graph: "
            f"{reason}. forward and the loss must not wait for the GPU (.item(), "
            ".cpu(), if tensor:). Change them, or use --disable_cuda_graphs."
        ) from error


# CUDA's random numbers allow one recording at a time. A thread that waits for the whole
# GPU must hold this, too.
recording = threading.Lock()
