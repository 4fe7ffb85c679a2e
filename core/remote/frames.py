# SPDX-License-Identifier: Apache-2.0
"""Write and read Step and Action, the two messages of every step, without copies.

`Frame` is one message whose arrays are views of its bytes. `Steps` makes a server's
Steps, with only the newest frame of a frame stack if the learner has the other frames.
"""

import ctypes
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from core import rollout
from core.nests import ArraySpec, Nest, leaves
from core.remote.codec import I64, LEN, VARINT, decode, fields_of, tag, varint
from core.remote.messages import Action, Array, Step, ToLearner, ToServer, WireError
from core.rollout import spec_of, value_range

# An observation may be a stack of frames if the length of its first axis is in
# STACK_FRAMES and it has at least MIN_STACK_NBYTES. Comparing such arrays in each step
# takes little time compared with creating them.
STACK_FRAMES = range(2, 17)
MIN_STACK_NBYTES = 4096


def arrays_of(spec: Nest, path: tuple[str | int, ...] = ()) -> tuple[Array, ...]:
    """Return the arrays of a nest of `ArraySpec`, in the order of `nests.leaves`."""
    if isinstance(spec, ArraySpec):
        return (Array(path, spec.dtype.name, spec.shape),)
    items: Any = spec.items() if isinstance(spec, dict) else enumerate(spec)
    return tuple(a for key, sub in items for a in arrays_of(sub, (*path, key)))


def value_ranges(
    observation: gym.Space, action: gym.Space
) -> list[tuple[tuple[str | int, ...], list[int], list[int]]]:
    """Return the argument `value_ranges` of `libtorchbeast.ActorPool`."""
    rows = {"observation": observation, "last_action": action}
    specs = {key: spec_of(space) for key, space in rows.items()}
    leaf_spaces = {key: rollout.leaf_spaces(space) for key, space in rows.items()}
    ranges = []
    for array, (_, leaf) in zip(arrays_of(specs), leaves(leaf_spaces)):
        if (limits := value_range(leaf)) is not None:
            low, high = (np.ravel(limit).tolist() for limit in limits)
            ranges.append((array.path, low, high))
    return ranges


class Frame:
    """The bytes of a Step or an Action, laid out once for all steps of a stream.

    All Steps of a stream have the same length and differ only in `seq` and in the
    contents of the arrays. So one message object is enough: its other bytes are written
    once, and `arrays` are numpy views of the bytes that change. `encode` always returns
    this object, so send or copy it before you write the next message. (Learner and
    server take turns, so a message has arrived before the next one is written.)

    Args:
      kind: Step or Action.
      arrays: the description of the arrays, in order.
      num_envs: K, the first axis of each array.
      newest_frames: for a Step: only the newest frame of each stack, [K, *shape[1:]].
    """

    def __init__(
        self,
        kind: type[Step] | type[Action],
        arrays: Sequence[Array],
        num_envs: int,
        *,
        newest_frames: bool = False,
    ):
        self._specs = arrays
        shapes = [
            (num_envs, *array.shape[1 if newest_frames and array.stack else 0 :])
            for array in arrays
        ]
        # The wire is little-endian, as most machines are.
        dtypes = [array.spec.dtype.newbyteorder("<") for array in arrays]
        sizes = [math.prod(s) * dtype.itemsize for s, dtype in zip(shapes, dtypes)]
        # An array, and also the whole message, is a tag, a number of bytes, the bytes.
        heads = [tag(2, LEN) + varint(size) for size in sizes]
        tail = tag(3, VARINT) + varint(1) if newest_frames else b""
        body = 9 + sum(map(len, heads)) + sum(sizes) + len(tail)
        envelope, name = (ToLearner, "step") if kind is Step else (ToServer, "action")
        number = next(n for n, f in fields_of(envelope).items() if f[0] == name)
        head = tag(number, LEN) + varint(body) + tag(1, I64)
        self._seq = slice(len(head), len(head) + 8)
        # grpcio sends only `bytes`. Writing into a `bytes` object saves a copy of every
        # observation. As with PyBytes_FromStringAndSize, this is allowed as long as no
        # other code has seen the object.
        self._message = bytes(len(head) + body - 1)
        self.data = _contents(self._message)
        self._fixed = [(0, len(head), head)]  # Begin, end and bytes of fixed parts.
        self.arrays: list[np.ndarray] = []
        self.places: list[slice] = []  # Of each array in `data`.
        position = self._seq.stop
        for head, shape, dtype, size in zip(heads, shapes, dtypes, sizes):
            self._fixed.append((position, position + len(head), head))
            position += len(head)
            self.arrays.append(np.ndarray(shape, dtype, self.data, position))
            self.places.append(slice(position, position + size))
            position += size
        self._fixed.append((position, position + len(tail), tail))
        for begin, end, data in self._fixed:
            self.data[begin:end] = data

    def __len__(self) -> int:
        return len(self.data)

    def encode(self, seq: int) -> bytes:
        """Return the message: a ToLearner for a Step, a ToServer for an Action.

        The result is always the same object, with other contents.
        """
        self.data[self._seq] = seq.to_bytes(8, "little")
        return self._message

    def decode_action(self, message: bytes) -> tuple[int, bool]:
        """Copy the arrays of a ToServer into `arrays`; return its `seq` and `whole`.

        Raises:
          WireError: `message` is malformed, no Action, or has other arrays.
        """
        if len(message) == len(self.data) and all(
            message[begin:end] == data for begin, end, data in self._fixed
        ):
            self.data[:] = message
            return int.from_bytes(message[self._seq], "little"), False
        # It may still be an Action: `whole` may be set, fields may come in another
        # order, and a `seq` of 0 may be missing.
        action = decode(ToServer, message).action
        if action is None:
            raise WireError("expected an Action, got another Hello")
        self.copy_from(action.arrays)
        return action.seq, action.whole

    def copy_from(self, buffers: Sequence[bytes]) -> None:
        """Copy received buffers into `arrays`.

        Raises:
          WireError: the number of buffers or the size of a buffer is wrong.
        """
        if len(buffers) != len(self._specs):
            expected = ", ".join(map(str, self._specs))
            raise WireError(
                f"expected {len(self._specs)} arrays ({expected}), got {len(buffers)}"
            )
        for array, ours, data in zip(self._specs, self.arrays, buffers):
            if len(data) != ours.nbytes:
                raise WireError(
                    f"{array} of {len(ours)} environments: expected {ours.nbytes} "
                    f"bytes, got {len(data)}"
                )
        for ours, data in zip(self.arrays, buffers):
            ours[...] = np.frombuffer(data, ours.dtype).reshape(ours.shape)


