# SPDX-License-Identifier: Apache-2.0
"""Messages that no honest peer sends, what must come of each, and how to send them.

`TO_SERVER` is for environment servers, `TO_LEARNER` for actor pools, `TO_DESCRIBE` for
learners that ask what a server serves. Whatever comes costs its own stream and nothing
else, and is told in words that a terminal survives: the functions `*_survives` assert
it. tests/remote/test_hostile.py and the nemesis's figure `hostile` play all of them.
"""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import gymnasium as gym
import numpy as np

from core.nests import map_nest
from core.remote import codec
from core.remote.messages import (
    Action,
    Array,
    Box,
    Discrete,
    Failure,
    Goodbye,
    Hello,
    Space,
    Step,
    ToLearner,
    ToServer,
    Welcome,
)
from tests import counting_env
from tests.env_client import EnvClient, RawStream, ServerFailure, describe, play

ROOT = Path(__file__).resolve().parents[1]
K = 3  # Environments per stream of the servers that are attacked.
DEADLINE_S = 60.0
STREAM = "/torchbeast.EnvServer/Stream"
DESCRIBE = "/torchbeast.EnvServer/Describe"
HEALTH = "/grpc.health.v1.Health/Check"
# Clears a terminal, in two spellings; and what is no UTF-8.
ESCAPES = "\x1b[2J\x9b2J"
NOT_UTF8 = b"\x1b[2J\xff\xfe"
ESCAPES_SHOWN = r"\?\[2J\?2J"


def field(number: int, data: bytes) -> bytes:
    return codec.tag(number, codec.LEN) + codec.varint(len(data)) + data


def number(number: int, value: int) -> bytes:
    return codec.tag(number, codec.VARINT) + codec.varint(value)


# -------------------------------------------------------------------------- to servers


@dataclasses.dataclass(frozen=True)
class ServerCase:
    """Messages to a server; it must answer with an error that matches `said`."""

    messages: Sequence[bytes]
    said: str
    code: str = "INVALID_ARGUMENT"
    greets: bool = True  # A right Hello comes first, and its answers are awaited.
    method: str = STREAM


def _action(seq: int, *arrays: bytes) -> bytes:
    return codec.encode(ToServer(action=Action(seq, arrays)))


def _hello(**changes: Any) -> bytes:
    hello = Hello(**{"protocol": 1, "run_id": "evil", **changes})
    return codec.encode(ToServer(hello=hello))


def _raw_hello(data: bytes) -> bytes:
    return field(1, codec.encode(Hello(protocol=1)) + data)


def _first(message: bytes, said: str, **options: Any) -> ServerCase:
    """Say this instead of Hello."""
    return ServerCase([message], said, greets=False, **options)


_GOOD = np.zeros(K, np.int64).tobytes()

