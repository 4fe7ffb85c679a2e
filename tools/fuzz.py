# SPDX-License-Identifier: Apache-2.0
"""Fuzz the Python code that reads messages and checkpoints from strangers.

    python -m tools.fuzz server --seconds 60
    python -m tools.fuzz checkpoint --runs 10000 --seed 3
    python -m tools.fuzz welcome crash-0a1b2c3d      # Once, to reproduce a failure.

Inputs are valid inputs with random changes. The reader must accept each input or raise
its own error with a readable text, within a few seconds and without taking much memory.
The first input for which this fails is written to a file. csrc/tests has such targets
for C++, which coverage guides.
"""

import argparse
import asyncio
import contextlib
import hashlib
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from core.nests import ArraySpec
from core.remote import acceptor, codec, frames, messages, tunnel
from core.running import checkpoint

MAX_S = 5.0  # CPU time for one input.
MAX_GROWTH_KB = 2**20  # Of this process, through any input.
MAX_TEXT = 20_000  # Characters of an error.


class Broken(Exception):
    """A reader did something that it must not do; the text says what."""


# ---------------------------------------------------------------------------- targets
#
# Each is a class with `seeds`, which are valid inputs, and `read`, for any input.


class Server:
    """An environment server: Hello and Action, alone and in their envelope."""

    def __init__(self) -> None:
        nested = (ArraySpec((2,), np.dtype("f4")),)
        arrays = frames.arrays_of({"a": ArraySpec((), np.dtype("i8")), "b": nested})
        self.frame = frames.Frame(messages.Action, arrays, 3)
        hello = messages.Hello(1, "0.1", "run", ("lives", "half"), 2**63, 3, 4)
        action = messages.Action(5, (bytes(24), bytes(24)))
        self.seeds = [
            codec.encode(messages.ToServer(hello=hello)),
            codec.encode(messages.ToServer(action=action)),
            bytes(self.frame.encode(1)),
            codec.encode(hello),
        ]

    def read(self, data: bytes) -> None:
        for decode in (
            lambda: codec.decode(messages.ToServer, data),
            lambda: codec.decode(messages.Hello, data),
            lambda: self.frame.decode_action(data),
        ):
            with _only(messages.WireError):
                decode()


class Welcome:
    """A learner that asks a server what it serves."""

    def __init__(self) -> None:
        box = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        several = gym.spaces.Dict(
            a=gym.spaces.Box(-1, 1, (2, 5), np.float32),
            b=gym.spaces.Tuple([gym.spaces.Discrete(7), gym.spaces.MultiBinary(5)]),
            c=gym.spaces.MultiDiscrete([2, 3]),
        )
        arrays = (messages.Array(("observation", 0), "float32", (2, 5)),)
        self.seeds = [
            codec.encode(
                messages.Welcome(1, "0.1", "Toy", 3, 1, 4, space, space, arrays, arrays)
            )
            for space in (box, several)
        ]

    def read(self, data: bytes) -> None:
        with _only(messages.WireError):
            codec.decode_welcome(data)


class Dial:
    """A learner's acceptor: the first bytes of a connection."""

    def __init__(self) -> None:
        class Transport(asyncio.Transport):
            def write(self, data: bytes) -> None: ...

            def set_write_buffer_limits(self, high=None, low=None) -> None: ...

            def pause_reading(self) -> None: ...

            def resume_reading(self) -> None: ...

        self.transport = Transport()
        self.acceptor = acceptor.Acceptor(Path(), None, 1.0)
        self.loop = asyncio.new_event_loop()
        ticket = b"0123456789abcdef" * 2
        self.seeds = [
            b"torchbeast 1 plain\njoin " + ticket + b" 16 host-1.lan\npong\n",
            b"torchbeast 1 plain\ntunnel " + ticket + b"\nPRI * HTTP/2.0\r\n",
            b"torchbeast 1 tls\n",
        ]

    def read(self, data: bytes) -> None:
        connection = tunnel.Connection()
        connection.connection_made(self.transport)
        connection.data_received(data)
        connection.connection_lost(None)
        with _only(ConnectionError):
            self.loop.run_until_complete(self.acceptor._receive_hello(connection))


