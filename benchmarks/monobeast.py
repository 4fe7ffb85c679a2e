# SPDX-License-Identifier: Apache-2.0
"""What bounds MonoBeast on this machine: each part alone, and the whole.

    python -m benchmarks.monobeast --model shallow --unroll_length 80 --batch_size 8

Takes all flags of monobeast, and prints one table (agent steps per second):

    emulator      Atari only, one core: four frames and one grey picture, no more
    environment   nothing but stepping, one process per core
    inference     nothing but the actors' forward passes, one process per core
    learner       nothing but gradient steps on one batch, in one thread
    end to end    monobeast itself, read from its logs.csv after a warm-up
    bound         the rate at which the parts' CPU cost per step would fill all cores

Parts take turns, `--repeats` times; the table has medians and the spread. Raw figures
go to `--out` as one JSON object. Memory is the peak of the proportional set size (PSS)
of the whole process tree, so that pages shared between processes count once.
"""

import argparse
import csv
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import atari_wrappers
import monobeast
from core import environment
from core.spaces import map_nest
from core.supervise import keep_freed_memory, num_cores

WARM_UP_S = 10.0  # End to end: processes start, buffers fill, the allocator settles.
PARTS = ("environment", "inference", "learner")


def run_part(part: str, flags: argparse.Namespace, part_s: float) -> dict[str, float]:
    """Repeat one part's work for a while; return steps, CPU and wall seconds."""
    torch.set_num_threads(1)
    keep_freed_memory()
    work, steps_per_call = {
        "emulator": emulator_work,
        "environment": environment_work,
        "inference": inference_work,
        "learner": learner_work,
    }[part](flags)
    for _ in range(3):
        work()
    steps = 0
    cpu, wall = time.process_time(), time.perf_counter()
    while time.perf_counter() - wall < part_s:
        work()
        steps += steps_per_call
    return {
        "steps": steps,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
    }


def emulator_work(flags: argparse.Namespace) -> tuple[Any, int]:
    """The yardstick to compare machines by: what no Atari environment can beat."""
    game = monobeast.create_env(flags).unwrapped
    game.reset(seed=0)
    screen = np.empty(game.observation_space.shape[:2], np.uint8)

    def work() -> None:
        for _ in range(4):
            game.ale.act(0)
        game.ale.getScreenGrayscale(screen)
        if game.ale.game_over():
            game.ale.reset_game()

    return work, 1


def environment_work(flags: argparse.Namespace) -> tuple[Any, int]:
    E = flags.envs_per_actor
    envs = environment.Environments(
        lambda: monobeast.create_env(flags), E, seed=os.getpid()
    )
    row = map_nest(lambda s: np.zeros((E, *s.shape), s.dtype), envs.row_spec)
    envs.reset(row)
    rng = np.random.default_rng(os.getpid())
    first = int(getattr(envs.action_space, "start", 0))

    def work() -> None:
        envs.step(first + rng.integers(envs.action_space.n, size=E), row)

    return work, E


def random_rows(
    flags: argparse.Namespace, lead: tuple[int, ...]
) -> tuple[monobeast.Net, Any]:
    """Return a network and rows of noise, leaves [*lead, ...], that fit it."""
    spaces = monobeast.read_spaces(flags)
    net = monobeast.create_net(flags, spaces)
    spec, _ = monobeast.rollout_specs(flags, spaces, net)
    rng = np.random.default_rng(0)

    def noise(s: Any) -> np.ndarray:
        x = rng.random((*lead, *s.shape))
        return (x * 255).astype(s.dtype) if s.dtype == np.uint8 else x.astype(s.dtype)

    rows = map_nest(noise, spec)
    rows["last_action"][...] = rows["action"][...] = net.first_action
    rows["done"][...] = rng.random(lead) < 0.005  # bool(noise) would be True always.
    rows["truncated"][...] = False
    rows["policy_version"][...] = 0
    return net, rows


def inference_work(flags: argparse.Namespace) -> tuple[Any, int]:
    E = flags.envs_per_actor
    net, row = random_rows(flags, (E,))
    state = net.initial_state(E)

    @torch.inference_mode()
    def work() -> None:
        outputs, _ = net(monobeast.as_tensors(row), state)
        monobeast.sample_action(outputs["policy_logits"]).numpy()

    return work, E


def learner_work(flags: argparse.Namespace) -> tuple[Any, int]:
    T, B = flags.unroll_length, flags.batch_size
    _, batch = random_rows(flags, (T + 1, B))
    learner = monobeast.create_learner(flags, monobeast.read_spaces(flags))
    state = tuple(s.numpy() for s in learner.net.initial_state(B))
    return lambda: monobeast.learn(flags, learner, batch, state), T * B


def measure_part(
    part: str, processes: int, part_s: float, argv: list[str]
) -> dict[str, float]:
    """Run `part` in `processes` processes side by side; return rate and cost."""
    command = [sys.executable, "-m", "benchmarks.monobeast", "--part", part]
    command += ["--part_s", str(part_s), *argv]
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    results = []
    for child in children:
        out, _ = child.communicate()
        if child.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}")
        results.append(json.loads(out.splitlines()[-1]))
    return {
        "sps": sum(r["steps"] / r["wall_s"] for r in results),
        "cpu_us": statistics.fmean(1e6 * r["cpu_s"] / r["steps"] for r in results),
    }


