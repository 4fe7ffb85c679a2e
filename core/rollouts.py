# SPDX-License-Identifier: Apache-2.0
"""Rollouts: what one holds, and the shared memory in which actors write them.

A rollout is a nest of arrays `[T + 1, B, ...]`, time first. Row t holds what was known
when row t's observation arrived, and the action that led to it:

| key             | dtype      | row t                                                 |
| --------------- | ---------- | ----------------------------------------------------- |
| observation     | the space's| what the agent sees; a new episode's first if done[t] |
| reward          | float32    | of the transition row t-1 -> row t, unclipped         |
| done            | bool       | row t is the first row of a new episode               |
| truncated       | bool       | row t is the final observation before a time limit    |
| episode_return, | float32,   | of the episode that the transition into row t belongs |
|   episode_step  |   int32    |   to, up to and with it                               |
| last_action     | the space's| the action that led to row t                          |
| info            | float32    | dict of scalars, NaN where the environment gave none: |
|                 |            |   game_return and game_step of the full game (all     |
|                 |            |   lives) that ended on the way into row t, info_keys  |
| action,         | int64,     | the agent's outputs for row t-1's observation, so     |
|   policy_logits,|   float32, |   action[t] is the action that led to row t           |
|   baseline      |   float32  |                                                       |
| policy_version  | int64      | optimizer steps behind the weights that chose it      |

The last row of a rollout is row 0 of the same environment's next one. The recurrent
state stored with a rollout is the state before row 0's observation is processed; models
zero it where `done`.

Termination and truncation differ (Pardo et al. 2018). On termination the reset
observation takes the next row (done). On truncation two rows follow: the final
observation (truncated, with the last reward), then the reset observation (done, reward
0). The step between those two is no transition: `core.losses` gives it no weight, and
`core.run.Learner.update` does not count it.
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

from core.spaces import ArraySpec, Nest, leaves, map_nest

_ALIGNMENT = 64  # bytes; a cache line, and enough for every SIMD load


class SharedArrays:
    """Named numpy arrays in one anonymous segment of shared memory.

    The segment has no name, so there is nothing to unlink: it goes when the last
    process that maps it ends, however it ends. It costs two file descriptors, whatever
    the number of arrays, and reaches child processes under every start method.

    Arrays start filled with values that are obvious when read by mistake: NaN, the
    smallest integer, 0xA5.

    Raises:
      OSError: there is no room; `core.supervise.check_resources` looks first.
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
        # Only while a child process starts: the descriptor itself is what travels.
        return {"specs": self._specs, "fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._specs = state["specs"]
        self._fd = state["fd"].detach()
        self._map()


def nbytes(specs: Mapping[str, ArraySpec]) -> int:
    """Return the size of the segment that `SharedArrays` would take."""
    return max(1, sum(_aligned(spec.nbytes) for spec in specs.values()))


def memory_folder() -> str | None:
    """Return the folder whose free space bounds shared memory, or None.

    None on Linux: memfd segments count against the machine's (or the container's)
    memory, not against /dev/shm, which is 64 MB in a default container.
    """
    if hasattr(os, "memfd_create"):
        return None
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def _open_anonymous(size: int) -> int:
    folder = memory_folder()
    if folder is None:
        fd = os.memfd_create("torchbeast")
    else:
        with tempfile.TemporaryFile(dir=folder) as file:  # Unlinked from the start.
            fd = os.dup(file.fileno())
    try:
        # Claim the pages now: a full device is an OSError here, a SIGBUS later.
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
    """Rollouts of `envs_per_actor` environments each, one slab per key.

    `rows` is a nest like one rollout row, its leaves `[N, T + 1, E, ...]`: N buffers of
    E environments. `agent_state` is a tuple of `[N, layers, E, hidden]`. Who may touch
    which buffer is decided by their owner in the parent (`monobeast.Actors`); nothing
    here locks.
    """

    def __init__(
        self,
        row_spec: Nest,
        state_spec: Sequence[ArraySpec],
        *,
        num_buffers: int,
        unroll_length: int,
        envs_per_actor: int,
    ):
        """Allocate the slabs.

        Args:
          row_spec: nest of `ArraySpec`, one environment and one row, no batch axes.
          state_spec: `[layers, E, hidden]` of each tensor of the recurrent state.
        """
        self._row_spec = row_spec
        self.num_buffers = num_buffers
        self.unroll_length = unroll_length
        self._shared = SharedArrays(
            buffer_specs(
                row_spec,
                state_spec,
                num_buffers=num_buffers,
                unroll_length=unroll_length,
                envs_per_actor=envs_per_actor,
            )
        )
        self._view()

    def _view(self) -> None:
        arrays = self._shared.arrays
        names = iter([name for name, _ in leaves(self._row_spec)])
        self.rows: Nest = map_nest(lambda _: arrays[next(names)], self._row_spec)
        self.agent_state = tuple(
            array for name, array in arrays.items() if name.startswith("agent_state/")
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_row_spec": self._row_spec,
            "num_buffers": self.num_buffers,
            "unroll_length": self.unroll_length,
            "_shared": self._shared,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
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
    """Return the spec of every slab of `RolloutBuffers`, by name."""
    lead = (num_buffers, unroll_length + 1, envs_per_actor)
    specs = {
        name: ArraySpec(lead + spec.shape, spec.dtype)
        for name, spec in leaves(row_spec)
    }
    for i, spec in enumerate(state_spec):
        specs[f"agent_state/{i}"] = ArraySpec((num_buffers, *spec.shape), spec.dtype)
    return specs


class BatchAssembler:
    """Copies rollouts into one learner batch, allocated once and used again.

    The copy costs about one percent of an update on the CPU and frees the actors'
    buffers at once, in whatever order they came.
    """

    def __init__(
        self,
        buffers: RolloutBuffers,
        rollouts_per_batch: int,
        empty: Callable[[tuple[int, ...], np.dtype], np.ndarray] = np.empty,
    ):
        n = rollouts_per_batch

        def batch_of(slab: np.ndarray) -> np.ndarray:
            _, rows, envs, *rest = slab.shape
            return empty((rows, n * envs, *rest), slab.dtype)

        self._buffers = buffers
        self.batch: Nest = map_nest(batch_of, buffers.rows)  # [T+1, B, ...]
        self.agent_state = tuple(batch_of(s) for s in buffers.agent_state)

    def fill(self, indices: Sequence[int]) -> None:
        """Copy the named buffers, side by side, into `batch` and `agent_state`."""

        def gather(slab: np.ndarray, out: np.ndarray) -> None:
            np.concatenate([slab[i] for i in indices], axis=1, out=out)

        map_nest(gather, self._buffers.rows, self.batch)
        for slab, out in zip(self._buffers.agent_state, self.agent_state):
            gather(slab, out)


class SharedWeights:
    """The learner's weights, for the actors: one writer, any number of readers.

    No lock, so that a reader killed at any moment blocks nobody. The writer makes
    `sequence` odd, writes, and makes it even again; a reader that finds it odd, or
    changed after its copy, copies again. (On CPUs that reorder stores a copy could in
    principle still mix two versions. That would not make the learner wrong: an actor
    records the logits it really used, and V-trace corrects for those.)
    """

    def __init__(self, specs: Mapping[str, ArraySpec]):
        self._shared = SharedArrays(
            {"sequence": ArraySpec((1,), np.dtype(np.int64)), **specs}
        )
        self._sequence[0] = 0

    @property
    def _sequence(self) -> np.ndarray:
        return self._shared.arrays["sequence"]

    def publish(self, tensors: Mapping[str, Any], version: int) -> None:
        """Write `tensors` (what torch's `state_dict` returns) as `version` >= 0.

        Called by one thread at a time.
        """
        import torch  # Not at the top: environment servers read this file's table.

        self._sequence[0] = 2 * version + 1
        for name, tensor in tensors.items():
            torch.from_numpy(self._shared.arrays[name]).copy_(tensor)
        self._sequence[0] = 2 * version + 2

    def fetch(self, tensors: Mapping[str, Any], have: int) -> int:
        """Copy the newest weights into `tensors`; return their version.

        Does nothing but read one integer if `have`, the version last fetched (-1 for
        none), is still the newest. Waits while the writer is at work (a millisecond).
        """
        import torch

        while True:
            before = int(self._sequence[0])
            if before == 2 * have + 2:
                return have
            if before % 2 == 0 and before > 0:
                for name, tensor in tensors.items():
                    tensor.copy_(torch.from_numpy(self._shared.arrays[name]))
                if int(self._sequence[0]) == before:
                    return before // 2 - 1
            os.sched_yield() if hasattr(os, "sched_yield") else None
