# SPDX-License-Identifier: Apache-2.0
"""`Server`: serves environments to a learner over gRPC, in this process.

    Server(make_env, "unix:/tmp/polybeast.0").run()

The protocol is in proto/torchbeast.proto. A thread belongs to each stream: it receives
actions, steps K environments, which write their rows straight into the outgoing
message, and sends that. Nothing a learner sends can do harm: all of it is checked
before it is used, and what is wrong ends its own stream with a message.

`polybeast_env.py` runs one of these in each of its processes. Needs grpcio, numpy and
gymnasium.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import itertools
import logging
import os
import queue
import random
import re
import secrets
import socket
import stat
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from importlib import metadata
from typing import Any

import gymnasium as gym
import numpy as np

from core import environment, spaces, tls, wire
from core.environment import EnvError, Environments, EnvSpecError, env_seed
from core.spaces import Nest
from core.supervise import ConfigError
from core.wire import Action, Failure, Goodbye, Hello, ToLearner, ToServer

# gRPC's support for fork stops its threads before each fork and starts them after it,
# which wedges a server whose environment forks a worker. No such worker uses this gRPC.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# From 1.80 on grpcio polls in threads of its own, besides Python's, which takes a third
# more CPU for each message (benchmarks/transport.py). This makes it as it was. Only
# grpcio is to see it: other gRPCs, in child processes too, may not know the word.
if (
    "GRPC_EXPERIMENTS" not in os.environ
    and "grpc" not in sys.modules
    and tuple(map(int, metadata.version("grpcio").split(".")[:2])) >= (1, 80)
):
    os.environ["GRPC_EXPERIMENTS"] = "-event_engine_listener"
    import grpc  # Reads it now.

    del os.environ["GRPC_EXPERIMENTS"]
import grpc  # noqa: E402

# Servers whose sockets what an environment forks must not keep open.
_serving: "weakref.WeakSet[Server]" = weakref.WeakSet()

log = logging.getLogger(__name__)

HELLO_S = 5.0  # For a stream to say hello; a learner does so at once.
LOCK_S = 10.0  # For other servers that begin to listen in the same folder.
TAKEOVER_S = 5.0  # For a stream whose learner has come back to end its last step.
GRACE_S = 0.5  # For streams in the middle of a step when the server stops.
HEADERS_NBYTES = 64 * 1024  # Of a received message, beside its arrays.
FAILURE_CHARS = 16_000  # Of a traceback; its end is what matters.
DETAILS_CHARS = 500  # gRPC sends these in an HTTP/2 header, where 8 KB is the limit.
SPARE_SILENT = 4  # Streams before their Hello, beside one for each place.
SPARE_THREADS = 16  # For those, Describe, health checks, streams being refused.
MAX_INFO_KEYS = 1000
MAX_WATCHERS = 4  # Health.Watch takes a thread for as long as it lasts.
UNIX_PATH_NBYTES = 107  # sockaddr_un in Linux; others have less.
DEFAULT_ADDRESS = "unix:/tmp/polybeast"  # TorchBeast's.

KEEPALIVE_S = 10.0

# The learner pings as often as it likes: it must notice as soon that this server is
# gone.
_OPTIONS = {
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.http2.max_ping_strikes": 0,
    "grpc.server_handshake_timeout_ms": 5_000,  # For peers that connect and stop.
    # Messages that inflate have no bound in older gRPC; learners do not compress.
    "grpc.compression_enabled_algorithms_bitset": 1,  # None.
    "grpc.per_message_decompression": 0,
    "grpc.so_reuseport": 0,  # Or a second server would share the port in silence.
    "grpc.max_send_message_length": -1,
}


# -------------------------------------------------------------------------- addresses


def server_addresses(address: str, num_servers: int) -> list[str]:
    """Return the address of each of `num_servers` servers.

    Ports follow each other (port 0 stays 0: any free one); several unix sockets end in
    .0, .1 and so on. A host that is left out is this machine's own 127.0.0.1.

    Raises:
      ConfigError: no server can listen there.
    """
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        path = re.sub("^//+", "/", path)  # unix:///path is another spelling.
        if num_servers == 1:
            return [f"unix:{path}"]
        return [f"unix:{path}.{i}" for i in range(num_servers)]
    host, _, port = address.rpartition(":")
    if not (":" in address and port.isdecimal()):
        raise ConfigError(
            f"--server_address is {address!r}; expected host:port, :port or unix:/path"
        )
    first = int(port)
    last = first + num_servers - 1 if first else 0
    if last > 65535:
        raise ConfigError(
            f"--server_address {address} with --num_servers {num_servers} needs ports "
            f"up to {last}; the last one is 65535. Choose a lower port."
        )
    ports = range(first, last + 1) if first else [0] * num_servers
    return [f"{host or '127.0.0.1'}:{p}" for p in ports]


def check_address(address: str, *, tls_dir: str | None, insecure: bool) -> None:
    """Check an address before a server takes it; whether a port is free shows then.

    A socket file whose owner has died is no obstacle: the new server replaces it.

    Raises:
      ConfigError: other machines can connect and nothing protects the traffic; or a
        unix socket's path cannot be used, or a live server has it.
    """
    if tls.is_public(address) and tls_dir is None and not insecure:
        raise ConfigError(
            f"other machines can connect to {address}. Either encrypt the traffic, and "
            "admit your own learners only: --tls_dir DIR, with a folder that "
            f"{tls.CERTS_COMMAND} has made. Or let in whoever can reach the port: "
            "--insecure. For this machine alone listen at 127.0.0.1."
        )
    if not address.startswith("unix:"):
        return
    path = address.removeprefix("unix:")
    nbytes = len(os.fsencode(path))
    if nbytes > UNIX_PATH_NBYTES:
        raise ConfigError(
            f"the socket path {path} has {nbytes} bytes, but the system takes at most "
            f"{UNIX_PATH_NBYTES}. Choose a shorter one."
        )
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConfigError(
            f"cannot listen at {address}: there is no folder {folder}. Create it."
        )
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"cannot listen at {address}: no permission to write into {folder}"
            ) from None
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen at {address}: that file is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
        except OSError as error:  # A full backlog, say: somebody is there.
            raise ConfigError(f"cannot listen at {address}: {error}") from error
    raise ConfigError(
        f"{address} is in use: a live server listens there. Stop it, or choose another "
        "path."
    )


@contextlib.contextmanager
def _taking(address: str) -> Iterator[None]:
    """Check a unix socket's path, and keep other servers from taking it meanwhile.

    gRPC would replace the socket of a live server, too, and say nothing.

    Raises:
      ConfigError: as `check_address`; or the folder stays locked.
    """
    if not address.startswith("unix:"):
        yield
        return
    folder = os.path.dirname(address.removeprefix("unix:")) or "."
    fd = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + LOCK_S
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"cannot listen at {address}: another process has had a lock "
                        f"on {folder} for {LOCK_S:g} s. Choose another folder."
                    ) from None
                time.sleep(0.01)
        check_address(address, tls_dir=None, insecure=False)
        yield
    finally:
        os.close(fd)


def _reason_not_bound(address: str) -> str:
    """Say why gRPC, which does not, could not listen at a TCP address."""
    host, _, port = address.rpartition(":")
    try:
        infos = socket.getaddrinfo(
            host.strip("[]"),
            int(port),
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
        for family, kind, protocol, _, where in infos:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"{address} is in use by another program. Choose another port."
        return f"cannot listen at {address}: {error.strerror or error}"
    return f"cannot listen at {address}"


# ----------------------------------------------------------------------------- server


class _Busy(Exception):
    """Other streams have all places."""


class _WrongProtocol(Exception):
    """The learner speaks another version of the protocol."""


@dataclasses.dataclass
class _Holder:
    """A stream that has environments."""

    run_id: str
    first_env_id: int
    slot: int  # Its row of `progress`.
    peer: str
    since: str  # Of the clock, for people.
    cancel: Callable[[], Any]
    is_closing: bool = False  # Its environments are.


class Server:
    """Serves environments at one address. Thread-safe; `run` once only.

    Streams are independent of each other: each has `num_envs` environments of its own,
    which begin with it and end with it.

    Args:
      env_class: creates one environment, of Gymnasium or classic gym: its class, or a
        function.
      server_address: host:port or unix:/path.
      num_envs: K, the environments of a stream. They are stepped in turn.
      num_streams: S, how many streams there may be at a time.
      name: of the environment; by default it is asked for its own.
      frames_per_step: emulator frames behind a step, for the learner's count.
      options: how the environments are made, by name, for the learner to show and to
        record: bools, numbers and texts.
      vector: `env_class` creates all environments of a stream at once, and is called
        like `Environments` without its first argument.
      tls_dir: a folder with ca.pem, cert.pem and key.pem: over TCP, serve nobody who
        does not show a certificate of that CA, and encrypt.
      insecure: serve other machines without.
      progress: [2 * S, 2] float64, written by the server: the number of steps that the
        streams in this place ever took, and since when (`time.monotonic`) the present
        call into an environment lasts, 0 between calls. In shared memory, another
        process can watch. There are more than S places because a stream whose
        environments take long to close does not keep its own run out.
      keepalive_s: a learner whose machine is frozen or cut off is noticed within twice
        this, and its environments are freed.
    """

    def __init__(
        self,
        env_class: Callable[..., Any],
        server_address: str = DEFAULT_ADDRESS,
        *,
        num_envs: int = 1,
        num_streams: int = 1,
        name: str | None = None,
        frames_per_step: int = 1,
        options: Mapping[str, bool | int | float | str] | None = None,
        vector: bool = False,
        tls_dir: str | None = None,
        insecure: bool = False,
        progress: np.ndarray | None = None,
        keepalive_s: float = KEEPALIVE_S,
    ):
        self.address = server_addresses(server_address, 1)[0]
        self._make = env_class if vector else functools.partial(Environments, env_class)
        self._num_envs = num_envs
        self._num_streams = num_streams
        self._name = name
        self._frames_per_step = frames_per_step
        self._options = tuple(wire.Option(*item) for item in (options or {}).items())
        self._keepalive_ms = round(1000 * keepalive_s)
        self._tls_dir = tls_dir
        self._insecure = insecure
        if progress is None:
            progress = np.zeros((2 * num_streams, 2))
        self._progress = progress
        self._stops: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._server: grpc.Server | None = None
        # Guards what follows; notified of every change.
        self._changed = threading.Condition()
        self._holders: list[_Holder] = []
        self._silent: list[Any] = []  # Contexts of streams before their Hello.
        self._watchers = 0
        self._stopping: str | None = None  # The reason.

    # In the caller's threads.

    def start(self) -> str:
        """Begin to serve, in threads; return the address with its real port.

        Creates one environment, to ask for its spaces, and closes it.

        Raises:
          ConfigError: the environment or the address cannot be served.
        """
        # Before the rest, which takes longer.
        check_address(self.address, tls_dir=self._tls_dir, insecure=self._insecure)
        credentials = self._credentials()
        self._read_spaces()
        received = HEADERS_NBYTES + len(self._action_frame())
        options = {
            **_OPTIONS,
            "grpc.keepalive_time_ms": self._keepalive_ms,
            "grpc.keepalive_timeout_ms": self._keepalive_ms,
            # Without it, current gRPC takes 60 s to notice a frozen peer.
            "grpc.http2.ping_timeout_ms": self._keepalive_ms,
            "grpc.max_receive_message_length": received,
            "grpc.max_concurrent_streams": self._num_streams + SPARE_THREADS,
        }
        # For the streams that have a place and as many that have not said Hello.
        threads = 2 * self._num_streams + SPARE_THREADS
        self._server = grpc.server(
            futures.ThreadPoolExecutor(threads, "stream"), options=list(options.items())
        )
        self._server.add_generic_rpc_handlers(self._handlers())
        is_unix = self.address.startswith("unix:")
        with _taking(self.address):
            # A socket only for this user.
            umask = os.umask(0o177) if is_unix else None
            try:
                if credentials is None:
                    port = self._server.add_insecure_port(self.address)
                else:
                    port = self._server.add_secure_port(self.address, credentials)
            except RuntimeError as error:
                raise ConfigError(_reason_not_bound(self.address)) from error
            finally:
                if umask is not None:
                    os.umask(umask)
            self._server.start()
        if not is_unix:
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        _serving.add(self)
        return self.address

    def run(self) -> None:
        """Serve until `stop`. Blocks."""
        if self._server is None:
            self.start()
        assert self._server is not None
        reason = self._stops.get()
        with self._changed:
            self._stopping = reason
            self._changed.notify_all()  # For those who watch this server's health.
        # Streams in a step finish it and say goodbye; those that wait for a learner
        # which does not answer within the grace are cut off.
        self._server.stop(GRACE_S).wait()

    def stop(self, reason: str = "the server was stopped") -> None:
        """Make `run` return soon. May be called again, and by a signal handler."""
        self._stops.put(reason)  # Reentrant, unlike an Event.

    def _credentials(self) -> grpc.ServerCredentials | None:
        pem_files = tls.read(self._tls_dir, is_server=True)
        if pem_files is None or self.address.startswith("unix:"):
            return None
        ca, cert, key = pem_files
        return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)

    def _read_spaces(self) -> None:
        try:
            clock = self._progress[0, 1:]
            with _clock_runs(clock):
                envs = self._make(
                    1,
                    seed=0,
                    first_env_id=0,
                    incarnation=0,
                    info_keys=(),
                    clock=clock,
                )
            with _closing(envs, clock):
                self._observation_space: gym.Space = envs.observation_space
                self._action_space: gym.Space = envs.action_space
                if self._name is None:
                    self._name = environment.name_of(envs.envs[0])
            self._space_messages = _space_messages(envs)
            self._action_arrays = wire.arrays_of(spaces.spec_of(self._action_space))
            wire.arrays_of(spaces.spec_of(self._observation_space))
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def _handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        service = grpc.method_handlers_generic_handler(
            "torchbeast.EnvServer",
            {
                "Stream": grpc.stream_stream_rpc_method_handler(self._stream),
                "Describe": grpc.unary_unary_rpc_method_handler(self._describe),
            },
        )
        health = grpc.method_handlers_generic_handler(
            "grpc.health.v1.Health",
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check_health),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch_health),
            },
        )
        return service, health

    # In a stream's own thread.

    def _stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Serve one stream: yield what is sent."""
        who = context.peer()
        try:
            hello = self._receive_hello(requests, context)
            if hello is None:
                return
            # All peers at a unix socket have one name.
            run = _quote(hello.run_id)
            who = f"run {run} (environments from {hello.first_env_id} on) at {who}"
            with self._place(hello, context) as holder:
                log.log(
                    # The learner tells of streams that come back to it, which these
                    # 16 bits count (first_incarnation in polybeast.py).
                    logging.DEBUG if hello.incarnation & 0xFFFF else logging.INFO,
                    "Environments %d to %d: run %s at %s, start %d",
                    hello.first_env_id,
                    hello.first_env_id + self._num_envs - 1,
                    _quote(hello.run_id),
                    context.peer(),
                    hello.incarnation,
                )
                yield from self._play(hello, holder, requests)
        except grpc.RpcError:
            pass  # The learner is gone, or this server has cut it off.
        except _Busy as error:
            # No Failure: it will pass, and may take any number of tries.
            log.warning("Turned away %s: %s", who, error)
            _set_status(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except _WrongProtocol as error:
            code = grpc.StatusCode.FAILED_PRECONDITION
            yield from _fail(context, who, code, str(error), permanent=True)
        except wire.WireError as error:
            code = grpc.StatusCode.INVALID_ARGUMENT
            yield from _fail(context, who, code, str(error))
        except EnvSpecError as error:
            text = _with_traceback(error)
            code = grpc.StatusCode.FAILED_PRECONDITION
            yield from _fail(context, who, code, text, permanent=True)
        except Exception as error:
            code = grpc.StatusCode.INTERNAL
            yield from _fail(context, who, code, _with_traceback(error))

    def _receive_hello(self, requests: Iterator[bytes], context: Any) -> Hello | None:
        deadline = threading.Timer(HELLO_S, context.cancel)
        deadline.daemon = True
        deadline.start()
        with self._changed:
            self._silent.append(context)
            if len(self._silent) > self._num_streams + SPARE_SILENT:
                # Or the silent would take all threads, and an honest learner, which
                # says Hello at once, would wait for their time to be up.
                self._silent.pop(0).cancel()
        try:
            message = next(requests, None)
        finally:
            deadline.cancel()
            with self._changed, contextlib.suppress(ValueError):  # Ended for another.
                self._silent.remove(context)
        if message is None:
            return None
        hello = wire.decode(ToServer, message).hello
        if hello is None:
            raise wire.WireError("expected a Hello first, got an Action")
        self._check_hello(hello)
        return hello

    def _check_hello(self, hello: Hello) -> None:
        if hello.protocol != wire.PROTOCOL:
            older = "server" if hello.protocol > wire.PROTOCOL else "learner"
            raise _WrongProtocol(
                f"the server speaks protocol {wire.PROTOCOL} (torchbeast {version()}), "
                f"the learner {hello.protocol} (torchbeast {_quote(hello.version)}): "
                f"upgrade the {older}"
            )
        keys = hello.info_keys
        if len(keys) > MAX_INFO_KEYS:
            raise wire.WireError(
                f"Hello.info_keys: {len(keys)}, at most {MAX_INFO_KEYS}"
            )
        if len(set(keys)) < len(keys) or {"", "game_return", "game_step"} & set(keys):
            raise wire.WireError(
                "Hello.info_keys: expected different names other than game_return and "
                f"game_step, got {', '.join(keys)!r:.200}"
            )

    @contextlib.contextmanager
    def _place(self, hello: Hello, context: Any) -> Iterator[_Holder]:
        """Hold one of the places for streams.

        A learner that was started again may find that its old stream still has the
        place: then that one is ended. If its environments take long to close, the new
        one begins meanwhile.

        Raises:
          _Busy: others have them all.
        """
        with self._changed:
            old = [
                holder
                for holder in self._holders
                if (holder.run_id, holder.first_env_id)
                == (hello.run_id, hello.first_env_id)
                and hello.run_id
            ]
            for holder in old:
                holder.cancel()
            self._changed.wait_for(
                lambda: not any(holder in self._holders for holder in old), TAKEOVER_S
            )
            others = [h for h in self._holders if not (h in old and h.is_closing)]
            taken = [holder.slot for holder in self._holders]
            free = [i for i in range(len(self._progress)) if i not in taken]
            if len(others) >= self._num_streams or not free:
                raise _Busy(self._busy())
            holder = _Holder(
                run_id=hello.run_id,
                first_env_id=hello.first_env_id,
                slot=free[0],
                peer=context.peer(),
                since=time.strftime("%H:%M:%S"),
                cancel=context.cancel,
            )
            self._holders.append(holder)
        try:
            yield holder
        finally:
            self._progress[holder.slot, 1] = 0.0
            with self._changed:
                self._holders.remove(holder)
                self._changed.notify_all()

    def _busy(self) -> str:
        holders = "; ".join(
            f"run {_quote(holder.run_id)} at {holder.peer} since {holder.since}"
            for holder in self._holders
        )
        return (
            f"busy: this server takes {self._num_streams} streams "
            f"(--streams_per_server), and these have them: {holders}"
        )

    def _play(
        self, hello: Hello, holder: _Holder, requests: Iterator[bytes]
    ) -> Iterator[bytes]:
        """Step new environments as the learner says."""
        step_arrays, rows_spec = self._step_arrays(hello)
        steps = wire.Steps(
            step_arrays, self._num_envs, newest_frames=hello.newest_frames
        )
        rows = itertools.cycle([_nest_of(arrays, rows_spec) for arrays in steps.arrays])
        action = self._action_frame()
        actions = _nest_of(action.arrays, spaces.spec_of(self._action_space))
        checks = _action_checks(self._action_space, actions)
        progress = self._progress[holder.slot]
        clock = progress[1:]

        # Environments may use these; forked processes would share their state.
        seed = env_seed(hello.seed, hello.first_env_id, hello.incarnation, 0)
        random.seed(seed)
        np.random.seed(seed)
        with _clock_runs(clock):
            envs = self._make(
                self._num_envs,
                seed=hello.seed,
                first_env_id=hello.first_env_id,
                incarnation=hello.incarnation,
                info_keys=hello.info_keys,
                truncation_is_done=hello.truncation_is_done,
                clock=clock,
            )
        with _closing(envs, clock, holder):
            if _space_messages(envs) != self._space_messages:
                raise EnvSpecError(
                    f"{self._name} has other spaces than when this server started: "
                    f"{envs.observation_space} and {envs.action_space}; expected "
                    f"{self._observation_space} and {self._action_space}"
                )
            yield wire.encode(ToLearner(welcome=self._welcome(step_arrays)))
            envs.reset(next(rows))
            clock[0] = 0.0  # A `yield` waits for the network.
            yield steps.encode(0, whole=True)
            for seq in itertools.count():
                message = None if self._stopping else next(requests, None)
                if self._stopping:
                    yield wire.encode(ToLearner(goodbye=Goodbye(self._stopping)))
                    return
                if message is None:  # The learner has hung up.
                    return
                got, whole = action.decode_action(message)
                if got != seq:
                    raise wire.WireError(
                        f"expected the action of step {seq}, got {got}"
                    )
                for check in checks:
                    check()
                envs.step(actions, next(rows))
                clock[0] = 0.0
                progress[0] += 1
                yield steps.encode(seq + 1, whole=whole)

    def _action_frame(self) -> wire.Frame:
        return wire.Frame(Action, self._action_arrays, self._num_envs)

    def _step_arrays(self, hello: Hello) -> tuple[tuple[wire.Array, ...], Nest]:
        """Return what a Step holds, flat and as the spec of a row."""
        spec = spaces.row_spec(
            self._observation_space, self._action_space, hello.info_keys
        )
        return wire.with_stacks(wire.arrays_of(spec)), spec

    def _welcome(self, step_arrays: tuple[wire.Array, ...]) -> wire.Welcome:
        assert self._name is not None, "not started"
        return wire.Welcome(
            protocol=wire.PROTOCOL,
            version=version(),
            incarnation_id=secrets.token_bytes(16),
            env=self._name,
            num_envs=self._num_envs,
            num_streams=self._num_streams,
            frames_per_step=self._frames_per_step,
            observation=self._observation_space,
            action=self._action_space,
            step_arrays=step_arrays,
            action_arrays=self._action_arrays,
            options=self._options,
        )

    # In threads of their own.

    def _describe(self, request: bytes, context: Any) -> bytes:
        try:
            hello = wire.decode(Hello, request)
            self._check_hello(hello)
        except wire.WireError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, _details(str(error)))
        except _WrongProtocol as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, _details(str(error)))
        return wire.encode(self._welcome(self._step_arrays(hello)[0]))

    def _check_health(self, request: bytes, context: Any) -> bytes:
        if not _knows(request, context):
            context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return wire.encode(self._health())

    def _watch_health(self, request: bytes, context: Any) -> Iterator[bytes]:
        if not _knows(request, context):
            yield wire.encode(_Health(status=_SERVICE_UNKNOWN))
            return
        with self._changed:
            if self._watchers >= MAX_WATCHERS:
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
                context.abort(code, f"{MAX_WATCHERS} others are watching")
            self._watchers += 1
        context.add_callback(self._notify)
        try:
            said = None
            while context.is_active() and said != _Health(status=_NOT_SERVING):
                with self._changed:
                    while self._health() == said and context.is_active():
                        self._changed.wait()
                    said = self._health()
                yield wire.encode(said)
        finally:
            with self._changed:
                self._watchers -= 1

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _health(self) -> "_Health":
        return _Health(status=_NOT_SERVING if self._stopping else _SERVING)


