# SPDX-License-Identifier: Apache-2.0
"""The messages of proto/torchbeast.proto as dataclasses, and their encoding.

Learner and servers speak protocol buffers, which any language can read; this file needs
numpy and gymnasium only, so that environment machines install nothing more. Whatever
comes in is checked: a message that is cut off, too deep or not what the .proto says is
a `WireError`, never a crash and never a large allocation.

    encode(Hello(run_id="x"))  ->  bytes  ->  decode(Hello, data)

`Frame` is the fast way for the two messages of every step, `Steps` for those of a
server.
"""

import ctypes
import dataclasses
import functools
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from core import spaces
from core.spaces import ArraySpec, Nest

PROTOCOL = 1  # Of proto/torchbeast.proto.

# What arrays may be made of: plain numbers, nothing that could hide a pointer.
DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64"),
    *("int8", "int16", "int32", "int64", "float16", "float32", "float64"),
)

# More than this in a message is malformed.
MAX_ARRAYS = 4096
MAX_DEPTH = 16  # Of spaces, and keys in a path.
MAX_RANK = 16
MAX_NBYTES = 2**28  # Of one array of one environment.
# Of the lower bounds of all Boxes. A few bytes can say that these are large, and
# Gymnasium then takes eight times as much memory for a moment.
MAX_BOUNDS_NBYTES = 2**26
MAX_VALUES = 2**20  # Fields and numbers of one message: they take Python time.
MAX_NAME = 200  # Characters of the name of an environment or an option.
MAX_OPTIONS = 64
MAX_ERROR = 1000  # Characters of an error's text, which may quote what came.

# What is taken for a stack of frames: so many along the first axis, so large in all.
# If it is none, to look costs little beside the making of such an array.
STACK_FRAMES = range(2, 17)
MIN_STACK_NBYTES = 4096

M = TypeVar("M")


class WireError(ValueError):
    """A message is not what the protocol says it must be. Its text is one line."""

    def __init__(self, text: str):
        shown = text[:MAX_ERROR]
        super().__init__("".join(c if c.isprintable() else "?" for c in shown))


# --------------------------------------------------------------------------- messages


