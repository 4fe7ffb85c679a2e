# SPDX-License-Identifier: Apache-2.0
"""Measure what limits training on this machine: each part alone, and the whole.

    python -m benchmarks.ceilings --env PongNoFrameskip-v4 --model shallow
    python -m benchmarks.ceilings --autotune --program polybeast --model shallow

Takes the flags that both trainers have, and prints one table (agent steps per second):

    emulator      Atari only, on one core: four frames and one grey picture per step
    environment   steps of the environment only, one process per core
    inference     forward passes of 8 environments only, one process per core
    learner       gradient steps on one batch only, on as many cores as one step uses
    transport     PolyBeast only: its servers and streams, with constant observations of
                  the same size and constant actions (benchmarks/transport.py)
    monobeast     the whole program, read from its logs.csv after a warm-up
    polybeast     the same
    bound         the rate at which the CPU time per step of all parts of a program
                  would fill all cores

Parts take turns, `--repeats` times; the table has medians and the spread. `of lowest`
is the program's rate divided by that of its slowest part, `of bound` its rate divided
by its bound. Raw figures go to `--out` as one JSON object. Memory is the peak of the
proportional set size (PSS) of all processes together, in which shared pages count once.

With --autotune it tries settings of one program instead, each for some seconds, keeps
settings that are faster by more than the noise, and prints the flags to use. It does
not change the network, the unroll length and the batch size, because learning depends
on them; --batch_sizes names batch sizes to try.
"""

import argparse
import contextlib
import importlib
import itertools
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
from gymnasium.vector.utils import batch_space

import atari_wrappers
import monobeast
from benchmarks import out_file, transport, write_figures
from core.actors import prepare
from core.algorithm.update import Learner
from core.environments import stepping
from core.errors import Exit
from core.nests import leaves, map_nest
from core.rollout import spec_of
from core.running.machine import keep_freed_memory, num_cores
from core.running.run import bottleneck
from tools.runs import log_rows

WARM_UP_S = 10.0  # A whole program: processes start, buffers fill, malloc settles.
PARTS = ("environment", "inference", "learner")
# The parts of each program.
PROGRAMS = {"monobeast": PARTS, "polybeast": (*PARTS, "transport")}
TRIAL_WARM_UP_S, TRIAL_S = 3.0, 5.0
LAST_LINES = 5  # Of a trainer that fails: what it says of its flags.
FASTER = 1.04  # What a trial must gain: two runs of one setting differ by less.


# ------------------------------------------------------------------------- the parts


def run_part(part: str, flags: argparse.Namespace, part_s: float) -> dict[str, float]:
    """Repeat one part's work for a while; return steps, CPU and wall seconds."""
    torch.set_num_threads(flags.learner_cores if part == "learner" else 1)
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
    envs = stepping.Environments(
        lambda: monobeast.create_env(flags), E, seed=os.getpid()
    )
    row = envs.zero_rows()
    envs.reset(row)
    space = batch_space(envs.action_space, E)
    space.seed(os.getpid())
    actions = itertools.cycle([space.sample() for _ in range(100)])

    def work() -> None:
        envs.step(next(actions), row)

    return work, E


def random_rows(
    flags: argparse.Namespace, lead: tuple[int, ...]
) -> tuple[monobeast.Net, Any]:
    """Return a network and rows of noise, leaves [*lead, ...], that fit it."""
    spaces = monobeast.read_env(flags)[0]
    net = monobeast.create_net(flags, spaces)
    outputs = monobeast.net_outputs(spaces)
    spec, _ = prepare.rollout_specs(flags, spaces, net, outputs)
    rng = np.random.default_rng(0)

    def noise(s: Any) -> np.ndarray:
        x = rng.random((*lead, *s.shape))
        return (x * 255).astype(s.dtype) if s.dtype == np.uint8 else x.astype(s.dtype)

    rows = map_nest(noise, spec)
    # Of a Discrete space the first action, else 0.
    first = int(getattr(spaces.action, "start", 0))
    for key in ("last_action", "action"):
        map_nest(lambda x: x.fill(first), rows[key])
    rows["done"][...] = rng.random(lead) < 0.005  # bool(noise) would be True always.
    rows["truncated"][...] = False
    rows["info"]["game_return"][...] = np.nan  # No game ends.
    rows["policy_version"][...] = 0
    return net, rows


