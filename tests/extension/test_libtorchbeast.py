# SPDX-License-Identifier: Apache-2.0
"""The package libtorchbeast: arrays in and out, imports, the GIL, signals, exits."""

import ast
import collections
import functools
import gc
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import libtorchbeast
from core.environments import toys
from core.remote import codec
from libtorchbeast import ActorPool, BatchingQueue, ClosedBatchingQueue, DynamicBatcher
from tests.conftest import DEADLINE_S, served, wait_until
from tests.python import run_python

ROOT = Path(__file__).parents[2]
NUMPY_DTYPES = (
    ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
) + ["float16", "float32", "float64"]
TORCH_DTYPES = NUMPY_DTYPES + ["bfloat16"]
NO_SERVER = "unix:/nowhere/torchbeast.sock"

Pair = collections.namedtuple("Pair", "left right")


def through_a_queue(nest):
    """Put a nest in; return what comes out, which is not copied on the way."""
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=10**9)
    queue.enqueue(nest)
    return next(queue)


def joined_by_a_queue(*nests):
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=len(nests))
    for nest in nests:
        queue.enqueue(nest)
    return next(queue)


def bits(array: np.ndarray | torch.Tensor) -> bytes:
    if isinstance(array, torch.Tensor):
        array = array.view(torch.uint8).numpy()
    return array.tobytes()


def some_tensor(dtype: str) -> torch.Tensor:
    """Every bit pattern of a byte, as this dtype. [2, ..]"""
    if dtype == "bool":
        return torch.tensor([[True, False, True], [False, False, True]])
    pattern = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    return pattern.view(getattr(torch, dtype))


# --- Arrays in and out --------------------------------------------------------


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_tensors_of_every_dtype_go_in_and_out_without_a_copy(dtype):
    tensor = some_tensor(dtype)
    out = through_a_queue(tensor)
    assert out.dtype == tensor.dtype
    assert out.shape == tensor.shape
    assert out.data_ptr() == tensor.data_ptr()
    assert bits(out) == bits(tensor)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_tensors_of_every_dtype_are_joined(dtype):
    first, second = some_tensor(dtype), some_tensor(dtype).flip(0)
    out = joined_by_a_queue(first, second)
    assert out.dtype == first.dtype
    assert bits(out) == bits(first) + bits(second)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_arrays_of_every_dtype_go_in_and_out_without_a_copy(dtype):
    array = np.arange(6).astype(dtype).reshape(3, 2)
    out = through_a_queue(array)
    assert out.dtype == getattr(torch, dtype)
    assert out.shape == (3, 2)
    assert out.data_ptr() == array.ctypes.data
    assert bits(out) == bits(array)


@pytest.mark.parametrize(
    "bad, message",
    [
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (np.zeros(2, np.complex64), "complex64"),
        (np.zeros(2, object), "object"),
        (np.zeros(2, "U3"), "<U3"),
        (np.zeros(2, "datetime64[s]"), "datetime64"),
        (np.zeros(2, np.longdouble), "float128"),
        (np.float32(3), "numpy.float32"),
        (1, "got int"),
        ("text", "got str"),
        (None, "NoneType"),
        ({1: torch.zeros(2)}, "strings as keys, got the key 1"),
    ],
)
def test_other_leaves_are_refused_with_their_path(bad, message):
    if "float128" in message and np.dtype(np.longdouble).itemsize == 8:
        pytest.skip("long double is double here")
    with pytest.raises(TypeError, match=r"Leaf \[0\]\['x'\]: .*" + message):
        through_a_queue(({"x": bad},))


def test_tensor_on_another_device_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"on meta; call \.cpu\(\)"):
        through_a_queue(torch.zeros(2, device="meta"))


@pytest.mark.gpu
def test_tensor_on_the_gpu_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"on cuda:0; call \.cpu\(\)"):
        through_a_queue(torch.zeros(2, device="cuda"))


@pytest.mark.parametrize(
    "array",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.arange(12)[::2],
        torch.zeros(1).expand(5),
        np.arange(6).reshape(2, 3).T,
        np.arange(12)[::-2],
        np.broadcast_to(np.float32(3), (4,)),
        np.arange(5, dtype=">i4"),
        np.frombuffer(b"constant", np.uint8),
        np.frombuffer(bytearray(9), np.int64, count=1, offset=1),
    ],
)
def test_what_is_not_plain_writable_memory_is_copied(array):
    out = through_a_queue(array)
    assert out.tolist() == array.tolist()
    own = array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
    assert out.data_ptr() != own
    out[...] = 0  # Harms nobody.


def test_zero_dimensions_and_zero_elements_keep_their_shape():
    nest = {"a": torch.zeros(2, 0, 3), "b": np.zeros((2, 0), np.int32)}
    out = through_a_queue(nest)
    assert out["a"].shape == (2, 0, 3)
    assert out["b"].shape == (2, 0) and out["b"].dtype == torch.int32
    assert joined_by_a_queue(nest, nest)["a"].shape == (4, 0, 3)