TO_SERVER = {
    # Instead of a Hello.
    "action first": _first(_action(0, _GOOD), "expected a Hello first"),
    "empty message": _first(b"", "expected hello or action, got nothing"),
    "unknown kind of message": _first(field(3, b""), "got nothing"),
    "hello and action": _first(field(1, b"") + field(2, b""), "hello and action"),
    "number cut off": _first(b"\x0a\x80", "cut off in the middle of a number"),
    "name that is not UTF-8": _first(
        _raw_hello(field(3, NOT_UTF8)), "Hello.run_id: expected UTF-8"
    ),
    "number as text": _first(_raw_hello(field(5, b"7")), "Hello.seed: expected wire"),
    "version twice": _first(
        _raw_hello(field(2, b"1") * 2), "Hello.version is there twice"
    ),
    "protocol of 33 bits": _first(field(1, number(1, 2**32)), "expected 32 bits"),
    "20,000 info_keys": _first(
        _raw_hello(field(4, b"k") * 20_000), "info_keys: 20000, at most 1000"
    ),
    "a million info_keys": _first(
        _raw_hello(field(4, b"k") * 10**6), "larger than max", code="RESOURCE_EXHAUSTED"
    ),
    "info_keys that clear the terminal": _first(
        _hello(info_keys=(ESCAPES, ESCAPES)), r"info_keys: expected .*\\x1b\[2J"
    ),
    "5 MiB": _first(bytes(5 << 20), "larger than max", code="RESOURCE_EXHAUSTED"),
    "another protocol": _first(
        _hello(protocol=2, version=ESCAPES),
        r"speaks protocol 1 .*the learner 2 \(torchbeast '\\x1b\[2J",
        code="FAILED_PRECONDITION",
    ),
    # Instead of an Action.
    "later action": ServerCase([_action(1, _GOOD)], "action of step 0, got 1"),
    "far action": ServerCase([_action(2**64 - 1, _GOOD)], "got 18446744073709551615"),
    "no array": ServerCase([_action(0)], "expected 1 arrays .*int64.*got 0"),
    "two arrays": ServerCase([_action(0, _GOOD, _GOOD)], "got 2"),
    "short array": ServerCase([_action(0, _GOOD[:-1])], "expected 24 bytes, got 23"),
    "long array": ServerCase([_action(0, _GOOD + b"x")], "expected 24 bytes, got 25"),
    "action beyond its space": ServerCase(
        [_action(0, np.array([0, 2**62, 0]).tobytes())],
        r"'action' of environment 1 in this stream: expected Discrete\(3\)",
    ),
    "the same action twice": ServerCase([_action(0, _GOOD)] * 2, "step 1, got 0"),
    "second hello": ServerCase([_hello()], "another Hello"),
    "no message": ServerCase([b""], "expected hello or action, got nothing"),
    "cut off": ServerCase([_action(0, _GOOD)[:-5]], "only .* follow"),
    "huge length": ServerCase(
        [b"\x12" + b"\xff" * 9 + b"\x01"], "18446744073709551615"
    ),
    "wrong type": ServerCase([b"\x10\x00"], "expected wire type 2, got 0"),
    "group": ServerCase([b"\x13"], "wire type 3"),
    "not a message": ServerCase([bytes(range(255, 200, -1))], "ToServer"),
    "1 MiB action": ServerCase(
        [_action(0, bytes(1 << 20))], "larger than max", code="RESOURCE_EXHAUSTED"
    ),
    # Other calls.
    "describe: not a message": _first(b"\xff" * 9, "Hello", method=DESCRIBE),
    "describe: 20,000 info_keys": _first(
        field(4, b"k") * 20_000 + number(1, 1), "info_keys: 20000", method=DESCRIBE
    ),
    "describe: another protocol": _first(
        b"", "the learner 0", code="FAILED_PRECONDITION", method=DESCRIBE
    ),
    "health: not UTF-8": _first(field(1, NOT_UTF8), "expected UTF-8", method=HEALTH),
    "unknown method": _first(b"", "", code="UNIMPLEMENTED", method="/x.Y/Z"),
}


def attack_server(address: str, case: ServerCase) -> tuple[str, str]:
    """Return what the server says, and its status code."""
    if case.method != STREAM:
        with grpc.insecure_channel(address) as channel:
            try:
                channel.unary_unary(case.method)(
                    case.messages[0], timeout=DEADLINE_S, wait_for_ready=True
                )
            except grpc.RpcError as error:
                return error.details(), error.code().name
        return "no error", "OK"
    with RawStream(address) as stream:
        if case.greets:
            stream.send(_hello())
            assert isinstance(stream.receive(), Welcome)
            assert isinstance(stream.receive(), Step)
        for message in case.messages:
            stream.send(message)
        said = ""
        try:
            while True:
                try:
                    stream.receive()
                except ServerFailure as failure:
                    said = str(failure)
        except StopIteration:
            return said, "OK"
        except grpc.RpcError as error:
            return said or error.details(), error.code().name


# ------------------------------------------------------------------------- to learners


class Honest:
    """What an honest server would say, to begin from."""

    def __init__(self, welcome: Welcome):
        self.welcome = welcome
        self.arrays = [bytes(K * a.spec.nbytes) for a in welcome.step_arrays]

    def greeting(self, **changes: Any) -> bytes:
        welcome = dataclasses.replace(self.welcome, **changes)
        return codec.encode(ToLearner(welcome=welcome))

    def greeting_with(self, raw: bytes) -> bytes:
        """A Welcome with these bytes at its end."""
        return field(1, codec.encode(self.welcome) + raw)

    def greeting_of(self, *arrays: Array) -> bytes:
        """A Welcome with these step arrays in place of those with the same paths."""
        paths = {array.path for array in arrays}
        rest = [a for a in self.welcome.step_arrays if a.path not in paths]
        return self.greeting(step_arrays=(*rest, *arrays))

    def step(self, seq: int = 0, arrays: Sequence[bytes] | None = None) -> bytes:
        arrays = self.arrays if arrays is None else arrays
        return codec.encode(ToLearner(step=Step(seq, tuple(arrays))))

    def index_of(self, name: str) -> int:
        return [a.path for a in self.welcome.step_arrays].index((name,))


