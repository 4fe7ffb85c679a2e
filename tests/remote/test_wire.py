# SPDX-License-Identifier: Apache-2.0
"""core.remote.codec against Google's own protobuf, and against whatever may come in."""

import dataclasses
import gc
import itertools
import math
from typing import Any

import gymnasium as gym
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from core.nests import ArraySpec
from core.remote import codec
from core.remote.codec import decode, encode
from core.remote.frames import Frame, Steps, arrays_of, with_stacks
from core.remote.messages import (
    MAX_ERROR,
    Action,
    Array,
    Failure,
    Goodbye,
    Hello,
    Key,
    MultiBinary,
    Option,
    Step,
    ToLearner,
    ToServer,
    Value,
    Welcome,
    WireError,
)
from core.rollout import DTYPES, leaf_spaces

pytest.importorskip("grpc_tools", reason="pip install grpcio-tools")
import grpc  # noqa: E402

SCALARS = {
    "bool": st.booleans(),
    "uint32": st.integers(0, 2**32 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "fixed64": st.integers(0, 2**64 - 1),
    "sint64": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False, allow_infinity=False),
    "string": st.text(max_size=20),
    "bytes": st.binary(max_size=300),
}
NUMBERS = [name for name in DTYPES if name != "bool"]


@pytest.fixture(scope="module")
def protobuf():
    """Google's classes for the messages."""
    return grpc.protos("proto/torchbeast.proto")


# ----------------------------------------------------------------- generated messages


@st.composite
def boxes(draw):
    dtype = np.dtype(draw(st.sampled_from(NUMBERS)))
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    if draw(st.booleans()):
        return gym.spaces.Box(0, 100, shape, dtype.type)
    low = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    return gym.spaces.Box(low, low + dtype.type(2), dtype=dtype.type)


def discretes():
    return st.builds(
        lambda n, start: gym.spaces.Discrete(n, start=start),
        st.integers(1, 2**40),
        st.integers(-(2**40), 2**40),
    )


@st.composite
def multi_discretes(draw):
    shape = draw(st.sampled_from([(1,), (3,), (2, 3)]))
    size = int(np.prod(shape))
    nvec = draw(st.lists(st.integers(1, 99), min_size=size, max_size=size))
    start = draw(st.lists(st.integers(-9, 9), min_size=size, max_size=size))
    return gym.spaces.MultiDiscrete(
        np.array(nvec).reshape(shape), start=np.array(start).reshape(shape)
    )


multi_binaries = st.sampled_from([gym.spaces.MultiBinary(n) for n in (1, 5, (2, 3))])
gym_spaces = st.recursive(
    boxes() | discretes() | multi_discretes() | multi_binaries,
    lambda inner: (
        st.lists(inner, max_size=3).map(gym.spaces.Tuple)
        | st.lists(
            st.tuples(st.text(max_size=5), inner), max_size=3, unique_by=lambda x: x[0]
        ).map(gym.spaces.Dict)
    ),
    max_leaves=6,
)
keys = st.text(max_size=9) | st.integers(0, 2**32 - 1)
arrays = st.builds(
    Array,
    path=st.lists(keys, max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
)
printable = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=20)
options = st.builds(
    Option,
    name=printable,
    value=st.one_of(SCALARS["bool"], SCALARS["sint64"], SCALARS["double"], printable),
)
welcomes = st.builds(
    Welcome,
    protocol=SCALARS["uint32"],
    version=SCALARS["string"],
    env=printable,
    num_envs=st.integers(1, 2**32 - 1),
    num_streams=st.integers(1, 2**32 - 1),
    frames_per_step=st.integers(1, 2**32 - 1),
    observation=gym_spaces,
    action=gym_spaces,
    step_arrays=st.lists(arrays, max_size=4, unique_by=lambda a: a.path).map(tuple),
    action_arrays=st.lists(arrays, max_size=4, unique_by=lambda a: a.path).map(tuple),
    options=st.lists(options, max_size=4, unique_by=lambda o: o.name).map(tuple),
)


def messages_of(cls):
    """Generate messages with nothing to them but their fields."""
    fields = {}
    for field in dataclasses.fields(cls):
        values = SCALARS[field.metadata["kind"]]
        if field.metadata["repeated"]:
            values = st.lists(values, max_size=4).map(tuple)
        fields[field.name] = values
    return st.builds(cls, **fields)