def test_gradients_stay_outside():
    leaf = torch.ones(2, requires_grad=True)
    out = through_a_queue((leaf, leaf * 3))
    assert not any(tensor.requires_grad for tensor in out)
    assert out[0].data_ptr() == leaf.data_ptr()
    assert out[1].tolist() == [3, 3]


def test_queued_tensor_keeps_no_graph_alive():
    queue = BatchingQueue(batch_dim=0)
    leaf = torch.ones(2, requires_grad=True)
    gone = weakref.ref(leaf)
    queue.enqueue(leaf * 3)
    del leaf
    gc.collect()
    assert gone() is None
    assert next(queue).tolist() == [3, 3]


def test_batches_are_ordinary_tensors():
    out = joined_by_a_queue(torch.ones(2, 3), torch.ones(1, 3))
    assert out.is_contiguous() and not out.requires_grad
    out += 1
    assert out.numpy().sum() == 18
    assert torch.equal(out.clone(), out)


def test_namedtuples_lists_dicts_and_empty_nests_come_back_as_they_were():
    nest = Pair({"b": [torch.ones(1)], "a": ()}, ([], {}, (torch.zeros(1),)))
    out = through_a_queue(nest)
    assert type(out) is Pair
    assert list(out.left) == ["a", "b"]
    assert out.left["a"] == () and type(out.left["b"]) is list
    assert out.right[:2] == ([], {}) and type(out.right[2]) is tuple


def test_keys_are_sorted_as_python_does():
    keys = ["z", "", "é", "a", "\U0001f600", "\uffff", "A", "aa"]
    out = through_a_queue({key: torch.full((1,), i) for i, key in enumerate(keys)})
    assert list(out) == sorted(keys)
    assert {key: value.item() for key, value in out.items()} == {
        key: i for i, key in enumerate(keys)
    }


def test_list_inside_itself_is_an_error():
    loop: list = []
    loop.append(loop)
    with pytest.raises(RecursionError):
        through_a_queue(loop)


def test_a_part_of_a_batch_keeps_its_memory():
    part = joined_by_a_queue(torch.ones(2), torch.ones(3))[1:3]
    gc.collect()
    others = [joined_by_a_queue(torch.zeros(2), torch.zeros(3)) for _ in range(10)]
    assert part.tolist() == [1, 1]
    del others


def test_what_a_closed_queue_dropped_is_freed(background):
    queue = BatchingQueue()
    tensor = torch.ones(2, 1)
    gone = weakref.ref(tensor)
    queue.enqueue(tensor)
    del tensor
    background(queue.close).result(DEADLINE_S)
    assert gone() is None


class Fresh(list):
    """A list that owns none of the arrays that it returns."""

    def __getitem__(self, i):
        return np.full((1, 1, 200_000), float(i), np.float32)


def test_elements_that_only_the_caller_owns_are_read_before_they_are_gone():
    queue = BatchingQueue()
    queue.enqueue(Fresh([0, 0, 0]))
    assert [x[0, 0, 0].item() for x in next(queue)] == [0.0, 1.0, 2.0]


# --- The GIL, signals ---------------------------------------------------------


def make_pool(address: str = NO_SERVER) -> ActorPool:
    return ActorPool(3, BatchingQueue(), DynamicBatcher(), [address], ())


class Blocked:
    """A call that blocks, how to see that it does, and how to end it."""

    def __init__(self, kind: str):
        self.queue = BatchingQueue(maximum_batch_size=1, maximum_queue_size=1)
        self.batcher = DynamicBatcher()
        self.is_waiting = lambda: self.queue.num_waiting() == 1
        self.end = self.queue.close
        self.error: type[Exception] | None = StopIteration
        if kind == "queue.next":
            self.call = lambda: next(self.queue)
        elif kind == "queue.enqueue":
            self.queue.enqueue(torch.zeros(1, 1))
            self.call = lambda: self.queue.enqueue(torch.zeros(1, 1))
            self.error = ClosedBatchingQueue
        elif kind == "pool.run":
            pool = make_pool()
            self.call, self.end, self.error = pool.run, pool.stop, None
            events: list[str] = []  # There are some when it could not connect.
            self.is_waiting = lambda: events or events.extend(pool.take_events())
        else:
            self.is_waiting = lambda: self.batcher.num_waiting() == 1
            self.end = self.batcher.close
            if kind == "batcher.next":
                self.call = lambda: next(self.batcher)
            else:
                self.call = lambda: self.batcher.compute(torch.zeros(1, 1))
                self.error = ClosedBatchingQueue


KINDS = [
    "queue.next",
    "queue.enqueue",
    "batcher.next",
    "batcher.compute",
    "pool.run",
]


@pytest.mark.parametrize("kind", KINDS)
def test_other_threads_run_while_a_call_blocks(kind, background):
    blocked = Blocked(kind)
    future = background(blocked.call)
    wait_until(blocked.is_waiting)
    assert sum(range(10**6)) == 499999500000  # Many chances to hand over the GIL.
    assert blocked.is_waiting() and not future.done()
    blocked.end()
    if blocked.error is None:
        future.result(DEADLINE_S)
    else:
        with pytest.raises(blocked.error):
            future.result(DEADLINE_S)