@functools.cache
def version() -> str:
    """Return the version of this package, for messages."""
    try:
        return metadata.version("torchbeast")
    except metadata.PackageNotFoundError:
        return "not installed"


def _quote(name: str) -> str:
    """Return what logs say of a name that anybody may have sent."""
    return f"{name!r:.80}" if name else "without a name"


def _fail(
    context: Any, who: str, code: grpc.StatusCode, text: str, *, permanent: bool = False
) -> Iterator[bytes]:
    """End a stream: say why in full, and once more in the status."""
    text = text.strip()[-FAILURE_CHARS:]
    log.warning("The stream of %s failed: %s", who, text)
    yield wire.encode(ToLearner(failure=Failure(text, permanent)))
    _set_status(context, code, text)


def _set_status(context: Any, code: grpc.StatusCode, text: str) -> None:
    context.set_code(code)
    context.set_details(_details(text))


def _details(text: str) -> str:
    return text.partition("\n")[0][:DETAILS_CHARS]


def _with_traceback(error: BaseException) -> str:
    """Return what `error` says, then where it comes from."""
    trace = "".join(traceback.format_exception(error))
    name = "" if isinstance(error, EnvError | EnvSpecError) else type(error).__name__
    return f"{name}{': ' * bool(name)}{error}\n\n{trace}"


