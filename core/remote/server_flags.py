# SPDX-License-Identifier: Apache-2.0
"""Flags about environment servers, for the learner and for polybeast_env."""

import argparse
import collections
import re
from collections.abc import Callable, Sequence
from typing import Any

from core import ranks
from core.flag_types import divisor, int_at_least, number
from core.remote import tls
from core.remote.addresses import find_wrong_host
from core.rollout import new_rollouts
from core.running.common_flags import environment_flags, has_remote_servers
from core.running.machine import num_cores

ENVS_PER_STREAM = 8
MIN_MAX_STREAMS = 128  # The least default of --max_streams for a list that may change.
LISTS = ("dns:", "file:")  # Entries of --server_addresses that stand for a list.
MAX_CHARS = 1000  # Of an address or range. To parse a longer one may take minutes.
MAX_RANGE = 1 << 16  # Addresses in a range, so that a typing error fills no memory.
MAX_UNIX_PATH = 107  # Bytes: the limit of Linux, as in csrc/transport_grpc.cc.
STREAMS_PER_SERVER = 2  # One stream steps while the other waits for its actions.
STREAMS_FOR_A_GPU = 3  # A GPU takes longer to choose actions.

# The flags of `add_server_flags` that the learner passes on to its own servers.
SERVER_FLAGS = ("num_servers", "envs_per_stream", "streams_per_server", "keepalive_s")
# The flags of its own servers that a learner may also have with --server_addresses or
# --listen.
LEARNER_FLAGS = ("env", "env_step_timeout_s", "keepalive_s")


def addresses(text: str) -> tuple[str, ...]:
    """Parse --server_addresses: plain addresses and lists. For argparse's `type=`.

    The result contains lists as dns:NAME:PORT or file:PATH (@PATH becomes file:PATH).
    core.remote.server_lists reads them.
    """
    return _parse_each(text, _list_or_addresses)


def tcp_addresses(text: str) -> tuple[str, ...]:
    """Parse a comma list of host:port, with ranges. For argparse's `type=`."""
    result = _parse_each(text, plain_addresses)
    for address in result:
        if address.startswith("unix:"):
            raise argparse.ArgumentTypeError(f"expected host:port, got {address!r}")
    return result


def _parse_each(text: str, parse: Callable[[str], list[str]]) -> tuple[str, ...]:
    """Parse the parts of a comma list; refuse a list with an address twice, or none."""
    result = [x for part in filter(None, text.split(",")) for x in parse(part)]
    for address, count in collections.Counter(result).items():
        if count > 1:
            raise argparse.ArgumentTypeError(
                f"expected each address once, got {address} twice"
            )
    if not result:
        raise argparse.ArgumentTypeError(f"expected an address, got {text!r}")
    return tuple(result)


def _list_or_addresses(part: str) -> list[str]:
    if part.startswith("@"):
        part = f"file:{part.removeprefix('@')}"
    if part == "file:":
        raise argparse.ArgumentTypeError("expected file:PATH, got no path")
    if part.startswith("dns:"):
        match = re.fullmatch(r"dns:[^:/#\s]+:(\d+)", part)
        if match is None or not 1 <= int(match[1]) <= 65535:
            raise argparse.ArgumentTypeError(
                f"expected dns:NAME:PORT with a port from 1 to 65535, got {part!r}"
            )
    return [part] if part.startswith(LISTS) else plain_addresses(part)


