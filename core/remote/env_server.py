# SPDX-License-Identifier: Apache-2.0
"""`Server`: serves environments to a learner over gRPC, in this process.

    Server(make_env, "unix:/tmp/polybeast.0").run()

The protocol is in proto/torchbeast.proto. A thread runs each stream (`stream.Stream`),
which takes one of S places (`places.Places`). `polybeast_env.py` runs one server in
each of its processes. Needs grpcio, numpy and gymnasium.
"""

import contextlib
import os
import queue
import socket
import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import ConfigError, MakeError
from core.remote import codec, messages, tls
from core.remote.addresses import (
    DEFAULT_ADDRESS,
    STREAMS_SUFFIX,
    check_address,
    claim_address,
    reason_not_bound,
    server_addresses,
)
from core.remote.grpc_settings import grpc, server_options
from core.remote.health import health_handler
from core.remote.local_streams import LocalStreams
from core.remote.messages import Hello
from core.remote.places import Places
from core.remote.service import ServerOptions, Service, WrongProtocol
from core.remote.stream import Stream, details

GRACE_S = 0.5  # Time for streams in the middle of a step when the server stops.
HEADERS_NBYTES = 64 * 1024  # Limit for a received message without its arrays.
SPARE_THREADS = 16  # Threads for streams without a place, Describe and health checks.

# The servers of this process. A forked child closes their sockets.
_serving: "weakref.WeakSet[Server]" = weakref.WeakSet()


