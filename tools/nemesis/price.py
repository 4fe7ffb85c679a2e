# SPDX-License-Identifier: Apache-2.0
"""Measure what a killed server costs: steps per second with kills and without.

PolyBeast trains on Catch with its own servers. Phases without kills and phases with a
kill every 5 s take turns in one run. A pair is one phase of each kind; which of the two
comes first alternates. The price is the median over the pairs.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator

from core.running.machine import num_cores
from tools.nemesis.programs import Program, train
from tools.nemesis.result import Result
from tools.runs import curve

KILL_EVERY_S = 5.0
KILLS = 4  # Of a phase.
WARM_UP_S = 10.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=10, help="phases of each kind")
    parser.add_argument("--num_servers", type=int, default=num_cores())
    parser.add_argument(
        "--most",
        type=float,
        default=0.05,
        help="largest price that passes; a few pairs on a busy machine are too noisy",
    )


def measure(flags: argparse.Namespace) -> Result:
    servers = itertools.cycle(range(flags.num_servers))
    argv = ["--num_servers", str(flags.num_servers), "--disable_checkpoint"]
    prices, rates = [], []
    with train("polybeast", *argv) as training:
        time.sleep(WARM_UP_S)
        for i in range(flags.pairs):
            sps = {}
            for with_kills in (i % 2 == 0, i % 2 == 1):
                sps[with_kills] = phase(training, servers if with_kills else None)
            prices.append(1 - sps[True] / sps[False])
            rates.append(sps[False])
        kills = training.replaced
    price = statistics.median(prices)
    found = Result(
        {"kills": kills},
        {"kills": KILLS * flags.pairs},
        {
            "price": round(price, 4),
            "prices": [round(p, 4) for p in prices],
            "steps_per_s_without": round(statistics.median(rates)),
        },
    )
    found.require_time(
        price <= flags.most,
        f"a price of {price:.1%}, expected {flags.most:.0%} at most",
    )
    return found


def phase(training: Program, victims: Iterator[int] | None) -> float:
    """Return the steps per second of a phase. `victims` are killed in turn."""
    began_s, began_step = curve(training.run_dir)[-1]
    for _ in range(KILLS):
        time.sleep(KILL_EVERY_S / 2)
        if victims is not None:
            training.kill(next(victims))
        time.sleep(KILL_EVERY_S / 2)
        training.check()
    ended_s, ended_step = curve(training.run_dir)[-1]
    return (ended_step - began_step) / (ended_s - began_s)
