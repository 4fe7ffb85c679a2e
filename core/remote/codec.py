# SPDX-License-Identifier: Apache-2.0
"""Encode messages as protocol buffers; decode and check received messages.

Learner and servers use protocol buffers, which any language can read. This file needs
only numpy and gymnasium, so that environment machines need not install protobuf. A
message that is cut off, nested too deeply or different from the .proto raises
`WireError`. It never causes a crash or a large allocation.

    encode(Hello(run_id="x"))  ->  bytes  ->  decode(Hello, data)
"""

import dataclasses
import functools
import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from core.nests import ArraySpec
from core.remote.messages import (
    MAX_DEPTH,
    PROTOCOL,
    Array,
    Box,
    Dict,
    Discrete,
    Entry,
    Key,
    MultiBinary,
    MultiDiscrete,
    Oneof,
    Space,
    Tuple,
    Value,
    Welcome,
    WireError,
    check_array,
    check_shape,
    check_welcome,
)
from core.rollout import DTYPES, wrong_bounds

# Limit for the size of the lower bounds of all Boxes in a message. A few bytes can
# describe large bounds, and Gymnasium allocates eight times as much for a moment.
MAX_BOUNDS_NBYTES = 2**26
MAX_VALUES = 2**20  # Fields and numbers in one message; Python reads each of them.

M = TypeVar("M")


VARINT, I64, LEN, I32 = 0, 1, 2, 5  # Wire types.
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
                out += tag(number, LEN) + varint(len(packed)) + packed
            elif value:
                for v in value:
                    out += _encode_field(number, kind, v)
        elif value != f.default:
            out += _encode_field(number, kind, value)
    return bytes(out)


def _encode_field(number: int, kind: Any, value: Any) -> bytes:
    if kind in _VARINTS:
        return tag(number, VARINT) + _encode_scalar(kind, value)
    if kind == "fixed64":
        return tag(number, I64) + value.to_bytes(8, "little")
    if kind == "double":
        return tag(number, I64) + struct.pack("<d", value)
    if kind == "string":
        data = value.encode()
    elif kind == "bytes":
        data = value
    else:
        if kind in _CONVERTED:
            value = _CONVERTED[kind].to_message(value)
        data = encode(value)
    return tag(number, LEN) + varint(len(data)) + data


def _encode_scalar(kind: str, value: int) -> bytes:
    if kind == "sint64":
        value = value << 1 if value >= 0 else (-value << 1) - 1
    return varint(int(value))


def tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def varint(value: int) -> bytes:
    assert 0 <= value < 2**64, value
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@dataclasses.dataclass
class _Limits:
    """What the rest of a message may still contain."""

    bounds_nbytes: int = MAX_BOUNDS_NBYTES
    values: int = MAX_VALUES


def decode(cls: type[M], data: bytes | memoryview) -> M:
    """Decode a message of class `cls`.

    Skips fields that `cls` does not have: they are from a later version.

    Raises:
      WireError: `data` is malformed; the message names the field.
    """
    return _decode(cls, data, 0, _Limits())


def _decode(cls: type[M], data: bytes | memoryview, depth: int, limits: _Limits) -> M:
    if depth > 4 * MAX_DEPTH:  # A space within a space takes up to three messages.
        raise WireError(f"{cls.__name__}: nested too deeply")
    fields = fields_of(cls)  # type: ignore[arg-type]  # Classes are hashable.
    values: dict[str, Any] = {}
    for number, wire_type, raw in _parse(cls.__name__, memoryview(data)):
        limits.values -= 1
        if limits.values < 0:
            raise WireError(f"{cls.__name__}: more than {MAX_VALUES} values in all")
        if number not in fields:
            continue
        name, kind, repeated = fields[number]
        where = f"{cls.__name__}.{name}"
        if repeated and kind in _VARINTS and wire_type == LEN:
            numbers = itertools.islice(_unpack(where, raw), limits.values + 1)
            items = tuple(_decode_scalar(kind, v) for v in numbers)
            limits.values -= len(items) - 1
        else:
            items = (_decode_value(where, kind, wire_type, raw, depth, limits),)
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
        check_array(message)
    if isinstance(message, Welcome):
        check_welcome(message)
    return message


