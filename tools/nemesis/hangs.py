# SPDX-License-Identifier: Apache-2.0
"""Let environments hang, half of them in C with the GIL held.

Environments hang one after another on command, and report when. `found_s` is the time
from there to the warning of `polybeast_env`, which must show the stack of the function
that hangs, kill the server and start it again. Meanwhile every rollout is checked by
arithmetic.
"""

import argparse
import itertools
import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterable

from tools.nemesis import playground
from tools.nemesis.environments import HANGS, order_file
from tools.nemesis.result import Result, quantile, spread

LIMIT_S = 1.0  # For a step: the smallest --env_step_timeout_s.
FOUND_P99_S = 1.5
GAP_S = 0.5  # Between two hangs, so that no two servers write their stacks at once.


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=100, help="hangs")
    parser.add_argument("--num_servers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")


def measure(flags: argparse.Namespace) -> Result:
    kinds = list(itertools.islice(itertools.cycle(HANGS), flags.count))
    argv = ["--env_step_timeout_s", str(LIMIT_S)]
    with (
        playground.serve(flags.num_servers, *argv, env="make_hanging") as servers,
        playground.play(servers, seed=flags.seed) as learner,
    ):

        def hang(fault: playground.Fault) -> None:
            server = f"server-{fault.server}"
            order_file(servers.folder, server, fault.kind).touch()
            fault.ended = time.monotonic()

        storm = playground.Storm(
            servers, learner, hang, gap_s=GAP_S, rng=random.Random(flags.seed)
        )
        storm.rage(kinds)
        settled = playground.settle(servers, learner)

    hung, found_s, stacks = read(servers.lines)
    found = Result(
        hung,
        {kind: kinds.count(kind) for kind in HANGS},
        {
            "found": len(found_s),
            "found_s": spread(found_s),
            "stacks": sum(stacks.values()),
        },
    )
    playground.require_conservation(found, storm, learner, settled)
    found.require(
        len(found_s) == flags.count, f"found {len(found_s)} of {flags.count} hangs"
    )
    found.require(stacks == hung, f"stacks of {stacks}, expected {hung}")
    found.require_time(
        quantile(found_s or [math.inf], 0.99) <= FOUND_P99_S,
        f"found after {found.figures['found_s']} s, expected p99 {FOUND_P99_S} at most",
    )
    return found


def read(
    lines: Iterable[tuple[float, str]],
) -> tuple[Counter[str], list[float], Counter[str]]:
    """Return the hangs by kind, the time until each was found, and stacks by kind."""
    hung, stacks = Counter[str](), Counter[str]()
    began: dict[str, float] = {}  # Hangs not found yet, by server.
    found_s = []
    for t, line in lines:
        if match := re.search(r"server-(\d+) hangs in (\w+) at ([\d.]+)", line):
            hung[match[2]] += 1
            began[match[1]] = float(match[3])
        elif match := re.match(r"Server (\d+) hangs: ", line):
            if match[1] in began:
                found_s.append(t - began.pop(match[1]))
        for kind, function in HANGS.items():
            stacks[kind] += f" in {function.__name__}" in line
    return hung, found_s, stacks