class Alarm(Exception):
    pass


@pytest.fixture
def handler():
    """Calls `raising` or `passing` by number: those of SIGUSR1 and SIGUSR2."""
    handled = []

    def raise_alarm(*_):
        raise Alarm

    old = [
        signal.signal(signal.SIGUSR1, raise_alarm),
        signal.signal(signal.SIGUSR2, lambda *_: handled.append(True)),
    ]
    yield handled
    signal.signal(signal.SIGUSR1, old[0])
    signal.signal(signal.SIGUSR2, old[1])


@pytest.mark.parametrize("kind", KINDS)
def test_signal_ends_a_blocked_call_of_the_main_thread(kind, handler, background):
    blocked = Blocked(kind)

    def send():
        wait_until(blocked.is_waiting)
        os.kill(os.getpid(), signal.SIGUSR1)

    sent = background(send)
    with pytest.raises(Alarm):
        blocked.call()
    sent.result(DEADLINE_S)
    assert blocked.queue.num_waiting() == blocked.batcher.num_waiting() == 0


def test_signal_whose_handler_returns_does_not_end_the_call(handler, background):
    queue = BatchingQueue()

    def send():
        wait_until(lambda: queue.num_waiting() == 1)
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_until(lambda: handler)
        queue.enqueue(torch.ones(1, 1))

    sent = background(send)
    assert next(queue).item() == 1
    sent.result(DEADLINE_S)


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_may_use_the_library_while_its_call_blocks(kind, handler, background):
    """The call that blocks still ends by a later signal."""
    blocked, other = Blocked(kind), BatchingQueue()
    before = signal.signal(signal.SIGALRM, lambda *_: other.enqueue(torch.ones(1, 1)))

    def send():
        wait_until(blocked.is_waiting)
        os.kill(os.getpid(), signal.SIGALRM)
        wait_until(other.size)
        os.kill(os.getpid(), signal.SIGUSR1)

    sent = background(send)
    try:
        with pytest.raises(Alarm):
            blocked.call()
    finally:
        signal.signal(signal.SIGALRM, before)
    sent.result(DEADLINE_S)


def test_interrupted_next_loses_nothing(handler, background):
    queue = BatchingQueue(minimum_batch_size=2)
    queue.enqueue(torch.ones(1, 1))

    def send():
        wait_until(lambda: queue.num_waiting() == 1)
        os.kill(os.getpid(), signal.SIGUSR1)

    sent = background(send)
    with pytest.raises(Alarm):
        next(queue)
    sent.result(DEADLINE_S)
    queue.enqueue(torch.zeros(1, 1))
    assert next(queue).tolist() == [[1, 0]]


def test_signal_ends_describe(handler, background):
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as mute:
        mute.bind(f"{folder}/x.sock")
        mute.listen()

        def send():
            connection, _ = mute.accept()
            os.kill(os.getpid(), signal.SIGUSR1)
            return connection

        sent = background(send)
        with pytest.raises(Alarm):
            libtorchbeast.describe(f"unix:{folder}/x.sock", timeout_s=DEADLINE_S)
        sent.result(DEADLINE_S).close()


def test_signal_ends_a_run_whose_waits_are_all_short(handler, background, serve):
    """The learner is the bottleneck: each of its batches ends a wait of the pool."""
    address = serve(toys.Catch, num_envs=1, num_streams=4).address
    queue = BatchingQueue(maximum_batch_size=1, maximum_queue_size=1)
    batcher = DynamicBatcher()
    pool = ActorPool(1, queue, batcher, [address] * 4, ())
    interrupted, ended = threading.Event(), threading.Event()

    def act():
        for batch in batcher:
            K = batch.get_inputs()[0][1].shape[1]
            batch.set_outputs(((torch.zeros(1, K, dtype=torch.int64),), ()))

    def learn():
        for _ in queue:
            ended.wait(1 / 30)

    def raise_alarm(*_):
        interrupted.set()
        raise Alarm

    def send():
        try:
            wait_until(lambda: queue.dequeued() > 10)
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(interrupted.is_set)
        finally:
            pool.stop()

    signal.signal(signal.SIGUSR1, raise_alarm)
    threads = [background(function) for function in (act, learn, send)]
    try:
        with pytest.raises(Alarm):
            pool.run()
    finally:
        ended.set()
        batcher.close()
        queue.close()
        for thread in threads:
            thread.result(DEADLINE_S)


def test_ctrl_c_inside_allocate_is_no_failure_of_allocate():
    def allocate(nbytes):
        signal.raise_signal(signal.SIGINT)
        return bytearray(nbytes)

    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2, allocate=allocate)
    for _ in range(2):
        queue.enqueue(torch.ones(1))
    with pytest.raises(KeyboardInterrupt):
        next(queue)


