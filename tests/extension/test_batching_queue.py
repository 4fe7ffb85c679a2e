# SPDX-License-Identifier: Apache-2.0
"""BatchingQueue as Python sees it. csrc/tests has the tests of the C++ itself."""

import collections
import gc
import weakref

import numpy as np
import pytest
import torch

from libtorchbeast import BatchingQueue, ClosedBatchingQueue
from tests.conftest import DEADLINE_S, wait_until

T, B = 5, 3
Pair = collections.namedtuple("Pair", "left right")


def item(value: int, rows: int = 1) -> torch.Tensor:
    return torch.full((T, rows), value)


def test_arguments_without_sense_are_refused():
    said = r"Max queue size must be >= max batch size \(3\), got 2"
    with pytest.raises(ValueError, match=said):
        BatchingQueue(maximum_batch_size=3, maximum_queue_size=2)


def test_arguments_may_be_given_by_position():
    queue = BatchingQueue(0, 2, 4, 1000, False, 8)
    queue.enqueue(torch.zeros(2, 7))
    assert next(queue).shape == (2, 7)


def test_a_batch_has_the_structure_of_its_first_item():
    queue = BatchingQueue(minimum_batch_size=2, maximum_batch_size=2)
    for value in (1, 2):
        leaves = [item(10 * value + i) for i in range(4)]
        queue.enqueue(
            {"b": Pair(leaves[0], [leaves[1]]), "a": (leaves[2], {"c": leaves[3]})}
        )
    batch = next(queue)
    assert list(batch) == ["a", "b"]
    assert type(batch["b"]) is Pair
    assert type(batch["b"].right) is list
    assert type(batch["a"]) is tuple
    for i, leaf in enumerate(
        [batch["b"].left, batch["b"].right[0], batch["a"][0], batch["a"][1]["c"]]
    ):
        assert torch.equal(leaf, torch.cat([item(10 + i), item(20 + i)], dim=1))


def test_lists_and_tuples_match():
    queue = BatchingQueue(minimum_batch_size=2)
    queue.enqueue((item(1), [item(2)]))
    queue.enqueue([item(3), (item(4),)])
    first, (second,) = next(queue)
    assert first[0].tolist() == [1, 3]
    assert second[0].tolist() == [2, 4]


def test_close_ends_every_loop_over_the_queue(background):
    queue = BatchingQueue()
    loops = [background(list, queue) for _ in range(3)]
    wait_until(lambda: queue.num_waiting() == 3)
    queue.close()
    assert [loop.result(DEADLINE_S) for loop in loops] == [[], [], []]
    assert queue.is_closed()


def test_closed_queue_takes_and_gives_nothing():
    queue = BatchingQueue(maximum_batch_size=2)
    queue.enqueue(item(1, rows=2))
    assert not queue.is_closed()
    queue.close()
    with pytest.raises(ClosedBatchingQueue):
        queue.enqueue(item(2))
    with pytest.raises(StopIteration):
        next(queue)
    assert queue.dropped() == 2
    assert queue.size() == queue.dequeued() == 0


def test_second_close_is_an_error():
    queue = BatchingQueue()
    queue.close()
    with pytest.raises(RuntimeError, match="closed already"):
        queue.close()


@pytest.mark.parametrize(
    "bad, error, message",
    [
        ((), ValueError, "Cannot enqueue empty"),
        ({"x": torch.zeros(T)}, ValueError, r"Leaf \['x'\] is float32\[5\]"),
        ({"x": 3.0}, TypeError, r"Leaf \['x'\]: .* got float"),
        ({"x": None}, TypeError, r"Leaf \['x'\]: .* got NoneType"),
        ({"y": torch.zeros(T, 1)}, ValueError, "y"),
        ({"x": torch.zeros(T + 2, 1)}, ValueError, r"\['x'\].*\b7\b"),
        ({"x": torch.zeros(T, 1, dtype=torch.int32)}, ValueError, "int32"),
        ({"x": torch.zeros(T, 2000)}, ValueError, "1024"),
    ],
)
def test_bad_item_is_refused_and_harms_nobody(bad, error, message):
    queue = BatchingQueue(minimum_batch_size=2)
    queue.enqueue({"x": torch.ones(T, 1)})
    with pytest.raises(error, match=message):
        queue.enqueue(bad)
    queue.enqueue({"x": torch.ones(T, 1)})
    assert torch.equal(next(queue)["x"], torch.ones(T, 2))