def inference_work(flags: argparse.Namespace) -> tuple[Any, int]:
    E = flags.envs_per_actor
    net, row = random_rows(flags, (E,))
    state = net.initial_state(E)

    @torch.inference_mode()
    def work() -> None:
        outputs, _ = net(monobeast.as_tensors(row), state)
        net.distribution.draw(outputs["policy_logits"])

    return work, E


def learner_work(flags: argparse.Namespace) -> tuple[Any, int]:
    return learner_and_work(flags)[1:]


def learner_and_work(flags: argparse.Namespace) -> tuple[Learner, Any, int]:
    T, B = flags.unroll_length, flags.batch_size
    _, batch = random_rows(flags, (T + 1, B))
    learner = monobeast.create_learner(flags, monobeast.read_env(flags)[0])
    state = tuple(s.numpy() for s in learner.net.initial_state(B))
    return learner, lambda: learner.update(batch, state), T * B


def measure_part(
    part: str, processes: int, part_s: float, argv: list[str]
) -> dict[str, float]:
    """Run `part` in `processes` processes side by side; return rate and cost."""
    command = [sys.executable, "-m", "benchmarks.ceilings", "--part", part]
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


def measure_transport(argv: list[str], part_s: float) -> dict[str, float]:
    """Send what PolyBeast would between its servers and the learner, with its streams.

    Rows of that size come from mock environments, and constants answer them.
    """
    flags = importlib.import_module("polybeast").parse_flags(argv)
    pool = importlib.import_module("core.remote.pool")
    observation = monobeast.read_env(flags)[0].observation
    result = transport.measure(
        "data path",
        flags.envs_per_stream,
        flags.streams_per_server,
        part_s,
        servers=flags.num_servers,
        num_bytes=sum(spec.nbytes for _, spec in leaves(spec_of(observation))),
        roaming=True,  # As servers that a learner starts.
        num_threads=pool.num_receiving_threads(),
    )
    cpu_us = result["client_us"] + result["server_us"]
    return {"sps": result["sps"], "cpu_us": cpu_us}


def measure_whole(
    program: str, argv: list[str], whole_s: float, warm_up_s: float = WARM_UP_S
) -> dict[str, float]:
    """Run a trainer for a while; return its rate after the warm-up, and what it took.

    Returns:
      Steps per second, microseconds of CPU time per step and peak PSS (both of the
      whole process tree), and how busy each stage was.

    Raises:
      RuntimeError: the trainer failed, or it logged too little after the warm-up.
    """
    with tempfile.TemporaryDirectory() as savedir, tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", program, "--savedir", savedir, "--xpid", "speed"]
            + ["--disable_checkpoint", "--log_interval_s", "1", *argv],
            stderr=stderr,
            stdout=subprocess.DEVNULL,
        )
        peak, started = 0, None
        cpu: list[tuple[float, float]] = []  # Once it is warm: time, CPU seconds.
        try:
            while child.poll() is None:
                peak = max(peak, tree_pss(child.pid))
                if started and time.monotonic() - started > warm_up_s:
                    cpu.append((time.monotonic(), tree_cpu_s(child.pid)))
                time.sleep(1.0)
                if started is None and read_progress(Path(savedir)):
                    started = time.monotonic()
                if started and time.monotonic() - started > warm_up_s + whole_s:
                    break
        finally:
            child.send_signal(signal.SIGTERM)
            child.wait()
        rows = read_progress(Path(savedir))
        stderr.seek(0)
        said = stderr.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    warm = [row for row in rows if row["time_s"] >= warm_up_s]
    has_failed = child.returncode not in (Exit.DONE, Exit.STOPPED)
    if has_failed or len(warm) < 2 or len(cpu) < 2:
        raise RuntimeError(
            f"{program} ended with {child.returncode} after {rows[-1:]}. Its last "
            "lines of stderr:\n" + "\n".join(said)
        )
    # The slope of a line through all rows: steps come in lumps, as many as a batch has.
    times, steps = ([row[key] for row in warm] for key in ("time_s", "step"))
    sps = float(np.polyfit(times, steps, deg=1)[0])
    busy = {
        key: statistics.fmean(row[key] for row in warm if row[key] == row[key])
        for key in ("env_busy", "inference_busy", "learner_busy")
    }
    cores = (cpu[-1][1] - cpu[0][1]) / (cpu[-1][0] - cpu[0][0])
    return {"sps": sps, "cpu_us": 1e6 * cores / sps, "peak_mb": peak / 2**20, **busy}


