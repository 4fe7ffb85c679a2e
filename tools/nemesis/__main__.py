# SPDX-License-Identifier: Apache-2.0
import argparse
import importlib
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tools.nemesis import result

# Each is a module of this package. Its flags make the short form, for CI. None: there
# is no short form, because a short run says nothing.
FIGURES: dict[str, list[str] | None] = {
    "kills": ["--count", "100"],
    "price": None,
    "hangs": ["--count", "6"],
    "network": [
        *("--blackholes", "2", "--freezes", "10", "--resets", "2", "--flips", "5"),
        *("--half_closes", "5", "--plaintext_flips", "10"),
    ],
    "checkpoints": ["--kills", "20", "--mutations", "50", "--disks", "2"],
    "resume": None,
    "copies": ["--rows", "50"],
    "signals": ["--count", "4"],
    "actors": ["--kills", "10"],
    "memory": ["--kills", "3"],
    "clock": ["--jumps", "2"],
    "storage": ["--count", "1"],
    "hostile": ["--seconds", "60", "--messages", "1000"],
    "leftovers": ["--count", "4"],
    "learning": None,
    "soak": None,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.nemesis",
        description="Break runs on purpose and measure the damage.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="every figure in turn")
    parser.add_argument(
        "--short",
        action="store_true",
        help="fewer faults, in minutes; time limits are not checked, so other programs "
        "may run",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="a folder: each line is also written to FIGURE.json in it",
    )
    commands = parser.add_subparsers(dest="figure", metavar="FIGURE")
    for name in FIGURES:
        module = importlib.import_module(f"tools.nemesis.{name}")
        text = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(
            name,
            help=text,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_flags(command)
    flags = parser.parse_args(argv)
    if flags.figure is None and not (flags.all or flags.short):
        parser.error("name a FIGURE, or give --all or --short")
    if flags.all and (flags.short or flags.figure is not None):
        parser.error("--all is every figure in full: leave out --short and FIGURE")
    forms = FIGURES if flags.short else dict.fromkeys(FIGURES, [])
    if flags.figure is not None:
        words = sys.argv[1:] if argv is None else list(argv)
        # The last word of this name is the figure: --out may have the same value.
        own = words[len(words) - words[::-1].index(flags.figure) :]
        forms = {flags.figure: [*(forms[flags.figure] or []), *own]}
    same = ["--short"] if flags.short else []
    same += [] if flags.out is None else ["--out", str(flags.out)]
    # A list, not a generator: all figures are measured, even after a failure.
    passed = [
        measure(parser.parse_args([*same, name, *words]), [name, *words])
        for name, words in forms.items()
        if words is not None
    ]
    return 0 if all(passed) else 1


def measure(flags: argparse.Namespace, words: Sequence[str]) -> bool:
    """Measure one figure, print its line, and return whether its goals hold.

    In the short form a missed time limit is no failure: other programs may run.
    """
    module = importlib.import_module(f"tools.nemesis.{flags.figure}")
    command = shlex.join(["python", "-m", "tools.nemesis", *words])
    print(f"{time.strftime('%H:%M:%S')} {command}", file=sys.stderr, flush=True)
    began = time.monotonic()
    try:
        found = module.measure(flags)
    except Exception as error:  # For instance, a server never came back.
        traceback.print_exc()
        found = result.Result({}, {}, {}, [f"{type(error).__name__}: {error}"])
    line = result.to_json(
        flags.figure, command, found, seconds=time.monotonic() - began
    )
    print(line, flush=True)
    if flags.out is not None:
        flags.out.mkdir(parents=True, exist_ok=True)
        (flags.out / f"{flags.figure}.json").write_text(line + "\n")
    return not found.failures and (flags.short or not found.late)


def end(signum: int, frame: object) -> None:
    """Leave all contexts: they end the runs of the figure and delete its folders."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    sys.exit(main())