simple = [messages_of(c) for c in (Hello, Step, Action, Failure, Goodbye)]
to_server = st.builds(ToServer, hello=simple[0]) | st.builds(ToServer, action=simple[2])
to_learner = (
    st.builds(ToLearner, welcome=welcomes)
    | st.builds(ToLearner, step=simple[1])
    | st.builds(ToLearner, failure=simple[3])
    | st.builds(ToLearner, goodbye=simple[4])
)
messages = st.one_of(*simple, welcomes, to_server, to_learner)


def official(protobuf, message: Any) -> Any:
    """Return Google's version of one of our messages."""
    result = getattr(protobuf, type(message).__name__)()
    for field in dataclasses.fields(message):
        value, kind = getattr(message, field.name), field.metadata["kind"]

        def convert(value, kind=kind):
            if kind in SCALARS:
                return value
            if kind == "space":
                value = codec.space_message(value)
            elif kind == "key":
                value = Key(**{"index" if type(value) is int else "name": value})
            elif kind == "value":
                names = {bool: "flag", int: "integer", float: "number", str: "text"}
                value = Value(**{names[type(value)]: value})
            return official(protobuf, value)

        if field.metadata["repeated"]:
            getattr(result, field.name).extend(map(convert, value))
        elif value is None:
            pass
        elif kind in SCALARS:
            setattr(result, field.name, value)
        else:
            getattr(result, field.name).CopyFrom(convert(value))
            getattr(result, field.name).SetInParent()
    return result


@hypothesis.given(messages)
def test_what_we_encode_is_what_google_encodes(protobuf, message):
    theirs = official(protobuf, message)
    assert encode(message) == theirs.SerializeToString(deterministic=True)


@hypothesis.given(messages)
def test_we_understand_google(protobuf, message):
    data = official(protobuf, message).SerializeToString()
    assert decode(type(message), data) == message


@hypothesis.given(gym_spaces)
def test_spaces_keep_their_order_dtype_and_bounds(space):
    welcome = dataclasses.replace(WELCOME, observation=space)
    got = decode(Welcome, encode(welcome)).observation
    assert got == space
    assert repr(leaf_spaces(got)) == repr(leaf_spaces(space))


def test_bounds_that_differ_and_infinite_ones_arrive():
    low = np.array([[-np.inf, 0.5, -2]], np.float32)
    box = gym.spaces.Box(low, np.inf, dtype=np.float32)
    got = decode(Welcome, encode(dataclasses.replace(WELCOME, action=box))).action
    np.testing.assert_array_equal(got.low, low)
    assert (got.high == np.inf).all()


def test_one_line_names_the_element_whose_bounds_are_reversed():
    bounds = np.arange(20, dtype=np.float32).reshape(4, 5)
    box = gym.spaces.Box(bounds, bounds + 1)
    box.low[1, 2] = 99
    with pytest.raises(WireError) as caught:
        decode(Welcome, encode(dataclasses.replace(WELCOME, action=box)))
    (line,) = str(caught.value).splitlines()
    assert line.startswith("Welcome.action: element [1, 2] has the bounds 99.0 and 8.0")
    assert len(line) < 400


def test_equal_bounds_travel_as_one_number():
    box = codec.space_message(gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)).box
    assert (box.low, box.high) == (b"\x00", b"\xff")


# ------------------------------------------------------------------ whatever comes in

WELCOME = Welcome(
    protocol=1,
    version="0.1",
    env="Toy",
    num_envs=3,
    num_streams=1,
    frames_per_step=1,
    observation=gym.spaces.Dict(
        a=gym.spaces.Box(0, 1, (2, 5), np.float32),
        b=gym.spaces.Tuple([gym.spaces.Discrete(7), gym.spaces.MultiBinary(5)]),
    ),
    action=gym.spaces.MultiDiscrete([2, 3]),
    step_arrays=(Array(("observation", 0), "float32", (2, 5)),),
    action_arrays=(Array((), "int64", (2,)),),
    options=(Option("sticky_actions", 0.25), Option("episodic_life", False)),
)
SAMPLES = [
    encode(ToLearner(welcome=WELCOME)),
    encode(ToServer(hello=Hello(1, "v", "run", ("a", "b"), 2**63, 3, 4))),
    encode(ToServer(action=Action(5, (b"12345678", b"")))),
    encode(ToLearner(failure=Failure("text", True))),
]