@pytest.mark.parametrize("num_calls", [1, 2])
def test_ctrl_c_in_an_allocate_for_other_threads_is_raised_here(background, num_calls):
    """The thread that sets the outputs allocates the answer of each `compute`."""
    sizes = []

    def allocate(nbytes):
        sizes.append(nbytes)
        if len(sizes) == 2:  # The first one is of the inputs.
            signal.raise_signal(signal.SIGINT)
        return bytearray(nbytes)

    batcher = DynamicBatcher(minimum_batch_size=num_calls, allocate=allocate)
    calls = [background(batcher.compute, torch.ones(1, 1)) for _ in range(num_calls)]
    batch = next(batcher)
    with pytest.raises(KeyboardInterrupt):
        batch.set_outputs(batch.get_inputs())
    for call in calls:
        with pytest.raises(RuntimeError, match="has interrupted the main thread"):
            call.result(DEADLINE_S)


# --- Whole processes ----------------------------------------------------------


def run(script: str, *flags: str, cwd: Path = ROOT) -> str:
    """Run a script in a new interpreter, which must end well and say nothing."""
    done = run_python(script, python=[sys.executable, *flags], cwd=cwd)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


USE = """
queue = libtorchbeast.BatchingQueue(minimum_batch_size=2)
queue.enqueue(torch.ones(2, 1))
queue.enqueue(torch.zeros(2, 1))
assert next(queue).tolist() == [[1, 0], [1, 0]]
assert torch.nn.Linear(3, 2)(torch.ones(1, 3)).sum().backward() is None
channel = grpc.insecure_channel("unix:/nowhere/torchbeast.sock")
try:
    channel.unary_unary("/x/y")(b"", timeout=0.01)
except grpc.RpcError:
    pass
channel.close()
try:
    libtorchbeast.describe("unix:/nowhere/torchbeast.sock", timeout_s=0.01)
except libtorchbeast.ServerUnavailable as error:
    assert "/nowhere/torchbeast.sock" in str(error)
"""


def test_import_loads_neither_torch_nor_grpcio():
    loaded = "print(sorted({'torch', 'numpy', 'grpc'} & set(sys.modules)))"
    assert run(f"import sys, libtorchbeast; {loaded}") == "[]\n"


def test_without_torch_arrays_come_out():
    script = """
import sys
sys.modules["torch"] = None  # Not installed.
import numpy as np, libtorchbeast
queue = libtorchbeast.BatchingQueue(minimum_batch_size=2, maximum_batch_size=2)
for _ in range(2):
    queue.enqueue((np.ones((3, 1), bool), [np.full((2, 1), 7, np.uint16)]))
done, [x] = next(queue)
assert type(done) is np.ndarray and done.dtype == bool and done.all()
assert x.dtype == np.uint16 and x.tolist() == [[7, 7], [7, 7]]
x += 1
assert x.tolist() == [[8, 8], [8, 8]]
try:
    queue.enqueue(3)
except TypeError as error:
    print(error)
"""
    assert "got int" in run(script)


@pytest.mark.parametrize("module", ["numpy.matrixlib", "torch"])
def test_a_handler_may_convert_while_the_first_conversion_imports(module):
    script = f"""
import signal, sys
import libtorchbeast
handled = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r} and not handled:
            handled.append(name)
            signal.raise_signal(signal.SIGALRM)
        if name == "torch":
            raise ModuleNotFoundError("not installed", name=name)

def convert(*_):
    try:
        libtorchbeast.BatchingQueue().enqueue(3)
    except (AttributeError, TypeError) as error:  # Half of numpy may be missing.
        print(error)

sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGALRM, convert)
convert()
"""
    in_handler, after = run(script).splitlines()
    assert in_handler and "got int" in after


def test_a_torch_that_cannot_be_imported_is_no_missing_torch(tmp_path):
    (tmp_path / "torch.py").write_text("import what_torch_needs")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import numpy as np, libtorchbeast
try:
    libtorchbeast.BatchingQueue().enqueue(np.ones((1, 1)))
except ModuleNotFoundError as error:
    print(error)
"""
    assert run(script) == "No module named 'what_torch_needs'\n"


def test_a_batch_for_which_there_is_no_memory_says_how_large_it_is():
    script = """
import sys
sys.modules["torch"] = None
import resource, numpy as np, libtorchbeast
queue = libtorchbeast.BatchingQueue(minimum_batch_size=2)
array = np.zeros((1, 1, 10**9), np.uint8)
queue.enqueue({"frame": array})
queue.enqueue({"frame": array})
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 10**8, -1))
try:
    next(queue)
except MemoryError as error:
    print(error)
"""
    said = run(script)
    assert said.startswith("no memory for an array uint8[1,2,1000000000] of 2000000000")
    assert "batch size" in said


def test_a_pool_whose_threads_cannot_all_start_is_an_error():
    script = """
import sys
sys.modules["torch"] = None
import resource, libtorchbeast as lib

def make_pool(num_threads):
    queue, batcher = lib.BatchingQueue(), lib.DynamicBatcher()
    return lib.ActorPool(3, queue, batcher, ["a:1"], (), num_threads=num_threads)

