# SPDX-License-Identifier: Apache-2.0
"""Does a learner that could never keep up ever wait? As on a GPU, without one.

    python -m benchmarks.learner_bound --update_ms 20 --step_ms 5

Environments and learner only sleep, so neither takes time from the other: a step takes
--step_ms and an update --update_ms. Actor pool, queues and two learner threads with one
lock are PolyBeast's. Prints updates per second beside the most that either side alone
would allow, the learner's idle time, and how many updates an action is old when it is
learned from.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from typing import Any

import torch

import libtorchbeast
import polybeast
from benchmarks import out_file, write_figures
from benchmarks.transport import MockEnvironments
from core.running.supervise import raise_failures, start_thread

T, B = 20, 32
WARM_UP_S = 4.0


def serve(address: str, K: int, streams: int, step_s: float) -> None:
    """Serve environments that take `step_s` for a step."""
    from core.remote import env_server

    class SlowEnvironments(MockEnvironments):
        def __init__(self, num_envs: int, **options: Any):
            super().__init__(num_envs, shape=(8,), **options)

        def step(self, actions: Any, rows: Any) -> None:
            time.sleep(step_s)

    env_server.Server(
        SlowEnvironments,
        address,
        num_envs=K,
        num_streams=streams,
        name="mock",
        vector=True,
        tls_dir=None,
    ).run()


def measure(flags: argparse.Namespace, folder: str) -> dict[str, float]:
    """Run once; return updates/s, the learner's idle share, and the policy's lag."""
    addresses = [f"unix:{folder}/{i}" for i in range(flags.num_servers)]
    args = (flags.envs_per_stream, flags.streams_per_server, flags.step_ms / 1e3)
    context = multiprocessing.get_context("spawn")
    servers = [
        context.Process(target=serve, args=(address, *args), daemon=True)
        for address in addresses
    ]
    queue = libtorchbeast.BatchingQueue(
        minimum_batch_size=B, maximum_batch_size=B, maximum_queue_size=flags.queue_size
    )
    batcher = libtorchbeast.DynamicBatcher(timeout_ms=None)
    actors = libtorchbeast.ActorPool(
        T,
        queue,
        batcher,
        [a for a in addresses for _ in range(flags.streams_per_server)],
        (),
        named_rows=True,
        num_envs=flags.envs_per_stream,
        inference_keys=polybeast.NET_INPUTS,
    )
    lock = threading.Lock()
    ends: list[float] = []  # Of all updates.
    idle_s: list[float] = []  # Before each of them.
    lags: list[float] = []

    def act() -> None:
        for batch in batcher:
            rows, state = batch.get_inputs()
            n = rows["done"].shape[1]
            action = torch.ones(1, n, dtype=torch.int64)
            version = torch.full((1, n), len(ends))
            batch.set_outputs(({"action": action, "policy_version": version}, state))

    def learn() -> None:
        for (_, outputs), _ in queue:
            with lock:
                began = time.perf_counter()
                idle_s.append(began - ends[-1] if ends else 0.0)
                lag = len(ends) - outputs["policy_version"][1:]
                lags.append(lag.float().mean().item())
                time.sleep(flags.update_ms / 1e3)
                ends.append(time.perf_counter())

    for server in servers:
        server.start()
    threads = {
        "actors": start_thread("actors", actors.run),
        "inference": start_thread("inference", act),
        "learner-0": start_thread("learner-0", learn),
        "learner-1": start_thread("learner-1", learn),
    }
    while not ends:
        raise_failures(threads)
        time.sleep(0.01)
    time.sleep(WARM_UP_S)
    first, began = len(ends), time.perf_counter()
    time.sleep(flags.seconds)
    last, wall_s = len(ends), time.perf_counter() - began
    actors.stop()
    batcher.close()
    queue.close()
    for server in servers:
        server.kill()
        server.join()
    for thread in threads.values():
        thread.result()
    return {
        "updates_per_s": (last - first) / wall_s,
        "idle": sum(idle_s[first:last]) / wall_s,
        "policy_lag": statistics.fmean(lags[first:last]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--update_ms", type=float, default=20.0)
    parser.add_argument("--step_ms", type=float, default=5.0)
    parser.add_argument("--num_servers", type=int, default=2)
    parser.add_argument("--streams_per_server", type=int, default=4)
    parser.add_argument("--envs_per_stream", type=int, default=32)
    parser.add_argument("--queue_size", type=int, default=B)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=out_file, help="JSON file for the raw figures")
    flags = parser.parse_args()
    runs = []
    for _ in range(flags.repeats):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(measure(flags, folder))
    envs = flags.num_servers * flags.streams_per_server * flags.envs_per_stream
    most = min(1e3 / flags.update_ms, envs / B / (T * flags.step_ms / 1e3))
    rate, idle, lag = (statistics.median(r[key] for r in runs) for key in runs[0])
    print(
        f"{envs} environments: {rate:.1f} updates/s of at most {most:.1f}, learner "
        f"idle {idle:.0%}, policy lag {lag:.1f}"
    )
    settings = {k: v for k, v in vars(flags).items() if k != "out"}
    write_figures(flags.out, **settings, runs=runs)


if __name__ == "__main__":
    main()
