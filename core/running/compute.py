# SPDX-License-Identifier: Apache-2.0
"""How torch uses the machine: threads, memory, the GPU."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from torch import nn

from core import ranks
from core.nests import Nest, leaves
from core.running.machine import available_memory


def rss_mb() -> float | None:
    """Return the resident memory of this process in MB; None if that cannot be read."""
    try:
        return psutil.Process().memory_info().rss / 1e6
    except (OSError, psutil.Error):  # Such as no descriptor left.
        return None


@contextlib.contextmanager
def explain_out_of_memory(batch: Nest, net: nn.Module) -> Iterator[None]:
    """If an update runs out of memory, raise an error that shows the sizes.

    Args:
      batch: rollouts as numpy arrays or tensors, [T + 1, B, ...].

    Raises:
      MemoryError: instead of the errors of numpy and of torch (on a CPU or a GPU).
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_on_gpu = isinstance(error, torch.cuda.OutOfMemoryError)
        is_on_cpu = isinstance(error, MemoryError) or (
            "can't allocate memory" in str(error)  # torch's allocator.
        )
        if not (is_on_gpu or is_on_cpu):
            raise
        device = next(net.parameters()).device
        where = "GPU" if is_on_gpu else "machine"
        left = torch.cuda.mem_get_info(device)[0] if is_on_gpu else available_memory()
        rows, num_rollouts = batch["done"].shape
        batch_mib = sum(x.nbytes for _, x in leaves(batch)) / 2**20
        net_mib = sum(x.nbytes for x in net.state_dict().values()) / 2**20
        raise MemoryError(
            f"no memory for an update of {num_rollouts} rollouts of {rows - 1} steps: "
            f"the batch has {batch_mib:,.1f} MiB, the network {net_mib:,.1f} MiB. The "
            "gradient and the optimizer state have a multiple of the network's size, "
            f"and the activations are not counted. The {where} has {left / 2**20:,.1f} "
            "MiB left. Lower --batch_size or --unroll_length."
        ) from error


def gpu_utilization(net: nn.Module) -> float | None:
    """Return the share of the last second in which the network's GPU was busy.

    Return None for a network on the CPU, or if the driver does not report it.
    """
    device = next(net.parameters()).device
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # nvidia-ml-py or the driver is missing; the type varies.
        return None


def on_one_core(fn: Callable[..., None], *args: Any) -> None:
    """Call `fn` with one torch thread: more threads would compete with the learner."""
    set_torch_threads(1)
    fn(*args)


def set_torch_threads(cores: int) -> None:
    """Let torch use `cores` cores in this Python thread only."""
    # At the first computation or query in a thread, torch sets the thread's number to
    # the number that any thread has set last. So query first: otherwise the first
    # computation could overwrite the number that is set here.
    torch.get_num_threads()
    torch.set_num_threads(cores)


def set_device(
    parser: argparse.ArgumentParser,
    flags: argparse.Namespace,
    name: str,
    *,
    default_gpu: int,
) -> None:
    """Check the torch device that --`name` gives, or set its default.

    Args:
      default_gpu: index of the GPU to use if the flag is not given, or the last GPU if
        there are fewer GPUs. Without a GPU the default is the CPU.
    """
    device = getattr(flags, name)
    num_gpus = 0 if flags.disable_cuda else torch.cuda.device_count()
    if device is None:
        gpu = min(default_gpu, num_gpus - 1)
        if ranks.size() > 1:  # Each learner uses one GPU for everything.
            gpu = ranks.local_rank() % max(1, num_gpus)
        setattr(flags, name, f"cuda:{gpu}" if num_gpus else "cpu")
        return
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        parser.error(f"--{name} is {device!r}: {error}")
    if parsed.type == "cuda" and (parsed.index or 0) >= num_gpus:
        why = " with --disable_cuda" if flags.disable_cuda else ""
        parser.error(
            f"--{name} is {device} but torch sees {num_gpus} GPUs{why}. Try --{name} "
            "cpu, or leave it out."
        )
