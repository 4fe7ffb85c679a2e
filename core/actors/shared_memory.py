# SPDX-License-Identifier: Apache-2.0
"""The memory that MonoBeast's actors and its learner share: buffers and weights.

`RolloutBuffers` holds rollouts as the table in `core.rollout` says, and `SharedWeights`
holds the weights. Neither has a lock that a killed process could leave locked.
"""

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch
from torch import nn

from core.algorithm.replay import mark_replayed
from core.errors import ConfigError
from core.nests import ArraySpec, Nest, describe_array, leaves, map_nest, unflatten

_SEQUENCE = ""  # No tensor of a network has this name.
_ALIGNMENT = 64  # bytes; a cache line, and enough for every SIMD load


class SharedArrays:
    """Named numpy arrays in one anonymous segment of shared memory.

    The segment has no name, so nothing has to be unlinked: the kernel frees it when the
    last process that maps it has ended, even if that process was killed. It takes two
    file descriptors for any number of arrays. It can be passed to child processes with
    every start method.

    The initial values of arrays are easy to recognize if they are read by mistake: NaN,
    the smallest integer, 0xA5.

    Raises:
      OSError: there is not enough memory. `core.running.machine.check_resources` checks
        this first.
    """

    def __init__(self, specs: Mapping[str, ArraySpec]):
        self._specs = dict(specs)
        self._fd = _open_anonymous(nbytes(self._specs))
        self._map()
        for array in self.arrays.values():
            array.fill(_obvious(array.dtype))

    def _map(self) -> None:
        weakref.finalize(self, os.close, self._fd)
        self._memory = mmap.mmap(self._fd, nbytes(self._specs))
        self.arrays: dict[str, np.ndarray] = {}
        offset = 0
        for name, spec in self._specs.items():
            array = np.frombuffer(
                self._memory, spec.dtype, count=math.prod(spec.shape), offset=offset
            )
            self.arrays[name] = array.reshape(spec.shape)
            offset += _aligned(spec.nbytes)

    def __getstate__(self) -> dict[str, Any]:
        # Works only while a child process starts: DupFd gives it the file descriptor.
        return {"specs": self._specs, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._specs = state["specs"]
        self._fd = state["fd"].detach()
        self._map()


def nbytes(specs: Mapping[str, ArraySpec]) -> int:
    """Return the size in bytes of a segment of `SharedArrays` for `specs`."""
    return max(1, sum(_aligned(spec.nbytes) for spec in specs.values()))


def memory_folder() -> str | None:
    """Return the folder whose free space limits shared memory, or None.

    It is None on Linux: memfd segments count as memory of the machine (or of the
    container), and not against /dev/shm, which has 64 MB in a default container.
    """
    if hasattr(os, "memfd_create"):
        return None
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def _open_anonymous(size: int) -> int:
    folder = memory_folder()
    if folder is None:
        fd = os.memfd_create("torchbeast")
    else:
        with tempfile.TemporaryFile(dir=folder) as file:  # Already unlinked.
            fd = os.dup(file.fileno())
    try:
        # Reserve the pages now: a full device raises OSError here, but SIGBUS later.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _obvious(dtype: np.dtype) -> Any:
    if dtype.kind == "f":
        return np.nan
    if dtype.kind == "i":
        return np.iinfo(dtype).min
    return True if dtype.kind == "b" else 0xA5


class RolloutBuffers:
    """Rollouts of E environments each, one slab per key. Can be passed to processes.

    `rows` is a nest like one rollout row, its leaves `[N, T + 1, E, ...]`: N buffers of
    E environments. `agent_state` is a tuple of `[N, layers, E, hidden]`. There is no
    lock: `core.actors.processes.Actors` decides who may use which buffer.

    Args:
      row_spec: nest of `ArraySpec` of one row of one environment, no batch axes.
      slabs: from `buffer_specs`, for the same `row_spec`.
    """

    def __init__(self, row_spec: Nest, slabs: Mapping[str, ArraySpec]):
        self._row_spec = row_spec
        self._shared = SharedArrays(slabs)
        self._view()

    def _view(self) -> None:
        arrays = self._shared.arrays
        names = [name for name, _ in leaves(self._row_spec)]
        self.rows = unflatten((arrays[name] for name in names), self._row_spec)
        self.agent_state = tuple(
            array for name, array in arrays.items() if name.startswith("agent_state/")
        )
        self.num_buffers, num_rows, self.envs_per_actor = arrays[names[0]].shape[:3]
        self.unroll_length = num_rows - 1

    def __getstate__(self) -> tuple[Nest, SharedArrays]:
        return self._row_spec, self._shared

    def __setstate__(self, state: tuple[Nest, SharedArrays]) -> None:
        self._row_spec, self._shared = state
        self._view()

    def row(self, index: int, t: int) -> Nest:
        """Return row `t` of one buffer, leaves `[E, ...]`: views, not copies."""
        return map_nest(lambda slab: slab[index, t], self.rows)

    def rollout(self, index: int) -> Nest:
        """Return one buffer's rollout, leaves `[T + 1, E, ...]`: views, not copies."""
        return map_nest(lambda slab: slab[index], self.rows)


def buffer_specs(
    row_spec: Nest,
    state_spec: Sequence[ArraySpec],
    *,
    num_buffers: int,
    unroll_length: int,
    envs_per_actor: int,
) -> dict[str, ArraySpec]:
    """Return the spec of every slab of `RolloutBuffers`, by name.

    Args:
      state_spec: of each tensor of the recurrent state, `[layers, E, hidden]`.
    """
    lead = (num_buffers, unroll_length + 1, envs_per_actor)
    specs = {
        name: ArraySpec(lead + spec.shape, spec.dtype)
        for name, spec in leaves(row_spec)
    }
    for i, spec in enumerate(state_spec):
        specs[f"agent_state/{i}"] = ArraySpec((num_buffers, *spec.shape), spec.dtype)
    return specs


class BatchAssembler:
    """Copies rollouts into one learner batch, which is allocated once and reused.

    The copy takes about one percent of the time of an update on the CPU. After the
    copy, the actors can fill the buffers again.
    """

    def __init__(
        self,
        buffers: RolloutBuffers,
        rollouts_per_batch: int,
        empty: Callable[[tuple[int, ...], np.dtype], np.ndarray] = np.empty,
        *,
        num_replayed: int = 0,
    ):
        """Allocate the batch.

        Args:
          rollouts_per_batch: number of new buffers in each batch.
          empty: allocates an array, as `np.empty` does.
          num_replayed: number of replayed buffers in each batch. The first batches may
            have none.
        """
        n = rollouts_per_batch + num_replayed

        def batch_of(slab: np.ndarray) -> np.ndarray:
            _, rows, envs, *rest = slab.shape
            return empty((rows, n * envs, *rest), slab.dtype)

        self._envs_per_actor = buffers.envs_per_actor
        self._num_replayed = num_replayed
        self._slabs: Nest = buffers.rows, buffers.agent_state
        self._memory = map_nest(batch_of, self._slabs)
        self.batch, self.agent_state = self._memory  # [T+1, B, ...], [layers, B, ...]

    def fill(self, indices: Sequence[int], replayed: Sequence[int] = ()) -> None:
        """Copy new and replayed buffers, side by side, into `batch` and `agent_state`.

        If `num_replayed` is not 0, `batch` has the key `replayed`.
        """
        both, E = [*indices, *replayed], self._envs_per_actor
        memory = self._memory
        if self._num_replayed and not replayed:
            memory = map_nest(lambda x: x[:, : len(indices) * E], memory)

        def gather(slab: np.ndarray, out: np.ndarray) -> None:
            np.concatenate([slab[i] for i in both], axis=1, out=out)

        map_nest(gather, self._slabs, memory)
        rows, self.agent_state = memory
        if self._num_replayed:
            marks = mark_replayed(len(rows["done"]), len(indices) * E, len(both) * E)
            rows = {**rows, "replayed": marks}
        self.batch = rows


class SharedWeights:
    """The learner's weights, for the actors: one writer, any number of readers.

    There is no lock, so a reader that is killed blocks nobody. The writer makes
    `sequence` odd, writes, and makes `sequence` even again. A reader copies again if
    `sequence` was odd, or if it changed during the copy. (On CPUs that reorder stores,
    a copy could in principle still mix two versions. Learning would stay correct: an
    actor records the logits that it really used, and V-trace corrects for those.)

    Args:
      tensors, version: the first weights, as `publish` takes them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], version: int):
        specs = {
            name: ArraySpec(tuple(x.shape), _numpy_dtype(x.dtype))
            for name, x in tensors.items()
        }
        self._shared = SharedArrays(
            {_SEQUENCE: ArraySpec((1,), np.dtype(np.int64)), **specs}
        )
        self.publish(tensors, version)

    @property
    def _sequence(self) -> np.ndarray:
        return self._shared.arrays[_SEQUENCE]

    def check(self, net: nn.Module) -> None:
        """Refuse a network that is not like the one whose weights are shared.

        Floats may be of another size: some actors compute in bfloat16.

        Raises:
          ConfigError: names, shapes or dtypes differ; the message has the first one.
        """
        shared = {
            name: _describe(array)
            for name, array in self._shared.arrays.items()
            if name != _SEQUENCE
        }
        ours = {name: _describe(x) for name, x in net.state_dict().items()}
        for name in (*ours, *shared):
            got, needed = ours.get(name, "none"), shared.get(name, "none")
            if got != needed:
                raise ConfigError(
                    "the actors' network is not the learner's (first difference: "
                    f"{name} is {got}, the learner's is {needed}): assign Net and "
                    "create_env at the top level of a script, not under __main__, and "
                    "create all modules in Net.__init__, not in create_learner"
                )

    def publish(self, tensors: Mapping[str, Any], version: int) -> None:
        """Write `tensors`, a network's `state_dict`, as `version` >= 0.

        Only one thread may call this at a time.
        """
        self._sequence[0] = 2 * version + 1
        for name, tensor in tensors.items():
            torch.from_numpy(self._shared.arrays[name]).copy_(tensor)
        self._sequence[0] = 2 * version + 2

    def fetch(self, net: nn.Module, have: int) -> int:
        """Copy the newest weights into `net`; return their version.

        `have` is the version that was fetched last (-1 for none). If it is still the
        newest, this only reads one integer. Waits while the writer writes (a
        millisecond).
        """
        while True:
            before = int(self._sequence[0])
            if before == 2 * have + 2:
                return have
            if before % 2 == 0:
                for name, tensor in net.state_dict().items():
                    tensor.copy_(torch.from_numpy(self._shared.arrays[name]))
                if int(self._sequence[0]) == before:
                    return before // 2 - 1
            os.sched_yield() if hasattr(os, "sched_yield") else None


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    if dtype.is_floating_point and dtype not in (torch.float64, torch.float16):
        dtype = torch.float32  # Holds every bfloat16 and float8, which numpy lacks.
    return torch.empty(0, dtype=dtype).numpy().dtype


def _describe(x: np.ndarray | torch.Tensor) -> str:
    """Return dtype and shape: `int64[5]`, or `float[5,3]` for floats of any size."""
    return describe_array("float" if "float" in str(x.dtype) else x.dtype, x.shape)
