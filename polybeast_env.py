# SPDX-License-Identifier: Apache-2.0
"""Environment servers for PolyBeast: many environments, on any machine.

    python -m polybeast_env --env PongNoFrameskip-v4 --server_address 0.0.0.0:4431 \\
        --tls_dir certs

Each of `--num_servers` processes listens at an address of its own (here the ports from
4431 on) and steps S streams of K environments for the learner that connects:

    this process          server processes                          learner
    ┌────────────┐ fork  ┌─────────────────────────────┐  stream   ┌───────────┐
    │ supervises │ ────► │ :4431   S x K environments  │ ◄───────► │ polybeast │
    │            │ ────► │ :4432   S x K environments  │ ◄───────► │           │
    └────────────┘       └─────────────────────────────┘           └───────────┘

A process that dies or hangs is replaced; the learner connects again by itself. The
learner starts servers on its own machine by itself too.

For your own environment edit create_env. Needs grpcio, numpy and gymnasium, and what
the environment needs: neither torch nor a compiler.
"""

import os
import signal

# One thread per process unless told otherwise (numpy reads this when it is imported):
# there are as many processes as cores, and none may be forked while it has threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if __name__ == "__main__":
    # Until somebody handles it, Ctrl-C ends the program without a traceback from the
    # midst of an import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from core.installed import explain_missing_packages

    explain_missing_packages()

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import logging
import mmap
import multiprocessing
import resource
import stat
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

import gymnasium as gym
import numpy as np

import core.flags
from core import environment, terminal, tls
from core.supervise import (
    STOP_SIGNALS,
    ConfigError,
    Exit,
    ForParent,
    Repeats,
    RestartBudget,
    StopSignal,
    be_killed_first_for_memory,
    describe_exit,
    kill_if_hung,
    let_learner_go_first,
    num_cores,
    send_at_parents_end,
)
from core.unit import Unit

log = logging.getLogger("polybeast_env")

SERVER_ADDRESS = "127.0.0.1:4431"
ENVS_PER_STREAM = 8
STREAMS_PER_SERVER = 2  # While one waits for its actions the other one steps.

TICK_S = 0.2  # The main loop looks at signals and clocks at least this often.
STOP_S = 1.5  # For goodbyes and close() when all end; then servers are killed.
DELIVERED_STEPS = 20  # A server that dies before has achieved nothing: one rollout.
NICENESS = 5  # Of servers beside a learner; its inference threads are nicer still.
OPEN_FILES = 65536  # As many as the system allows, up to this: learners may be many.


# ---------------------------------------------------------------------- environment


def create_env(flags: argparse.Namespace, render_mode: str | None = None) -> Any:
    """Return the environment that is served. Edit this for your own.

    Anything that follows the Gymnasium (or the classic gym) interface will do. Rewards
    are not clipped here: the loss does that.

    Args:
      render_mode: None when training; "rgb_array" or "human" when testing.
    """
    if is_atari(flags.env):
        import atari_wrappers

        return atari_wrappers.make_atari(
            flags.env, **atari_options(flags), render_mode=render_mode
        )
    return environment.make(flags.env, render_mode=render_mode)


def create_environments(
    flags: argparse.Namespace,
    num_envs: int,
    *,
    render_mode: str | None = None,
    **options: Any,
) -> environment.Environments:
    """Return the K environments of a stream, or those that --mode test plays.

    Args:
      render_mode: as `create_env` takes it.
      options: as `core.environment.Environments` takes them.
    """
    if is_vector(flags.env):
        from core import vector_env

        if render_mode is None:
            return vector_env.make_vector(
                flags.env, num_envs, atari_options=atari_options(flags), **options
            )
        name = vector_env.single_game(flags.env)  # It can be drawn.
        flags = argparse.Namespace(**{**vars(flags), "env": name})
    return environment.Environments(
        lambda: create_env(flags, render_mode),
        num_envs,
        recycle_games=flags.recycle_games,
        **options,
    )


def is_vector(name: str) -> bool:
    """Say whether `--env name` makes K environments in one go."""
    return name.startswith(environment.VECTOR)