def test_item_may_be_changed_as_soon_as_its_batch_is_out():
    queue = BatchingQueue(minimum_batch_size=2)
    mine = item(1)
    queue.enqueue(mine)
    queue.enqueue(item(2))
    batch = next(queue)
    mine.zero_()
    assert batch[0].tolist() == [1, 2]


def test_queue_lets_go_of_tensors_that_were_dealt_with():
    queue = BatchingQueue(minimum_batch_size=2)
    mine = item(1)
    gone = weakref.ref(mine)
    queue.enqueue(mine)
    del mine
    assert gone() is not None
    queue.enqueue(item(2))
    next(queue)
    assert gone() is None


def test_batch_outlives_its_queue():
    queue = BatchingQueue(minimum_batch_size=2)
    queue.enqueue(item(1))
    queue.enqueue(item(2))
    batch = next(queue)
    del queue
    gc.collect()
    assert batch[0].tolist() == [1, 2]


def test_allocate_makes_the_memory_of_batches_and_is_called_a_few_times_only():
    made = []

    def allocate(nbytes: int) -> torch.Tensor:
        made.append(torch.empty(nbytes, dtype=torch.uint8))
        return made[-1]

    queue = BatchingQueue(minimum_batch_size=B, maximum_batch_size=B, allocate=allocate)
    for _ in range(50):
        for value in range(B):
            queue.enqueue((item(value), torch.ones(T, 1)))
        batch = next(queue)
        assert batch[0][0].tolist() == list(range(B))
        addresses = {tensor.data_ptr() for tensor in made}
        assert {leaf.data_ptr() for leaf in batch} <= addresses
    assert len(made) <= 4  # Two leaves; the last batch lives while one is made.


@pytest.mark.parametrize(
    "make",
    [bytearray, lambda n: np.zeros(n, np.uint8), lambda n: memoryview(bytearray(n))],
)
def test_allocate_may_return_any_writable_buffer(make):
    queue = BatchingQueue(minimum_batch_size=2, allocate=make)
    queue.enqueue(item(1))
    queue.enqueue(item(2))
    assert next(queue)[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda n: bytearray(n - 1), r"allocate\(\d+\) failed: .*bytes, got"),
        (bytes, r"allocate\(\d+\) failed: .*write to, got a read-only bytes;"),
        (lambda n: None, r"allocate\(\d+\) failed: .*bytes-like"),
        (lambda n: memoryview(bytearray(n + 1))[1:], "aligned"),
        (lambda n: {}["no"], r"allocate\(\d+\) failed: KeyError"),
    ],
)
def test_failing_allocate_raises_where_the_batch_comes_out(make, message):
    queue = BatchingQueue(minimum_batch_size=2, allocate=make)
    queue.enqueue(item(1))
    queue.enqueue(item(2))
    with pytest.raises(RuntimeError, match=message):
        next(queue)
    assert queue.dropped() == 2


def test_memory_of_allocate_is_freed_with_the_last_batch():
    made = []

    def allocate(nbytes: int) -> np.ndarray:
        memory = np.zeros(nbytes, np.uint8)
        made.append(weakref.ref(memory))
        return memory

    queue = BatchingQueue(minimum_batch_size=2, allocate=allocate)
    queue.enqueue(item(1))
    queue.enqueue(item(2))
    batch = next(queue)
    del queue
    assert made[0]() is not None
    del batch
    assert made[0]() is None