def plain_addresses(part: str) -> list[str]:
    """Parse a server's address or a range of them: "a:1-3" is a:1, a:2 and a:3.

    Raises:
      argparse.ArgumentTypeError: the text is no such address or range.
    """
    unquoted_address(part)
    match = None
    if len(part) <= MAX_CHARS:
        match = re.fullmatch(r"(unix:/.*?|.*:)(?:(\d+)-)?(\d+)", part)
    if part.startswith("unix:/") and (match is None or match[2] is None):
        _check_address(part)
        return [part]  # A path may end in a number without being a range.
    if match is None or part.startswith((":", *LISTS)):
        raise argparse.ArgumentTypeError(
            f"expected host:port, host:4431-4446, unix:/path or unix:/path.0-15, "
            f"got {part!r:.200}"
        )
    last = int(match[3])
    first = last if match[2] is None else int(match[2])
    if first > last:
        raise argparse.ArgumentTypeError(
            f"expected a range from low to high, got {part!r}"
        )
    if not (1 <= first and last <= 65535 or part.startswith("unix:")):
        raise argparse.ArgumentTypeError(
            f"expected ports from 1 to 65535, got {part!r}"
        )
    if last - first >= MAX_RANGE:
        raise argparse.ArgumentTypeError(
            f"expected a range of at most {MAX_RANGE} addresses, got {part!r}"
        )
    result = [f"{match[1]}{i}" for i in range(first, last + 1)]
    for address in result:
        _check_address(address)
    return result


def _check_address(address: str) -> None:
    """Refuse what the actor pool refuses, and what no name of a host can be.

    A list is read during the run, and an error of the actor pool would end the run.
    """
    if address.startswith("unix:"):
        num_bytes = len(address.removeprefix("unix:").encode())
        if num_bytes > MAX_UNIX_PATH:
            raise argparse.ArgumentTypeError(
                f"expected a path of at most {MAX_UNIX_PATH} bytes, got "
                f"{address!r:.200}: choose a shorter folder, such as one in /tmp"
            )
        return
    if expected := find_wrong_host(address.rpartition(":")[0]):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {address!r:.200}")


def unquoted_address(text: str) -> str:
    """Return an address unless gRPC would read it otherwise. For argparse's `type=`."""
    if text.startswith("unix:") and (wrong := re.search("[%#?,]", text)):
        raise argparse.ArgumentTypeError(
            f"expected a path without {wrong[0]!r}, since gRPC reads paths as parts of "
            f"URLs, got {text!r}. For a folder in TMPDIR, set TMPDIR to another one"
        )
    return text


def tcp_address(text: str) -> str:
    """Parse HOST:PORT or :PORT. For argparse's `type=`."""
    match = re.fullmatch(r"(.*):(\d+)", text)
    if match is None or text.startswith(("unix:", *LISTS)) or int(match[2]) > 65535:
        raise argparse.ArgumentTypeError(f"expected host:port, got {text!r}")
    _check_address(text)
    return f"{match[1] or '127.0.0.1'}:{match[2]}"


def add_address_flags(group: Any) -> None:
    """Add the learner's flags for servers that the learner does not start itself."""
    group.add_argument(
        "--listen",
        type=tcp_address,
        metavar="HOST:PORT",
        help="address at which machines with servers may dial in at any time: python "
        "-m polybeast_env --learner_address HOST:PORT. 0.0.0.0:4431 lets other "
        "machines dial in and needs --tls_dir. With several learners (torchrun), "
        "learner i listens at PORT + i",
    )
    group.add_argument(
        "--server_addresses",
        type=addresses,
        metavar="ADDRESSES",
        help="servers that run already, as a comma list: host:port, host:4431-4446, "
        "unix:/path, unix:/path.0-15. Two kinds of entries name servers that may "
        "change during the run: dns:name:port, all IPv4 addresses of a DNS name (if it "
        "has none, all IPv6 addresses); and file:path or @path, a file of addresses. "
        "Default: this program starts its own servers on this machine",
    )
    group.add_argument(
        "--max_streams",
        type=int_at_least(1),
        metavar="N",
        help="with --server_addresses or --listen, the largest number of streams at a "
        "time; each server has --streams_per_server streams. Default: the number of "
        "all servers' streams. If the list may change: twice the number at the start, "
        f"at least {MIN_MAX_STREAMS}",
    )


