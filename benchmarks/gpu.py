# SPDX-License-Identifier: Apache-2.0
"""Measure how fast a GPU makes training, and what limits it.

    python -m benchmarks.gpu --env PongNoFrameskip-v4 --model deep --unroll_length 80

Takes the flags that both trainers have, and prints three tables:

    learner     updates only: agent steps per second with two learner threads, including
                the copies to the GPU; the time of one update and of its gradient alone;
                the time of the gradient's arithmetic at the rate of a large matrix
                product (the raw figures have the other parts too)
    inference   batches of N rows only, to the GPU and back, by one thread: the time of
                a batch, and rows per second
    polybeast   the whole program with 1, 2, 4 ... server processes on as many cores,
                beside the same environments alone

The first two tables are in float32 and bfloat16, with CUDA graphs and without. Figures
are medians of `--repeats`, in turns. Raw figures go to `--out` as JSON. With
--disable_cuda the CPU is measured instead, without graphs.
"""

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import monobeast
import polybeast
from benchmarks import ceilings, out_file, write_figures
from core.algorithm import counters, gpu, losses
from core.algorithm.update import compute_gradient, compute_loss
from core.nests import map_nest
from core.running.machine import keep_freed_memory, num_cores
from core.running.precision import to_bfloat16
from core.running.supervise import start_thread
from core.running.trace import Trace

LEARNER_THREADS = 2
BATCHES = (8, 32, 128, 512)
MATRIX = 8192
TRIES = 20  # Of what is timed call by call.


def in_page_locked_memory(x: np.ndarray) -> np.ndarray:
    copy = gpu.empty_page_locked(x.shape, x.dtype)
    copy[...] = x
    return copy


def seconds(work: Callable[[], Any], device: str) -> float:
    """Return the median time of a call, on the device's own clock."""
    times = []
    for _ in range(TRIES):
        if device == "cpu":
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def flops_per_second(dtype: torch.dtype, device: str) -> float:
    """Return the rate of one large matrix product."""
    n = MATRIX if device != "cpu" else MATRIX // 8
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    a @ b
    return 2 * n**3 / seconds(lambda: a @ b, device)


def measure_learner(
    flags: argparse.Namespace, device: str, part_s: float
) -> dict[str, float]:
    """Update one network by two threads, as the trainers do."""
    T, B = flags.unroll_length, flags.batch_size
    learner = monobeast.create_learner(flags, monobeast.read_env(flags)[0])
    _, batch = ceilings.random_rows(flags, (T + 1, B))
    state = tuple(s.numpy() for s in learner.net.initial_state(B))
    if device != "cpu":
        batch, state = map_nest(in_page_locked_memory, (batch, state))
    for _ in range(5):
        learner.update(batch, state)
    ends = time.perf_counter() + part_s

    def update() -> None:
        torch.set_num_threads(flags.learner_cores)
        stream = gpu.create_stream(device)
        while time.perf_counter() < ends:
            learner.update(batch, state, stream)

    before, began = learner.updates, time.perf_counter()
    for thread in [start_thread(f"u-{i}", update) for i in range(LEARNER_THREADS)]:
        thread.result()
    rate = (learner.updates - before) * T * B / (time.perf_counter() - began)
    rows, first = map_nest(lambda x: torch.from_numpy(x).to(device), (batch, state))
    results, parameters = learner.gradient(rows, first), list(learner.net.parameters())

    def clip() -> torch.Tensor:
        max_norm = flags.grad_norm_clipping or math.inf
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    norm = clip()
    parts = {
        "update": lambda: learner.update(batch, state),
        "copy": lambda: map_nest(
            lambda x: torch.from_numpy(x).to(device, non_blocking=True), (batch, state)
        ),
        "gradient": lambda: learner.gradient(rows, first),
        "clip": clip,
        "sums": lambda: losses.sum_scalars(results, norm),
        "optimizer": learner.optimizers[0].step,
    }
    times = {f"{name}_ms": 1e3 * seconds(work, device) for name, work in parts.items()}
    with FlopCounterMode(display=False) as counter:
        compute_gradient(flags, learner.net, compute_loss, rows, first)
    dtype = getattr(torch, flags.precision)
    floor_s = counter.get_total_flops() / flops_per_second(dtype, device)
    return {"fps": rate, **times, "floor_ms": 1e3 * floor_s}


class Batch:
    """Stands for a `libtorchbeast.Batch`."""

    def __init__(self, inputs: Any):
        self._inputs = inputs

    def get_inputs(self) -> Any:
        return self._inputs

    def set_outputs(self, outputs: Any) -> None:
        pass


