# SPDX-License-Identifier: Apache-2.0
"""Environment servers for PolyBeast: many environments, on any machine.

    python -m polybeast_env --env PongNoFrameskip-v4 --num_servers 16 \\
        --server_address 0.0.0.0:4431 --tls_dir ~/torchbeast-certs

Each of `--num_servers` processes listens at an address of its own (here the ports 4431
to 4446) and steps S streams of K environments for the learner that connects:

    this process          server processes                          learner
    ┌────────────┐ fork  ┌─────────────────────────────┐  stream   ┌───────────┐
    │ supervises │ ────► │ :4431   S x K environments  │ ◄───────► │ polybeast │
    │            │ ────► │ :4432   S x K environments  │ ◄───────► │           │
    └────────────┘       └─────────────────────────────┘           └───────────┘

A process that dies or hangs is replaced, and the learner connects again. Without
--server_addresses and --listen the learner starts servers on its own machine.

For your own environment edit create_env. Needs grpcio, numpy, gymnasium and the
packages of the environment; needs neither torch nor a compiler.
"""

import contextlib
import os
import signal

# One OpenMP thread per process unless the user sets another number (numpy reads this
# when it is imported): there are as many processes as cores, and a process that has
# threads must not be forked.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if __name__ == "__main__":
    from core import imports

    imports.end_at_signals()  # Until the program handles them itself.
    imports.open_closed_streams()
    imports.explain_missing_packages()
    # Before a package below imports gRPC, which reads its settings only then.
    with contextlib.suppress(ModuleNotFoundError):
        import core.remote.grpc_settings  # noqa: F401

import argparse
import functools
import logging
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import atari_wrappers
from core import flag_types
from core.environments import stepping
from core.environments.make import make
from core.errors import ConfigError, Exit, leave, one_line
from core.remote import dial_in, server_flags, supervisor
from core.remote.addresses import addresses_to_serve
from core.running import common_flags, terminal
from core.running.machine import num_cores, raise_file_limit
from core.running.signals import StopSignal
from core.running.supervise import ForParent, Repeats, send_at_parents_end

log = logging.getLogger("polybeast_env")

SERVER_ADDRESS = "127.0.0.1:4431"
TICK_S = 0.2  # The main loop checks for signals and dead servers at least this often.


# ---------------------------------------------------------------------- environment


def create_env(flags: argparse.Namespace, render_mode: str | None = None) -> Any:
    """Create the environment to serve. Edit this function to serve your own.

    The environment may have the interface of Gymnasium or of classic gym. Do not clip
    rewards here: the loss does that.

    Args:
      render_mode: None when training; "rgb_array" or "human" when testing.
    """
    if atari_wrappers.is_atari(flags.env):
        options = atari_wrappers.options_of(vars(flags))
        return atari_wrappers.make_atari(flags.env, render_mode=render_mode, **options)
    return make(flags.env, render_mode=render_mode)


def create_environments(
    flags: argparse.Namespace,
    num_envs: int,
    *,
    render_mode: str | None = None,
    **options: Any,
) -> stepping.Environments:
    """Create the K environments of a stream, or the environments of --mode test.

    Edit this only to serve a vector environment: see `core.environments.vector`.

    Args:
      render_mode: as `create_env` takes it.
      options: as `core.environments.stepping.Environments` takes them.
    """
    return stepping.Environments(
        lambda: create_env(flags, render_mode),
        num_envs,
        recycle_games=flags.recycle_games,
        **options,
    )


def env_options(flags: argparse.Namespace, env: Any) -> dict[str, Any]:
    """Return the options of `env`, which create_env made: the learner records them.

    Values are bool, int, float or str. A step counts as `frame_skip` frames, or as one
    if this option is not there. --mode test uses those in common_flags.ATARI_FLAGS
    again.
    """
    return atari_wrappers.recorded_options(vars(flags), env)