def test_every_truncation_is_an_error_or_a_message():
    for sample in SAMPLES:
        for cls in (ToServer, ToLearner):
            for n in range(len(sample)):
                try:
                    assert isinstance(decode(cls, sample[:n]), cls)
                except WireError:
                    pass


@hypothesis.settings(max_examples=500)
@hypothesis.given(st.data())
def test_mutations_raise_nothing_but_wire_errors(data):
    sample = bytearray(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 4))):
        sample[data.draw(st.integers(0, len(sample) - 1))] = data.draw(
            st.integers(0, 255)
        )
    for cls in (ToServer, ToLearner, Hello, Welcome):
        try:
            decode(cls, bytes(sample))
        except WireError:
            pass


def tag(number: int, wire_type: int) -> bytes:
    return bytes([number << 3 | wire_type])


def field(number: int, data: bytes) -> bytes:
    assert len(data) < 2**14
    size = len(data)
    head = [size] if size < 128 else [size & 127 | 128, size >> 7]
    return tag(number, 2) + bytes(head) + data


def nested_space(depth: int) -> bytes:
    data = field(2, b"")  # Discrete.
    for _ in range(depth):
        data = field(6, field(1, data))
    return data


def space(data: bytes) -> bytes:
    """A Welcome with this observation space."""
    return field(8, data)