pool = make_pool(1)  # So gRPC has started its own threads.
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 10**8, -1))
try:
    make_pool(100)
except RuntimeError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
make_pool(2).stop()
"""
    said = run(script)
    assert "num_threads is 100" in said and "ulimit -u" in said


# Threads that block in every way when the end comes.
BLOCKED = """
import sys
sys.modules["torch"] = None  # Its import takes longer than everything here.
import numpy as np, threading, libtorchbeast as lib

def start(function, *args):
    threading.Thread(target=function, args=args, daemon=True).start()

x = np.ones((1, 1))
full = lib.BatchingQueue(
    maximum_batch_size=1, maximum_queue_size=1, allocate=bytearray
)
full.enqueue(x)
empty = lib.BatchingQueue()
unanswered = lib.DynamicBatcher(minimum_batch_size=3, timeout_ms=None)
held = lib.DynamicBatcher(timeout_ms=1)
start(full.enqueue, x)
start(next, empty)
start(next, unanswered)
start(unanswered.compute, x)
start(held.compute, x)
batch = next(held)
pool = lib.ActorPool(3, empty, unanswered, ["unix:/nowhere/x.sock"], ())
start(pool.run)
while full.num_waiting() + empty.num_waiting() + unanswered.num_waiting() < 4:
    pass
"""

# And threads that are busy then.
BUSY = """
batcher = lib.DynamicBatcher(timeout_ms=1, allocate=bytearray)
answered = threading.Semaphore(0)

def serve():
    for batch in batcher:
        batch.set_outputs(batch.get_inputs() + 1)

def ask():
    while True:
        batcher.compute(x)
        answered.release()

for _ in range(2):
    start(serve)
for _ in range(4):
    start(ask)
for _ in range(100):
    answered.acquire()
"""


@pytest.mark.parametrize("attempt", range(5))
def test_interpreter_ends_while_threads_block_or_are_busy(attempt):
    assert run(BLOCKED + BUSY) == ""


@pytest.mark.parametrize(
    "order",
    # Of each two, each one comes first.
    [
        ("torch", "grpc", "libtorchbeast"),
        ("libtorchbeast", "grpc", "torch"),
    ],
    ids="-".join,
)
def test_torch_grpcio_and_libtorchbeast_live_together_in_either_order(order):
    """To the end of the interpreter, at which threads block.

    No thread is busy then: torch itself aborts when the interpreter ends under one of
    its operations in a daemon thread.
    """
    with_torch = BLOCKED.replace('sys.modules["torch"] = None', "import torch")
    assert run("".join(f"import {name}\n" for name in order) + USE + with_torch) == ""


def test_exit_handler_may_still_use_the_queues():
    script = """
import atexit
joined = []

@atexit.register  # Before the import: so it runs after libtorchbeast's own.
def end():
    queue.close()
    thread.join()
    print(joined)

import sys
sys.modules["torch"] = None
import threading, libtorchbeast
queue = libtorchbeast.BatchingQueue()
thread = threading.Thread(target=lambda: joined.append(list(queue)), daemon=True)
thread.start()
"""
    assert run(script) == "[[]]\n"


# A pool that tries to reach its server.
RUN_POOL = """
address = "unix:/nowhere/x.sock"
pool = lib.ActorPool(3, lib.BatchingQueue(), lib.DynamicBatcher(), [address], ())
threading.Thread(target=pool.run, daemon=True).start()
while not pool.take_events():
    pass
"""


def test_pools_are_stopped_before_the_interpreter_ends():
    script = """
import atexit
atexit.register(lambda: print(pool.stats()["states"]))  # After libtorchbeast's own.
import sys
sys.modules["torch"] = None
import threading, libtorchbeast as lib
"""
    assert run(script + RUN_POOL) == "['stopped']\n"


@pytest.mark.parametrize("attempt", range(10))
def test_ten_pools_come_and_go_and_the_interpreter_ends(attempt):
    """Ten times ten pools: closed, left open, or dropped while they run."""
    script = f"""
import sys
sys.modules["torch"] = None
import threading, libtorchbeast as lib
kept = []
for i in range(10):
    queue, batcher = lib.BatchingQueue(), lib.DynamicBatcher()
    pool = lib.ActorPool(3, queue, batcher, ["unix:/nowhere/x.sock"] * 3, ())
    thread = threading.Thread(target=pool.run, daemon=True)
    thread.start()
    while i % 2 and not pool.take_events():  # Or it may be starting still.
        pass
    if (i + {attempt}) % 3 == 0:
        kept.append((pool, queue, batcher))
        continue
    pool.stop()
    pool.stop()
    batcher.close()
    queue.close()
    thread.join()
"""
    assert run(script) == ""


def test_interpreter_waits_for_a_running_allocate():
    script = """
import sys
sys.modules["torch"] = None
import atexit, threading, numpy as np, libtorchbeast as lib

