# SPDX-License-Identifier: Apache-2.0
"""Threads that share a GPU; without one, that a CPU needs none of it.

Where there is no GPU to record graphs, `FakeRecorder` does what they do: read and write
the same tensors every time.
"""

import argparse
import copy
import operator
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import monobeast
import polybeast
from benchmarks import ceilings
from core.algorithm import gpu
from core.algorithm.dry_run import zero_rows
from core.algorithm.replay import mark_replayed
from core.errors import ConfigError
from core.nests import leaves, map_nest
from core.rollout import Spaces
from core.running.supervise import start_thread
from tests.conftest import DEADLINE_S
from tests.normalization_flags import obeyed

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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_a_stream_begins_after_what_was_made_before_it():
    x = torch.zeros(1000, device="cuda")
    x.sum().item()  # As above.
    torch.cuda._sleep(LONG)
    x.fill_(3.0)
    with gpu.in_stream(gpu.create_stream("cuda")):
        total = x.sum().to("cpu", non_blocking=True)
    assert total.item() == 3000


@pytest.mark.gpu
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


PONG = "--env PongNoFrameskip-v4"
EVERYTHING = "--normalize_observations --normalize_returns --reward_clipping none"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "argv",
    [
        f"{PONG} --model shallow",
        f"{PONG} --model deep",
        f"{PONG} --model deep --use_lstm",
        f"--env MinAtar/Breakout-v1 {EVERYTHING}",
        f"--env Pendulum-v1 --model tanh {EVERYTHING}",
    ],
)
def test_updates_on_a_gpu_are_those_on_the_cpu(monkeypatch, argv):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    argv += " --unroll_length 5 --batch_size 4 --envs_per_actor 4 --precision float32"
    flags = monobeast.parse_flags(argv.split())
    _, batch = ceilings.random_rows(flags, (6, 4))
    batch["done"][3, 1] = True

    def learn(*, disable_cuda):
        flags.disable_cuda = disable_cuda
        torch.manual_seed(0)
        learner = monobeast.create_learner(flags, monobeast.read_env(flags)[0])
        state = tuple(s.numpy() for s in learner.net.initial_state(4))
        for _ in range(3):
            learner.update(batch, state)
        gradients = {k: p.grad for k, p in learner.net.named_parameters()}
        return map_nest(lambda x: x.cpu(), (gradients, learner.net.state_dict()))

    expected, got = learn(disable_cuda=True), learn(disable_cuda=False)
    for (name, x), (_, y) in zip(leaves(expected), leaves(got), strict=True):
        error = (x - y).double().norm() / x.double().norm().clamp(min=1e-6)
        assert error < 1e-2, name  # Kernels add in another order.


# ---------------------------------------------------------------------------- graphs


def assert_close(a, b):
    """For another size of a batch, a GPU chooses another kernel."""
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class FakeRecorder:
    def __init__(self, device):
        pass

    def __call__(self, function, args):
        outputs = function(*args)

        def replay():
            for (_, to), (_, x) in zip(
                leaves(tuple(outputs)), leaves(tuple(function(*args))), strict=True
            ):
                to.detach().copy_(x)

        return replay, outputs


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr(gpu, "Recorder", FakeRecorder)
        monkeypatch.setattr(gpu, "CAN_RECORD", True)  # With any version of torch.
    elif not gpu.CAN_RECORD:
        pytest.skip("this version of torch records no graphs")
    # A kernel for another size of a batch would round to TF32 differently.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return request.param


def columns(rng, T, N, num_actions):
    """Return rows of noise [T, N, ...] for PICTURES."""
    return {
        "observation": torch.from_numpy(
            rng.integers(0, 256, (T, N, *PICTURES.shape), np.uint8)
        ),
        "reward": torch.from_numpy(rng.standard_normal((T, N), np.float32)),
        "done": torch.from_numpy(rng.random((T, N)) < 0.3),
        "last_action": torch.from_numpy(1 + rng.integers(0, num_actions, (T, N))),
    }