@dataclasses.dataclass(frozen=True)
class LearnerCase:
    """What a server says to a learner; that must report it in words that match `said`.

    If it `ends_run`, that is the run's own end, with an error. Otherwise it costs the
    evil server's stream, and the run goes on.
    """

    messages: Callable[[Honest], Sequence[bytes]]
    said: str
    ends_run: bool = False
    comes_first: bool = True  # Before the honest server's Welcome.
    times: int = 2  # That it is reported, as the learner comes back.
    status: tuple[grpc.StatusCode, bytes] | None = None  # Ends the stream.


def _says(message: bytes, said: str, **options: Any) -> LearnerCase:
    return LearnerCase(lambda honest: [message], said, **options)


def _greets(raw: bytes, said: str, **options: Any) -> LearnerCase:
    """Adds these bytes to a Welcome."""
    return LearnerCase(lambda honest: [honest.greeting_with(raw)], said, **options)


def _steps(change: Callable[[Honest], bytes], said: str) -> LearnerCase:
    """Welcomes, then says this."""
    return LearnerCase(lambda honest: [honest.greeting(), change(honest)], said)


def _declares(array: bytes, said: str) -> LearnerCase:
    """Welcomes with one more step array."""
    return _greets(field(10, array), said)


def _differs(said: str, **changes: Any) -> LearnerCase:
    return LearnerCase(
        lambda honest: [honest.greeting(**changes)],
        f"this server differs from .*: {said}",
        ends_run=True,
        comes_first=False,
    )


def _cannot_be(said: str, *arrays: Array) -> LearnerCase:
    """Welcomes with step arrays of which no rollout can be made."""
    return LearnerCase(
        lambda honest: [honest.greeting_of(*arrays)], said, ends_run=True
    )


def _with(arrays: list[bytes], index: int, data: bytes) -> list[bytes]:
    return [*arrays[:index], data, *arrays[index + 1 :]]


_KEY = field(1, field(1, b"x"))  # In an Array.
# What gRPC says of a message that a learner which knows its Welcome does not read.
_TOO_LARGE = "larger than max"
_UINT8 = field(2, b"uint8")


def _axes(*axes: int) -> bytes:
    return b"".join(number(3, axis) for axis in axes)


