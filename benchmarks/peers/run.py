# SPDX-License-Identifier: Apache-2.0
"""Peers and this repository on the same work, in turns.

    python -m benchmarks.peers.run --work pong --sb3 PYTHON --rllib PYTHON --out FILE
    python -m benchmarks.peers.run --work cartpole --cleanrl PYTHON FOLDER --out FILE

PYTHON is the interpreter of the peer's own environment and FOLDER a clone of its
repository, both made as README.md says; a peer that is not named is left out. README.md
has the workloads and the layout of each system.

Each sample is used once, in float32. For each system the table has, as medians of
`--repeats` turns after a warm-up of WARM_UP_S:

    steps/s       agent steps that were learned from, per second
    CPU us/step   CPU time (user and system) of the process tree, per such step
    peak MB       the highest proportional set size (PSS) of the process tree, in which
                  pages that processes share count once; also before the warm-up ends
"""

import argparse
import collections
import contextlib
import functools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from benchmarks import out_file, write_figures
from benchmarks.ceilings import measure_whole, tree, tree_cpu_s, tree_pss
from core.running.machine import num_cores

HERE = Path(__file__).parent.resolve()
WARM_UP_S, MEASURE_S = 10.0, 20.0
START_S = 120.0  # RLlib needs half a minute from its start to its first batch.

# The works, as flags of both our programs and of Sample Factory.
OURS = {
    "pong": "--env PongNoFrameskip-v4 --model shallow",
    "cartpole": "--env CartPole-v1 --model tanh --unroll_length 32 --batch_size 128",
    "minatar": "--env MinAtar/Breakout-v1 --unroll_length 32 --batch_size 128",
    "halfcheetah": "@settings/mujoco.txt --env HalfCheetah-v5 --unroll_length 64 "
    "--batch_size 32",
}
SAMPLE_FACTORY = {
    "pong": "--env=atari_pong --num_workers=1 --num_envs_per_worker=1 "
    "--worker_num_splits=1 --env_agents=32 --rollout=20 --batch_size=640 "
    "--encoder_conv_mlp_layers=512",
    "cartpole": "--env=CartPole-v1 --num_workers=2 --num_envs_per_worker=32 "
    "--rollout=32 --batch_size=4096 --use_rnn=False --nonlinearity=tanh "
    "--actor_critic_share_weights=False --encoder_mlp_layers 64 64",
}
SAMPLE_FACTORY_ALWAYS = (
    "--device=cpu --num_epochs=1 --num_batches_per_epoch=1 "
    "--train_for_env_steps=1000000000 --save_every_sec=1000000"
)
# Which peer can do which work; README.md says why not the others.
WORKS_OF = {
    "sample_factory": ("pong", "cartpole"),
    "rllib": ("pong",),
    "sb3": tuple(OURS),
    "cleanrl": tuple(OURS),
    "torchrl": ("pong",),
    "pufferlib": tuple(OURS),
    "monobeast2019": ("pong",),
}


def our_layout(program: str, work: str) -> list[str]:
    """Return the flags that give our programs as many environments as the peers."""
    if work == "pong":
        return []  # The default numbers of servers, actors and threads.
    per_process = "16" if work == "halfcheetah" else "32"
    if program == "monobeast":
        return ["--num_actors", "2", "--envs_per_actor", per_process]
    layout = ["--num_servers", "2", "--streams_per_server", "1"]
    return [*layout, "--envs_per_stream", per_process]


def watch(command: list[str], read: Callable[[str], float | None]) -> dict[str, float]:
    """Run a peer; return what it did between the warm-up and the end, and peak memory.

    Args:
      read: returns the steps so far that a line of its output tells, or None.

    Raises:
      RuntimeError: the peer ended by itself, or it reported too few steps.
    """
    points: list[tuple[float, float]] = []  # Time, steps.
    cpu: list[tuple[float, float]] = []  # Time, CPU seconds.
    peak, end = 0, time.monotonic() + START_S
    last_lines: collections.deque[str] = collections.deque(maxlen=10)

    def read_all(lines: Iterable[str]) -> None:
        for line in lines:
            last_lines.append(line)
            if steps := read(line):
                points.append((time.monotonic(), steps))

    folder = tempfile.TemporaryDirectory()  # Some write logs and links where they run.
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder.name,
    )
    reader = threading.Thread(target=read_all, args=(child.stdout,), daemon=True)
    reader.start()
    while child.poll() is None and time.monotonic() < end:
        time.sleep(1.0)
        peak = max(peak, tree_pss(child.pid))
        cpu.append((time.monotonic(), tree_cpu_s(child.pid)))
        if points:  # The clock starts with the first steps learned.
            end = points[0][0] + WARM_UP_S + MEASURE_S
    ended_early = child.poll() is not None
    kill_tree(child)
    reader.join(timeout=10.0)
    folder.cleanup()
    warm_up_end = end - MEASURE_S
    points = [point for point in points if point[0] >= warm_up_end]
    cpu = [sample for sample in cpu if sample[0] >= warm_up_end]
    if ended_early or len(points) < 2 or len(cpu) < 2:
        raise RuntimeError(
            f"{command} ended with {child.returncode}, with {len(points)} reports of "
            f"steps after the warm-up. Its last lines:\n{''.join(last_lines)}"
        )
    sps, cores = slope(points), slope(cpu)
    return {"sps": sps, "cpu_us": 1e6 * cores / sps, "peak_mb": peak / 2**20}


