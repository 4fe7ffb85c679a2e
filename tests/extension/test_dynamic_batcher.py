# SPDX-License-Identifier: Apache-2.0
"""DynamicBatcher as Python sees it. csrc/tests has the tests of the C++ itself."""

import collections
import gc
import weakref

import pytest
import torch

from libtorchbeast import AsyncError, ClosedBatchingQueue, DynamicBatcher
from tests.conftest import DEADLINE_S, wait_until

Pair = collections.namedtuple("Pair", "left right")


def row(value: int) -> torch.Tensor:
    return torch.tensor([[value]])


@pytest.fixture
def batcher():
    """Gives batches of two; a third row waits."""
    batcher = DynamicBatcher(
        minimum_batch_size=2, maximum_batch_size=2, timeout_ms=None
    )
    yield batcher
    if not batcher.is_closed():
        batcher.close()


def ask_in_order(batcher, background, *values):
    """Call compute(row(value)) for each, each queued before the next one."""
    answers = []
    for value in values:
        before = batcher.size()
        answers.append(background(batcher.compute, row(value)))
        wait_until(lambda before=before: batcher.size() == before + 1)
    return answers


def test_arguments_without_sense_are_refused():
    with pytest.raises(ValueError, match="Max batch size must be >= min"):
        DynamicBatcher(minimum_batch_size=3, maximum_batch_size=2)
    with pytest.raises(ValueError, match="Timeout"):
        DynamicBatcher(timeout_ms=-1)


def test_arguments_may_be_given_by_position(background):
    batcher = DynamicBatcher(0, 3, 4, 0, True)  # 0 ms: two rows do not wait for three.
    answer = background(batcher.compute, torch.ones(2, 7))
    batch = next(batcher)
    assert batch.get_inputs().shape == (2, 7)
    batch.set_outputs(outputs=torch.zeros(2))
    assert answer.result(DEADLINE_S).shape == (2,)


def test_outputs_may_be_another_nest_than_the_inputs(batcher, background):
    inputs = [{"x": Pair(row(i), (row(-i),))} for i in (3, 5)]
    answers = [background(batcher.compute, nest) for nest in inputs]
    batch = next(batcher)
    x = batch.get_inputs()["x"]
    assert type(x) is Pair
    batch.set_outputs(Pair([x.left], {"sum": x.left.float() + x.right[0] + 0.5}))
    for i, answer in zip((3, 5), answers):
        answer = answer.result(DEADLINE_S)
        assert type(answer) is Pair
        assert answer.left[0].tolist() == [[i]]
        assert answer.right["sum"].tolist() == [[0.5]]


def test_dropped_batch_raises_in_each_of_its_computes_only(batcher, background):
    answers = ask_in_order(batcher, background, 1, 2)
    next(batcher)  # And nobody holds it.
    for answer in answers:
        with pytest.raises(AsyncError):
            answer.result(DEADLINE_S)
    answers = ask_in_order(batcher, background, 3, 4)
    batch = next(batcher)
    batch.set_outputs(batch.get_inputs())
    assert [a.result(DEADLINE_S).item() for a in answers] == [3, 4]


def test_a_model_that_raises_drops_its_batch(batcher, background):
    def serve():
        for batch in batcher:
            raise ZeroDivisionError(batch.get_inputs())

    answers = ask_in_order(batcher, background, 1, 2)
    serving = background(serve)
    with pytest.raises(ZeroDivisionError):
        serving.result(DEADLINE_S)
    del serving  # The traceback in it holds the batch.
    gc.collect()
    for answer in answers:
        with pytest.raises(AsyncError):
            answer.result(DEADLINE_S)


@pytest.mark.parametrize(
    "bad, error, message",
    [
        ({"a": torch.zeros(1, 3)}, ValueError, r"Leaf \['a'\].*2.*3"),
        ({"a": torch.zeros(2)}, ValueError, r"Leaf \['a'\].*batch_dim"),
        ((torch.zeros(1, 2), None), TypeError, r"Leaf \[1\].*NoneType"),
        ((), ValueError, "Cannot set empty"),
    ],
)
def test_bad_outputs_may_be_set_again(batcher, background, bad, error, message):
    answers = ask_in_order(batcher, background, 1, 2)
    batch = next(batcher)
    with pytest.raises(error, match=message):
        batch.set_outputs(bad)
    assert not any(answer.done() for answer in answers)
    batch.set_outputs(batch.get_inputs())
    assert [a.result(DEADLINE_S).item() for a in answers] == [1, 2]


def test_bad_inputs_are_refused_and_harm_nobody(batcher, background):
    answers = ask_in_order(batcher, background, 1)
    for bad, error in [((), ValueError), (torch.zeros(1), ValueError), (1, TypeError)]:
        with pytest.raises(error):
            batcher.compute(bad)
    answers += ask_in_order(batcher, background, 2)
    batch = next(batcher)
    batch.set_outputs(batch.get_inputs())
    assert [a.result(DEADLINE_S).item() for a in answers] == [1, 2]


def test_close_wakes_every_compute_and_ends_every_loop(batcher, background):
    answers = ask_in_order(batcher, background, 1, 2)
    batch = next(batcher)
    answers += ask_in_order(batcher, background, 3)  # Not handed out.
    batcher.close()
    for answer in answers:
        with pytest.raises(ClosedBatchingQueue):
            answer.result(DEADLINE_S)
    assert list(batcher) == []
    batch.set_outputs(batch.get_inputs())  # Too late; harmless.
    with pytest.raises(ClosedBatchingQueue):
        batcher.compute(row(4))
    with pytest.raises(RuntimeError, match="closed already"):
        batcher.close()


def test_batcher_lets_go_of_tensors_that_were_dealt_with(background):
    batcher = DynamicBatcher(timeout_ms=1)
    outputs = row(7)
    gone = weakref.ref(outputs)
    answer = background(batcher.compute, row(1))
    next(batcher).set_outputs(outputs)
    answer.result(DEADLINE_S)
    del outputs
    gc.collect()
    assert gone() is None


def test_batch_outlives_its_batcher(background):
    batcher = DynamicBatcher(timeout_ms=1)
    answer = background(batcher.compute, row(7))
    batch = next(batcher)
    batcher.close()
    with pytest.raises(ClosedBatchingQueue):
        answer.result(DEADLINE_S)
    del batcher, answer
    gc.collect()
    assert batch.get_inputs().item() == 7
    batch.set_outputs(row(1))


def test_allocate_is_called_a_few_times_only(background):
    sizes = []

    def allocate(nbytes: int) -> torch.Tensor:
        sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    batcher = DynamicBatcher(maximum_batch_size=2, timeout_ms=1, allocate=allocate)

    def serve():
        for batch in batcher:
            batch.set_outputs(batch.get_inputs())

    serving = background(serve)
    for i in range(100):
        assert batcher.compute(row(i)).item() == i
    batcher.close()
    serving.result(DEADLINE_S)
    assert len(sizes) <= 4
