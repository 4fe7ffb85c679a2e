# SPDX-License-Identifier: Apache-2.0
"""Run the steps of the Dockerfiles in tools/docker without Docker, and test the result.

    python -m tools.fresh.dockerfiles [learner] [servers]

The steps of an image run in an empty Debian. Then its entry point runs with a few
flags: the learner trains on Catch with its own servers; the image of the servers serves
Pong and must not contain torch. Only the instructions that these Dockerfiles use are
supported.
"""

import argparse
import dataclasses
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.fresh.debian import PATH, FreshError, Machine, add_base_flag, debian, end

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tools" / "docker"
BASE = re.compile(r"debian:(\w+)-slim")
INSTRUCTIONS = ("FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT")


def parse(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile and their arguments.

    Raises:
      ValueError: one is not among INSTRUCTIONS.
    """
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    result = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, _, rest = line.partition(" ")
        if name not in INSTRUCTIONS:
            raise ValueError(f"{name}: expected one of {', '.join(INSTRUCTIONS)}")
        result.append((name, rest.strip()))
    return result


@dataclasses.dataclass
class Image:
    """What a Dockerfile says about running the image, and the machine it made."""

    machine: Machine | None
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    args: dict[str, str] = dataclasses.field(default_factory=dict)
    cwd: str = "/"
    user: str = "root"
    entrypoint: list[str] = dataclasses.field(default_factory=list)

    def expand(self, text: str) -> str:
        known = {"PATH": PATH, **self.args, **self.env}
        return re.sub(r"\$(\w+)", lambda match: known.get(match[1], ""), text)

    def options(self) -> dict[str, object]:
        return {"cwd": self.cwd, "user": self.user, "env": self.env}


def build(dockerfile: Path, machine: Machine | None) -> Image:
    """Do what a Dockerfile says. Without a machine only read it.

    Raises:
      FreshError: a step failed.
    """
    image = Image(machine)
    for name, rest in parse(dockerfile.read_text()):
        if name == "ARG":
            key, _, value = rest.partition("=")
            image.args[key] = " ".join(shlex.split(value))
        elif name == "ENV":
            pairs = (word.partition("=") for word in shlex.split(rest))
            image.env |= {key: image.expand(value) for key, _, value in pairs}
        elif name == "WORKDIR":
            image.cwd = rest
            if machine is not None:
                (machine.root / rest[1:]).mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            image.user = rest
        elif name == "ENTRYPOINT":
            image.entrypoint = json.loads(rest)
        elif name == "RUN" and machine is not None:
            env = {**image.args, **image.env}
            machine.run(["/bin/sh", "-c", rest], **{**image.options(), "env": env})
        elif name == "COPY":
            copy(rest.split(), image)
    return image


def copy(words: list[str], image: Image) -> None:
    """Copy files that git knows. Docker leaves out what *.dockerignore names, too."""
    *sources, target = words
    for source in sources:
        listed = subprocess.run(
            ["git", "ls-files", "--", source],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        if not listed:
            raise FreshError(f"COPY {source}: git knows no such file")
        if image.machine is None:
            continue
        is_folder = (ROOT / source).is_dir()
        for name in listed:
            inside = Path(name).relative_to(source) if is_folder else Path(name).name
            path = Path(image.cwd, target, inside)
            image.machine.copy(ROOT / name, str(path))


# ----------------------------------------------------------------- what images must do


def check_learner(image: Image) -> None:
    assert image.machine is not None
    flags = "--env Catch --total_steps 5000 --num_servers 2 --xpid try".split()
    image.machine.run([*image.entrypoint, *flags], **image.options())
    if not (image.machine.root / "runs/try/checkpoints").is_dir():
        raise FreshError("the learner wrote no checkpoint into /runs")


def check_servers(image: Image) -> None:
    assert image.machine is not None
    command = ["python", "-c", "import torch"]
    if image.machine.start(command, **image.options()).wait() == 0:
        raise FreshError("the servers' image has torch")
    flags = "--env PongNoFrameskip-v4 --num_servers 1".split()
    servers = image.machine.start(
        [*image.entrypoint, *flags],
        **image.options(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert servers.stderr is not None
        for line in servers.stderr:
            print(line, end="", flush=True)
            if "Serving PongNoFrameskip-v4" in line:
                return
    finally:
        end(servers)
    raise FreshError("the servers ended before they served")


CHECKS = {"learner": check_learner, "servers": check_servers}


def size_of(folder: Path) -> float:
    """Return the size of a folder in bytes."""
    words = subprocess.run(["du", "-sxb", folder], capture_output=True, text=True)
    return float(words.stdout.split()[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", nargs="*", help=f"of {', '.join(CHECKS)}; or all")
    add_base_flag(parser)
    flags = parser.parse_args()
    images = flags.images or list(CHECKS)
    (suite,) = {
        BASE.fullmatch(rest)[1]  # type: ignore[index]
        for name in images
        for word, rest in parse((FOLDER / f"{name}.Dockerfile").read_text())
        if word == "FROM"
    }
    try:
        with debian(suite, flags.base) as base, tempfile.TemporaryDirectory() as folder:
            for name in images:
                machine = base.clone(Path(folder) / name)
                image = build(FOLDER / f"{name}.Dockerfile", machine)
                CHECKS[name](image)
                size = size_of(machine.root) / 1e6
                print(f"fresh: {name}.Dockerfile works; the image has {size:.0f} MB")
    except FreshError as error:
        print(f"fresh: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