def with_stacks(arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Return the arrays; mark the observations that may be a `stack` of frames."""
    return tuple(
        dataclasses.replace(
            array,
            stack=array.path[:1] == ("observation",)
            and len(array.shape) > 1
            and array.shape[0] in STACK_FRAMES
            and array.spec.nbytes >= MIN_STACK_NBYTES,
        )
        for array in arrays
    )


class Steps:
    """The Steps of a stream, with only the newest frames of stacks where possible.

    Write a whole row into the first entry of `arrays` ([K, *shape] each) and call
    `encode`; write the next row into the next entry, and so on in turn.

    Each Step is compared with the one before. If in all K environments the older frames
    of an array equal the newer frames of the step before, only its newest frames are
    sent. Otherwise (an episode has begun, or the array is no stack) the Step is whole.

    Args:
      arrays: as in the Welcome; `stack` marks arrays that may be stacks.
      num_envs: K.
      newest_frames: as in the Hello; if False all Steps are whole.
    """

    def __init__(self, arrays: Sequence[Array], num_envs: int, *, newest_frames: bool):
        self._stacks = [i for i, a in enumerate(arrays) if a.stack and newest_frames]
        # Two frames in turn, because the comparison needs the row before.
        self._frames = [
            Frame(Step, arrays, num_envs) for _ in range(2 if self._stacks else 1)
        ]
        self.arrays = [frame.arrays for frame in self._frames]
        if not self._stacks:
            return
        self._newest = Frame(Step, arrays, num_envs, newest_frames=True)
        # By environment: `_begins` is the position of the older frames in a message;
        # `older` is the slice of the same frames in the message before. `_copies` are
        # the slices of the whole message that are copied to the short message.
        self._begins: list[int] = []
        older: list[slice] = []
        self._copies: list[tuple[slice, slice]] = []
        places = zip(self._newest.places, self._frames[0].places)
        for i, (short, whole) in enumerate(places):
            if i not in self._stacks:
                self._copies.append((short, whole))
                continue
            size = (short.stop - short.start) // num_envs
            stack_size = size * arrays[i].shape[0]
            for k in range(num_envs):
                begin = whole.start + k * stack_size
                end = begin + stack_size
                self._begins.append(begin)
                older.append(slice(begin + size, end))
                to = short.start + k * size
                self._copies.append((slice(to, to + size), slice(end - size, end)))
        self._older = [[frame.data[place] for place in older] for frame in self._frames]

    def encode(self, seq: int, *, whole: bool) -> bytes:
        """Return the message, valid until the next call."""
        frame = self._frames[0]
        message = frame.encode(seq)
        if not self._stacks:
            return message
        self._frames.reverse()
        self._older.reverse()
        # `startswith` keeps the GIL, unlike numpy: releasing it would take longer.
        if whole or not all(map(message.startswith, self._older[0], self._begins)):
            return message
        for to, place in self._copies:
            self._newest.data[to] = frame.data[place]
        return self._newest.encode(seq)


def _contents(data: bytes) -> memoryview:
    """Return the memory of a `bytes` object as a writable view."""
    begin = id(data) + bytes.__basicsize__ - 1  # CPython's layout; -1 for the final 0.
    memory = (ctypes.c_char * len(data)).from_address(begin)
    memory.owner = data  # type: ignore[attr-defined]  # Keeps `data` alive.
    return memoryview(memory).cast("B")