def add_server_flags(group: Any) -> None:
    """Add the flags that the learner and polybeast_env both have."""
    group.add_argument(
        "--num_servers",
        type=int_at_least(1),
        metavar="N",
        help="environment server processes on this machine. Default: one for each core "
        "that this process may use",
    )
    group.add_argument(
        "--envs_per_stream",
        type=int_at_least(1),
        metavar="K",
        help="environments of a stream. The stream steps them one after another, and "
        "one message carries the rows of all. Default: 8; for servers that the "
        "learner starts itself the largest number up to 8 that divides --batch_size "
        "(with --replay_ratio its new rollouts)",
    )
    group.add_argument(
        "--streams_per_server",
        type=int_at_least(1),
        metavar="S",
        help="streams of a server process, each with K environments. While one stream "
        "waits for actions, another one steps its environments. Default: 2, "
        "or 3 if a GPU chooses the actions of the learner's own servers",
    )
    group.add_argument(
        "--pipes_basename",
        type=unquoted_address,
        metavar="unix:PATH",
        help="serve at the unix sockets PATH.0, PATH.1 and so on",
    )
    group.add_argument(
        "--tls_dir",
        metavar="DIR",
        help="encrypt TCP connections, and accept only peers with a certificate of the "
        "same CA. DIR contains ca.pem, cert.pem and key.pem; create it by python -m "
        "tools.certs",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="exchange data with other machines without --tls_dir: anybody who reaches "
        "the port can take part, and the network can read and change all traffic",
    )
    group.add_argument(
        "--keepalive_s",
        type=number(0.1, 3600),
        default=10.0,
        help="interval of network pings in seconds. Learner and servers notice within "
        "twice this time that the other machine is frozen or cut off from the network. "
        "A server answers no ping while C code of an environment holds the GIL: give "
        "both sides more than the longest such call takes",
    )


def passed_on() -> list[argparse.Action]:
    """Return the flags that the learner passes on to the servers that it starts."""
    parser = argparse.ArgumentParser(add_help=False)
    add_server_flags(parser)
    ours = [action for action in parser._actions if action.dest in SERVER_FLAGS]
    return [*environment_flags(), *ours]


def check_tls_flags(
    parser: argparse.ArgumentParser,
    flags: argparse.Namespace,
    addresses: Sequence[str],
) -> None:
    """Refuse TLS flags that contradict each other or do not suit these addresses."""
    if flags.tls_dir is None:
        return
    if flags.insecure:
        parser.error(
            f"--tls_dir is {flags.tls_dir} and --insecure is set: they contradict each "
            "other. Leave one out."
        )
    # Of several learners, one may have a share without TCP.
    is_share = bool(addresses) and ranks.size() > 1
    if all(address.startswith("unix:") for address in addresses) and not is_share:
        parser.error(
            f"--tls_dir is {flags.tls_dir} but is for TCP, and all addresses are unix "
            "sockets, which no other user can open. Leave it out."
        )


