# SPDX-License-Identifier: Apache-2.0
"""Measure what several learners cost: the sum of the gradients, and weak scaling.

    python -m benchmarks.learners --num_learners 1 2 4

Each learner sleeps for --update_ms instead of an update, like a learner that waits for
its GPU, and then adds up a gradient of --parameters numbers with the other learners.
`efficiency` is the share of the time that is left for updates. The bytes per second
are those that a learner sends on gloo's ring. The last line is the bandwidth of a bare
TCP connection over loopback, for comparison. The numbers of learners take turns,
`--repeats` times; the summary has the median efficiency of each, and the lowest and the
highest. Raw figures go to `--out`.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import out_file, write_figures
from core import flag_types
from core.algorithm import learners
from core.errors import Exit

CHUNK = bytes(1 << 20)


def main() -> int:
    parser = flag_types.Parser(description=__doc__.splitlines()[0])
    count = flag_types.int_at_least(1)
    parser.add_argument("--num_learners", type=count, nargs="+", default=[1, 2, 4])
    parser.add_argument("--parameters", type=count, default=1_600_000)
    parser.add_argument("--update_ms", type=flag_types.number(0), default=50.0)
    parser.add_argument("--updates", type=flag_types.int_at_least(2), default=100)
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--out", type=out_file, help="JSON file for the raw figures")
    flags = parser.parse_args()
    if "RANK" in os.environ:
        flags.stall_timeout_s, flags.on_stall = 60.0, "stop"
        return int(learners.train_together(measure, flags))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "part.json")
        for n in flags.num_learners * flags.repeats:  # In turns.
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={n}", "-m", "benchmarks.learners"]
            command += [*sys.argv[1:], f"--out={part}"]
            subprocess.run(command, check=True)
            measured.append(json.loads(part.read_text()))
    for n in flags.num_learners:
        turns = [turn["efficiency"] for turn in measured if turn["learners"] == n]
        print(
            f"{n} learners: median efficiency {statistics.median(turns):.1%}, "
            f"{min(turns):.1%} to {max(turns):.1%}"
        )
    loopback = loopback_bytes_per_s()
    print(f"loopback: {loopback / 1e6:,.0f} MB/s, one connection")
    settings = {k: v for k, v in vars(flags).items() if k != "out"}
    settings["loopback_bytes_per_s"] = loopback
    write_figures(flags.out, **settings, measured=measured)
    return 0


def measure(flags: argparse.Namespace) -> Exit:
    """Time this learner's updates; learner 0 prints the result, and writes --out."""
    others = learners.current()
    net = nn.Linear(flags.parameters, 1, bias=False)
    net.weight.grad = torch.ones_like(net.weight)
    sum_s, update_s = [], []
    for _ in range(flags.updates):
        began = time.perf_counter()
        time.sleep(flags.update_ms / 1000)
        computed = time.perf_counter()
        if others is not None:
            net.weight.grad.fill_(1.0)
            others.sum_gradients(net)
            others.sum({"loss": 1.0})
            assert net.weight.grad[0, 0] == others.size
        sum_s.append(time.perf_counter() - computed)
        update_s.append(time.perf_counter() - began)
    if others is None or others.rank == 0:
        size = 1 if others is None else others.size
        low, mid, high = statistics.quantiles(sum_s, n=4)
        result: dict[str, Any] = {"learners": size, "sum_s": sum_s}
        result["update_s"] = update_s
        result["efficiency"] = flags.update_ms / 1e3 / statistics.median(update_s)
        # On a ring each learner sends its part to the next one 2 (N - 1) times.
        sent = 2 * (size - 1) / size * 4 * flags.parameters
        result["bytes_per_s"] = sent / mid
        print(
            f"{size} learners: {1e3 * mid:.2f} ms for the sum of {flags.parameters:,} "
            f"gradients (quartiles {1e3 * low:.2f} and {1e3 * high:.2f}), "
            f"{sent / mid / 1e6:,.0f} MB/s, efficiency {result['efficiency']:.1%}",
            flush=True,
        )
        flags.out.write_text(json.dumps(result))
    if others is not None:
        others.is_over = True
    return Exit.DONE


def loopback_bytes_per_s() -> float:
    """Return how much one TCP connection of this machine carries."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    received = 0

    def receive() -> None:
        nonlocal received
        while data := peer.recv(len(CHUNK)):
            received += len(data)

    thread = threading.Thread(target=receive)
    thread.start()
    began = time.perf_counter()
    while time.perf_counter() - began < 1.0:
        client.sendall(CHUNK)
    client.close()
    thread.join()
    peer.close()
    return received / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
