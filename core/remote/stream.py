# SPDX-License-Identifier: Apache-2.0
"""`Stream`: one stream of a server, from the learner's Hello to the end.

Each stream runs in one thread. The thread receives actions and steps K environments,
which write their rows directly into the outgoing message; then it sends that message.
Everything that a learner sends is checked before it is used. Bad input ends only this
stream.
"""

import functools
import itertools
import logging
import random
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from core.environments.stepping import Environments, env_seed
from core.errors import EnvError, EnvSpecError, EnvValueError
from core.nests import Nest, leaves, unflatten
from core.remote import codec, frames, messages
from core.remote.grpc_settings import grpc
from core.remote.messages import Failure, Goodbye, Hello, ToLearner, ToServer
from core.remote.places import Busy, Place, Places, at_peer, quote
from core.remote.service import Service, WrongProtocol, closing
from core.rollout import leaf_spaces, spec_of, value_range

log = logging.getLogger(__name__)

FAILURE_CHARS = 16_000  # The end of a traceback, which is sent to the learner.
DETAILS_CHARS = 500  # gRPC sends details in an HTTP/2 header, which holds 8 KB at most.


class Stream:
    """One stream.

    Args:
      requests: gRPC's iterator over the learner's messages, or `Call.requests`.
      context: gRPC's context of this call, or a `local_streams.Call`.
    """

    def __init__(
        self, service: Service, places: Places, requests: Iterator[bytes], context: Any
    ) -> None:
        self._service = service
        self._places = places
        self._requests = requests
        self._context = context

    def serve(self) -> Generator[bytes, None, None]:
        """Yield the messages to send, until the stream ends."""
        # For log lines. Has more after the Hello.
        self._who = f"a learner{at_peer(self._context)}"
        try:
            hello = self._receive_hello()
            if hello is None:
                return
            self._who = (
                f"run {quote(hello.run_id)} (environments from {hello.first_env_id} "
                f"on){at_peer(self._context)}"
            )
            with self._places.take(hello, self._context) as place:
                self._log_start(hello)
                yield from self.play(hello, place)
        except grpc.RpcError:
            pass  # The learner is gone, or this server has ended the stream.
        except Busy as error:
            # No Failure message: the learner may try again any number of times.
            log.warning("Turned away %s: %s", self._who, error)
            self._set_status(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except messages.WireError as error:
            yield from self._fail(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (WrongProtocol, EnvSpecError) as error:
            code = grpc.StatusCode.FAILED_PRECONDITION
            yield from self._fail(code, str(error), permanent=True)
        except EnvValueError as error:  # A traceback has no line of the environment.
            yield from self._fail(grpc.StatusCode.INTERNAL, str(error))
        except Exception as error:
            yield from self._fail(grpc.StatusCode.INTERNAL, _with_traceback(error))

    def _receive_hello(self) -> Hello | None:
        """Return the learner's Hello, or None if the learner has hung up."""
        with self._places.hello_deadline(self._context):
            message = next(self._requests, None)
        if message is None:
            return None
        hello = codec.decode(ToServer, message).hello
        if hello is None:
            raise messages.WireError("expected a Hello first, got an Action")
        self._service.check_hello(hello)
        return hello

    def _log_start(self, hello: Hello) -> None:
        # The learner logs streams that reconnect. The low 16 bits of the incarnation
        # count them, the next 32 the earlier starts of the run, and the others are the
        # learner's rank (first_incarnation in core/ranks.py and core/running/run.py).
        level = logging.DEBUG if hello.incarnation & 0xFFFF else logging.INFO
        log.log(
            level,
            "Environments %d to %d: run %s%s, start %d",
            hello.first_env_id,
            hello.first_env_id + self._service.num_envs - 1,
            quote(hello.run_id),
            at_peer(self._context),
            (hello.incarnation >> 16 & 0xFFFFFFFF) + 1,
        )

    def play(self, hello: Hello, place: Place) -> Iterator[bytes]:
        """Create environments, and step them with the learner's actions."""
        # Environments may use these generators, and forked servers start with equal
        # generator states.
        seed = env_seed(hello.seed, hello.first_env_id, hello.incarnation, 0)
        random.seed(seed)
        np.random.seed(seed)
        clock = place.progress[1:]
        envs = self._service.make_environments(hello, clock)
        with closing(envs, clock):
            try:
                self._service.check_spaces(envs)
                yield codec.encode(ToLearner(welcome=self._service.welcome(hello)))
                yield from self._step(envs, hello, place.progress)
            finally:
                place.is_closing = True

    def _step(
        self, envs: Environments, hello: Hello, progress: np.ndarray
    ) -> Iterator[bytes]:
        """Reset the environments, then step them with each Action that arrives."""
        service = self._service
        step_arrays, spec = service.step_arrays(hello)
        steps = frames.Steps(
            step_arrays, service.num_envs, newest_frames=hello.newest_frames
        )
        rows = itertools.cycle([unflatten(arrays, spec) for arrays in steps.arrays])
        action = service.action_frame()
        actions = unflatten(action.arrays, spec_of(service.action_space))
        checks = action_checks(service.action_space, actions)
        clock = progress[1:]

        envs.reset(next(rows))
        clock[0] = 0.0  # Stops the clock, because `yield` waits for the network.
        yield steps.encode(0, whole=True)
        for seq in itertools.count():
            message = None if self._places.goodbye else next(self._requests, None)
            if self._places.goodbye:
                yield codec.encode(ToLearner(goodbye=Goodbye(self._places.goodbye)))
                return
            if message is None:  # The learner has hung up.
                return
            got, whole = action.decode_action(message)
            if got != seq:
                raise messages.WireError(
                    f"expected the action of step {seq}, got {got}"
                )
            for check in checks:
                check()
            envs.step(actions, next(rows))
            clock[0] = 0.0
            progress[0] += 1
            yield steps.encode(seq + 1, whole=whole)

    def _fail(
        self, code: grpc.StatusCode, text: str, *, permanent: bool = False
    ) -> Iterator[bytes]:
        """End the stream: send the whole error text, and its first line as status."""
        # A name of a file that is not UTF-8 may be in the text.
        text = text.strip()[-FAILURE_CHARS:].encode(errors="backslashreplace").decode()
        log.warning("The stream of %s failed: %s", self._who, text)
        yield codec.encode(ToLearner(failure=Failure(text, permanent)))
        self._set_status(code, text)

    def _set_status(self, code: grpc.StatusCode, text: str) -> None:
        self._context.set_code(code)
        self._context.set_details(details(text))


def details(text: str) -> str:
    """Return a text's first line, cut so that it fits into a gRPC status."""
    return text.partition("\n")[0][:DETAILS_CHARS]


def _with_traceback(error: BaseException) -> str:
    """Return the text of `error`, then its traceback."""
    trace = "".join(traceback.format_exception(error))
    name = "" if isinstance(error, EnvError) else f"{type(error).__name__}: "
    return f"{name}{error}\n\n{trace}"


def action_checks(space: gym.Space, actions: Nest) -> list[Callable[[], None]]:
    """Return one function per leaf, which checks the present values of `actions`.

    The functions raise WireError. Like Gymnasium, they do not check the bounds of a Box
    of floats: many environments clip actions, and policies rely on that.
    """
    pairs = zip(leaves(leaf_spaces(space), "action"), leaves(actions, "action"))
    return [
        functools.partial(_check_action, name, leaf, *_limits(leaf), values)
        for (name, leaf), (_, values) in pairs
        if values.size
    ]


def _limits(space: gym.Space) -> tuple[Any, Any]:
    """Return the bounds: two scalars, or two arrays of an action's shape."""
    if (limits := value_range(space)) is not None:
        return limits
    match space:
        case gym.spaces.Box() if space.dtype.kind == "f":
            info = np.finfo(space.dtype)
            return info.min, info.max
        case gym.spaces.Box() if space.dtype.kind != "b":
            return space.low, space.high
    return 0, 1  # MultiBinary, and bools, which are viewed as bytes.


def _check_action(
    name: str, space: gym.Space, low: Any, high: Any, values: np.ndarray
) -> None:
    numbers = values.view(np.uint8) if values.dtype.kind == "b" else values
    if isinstance(low, int):
        # Two reductions take a third of the time of the comparison below.
        fine = low <= numbers.min() and numbers.max() <= high
    else:
        fine = ((low <= numbers) & (numbers <= high)).all()  # False for NaN.
    if not fine:
        bad = ~((low <= numbers) & (numbers <= high))
        k = int(np.argwhere(bad)[0][0])
        raise messages.WireError(
            f"'{name}' of environment {k} in this stream: expected {space}, got "
            f"{numbers[k].tolist()}"
        )