MALFORMED = {
    "no message": (ToServer, b"", "expected hello or action, got nothing"),
    "two messages": (ToServer, field(1, b"") + field(2, b""), "got hello and action"),
    "the same twice": (ToServer, field(1, b"") * 2, "ToServer.hello is there twice"),
    "wrong wire type": (ToServer, tag(1, 0) + b"\x01", "hello: expected wire type 2"),
    "unknown wire type": (ToServer, tag(1, 3), "wire type 3"),
    "field number 0": (ToServer, b"\x00\x00", "field number 0"),
    "huge length": (
        ToServer,
        tag(2, 2) + b"\xff" * 9 + b"\x01" + b"x",
        "has 18446744073709551615 bytes, but only 1 follow",
    ),
    "endless number": (Hello, tag(1, 0) + b"\xff" * 11, "more than 64 bits"),
    "65 bits": (Hello, tag(5, 0) + b"\xff" * 9 + b"\x02", "more than 64 bits"),
    "33 bits": (Hello, tag(1, 0) + b"\x80\x80\x80\x80\x10", "expected 32 bits"),
    "bad UTF-8": (Hello, field(3, b"\xff"), "Hello.run_id: expected UTF-8"),
    "short fixed64": (Action, tag(1, 1) + b"1234", "has 8 bytes, but only 4 follow"),
    "object dtype": (Array, field(2, b"object"), "Array.dtype.*'object'"),
    "no dtype": (Welcome, field(10, field(3, b"\x01")), "Array.dtype: expected one of"),
    "rank": (Array, field(2, b"int8") + field(3, b"\x01" * 17), "rank 17"),
    "size": (Array, field(2, b"int8") + field(3, b"\xff\x7f" * 3), "more than"),
    "path": (Array, field(2, b"int8") + field(1, field(1, b"k")) * 17, "17 keys"),
    "key of both": (
        Array,
        field(1, field(1, b"k") + b"\x10\x01"),
        "got name and index",
    ),
    "space too deep": (Welcome, space(nested_space(99)), "nested too deeply"),
    "empty discrete": (Welcome, space(field(2, b"")), "Welcome.observation"),
    "box without bounds": (
        Welcome,
        space(field(1, field(1, b"int8"))),
        "Welcome.observation",
    ),
    "box of objects": (Welcome, space(field(1, field(1, b"O"))), "Box.dtype: 'O'"),
    "huge box": (
        Welcome,
        space(
            field(
                1,
                field(1, b"int8") + field(2, b"\xff" * 4 + b"\x0f") + field(3, b"\0"),
            )
        ),
        "more than",
    ),
    "many large boxes": (
        Welcome,
        space(
            field(
                6,
                field(
                    1,
                    field(
                        1,
                        field(1, b"int8")
                        + field(2, b"\x80\x80\x80\x08")  # 2**24.
                        + field(3, b"\0")
                        + field(4, b"\1"),
                    ),
                )
                * 5,
            )
        ),
        "those before have more than",
    ),
    "huge multi binary": (
        Welcome,
        space(field(4, field(1, b"\xff" * 4 + b"\x0f"))),
        "more than",
    ),
    "option of two values": (
        Welcome,
        field(12, field(1, b"x") + field(2, tag(1, 0) + b"\1" + field(4, b"y"))),
        "Value: expected flag or .* got flag and text",
    ),
    "option of no value": (
        Welcome,
        field(12, field(1, b"x") + field(2, field(9, b"a later type"))),
        "Value: expected flag or .* got nothing",
    ),
    "key twice": (
        Welcome,
        space(field(5, field(1, field(1, b"k") + field(2, field(4, b""))) * 2)),
        "a key twice",
    ),
    "entry without space": (
        Welcome,
        space(field(5, field(1, field(1, b"k")))),
        "Entry.space is missing",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_messages_are_named(name):
    cls, data, said = MALFORMED[name]
    with pytest.raises(WireError, match=said):
        decode(cls, data)


def test_a_field_of_too_many_numbers_is_refused():
    """As are too many fields: see "a million values" in tests/hostile.py."""
    packed = b"\0" * (codec.MAX_VALUES + 1)
    head, another = tag(1, 2) + codec.varint(len(packed)), tag(15, 0) + b"\0"
    with pytest.raises(WireError, match="more than 1048576 values"):
        decode(MultiBinary, head + packed + another)


def test_an_error_is_one_line_of_bounded_length():
    wrong = [1] * 5000  # Not as many as the shape says.
    with pytest.raises(WireError) as error:
        decode(Welcome, space(field(3, field(1, b"\x03") + field(2, bytes(wrong)))))
    assert len(str(error.value)) < 300
    assert len(str(WireError("x" * 5000))) == MAX_ERROR
    assert str(WireError("a\n\x1b[2J")) == "a??[2J"


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(num_envs=0), "num_envs: expected at least 1"),
        (dict(num_streams=0), "num_streams"),
        (dict(observation=None), "observation is missing"),
        (dict(env="\x1b[2J"), r"Welcome.env: expected .* got '\\x1b\[2J'"),
        (dict(env="x" * 201), "at most 200 printable characters"),
        (dict(step_arrays=WELCOME.action_arrays * 2), "the same path"),
        (dict(action_arrays=WELCOME.action_arrays * 4097), "4097, at most 4096"),
        (dict(options=WELCOME.options * 33), "options: 66, at most 64"),
        (dict(options=WELCOME.options * 2), "options: two options have the same name"),
        (dict(options=(Option("x"),)), "Option 'x': the value is missing"),
        (dict(options=(Option("x", math.inf),)), "a finite number, got inf"),
        (dict(options=(Option("x", "\x1b"),)), r"'x': expected .* got '\\x1b'"),
        (dict(options=(Option("x" * 201, 1),)), "Option.name: expected at most"),
    ],
)
def test_a_welcome_that_makes_no_sense_is_refused(change, said):
    with pytest.raises(WireError, match=said):
        decode(Welcome, encode(dataclasses.replace(WELCOME, **change)))


def test_another_protocol_is_said_before_anything_else():
    data = encode(Hello(protocol=2)) + field(10, b"\xff")  # Malformed for us.
    with pytest.raises(WireError, match="the server speaks protocol 2, this is 1"):
        codec.decode_welcome(data)


def test_unknown_fields_are_skipped():
    later = b"".join([tag(15, 0) + b"\x05", tag(14, 1) + bytes(8), field(13, b"xyz")])
    later += tag(12, 5) + bytes(4)
    assert decode(Hello, later + encode(Hello(run_id="x")) + later) == Hello(run_id="x")


def test_repeated_numbers_may_come_unpacked():
    data = field(2, b"int8") + tag(3, 0) + b"\x05" + field(3, b"\x06\x07")
    assert decode(Array, data).shape == (5, 6, 7)


# ----------------------------------------------------------------------------- frames

