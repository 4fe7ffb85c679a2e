# SPDX-License-Identifier: Apache-2.0
"""Cut off, freeze and reset connections, and measure detection and recovery.

Servers and learner use TLS through proxies, with `--keepalive_s 1` on both sides. The
faults:

    blackhole    a proxy stops forwarding; all sockets stay open
    freeze       SIGSTOP to the server's process
    reset        RST to both ends
    flip         one bit of the forwarded bytes changes
    half-close   FIN to one end; the other direction stays open

`noticed_s` is the time from the beginning of a fault until it is noticed, `back_s` the
time from its end to the next step of that server. Meanwhile every rollout is checked by
arithmetic.

Then the same without TLS, with flips only. This counts how many flips were noticed, and
from how many rollouts with wrong rows the learner learned. There is no goal: without
TLS nothing can tell a flipped bit of an observation from another observation.
"""

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator

from core.remote import tls
from tools.certs import main as make_certs
from tools.nemesis import playground
from tools.nemesis.proxy import Proxies, Proxy
from tools.nemesis.result import Result, spread

KEEPALIVE_S = 1.0
LONGEST_S = 6.0  # After the learner notices it: attempts to connect fail, too.
KINDS = ("blackholes", "freezes", "resets", "flips", "half_closes")
NOTICED_S, BACK_S = 3.0, 1.5  # At most.
PLAINTEXT_STEPS = 400  # Of a server between two flips: no failures in a row.


def add_flags(parser: argparse.ArgumentParser) -> None:
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=50)
    parser.add_argument(
        "--plaintext_flips", type=int, default=50, help="of bits without TLS"
    )
    parser.add_argument("--num_servers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")


def measure(flags: argparse.Namespace) -> Result:
    rng = random.Random(flags.seed)
    asked = {kind: getattr(flags, kind) for kind in KINDS}
    kinds = [kind for kind, count in asked.items() for _ in range(count)]
    rng.shuffle(kinds)
    argv = ["--server_address", "127.0.0.1:0", "--keepalive_s", str(KEEPALIVE_S)]
    with (
        certificates() as certs,
        playground.serve(
            flags.num_servers, *argv, "--tls_dir", f"{certs}/127.0.0.1"
        ) as servers,
        Proxies(servers.addresses) as proxies,
        playground.play(
            servers,
            proxies.addresses,
            seed=flags.seed,
            keepalive_s=KEEPALIVE_S,
            tls=tls.files(f"{certs}/learner"),
        ) as learner,
    ):

        def begin(fault: playground.Fault) -> None:
            if fault.kind == "blackholes":
                proxies.call(fault.server, Proxy.cut)
            elif fault.kind == "freezes":
                servers.signal(fault.server, signal.SIGSTOP)
            else:
                if fault.kind == "flips":
                    proxies.call(fault.server, Proxy.flip)
                elif fault.kind == "half_closes":
                    to_server = rng.random() < 0.5
                    proxies.call(fault.server, Proxy.half_close, to_server)
                else:
                    proxies.call(fault.server, Proxy.reset)
                fault.ended = time.monotonic()

        def end(fault: playground.Fault) -> None:
            if fault.kind == "blackholes":
                proxies.call(fault.server, Proxy.mend)
            else:
                servers.signal(fault.server, signal.SIGCONT)

        storm = playground.Storm(
            servers, learner, begin, end, longest_s=LONGEST_S, rng=rng
        )
        storm.rage(kinds)
        settled = playground.settle(servers, learner)

    injected = Counter(fault.kind for fault in storm.faults)
    plaintext = flip_plaintext(flags, rng)
    injected["plaintext_flips"] = plaintext["flips"]
    asked["plaintext_flips"] = flags.plaintext_flips
    figures = {"keepalive_s": KEEPALIVE_S, "plaintext": plaintext}
    found = Result(injected, asked, figures)
    playground.require_conservation(found, storm, learner, settled)
    for kind in KINDS:
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


def flip_plaintext(flags: argparse.Namespace, rng: random.Random) -> dict[str, int]:
    """Flip bits of the traffic without TLS; count the effects."""
    argv = ["--server_address", "127.0.0.1:0", "--keepalive_s", str(KEEPALIVE_S)]
    flips = 0
    with (
        playground.serve(flags.num_servers, *argv) as servers,
        Proxies(servers.addresses) as proxies,
        playground.play(
            servers, proxies.addresses, seed=flags.seed, keepalive_s=KEEPALIVE_S
        ) as learner,
    ):
        steps = [0] * flags.num_servers  # Of each server at its last flip.
        while flips < flags.plaintext_flips:
            i = rng.randrange(flags.num_servers)
            state = learner.stats()["addresses"][proxies.addresses[i]]
            if state["connected"] and state["steps"] > steps[i] + PLAINTEXT_STEPS:
                proxies.call(i, Proxy.flip)
                steps[i] = state["steps"]
                flips += 1
            servers.check()
            time.sleep(playground.POLL_S)
        playground.settle(servers, learner)
        lost = sum(
            not event.endswith("connected again") for event in learner.take_events()
        )
    wrong = learner.ledger.spliced
    return {"flips": flips, "streams_lost": lost, "rollouts_wrong": wrong}


@contextlib.contextmanager
def certificates() -> Iterator[str]:
    """Yield a folder of certificates."""
    with tempfile.TemporaryDirectory(prefix="nemesis-") as certs:
        with contextlib.redirect_stdout(sys.stderr):
            make_certs(["--hosts", "127.0.0.1", "--out", certs])
        yield certs
