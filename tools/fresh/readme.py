# SPDX-License-Identifier: Apache-2.0
"""Run the README's first commands, word for word, in an empty Debian.

    sudo .venv/bin/python -m tools.fresh.readme

The system gets only the packages that the README requires for `make`. Then the commands
under "Start" run on a clone of this checkout's last commit. The last command trains for
long, so it is stopped by Ctrl-C when it has made steps, and must end with 75.
"""

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from core.errors import Exit
from tools.fresh.debian import FreshError, Machine, add_base_flag, debian, end

ROOT = Path(__file__).parents[2]
NEEDED = ("git", "make", "python3", "ca-certificates")
HERE = "<this repository>"
STEPS = re.compile(r"step ([\d.]+)(k|M)?/")


def commands(readme: str) -> list[str]:
    """Return the lines of the first block of commands under "Start"."""
    start = readme.partition("\n## Start\n")[2]
    block = start.split("```")[1]
    return [line.partition("#")[0].strip() for line in block.strip().splitlines()]


def script(lines: Sequence[str], source: str) -> str:
    """Return what a user types as a script; the last command replaces the shell."""
    lines = [line.replace(HERE, source) for line in lines]
    return "\n".join(["set -e", *lines[:-1], "exec " + lines[-1]])


def try_readme(machine: Machine) -> None:
    """Run the README's commands on a machine.

    Raises:
      FreshError: one of them failed.
    """
    machine.run(["apt-get", "-qq", "update"])
    install = ["apt-get", "-qq", "install", "-y", "--no-install-recommends"]
    machine.run([*install, *NEEDED])
    # Its name, as that of the repository on a server, names the folder of the clone.
    copy = machine.root / "srv" / "torchbeast.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(ROOT), str(copy)], check=True)
    lines = commands((ROOT / "README.md").read_text())
    shell = machine.start(
        ["bash", "-c", script(lines, "/srv/torchbeast.git")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert shell.stdout is not None
    is_last = is_stopped = False
    try:
        for line in shell.stdout:
            print(line, end="", flush=True)
            is_last = is_last or "Serving PongNoFrameskip-v4" in line
            match = STEPS.search(line)
            if is_last and not is_stopped and match and float(match[1]) > 0:
                is_stopped = True
                subprocess.run(["pkill", "-INT", "-P", str(shell.pid)], check=True)
        status = shell.wait()
    except BaseException:  # A signal.
        end(shell)
        raise
    if status != Exit.STOPPED or not is_stopped:
        raise FreshError(f"the README's commands ended with {status}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_base_flag(parser)
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Cleans up.
    try:
        with debian("bookworm", flags.base) as machine:
            try_readme(machine)
    except FreshError as error:
        print(f"fresh: {error}", file=sys.stderr)
        return 1
    print("fresh: the README's commands work on an empty machine")
    return 0


if __name__ == "__main__":
    sys.exit(main())