K = 3
SPEC = {
    "x": ArraySpec((5, 7), np.dtype(np.uint8)),
    "y": (ArraySpec((), np.dtype(bool)), ArraySpec((2,), np.dtype("f4"))),
}


def test_arrays_are_described_in_the_order_of_leaves():
    assert [str(a) for a in arrays_of(SPEC)] == [
        "'x' uint8[5,7]",
        "'y/0' bool[]",
        "'y/1' float32[2]",
    ]
    assert arrays_of(SPEC)[1].path == ("y", 0)
    assert arrays_of(SPEC["x"])[0].path == ()


def fill(frame: Frame) -> list[bytes]:
    rng = np.random.default_rng(1)
    for array in frame.arrays:
        array[...] = rng.integers(0, 99, array.shape)
    return [array.tobytes() for array in frame.arrays]


@pytest.mark.parametrize("kind", [Step, Action])
@pytest.mark.parametrize("seq", [0, 7, 2**64 - 1])
def test_a_frame_is_the_message_of_its_arrays(protobuf, kind, seq):
    frame = Frame(kind, arrays_of(SPEC), K)
    buffers = fill(frame)
    envelope = protobuf.ToLearner() if kind is Step else protobuf.ToServer()
    envelope.ParseFromString(frame.encode(seq))
    message = envelope.step if kind is Step else envelope.action
    assert message.seq == seq
    assert list(message.arrays) == buffers


def test_a_frame_encodes_what_is_written_later():
    frame = Frame(Step, arrays_of(SPEC), K)
    first = frame.encode(0)
    assert decode(ToLearner, first).step.arrays[0][-1] == 0
    frame.arrays[0][2, 4, 6] = 99
    assert frame.encode(1) is first  # Nothing is copied.
    step = decode(ToLearner, first).step
    assert (step.seq, step.arrays[0][-1]) == (1, 99)


def test_messages_of_two_frames_share_nothing():
    frames = [Frame(Step, (Array((), "uint8", (n,)),), 1) for n in (0, 1, 1, 1, 100)]
    for i, frame in enumerate(frames):
        frame.arrays[0][...] = i
    for i, frame in enumerate(frames):
        assert set(decode(ToLearner, frame.encode(0)).step.arrays[0]) <= {i}


def test_arrays_outlive_their_frame():
    arrays = Frame(Step, arrays_of(SPEC), K).arrays
    gc.collect()
    others = [bytearray(array.nbytes) for array in arrays for _ in range(1000)]
    arrays[0][...] = 7  # In memory of nobody else.
    assert (arrays[0] == 7).all() and not any(map(any, others))


def actions_as(data: bytes) -> tuple[tuple[int, bool], list[bytes]]:
    frame = Frame(Action, arrays_of(SPEC), K)
    seq_and_whole = frame.decode_action(data)
    return seq_and_whole, [array.tobytes() for array in frame.arrays]


def test_actions_arrive_whatever_the_order_of_fields(protobuf):
    sender = Frame(Action, arrays_of(SPEC), K)
    buffers = fill(sender)
    assert actions_as(sender.encode(5)) == ((5, False), buffers)
    theirs = protobuf.ToServer(action=protobuf.Action(seq=0, arrays=buffers))
    data = theirs.SerializeToString()
    assert len(data) != len(sender)  # Theirs leaves the 0 out.
    assert actions_as(data) == ((0, False), buffers)
    theirs.action.whole = True
    assert actions_as(theirs.SerializeToString()) == ((0, True), buffers)
    seq = tag(1, 1) + (5).to_bytes(8, "little")
    swapped = b"".join(field(2, buffer) for buffer in buffers) + seq
    assert actions_as(field(2, swapped)) == ((5, False), buffers)


# A stack, of no whole number of words, around and between other arrays.
STACKS = (
    Array(("observation", "a"), "bool", ()),
    Array(("observation", "b"), "uint8", (4, 3, 401), stack=True),
    Array(("observation", "c"), "float32", (4, 401)),
    Array(("observation", "d"), "int16", (2, 1201), stack=True),
    Array(("reward",), "float32", ()),
)