class Checkpoint:
    """A folder with two good checkpoints, of which the input replaces the newer one.

    If the first byte of an input is odd, `read` corrects the input's sha256, as an
    attacker would.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tb"))
        for step in (1, 2):
            checkpoint.save(
                self.folder,
                step=step,
                tensors={"model": {"w": torch.ones(5, 3), "b": torch.zeros(3)}},
                state={"step": step, "flags": {"env": "Toy", "lr": 0.1}, "x": [None]},
            )
        self.path = self.folder / "step-000000000002.safetensors"
        self.good = self.path.read_bytes()
        self.seeds = [bytes([fits]) + self.good for fits in (0, 1)]

    def close(self) -> None:
        shutil.rmtree(self.folder)

    def read(self, data: bytes) -> None:
        fits, file = bool(data) and data[0] % 2, data[1:]
        if fits:
            with contextlib.suppress(checkpoint.CheckpointError):
                file = checkpoint.seal(file)
        self.path.write_bytes(file)
        found = checkpoint.load(self.folder)
        if found is None or found.step not in (1, 2):
            raise Broken(f"loaded {found}, not one of the two checkpoints")
        if found.step == 2 and file != self.good and not fits:
            raise Broken("a changed file was not noticed")
        for line in found.rejected:
            _check_text(line)


TARGETS = {
    "server": Server,
    "welcome": Welcome,
    "dial": Dial,
    "checkpoint": Checkpoint,
}


@contextlib.contextmanager
def _only(error: type[Exception]):
    try:
        yield
    except error as refused:
        _check_text(str(refused))


def _check_text(text: str) -> None:
    if not text.isprintable() or len(text) > MAX_TEXT:
        raise Broken(f"an error of {len(text)} characters: {text!r:.300}")


def within_bounds(read: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return `read` with limits of time and memory."""

    def peak_kb() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    limit_kb = peak_kb() + MAX_GROWTH_KB

    def bounded(data: bytes) -> None:
        began = time.process_time()
        read(data)
        if time.process_time() - began > MAX_S:
            raise Broken(f"it took {time.process_time() - began:.1f} s")
        if peak_kb() > limit_kb:
            raise Broken(f"this process has grown to {peak_kb()} KB")

    return bounded


# ----------------------------------------------------------------------------- inputs


def change(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Return `data` with a few changes, some of them taken from `other`."""
    new = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(new) + 1)
        end = at + rng.randrange(17)
        match rng.randrange(8):
            case 0 if at < len(new):
                new[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(new):
                new[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2 if at < len(new):  # A length becomes slightly wrong.
                new[at] = (new[at] + rng.randrange(-4, 5)) % 256
            case 3:
                del new[at:end]
            case 4:
                new[at:at] = new[at:end] * rng.choice((1, 1, 100))
            case 5:
                begin = rng.randrange(len(other) + 1)
                new[at:] = other[begin:]
            case 6:
                new[at:at] = rng.randbytes(rng.randrange(9))
            case 7:  # Insert a varint close to a power of two.
                value = max(0, (1 << rng.randrange(64)) + rng.randrange(-1, 2))
                while value > 127:
                    new.insert(at, value & 127 | 128)
                    at, value = at + 1, value >> 7
                new.insert(at, value)
    return bytes(new[:10_000])


def fuzz(target, flags: argparse.Namespace) -> int:
    """Read changed seeds, for --seconds or --runs; return the number of inputs."""
    rng = random.Random(flags.seed)
    read = within_bounds(target.read)
    deadline = time.monotonic() + flags.seconds
    runs = 0
    while runs < flags.runs and time.monotonic() < deadline:
        data = change(rng, rng.choice(target.seeds), rng.choice(target.seeds))
        try:
            read(data)
        except BaseException:
            path = f"crash-{hashlib.sha256(data).hexdigest()[:16]}"
            Path(path).write_bytes(data)
            print(
                f"#{runs}: to see it again:\n"
                f"  python -m tools.fuzz {flags.target} {path}",
                file=sys.stderr,
            )
            raise
        runs += 1
    return runs


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("inputs", nargs="*", type=Path, help="read these files instead")
    parser.add_argument("--runs", type=int, default=2**31 - 1, help="inputs, at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most")
    parser.add_argument("--seed", type=int, default=1, help="of the inputs")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    flags = parse_flags(argv)
    with contextlib.ExitStack() as stack:
        target = TARGETS[flags.target]()
        if isinstance(target, Checkpoint):
            stack.callback(target.close)
        if flags.inputs:
            for path in flags.inputs:
                within_bounds(target.read)(path.read_bytes())
        else:
            print(f"#{fuzz(target, flags)} DONE", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