def field(
    number: int, kind: Any, default: Any = None, *, repeated: bool = False
) -> Any:
    """Declare a field of a message, as the .proto does.

    `kind` is a scalar type of protocol buffers, or the class of a message, or one of
    the `_CONVERTED`. What equals `default` is not sent. Repeated fields are tuples.
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
    """One buffer of a Step or an Action: [K, *shape]."""

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
    """One point of how an environment was made."""

    name: str = field(1, "string", "")
    value: bool | int | float | str | None = field(2, "value")


@dataclasses.dataclass(frozen=True)
class Welcome:
    protocol: int = field(1, "uint32", 0)
    version: str = field(2, "string", "")
    incarnation_id: bytes = field(3, "bytes", b"")
    env: str = field(4, "string", "")
    num_envs: int = field(5, "uint32", 0)
    num_streams: int = field(6, "uint32", 0)
    frames_per_step: int = field(7, "uint32", 0)
    observation: gym.Space | None = field(8, "space")
    action: gym.Space | None = field(9, "space")
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
    """A message that holds exactly one of its fields; the others are None."""

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


# ------------------------------------------------------------------------- encoding
#
# As protobuf.dev/programming-guides/encoding says.

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5  # Wire types.
_VARINTS = ("bool", "uint32", "uint64", "sint64")


def encode(message: Any) -> bytes:
    """Return the bytes of a message."""
    out = bytearray()
    for f in dataclasses.fields(message):
        number, kind = f.metadata["number"], f.metadata["kind"]
        value = getattr(message, f.name)
        if f.metadata["repeated"]:
            if kind in _VARINTS and value:  # Packed.
                packed = b"".join(_encode_scalar(kind, v) for v in value)
                out += _tag(number, _LEN) + _varint(len(packed)) + packed
            elif value:
                for v in value:
                    out += _encode_field(number, kind, v)
        elif value != f.default:
            out += _encode_field(number, kind, value)
    return bytes(out)


def _encode_field(number: int, kind: Any, value: Any) -> bytes:
    if kind in _VARINTS:
        return _tag(number, _VARINT) + _encode_scalar(kind, value)
    if kind == "fixed64":
        return _tag(number, _I64) + value.to_bytes(8, "little")
    if kind == "double":
        return _tag(number, _I64) + struct.pack("<d", value)
    if kind == "string":
        data = value.encode()
    elif kind == "bytes":
        data = value
    else:
        if kind in _CONVERTED:
            value = _CONVERTED[kind].to_message(value)
        data = encode(value)
    return _tag(number, _LEN) + _varint(len(data)) + data


def _encode_scalar(kind: str, value: int) -> bytes:
    if kind == "sint64":
        value = value << 1 if value >= 0 else (-value << 1) - 1
    return _varint(int(value))


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    assert 0 <= value < 2**64, value
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# ------------------------------------------------------------------------- decoding


@dataclasses.dataclass
class _Left:
    """What a message may still ask for."""

    bounds_nbytes: int = MAX_BOUNDS_NBYTES
    values: int = MAX_VALUES


def decode(cls: type[M], data: bytes | memoryview) -> M:
    """Return the message of class `cls` that `data` holds.

    Fields that `cls` does not know are skipped: they are of a later version.

    Raises:
      WireError: `data` is malformed; the message names the field.
    """
    return _decode(cls, data, 0, _Left())


def _decode(cls: type[M], data: bytes | memoryview, depth: int, left: _Left) -> M:
    if depth > 4 * MAX_DEPTH:  # A space in a space takes up to three messages.
        raise WireError(f"{cls.__name__}: nested too deeply")
    fields = _fields(cls)  # type: ignore[arg-type]  # Classes are hashable.
    values: dict[str, Any] = {}
    for number, wire_type, raw in _parse(cls.__name__, memoryview(data)):
        left.values -= 1
        if left.values < 0:
            raise WireError(f"{cls.__name__}: more than {MAX_VALUES} values in all")
        if number not in fields:
            continue
        name, kind, repeated = fields[number]
        where = f"{cls.__name__}.{name}"
        if repeated and kind in _VARINTS and wire_type == _LEN:
            numbers = itertools.islice(_unpack(where, raw), left.values + 1)
            items = tuple(_decode_scalar(kind, v) for v in numbers)
            left.values -= len(items) - 1
        else:
            items = (_decode_value(where, kind, wire_type, raw, depth, left),)
        if repeated:
            values.setdefault(name, []).extend(items)
        elif name in values:
            raise WireError(f"{where} is there twice")
        else:
            values[name] = items[0]
    if issubclass(cls, Oneof) and len(values) != 1:
        names = " or ".join(name for name, _, _ in fields.values())
        got = " and ".join(values) or "nothing"
        raise WireError(f"{cls.__name__}: expected {names}, got {got}")
    message = cls(**{k: tuple(v) if type(v) is list else v for k, v in values.items()})
    if isinstance(message, Array):
        _check_array(message)
    if isinstance(message, Welcome):
        _check_welcome(message)
    return message


@functools.cache
def _fields(cls: Any) -> dict[int, tuple[str, Any, bool]]:
    """Return the name, kind and `repeated` of each field by its number."""
    return {
        f.metadata["number"]: (f.name, f.metadata["kind"], f.metadata["repeated"])
        for f in dataclasses.fields(cls)
    }


def _parse(where: str, data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield the number, wire type and raw value of each field."""
    position = 0
    while position < len(data):
        tag, position = _read_varint(where, data, position)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number < 2**29:
            raise WireError(f"{where}: field number {number}")
        value: Any
        if wire_type == _VARINT:
            value, position = _read_varint(where, data, position)
        elif wire_type in (_LEN, _I64, _I32):
            size = {_I64: 8, _I32: 4}.get(wire_type)
            if size is None:
                size, position = _read_varint(where, data, position)
            if size > len(data) - position:
                raise WireError(
                    f"{where}: field {number} has {size} bytes, but only "
                    f"{len(data) - position} follow"
                )
            value = data[position : position + size]
            position += size
        else:
            raise WireError(f"{where}: field {number} has wire type {wire_type}")
        yield number, wire_type, value