def check_servers(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Check a learner's flags about servers; set the sizes of its own servers."""
    listen = (flags.listen,) if flags.listen else ()
    check_tls_flags(parser, flags, (*(flags.server_addresses or ()), *listen))
    if has_remote_servers(flags):
        check_server_addresses(parser, flags)
        return
    if flags.insecure and flags.mode == "train":
        parser.error(
            "--insecure is set but is for --server_addresses and --listen, and this "
            "program starts its own servers. Leave it out."
        )
    if not (flags.pipes_basename or "unix:").startswith("unix:"):
        parser.error(
            f"--pipes_basename is {flags.pipes_basename} but must be unix:/path. For "
            "TCP start python -m polybeast_env and use --server_addresses."
        )
    if flags.max_streams is not None:
        parser.error(
            f"--max_streams is {flags.max_streams} but is for --server_addresses and "
            "--listen. For the servers that this program starts, use --num_servers."
        )
    set_num_servers(parser, flags)
    B, K = new_rollouts(flags), flags.envs_per_stream
    if B % K:
        parser.error(
            f"{describe_new_rollouts(flags)} but must be a multiple of "
            f"--envs_per_stream ({K}): a stream makes {K} rollouts at a time. Try "
            f"--envs_per_stream {divisor(B, at_most=K)}."
        )


def check_learner_address(
    parser: argparse.ArgumentParser, flags: argparse.Namespace
) -> None:
    """Check the flags of servers that dial a learner."""
    for name in ("server_address", "pipes_basename"):
        if getattr(flags, name) is not None:
            parser.error(
                f"--{name} is {getattr(flags, name)} and --learner_address is "
                f"{','.join(flags.learner_address)}: servers either listen or dial the "
                "learner. Leave one out."
            )
    if flags.num_servers < len(flags.learner_address):
        parser.error(
            f"--num_servers is {flags.num_servers} but --learner_address names "
            f"{len(flags.learner_address)} learners, and each needs at least one "
            "server. Start more servers, or name fewer learners."
        )
    if problem := find_unprotected(flags.learner_address, flags):
        parser.error(f"--learner_address has {problem}")


def describe_new_rollouts(flags: argparse.Namespace) -> str:
    """Return "--batch_size is B", or with replay the number of new rollouts."""
    if not flags.replay_ratio:
        return f"--batch_size is {flags.batch_size}"
    return (
        f"the number of new rollouts in a batch is {new_rollouts(flags)} (--batch_size "
        f"{flags.batch_size}, --replay_ratio {flags.replay_ratio:g})"
    )


def check_server_addresses(
    parser: argparse.ArgumentParser, flags: argparse.Namespace
) -> None:
    """Refuse flags for a learner's own servers, and traffic without protection."""
    if flags.mode != "train":  # The test's environment is in this program.
        return
    who = "--server_addresses names" if flags.server_addresses else "--listen is for"
    ours = (action.dest for action in passed_on())
    for name in (*ours, "num_actors", "pipes_basename"):
        is_ours = name not in LEARNER_FLAGS
        if is_ours and getattr(flags, name) != parser.get_default(name):
            parser.error(
                f"--{name} is {getattr(flags, name)} but {who} servers that this "
                "program does not start. Give it to python -m polybeast_env, or leave "
                "--server_addresses and --listen out."
            )
    if problem := find_unprotected(flags.server_addresses or (), flags):
        parser.error(f"--server_addresses has {problem}")
    if flags.listen and (problem := find_unprotected((flags.listen,), flags)):
        parser.error(f"--listen has {problem}")


def find_unprotected(addresses: Sequence[str], flags: argparse.Namespace) -> str | None:
    """Describe the first address that would be used without protection, or None."""
    if flags.tls_dir or flags.insecure:
        return None
    for address in addresses:
        if address.startswith("file:"):
            continue  # core.remote.server_lists checks the addresses in the file.
        if tls.is_public(address.removeprefix("dns:")):
            return (
                f"{address}, which is not on this machine. Either encrypt the traffic "
                "and authenticate both sides: --tls_dir DIR, with a folder that "
                f"{tls.CERTS_COMMAND} has made. Or allow anybody on the network to "
                "read and change the traffic: --insecure."
            )
    return None


def set_num_servers(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Set the numbers of local servers, streams and environments that are not given."""
    A = flags.num_actors
    sizes = (flags.streams_per_server, flags.envs_per_stream)
    if A is not None and sizes == (None, None) and flags.num_servers in (None, A):
        # As in TorchBeast: a server process for each environment.
        flags.num_servers, flags.streams_per_server, flags.envs_per_stream = A, 1, 1
        return
    if flags.envs_per_stream is None:
        flags.envs_per_stream = divisor(new_rollouts(flags), at_most=ENVS_PER_STREAM)
    if flags.streams_per_server is None:
        on_gpu = flags.actor_device.startswith("cuda")
        flags.streams_per_server = STREAMS_FOR_A_GPU if on_gpu else STREAMS_PER_SERVER
    per_server = flags.streams_per_server * flags.envs_per_stream
    if flags.num_servers is None:
        flags.num_servers = num_cores() if A is None else max(1, A // per_server)
    total = flags.num_servers * per_server
    if A is not None and A != total:
        parser.error(
            f"--num_actors is {A} but --num_servers ({flags.num_servers}) x "
            f"--streams_per_server ({flags.streams_per_server}) x --envs_per_stream "
            f"({flags.envs_per_stream}) is {total}. Leave --num_actors out."
        )
    flags.num_actors = total