def measure_whole(
    whole_s: float, argv: list[str], program: str = "monobeast"
) -> dict[str, float]:
    """Run a trainer for a while; return its rate after the warm-up, and peak memory."""
    with tempfile.TemporaryDirectory() as savedir:
        child = subprocess.Popen(
            [sys.executable, "-m", program, "--savedir", savedir, "--xpid", "speed"]
            + ["--disable_checkpoint", "--log_interval_s", "1", *argv],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        peak, started = 0, None
        while child.poll() is None:
            peak = max(peak, tree_pss(child.pid))
            time.sleep(1.0)
            if started is None and read_progress(Path(savedir)):
                started = time.monotonic()
            if started and time.monotonic() - started > WARM_UP_S + whole_s:
                break
        child.send_signal(signal.SIGTERM)
        child.wait()
        rows = read_progress(Path(savedir))
    warm = [row for row in rows if row[0] >= WARM_UP_S]
    if len(warm) < 2:
        raise RuntimeError(f"{program} ended with {child.returncode} after {rows[-1:]}")
    (t0, s0, _), (t1, s1, _) = warm[0], warm[-1]
    return {
        "sps": (s1 - s0) / (t1 - t0),
        "peak_mb": peak / 2**20,
        "learner_busy": statistics.fmean(busy for _, _, busy in warm if busy == busy),
    }


def read_progress(savedir: Path) -> list[tuple[float, int, float]]:
    """Return (seconds, steps, learner_busy) of each row of the log so far."""
    path = savedir / "speed" / "logs.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            (float(r["time_s"]), int(r["step"]), float(r["learner_busy"] or "nan"))
            for r in csv.DictReader(file)
        ]


def tree_pss(pid: int) -> int:
    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue  # It ended meanwhile.
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What bounds MonoBeast here; other flags are monobeast's."
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--part_s", type=float, default=8.0, help="seconds per part")
    parser.add_argument(
        "--whole_s", type=float, default=30.0, help="seconds end to end, warmed up"
    )
    parser.add_argument("--out", type=Path, help="write the raw figures here, as JSON")
    parser.add_argument("--part", choices=("emulator", *PARTS), help=argparse.SUPPRESS)
    own, argv = parser.parse_known_args()
    flags = monobeast.parse_flags(argv)
    flags.seed = 0 if flags.seed is None else flags.seed
    if own.part:
        print(json.dumps(run_part(own.part, flags, own.part_s)))
        return

    cores = num_cores()
    processes = {"environment": cores, "inference": cores, "learner": 1}
    alone = PARTS
    if atari_wrappers.is_atari(flags.env):
        alone, processes = ("emulator", *PARTS), {"emulator": 1, **processes}
    measured: dict[str, list[dict[str, float]]] = {part: [] for part in alone}
    measured["end to end"] = []
    for repeat in range(own.repeats):
        for part in alone:
            measured[part].append(measure_part(part, processes[part], own.part_s, argv))
        measured["end to end"].append(measure_whole(own.whole_s, argv))
        print(f"repeat {repeat + 1} of {own.repeats} done", file=sys.stderr)

    cost = sum(statistics.median(m["cpu_us"] for m in measured[part]) for part in PARTS)
    bound = cores * 1e6 / cost
    whole = statistics.median(m["sps"] for m in measured["end to end"])
    print(f"{cores} cores, {platform.machine()}, torch {torch.__version__}; {argv}")
    print(f"{'':14}{'steps/s':>9}{'spread':>16}{'CPU us/step':>13}{'whole/this':>12}")
    for part, results in measured.items():
        rates = sorted(m["sps"] for m in results)
        median = statistics.median(rates)
        us = (
            f"{statistics.median(m['cpu_us'] for m in results):.0f}"
            if "cpu_us" in results[0]
            else f"{cores * 1e6 / median:.0f}"
        )
        spread = f"{rates[0]:.0f}-{rates[-1]:.0f}"
        print(f"{part:14}{median:9.0f}{spread:>16}{us:>13}{whole / median:>12.2f}")
    print(f"{'bound':14}{bound:9.0f}{'':16}{cost:>13.0f}{whole / bound:>12.2f}")
    bounding = max(
        PARTS, key=lambda p: statistics.median(m["cpu_us"] for m in measured[p])
    )
    print(f"The largest share of the CPU goes to: {bounding}")
    peak = max(m["peak_mb"] for m in measured["end to end"])
    print(f"Peak memory of the whole process tree: {peak:.0f} MB")
    if own.out:
        own.out.parent.mkdir(parents=True, exist_ok=True)
        own.out.write_text(
            json.dumps(
                {
                    "argv": argv,
                    "cores": cores,
                    "torch": torch.__version__,
                    "bound_sps": bound,
                    "measured": measured,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