def allocate(nbytes):
    inside.set()
    ending.wait()
    sum(range(10**6))
    print("allocated", flush=True)
    return bytearray(nbytes)

inside, ending = threading.Event(), threading.Event()
atexit.register(ending.set)
queue = lib.BatchingQueue(minimum_batch_size=2, allocate=allocate)
queue.enqueue(np.ones((1, 1)))
queue.enqueue(np.ones((1, 1)))
threading.Thread(target=next, args=[queue], daemon=True).start()
inside.wait()
"""
    assert run(script) == "allocated\n"


def test_ctrl_c_ends_a_program_that_waits(start_program):
    script = """
import sys
sys.modules["torch"] = None
import libtorchbeast
queue = libtorchbeast.BatchingQueue()
print("waiting", flush=True)
next(queue)
"""
    program = start_program(sys.executable, "-c", script)
    program.wait_for_text("waiting\n")
    program.process.send_signal(signal.SIGINT)
    assert program.wait() == -signal.SIGINT
    assert program.text().endswith("KeyboardInterrupt\n")


def test_ctrl_c_ends_a_program_whose_allocate_hangs_at_its_end(start_program):
    script = """
import sys
sys.modules["torch"] = None
import atexit, threading, numpy as np, libtorchbeast as lib

def allocate(nbytes):
    inside.set()
    threading.Event().wait()  # As a driver that hangs.

inside = threading.Event()
queue = lib.BatchingQueue(minimum_batch_size=2, allocate=allocate)
queue.enqueue(np.ones((1, 1)))
queue.enqueue(np.ones((1, 1)))
threading.Thread(target=next, args=[queue], daemon=True).start()
inside.wait()
atexit.register(lambda: print("ending", flush=True))
"""
    program = start_program(sys.executable, "-c", script)
    program.wait_for_text("ending\n")

    def has_ended() -> bool:
        program.process.send_signal(signal.SIGINT)  # The first may come too early.
        return program.process.poll() is not None

    wait_until(has_ended)


# --- The package --------------------------------------------------------------


def test_errors_have_the_bases_that_callers_catch():
    assert issubclass(libtorchbeast.ClosedBatchingQueue, RuntimeError)
    assert issubclass(libtorchbeast.AsyncError, RuntimeError)
    assert issubclass(libtorchbeast.ActorError, ConnectionError)
    for name in libtorchbeast.__all__:
        if name not in ("Server", "describe"):
            assert getattr(libtorchbeast, name).__module__ == "libtorchbeast"


def test_server_is_there_when_asked_for():
    from core.remote.env_server import Server

    assert libtorchbeast.Server is Server
    with pytest.raises(AttributeError, match="nothing"):
        libtorchbeast.nothing  # noqa: B018


def test_pool_refuses_arguments_without_sense():
    queue, batcher = BatchingQueue(), DynamicBatcher()
    with pytest.raises(TypeError):
        ActorPool(3, None, batcher, [NO_SERVER], ())
    with pytest.raises(TypeError):
        ActorPool(3, queue, batcher, NO_SERVER, ())  # Not a list.
    with pytest.raises(TypeError, match="got int"):
        ActorPool(3, queue, batcher, [NO_SERVER], (1,))
    with pytest.raises(ValueError):
        ActorPool(0, queue, batcher, [NO_SERVER], ())
    with pytest.raises(ValueError):
        ActorPool(3, queue, batcher, ["no address"], ())
    with pytest.raises(ValueError, match="welcome is malformed"):
        ActorPool(3, queue, batcher, [NO_SERVER], (), welcome=b"x")
    bad_range = (("observation", "direction", 0), [0], [3, 4])
    text = r"1 least and 2 greatest values for observation\.direction\[0\]"
    with pytest.raises(ValueError, match=text):
        ActorPool(3, queue, batcher, [NO_SERVER], (), value_ranges=[bad_range])
    with pytest.raises(ValueError, match="max_streams is 1"):
        ActorPool(3, queue, batcher, [NO_SERVER] * 2, (), max_streams=1)


def test_pool_that_never_ran_has_played_nothing():
    pool = make_pool()
    assert pool.count() == 0
    stats = pool.stats()
    assert stats["received"] == stats["dequeued"] == stats["in_flight"] == 0
    assert list(stats["addresses"]) == [NO_SERVER]
    assert pool.take_events() == []
    pool.stop()


def test_the_addresses_of_a_pool_are_replaced():
    queue, batcher = BatchingQueue(), DynamicBatcher()
    pool = ActorPool(3, queue, batcher, [], (), max_streams=2)
    assert pool.stats()["states"] == ["unused"] * 2
    assert pool.set_addresses(["a:1", "b:1", "c:1"]) == 1
    assert pool.stats()["stream_addresses"] == ["a:1", "b:1"]
    assert pool.set_addresses(["c:1", "b:1"]) == 0
    assert list(pool.stats()["addresses"]) == ["c:1", "b:1"]
    with pytest.raises(ValueError, match="neither unix:PATH nor HOST:PORT"):
        pool.set_addresses(["a:1", "d"])
    assert list(pool.stats()["addresses"]) == ["c:1", "b:1"]
    pool.stop()


def public(names) -> set[str]:
    return {n for n in names if not n.startswith("_") or n in ("__iter__", "__next__")}


def parameters(function: ast.FunctionDef) -> list[tuple[str, str | None]]:
    """Names and defaults, and where the keyword-only ones begin."""

    def with_defaults(args, defaults):
        defaults = [None] * (len(args) - len(defaults)) + list(defaults)
        return [(a.arg, d and ast.unparse(d)) for a, d in zip(args, defaults)]

    args = function.args
    return (
        with_defaults(args.args, args.defaults)
        + [("*", None)] * bool(args.kwonlyargs)
        + with_defaults(args.kwonlyargs, args.kw_defaults)
    )


def bound_parameters(function) -> list[tuple[str, str | None]]:
    """The same, from the first line of what pybind11 documents."""
    signature = function.__doc__.splitlines()[0]
    return parameters(ast.parse(f"def {signature}: ...").body[0])


def test_stub_agrees_with_the_module():
    from libtorchbeast import _C

    stub = ast.parse((ROOT / "libtorchbeast" / "_C.pyi").read_text())
    stubs = {
        n.name: n for n in stub.body if isinstance(n, ast.ClassDef | ast.FunctionDef)
    }
    assert (
        public(stubs) == public(vars(_C)) == public(libtorchbeast.__all__) - {"Server"}
    )
    for name, node in stubs.items():
        if isinstance(node, ast.FunctionDef):
            assert parameters(node) == bound_parameters(getattr(_C, name))
            continue
        bound = getattr(_C, name)
        if issubclass(bound, Exception):
            assert ast.unparse(node.bases[0]) == bound.__base__.__name__
            continue
        methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
        assert public(methods) == public(vars(bound))
        for method, definition in methods.items():
            assert parameters(definition) == bound_parameters(getattr(bound, method))


def test_every_bound_method_says_whether_it_blocks():
    for bound in (BatchingQueue, DynamicBatcher, ActorPool, libtorchbeast.Batch):
        for name in public(vars(bound)) - {"__iter__"}:
            assert "lock" in getattr(bound, name).__doc__, name


@pytest.fixture
def without_extension(tmp_path) -> Path:
    """A checkout whose extension was not compiled."""
    shutil.copytree(
        ROOT / "libtorchbeast",
        tmp_path / "libtorchbeast",
        ignore=shutil.ignore_patterns("*.so"),
    )
    return tmp_path


def test_import_without_the_extension_says_what_to_install(without_extension):
    script = """
