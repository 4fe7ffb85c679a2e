# SPDX-License-Identifier: Apache-2.0
"""Measure what a step costs on its way from environment to learner, without learning.

    python -m benchmarks.transport
    python -m benchmarks.transport --local
    python -m benchmarks.transport --scale
    python -m benchmarks.transport --tls
    python -m benchmarks.transport --frames
    python -m benchmarks.transport --threads 1 2 4

A mock environment gives a constant observation of 28 KB (84x84x4 uint8), a mock agent a
constant action. One environment server process sends to one learner process, which runs
the whole data path (actor pool, dynamic batching, rollouts, learner batches), by gRPC
over a unix socket. In turns with this runs an echo: a plain grpcio server sends the
same bytes in one message, and a C++ client that does not read them answers at once
(benchmarks/echo_client.cc). Both servers stay on one core, as those of polybeast_env do
where there is one for each core; with --roaming they may use all cores.

The table has environment steps per second, CPU time per step of both processes
together, and the ratio of the rates; medians of `--repeats`. Raw figures go to `--out`.

With --local: streams to a server on the learner's machine without gRPC, and in turns
the same over gRPC.

With --scale: the data path alone, from 16 environments in one server process to 4,096
in 64, 16 to a stream, and the learner's CPU time for a step. Rollouts have 5 steps, so
that those of 4,096 environments fit into 2 GB. The first use of this memory costs more
than the steps, so only the time after it is measured.

With --tls: the data path over TCP on this machine, plain and encrypted in turns. Needs
the package cryptography.

With --frames: observations are stacks of four frames, 84x84 uint8 each, with a new
frame in every step. Whole stacks are sent, and in turns only the newest frames, over
TCP on this machine; the table has the bytes of network per step.

With --threads: the data path with this number of receiving threads in the learner
(`core.remote.pool.num_receiving_threads`), in turns. There are as many servers
as cores, with 16 streams of 16 environments.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil

from benchmarks import ROOT, out_file, write_figures
from core.nests import Nest, map_nest
from core.remote import tls
from core.remote.addresses import STREAMS_SUFFIX
from core.rollout import row_spec
from core.running.machine import num_cores
from core.running.supervise import raise_failures, start_thread

T, B = 20, 64
START_S = 120.0  # For all streams to connect, and for the first rollouts.
WARM_UP_S = 1.5
WARM_UP_ROLLOUTS = 5  # By then all memory for rollouts has been touched once.
MAX_ENVS = 512  # More take GB of rollouts.
SCALE = ((1, 1), (4, 1), (16, 1), (64, 1), (64, 4))  # Servers, streams of each.
SCALE_K, SCALE_T = 16, 5
THREADS_STREAMS = 16  # Of --threads, over all servers.
SHAPE = (84, 84, 4)
# Of --frames. A first axis of 1 is no stack, so all of it is sent.
STACKS = {"newest": (4, 84, 84), "whole": (1, 4, 84, 84)}
PICTURES = 8  # They come round again.
EXTRA_BYTES = 30  # Of a row besides the observation, about.


class MockEnvironments:
    """K environments whose every row is the same: it is written once, by `reset`."""

    def __init__(
        self,
        num_envs: int,
        *,
        shape: tuple[int, ...] = SHAPE,
        info_keys: tuple[str, ...] = (),
        **_: Any,
    ):
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gym.spaces.Discrete(6)
        self.row_spec = row_spec(self.observation_space, self.action_space, info_keys)
        self._row: Nest = map_nest(
            lambda s: np.ones((num_envs, *s.shape), s.dtype), self.row_spec
        )
        self._row["done"][...] = self._row["truncated"][...] = False

    def reset(self, rows: Nest) -> None:
        map_nest(np.copyto, rows, self._row)

    def step(self, actions: Nest, rows: Nest) -> None:
        pass

    def close(self) -> None:
        pass


class MockStacks(MockEnvironments):
    """The same with a new picture in every step, and the last three."""

    def __init__(self, num_envs: int, **options: Any):
        super().__init__(num_envs, **options)
        rng = np.random.default_rng(0)
        pictures = rng.integers(0, 256, (num_envs, PICTURES, 84, 84), np.uint8)
        pictures = np.concatenate([pictures, pictures[:, :3]], axis=1)
        shape = self._row["observation"].shape
        self._windows = [
            pictures[:, i : i + 4].reshape(shape).copy() for i in range(PICTURES)
        ]
        self._num_rows = 0

    def reset(self, rows: Nest) -> None:
        self.step(None, rows)

    def step(self, actions: Nest, rows: Nest) -> None:
        if self._num_rows < 2:  # There are two places for rows, in turns.
            map_nest(np.copyto, rows, self._row)
        window = self._windows[self._num_rows % PICTURES]
        np.copyto(rows["observation"], window)
        self._num_rows += 1


def serve(
    address: str,
    K: int,
    streams: int,
    tls_dir: str | None,
    frames: str,
    num_bytes: int | None,
) -> None:
    """Serve mock environments as polybeast_env would; observations of `num_bytes`."""
    from core.remote import env_server  # Not in the learner's process: it sets up gRPC.

    mock = MockEnvironments
    if frames:
        mock = functools.partial(MockStacks, shape=STACKS[frames])
    elif num_bytes is not None:
        mock = functools.partial(MockEnvironments, shape=(num_bytes,))
    env_server.Server(
        mock,
        address,
        num_envs=K,
        num_streams=streams,
        name="mock",
        vector=True,
        tls_dir=tls_dir,
    ).run()


def serve_echo(address: str, K: int, streams: int, **_: object) -> None:
    """Serve the same bytes, and nothing else."""
    import grpc

    def stream(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        # In memory of its own, as each stream's observations are.
        payload = b"\1" * int(K * (np.prod(SHAPE) + EXTRA_BYTES))
        for _ in requests:
            yield payload

    server = grpc.server(futures.ThreadPoolExecutor(streams))
    handler = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                "torchbeast.EnvServer", {"Stream": handler}
            )
        ]
    )
    server.add_insecure_port(address)
    server.start()
    server.wait_for_termination()


def learn(
    addresses: str,
    K: int,
    streams: int,
    seconds: float,
    T: int,
    tls_dir: str | None,
    num_threads: int,
) -> None:
    """Run the learner's data path; print steps, wall and CPU seconds.

    Args:
      addresses: a comma list of servers, with `streams` each of `K` environments.
      num_threads: that receive.
    """
    import torch

    import libtorchbeast
    import nest
    import polybeast

    queue = libtorchbeast.BatchingQueue(
        minimum_batch_size=B, maximum_batch_size=B, maximum_queue_size=B
    )
    batcher = libtorchbeast.DynamicBatcher(timeout_ms=None)
    actors = libtorchbeast.ActorPool(
        T,
        queue,
        batcher,
        addresses.split(",") * streams,
        (),
        named_rows=True,
        num_envs=K,
        inference_keys=polybeast.NET_INPUTS,
        tls=tls.files(tls_dir),
        num_threads=num_threads,
    )
    outputs: dict[int, Any] = {}

    def act() -> None:
        for batch in batcher:
            rows, state = batch.get_inputs()
            n = rows["done"].shape[1]
            if n not in outputs:
                outputs[n] = {
                    "action": torch.ones(1, n, dtype=torch.int64),
                    "policy_logits": torch.zeros(1, n, 6),
                    "baseline": torch.zeros(1, n),
                    "policy_version": torch.zeros(1, n, dtype=torch.int64),
                }
            batch.set_outputs((outputs[n], state))

    def consume() -> None:
        for batch in queue:
            nest.front(batch)

    threads = {
        "inference": start_thread("inference", act),
        "learner": start_thread("learner", consume),
        "actors": start_thread("actors", actors.run),
    }
    num_streams = streams * len(addresses.split(","))
    warm_up_steps = WARM_UP_ROLLOUTS * T * max(num_streams * K, B)
    warm_up(actors, threads, num_streams, warm_up_steps)
    print("begin", flush=True)
    steps, wall, cpu = actors.count(), time.perf_counter(), time.process_time()
    time.sleep(seconds)
    print(
        actors.count() - steps,
        time.perf_counter() - wall,
        time.process_time() - cpu,
        flush=True,
    )
    actors.stop()
    batcher.close()
    queue.close()
    for thread in threads.values():
        thread.result()


def warm_up(
    actors: Any, threads: dict[str, futures.Future], num_streams: int, num_steps: int
) -> None:
    """Wait until all streams are connected and have done some steps.

    Raises:
      TimeoutError: this has taken longer than START_S.
      Exception: the error of a thread.
    """
    deadline = time.monotonic() + START_S
    while True:
        connected, steps = actors.stats()["connected"], actors.count()
        if connected == num_streams and steps >= num_steps:
            break
        raise_failures(threads)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"not warmed up within {START_S:g} s: {connected} of {num_streams} "
                f"streams are connected, {steps} of {num_steps} steps done"
            )
        time.sleep(0.01)
    time.sleep(WARM_UP_S)


def command_of(function: Callable[..., None], **arguments: Any) -> list[str]:
    """Return the command that calls a function of this file."""
    call = [function.__name__, json.dumps(arguments)]
    return [sys.executable, "-m", "benchmarks.transport", "--call", *call]


@contextlib.contextmanager
def child(command: list[str], core: int | None) -> Iterator[psutil.Process]:
    """Run a server in a process of its own, and on this core."""
    with subprocess.Popen(command) as process:
        try:
            if core is not None:
                os.sched_setaffinity(process.pid, {core})  # Before it has threads.
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def measure(
    what: str,
    K: int,
    streams: int,
    seconds: float,
    echo_client: Path | None = None,
    *,
    servers: int = 1,
    T: int = T,
    tcp: bool = False,
    local: bool = False,
    certs: Path | None = None,
    frames: str = "",
    num_bytes: int | None = None,
    roaming: bool = False,
    num_threads: int = 1,
) -> dict[str, float]:
    """Measure the data path or the echo once.

    Args:
      streams: of each server.
      num_bytes: of an observation; instead of pictures.
    """
    cores: list[int | None] = [None]
    if hasattr(os, "sched_setaffinity") and not roaming:
        cores = sorted(os.sched_getaffinity(0), reverse=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        addresses = [f"unix:{folder}/{i}" for i in range(servers)]
        if tcp:
            addresses = [f"localhost:{free_port()}"]
        theirs, ours = (
            {"K": K, "streams": streams, "tls_dir": certs and str(certs / who)}
            for who in ("localhost", "learner")
        )
        theirs |= {"frames": frames, "num_bytes": num_bytes}
        server = serve if what == "data path" else serve_echo
        processes = [
            stack.enter_context(
                child(command_of(server, address=address, **theirs), core)
            )
            for address, core in zip(addresses, itertools.cycle(cores))
        ]
        sockets = [Path(folder, str(i)) for i in range(servers)]
        while not tcp and not all(path.exists() for path in sockets):
            if any(p.status() == psutil.STATUS_ZOMBIE for p in processes):
                raise RuntimeError("A server has ended; its reason is above.")
            time.sleep(0.01)
        if not local:  # Without this socket the learner takes gRPC's.
            for path in sockets:
                path.with_suffix(STREAMS_SUFFIX).unlink(missing_ok=True)
        if what == "data path":
            ours |= {"seconds": seconds, "T": T, "num_threads": num_threads}
            command = command_of(learn, addresses=",".join(addresses), **ours)
        else:
            command = [str(echo_client), str(seconds), str(streams), *addresses]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        client.stdout.readline()  # "begin", when it has warmed up.
        sent = -bytes_sent() if tcp else 0
        server_cpu = -sum(sum(p.cpu_times()[:2]) for p in processes)
        result = client.stdout.readline()
        sent += bytes_sent() if tcp else 0
        server_cpu += sum(sum(p.cpu_times()[:2]) for p in processes)
        if client.wait() != 0:
            raise RuntimeError(f"{command} ended with {client.returncode}")
    messages, wall_s, client_cpu = map(float, result.split())
    steps = messages if what == "data path" else messages * K
    figures = {
        "sps": steps / wall_s,
        "client_us": 1e6 * client_cpu / steps,
        "server_us": 1e6 * server_cpu / steps,
    }
    if tcp:
        figures["bytes"] = sent / steps  # With all headers, both ways.
    return figures


def bytes_sent() -> int:
    """Return what this machine has sent to itself (Linux)."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def scale(own: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure what a step costs the learner, for more and more environments."""
    print(f"{num_cores()} cores, {SCALE_K} environments to a stream. us: CPU per step.")
    print(f"{'envs':>5}{'servers':>9}{'streams':>9}{'steps/s':>10}{'learner us':>12}")
    measured = []
    for servers, streams in SCALE:
        runs = [
            measure(
                "data path",
                SCALE_K,
                streams,
                own.seconds,
                servers=servers,
                T=SCALE_T,
                roaming=own.roaming,
            )
            for _ in range(own.repeats)
        ]
        measured.append({"servers": servers, "streams": streams, "runs": runs})
        us = statistics.median(run["client_us"] for run in runs)
        sps = statistics.median(run["sps"] for run in runs)
        envs = servers * streams * SCALE_K
        print(f"{envs:5}{servers:9}{servers * streams:9}{sps:10.0f}{us:12.1f}")
    return measured


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as probe:
        return probe.getsockname()[1]