TO_LEARNER = {
    # Not messages at all.
    "empty message": _says(b"", "holds no message known here"),
    "unknown kind of message": _says(field(9, b"x"), "no message known here"),
    "two messages": _says(field(1, b"") + field(2, b""), "holds two messages"),
    "number cut off": _says(b"\x0a\x80", "ends in the middle of a field"),
    "number of 11 bytes": _says(b"\x0a" + b"\xff" * 10 + b"\1", "64 bits"),
    "huge length": _says(b"\x12" + b"\xff" * 9 + b"\x01x", "has only 1 left"),
    "wrong type": _says(b"\x08\x00", "field 1 has wire type 0, expected 2"),
    "group": _says(b"\x13", "field 2 has wire type 3"),
    "field number 0": _says(b"\x00\x00", "field number 0"),
    "5 MiB of zeros": _says(bytes(5 << 20), f"field number 0|{_TOO_LARGE}"),
    "not a message": _says(bytes(range(255, 200, -1)), "malformed"),
    # Welcomes that cannot be read.
    "number as text": _greets(field(5, b"3"), "field 5 has wire type 2, expected 0"),
    "33 bits": _greets(number(5, 2**32), "num_envs is 4294967296, too large"),
    "name that is not UTF-8": _greets(field(4, NOT_UTF8), "env is not UTF-8"),
    "5,000 arrays": _greets(field(10, _UINT8) * 5000, "more than 4096 arrays"),
    "dtype object": _declares(_KEY + field(2, b"object"), "unknown dtype 'object'"),
    "dtype that clears the terminal": _declares(
        _KEY + field(2, ESCAPES.encode()), f"unknown dtype '{ESCAPES_SHOWN}'"
    ),
    "no dtype": _declares(_KEY, "unknown dtype ''"),
    "rank 17": _declares(_KEY + _UINT8 + _axes(*[1] * 17), "more than 16 axes"),
    "axis of 64 bits": _declares(
        _KEY + _UINT8 + _axes(2**64 - 1), "axis of 18446744073709551615"
    ),
    "shape that overflows": _declares(
        _KEY + _UINT8 + _axes(2**32, 2**32), "array x is too large"
    ),
    "shape that overflows behind a zero": _declares(
        _KEY + _UINT8 + _axes(0, 2**62, 2**62), "array x is too large"
    ),
    "17 keys": _declares(_KEY * 17 + _UINT8, "more than 16 keys"),
    "empty key": _declares(field(1, b"") + _UINT8, "empty key"),
    "key that is not UTF-8": _declares(
        field(1, field(1, NOT_UTF8)) + _UINT8, "a key is not UTF-8"
    ),
    "key that clears the terminal": _declares(
        field(1, field(1, ESCAPES.encode())) + _UINT8,
        f"'{ESCAPES_SHOWN}' is too long or has control characters",
    ),
    "key of 1 MiB": _declares(
        field(1, field(1, b"k" * 2**20)) + _UINT8, f"is too long|{_TOO_LARGE}"
    ),
    # Welcomes of which no rollout can be made.
    "another protocol": LearnerCase(
        lambda honest: [honest.greeting(protocol=2)],
        "version 2 of the protocol, expected 1",
        ends_run=True,
    ),
    "no environments": LearnerCase(
        lambda honest: [honest.greeting(num_envs=0)],
        "plays 0 environments per stream",
        ends_run=True,
    ),
    "no step arrays": LearnerCase(
        lambda honest: [honest.greeting(step_arrays=())], "no arrays", ends_run=True
    ),
    "an array twice": _greets(
        field(10, codec.encode(Array(("reward",), "float32"))),
        "reward stands where another one does",
        ends_run=True,
    ),
    "wide reward": _cannot_be(
        r"reward float64\[\], expected reward float32",
        Array(("reward",), "float64"),
    ),
    "reward of many names": LearnerCase(
        lambda honest: [
            honest.greeting(
                step_arrays=tuple(
                    a for a in honest.welcome.step_arrays if a.path != ("reward",)
                )
                + tuple(
                    Array(("reward", "x" * 200 + str(i)), "bool") for i in range(999)
                )
            )
        ],
        "says a {x+.{0,1000}, expected reward",
        ends_run=True,
    ),
    "tuple for a row": LearnerCase(
        lambda honest: [honest.greeting(step_arrays=(Array((0,), "float32"),))],
        "expected paths that begin with a name",
        ends_run=True,
    ),
    "dict and tuple in one place": _cannot_be(
        "a dict and a tuple", Array(("x", 0), "bool"), Array(("x", "a"), "bool")
    ),
    "tuple with a hole": _cannot_be("no neighbour", Array(("x", 2**32 - 1), "bool")),
    "step of 768 MiB": _cannot_be(
        "a Step of this Welcome is larger", Array(("x",), "uint8", (2**28,))
    ),
    "environment that clears the terminal": LearnerCase(
        lambda honest: [field(1, _without_env(honest) + field(4, ESCAPES.encode()))],
        f"env is '{ESCAPES_SHOWN}', expected",
        ends_run=True,
        comes_first=False,
    ),
    "fewer arrays": _differs("step array 0", step_arrays=()),
    "frames per step": _differs("frames_per_step is 5, expected 1", frames_per_step=5),
    "action space": _differs(
        "its action space has other bounds", action=gym.spaces.Discrete(97)
    ),
    # Steps.
    "step before the welcome": LearnerCase(
        lambda honest: [honest.step()], "a Step before the Welcome"
    ),
    "second welcome": _steps(Honest.greeting, "a second Welcome"),
    "the same step twice": LearnerCase(
        lambda honest: [honest.greeting(), honest.step(), honest.step()],
        "a Step before the Action|Step 0, expected Step 1",
    ),
    "step out of order": _steps(lambda honest: honest.step(5), "Step 5, expected St"),
    "last step of all": _steps(
        lambda honest: honest.step(2**64 - 1), "Step 18446744073709551615"
    ),
    "no arrays": _steps(lambda honest: honest.step(0, []), "has 0 arrays, expected"),
    "too many arrays": _steps(
        lambda honest: honest.step(0, [*honest.arrays, b""]), "more than the expected"
    ),
    "too few bytes": _steps(
        lambda honest: honest.step(0, _with(honest.arrays, 0, b"")),
        r"has 0 bytes, expected \d+ \(3 of",
    ),
    "too many bytes": _steps(
        lambda honest: honest.step(0, _with(honest.arrays, 0, bytes(2**20))),
        f"has 1048576 bytes|{_TOO_LARGE}",
    ),
    "half a truth": _steps(
        lambda honest: honest.step(
            0, _with(honest.arrays, honest.index_of("done"), b"\0\2\1")
        ),
        "done is bool and has a byte other than 0 and 1",
    ),
    # Last words.
    "failure that clears the terminal": _says(
        codec.encode(ToLearner(failure=Failure(ESCAPES))),
        f"reports a failure: {ESCAPES_SHOWN}",
    ),
    "failure that is not UTF-8": _says(
        field(3, field(1, NOT_UTF8)), r"reports a failure: \?\[2J\?\?"
    ),
    "failure of 1 MiB": _says(
        codec.encode(ToLearner(failure=Failure("x" * 2**20))),
        f"failure: x{{16384}}$|{_TOO_LARGE}",
    ),
    "permanent failure": _says(
        codec.encode(ToLearner(failure=Failure(ESCAPES, True))),
        f"reports a failure: {ESCAPES_SHOWN}",
        ends_run=True,
    ),
    "goodbye that clears the terminal": _says(
        codec.encode(ToLearner(goodbye=Goodbye(ESCAPES))),
        f"says goodbye: {ESCAPES_SHOWN}",
    ),
    "refusal that is not UTF-8": LearnerCase(
        lambda honest: [],
        r"INVALID_ARGUMENT: \?\[2J\?\?",
        status=(grpc.StatusCode.INVALID_ARGUMENT, NOT_UTF8),
    ),
    "busy in words that are not UTF-8": LearnerCase(
        lambda honest: [],
        r"RESOURCE_EXHAUSTED: \?\[2J\?\?",
        status=(grpc.StatusCode.RESOURCE_EXHAUSTED, NOT_UTF8),
        times=1,  # It is tried again, and not told again.
    ),
}


