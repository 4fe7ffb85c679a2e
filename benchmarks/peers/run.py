# SPDX-License-Identifier: Apache-2.0
"""Peers and this repository on the same work, in turns: Pong, Nature's network.

    python -m benchmarks.peers.run --sample_factory PYTHON --rllib PYTHON --out FILE
    python -m benchmarks.peers.run --cartpole --sample_factory PYTHON --out FILE

PYTHON is the interpreter of the peer's own environment, made as README.md says; a peer
that is not named is left out. All train on batches of 32 x 20 steps and use each
sample once. Rates are agent steps per second that were learned from, after a warm-up of
WARM_UP_S; the table has medians of `--repeats`.

With --cartpole: tiny work, where everything is overhead. Batches of 128 x 32 steps, 64
environments, and two linear layers: 64 units each for the peer, ours have their 256.
"""

import argparse
import contextlib
import functools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.ceilings import measure_whole
from core.running.machine import num_cores

HERE = Path(__file__).parent
WARM_UP_S, MEASURE_S = 10.0, 20.0
SAMPLE_FACTORY = (
    "--env=atari_pong --device=cpu --num_workers=1 --num_envs_per_worker=1 "
    "--worker_num_splits=1 --env_agents=32 --rollout=20 --batch_size=640 "
    "--num_epochs=1 --num_batches_per_epoch=1 --encoder_conv_mlp_layers=512 "
    "--train_for_env_steps=1000000000 --save_every_sec=1000000"
)
OURS = ["--env", "PongNoFrameskip-v4", "--model", "shallow"]
SAMPLE_FACTORY_CARTPOLE = (
    "--env=CartPole-v1 --device=cpu --num_workers=2 --num_envs_per_worker=32 "
    "--rollout=32 --batch_size=4096 --num_epochs=1 --num_batches_per_epoch=1 "
    "--use_rnn=False --encoder_mlp_layers 64 64 "
    "--train_for_env_steps=1000000000 --save_every_sec=1000000"
)
OURS_CARTPOLE = ["--env", "CartPole-v1", "--unroll_length", "32", "--batch_size", "128"]
# Also 64 environments.
LAYOUTS = {
    "monobeast": ["--num_actors", "2", "--envs_per_actor", "32"],
    "polybeast": ["--num_servers", "2", "--streams_per_server", "1"]
    + ["--envs_per_stream", "32"],
}


def watch(command: list[str], read: Callable[[str], float | None]) -> dict[str, float]:
    """Run a peer; return its rate between the warm-up and the end.

    Args:
      read: returns the steps so far that a line of its output tells, or None.
    """
    points: list[tuple[float, float]] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        began = None
        for line in child.stdout:
            steps = read(line)
            if not steps:
                continue
            began = began or time.monotonic()  # With the first steps learned.
            points.append((time.monotonic() - began, steps))
            if points[-1][0] > WARM_UP_S + MEASURE_S:
                break
        # Peers leave workers behind, which would slow down whoever is next.
        for process in [*psutil.Process(child.pid).children(recursive=True), child]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    warm = [p for p in points if p[0] >= WARM_UP_S]
    if len(warm) < 2:
        raise RuntimeError(f"{command} ended with {child.returncode}: {points}")
    (t0, s0), (t1, s1) = warm[0], warm[-1]
    return {"sps": (s1 - s0) / (t1 - t0)}


def sample_factory(python: str, *, cartpole: bool) -> dict[str, float]:
    frames_per_step = 1 if cartpole else 4  # It counts emulator frames.

    def read(line: str) -> float | None:
        match = re.search(r"Total num frames: (\d+)", line)
        return float(match[1]) / frames_per_step if match else None

    with tempfile.TemporaryDirectory() as folder:
        if cartpole:
            command = [python, "-m", "sf_examples.train_gym_env"]
            command += SAMPLE_FACTORY_CARTPOLE.split()
        else:
            command = [python, str(HERE / "sample_factory_pong.py")]
            command += SAMPLE_FACTORY.split()
        return watch([*command, f"--train_dir={folder}"], read)


def rllib(python: str) -> dict[str, float]:
    def read(line: str) -> float | None:
        match = re.fullmatch(r"[\d.]+ ([\d.]+)\n", line)
        return float(match[1]) if match else None

    return watch([python, str(HERE / "rllib_pong.py"), "1000"], read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sample_factory", metavar="PYTHON")
    parser.add_argument("--rllib", metavar="PYTHON")
    parser.add_argument("--cartpole", action="store_true", help="not Pong")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the raw figures")
    own = parser.parse_args()
    runs: dict[str, Callable[[], dict[str, float]]] = {}
    if own.sample_factory:
        runs["Sample Factory APPO"] = lambda: sample_factory(
            own.sample_factory, cartpole=own.cartpole
        )
    if own.rllib and own.cartpole:
        parser.error("--rllib is for Pong; leave it or --cartpole out")
    if own.rllib:
        runs["RLlib IMPALA"] = lambda: rllib(own.rllib)
    for program, layout in LAYOUTS.items():
        ours = OURS_CARTPOLE + layout if own.cartpole else OURS
        runs[program] = functools.partial(
            measure_whole, program, ours, MEASURE_S, WARM_UP_S
        )
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for repeat in range(own.repeats):
        for name, run in runs.items():
            measured[name].append(run())
            print(f"{name}: {measured[name][-1]['sps']:.0f}", file=sys.stderr)
        print(f"repeat {repeat + 1} of {own.repeats} done", file=sys.stderr)
    work = "CartPole, MLP, 128 x 32" if own.cartpole else "Pong, shallow, 32 x 20"
    print(f"{num_cores()} cores; agent steps/s, {work}")
    polybeast = statistics.median(m["sps"] for m in measured["polybeast"])
    for name, results in measured.items():
        rates = sorted(m["sps"] for m in results)
        median = statistics.median(rates)
        spread = f"{rates[0]:.0f}-{rates[-1]:.0f}"
        print(
            f"{name:22}{median:8.0f}{spread:>14}"
            f"   polybeast/this {polybeast / median:.2f}"
        )
    if own.out:
        own.out.write_text(
            json.dumps({"cores": num_cores(), "measured": measured}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