def _close_sockets() -> None:
    """Close servers' sockets in a forked child: the listening and the connected."""
    own = {server.address for server in _serving}
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        fd = int(name)
        with contextlib.suppress(OSError):  # No socket; or the folder's own fd.
            with socket.socket(fileno=os.dup(fd)) as duplicate:
                place = duplicate.getsockname()
            if isinstance(place, tuple):  # Over TCP: host and port.
                is_own = any(a.endswith(f":{place[1]}") for a in own)
            else:
                is_own = f"unix:{place}" in own
            if is_own:
                os.close(fd)


os.register_at_fork(after_in_child=_close_sockets)


@contextlib.contextmanager
def _clock_runs(clock: np.ndarray) -> Iterator[None]:
    """Note in `clock` since when this lasts."""
    clock[0] = time.monotonic()
    try:
        yield
    finally:
        clock[0] = 0.0


@contextlib.contextmanager
def _closing(
    envs: Any, clock: np.ndarray, holder: _Holder | None = None
) -> Iterator[None]:
    """Close the environments at the end, whatever they think of it."""
    try:
        yield
    finally:
        if holder is not None:
            holder.is_closing = True
        try:
            with _clock_runs(clock):
                envs.close()
        except Exception:
            log.exception("An environment could not be closed")


def _space_messages(envs: Any) -> tuple[wire.Space, wire.Space]:
    return (
        wire.space_message(envs.observation_space),
        wire.space_message(envs.action_space),
    )


