# SPDX-License-Identifier: Apache-2.0
"""Kill environment servers (SIGKILL) again and again, and check every rollout.

Servers are killed at random moments, each again after it is back. Every rollout that
reaches the learner is checked by arithmetic: it must be whole and come once. The actor
pool's counts must add up. `back_s` is the time from a kill to the first step of the
server that replaced the killed one.
"""

import argparse
import collections
import os
import random
import signal
import time

from tools.nemesis import playground
from tools.nemesis.result import Result, spread

BACK_P50_S, BACK_P99_S = 0.5, 2.0
# How much more there may be at the end than at the start.
GROWTH = {"fds": 4, "threads": 4, "memory_mb": 20.0}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=1000, help="kills")
    parser.add_argument("--num_servers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")


def measure(flags: argparse.Namespace) -> Result:
    with (
        playground.serve(flags.num_servers) as servers,
        playground.play(servers, seed=flags.seed) as learner,
    ):

        def kill(fault: playground.Fault) -> None:
            servers.signal(fault.server, signal.SIGKILL)
            fault.ended = time.monotonic()

        pids = {"learner": os.getpid(), "supervisor": servers.process.pid}
        storm = playground.Storm(servers, learner, kill, rng=random.Random(flags.seed))
        first = min(flags.num_servers, flags.count)
        storm.rage(["kills"] * first)  # All at once: gRPC's pools grow to their size.
        start = playground.least_resources(pids)
        storm.rage(["kills"] * (flags.count - first))
        settled = playground.settle(servers, learner)
        end = playground.least_resources(pids)

    deaths = collections.Counter(
        match[1] for match in servers.find(r"Server \d+ died \((.*?)\)")
    )
    back = spread([fault.back_s() for fault in storm.faults])
    found = Result(
        {"kills": deaths["killed by SIGKILL"]},
        {"kills": flags.count},
        {"deaths": dict(deaths), "back_s": back, "start": start, "end": end},
    )
    playground.require_conservation(found, storm, learner, settled)
    found.require_time(
        back["p50"] <= BACK_P50_S and back["p99"] <= BACK_P99_S,
        f"back after {back} s, expected p50 {BACK_P50_S} and p99 {BACK_P99_S} at most",
    )
    for name in pids:
        for what, most in GROWTH.items():
            grown = end[name][what] - start[name][what]
            found.require(
                grown <= most, f"{name}: {grown} more {what}, expected {most} at most"
            )
    return found