def read_progress(savedir: Path) -> list[dict[str, float]]:
    """Return each row of the log so far; blank cells are NaN."""
    return [
        {key: float(cell or "nan") for key, cell in row.items()}
        for row in log_rows(savedir / "speed")
    ]


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; nothing once it has ended."""
    try:
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def tree_pss(pid: int) -> int:
    """Return the PSS of a process tree in bytes; without Linux the RSS."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):  # It ended meanwhile.
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.rss)
    return total


def tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and system, of a process tree so far.

    Children that have ended count too, if their parent has waited for them.
    """
    total = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])  # Own two, then of ended children.
    return total


# ------------------------------------------------------------------------- the table


def compare(own: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Measure parts and programs in turns; print the table and return the figures."""
    flags = monobeast.parse_flags(argv)
    cores = num_cores()
    alone = PARTS
    processes = {
        "emulator": 1,
        "environment": cores,
        "inference": cores,
        "learner": max(1, cores // flags.learner_cores),
    }
    if atari_wrappers.is_atari(flags.env):
        alone = ("emulator", *PARTS)
    programs = list(PROGRAMS) if own.program == "both" else [own.program]
    if "polybeast" in programs:
        alone = (*alone, "transport")
    measured: dict[str, list[dict[str, float]]] = {
        name: [] for name in (*alone, *programs)
    }
    for repeat in range(own.repeats):
        for part in alone:
            if part == "transport":
                result = measure_transport(argv, own.part_s)
            else:
                result = measure_part(part, processes[part], own.part_s, argv)
            measured[part].append(result)
        for program in programs:
            measured[program].append(measure_whole(program, argv, own.whole_s))
        print(f"repeat {repeat + 1} of {own.repeats} done", file=sys.stderr)

    def median(name: str, key: str) -> float:
        return statistics.median(m[key] for m in measured[name])

    costs = {
        program: sum(median(part, "cpu_us") for part in PROGRAMS[program])
        for program in programs
    }
    bounds = {program: cores * 1e6 / cost for program, cost in costs.items()}
    lowest = {
        program: min(median(part, "sps") for part in PROGRAMS[program])
        for program in programs
    }
    print(f"{cores} cores, {platform.machine()}, torch {torch.__version__}; {argv}")
    print(
        f"{'':16}{'steps/s':>9}{'spread':>14}{'CPU us/step':>13}{'of lowest':>11}"
        f"{'of bound':>10}"
    )
    for name, results in measured.items():
        rates = sorted(m["sps"] for m in results)
        rate = statistics.median(rates)
        us = median(name, "cpu_us")
        line = f"{name:16}{rate:9.0f}{f'{rates[0]:.0f}-{rates[-1]:.0f}':>14}{us:13.0f}"
        if name in programs:
            line += f"{rate / lowest[name]:11.2f}{rate / bounds[name]:10.2f}"
        print(line)
    for program in programs:
        name = f"bound, {program}"
        print(f"{name:16}{bounds[program]:9.0f}{'':14}{costs[program]:13.0f}")
    for program in programs:
        busy = {
            stage: median(program, f"{stage}_busy")
            for stage in ("env", "inference", "learner")
        }
        bounded = bottleneck(busy, actors_do_both=program == "monobeast")
        shares = ", ".join(f"{stage} {share:.0%}" for stage, share in busy.items())
        peak = median(program, "peak_mb")
        print(f"{program}: {bounded} ({shares}); peak memory {peak:.0f} MB")
        costliest = max(PROGRAMS[program], key=lambda part: median(part, "cpu_us"))
        print(f"{program}: most CPU goes to {costliest}")
    return {"bound_sps": bounds, "measured": measured}


# ---------------------------------------------------------------------------- tuning


def settings_to_try(own: argparse.Namespace, batch_size: int) -> list[tuple[str, list]]:
    """Return flags and the values to try for each, the most promising first."""
    cores = num_cores()
    envs = [n for n in (4, 8, 16, 32) if batch_size % n == 0] or [1]
    learner = ("learner_cores", sorted({1, max(1, cores // 2), cores}))
    if own.program == "monobeast":
        actors = sorted({max(1, cores - 1), cores, cores + cores // 2})
        tries = [("num_actors", actors), ("envs_per_actor", envs), learner]
    else:
        tries = [
            ("num_inference_threads", sorted({1, 2, max(1, cores // 4)})),
            ("num_servers", sorted({max(1, cores - 1), cores, 2 * cores})),
            ("envs_per_stream", envs),
            ("streams_per_server", [1, 2, 4]),
            learner,
        ]
    return [*tries, ("batch_size", own.batch_sizes)]


def autotune(own: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Change one flag after another and keep what is faster; print the flags."""
    flags = importlib.import_module(own.program).parse_flags(argv)
    # Only both together say how many actor processes there are.
    layout = ("num_actors", "envs_per_actor") if own.program == "monobeast" else ()
    best: dict[str, Any] = {key: getattr(flags, key) for key in layout}
    given = argv + [f"--{key}" for key in layout if "--num_actors" in argv]
    trials: list[tuple[dict[str, Any], float]] = []

    def trial(settings: dict[str, Any]) -> float:
        extra = [f"--{key}={value}" for key, value in settings.items()]
        rate = measure_whole(own.program, [*argv, *extra], TRIAL_S, TRIAL_WARM_UP_S)
        trials.append((settings, rate["sps"]))
        print(f"{rate['sps']:8.0f} steps/s  {' '.join(extra) or '(as given)'}")
        return rate["sps"]

    ends = time.monotonic() + own.autotune_s
    record = trial(best)
    for key, values in settings_to_try(own, flags.batch_size):
        for value in values:
            if time.monotonic() > ends:
                print(f"Out of time (--autotune_s {own.autotune_s:g}): --{key} untried")
                break
            if f"--{key}" in given or value == getattr(flags, key, None):
                continue  # The user's choice, or what "as given" has tried.
            try:
                rate = trial({**best, key: value})
            except RuntimeError as error:  # Settings that do not fit each other.
                print(f"   fails: --{key} {value}: {error}")
                continue
            if rate > FASTER * record:
                best, record = {**best, key: value}, rate
    extra = " ".join(f"--{key} {value}" for key, value in best.items())
    gain = record / trials[0][1]
    print(f"Use: {extra or 'the flags as given'}  ({gain:.2f} times the speed)")
    return {"program": own.program, "trials": trials, "best": best}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure what limits training; takes the trainers' flags too.",
        allow_abbrev=False,  # Or --batch_size would be --batch_sizes.
    )
    parser.add_argument("--program", choices=(*PROGRAMS, "both"), default="both")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--part_s", type=float, default=5.0, help="seconds per part")
    parser.add_argument(
        "--whole_s", type=float, default=20.0, help="seconds of a program, warmed up"
    )
    parser.add_argument(
        "--autotune",
        action="store_true",
        help="try settings of --program, which is polybeast unless given",
    )
    parser.add_argument(
        "--autotune_s", type=float, default=90.0, help="seconds to begin trials in"
    )
    parser.add_argument(
        "--batch_sizes",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[],
        help="autotune: comma list of batch sizes to try too",
    )
    parser.add_argument(
        "--out", type=out_file, help="write the raw figures here, as JSON"
    )
    parser.add_argument("--part", choices=("emulator", *PARTS), help=argparse.SUPPRESS)
    own, argv = parser.parse_known_args()
    if own.part:
        flags = monobeast.parse_flags(argv)
        flags.seed = 0 if flags.seed is None else flags.seed
        print(json.dumps(run_part(own.part, flags, own.part_s)))
        return
    if own.autotune and own.program == "both":
        own.program = "polybeast"
    if not own.autotune:  # Parts do not know what auto would take.
        argv = ["--precision", "float32", *argv]
    result = autotune(own, argv) if own.autotune else compare(own, argv)
    write_figures(own.out, argv=argv, **result, torch=torch.__version__)


if __name__ == "__main__":
    main()
