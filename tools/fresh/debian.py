# SPDX-License-Identifier: Apache-2.0
"""Empty Debian systems: folders made by debootstrap, in which commands run by chroot.

Packages come from the same sources as this machine's: the configuration of apt and of
pip, and the certificates and folders that it names, are also used inside. The mounts
and processes of a command are in namespaces of their own, and end with the command.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/usr/local/share/ca-certificates",
)
COPIED = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", *CERTIFICATES)
# Of this machine's environment variables: how to reach the registries of packages.
PASSED_ON = re.compile(r"PIP_.*|SSL_CERT_.*|.*_CA_BUNDLE|(?i:https?_proxy|no_proxy)")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class FreshError(Exception):
    """A fresh machine cannot be made, or a step on it failed."""


def ask(*command: str) -> str:
    """Return what a command of this machine prints."""
    return subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.strip()


def reason_for_none() -> str | None:
    """Say why this machine can make no empty Debian; None if it can."""
    if os.geteuid() != 0:
        return "needs root, for chroot"
    if shutil.which("debootstrap") is None:
        return "there is no debootstrap (Debian: apt-get install debootstrap)"
    if not apt_sources():
        return "this machine's apt has no sources of Debian"
    return None


def apt_sources() -> list[tuple[str, str, str]]:
    """Return this machine's sources of Debian: address, suite, component."""
    lines = ask(
        "apt-get",
        "indextargets",
        "--format",
        "$(REPO_URI) $(RELEASE) $(COMPONENT)",
        "Created-By: Packages",
        "Origin: Debian",
    )
    return [tuple(line.split()) for line in dict.fromkeys(lines.splitlines())]


def add_base_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base",
        type=Path,
        metavar="FOLDER",
        help="an empty Debian that debootstrap --variant=minbase made; it is copied",
    )


@contextlib.contextmanager
def debian(suite: str, base: Path | None = None) -> Iterator["Machine"]:
    """Make an empty Debian, such as "bookworm"; remove it at the end.

    Args:
      base: one that debootstrap has made before, to copy.

    Raises:
      FreshError: this machine cannot make one.
    """
    if (reason := reason_for_none()) is not None:
        raise FreshError(reason)
    mirrors = [address for address, name, _ in apt_sources() if name == suite]
    if not mirrors:
        raise FreshError(f"this machine's apt has no source of Debian's {suite}")
    with tempfile.TemporaryDirectory(prefix="torchbeast-fresh-") as folder:
        root = Path(folder) / "debian"
        print(f"fresh: making an empty Debian {suite}", flush=True)
        command = ["debootstrap", "--variant=minbase", suite, str(root), mirrors[0]]
        if base is not None:
            command = ["cp", "-a", str(base), str(root)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode != 0:
            output = done.stdout[-2000:] + done.stderr
            raise FreshError(f"{shlex.join(command)} failed:\n{output}")
        machine = Machine(root)
        machine.configure()
        yield machine


class Machine:
    """A Debian in a folder."""

    def __init__(self, root: Path):
        self.root = root
        self._mounts: list[str] = []  # Folders of this machine that it sees, too.
        self._env: dict[str, str] = {}

    def configure(self) -> None:
        """Let apt and pip get packages as they do on this machine."""
        sources = "".join(f"deb {' '.join(source)}\n" for source in apt_sources())
        (self.root / "etc/apt/sources.list").write_text(sources)
        options = ask("apt-config", "dump", "Acquire")
        (self.root / "etc/apt/apt.conf.d/99machine").write_text(options + "\n")
        for path in filter(os.path.exists, COPIED):
            self.copy(Path(path), path)
        self._env = {k: v for k, v in os.environ.items() if PASSED_ON.fullmatch(k)}
        pip = ask(sys.executable, "-m", "pip", "config", "list")
        for line in pip.splitlines():
            name, _, value = line.partition("=")
            variable = "PIP_" + name.rpartition(".")[2].upper().replace("-", "_")
            self._env[variable] = " ".join(value.strip("'").split("\\n")).strip()
        places = re.findall(r"/[\w./+-]+", " ".join(self._env.values()))
        for path in filter(os.path.isfile, places):  # Such as pip's constraints.
            self.copy(Path(path), path)
        # "file:///opt/x" is found as "///opt/x"; an index's files are beside `simple`.
        paths = {"/" + x.lstrip("/").removesuffix("/simple") for x in places}
        self._mounts = sorted(
            path for path in paths if self._is_folder_of_packages(path)
        )

    def _is_folder_of_packages(self, path: str) -> bool:
        return os.path.isdir(path) and not (self.root / path[1:]).is_dir()

    def copy(self, source: Path, to: str) -> None:
        """Copy a file, or what is in a folder, of this machine."""
        target = self.root / to.lstrip("/")
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)

    def clone(self, folder: Path) -> "Machine":
        """Return a copy of this machine, in another folder."""
        subprocess.run(["cp", "-a", "--reflink=auto", self.root, folder], check=True)
        other = Machine(folder)
        other._mounts, other._env = self._mounts, self._env
        return other

    def start(
        self,
        command: Sequence[str],
        *,
        user: str = "root",
        cwd: str = "/root",
        env: Mapping[str, str] = {},
        **options: object,
    ) -> subprocess.Popen:
        """Start a command inside. Its processes end with it: see `end`."""
        mounts = ["mount -t proc proc proc", "mount --rbind /dev dev"]
        for path in self._mounts:
            inside = shlex.quote(path[1:])
            mounts += [
                f"mkdir -p {inside}",
                f"mount --bind -o ro {shlex.quote(path)} {inside}",
            ]
        variables = {"PATH": PATH, "LANG": "C.UTF-8", **self._env, **env}
        words = ["env", "-i", *(f"{k}={v}" for k, v in variables.items()), *command]
        inner = shlex.join(["cd", cwd]) + " && exec " + shlex.join(words)
        chroot = ["chroot", f"--userspec={user}:", ".", "/bin/sh", "-c", inner]
        script = " && ".join([*mounts, "exec " + shlex.join(chroot)])
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return subprocess.Popen(
            [*unshare, "/bin/sh", "-c", script],
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            **options,  # type: ignore[call-overload]
        )

    def run(self, command: Sequence[str], **options: object) -> None:
        """Run a command inside to its end.

        Raises:
          FreshError: it failed.
        """
        print(f"fresh: {shlex.join(command)}", flush=True)
        process = self.start(command, **options)  # type: ignore[arg-type]
        try:
            status = process.wait()
        except BaseException:  # A signal.
            end(process)
            raise
        if status != 0:
            raise FreshError(f"{shlex.join(command)} ended with {status}")


def end(process: subprocess.Popen) -> None:
    """Kill what `Machine.start` has started, and all that came of it."""
    # unshare's --kill-child does not reach a child that has become another user.
    subprocess.run(["pkill", "-KILL", "-P", str(process.pid)])
    process.kill()
    process.wait()