PICTURES = gym.spaces.Box(0, 255, (10, 10, 4), np.uint8)
ACTIONS = gym.spaces.Discrete(6, start=1)


@torch.inference_mode()
def test_a_network_says_the_same_by_graphs_for_batches_of_any_size(device):
    torch.manual_seed(0)
    net = polybeast.Net(PICTURES, ACTIONS, use_lstm=True).to(device)
    graphs = gpu.Graphs(net, device, pad=True)
    rng = np.random.default_rng(0)
    for n in [3, 1, 4, 2, 16, 9, 3, 5, 1, 7]:
        rows = columns(rng, 1, n, 6)
        state = tuple(torch.randn(1, n, polybeast.LSTM_SIZE) for _ in range(2))
        said = graphs(rows, state)  # On a GPU from memory of the CPU.
        expected = net(*map_nest(lambda x: x.to(device), (rows, state)))
        map_nest(assert_close, said, expected)
        for parameter in net.parameters():  # New weights, in the same place.
            parameter.mul_(0.9)
    assert sorted(graphs._graphs) == [1, 2, 4, 8, 16]


def test_updates_by_graphs_are_the_same_updates(device):
    argv = ["--env", "Catch", "--unroll_length", "5", "--batch_size", "4"]
    argv += ["--envs_per_actor", "4", "--learning_rate", "0.01"]
    argv += obeyed(monobeast)
    flags = monobeast.parse_flags(argv)
    flags.disable_cuda = device == "cpu"
    _, batch = ceilings.random_rows(flags, (6, 4))
    batch["replayed"] = mark_replayed(6, 2, 4)

    gradients = []

    def learned(by_graphs):
        torch.manual_seed(0)
        flags.disable_cuda_graphs = not by_graphs
        learner = monobeast.create_learner(flags, monobeast.read_env(flags)[0])
        if by_graphs and device == "cpu":
            learner.gradient = gpu.Graphs(learner.gradient, device)
        gradients.clear()
        for num in (4, 4, 3, 4, 3):  # --max_policy_lag left one out.
            part = map_nest(operator.itemgetter((slice(None), slice(num))), batch)
            learner.update(part, ())
            gradients.append([p.grad for p in learner.net.parameters()])
        assert learner.updates == 5
        return learner

    expected, by_graphs = learned(False), learned(True)
    for later in gradients[1:]:  # Where all graphs write.
        assert device == "cpu" or all(map(operator.is_, gradients[0], later))
    assert sorted(by_graphs.gradient._graphs) == [3, 4]
    got, expected = by_graphs.net.state_dict(), expected.net.state_dict()
    # A fork's network may have no statistics.
    assert got.get("normalize.observation.0.count", 1) > 0
    assert got.get("baseline.updates", 5) == 5
    map_nest(assert_close, got, expected)


def test_what_cannot_be_recorded_is_named_with_the_flag():
    message = "operation not permitted.*--disable_cuda_graphs"
    with pytest.raises(ConfigError, match=message), gpu.explain_failed_recording():
        raise RuntimeError("operation not permitted\nSet CUDA_LAUNCH_BLOCKING=1.")
    # The end of a failed recording raises, too.
    with pytest.raises(ConfigError, match=message), gpu.explain_failed_recording():
        try:
            raise RuntimeError("operation not permitted")
        finally:
            raise RuntimeError("capture was invalidated")
    with (
        pytest.raises(torch.cuda.OutOfMemoryError),
        gpu.explain_failed_recording(),
    ):
        raise torch.cuda.OutOfMemoryError("2 GiB")


