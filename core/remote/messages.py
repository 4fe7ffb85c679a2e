# SPDX-License-Identifier: Apache-2.0
"""The messages of proto/torchbeast.proto as dataclasses, and their limits."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from core.nests import ArraySpec
from core.rollout import DTYPES

PROTOCOL = 1  # Version of proto/torchbeast.proto.

# A message that exceeds one of these limits is malformed.
MAX_ARRAYS = 4096
MAX_DEPTH = 16  # Depth of nested spaces, and number of keys in a path.
MAX_RANK = 16
MAX_NBYTES = 2**28  # Size of one array of one environment.
MAX_NAME = 200  # Characters in the name of an environment or an option.
MAX_OPTIONS = 64
MAX_ERROR = 1000  # Characters of an error's text, which may quote the message.


class WireError(ValueError):
    """A message breaks the protocol. The text of the error is one line."""

    def __init__(self, text: str):
        shown = text[:MAX_ERROR]
        super().__init__("".join(c if c.isprintable() else "?" for c in shown))


def field(
    number: int, kind: Any, default: Any = None, *, repeated: bool = False
) -> Any:
    """Declare a field of a message, as the .proto does.

    `kind` is a scalar type of protocol buffers, the class of a message, or a key of
    `codec._CONVERTED`. A value equal to `default` is not sent. Repeated fields are
    tuples.
    """
    default = () if repeated else default
    metadata = {"number": number, "kind": kind, "repeated": repeated}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Hello:
    protocol: int = field(1, "uint32", 0)
    version: str = field(2, "string", "")
    run_id: str = field(3, "string", "")
    info_keys: tuple[str, ...] = field(4, "string", repeated=True)
    seed: int = field(5, "uint64", 0)
    first_env_id: int = field(6, "uint64", 0)
    incarnation: int = field(7, "uint64", 0)
    newest_frames: bool = field(8, "bool", False)
    truncation_is_done: bool = field(9, "bool", False)


@dataclasses.dataclass(frozen=True)
class Array:
    """Description of one buffer of a Step or an Action: [K, *shape]."""

    path: tuple[str | int, ...] = field(1, "key", repeated=True)
    dtype: str = field(2, "string", "")
    shape: tuple[int, ...] = field(3, "uint64", repeated=True)
    stack: bool = field(4, "bool", False)

    @property
    def spec(self) -> ArraySpec:
        return ArraySpec(self.shape, np.dtype(self.dtype))

    def __str__(self) -> str:
        return f"'{'/'.join(map(str, self.path))}' {self.spec}"


@dataclasses.dataclass(frozen=True)
class Option:
    """One option with which an environment was created."""

    name: str = field(1, "string", "")
    value: bool | int | float | str | None = field(2, "value")


@dataclasses.dataclass(frozen=True)
class Welcome:
    protocol: int = field(1, "uint32", 0)
    version: str = field(2, "string", "")
    env: str = field(4, "string", "")
    num_envs: int = field(5, "uint32", 0)
    num_streams: int = field(6, "uint32", 0)
    frames_per_step: int = field(7, "uint32", 0)
    observation: gym.Space = field(8, "space")  # None if it is missing: check_welcome.
    action: gym.Space = field(9, "space")
    step_arrays: tuple[Array, ...] = field(10, Array, repeated=True)
    action_arrays: tuple[Array, ...] = field(11, Array, repeated=True)
    options: tuple[Option, ...] = field(12, Option, repeated=True)


@dataclasses.dataclass(frozen=True)
class Step:
    seq: int = field(1, "fixed64", 0)
    arrays: tuple[bytes, ...] = field(2, "bytes", repeated=True)
    newest_frames: bool = field(3, "bool", False)


@dataclasses.dataclass(frozen=True)
class Action:
    seq: int = field(1, "fixed64", 0)
    arrays: tuple[bytes, ...] = field(2, "bytes", repeated=True)
    whole: bool = field(3, "bool", False)


@dataclasses.dataclass(frozen=True)
class Failure:
    text: str = field(1, "string", "")
    permanent: bool = field(2, "bool", False)


@dataclasses.dataclass(frozen=True)
class Goodbye:
    reason: str = field(1, "string", "")


class Oneof:
    """A message with exactly one field set; the other fields are None."""

    @property
    def value(self) -> Any:
        return next(v for v in vars(self).values() if v is not None)


@dataclasses.dataclass(frozen=True)
class ToServer(Oneof):
    hello: Hello | None = field(1, Hello)
    action: Action | None = field(2, Action)


@dataclasses.dataclass(frozen=True)
class ToLearner(Oneof):
    welcome: Welcome | None = field(1, Welcome)
    step: Step | None = field(2, Step)
    failure: Failure | None = field(3, Failure)
    goodbye: Goodbye | None = field(4, Goodbye)


@dataclasses.dataclass(frozen=True)
class Key(Oneof):
    name: str | None = field(1, "string")
    index: int | None = field(2, "uint32")


@dataclasses.dataclass(frozen=True)
class Value(Oneof):
    flag: bool | None = field(1, "bool")
    integer: int | None = field(2, "sint64")
    number: float | None = field(3, "double")
    text: str | None = field(4, "string")


@dataclasses.dataclass(frozen=True)
class Box:
    dtype: str = field(1, "string", "")
    shape: tuple[int, ...] = field(2, "uint64", repeated=True)
    low: bytes = field(3, "bytes", b"")
    high: bytes = field(4, "bytes", b"")


@dataclasses.dataclass(frozen=True)
class Discrete:
    n: int = field(1, "sint64", 0)
    start: int = field(2, "sint64", 0)


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    shape: tuple[int, ...] = field(1, "uint64", repeated=True)
    nvec: tuple[int, ...] = field(2, "sint64", repeated=True)
    start: tuple[int, ...] = field(3, "sint64", repeated=True)


@dataclasses.dataclass(frozen=True)
class MultiBinary:
    shape: tuple[int, ...] = field(1, "uint64", repeated=True)


@dataclasses.dataclass(frozen=True)
class Entry:
    key: str = field(1, "string", "")
    space: gym.Space | None = field(2, "space")


@dataclasses.dataclass(frozen=True)
class Dict:
    entries: tuple[Entry, ...] = field(1, Entry, repeated=True)


@dataclasses.dataclass(frozen=True)
class Tuple:
    spaces: tuple[gym.Space, ...] = field(1, "space", repeated=True)


@dataclasses.dataclass(frozen=True)
class Space(Oneof):
    box: Box | None = field(1, Box)
    discrete: Discrete | None = field(2, Discrete)
    multi_discrete: MultiDiscrete | None = field(3, MultiDiscrete)
    multi_binary: MultiBinary | None = field(4, MultiBinary)
    dict: Dict | None = field(5, Dict)
    tuple: Tuple | None = field(6, Tuple)


def check_array(array: Array) -> None:
    if array.dtype not in DTYPES:
        raise WireError(
            f"Array.dtype: expected one of {', '.join(DTYPES)}, got {array.dtype!r:.80}"
        )
    if len(array.path) > MAX_DEPTH:
        raise WireError(f"Array.path: {len(array.path)} keys, at most {MAX_DEPTH}")
    check_shape("Array", array.shape, np.dtype(array.dtype))


def check_shape(where: str, shape: Sequence[int], dtype: np.dtype) -> None:
    if len(shape) > MAX_RANK:
        raise WireError(f"{where}.shape: rank {len(shape)}, at most {MAX_RANK}")
    if max(shape, default=0) > MAX_NBYTES or (
        math.prod(shape) * dtype.itemsize > MAX_NBYTES
    ):
        raise WireError(
            f"{where}.shape: {dtype}{list(shape)} has more than {MAX_NBYTES} bytes"
        )


def check_welcome(welcome: Welcome) -> None:
    for name in ("step_arrays", "action_arrays"):
        arrays = getattr(welcome, name)
        if len(arrays) > MAX_ARRAYS:
            raise WireError(f"Welcome.{name}: {len(arrays)}, at most {MAX_ARRAYS}")
        if len({array.path for array in arrays}) < len(arrays):
            raise WireError(f"Welcome.{name}: two arrays have the same path")
    for name in ("num_envs", "num_streams", "frames_per_step"):
        if getattr(welcome, name) < 1:
            raise WireError(f"Welcome.{name}: expected at least 1, got 0")
    _check_text("Welcome.env", welcome.env)
    for name in ("observation", "action"):
        if getattr(welcome, name) is None:
            raise WireError(f"Welcome.{name} is missing")
    _check_options(welcome.options)


def _check_options(options: tuple[Option, ...]) -> None:
    if len(options) > MAX_OPTIONS:
        raise WireError(f"Welcome.options: {len(options)}, at most {MAX_OPTIONS}")
    if len({option.name for option in options}) < len(options):
        raise WireError("Welcome.options: two options have the same name")
    for option in options:
        _check_text("Option.name", option.name)
        match option.value:
            case None:
                raise WireError(f"Option {option.name!r}: the value is missing")
            case str(text):
                _check_text(f"Option {option.name!r}", text)
            case float(number) if not math.isfinite(number):
                raise WireError(
                    f"Option {option.name!r}: expected a finite number, got {number}"
                )


def _check_text(where: str, text: str) -> None:
    if len(text) > MAX_NAME or not text.isprintable():
        raise WireError(
            f"{where}: expected at most {MAX_NAME} printable characters, got "
            f"{text!r:.80}"
        )