@functools.cache
def fields_of(cls: Any) -> dict[int, tuple[str, Any, bool]]:
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
        if wire_type == VARINT:
            value, position = _read_varint(where, data, position)
        elif wire_type in (LEN, I64, I32):
            size = {I64: 8, I32: 4}.get(wire_type)
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
    where: str, kind: Any, wire_type: int, raw: Any, depth: int, limits: _Limits
) -> Any:
    is_i64 = kind in ("fixed64", "double")
    expected = VARINT if kind in _VARINTS else I64 if is_i64 else LEN
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
        message: Any = _decode(conversion.message, raw, depth + 1, limits)
        try:
            return conversion.from_message(message, limits)
        except WireError:
            raise
        except Exception as error:  # Gymnasium asserts, numpy raises.
            raise WireError(f"{where}: {error}: {message!s:.200}") from None
    return _decode(kind, raw, depth + 1, limits)


def _decode_scalar(kind: str, value: int) -> int:
    if kind == "sint64":
        return value >> 1 if value % 2 == 0 else -((value + 1) >> 1)
    return bool(value) if kind == "bool" else value


def decode_welcome(data: bytes) -> Welcome:
    """Decode the Welcome that a server's Describe returned.

    Raises:
      WireError: `data` is malformed, or of another protocol.
    """
    # Check the protocol first: another protocol may have other fields.
    for number, wire_type, value in _parse("Welcome", memoryview(data)):
        if number == 1 and wire_type == VARINT and value != PROTOCOL:
            raise WireError(f"the server speaks protocol {value}, this is {PROTOCOL}")
    return decode(Welcome, data)


@dataclasses.dataclass(frozen=True)
class _Conversion:
    message: type
    to_message: Callable[[Any], Any]
    from_message: Callable[[Any, _Limits], Any]


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
    """Return the message that describes a space that `spec_of` accepts."""
    match space:
        case gym.spaces.Box():
            dtype = np.dtype(space.dtype)
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
            items = space.spaces.items()
            return Space(dict=Dict(tuple(Entry(key, sub) for key, sub in items)))
        case gym.spaces.Tuple():
            return Space(tuple=Tuple(tuple(space.spaces)))
    raise AssertionError(space)


def _one_or_all(bounds: np.ndarray, dtype: np.dtype) -> bytes:
    data = np.ascontiguousarray(bounds, dtype.newbyteorder("<")).tobytes()
    first = data[: dtype.itemsize]
    return first if data == first * bounds.size else data


def _gym_space(message: Space, limits: _Limits) -> gym.Space:
    match message.value:
        case Box(dtype, shape, low, high):
            if dtype not in DTYPES:
                raise WireError(f"Box.dtype: {dtype!r:.80}")
            numbers = np.dtype(dtype)
            check_shape("Box", shape, numbers)
            limits.bounds_nbytes -= ArraySpec(shape, numbers).nbytes
            if limits.bounds_nbytes < 0:
                raise WireError(
                    f"Box.shape: {numbers}{list(shape)} and those before have more "
                    f"than {MAX_BOUNDS_NBYTES} bytes"
                )
            lows, highs = (_bounds(data, numbers, shape) for data in (low, high))
            if (lows > highs).any():  # Gymnasium's message has several lines.
                raise ValueError(wrong_bounds(lows, highs))
            return gym.spaces.Box(lows, highs, shape, numbers.type)
        case Discrete(n, start):
            return gym.spaces.Discrete(n, start=start)
        case MultiDiscrete(shape, nvec, start):
            check_shape("MultiDiscrete", shape, np.dtype(np.int64))
            return gym.spaces.MultiDiscrete(
                np.array(nvec, np.int64).reshape(shape),
                start=np.array(start, np.int64).reshape(shape),
            )
        case MultiBinary(shape):
            check_shape("MultiBinary", shape, np.dtype(np.int8))
            return gym.spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
        case Dict(entries):
            keys = [entry.key for entry in entries]
            if len(set(keys)) < len(keys):
                raise WireError(f"Dict.entries: a key twice in {keys}")
            items = [(e.key, e.space) for e in entries if e.space is not None]
            if len(items) < len(entries):
                raise WireError("Entry.space is missing")
            return gym.spaces.Dict(items)  # Sorts the keys of a dict, not of a list.
        case Tuple(spaces):
            return gym.spaces.Tuple(spaces)
    raise AssertionError(message)


def _bounds(data: bytes, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    numbers = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)
    return np.full(shape, numbers[0]) if numbers.size == 1 else numbers.reshape(shape)


_CONVERTED = {
    "key": _Conversion(Key, _key_message, lambda key, limits: key.value),
    "value": _Conversion(Value, _value_message, lambda value, limits: value.value),
    "space": _Conversion(Space, space_message, _gym_space),
}