def stacks_of(step: Step, before: list[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays of a step as the protocol says they are to be read."""
    arrays = []
    for spec, data, old in zip(STACKS, step.arrays, before, strict=True):
        dtype = np.dtype(spec.dtype)
        if spec.stack and step.newest_frames:
            frame = np.frombuffer(data, dtype).reshape(K, 1, *spec.shape[1:])
            arrays.append(np.concatenate([old[:, 1:], frame], 1))
        else:
            arrays.append(np.frombuffer(data, dtype).reshape(K, *spec.shape))
    return arrays


@pytest.mark.parametrize("newest_frames", [True, False])
def test_steps_of_stacks_say_all_with_the_newest_frames(protobuf, newest_frames):
    steps = Steps(STACKS, K, newest_frames=newest_frames)
    turns = itertools.cycle(steps.arrays)
    rng = np.random.default_rng(1)
    rows = [np.zeros((K, *spec.shape), spec.dtype) for spec in STACKS]
    read = rows
    for seq in range(40):
        begins = seq == 0 or seq % 7 == 3  # One environment's episode.
        whole = seq % 10 == 0
        for spec, row in zip(STACKS, rows):
            if not spec.stack:
                row[...] = rng.integers(0, 99, row.shape)
                continue
            row[:, :-1] = row[:, 1:].copy()
            row[:, -1] = rng.integers(0, 99, row[:, -1].shape)
            if begins:
                row[seq % K, :-1] = row[seq % K, -1]
            if seq == 25 and len(spec.shape) == 3:
                row[1, -2, ..., -1] += 1  # Not in the first frame, nor in the last.
        for ours, row in zip(next(turns), rows, strict=True):
            ours[...] = row
        data = steps.encode(seq, whole=whole)
        step = decode(ToLearner, data).step
        assert step.seq == seq
        is_short = newest_frames and not begins and not whole and seq != 25
        assert step.newest_frames == is_short
        read = stacks_of(step, read)
        for array, row in zip(read, rows, strict=True):
            np.testing.assert_array_equal(array, row)
        theirs = protobuf.ToLearner.FromString(data).step
        assert theirs.newest_frames == step.newest_frames
        assert tuple(theirs.arrays) == step.arrays


def test_frames_that_differ_in_their_bits_only_are_sent():
    arrays = (Array(("observation",), "float32", (2, 1024), stack=True),)
    steps = Steps(arrays, 1, newest_frames=True)
    steps.encode(0, whole=True)
    steps.arrays[1][0][0, 0] = -0.0  # Equal to what came before.
    assert not decode(ToLearner, steps.encode(1, whole=False)).step.newest_frames


def test_what_may_be_a_stack_is_marked():
    shapes = [(4, 84, 84), (84, 84, 4), (5000,), (4, 1023), (4, 1024), (1, 5000)]
    arrays = [Array(("observation", i), "uint8", s) for i, s in enumerate(shapes)]
    arrays.append(Array(("info", "x"), "uint8", (4, 1024)))
    marked = [array.stack for array in with_stacks(arrays)]
    assert marked == [True, False, False, False, True, False, False]


def test_an_action_that_does_not_fit_is_named_and_changes_nothing():
    frame = Frame(Action, arrays_of(SPEC), K)
    buffers = fill(frame)
    cases = [
        (buffers[:2], r"expected 3 arrays \('x' uint8\[5,7\].*got 2"),
        ([*buffers, b""], "got 4"),
        ([bytes(105), bytes(2), buffers[2]], "'y/0' bool.* 3 envi.*3 bytes, got 2"),
        ([buffers[0] + b"x", *buffers[1:]], "expected 105 bytes, got 106"),
    ]
    for wrong, said in cases:
        with pytest.raises(WireError, match=said):
            frame.decode_action(encode(ToServer(action=Action(1, tuple(wrong)))))
        assert [array.tobytes() for array in frame.arrays] == buffers
    with pytest.raises(WireError, match="another Hello"):
        frame.decode_action(encode(ToServer(hello=Hello())))


def test_every_flipped_byte_of_an_action_is_an_error_or_fits():
    sender = Frame(Action, arrays_of(SPEC), K)
    fill(sender)
    data = sender.encode(3)
    receiver = Frame(Action, arrays_of(SPEC), K)
    for i in range(len(data)):
        try:
            receiver.decode_action(data[:i] + bytes([data[i] ^ 0xFF]) + data[i + 1 :])
        except WireError:
            pass