try:
    import libtorchbeast
except ImportError as error:
    print(error)
"""
    said = run(script, "-S", cwd=without_extension)  # Nothing that is installed.
    assert "was not compiled" in said
    for command in ("apt-get install", "dnf install", "brew install", "conda install"):
        assert command in said
    assert "pip install -e ." in said


@pytest.mark.parametrize("missing, required", [("PKG_CONFIG", False), ("CXX", True)])
def test_build_without_a_compiler_or_grpc_fails_only_if_asked_to(
    tmp_path, missing, required
):
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext"]
        + ["--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"],
        cwd=ROOT,
        env=os.environ
        | {"PKG_CONFIG": "true"}  # The real one needs a second for gRPC.
        | {missing: "/nowhere/tool"}
        | {"TORCHBEAST_REQUIRE_EXTENSION": str(int(required))},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == required, said
    assert "libtorchbeast was not compiled: " in said
    assert "/nowhere/tool" in said
    assert "apt-get install g++ pkg-config libgrpc++-dev" in said
    assert not list(tmp_path.rglob("*.so"))


def test_a_signal_handler_may_stop_the_pool_that_it_interrupts(background):
    pool = ActorPool(5, BatchingQueue(), DynamicBatcher(), [NO_SERVER], ())

    def send() -> None:
        wait_until(pool.take_events)  # It runs: it could not connect.
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, lambda *_: pool.stop())
    try:
        background(send)
        pool.run()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_signal_handler_that_raises_while_run_is_ending_raises_its_error(background):
    queue, batcher = BatchingQueue(), DynamicBatcher()
    pool = ActorPool(5, queue, batcher, [NO_SERVER], ())

    def handle(signum, frame):
        queue.close()  # run() ends for this reason as well.
        raise KeyboardInterrupt

    def send() -> None:
        wait_until(pool.take_events)  # It runs: it could not connect.
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            background(send)
            pool.run()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_signal_ends_a_stop_that_waits_for_a_thread_that_hangs(background):
    allocates, stops, interrupted, end = (threading.Event() for _ in range(4))

    def allocate(nbytes: int) -> bytearray:
        allocates.set()
        end.wait(DEADLINE_S)  # As a driver that hangs.
        return bytearray(nbytes)

    def handle(signum, frame):
        interrupted.set()
        raise KeyboardInterrupt

    def send() -> bool:
        stops.wait(DEADLINE_S)
        os.kill(os.getpid(), signal.SIGALRM)
        try:
            return interrupted.wait(DEADLINE_S / 2)
        finally:
            end.set()

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with tempfile.TemporaryDirectory() as folder:
            address = f"unix:{folder}/s"
            with served(toys.Catch, address, num_envs=1):
                queue = BatchingQueue(allocate=allocate)
                pool = ActorPool(5, queue, DynamicBatcher(), [address], ())
                runs = background(pool.run)
                wait_until(allocates.is_set)
                with pytest.raises(KeyboardInterrupt):
                    sent = background(send)
                    stops.set()
                    pool.stop()
                assert sent.result(DEADLINE_S)
                pool.stop()
                runs.result(DEADLINE_S)
    finally:
        signal.signal(signal.SIGALRM, before)


FORK = """
import libtorchbeast, os, sys, threading
queue, batcher = libtorchbeast.BatchingQueue(), libtorchbeast.DynamicBatcher()
pool = libtorchbeast.ActorPool(5, queue, batcher, [sys.argv[1]], ())
thread = threading.Thread(target=pool.run)
thread.start()
while not pool.take_events():
    pass