def _without_env(honest: Honest) -> bytes:
    return codec.encode(dataclasses.replace(honest.welcome, env=""))


def _spaces(depth: int) -> bytes:
    """A Tuple in a Tuple, and so on."""
    data = codec.encode(Space(discrete=Discrete(2)))
    for _ in range(depth):
        data = field(6, field(1, data))
    return data


def _box(*, shape: int, low: bytes = b"\0") -> bytes:
    box = Box("int8", (shape,), low, b"\1")
    return codec.encode(Space(box=box))


def _bounds(dtype: str, low: float, high: float) -> bytes:
    data = [np.array(x, dtype).tobytes() for x in (low, high)]
    return codec.encode(Space(box=Box(dtype, (2,), *data)))


# What Describe answers in place of a Welcome; its observation space, mostly.
TO_DESCRIBE = {
    "empty message": (b"", "num_envs: expected at least 1"),
    "not a message": (b"\xff" * 20, "more than 64 bits"),
    "cut off": (field(8, b"")[:-1], "cut off"),
    "a million values": (number(15, 1) * (2**20 + 1), "more than 1048576 values"),
    "100 spaces deep": (field(8, _spaces(100)), "nested too deeply"),
    "2,000 spaces deep": (field(8, _spaces(2_000)), "nested too deeply"),
    "unknown space": (field(8, field(9, b"")), "got nothing"),
    "two spaces": (field(8, field(2, b"\x08\x04") + field(4, b"")), "got discrete and"),
    "box of 2^40": (field(8, _box(shape=2**40)), "has more than 268435456 bytes"),
    "box of 2^27": (field(8, _box(shape=2**27)), "more than 67108864 bytes"),
    "100 boxes of 2^24": (
        field(8, field(6, field(1, _box(shape=2**24)) * 100)),
        "those before have more than",
    ),
    "fewer bounds than the shape": (
        field(8, _box(shape=5, low=bytes(4))),
        "Welcome.observation",
    ),
    "bounds that are NaN": (
        field(8, _bounds("float32", float("nan"), 1.0)),
        "Welcome.observation",
    ),
    "bounds the wrong way round": (
        field(8, _bounds("float32", 2.0, 1.0)),
        "Welcome.observation",
    ),
    "empty choice": (field(9, field(2, number(1, 1))), "Welcome.action"),
    "environment that clears the terminal": (
        number(5, 1) + number(6, 1) + number(7, 1) + field(4, ESCAPES.encode()),
        r"Welcome.env: expected .*\\x1b\[2J",
    ),
}