@pytest.mark.gpu
@torch.inference_mode()
def test_a_network_that_waits_for_the_gpu_cannot_be_recorded(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    net = polybeast.Net(PICTURES, ACTIONS).cuda()

    def wait_for_the_gpu(rows, state):
        outputs, state = net(rows, state)
        outputs["baseline"].sum().item()
        return outputs, state

    rows = zero_rows(Spaces(PICTURES, ACTIONS), 1, 2)
    with pytest.raises(ConfigError, match="not permitted.*--disable_cuda_graphs"):
        gpu.Graphs(wait_for_the_gpu, "cuda")(rows, ())
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    said = gpu.Graphs(net, "cuda", record=False)(rows, ())
    expected = net(map_nest(lambda x: x.cuda(), rows))
    map_nest(assert_close, said, expected)


def test_a_gradient_is_recorded_for_few_sizes_of_a_batch(device):
    """Each recording keeps a batch; --max_policy_lag makes batches of any size."""
    graphs = gpu.Graphs(lambda x: (x * 2,), device)
    for num in range(1, 10):
        x = torch.rand(2, num).to(device)  # A failed recording breaks CUDA's generator.
        (doubled,) = graphs(x)
        assert torch.equal(doubled, x * 2)
    assert sorted(graphs._graphs) == [1, 2, 3, 4]


@pytest.mark.gpu
@torch.inference_mode()
def test_weights_of_two_dtypes_are_copied_to_a_network_that_acts():
    """Like those of a network whose torso acts in bfloat16."""
    space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    net = polybeast.Net(space, ACTIONS, model="shallow", bfloat16=True).cuda()
    mine = polybeast.copy_for_acting(argparse.Namespace(actor_device="cuda"), net)
    weights = polybeast.Weights(net, "cuda")
    for parameter in net.parameters():
        parameter.add_(1)
    weights.publish(net, 1)
    assert weights.fetch(mine, -1) == 1
    for a, b in zip(net.parameters(), mine.parameters()):
        torch.testing.assert_close(a, b.float(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("model", ["deep", "shallow", "mlp"])
def test_until_the_optimizer_an_update_looks_at_no_tensor(model):
    """Or it would wait for the GPU. Tensors without content cannot be looked at."""
    argv = f"{PONG} --model {model} --disable_cuda"
    flags = monobeast.parse_flags(argv.split())
    _, batch = ceilings.random_rows(flags, (6, 4))
    batch["replayed"] = mark_replayed(6, 2, 4)
    learner = monobeast.create_learner(flags, monobeast.read_env(flags)[0])
    with FakeTensorMode() as mode:
        for module in learner.net.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({k: mode.from_tensor(x) for k, x in tensors.items()})
        rows = map_nest(lambda x: mode.from_tensor(torch.from_numpy(x)), batch)
        parts = learner.gradient(rows, ())
        assert all(p.grad is not None for p in learner.net.parameters())
        with pytest.raises(DataDependentOutputException):
            parts[0].total_loss.item()


@pytest.mark.gpu
def test_graphs_are_recorded_while_other_threads_use_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    net = polybeast.Net(PICTURES, ACTIONS).cuda()
    stop = threading.Event()

    def update():
        while not stop.is_set():
            x = torch.randn(64, 64).pin_memory().cuda(non_blocking=True)
            (x @ x).sum().item()

    @torch.inference_mode()
    def act(seed):
        mine, rng = copy.deepcopy(net), np.random.default_rng(seed)
        graphs = gpu.Graphs(mine, "cuda", pad=True)
        stream = gpu.create_stream("cuda", urgent=True)
        for n in [1, 2, 4, 8, 16, 32, 3, 5, 17] * 3:
            with gpu.in_stream(stream):
                rows = map_nest(lambda x: x.cuda(), columns(rng, 1, n, 6))
                said, _ = graphs(rows, ())
                expected, _ = mine(rows, ())
            map_nest(assert_close, said, expected)

    updates = start_thread("update", update)
    try:
        for thread in [start_thread(f"act-{i}", act, i) for i in range(2)]:
            thread.result(DEADLINE_S)
    finally:
        stop.set()
    updates.result(DEADLINE_S)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags", ["", "--use_lstm", "--disable_cuda_graphs", "--replay_ratio=1"]
)
def test_polybeast_trains_on_a_gpu(start, flags):
    program = start(
        *("--env", "Catch", "--total_steps", 20000, *flags.split()),
        module="polybeast",
    )
    assert program.wait() == 0, program.text()