class Server:
    """Serves environments at one address. Thread-safe; `run` once only.

    Streams are independent of each other: each has `num_envs` environments of its own,
    which begin with the stream and end with it.

    Args:
      env_class: a class or function that creates one environment, of Gymnasium or of
        classic gym.
      server_address: host:port or unix:/path.
      options: the fields of `ServerOptions`, such as `num_envs` and `num_streams`.
    """

    def __init__(
        self,
        env_class: Callable[..., Any],
        server_address: str = DEFAULT_ADDRESS,
        **options: Any,
    ) -> None:
        self.address = server_addresses(server_address, 1)[0]
        self._env_class = env_class
        self._options = ServerOptions(**options)
        self._progress = self._options.progress
        if self._progress is None:
            self._progress = np.zeros((2 * self._options.num_streams, 2))
        self.places = Places(self._options.num_streams, self._progress)
        self._stops: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._server: grpc.Server | None = None
        self._local: LocalStreams | None = None
        self._service: Service | None = None

    def start(self) -> str:
        """Start to serve, in threads; return the address with its real port.

        Creates one environment to read its spaces, and closes it.

        Raises:
          ConfigError: the environment or the address cannot be served.
        """
        options = self._options
        # Check the address first: this is faster than creating an environment.
        check_address(self.address, tls_dir=options.tls_dir, insecure=options.insecure)
        credentials = self._credentials()
        assert self._progress is not None
        path = self.address.removeprefix("unix:")
        is_relative = path != self.address and not os.path.isabs(path)
        folder = os.getcwd() if is_relative else ""
        try:
            self._service = Service(self._env_class, options, self._progress[0, 1:])
        except MakeError as error:
            raise ConfigError(str(error)) from error
        if is_relative and os.getcwd() != folder:  # The environment has changed it.
            self.address = f"unix:{folder}/{path}"
        # Threads for streams with a place, and for as many that have sent no Hello.
        num_threads = 2 * options.num_streams + SPARE_THREADS
        max_received_nbytes = HEADERS_NBYTES + len(self._service.action_frame())
        self._server = grpc.server(
            futures.ThreadPoolExecutor(num_threads, "stream"),
            options=server_options(
                keepalive_s=options.keepalive_s,
                max_received_nbytes=max_received_nbytes,
                max_streams=options.num_streams + SPARE_THREADS,
            ),
        )
        handlers = {
            "Stream": grpc.stream_stream_rpc_method_handler(self._stream),
            "Describe": grpc.unary_unary_rpc_method_handler(self._describe),
        }
        service = grpc.method_handlers_generic_handler("torchbeast.EnvServer", handlers)
        self._server.add_generic_rpc_handlers((service, health_handler()))
        self._listen(credentials, max_received_nbytes)
        _serving.add(self)
        return self.address

    def _listen(
        self, credentials: grpc.ServerCredentials | None, max_received_nbytes: int
    ) -> None:
        assert self._server is not None
        is_unix = self.address.startswith("unix:")
        with claim_address(self.address):
            umask = os.umask(0o177) if is_unix else None  # Only this user may connect.
            try:
                # Before gRPC's socket: a learner that finds gRPC's socket but not this
                # one would use gRPC.
                if is_unix:
                    self._local = LocalStreams(
                        self.address.removeprefix("unix:") + STREAMS_SUFFIX,
                        self._stream,
                        max_nbytes=max_received_nbytes,
                    )
                port = self._bind(credentials)
            finally:
                if umask is not None:
                    os.umask(umask)
            self._server.start()
        if not is_unix:
            self.address = f"{self.address.rpartition(':')[0]}:{port}"

    def _bind(self, credentials: grpc.ServerCredentials | None) -> int:
        """Make gRPC listen; return the port."""
        assert self._server is not None
        try:
            if credentials is None:
                return self._server.add_insecure_port(self.address)
            return self._server.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            raise ConfigError(reason_not_bound(self.address)) from error

    def run(self) -> None:
        """Serve until `stop`. Blocks."""
        if self._server is None:
            self.start()
        assert self._server is not None
        self.places.goodbye = self._stops.get()
        # Streams in a step finish the step and say goodbye. Streams that wait for an
        # action end after GRACE_S.
        stopped = self._server.stop(GRACE_S)
        if self._local is not None:
            self._local.stop(GRACE_S)
        stopped.wait()

    def stop(self, reason: str = "the server was stopped") -> None:
        """Make `run` return soon. May be called twice, and by a signal handler."""
        self._stops.put(reason)  # A SimpleQueue is reentrant; an Event is not.

    def _credentials(self) -> grpc.ServerCredentials | None:
        pem_files = tls.files(self._options.tls_dir, is_server=True)
        if pem_files is None or self.address.startswith("unix:"):
            return None
        ca, cert, key = (Path(file).read_bytes() for file in pem_files)
        return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)

    # gRPC calls these in threads of its pool, and LocalStreams calls the first one.

    def _stream(
        self, requests: Iterator[bytes], context: Any
    ) -> Generator[bytes, None, None]:
        assert self._service is not None
        return Stream(self._service, self.places, requests, context).serve()

    def _describe(self, request: bytes, context: Any) -> bytes:
        """Return the Welcome for a learner's Hello, without starting a stream."""
        assert self._service is not None
        try:
            hello = codec.decode(Hello, request)
            self._service.check_hello(hello)
        except messages.WireError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, details(str(error)))
        except WrongProtocol as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, details(str(error)))
        return codec.encode(self._service.welcome(hello))


def _close_sockets() -> None:
    """Close the servers' sockets, listening and connected, in a forked child."""
    own = {server.address for server in _serving}
    own |= {address + STREAMS_SUFFIX for address in own}
    # With a time limit, `socket` would make the parent's sockets non-blocking, too.
    limit_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        fd = int(name)
        # OSError: not a socket, or the descriptor of the folder that is listed here.
        with contextlib.suppress(OSError):
            view = socket.socket(fileno=fd)
            place = view.getsockname()
            view.detach()  # `fd` stays open: it may be the environment's.
            if isinstance(place, tuple):  # Over TCP: host and port.
                is_own = any(a.endswith(f":{place[1]}") for a in own)
            else:
                is_own = f"unix:{place}" in own
            if is_own:
                os.close(fd)
    socket.setdefaulttimeout(limit_s)


os.register_at_fork(after_in_child=_close_sockets)