def _read_varint(where: str, data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise WireError(f"{where}: cut off in the middle of a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 and value < 2**64:
            return value, position
    raise WireError(f"{where}: a number of more than 64 bits")


def _unpack(where: str, data: memoryview) -> Iterator[int]:
    position = 0
    while position < len(data):
        value, position = _read_varint(where, data, position)
        yield value


def _decode_value(
    where: str, kind: Any, wire_type: int, raw: Any, depth: int, left: _Left
) -> Any:
    is_i64 = kind in ("fixed64", "double")
    expected = _VARINT if kind in _VARINTS else _I64 if is_i64 else _LEN
    if wire_type != expected:
        raise WireError(f"{where}: expected wire type {expected}, got {wire_type}")
    if kind in _VARINTS:
        value = _decode_scalar(kind, raw)
        if kind == "uint32" and value >= 2**32:
            raise WireError(f"{where}: expected 32 bits, got {value}")
        return value
    if kind == "fixed64":
        return int.from_bytes(raw, "little")
    if kind == "double":
        return struct.unpack("<d", raw)[0]
    if kind == "bytes":
        return bytes(raw)
    if kind == "string":
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise WireError(f"{where}: expected UTF-8: {error}") from None
    if kind in _CONVERTED:
        conversion = _CONVERTED[kind]
        message: Any = _decode(conversion.message, raw, depth + 1, left)
        try:
            return conversion.from_message(message, left)
        except WireError:
            raise
        except Exception as error:  # Gymnasium's assertions, numpy's refusals.
            raise WireError(f"{where}: {message}: {error}") from None
    return _decode(kind, raw, depth + 1, left)


def _decode_scalar(kind: str, value: int) -> int:
    if kind == "sint64":
        return value >> 1 if value % 2 == 0 else -((value + 1) >> 1)
    return bool(value) if kind == "bool" else value


def _check_array(array: Array) -> None:
    if array.dtype not in DTYPES:
        raise WireError(
            f"Array.dtype: expected one of {', '.join(DTYPES)}, got {array.dtype!r:.80}"
        )
    if len(array.path) > MAX_DEPTH:
        raise WireError(f"Array.path: {len(array.path)} keys, at most {MAX_DEPTH}")
    _check_shape("Array", array.shape, np.dtype(array.dtype))


def _check_shape(where: str, shape: Sequence[int], dtype: np.dtype) -> None:
    if len(shape) > MAX_RANK:
        raise WireError(f"{where}.shape: rank {len(shape)}, at most {MAX_RANK}")
    if max(shape, default=0) > MAX_NBYTES or (
        math.prod(shape) * dtype.itemsize > MAX_NBYTES
    ):
        raise WireError(
            f"{where}.shape: {dtype}{list(shape)} has more than {MAX_NBYTES} bytes"
        )


def _check_welcome(welcome: Welcome) -> None:
    for name in ("step_arrays", "action_arrays"):
        arrays = getattr(welcome, name)
        if len(arrays) > MAX_ARRAYS:
            raise WireError(f"Welcome.{name}: {len(arrays)}, at most {MAX_ARRAYS}")
        if len({array.path for array in arrays}) < len(arrays):
            raise WireError(f"Welcome.{name}: two of them have the same path")
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
        raise WireError("Welcome.options: two of them have the same name")
    for option in options:
        _check_text("Option.name", option.name)
        match option.value:
            case None:
                raise WireError(f"Option {option.name!r}: its value is missing")
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


def decode_welcome(data: bytes) -> Welcome:
    """Return the Welcome that a server's Describe answered.

    Raises:
      WireError: `data` is malformed, or of another protocol.
    """
    # Its version comes first: what else another protocol has, nobody knows here.
    for number, wire_type, value in _parse("Welcome", memoryview(data)):
        if number == 1 and wire_type == _VARINT and value != PROTOCOL:
            raise WireError(f"the server speaks protocol {value}, this is {PROTOCOL}")
    return decode(Welcome, data)


# ------------------------------------------- what has a nicer form than its message


@dataclasses.dataclass(frozen=True)
class _Conversion:
    message: type
    to_message: Callable[[Any], Any]
    from_message: Callable[[Any, _Left], Any]


def _key_message(key: str | int) -> Key:
    return Key(name=key) if isinstance(key, str) else Key(index=key)


def _value_message(value: bool | int | float | str) -> Value:
    match value:
        case bool():
            return Value(flag=value)
        case int():
            return Value(integer=value)
        case float():
            return Value(number=value)
    return Value(text=value)


def space_message(space: gym.Space) -> Space:
    """Return the message for a space.

    Raises:
      ValueError: there is none; the message says why.
    """
    match space:
        case gym.spaces.Box():
            dtype = np.dtype(space.dtype)
            if dtype.name not in DTYPES:
                raise ValueError(
                    f"space {space} has dtype {dtype}; expected {', '.join(DTYPES)}"
                )
            low, high = (_one_or_all(x, dtype) for x in (space.low, space.high))
            return Space(box=Box(dtype.name, space.shape, low, high))
        case gym.spaces.Discrete():
            return Space(discrete=Discrete(int(space.n), int(space.start)))
        case gym.spaces.MultiDiscrete():
            nvec, start = space.nvec, space.start
            return Space(
                multi_discrete=MultiDiscrete(
                    nvec.shape,
                    tuple(nvec.flatten().tolist()),
                    tuple(np.broadcast_to(start, nvec.shape).flatten().tolist()),
                )
            )
        case gym.spaces.MultiBinary():
            return Space(multi_binary=MultiBinary(tuple(map(int, space.shape))))
        case gym.spaces.Dict():
            for key in space.spaces:
                if not isinstance(key, str):
                    raise ValueError(f"space {space} has the key {key!r}; expected str")
            items = space.spaces.items()
            return Space(dict=Dict(tuple(Entry(key, sub) for key, sub in items)))
        case gym.spaces.Tuple():
            return Space(tuple=Tuple(tuple(space.spaces)))
    raise ValueError(
        f"space {space} is a {type(space).__name__}; expected Box, Discrete, "
        "MultiDiscrete, MultiBinary, Dict or Tuple"
    )


def _one_or_all(bounds: np.ndarray, dtype: np.dtype) -> bytes:
    data = np.ascontiguousarray(bounds, dtype.newbyteorder("<")).tobytes()
    first = data[: dtype.itemsize]
    return first if data == first * bounds.size else data


def _gym_space(message: Space, left: _Left) -> gym.Space:
    match message.value:
        case Box(dtype, shape, low, high):
            if dtype not in DTYPES:
                raise WireError(f"Box.dtype: {dtype!r:.80}")
            numbers = np.dtype(dtype)
            _check_shape("Box", shape, numbers)
            left.bounds_nbytes -= ArraySpec(shape, numbers).nbytes
            if left.bounds_nbytes < 0:
                raise WireError(
                    f"Box.shape: {numbers}{list(shape)} and those before have more "
                    f"than {MAX_BOUNDS_NBYTES} bytes"
                )
            bounds = [_bounds(data, numbers, shape) for data in (low, high)]
            return gym.spaces.Box(bounds[0], bounds[1], shape, numbers.type)
        case Discrete(n, start):
            return gym.spaces.Discrete(n, start=start)
        case MultiDiscrete(shape, nvec, start):
            _check_shape("MultiDiscrete", shape, np.dtype(np.int64))
            return gym.spaces.MultiDiscrete(
                np.array(nvec, np.int64).reshape(shape),
                start=np.array(start, np.int64).reshape(shape),
            )
        case MultiBinary(shape):
            _check_shape("MultiBinary", shape, np.dtype(np.int8))
            return gym.spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
        case Dict(entries):
            keys = [entry.key for entry in entries]
            if len(set(keys)) < len(keys):
                raise WireError(f"Dict.entries: a key twice in {keys}")
            items = [(e.key, e.space) for e in entries if e.space is not None]
            if len(items) < len(entries):
                raise WireError("Entry.space is missing")
            return gym.spaces.Dict(items)  # A list keeps its order, a dict would not.
        case Tuple(spaces):
            return gym.spaces.Tuple(spaces)
    raise AssertionError(message)


def _bounds(data: bytes, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    numbers = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)
    return np.full(shape, numbers[0]) if numbers.size == 1 else numbers.reshape(shape)


_CONVERTED = {
    "key": _Conversion(Key, _key_message, lambda key, left: key.value),
    "value": _Conversion(Value, _value_message, lambda value, left: value.value),
    "space": _Conversion(Space, space_message, _gym_space),
}


# ---------------------------------------------------------------------- every step


def arrays_of(spec: Nest, path: tuple[str | int, ...] = ()) -> tuple[Array, ...]:
    """Return the arrays of a nest of `ArraySpec`, in the order of `spaces.leaves`."""
    items: Any
    if isinstance(spec, ArraySpec):
        if spec.dtype.name not in DTYPES:
            raise ValueError(f"'{'/'.join(map(str, path))}' has dtype {spec.dtype}")
        return (Array(path, spec.dtype.name, spec.shape),)
    items = spec.items() if isinstance(spec, dict) else enumerate(spec)
    arrays = [array for key, sub in items for array in arrays_of(sub, (*path, key))]
    return tuple(arrays)


def value_ranges(
    observation: gym.Space, action: gym.Space
) -> list[tuple[tuple[str | int, ...], list[int], list[int]]]:
    """Return what `libtorchbeast.ActorPool` takes as `value_ranges` of these spaces."""
    rows = {"observation": observation, "last_action": action}
    specs = {key: spaces.spec_of(space) for key, space in rows.items()}
    leaf_spaces = {key: spaces.leaf_spaces(space) for key, space in rows.items()}
    ranges = []
    for array, (_, leaf) in zip(arrays_of(specs), spaces.leaves(leaf_spaces)):
        if (limits := spaces.value_range(leaf)) is not None:
            low, high = (np.ravel(limit).tolist() for limit in limits)
            ranges.append((array.path, low, high))
    return ranges


class Frame:
    """The bytes of a Step or an Action, laid out once for all steps of a stream.

    All Steps of a stream have the same length and differ in `seq` and in the arrays'
    contents only. So there is one message, in which the rest is written once; `arrays`
    are numpy views of the places in between. `encode` returns this very message, so
    send it or copy it before the next one: in lock step the other side has had it.

    Args:
      kind: Step or Action.
      arrays: their description, in order.
      num_envs: K, the first axis of each array.
      newest_frames: a Step that has no more of its stacks: [K, *shape[1:]].
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
        self._num_envs = num_envs
        shapes = [
            (num_envs, *array.shape[1 if newest_frames and array.stack else 0 :])
            for array in arrays
        ]
        # No change of order on most machines.
        dtypes = [array.spec.dtype.newbyteorder("<") for array in arrays]
        sizes = [math.prod(s) * dtype.itemsize for s, dtype in zip(shapes, dtypes)]
        # Tag, number of bytes and then the bytes, for each array and around all.
        heads = [_tag(2, _LEN) + _varint(size) for size in sizes]
        tail = _tag(3, _VARINT) + _varint(1) if newest_frames else b""
        body = 9 + sum(map(len, heads)) + sum(sizes) + len(tail)
        envelope, name = (ToLearner, "step") if kind is Step else (ToServer, "action")
        number = next(n for n, f in _fields(envelope).items() if f[0] == name)
        head = _tag(number, _LEN) + _varint(body) + _tag(1, _I64)
        self._seq = slice(len(head), len(head) + 8)
        # grpcio sends nothing but `bytes`. Writing into one saves a copy of every
        # observation; nobody else knows it yet, as in PyBytes_FromStringAndSize.
        self._message = bytes(len(head) + body - 1)
        self.data = _contents(self._message)
        self._fixed = [(0, len(head), head)]  # Begin, end and bytes of what is.
        self.arrays: list[np.ndarray] = []
        self.places: list[slice] = []  # Theirs, in `data`.
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

        It is always the same object, with other contents.
        """
        self.data[self._seq] = seq.to_bytes(8, "little")
        return self._message

    def decode_action(self, message: bytes) -> tuple[int, bool]:
        """Copy what a ToServer holds into `arrays`; return its `seq` and `whole`.

        Raises:
          WireError: it is malformed or no Action, or its arrays are not ours.
        """
        if len(message) == len(self.data) and all(
            message[begin:end] == data for begin, end, data in self._fixed
        ):
            self.data[:] = message
            return int.from_bytes(message[self._seq], "little"), False
        # It may still be one: it is `whole`, other orders of fields mean the same, and
        # a seq of 0 may be left out.
        action = decode(ToServer, message).action
        if action is None:
            raise WireError("expected an Action, got another Hello")
        self.copy_from(action.arrays)
        return action.seq, action.whole

    def copy_from(self, buffers: Sequence[bytes]) -> None:
        """Copy received buffers into `arrays`.

        Raises:
          WireError: their number or a size is wrong.
        """
        if len(buffers) != len(self._specs):
            expected = ", ".join(map(str, self._specs))
            raise WireError(
                f"expected {len(self._specs)} arrays ({expected}), got {len(buffers)}"
            )
        for array, ours, data in zip(self._specs, self.arrays, buffers):
            if len(data) != ours.nbytes:
                raise WireError(
                    f"{array} of {self._num_envs} environments: expected {ours.nbytes} "
                    f"bytes, got {len(data)}"
                )
        for ours, data in zip(self.arrays, buffers):
            ours[...] = np.frombuffer(data, ours.dtype).reshape(ours.shape)


def with_stacks(arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Return the arrays, with those of observations marked that may be a `stack`."""
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
    """The Steps of a stream: the newest frames of its stacks if that says all.

    Write a row, all of it, into the first of `arrays` ([K, *shape] each) and `encode`,
    the next row into the next of them, and so on in turn.

    Whether an array is a stack of frames shows in what is in it: in all K environments
    the frames are those of the step before, but for the oldest, and a new one. If not
    (an episode has begun, or it never is so), that Step is whole.

    Args:
      arrays: the Welcome's, in order; those that may be stacks are marked.
      num_envs: K.
      newest_frames: the learner's word; without it all Steps are whole.
    """

    def __init__(self, arrays: Sequence[Array], num_envs: int, *, newest_frames: bool):
        self._stacks = [i for i, a in enumerate(arrays) if a.stack and newest_frames]
        # Turn about, as the row before is needed to compare with.
        self._frames = [
            Frame(Step, arrays, num_envs) for _ in range(2 if self._stacks else 1)
        ]
        self.arrays = [frame.arrays for frame in self._frames]
        if not self._stacks:
            return
        self._newest = Frame(Step, arrays, num_envs, newest_frames=True)
        # Where each older frame of an environment is to be, where it was in the step
        # before, and what the short message has of a whole one.
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
        """Return the message, good until the next one."""
        frame = self._frames[0]
        message = frame.encode(seq)
        if not self._stacks:
            return message
        self._frames.reverse()
        self._older.reverse()
        # With the GIL, unlike numpy: to hand it over and back costs more than this.
        if whole or not all(map(message.startswith, self._older[0], self._begins)):
            return message
        for to, place in self._copies:
            self._newest.data[to] = frame.data[place]
        return self._newest.encode(seq)


def _contents(data: bytes) -> memoryview:
    """Return the memory of a `bytes` object, to write to."""
    begin = id(data) + bytes.__basicsize__ - 1  # CPython's layout: before the final 0.
    memory = (ctypes.c_char * len(data)).from_address(begin)
    memory.owner = data  # type: ignore[attr-defined]  # Lives as long as any view.
    return memoryview(memory).cast("B")