def measure_inference(
    flags: argparse.Namespace, device: str, num_rows: int, part_s: float
) -> dict[str, float]:
    """Run PolyBeast's inference thread on the same batch again and again."""
    net, rows = ceilings.random_rows(flags, (1, num_rows))
    inputs = ({k: rows[k] for k in polybeast.NET_INPUTS}, net.initial_state(num_rows))
    inputs = map_nest(np.asarray, inputs)
    if device != "cpu":
        inputs = map_nest(in_page_locked_memory, inputs)
    batch = Batch(map_nest(torch.from_numpy, inputs))
    net = net.to(device)
    weights = polybeast.Weights(net, device)
    if net.use_bfloat16:
        to_bfloat16(net.torso)
    figures = {}

    def batches() -> Any:
        for _ in range(5):
            yield batch
        began, num = time.perf_counter(), 0
        while time.perf_counter() < began + part_s:
            yield batch
            num += 1
        figures["batch_us"] = 1e6 * (time.perf_counter() - began) / num

    flags = argparse.Namespace(
        **vars(flags),
        actor_device=device,
        learner_device=device,
        num_inference_threads=1,
    )
    stages = (counters.BusyTime(), Trace(None))
    start_thread(
        "i", polybeast.inference, flags, net, weights, batches(), *stages
    ).result()
    return {**figures, "rps": 1e6 * num_rows / figures["batch_us"]}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What a GPU does for training; other flags are the trainers'.",
        allow_abbrev=False,
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--part_s", type=float, default=2.0, help="seconds per part")
    parser.add_argument(
        "--whole_s", type=float, default=10.0, help="seconds of a program, warmed up"
    )
    parser.add_argument(
        "--servers",
        type=lambda text: [int(n) for n in text.split(",")],
        help="comma list of numbers of server processes. Default: 1, 2, 4 ... cores",
    )
    parser.add_argument(
        "--out", type=out_file, help="write the raw figures here, as JSON"
    )
    own, argv = parser.parse_known_args()
    keep_freed_memory()
    flags = monobeast.parse_flags(["--total_steps", str(10**12), *argv])
    device = "cuda" if monobeast.has_gpu(flags) else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
    print(f"{name}, {num_cores()} cores, torch {torch.__version__}; {argv}")
    ways = list(
        itertools.product(
            ("float32", "bfloat16"), (False, True)[: 1 + (device == "cuda")]
        )
    )
    runs: dict[str, list[dict[str, float]]] = {}
    for repeat in range(own.repeats):
        for precision, graphs in ways:
            # An LSTM's gradient is not recorded, its inference is.
            options = {"precision": precision, "disable_cuda_graphs": not graphs}
            way = argparse.Namespace(**{**vars(flags), **options})
            text = f"{precision}{', graphs' if graphs else ''}"
            if not (graphs and flags.use_lstm):
                result = measure_learner(way, device, own.part_s)
                runs.setdefault(f"learner, {text}", []).append(result)
            for n in BATCHES:
                result = measure_inference(way, device, n, own.part_s / 4)
                runs.setdefault(f"inference of {n}, {text}", []).append(result)
        print(f"repeat {repeat + 1} of {own.repeats} done", file=sys.stderr)
    print(f"{'':36}{'steps/s':>12}{'update ms':>13}{'gradient':>11}{'its floor':>11}")
    for key, results in runs.items():
        if key.startswith("learner"):
            m = medians(results)
            times = (
                f"{m['update_ms']:13.2f}{m['gradient_ms']:11.2f}{m['floor_ms']:11.3f}"
            )
            print(f"{key:36}{m['fps']:12.0f}{times}")
    print(f"{'':36}{'rows/s':>12}{'us a batch':>13}")
    for key, results in runs.items():
        if key.startswith("inference"):
            m = medians(results)
            print(f"{key:36}{m['rps']:12.0f}{m['batch_us']:13.0f}")

    servers = own.servers or [2**i for i in range(num_cores().bit_length())]
    print(
        f"{'':36}{'steps/s':>12}{'environments':>13}{'ratio':>11}{'learner busy':>14}"
    )
    for num in servers:
        whole, alone = f"polybeast, {num} servers", f"environments, {num} processes"
        for _ in range(own.repeats):
            result = ceilings.measure_part("environment", num, own.part_s, argv)
            runs.setdefault(alone, []).append(result)
            options = [*argv, "--num_servers", str(num)]
            result = ceilings.measure_whole("polybeast", options, own.whole_s, 5.0)
            runs.setdefault(whole, []).append(result)
        m, sps = medians(runs[whole]), medians(runs[alone])["sps"]
        line = f"{m['sps']:12.0f}{sps:13.0f}{m['sps'] / sps:11.2f}"
        print(f"{whole:36}{line}{m['learner_busy']:14.0%}", flush=True)
    result = {"argv": argv, "device": name, "measured": runs}
    write_figures(own.out, **result, torch=torch.__version__)


if __name__ == "__main__":
    main()