def price_of_tls(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure TCP on this machine with and without TLS; print and return it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tools.certs", "--hosts", "localhost", "--out"]
        subprocess.run([*command, folder], check=True, stdout=subprocess.DEVNULL)
        variants = {"plain": {"tcp": True}, "TLS": {"tcp": True, "certs": Path(folder)}}
        return in_turns(flags, variants)


def in_turns(
    flags: argparse.Namespace, variants: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Measure with each variant's options of `measure`; print and return it."""
    print(f"{num_cores()} cores. us: CPU microseconds per step, learner + server.")
    heads = "".join(f"{name + '/s':>10}{'us':>15}" for name in variants)
    print(f"{'K':>3}{'streams':>8}{heads}{'ratio':>8}")
    measured = []
    for K in flags.envs_per_stream:
        for streams in flags.streams:
            if K * streams > MAX_ENVS:
                continue
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
            for _ in range(flags.repeats):
                for name, options in variants.items():
                    options = {"what": "data path", "roaming": flags.roaming} | options
                    runs[name].append(
                        measure(K=K, streams=streams, seconds=flags.seconds, **options)
                    )
            measured.append({"K": K, "streams": streams, **runs})
            print(row_of(K, streams, runs), flush=True)
    return measured


def newest_frames(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure whole stacks and the newest frames alone; print and return it."""
    return in_turns(flags, {name: {"tcp": True, "frames": name} for name in STACKS})


def without_grpc(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure streams without gRPC and with it; print and return it."""
    return in_turns(flags, {"local": {"local": True}, "gRPC": {}})


def more_threads(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure numbers of threads that receive, in turns; print and return it."""
    servers = min(num_cores(), THREADS_STREAMS)
    runs: dict[int, list[dict[str, float]]] = {n: [] for n in flags.threads}
    for _ in range(flags.repeats):
        for n, results in runs.items():
            run = measure(
                "data path",
                SCALE_K,
                THREADS_STREAMS // servers,
                flags.seconds,
                servers=servers,
                roaming=flags.roaming,
                num_threads=n,
            )
            results.append(run)
    print(f"{num_cores()} cores. us: CPU microseconds per step.")
    print(f"{'threads':>7}{'steps/s':>10}{'learner us':>12}{'server us':>11}")
    for n, results in runs.items():
        sps, ours, theirs = (
            statistics.median(run[key] for run in results)
            for key in ("sps", "client_us", "server_us")
        )
        print(f"{n:7}{sps:10.0f}{ours:12.1f}{theirs:11.1f}")
    return [{"threads": n, "servers": servers, "runs": r} for n, r in runs.items()]


def compile_echo_client(folder: str) -> Path:
    program = Path(folder, "echo_client")
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "grpc++"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    sources = [ROOT / "benchmarks/echo_client.cc"]
    sources += [ROOT / "csrc/transport_grpc.cc", ROOT / "csrc/text.cc"]
    subprocess.run(
        ["c++", "-std=c++20", "-O2", *sources, "-o", program, *flags], check=True
    )
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument(
        "--envs_per_stream", type=int, nargs="+", default=[1, 4, 16, 64]
    )
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 2, 4, 16, 64))
    whats = parser.add_mutually_exclusive_group()
    for name, function, text in (
        ("local", without_grpc, "without gRPC instead"),
        ("scale", scale, "many servers instead"),
        ("tls", price_of_tls, "the price of TLS instead"),
        ("frames", newest_frames, "stacks of frames instead"),
    ):
        whats.add_argument(
            f"--{name}", dest="what", action="store_const", const=function, help=text
        )
    whats.add_argument(
        "--threads", type=int, nargs="+", help="threads that receive, instead"
    )
    parser.add_argument(
        "--roaming", action="store_true", help="do not keep servers to a core"
    )
    parser.add_argument("--out", type=out_file, help="JSON file for the raw figures")
    flags = parser.parse_args()
    what = more_threads if flags.threads else flags.what or against_echo
    measured = what(flags)
    steps = SCALE_T if what is scale else T
    write_figures(flags.out, T=steps, B=B, measured=measured)


def against_echo(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure data path and echo in turns; print the table, return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        echo = {"what": "echo", "echo_client": compile_echo_client(folder)}
        return in_turns(flags, {"data path": {}, "echo": echo})


def row_of(K: int, streams: int, runs: dict[str, list[dict[str, float]]]) -> str:
    """Return a line of the table. The ratio is the first variant's rate to the last."""

    def median(what: str, key: str) -> float:
        return statistics.median(run[key] for run in runs[what])

    text = f"{K:3}{streams:8}"
    for what in runs:
        learner, server = median(what, "client_us"), median(what, "server_us")
        cost = f"{learner:.0f} + {server:.0f}"
        text += f"{median(what, 'sps'):10.0f}{cost:>15}"
    first, *_, last = runs
    text += f"{median(first, 'sps') / median(last, 'sps'):8.2f}"
    if "bytes" in runs[first][0]:
        text += "".join(f"{median(what, 'bytes'):9.0f} B" for what in runs)
    return text


if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:
        function, arguments = sys.argv[2:]
        globals()[function](**json.loads(arguments))
    else:
        main()
