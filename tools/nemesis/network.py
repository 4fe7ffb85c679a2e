# SPDX-License-Identifier: Apache-2.0
"""Servers cut off, frozen and reset: how soon is it noticed, and all well again?

Servers and learner speak TCP through proxies, with `--keepalive_s 1` on both sides.
A blackhole is a proxy that stops forwarding while all sockets stay open, a freeze a
SIGSTOP of the server's process, a reset an RST to both ends. `noticed_s` counts from
the beginning of a fault, `back_s` from its end to the next step of that server. Every
rollout is checked by arithmetic meanwhile.
"""

import argparse
import random
import signal
import time
from collections import Counter

from tools.nemesis import playground
from tools.nemesis.proxy import Proxies
from tools.nemesis.result import Result, spread

KEEPALIVE_S = 1.0
LONGEST_S = 6.0  # After it was noticed: attempts to connect fail, too.
NOTICED_S, BACK_S = 3.0, 1.5  # At most.


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blackholes", type=int, default=50)
    parser.add_argument("--freezes", type=int, default=50)
    parser.add_argument("--resets", type=int, default=50)
    parser.add_argument("--num_servers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")


def measure(flags: argparse.Namespace) -> Result:
    rng = random.Random(flags.seed)
    asked = {kind: getattr(flags, kind) for kind in ("blackholes", "freezes", "resets")}
    kinds = [kind for kind, count in asked.items() for _ in range(count)]
    rng.shuffle(kinds)
    argv = ["--server_address", "127.0.0.1:0", "--keepalive_s", str(KEEPALIVE_S)]
    with (
        playground.Servers(flags.num_servers, *argv) as servers,
        Proxies(servers.addresses) as proxies,
        playground.play(
            servers, proxies.addresses, seed=flags.seed, keepalive_s=KEEPALIVE_S
        ) as learner,
    ):

        def begin(fault: playground.Fault) -> None:
            if fault.kind == "blackholes":
                proxies.cut(fault.server)
            elif fault.kind == "freezes":
                servers.signal(fault.server, signal.SIGSTOP)
            else:
                proxies.reset(fault.server)
                fault.ended = time.monotonic()

        def end(fault: playground.Fault) -> None:
            if fault.kind == "blackholes":
                proxies.mend(fault.server)
            else:
                servers.signal(fault.server, signal.SIGCONT)

        storm = playground.Storm(
            servers, learner, begin, end, longest_s=LONGEST_S, rng=rng
        )
        storm.rage(kinds)
        settled = playground.settle(servers, learner)

    injected = Counter(fault.kind for fault in storm.faults)
    found = Result(injected, asked, {"keepalive_s": KEEPALIVE_S})
    playground.require_conservation(found, storm, learner, settled)
    for kind in asked:
        faults = [fault for fault in storm.faults if fault.kind == kind]
        noticed = spread([fault.noticed_s() for fault in faults])
        back = spread([fault.back_s() for fault in faults])
        found.figures[kind] = {"noticed_s": noticed, "back_s": back}
        found.require_time(
            noticed.get("max", 0.0) <= NOTICED_S,
            f"{kind} noticed after {noticed} s, expected {NOTICED_S} at most",
        )
        found.require_time(
            back.get("max", 0.0) <= BACK_S,
            f"back from {kind} after {back} s, expected {BACK_S} at most",
        )
    return found