def kill_tree(child: subprocess.Popen) -> None:
    """Kill a peer; it would leave workers behind, which slow down whoever is next."""
    for process in reversed(tree(child.pid)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()


def slope(points: list[tuple[float, float]]) -> float:
    (t0, y0), (t1, y1) = points[0], points[-1]
    return (y1 - y0) / (t1 - t0)


def read_seconds_and_steps(line: str) -> float | None:
    """Read a line of the scripts in this folder."""
    match = re.fullmatch(r"[\d.e-]+ ([\d.]+)\n", line)
    return float(match[1]) if match else None


def sample_factory(python: str, work: str) -> dict[str, float]:
    frames_per_step = 4 if work == "pong" else 1  # It counts emulator frames.

    def read(line: str) -> float | None:
        match = re.search(r"Total num frames: (\d+)", line)
        return float(match[1]) / frames_per_step if match else None

    script = {
        "pong": [str(HERE / "sample_factory_pong.py")],
        "cartpole": ["-m", "sf_examples.train_gym_env"],
    }[work]
    flags = SAMPLE_FACTORY[work].split() + SAMPLE_FACTORY_ALWAYS.split()
    return watch([python, *script, *flags], read)


def create_runs(own: argparse.Namespace) -> dict[str, Callable[[], dict[str, float]]]:
    """Return for each system that is to be measured a function that does it once."""
    work = own.work
    runs: dict[str, Callable[[], dict[str, float]]] = {}

    def add_script(name: str, python: str, script: str, *args: str) -> None:
        command = [python, str(HERE / script), *args, work]
        runs[name] = functools.partial(watch, command, read_seconds_and_steps)

    if own.sample_factory:
        runs["Sample Factory APPO"] = functools.partial(
            sample_factory, own.sample_factory, work
        )
    if own.rllib:
        add_script("RLlib IMPALA", own.rllib, "rllib_pong.py")
    if own.sb3:
        add_script("SB3 A2C", own.sb3, "train_sb3.py", "a2c")
        add_script("SB3 PPO", own.sb3, "train_sb3.py", "ppo")
    if own.cleanrl:
        python, folder = own.cleanrl
        add_script("CleanRL PPO", python, "train_cleanrl.py", folder)
    if own.torchrl:
        python, folder = own.torchrl
        add_script("TorchRL IMPALA", python, "train_torchrl.py", folder)
    if own.pufferlib:
        add_script("PufferLib PPO", own.pufferlib, "train_pufferlib.py")
    if own.monobeast2019:
        python, folder = own.monobeast2019
        add_script("MonoBeast of 2019", python, "train_monobeast2019.py", folder)
    precisions = {"": "float32"}
    if work in ("pong", "minatar"):  # `auto` is float32 without convolutions.
        precisions[", default"] = "auto"
    for suffix, precision in precisions.items():
        for program in ("monobeast", "polybeast"):
            flags = [*OURS[work].split(), "--precision", precision]
            runs[program + suffix] = functools.partial(
                measure_whole,
                program,
                flags + our_layout(program, work),
                MEASURE_S,
                WARM_UP_S,
            )
    return runs


def print_table(measured: dict[str, list[dict[str, float]]]) -> None:
    def median(name: str, key: str) -> float:
        return statistics.median(result[key] for result in measured[name])

    print(
        f"{'':22}{'steps/s':>8}{'spread':>16}{'CPU us/step':>13}{'peak MB':>9}"
        f"{'polybeast/this':>16}"
    )
    for name, results in measured.items():
        rates = sorted(result["sps"] for result in results)
        print(
            f"{name:22}{median(name, 'sps'):8.0f}"
            f"{f'{rates[0]:.0f}-{rates[-1]:.0f}':>16}"
            f"{median(name, 'cpu_us'):13.0f}{median(name, 'peak_mb'):9.0f}"
            f"{median('polybeast', 'sps') / median(name, 'sps'):16.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", choices=OURS, default="pong")
    path = os.path.abspath  # Peers run in a folder of their own.
    for peer in ("sample_factory", "rllib", "sb3", "pufferlib"):
        parser.add_argument(f"--{peer}", type=path, metavar="PYTHON")
    for peer in ("cleanrl", "torchrl", "monobeast2019"):
        parser.add_argument(
            f"--{peer}", type=path, nargs=2, metavar=("PYTHON", "FOLDER")
        )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=out_file, help="JSON file for the raw figures")
    own = parser.parse_args()
    for peer, works in WORKS_OF.items():
        if getattr(own, peer) and own.work not in works:
            parser.error(f"--{peer} can do {' and '.join(works)}, not {own.work}")
    runs = create_runs(own)
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for repeat in range(own.repeats):
        for name, run in runs.items():
            measured[name].append(run())
            print(f"{name}: {measured[name][-1]['sps']:.0f}", file=sys.stderr)
        print(f"repeat {repeat + 1} of {own.repeats} done", file=sys.stderr)
        # After each round, so that a failure in a later one loses none.
        write_figures(own.out, work=own.work, measured=measured)
    print(f"{own.work}, {num_cores()} cores, medians of {own.repeats}")
    print_table(measured)


if __name__ == "__main__":
    main()
