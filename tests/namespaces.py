# SPDX-License-Identifier: Apache-2.0
"""Hosts that network namespaces play, for tests as root on Linux."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.conftest import DEADLINE_S


def ip(*args: str) -> str:
    return subprocess.run(
        ["ip", *args], check=True, capture_output=True, text=True
    ).stdout


def reason_for_none() -> str | None:
    """Say why no namespaces can be made; None if they can."""
    if shutil.which("ip") is None:
        return "needs the program ip (Debian: apt install iproute2)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    name = f"torchbeast-{os.getpid()}-probe"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"may not make network namespaces: {error.stderr.strip()}"
    try:
        ip("netns", "exec", name, "true")
        ip("-n", name, *"link add cable0 type veth peer name cable1".split())
        ip("-n", name, *"rule add priority 1 ipproto tcp sport 1 blackhole".split())
    except subprocess.CalledProcessError as error:
        return f"may not use network namespaces: {error.stderr.strip()}"
    finally:
        ip("netns", "delete", name)
    return None


def require() -> None:
    """Skip the test where no namespaces can be made."""
    if (reason := reason_for_none()) is not None:
        pytest.skip(reason)


def stop(process: subprocess.Popen) -> int:
    """Send SIGTERM; return the exit status. Kills a process that does not end."""
    process.terminate()
    try:
        return process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


class Hosts:
    """Two hosts with a cable between them, that know each other's names.

    Each has its own network, hostname and /etc/hosts. A context manager.
    """

    def __init__(self, names: Sequence[str], folder: Path):
        self._spaces = {name: f"torchbeast-{os.getpid()}-{name}" for name in names}
        self._etc_hosts = folder / "hosts"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Hosts":
        addresses = {name: f"10.78.0.{i}" for i, name in enumerate(self._spaces, 1)}
        lines = ["127.0.0.1 localhost", *(f"{a} {n}" for n, a in addresses.items())]
        self._etc_hosts.write_text("\n".join(lines) + "\n")
        self._etc_hosts.chmod(0o644)  # Other users look for names, too.
        with contextlib.ExitStack() as stack:
            for space in self._spaces.values():
                ip("netns", "add", space)
                stack.callback(ip, "netns", "delete", space)
            one, other = self._spaces.values()
            cable = f"link add eth0 type veth peer name eth0 netns {other}"
            ip("-n", one, *cable.split())
            for name, space in self._spaces.items():
                address = f"{addresses[name]}/24"
                ip("-n", space, "address", "add", address, "dev", "eth0")
                for device in ("lo", "eth0"):
                    ip("-n", space, "link", "set", device, "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def close(self, name: str, *, port: int) -> None:
        """Drop TCP packets to a host, but for those from `port` of the other host.

        So the host can connect to that port, and the other host cannot connect to it.
        A firewall would do this by connection; nft and iptables may not be installed.
        """
        for rule in (
            f"add priority 1 iif eth0 ipproto tcp sport {port} lookup local",
            "add priority 2 iif eth0 ipproto tcp blackhole",
            "add priority 3 lookup local",
            "delete priority 0",  # lookup local, for all packets.
        ):
            ip("-n", self._spaces[name], "rule", *rule.split())

    def on(self, name: str, *command: str) -> list[str]:
        """Return a command line that runs `command` on a host."""
        # Not `ip netns exec`, which would hide /sys/fs/cgroup.
        there = ["nsenter", f"--net=/run/netns/{self._spaces[name]}"]
        setup = f"hostname {name} && mount --bind {self._etc_hosts} /etc/hosts"
        own = ["unshare", "--uts", "--mount", "sh", "-c", f'{setup} && exec "$@"', "sh"]
        return [*there, *own, *command]


# Arguments: user, an empty folder, pairs of a path and where it appears, "--", the
# command. Only the command sees the mounts: `Hosts.on` gives it a namespace of its own.
CONTAINER = """
user=$1 root=$2
umask 022
shift 2
mount -t tmpfs none "$root"
mkdir -m 1777 "$root/tmp"
while [ "$1" != -- ]; do
    mkdir -p "$root$2"
    mount --rbind "$1" "$root$2"
    shift 2
done
shift
exec chroot --userspec="$user" --groups= "$root" "$@"
"""


def in_container(
    *command: str,
    user: str,
    mounts: Mapping[str, Path],
    env: Mapping[str, str],
    folder: Path,
    cwd: str,
) -> list[str]:
    """Return a command line for `Hosts.on`: `command` in a container, of a kind.

    The container's files are the system's, Python's and `mounts`. So nothing else is at
    "/", and the command finds "/runs" although the host has no such folder.

    Args:
      user: "UID:GID".
      mounts: folders, by where the command finds them.
      env: all environment variables.
      folder: an empty folder.
    """
    system = ("bin", "sbin", "lib", "lib64", "usr", "etc", "proc", "sys", "dev")
    folders = {
        f"/{name}": Path("/", name) for name in system if Path("/", name).exists()
    }
    folders |= {sys.base_prefix: Path(sys.base_prefix), **mounts}
    pairs = [word for to, path in folders.items() for word in (str(path), to)]
    variables = [f"{name}={value}" for name, value in env.items()]
    inside = ["env", "-i", f"--chdir={cwd}", *variables, *command]
    setup = ["sh", "-e", "-c", CONTAINER, "sh", user, str(folder), *pairs]
    return [*setup, "--", *inside]
