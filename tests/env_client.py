# SPDX-License-Identifier: Apache-2.0
"""A learner's side of an environment server, in plain Python: `EnvClient`."""

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

from core.nests import map_nest
from core.remote import codec, frames, messages
from core.remote.messages import (
    Action,
    Failure,
    Hello,
    Step,
    ToLearner,
    ToServer,
    Welcome,
)

DEADLINE_S = 60.0
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # A connection of its own.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
]


class ServerFailure(Exception):
    """The server answered with a Failure."""

    def __init__(self, failure: Failure):
        super().__init__(failure.text)
        self.permanent = failure.permanent


class Goodbye(Exception):
    """The server said goodbye."""


class RawStream:
    """A stream on which anything can be sent."""

    def __init__(self, address: str):
        self.channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method = self.channel.stream_stream("/torchbeast.EnvServer/Stream")
        self.call: Any = method(
            iter(self._requests.get, None), timeout=DEADLINE_S, wait_for_ready=True
        )

    def send(self, message: bytes) -> None:
        self._requests.put(message)

    def receive(self) -> Any:
        """Return the next Welcome or Step.

        Raises:
          ServerFailure, Goodbye: that came instead.
          StopIteration: the stream ended.
          grpc.RpcError: it ended in an error.
        """
        message = codec.decode(ToLearner, self._receive_bytes()).value
        if isinstance(message, Failure):
            raise ServerFailure(message)
        if isinstance(message, messages.Goodbye):
            raise Goodbye(message.reason)
        return message

    def _receive_bytes(self) -> bytes:
        return next(self.call)

    def close(self) -> None:
        self._requests.put(None)
        self.channel.close()

    def __enter__(self) -> "RawStream":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class EnvClient(RawStream):
    """A stream that has said hello; `rows` is the present step, [K, ...] each."""

    welcome: Welcome

    def __init__(self, address: str, **hello: Any):
        super().__init__(address)
        try:
            hello = {"protocol": messages.PROTOCOL, "version": "test", **hello}
            self.send(codec.encode(ToServer(hello=Hello(**hello))))
            self.welcome = self.receive()
            self._steps = frames.Frame(
                Step, self.welcome.step_arrays, self.welcome.num_envs
            )
            self._actions = frames.Frame(
                Action, self.welcome.action_arrays, self.welcome.num_envs
            )
            self.rows = _nest(self.welcome.step_arrays, self._steps.arrays)
            self.seq = 0
            self.receive_step()
        except BaseException:
            self.close()
            raise

    def step(self, *actions: Any) -> Any:
        """Take an action (an array for each of `action_arrays`); return the rows."""
        self.send_actions(*actions)
        self.receive_step()
        return self.rows

    def send_actions(self, *actions: Any, seq: int | None = None) -> None:
        for ours, action in zip(self._actions.arrays, actions, strict=True):
            ours[...] = action
        message = self._actions.encode(self.seq if seq is None else seq)
        self.send(bytes(bytearray(message)))  # A copy, as not all keep in lock step.
        self.seq += 1

    def receive_step(self) -> None:
        step = self.receive()
        assert step.seq == self.seq, (step.seq, self.seq)
        self._steps.copy_from(step.arrays)


def play(client: EnvClient, num_steps: int, actions: Iterator[Any]) -> Any:
    """Return rows 0 (the present one) to `num_steps`: a nest of [T + 1, K, ...]."""
    rows = [_copy(client.rows)]
    rows += [_copy(client.step(next(actions))) for _ in range(num_steps)]
    return map_nest(lambda *leaves: np.stack(leaves), *rows)


def describe(address: str, **hello: Any) -> Welcome:
    hello = {"protocol": messages.PROTOCOL, **hello}
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        method = channel.unary_unary("/torchbeast.EnvServer/Describe")
        request = codec.encode(Hello(**hello))
        return codec.decode_welcome(
            method(request, timeout=DEADLINE_S, wait_for_ready=True)
        )


def _copy(rows: Any) -> Any:
    return map_nest(np.copy, rows)


def _nest(arrays: tuple[messages.Array, ...], values: list[np.ndarray]) -> Any:
    """Return what the paths of `arrays` say: dicts for names, tuples for numbers."""
    if len(arrays) == 1 and not arrays[0].path:
        return values[0]
    groups: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        groups.setdefault(array.path[0], []).append(i)
    nest = {
        key: _nest(
            tuple(messages.Array(arrays[i].path[1:], "", ()) for i in group),
            [values[i] for i in group],
        )
        for key, group in groups.items()
    }
    if all(isinstance(key, int) for key in nest):
        assert sorted(nest) == list(range(len(nest))), sorted(nest)
        return tuple(nest[i] for i in range(len(nest)))
    return nest
