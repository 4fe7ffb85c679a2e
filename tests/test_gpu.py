# SPDX-License-Identifier: Apache-2.0
"""Threads that share a GPU; without one, that a CPU needs none of it."""

import numpy as np
import pytest
import torch

import polybeast
from core import gpu
from core.supervise import start_thread
from tests.conftest import DEADLINE_S

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LONG = 10**9  # Clock cycles: at least 0.3 s.


def test_a_cpu_has_no_streams_and_nobody_waits_for_it():
    for device in ("cpu", torch.device("cpu")):
        assert gpu.create_stream(device, urgent=True) is None
        gpu.wait_for(device)
    with gpu.in_stream(None):
        x = torch.ones(2) + 1
    assert x.tolist() == [2, 2]
    with pytest.raises(ZeroDivisionError), gpu.in_stream(None):
        _ = 1 / 0


@pytest.mark.parametrize("shape", [(), (3,), (4, 0, 2), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64, np.bool_])
def test_page_locked_arrays_are_like_those_of_numpy(monkeypatch, shape, dtype):
    if not torch.cuda.is_available():  # Then nobody can lock pages.
        allocate = lambda n: torch.empty(n, dtype=torch.uint8)  # noqa: E731
        monkeypatch.setattr(gpu, "allocate_page_locked", allocate)
    x = gpu.empty_page_locked(shape, np.dtype(dtype))
    assert (x.shape, x.dtype) == (shape, dtype)
    assert x.flags.c_contiguous and x.flags.writeable
    x[...] = 1
    assert (x == 1).all()


@needs_gpu
def test_work_in_a_stream_of_its_own_does_not_wait_for_an_update():
    stream = gpu.create_stream("cuda", urgent=True)
    source = gpu.allocate_page_locked(2**20).fill_(7)

    def work() -> torch.Tensor:
        with gpu.in_stream(stream):
            total = source.to("cuda", non_blocking=True).sum()
            return total.to("cpu", non_blocking=True)

    work()  # The first time CUDA loads the kernels, and waits for all streams.
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)  # An update, in the default stream.
    said = work()
    assert not torch.cuda.default_stream().query()  # It goes on.
    assert said.item() == 7 * 2**20


@needs_gpu
def test_a_stream_begins_after_what_was_made_before_it():
    x = torch.zeros(1000, device="cuda")
    x.sum().item()  # As above.
    torch.cuda._sleep(LONG)
    x.fill_(3.0)
    with gpu.in_stream(gpu.create_stream("cuda")):
        total = x.sum().to("cpu", non_blocking=True)
    assert total.item() == 3000


@needs_gpu
def test_weights_that_an_inference_thread_fetches_are_of_one_version():
    net = torch.nn.Linear(2000, 2000).cuda()
    weights = polybeast.Weights(net, "cuda")

    @torch.no_grad()
    def fetch() -> None:
        mine, version = torch.nn.Linear(2000, 2000).cuda(), -1
        stream = gpu.create_stream("cuda")
        while version < 200:
            with gpu.in_stream(stream):
                version = weights.fetch(mine, version)
                low, high = mine.weight.min().item(), mine.weight.max().item()
            assert version < 0 or low == high == version

    threads = [start_thread(f"fetch-{i}", fetch) for i in range(2)]
    with torch.no_grad():
        for version in range(201):
            net.weight.fill_(version)
            weights.publish(net, version)
    for thread in threads:
        thread.result(DEADLINE_S)
