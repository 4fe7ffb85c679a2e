# SPDX-License-Identifier: Apache-2.0
"""Send hostile messages to a server and to a learner, then random ones.

The messages in tests/hostile.py are sent in both directions, each time while an honest
peer is connected too. A learner gets --messages damaged rows on many streams at the
same time; one of its servers is honest. Then all code that reads data from strangers is
fuzzed: the C++ code under AddressSanitizer and UBSan, and the Python code
(tools/fuzz.py). Each target runs for a minute, in turn, until there are --executions;
or each runs once, for --seconds in all.

No process may die, no sanitizer may report, and no answer may be wrong.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tests import hostile
from tools.nemesis.result import REPOSITORY, Result

TURN_S = 60.0
NUM_EVIL = 50  # Streams to a server that sends damaged rows.
FUZZERS = REPOSITORY / "csrc" / "tests"
# For each target, the command that runs it, given the limit in seconds and the seed.
TARGETS: dict[str, Callable[[float, int], list[str]]] = {
    **{
        name: lambda seconds, seed, name=name: [
            *(str(FUZZERS / "build" / "fuzz" / name), f"-seed={seed}"),
            f"-max_total_time={seconds}",
            str(FUZZERS / "build" / "fuzz" / f"{name}.corpus"),
        ]
        for name in ("fuzz_wire", "fuzz_pool")
    },
    **{
        name: lambda seconds, seed, name=name: [
            *(sys.executable, "-m", "tools.fuzz", name, f"--seed={seed}"),
            f"--seconds={seconds}",
        ]
        for name in ("server", "welcome", "dial", "checkpoint")
    },
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--messages", type=int, default=10_000, help="damaged rows to a learner"
    )
    parser.add_argument(
        "--executions", type=int, default=10**6, help="of all fuzzers together"
    )
    parser.add_argument(
        "--seconds", type=float, help="fuzz for this time in all; ignores --executions"
    )


def measure(flags: argparse.Namespace) -> Result:
    cases, wrong, deaths = play_corpus()
    sent, more = storm_learner(flags.messages)
    wrong += more
    executions: Counter[str] = Counter()
    edges: dict[str, int] = {}
    reports = []
    subprocess.run(
        ["make", "-j2", "-C", FUZZERS, "fuzzers"], check=True, stdout=sys.stderr
    )
    turn_s = flags.seconds / len(TARGETS) if flags.seconds else TURN_S
    for seed in range(1, 1000):
        for name, command in TARGETS.items():
            runs, covered, report = fuzz(name, command(turn_s, seed))
            executions[name] += runs
            edges |= covered
            reports += report
        if reports or flags.seconds or executions.total() >= flags.executions:
            break
    found = Result(
        injected={**cases, "damaged rows": sent, "executions": executions.total()},
        asked={
            "messages to servers": len(hostile.TO_SERVER),
            "messages to learners": len(hostile.TO_LEARNER),
            "descriptions": len(hostile.TO_DESCRIBE),
            "damaged rows": flags.messages,
            "executions": 1 if flags.seconds else flags.executions,
        },
        figures={
            "deaths": deaths,
            "sanitizer_reports": len(reports),
            "executions": dict(executions),
            "edges": edges,
        },
    )
    found.require(deaths == 0, f"{deaths} processes died")
    for what in (*wrong, *reports):
        found.require(False, what)
    return found


def play_corpus() -> tuple[Counter[str], list[str], int]:
    """Return the number of cases of each kind, the errors, and the deaths."""
    played: Counter[str] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        victim, learner = hostile.Victim(folder), hostile.Learner()
        evil = hostile.EvilServer(f"unix:{folder}/e")

        def check(kind: str, name: str, function: Callable[..., None], *args: Any):
            try:
                function(*args)
            except Exception as error:  # Of whatever kind: this case failed.
                wrong.append(f"{kind}, {name}: {type(error).__name__}: {error!s:.500}")
            played[kind] += 1

        try:
            for name, attack in hostile.TO_SERVER.items():
                function = hostile.server_survives
                check("messages to servers", name, function, victim, attack)
            for name, case in hostile.TO_LEARNER.items():
                args = (learner, victim, evil, case)
                check("messages to learners", name, hostile.learner_survives, *args)
            for name, (description, said) in hostile.TO_DESCRIBE.items():
                args = (learner, evil, description, said)
                check("descriptions", name, hostile.description_is_refused, *args)
            processes = (victim.process, learner.process)
            deaths = sum(process.poll() is not None for process in processes)
        finally:
            victim.close()
            learner.close()
            evil.stop()
    return played, wrong, deaths


def storm_learner(count: int) -> tuple[int, list[str]]:
    """Send a learner `count` damaged rows; return how many were sent, and errors."""
    rng = random.Random(0)
    sent, wrong = 0, []
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        victim, learner = hostile.Victim(folder), hostile.Learner()
        evil = hostile.EvilServer(f"unix:{folder}/e", num_threads=2 * NUM_EVIL)
        honest = hostile.Honest(hostile.describe(victim.address))

        def forge() -> Iterator[bytes]:
            nonlocal sent
            yield honest.greeting()
            for seq in range(rng.randrange(3)):
                yield honest.step(seq)
            sent += 1
            yield damage(rng, honest.step(rng.randrange(4)))

        evil.forge = forge
        request = {
            "play": [victim.address, *[evil.address] * NUM_EVIL],
            **{"evil": evil.address, "said": ".", "times": 10 * NUM_EVIL},
        }
        try:
            while sent < count and not wrong:
                answer = learner(**request)
                received, *rest = answer["ledger"]
                if answer["error"] or received != sum(rest):
                    wrong.append(f"damaged rows: {answer['error']} {answer['ledger']}")
                if not all(map(hostile.is_printable, answer["events"])):
                    wrong.append("damaged rows: an event that cannot be printed")
                if answer["honest_steps"] == 0:
                    wrong.append("damaged rows: the honest server made no step")
        except Exception as error:  # Its death, or a time limit.
            wrong.append(f"damaged rows: {type(error).__name__}: {error!s:.500}")
        finally:
            victim.close()
            learner.close()
            evil.stop()
    return sent, wrong


def damage(rng: random.Random, message: bytes) -> bytes:
    data = bytearray(message)
    at = rng.randrange(len(data))
    match rng.randrange(4):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 20))
        case 3:
            data[at : at + 8] = rng.randbytes(8)
    return bytes(data)


def fuzz(name: str, command: list[str]) -> tuple[int, dict[str, int], list[str]]:
    """Return the executions, the edges covered (if known), and the reports."""
    if command[-1].endswith(".corpus"):
        subprocess.run(["mkdir", "-p", command[-1]], check=True)
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True)
    text = done.stderr.decode(errors="replace")
    runs = max((int(n) for n in re.findall(r"^#(\d+)", text, re.MULTILINE)), default=0)
    covered = re.findall(r"cov: (\d+)", text)
    if done.returncode != 0:
        return runs, {}, [f"{name}: status {done.returncode}: {text[-2000:]}"]
    return runs, {name: int(covered[-1])} if covered else {}, []