# ---------------------------------------------------------------------------- flags


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; exits with status 2 if something is wrong."""
    parser = flag_types.Parser(
        prog="python -m polybeast_env",
        description="Serve environments to a learner, python -m polybeast.",
        formatter_class=flag_types.HelpFormatter,
    )
    common_flags.add_environment_flags(parser)
    servers = parser.add_argument_group("environment servers")
    servers.add_argument(
        "--server_address",
        type=server_flags.unquoted_address,
        help="host:port for the first server, the next ports for the others; or "
        f"unix:/path, with .0, .1... for several. Default: {SERVER_ADDRESS}. Without a "
        "host, :4431, only this machine can connect. With 0.0.0.0:4431 other machines "
        "can connect too, and --tls_dir is needed",
    )
    servers.add_argument(
        "--learner_address",
        type=server_flags.tcp_addresses,
        metavar="HOST:PORT",
        help="instead of listening, dial this learner, which has --listen, now and "
        "whenever the connection is lost: this works behind NAT, and behind firewalls "
        "that let only outgoing connections pass. A comma list (host:4431-4432) shares "
        "the servers among several learners",
    )
    server_flags.add_server_flags(servers)
    # These two are for a learner that starts servers: core.remote.local_servers. End
    # when standard input closes: the parent holds the other end of that pipe, which
    # closes when the parent ends, for whatever reason.
    servers.add_argument("--with_parent", action="store_true", help=argparse.SUPPRESS)
    # At the end remove the folder of the unix sockets too, if it is empty.
    servers.add_argument("--remove_folder", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    flags.env = flags.env or common_flags.ENV
    if flags.server_address is not None and flags.pipes_basename is not None:
        parser.error(
            f"--server_address is {flags.server_address} and --pipes_basename is "
            f"{flags.pipes_basename}: both say where to listen. Leave one out."
        )
    if flags.pipes_basename is not None and not flags.pipes_basename.startswith(
        "unix:"
    ):
        parser.error(
            f"--pipes_basename is {flags.pipes_basename} but must be unix:/path. For "
            "TCP use --server_address host:port."
        )
    if flags.num_servers is None:
        flags.num_servers = num_cores()
    if flags.learner_address is not None:
        server_flags.check_learner_address(parser, flags)
    flags.server_address = flags.server_address or SERVER_ADDRESS
    address = flags.pipes_basename or flags.server_address
    server_flags.check_tls_flags(parser, flags, flags.learner_address or [address])
    if flags.envs_per_stream is None:
        flags.envs_per_stream = server_flags.ENVS_PER_STREAM
    if flags.streams_per_server is None:
        flags.streams_per_server = server_flags.STREAMS_PER_SERVER
    common_flags.check_atari_flags(
        parser, flags, is_atari=atari_wrappers.is_atari(flags.env)
    )
    return flags


# -------------------------------------------------------------------------- servers


def create_server(flags: argparse.Namespace, address: str, progress: np.ndarray) -> Any:
    """Create a server of S streams of K environments. Runs in the server's process.

    Args:
      progress: as `core.remote.service.ServerOptions` says; the supervisor reads it.
    """
    # Imported here, because it imports grpcio. The supervisor must not: it forks. The
    # learner, which imports this file too, must not: it has the gRPC of libtorchbeast.
    from core.remote import env_server

    return env_server.Server(
        functools.partial(create_environments, flags),
        address,
        num_envs=flags.envs_per_stream,
        num_streams=flags.streams_per_server,
        name=flags.env,
        options=functools.partial(env_options, flags),
        vector=True,
        tls_dir=flags.tls_dir,
        insecure=flags.insecure,
        progress=progress,
        keepalive_s=flags.keepalive_s,
    )


def serve(flags: argparse.Namespace) -> Exit:
    """Serve until a signal, or, --with_parent, until the parent process ends.

    Raises:
      ConfigError: the environment or an address cannot be served.
      ServerError: a server process died too often.
    """
    raise_file_limit()
    parent = [sys.stdin.fileno()] if flags.with_parent else []
    if flags.with_parent:  # A stopped process (SIGSTOP) would not see its parent's end.
        send_at_parents_end(signal.SIGCONT)
    with (
        StopSignal() as stop,
        # Ends last, so that the learner hears the servers' goodbye.
        dial_in.DialsOut(flags) as dialer,
        supervisor.Servers(
            dialer.flags, create_server, addresses_to_serve(dialer.flags), stop
        ) as servers,
    ):
        has_described = False
        while stop.received is None:
            if servers.poll(TICK_S, *parent) and not os.read(parent[0], 4096):
                log.info("The process that started these servers has ended: stopping")
                return Exit.DONE
            if not has_described and servers.are_listening():
                has_described = True
                log.info("%s", servers.describe())
                dialer.start()
            dialer.check()
            sys.stderr.flush()  # Writes what a slow terminal has not taken yet.
        log.info("%s: stopping", stop.received.name)
    return Exit.DONE


def setup_logging(flags: argparse.Namespace) -> None:
    """Log to stderr: lines to read, or, --with_parent, records for the parent's log."""
    style = "%(asctime)s %(levelname)-7s %(message)s"
    logging.basicConfig(level=logging.INFO, format=style, datefmt="%Y-%m-%d %H:%M:%S")
    repeats = Repeats()
    for handler in logging.getLogger().handlers:
        if flags.with_parent:
            handler.setFormatter(ForParent())  # The parent counts repeated warnings.
            # The parent knows its own streams, and logs the tracebacks that it gets.
            logging.getLogger("core.remote.stream").setLevel(logging.WARNING)
            logging.getLogger("core.remote.stream").addFilter(shorten)
        else:
            handler.addFilter(repeats)
    logging.captureWarnings(True)
    # gRPC's own messages are noise: the errors that matter are logged here.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def shorten(record: logging.LogRecord) -> bool:
    """Leave only the first line of a log record, which names the error."""
    record.msg, record.args = one_line(record.getMessage()), ()
    return True


def main(argv: Sequence[str] | None = None) -> int:
    flags = parse_flags(argv)
    with terminal.never_waiting():
        setup_logging(flags)
        try:
            return serve(flags)
        except ConfigError as error:
            log.error("%s", error)
            return Exit.CONFIG
        except supervisor.ServerError as error:
            log.error("%s", error)
        except Exception:
            log.exception("The servers failed")
        return Exit.INTERNAL


if __name__ == "__main__":
    leave(main())