def _nest_of(arrays: list[np.ndarray], spec: Nest) -> Nest:
    """Return the arrays of a frame as the nest that `spec` is."""
    values = iter(arrays)
    return spaces.map_nest(lambda _: next(values), spec)


# -------------------------------------------------------------------- action values


def _action_checks(space: gym.Space, actions: Nest) -> list[Callable[[], None]]:
    """Return functions that check the values now in `actions`, leaf by leaf.

    They raise WireError. The bounds of a Box of floats are the environment's own
    business, as in Gymnasium: many environments clip, and policies rely on it.
    """
    pairs = zip(
        spaces.leaves(spaces.leaf_spaces(space), "action"),
        spaces.leaves(actions, "action"),
    )
    return [
        functools.partial(_check_action, name, leaf, *_limits(leaf), values)
        for (name, leaf), (_, values) in pairs
        if values.size
    ]


def _limits(space: gym.Space) -> tuple[Any, Any]:
    """Return the least and the greatest value (scalars, or arrays like an action)."""
    if (limits := spaces.value_range(space)) is not None:
        return limits
    match space:
        case gym.spaces.MultiBinary():
            return 0, 1
        case gym.spaces.Box() if space.dtype.kind == "f":
            info = np.finfo(space.dtype)
            return info.min, info.max
        case gym.spaces.Box() if space.dtype.kind != "b":
            return space.low, space.high
    return 0, 1  # Of bools, as bytes.


def _check_action(
    name: str, space: gym.Space, low: Any, high: Any, values: np.ndarray
) -> None:
    numbers = values.view(np.uint8) if values.dtype.kind == "b" else values
    if isinstance(low, int):
        # Two reductions: a third of the time of what follows.
        fine = low <= numbers.min() and numbers.max() <= high
    else:
        fine = ((low <= numbers) & (numbers <= high)).all()  # False for NaN.
    if not fine:
        bad = ~((low <= numbers) & (numbers <= high))
        k = int(np.argwhere(bad)[0][0])
        raise wire.WireError(
            f"'{name}' of environment {k} in this stream: expected {space}, got "
            f"{numbers[k].tolist()}"
        )


# --------------------------------------------------------------------------- health

# grpc.health.v1, by which load balancers, Kubernetes and people ask how servers are.

_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class _HealthRequest:
    service: str = wire.field(1, "string", "")


@dataclasses.dataclass(frozen=True)
class _Health:
    status: int = wire.field(1, "uint32", 0)


def _knows(request: bytes, context: Any) -> bool:
    try:
        service = wire.decode(_HealthRequest, request).service
    except wire.WireError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    return service in ("", "torchbeast.EnvServer")