# --------------------------------------------------------------------- the processes


class Victim:
    """An environment server in a process of its own."""

    def __init__(self, folder: str):
        self.address = f"unix:{folder}/s"
        self.output = Path(folder, "out")
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, self.address],
                cwd=ROOT,
                stdout=file,
                stderr=file,
            )

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)


_SERVE = f"""
import logging, sys
from core.remote.env_server import Server
from tests import counting_env
logging.basicConfig(level=logging.INFO)
Server(counting_env.make, sys.argv[1], num_envs={K}, num_streams=2).run()
"""


class EvilServer:
    """A gRPC server that says to everybody what it is told to."""

    def __init__(self, address: str, num_threads: int = 8):
        self.address = address
        self.messages: Sequence[bytes] = ()
        # In their place: what to say to each stream, which then ends.
        self.forge: Callable[[], Iterable[bytes]] | None = None
        self.status: tuple[grpc.StatusCode, bytes] | None = None
        self.description = b""
        self.compression = grpc.Compression.NoCompression
        self._server = grpc.server(futures.ThreadPoolExecutor(num_threads))
        handlers = {
            "Stream": grpc.stream_stream_rpc_method_handler(self._stream),
            "Describe": grpc.unary_unary_rpc_method_handler(self._describe),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("torchbeast.EnvServer", handlers),)
        )
        self._server.add_insecure_port(address)
        self._server.start()

    def play(self, case: LearnerCase, honest: Honest) -> None:
        self.messages, self.status = case.messages(honest), case.status

    def stop(self) -> None:
        self._server.stop(None).wait()

    def _stream(self, requests: Any, context: Any) -> Any:
        next(requests)
        context.set_compression(self.compression)
        if self.forge is not None:
            yield from self.forge()
            return
        yield from self.messages
        if self.status is not None:
            context.set_code(self.status[0])
            context.set_details(self.status[1])
            return
        for _ in requests:  # Until the learner has had enough.
            pass

    def _describe(self, request: bytes, context: Any) -> bytes:
        if self.status is not None:
            context.set_code(self.status[0])
            context.set_details(self.status[1])
        return self.description


class Learner:
    """tests/hostile_learner.py in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile_learner"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __call__(self, **request: Any) -> dict[str, Any]:
        """Have the request carried out; return the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the learner died of {request}: {self.process.wait(DEADLINE_S)}"
        return json.loads(line)

    def peak_bytes(self) -> int:
        """The most memory that it has used so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


# ------------------------------------------------------------------------- what is due


def is_printable(text: str) -> bool:
    return all(line.isprintable() for line in text.splitlines())


def server_survives(victim: Victim, case: ServerCase) -> None:
    """Attack, while an honest learner plays in the server's other place."""
    actions = itertools.repeat(0)
    with EnvClient(victim.address, run_id="honest", info_keys=("half",)) as honest:
        before = play(honest, 5, actions)
        said, code = attack_server(victim.address, case)
        assert re.search(case.said, said), said
        assert is_printable(said), said
        assert code == case.code, (code, said)
        after = play(honest, 20, actions)
        last = map_nest(lambda leaf: leaf[-1], before)
        counting_env.check_rollout(after, last)
    assert victim.process.poll() is None, "the server has died"


def learner_survives(
    learner: Learner, victim: Victim, evil: EvilServer, case: LearnerCase
) -> None:
    """Let a learner play with an evil server and an honest one."""
    evil.play(case, Honest(describe(victim.address)))
    addresses = [victim.address, evil.address]
    if case.comes_first:
        addresses.reverse()
    answer = learner(
        play=addresses, evil=evil.address, said=case.said, times=case.times
    )
    error, events = answer["error"], "\n".join(answer["events"])
    said = error if case.ends_run else events
    assert re.search(case.said, said, re.MULTILINE), answer
    assert (error != "") == case.ends_run, answer
    assert is_printable(error) and is_printable(events), answer
    received, *rest = answer["ledger"]
    assert received == sum(rest), answer
    assert case.ends_run or answer["honest_steps"] > 0, answer


def description_is_refused(
    learner: Learner, evil: EvilServer, description: bytes, said: str
) -> None:
    evil.description, evil.status = description, None
    error = learner(describe=evil.address)["error"]
    assert re.search(said, error) and is_printable(error), error