def is_atari(name: str) -> bool:
    """Say whether `--env name` is an Atari game. Does without cv2 for all others."""
    if is_vector(name):
        from core import vector_env

        return vector_env.is_atari(name)
    with contextlib.suppress(ImportError):
        import ale_py

        gym.register_envs(ale_py)
    spec = gym.registry.get(name.removeprefix("gym:"))
    return spec is not None and str(spec.entry_point).startswith("ale_py")


def atari_options(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the Atari protocol as the flags have it, for `atari_wrappers`."""
    import atari_wrappers

    given = {key: getattr(flags, key) for key in core.flags.ATARI_FLAGS}
    return atari_wrappers.protocol(
        given.pop("atari_protocol") or "impala",
        **{key: value for key, value in given.items() if value is not None},
    )


def env_options(flags: argparse.Namespace) -> dict[str, Any]:
    """Return how the environment is made, for the learner to show and to record.

    Bools, numbers and texts. --mode test takes over those that are ATARI_FLAGS.
    """
    if not is_atari(flags.env):
        return {}
    return {"atari_protocol": flags.atari_protocol or "impala", **atari_options(flags)}


# ---------------------------------------------------------------------------- flags


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; exits with status 2 if something is wrong."""
    parser = core.flags.Parser(
        prog="python -m polybeast_env",
        description="Serve environments to a learner, python -m polybeast.",
        formatter_class=core.flags.HelpFormatter,
    )
    core.flags.add_environment_flags(parser)
    servers = parser.add_argument_group("environment servers")
    servers.add_argument(
        "--server_address",
        help="host:port for the first server, the next ports for the others; or "
        f"unix:/path, with .0, .1... for several. Default: {SERVER_ADDRESS}. Without a "
        "host, :4431, only this machine can connect; 0.0.0.0:4431 is for others too, "
        "and wants --tls_dir",
    )
    core.flags.add_server_flags(servers)
    servers.add_argument(
        "--with_parent",
        action="store_true",
        help="end when standard input closes: whoever starts this holds a pipe to it, "
        "which closes with them, whatever ends them",
    )
    servers.add_argument(
        "--remove_folder",
        action="store_true",
        help="at the end remove the unix sockets' folder too, if it is empty then",
    )
    flags = parser.parse_args(argv)
    flags.env = flags.env or core.flags.ENV
    if flags.server_address is not None and flags.pipes_basename is not None:
        parser.error(
            f"--server_address is {flags.server_address} and --pipes_basename is "
            f"{flags.pipes_basename}: they say the same thing. Leave one out."
        )
    if flags.pipes_basename is not None and not flags.pipes_basename.startswith(
        "unix:"
    ):
        parser.error(
            f"--pipes_basename is {flags.pipes_basename} but must be unix:/path. For "
            "TCP use --server_address host:port."
        )
    flags.server_address = flags.server_address or SERVER_ADDRESS
    core.flags.check_tls_flags(
        parser, flags, [flags.pipes_basename or flags.server_address]
    )
    if flags.num_servers is None:
        flags.num_servers = num_cores()
    if flags.envs_per_stream is None:
        flags.envs_per_stream = ENVS_PER_STREAM
    if flags.streams_per_server is None:
        flags.streams_per_server = STREAMS_PER_SERVER
    check_recycling(parser, flags)
    with contextlib.suppress(ValueError):  # No such environment; its server will say.
        core.flags.check_atari_flags(parser, flags, is_atari=is_atari(flags.env))
    return flags


def check_recycling(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Refuse to make single ones of environments anew that only exist together."""
    if flags.recycle_games and is_vector(flags.env or ""):
        parser.error(
            f"--recycle_games is {flags.recycle_games} but --env is {flags.env}, which "
            "makes all environments of a stream in one piece. Leave --recycle_games "
            "out, or use the single environment."
        )


# -------------------------------------------------------------------------- servers


class ServerError(Exception):
    """The servers cannot go on."""


@dataclasses.dataclass
class ServerSlot:
    """A place for a server process. The process comes and goes, the address stays."""

    index: int
    address: str
    progress: np.ndarray  # [2 * S, 2] float64, shared: see `core.env_server.Server`.
    budget: RestartBudget
    process: Unit | None = None  # None while it waits for `restart_at`.
    pipe: connection.Connection | None = None  # What it has to say.
    is_listening: bool = False
    has_listened: bool = False  # Ever: the socket's file is ours.
    restart_at: float | None = 0.0
    reason: str | None = None  # What a dying one said last.


class Servers:
    """The server processes. A context manager; all methods are for the main thread.

    This process stays without threads and without gRPC, so that it can fork at any time
    what has imported everything already.
    """

    def __init__(
        self, flags: argparse.Namespace, addresses: Sequence[str], stop: StopSignal
    ):
        self._flags = flags
        self._stop = stop
        self._context = multiprocessing.get_context("fork")
        self._cores = own_cores(flags)
        places = 2 * flags.streams_per_server
        shared = mmap.mmap(-1, len(addresses) * places * 2 * 8)
        progress = np.frombuffer(shared).reshape(len(addresses), places, 2)
        self.slots = [
            ServerSlot(i, address, progress[i], RestartBudget())
            for i, address in enumerate(addresses)
        ]

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    def are_listening(self) -> bool:
        return all(slot.is_listening for slot in self.slots)

    def poll(self, timeout_s: float, *others: int) -> set[Any]:
        """Start what is due, then wait for up to `timeout_s` and act on what happens.

        Returns those of the file descriptors `others` that became readable.

        Raises:
          ConfigError: a server cannot serve this environment or address.
          ServerError: a server has died too often without achieving anything.
        """
        for slot in self.slots:
            if slot.restart_at is not None and time.monotonic() >= slot.restart_at:
                self._start(slot)
        handles = [s.process.sentinel for s in self.slots if s.process is not None]
        handles += [s.pipe for s in self.slots if s.pipe is not None]
        ready = set(connection.wait([*handles, *others], timeout_s))
        if self._stop.received is not None:  # And perhaps they got the signal too.
            return set()
        for slot in self.slots:
            if slot.pipe in ready:
                self._receive(slot)
            if slot.process is not None and slot.process.sentinel in ready:
                self._bury(slot)
            self._check_progress(slot)
            self._check_socket(slot)
        return ready.intersection(others)

    def _start(self, slot: ServerSlot) -> None:
        if self._flags.remove_folder:
            make_private(os.path.dirname(slot.address.removeprefix("unix:")))
        slot.progress[:] = 0.0
        slot.restart_at = slot.reason = None
        slot.pipe, theirs = self._context.Pipe(duplex=False)
        slot.process = Unit(
            self._context,
            serve_one,
            (
                self._flags,
                slot.address,
                self._cores[slot.index % len(self._cores)] if self._cores else None,
                slot.progress,
                theirs,
            ),
            name=f"server-{slot.index}",
        )
        # Until it has handlers of its own it would take signals for this process's.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            slot.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        theirs.close()  # Or its end would not show.

    def _receive(self, slot: ServerSlot) -> None:
        assert slot.pipe is not None
        try:
            kind, text = slot.pipe.recv_bytes().decode().split(" ", 1)
        except (EOFError, OSError):  # It is dying; its sentinel comes next.
            slot.pipe.close()
            slot.pipe = None
            return
        if kind == "config":
            raise ConfigError(text)
        if kind == "listening":
            slot.is_listening = slot.has_listened = True
            slot.address = text  # With the port that port 0 has become.
        else:
            slot.reason = text

    def _bury(self, slot: ServerSlot) -> None:
        """Plan the replacement of a dead server."""
        if slot.pipe is not None and slot.pipe.poll():
            self._receive(slot)
        slot.process.join()
        reason = slot.reason or describe_exit(slot.process.exitcode)
        slot.process.close()
        slot.process = None
        slot.is_listening = False
        if slot.progress[:, 0].sum() >= DELIVERED_STEPS:
            slot.budget.delivered()
        wait_s = slot.budget.died()
        if wait_s is None:
            raise ServerError(
                f"server {slot.index} at {slot.address} died "
                f"{slot.budget.quick_deaths} times in a row within {DELIVERED_STEPS} "
                f"steps of its environments; the last time: {reason}"
            )
        slot.restart_at = time.monotonic() + wait_s
        log.warning(
            "Server %d died (%s); starting it again in %.1f s",
            slot.index,
            reason,
            wait_s,
        )

    def _check_progress(self, slot: ServerSlot) -> None:
        """Kill a server whose environment takes too long."""
        if slot.process is None:
            return
        since = slot.progress[:, 1]
        oldest = float(since.min(where=since > 0, initial=np.inf))
        if kill_if_hung(
            f"Server {slot.index}",
            slot.process,
            0.0 if oldest == np.inf else oldest,
            self._flags.env_step_timeout_s,
        ):
            slot.reason = "its environment hung"
            since[:] = 0.0  # It may take a while to end.

    def _check_socket(self, slot: ServerSlot) -> None:
        """End a server whose socket was deleted: nobody else could connect to it."""
        is_unix = slot.address.startswith("unix:")
        path = slot.address.removeprefix("unix:")
        if slot.is_listening and is_unix and not os.path.exists(path):
            slot.is_listening = False
            slot.reason = f"its socket {path} was deleted"
            slot.process.terminate()

    def _close(self) -> None:
        """End all servers, and remove what a killed one leaves behind."""
        processes = [s.process for s in self.slots if s.process is not None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        for process in processes:
            process.join()
        for slot in self.slots:
            # A server that was killed may not have said yet that it listens.
            is_ours = slot.has_listened or self._flags.remove_folder
            if slot.address.startswith("unix:") and is_ours:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(slot.address.removeprefix("unix:"))
        if self._flags.remove_folder:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(self.slots[0].address.removeprefix("unix:")))


def make_private(folder: str) -> None:
    """Make the sockets' private folder anew, should somebody have deleted it.

    Raises:
      ConfigError: what is there instead is somebody else's, or open to others.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
        log.warning("The folder of the servers' sockets was deleted; made it anew")
    found = os.lstat(folder)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{folder} was deleted, and what is there now is not private. Start anew."
        )


def own_cores(flags: argparse.Namespace) -> list[int]:
    """Return the cores to share out among the servers, or none: let them move about.

    The threads of a server take the GIL in turns. If they need not wake each other
    across cores, a message costs a third less (results/speed). So a server stays on one
    core where all cores have as many servers and nothing else to do: no learner, no
    environments with threads of their own, no quota behind which others may run.
    """
    shares_cores = flags.with_parent or is_vector(flags.env)
    if shares_cores or not hasattr(os, "sched_setaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    is_fair = len(cores) == num_cores() and flags.num_servers % len(cores) == 0
    return cores if is_fair else []


def serve_one(
    flags: argparse.Namespace,
    address: str,
    own_core: int | None,
    progress: np.ndarray,
    pipe: connection.Connection,
) -> None:
    """Be one server process, until SIGTERM or the end of the parent."""
    # The parent ends its servers itself, after Ctrl-C too, or when the terminal goes.
    # Not SIG_IGN: what an environment starts would inherit that.
    signal.signal(signal.SIGINT, lambda *_: None)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # As `nohup` makes it.
        signal.signal(signal.SIGHUP, lambda *_: None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    be_killed_first_for_memory()
    faulthandler.enable(sys.__stderr__)
    faulthandler.register(signal.SIGUSR1, sys.__stderr__, all_threads=True)
    if flags.with_parent:
        let_learner_go_first(NICENESS)
    if own_core is not None:
        os.sched_setaffinity(0, {own_core})
    from core import env_server

    options = env_options(flags)
    server = env_server.Server(
        functools.partial(create_environments, flags),
        address,
        num_envs=flags.envs_per_stream,
        num_streams=flags.streams_per_server,
        name=flags.env,
        frames_per_step=options.get("frame_skip", 1),  # 1 without an emulator.
        options=options,
        vector=True,
        tls_dir=flags.tls_dir,
        insecure=flags.insecure,
        progress=progress,
        keepalive_s=flags.keepalive_s,
    )
    try:
        address = server.start()
    except ConfigError as error:
        pipe.send_bytes(f"config {error}".encode())
        sys.exit(Exit.CONFIG)
    except BaseException:
        pipe.send_bytes(f"failed {traceback.format_exc().strip()}".encode())
        raise
    signal.signal(signal.SIGTERM, lambda *_: server.stop("the server was stopped"))
    pipe.send_bytes(f"listening {address}".encode())
    server.run()


def serve(flags: argparse.Namespace) -> Exit:
    """Serve until a signal, or the end of whoever started this.

    Raises:
      ConfigError: the environment or an address cannot be served.
      ServerError: a server died too often.
    """
    # Here, because the learner imports this file and has a gRPC of its own.
    from core import env_server

    basename = flags.pipes_basename
    if basename is not None:  # TorchBeast's spelling: .0 even for a single one.
        addresses = [f"{basename}.{i}" for i in range(flags.num_servers)]
    else:
        addresses = env_server.server_addresses(flags.server_address, flags.num_servers)
    for address in addresses:
        env_server.check_address(
            address, tls_dir=flags.tls_dir, insecure=flags.insecure
        )
    if tls.is_public(addresses[0]) and flags.insecure:
        log.warning(
            "INSECURE: whoever can connect to %s can use these servers, and the "
            "traffic is neither encrypted nor authenticated (--insecure)",
            addresses[0].rpartition(":")[0],
        )
    raise_file_limit()
    if is_atari(flags.env):
        import atari_wrappers  # noqa: F401  # Once, for all servers.

    parent = [sys.stdin.fileno()] if flags.with_parent else []
    if flags.with_parent:
        send_at_parents_end(signal.SIGCONT)  # Should somebody have stopped this.
    with StopSignal() as stop, Servers(flags, addresses, stop) as servers:
        said = False
        while stop.received is None:
            if servers.poll(TICK_S, *parent) and not os.read(parent[0], 4096):
                log.info("Whoever started these servers is gone: stopping")
                return Exit.DONE
            if not said and servers.are_listening():
                said = True
                log.info("%s", describe(flags, [s.address for s in servers.slots]))
        log.info("%s: stopping", stop.received.name)
    return Exit.DONE


def describe(flags: argparse.Namespace, addresses: Sequence[str]) -> str:
    """Say in one line what is served, and where."""
    N, S, K = flags.num_servers, flags.streams_per_server, flags.envs_per_stream
    where = ",".join(addresses)
    base, dot, first = addresses[0].rpartition(
        "." if addresses[0].startswith("unix:") else ":"
    )
    if first.isdecimal() and list(addresses) == [
        f"{base}{dot}{int(first) + i}" for i in range(N)
    ]:
        where = f"{addresses[0]}-{int(first) + N - 1}" if N > 1 else addresses[0]

    def count(n: int, noun: str) -> str:
        return f"{n} {noun}{'s' * (n != 1)}"

    return (
        f"Serving {flags.env} at {where}: {count(N, 'server')} x {count(S, 'stream')} "
        f"x {count(K, 'environment')}"
    )


def raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def setup_logging(flags: argparse.Namespace) -> None:
    """Log to stderr: lines for people, or for a parent that adds the time itself."""
    style = "%(asctime)s %(levelname)-7s %(message)s"
    logging.basicConfig(level=logging.INFO, format=style, datefmt="%Y-%m-%d %H:%M:%S")
    repeats = Repeats()
    for handler in logging.getLogger().handlers:
        if flags.with_parent:
            handler.setFormatter(ForParent())  # It counts what comes again, too.
        else:
            handler.addFilter(repeats)
    logging.captureWarnings(True)
    # What gRPC finds worth printing is told here in better words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def main(argv: Sequence[str] | None = None) -> int:
    flags = parse_flags(argv)
    with terminal.never_waiting():
        setup_logging(flags)
        return exit_status(flags)


def exit_status(flags: argparse.Namespace) -> Exit:
    """Serve; return the exit status, having logged what went wrong."""
    try:
        return serve(flags)
    except ConfigError as error:
        log.error("%s", error)
        return Exit.CONFIG
    except ServerError as error:
        log.error("%s", error)
    except Exception:
        log.exception("The servers failed")
    return Exit.INTERNAL


if __name__ == "__main__":
    sys.exit(main())