child = os.fork()
if not child:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
pool.stop()
thread.join()
"""


def test_a_forked_child_of_a_process_with_a_live_pool_can_exit():
    done = run_python(FORK, NO_SERVER, python=[sys.executable, "-W", "ignore"])
    assert (done.stdout, done.returncode) == ("7\n", 0), done.stderr


def test_a_forked_child_waits_for_no_lock_that_threads_of_its_parent_hold():
    """The threads hold the locks often, and some of the children need one."""
    script = f"""
import os, signal, sys
sys.modules["torch"] = None
import threading, numpy as np, libtorchbeast as lib

def drop():  # Often holds the lock of the list of dropped references.
    while True:
        queue = lib.BatchingQueue()
        queue.enqueue(many)
        about_to_drop.release()
        queue.close()

def join():  # Often holds the lock of the memory of `queue`.
    while True:
        queue.enqueue(many)
        queue.enqueue(many)
        about_to_join.release()
        next(queue)

def use():
    kept.clear()
    queue = lib.BatchingQueue()
    queue.enqueue(x)
    assert next(queue).tolist() == [[1]]

x = np.ones((1, 1))
many = [x] * 2000
queue = lib.BatchingQueue(minimum_batch_size=2)
queue.enqueue(many)
queue.enqueue(many)
kept = [next(queue)]
about_to_drop, about_to_join = threading.Semaphore(0), threading.Semaphore(0)
for thread in (drop, join):
    threading.Thread(target=thread, daemon=True).start()
statuses = set()
for i in range(80):
    (about_to_join if i % 2 else about_to_drop).acquire()
    sum(range(300 * (i % 13)))  # While the thread holds a lock, or does not.
    child = os.fork()
    if not child:
        signal.setitimer(signal.ITIMER_REAL, {DEADLINE_S / 4})
        use()
        os._exit(0)
    statuses.add(os.waitpid(child, 0)[1])
print(statuses, flush=True)
os._exit(0)
"""
    assert run(script, "-W", "ignore") == "{0}\n"


def test_a_pool_made_in_a_forked_child_is_stopped_before_the_child_ends():
    script = """
import atexit
atexit.register(lambda: child or print(pool.stats()["states"]))
import os, sys
sys.modules["torch"] = None
import threading, libtorchbeast as lib
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(script + RUN_POOL) == "['stopped']\n"


def test_a_signal_ends_a_blocked_call_in_a_child_that_another_thread_forked():
    script = f"""
import os, signal, sys
sys.modules["torch"] = None
import threading, libtorchbeast as lib

class Alarm(Exception):
    pass

def handle(*_):
    raise Alarm

signal.signal(signal.SIGALRM, handle)

def fork():
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return
    signal.alarm(1)
    threading.Timer({DEADLINE_S / 4}, os._exit, [1]).start()
    try:
        next(lib.BatchingQueue())
    except Alarm:
        os._exit(7)

thread = threading.Thread(target=fork)
thread.start()
thread.join()
"""
    assert run(script, "-W", "ignore") == "7\n"


@pytest.mark.parametrize("timeout_s", [-1.0, math.nan])
def test_describe_refuses_a_time_limit_that_is_none(timeout_s):
    with pytest.raises(ValueError, match="timeout_s is .* expected a number of sec"):
        libtorchbeast.describe(NO_SERVER, timeout_s=timeout_s)


def test_describe_ends_soon_if_nobody_listens_at_the_address(tmp_path, background):
    address = f"unix:{tmp_path}/late"
    describe = functools.partial(libtorchbeast.describe, timeout_s=math.inf)
    with pytest.raises(libtorchbeast.ServerUnavailable, match=f"{address} does not "):
        background(describe, address).result(DEADLINE_S)
    with served(toys.Catch, address, num_envs=1, num_streams=1):
        codec.decode_welcome(background(describe, address).result(DEADLINE_S))
