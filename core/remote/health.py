# SPDX-License-Identifier: Apache-2.0
"""grpc.health.v1: tells load balancers, Kubernetes and people whether a server serves.

Written by hand, because grpcio-health-checking would require protobuf on environment
machines, for messages with one field.
"""

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

from core.remote import codec, messages
from core.remote.grpc_settings import grpc

MAX_WATCHERS = 4  # Each call of Watch occupies a thread.
SERVICES = ("", "torchbeast.EnvServer")  # "" means the whole server.
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class Request:
    service: str = messages.field(1, "string", "")


@dataclasses.dataclass(frozen=True)
class Response:
    status: int = messages.field(1, "uint32", 0)


class Health:
    """The health service of one server. Thread-safe."""

    def __init__(self) -> None:
        # Guards the attributes below; notified of every change.
        self._changed = threading.Condition()
        self._status = SERVING
        self.num_watchers = 0

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "grpc.health.v1.Health",
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
            },
        )

    def stop_serving(self) -> None:
        """Answer NOT_SERVING from now on, and send it to watchers at once."""
        with self._changed:
            self._status = NOT_SERVING
            self._changed.notify_all()

    def _check(self, request: bytes, context: Any) -> bytes:
        if _service(request, context) not in SERVICES:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return codec.encode(Response(self._status))

    def _watch(self, request: bytes, context: Any) -> Iterator[bytes]:
        """Send the status, then send it again whenever it changes."""
        if _service(request, context) not in SERVICES:
            yield codec.encode(Response(SERVICE_UNKNOWN))
            return
        with self._changed:
            if self.num_watchers >= MAX_WATCHERS:
                text = f"{MAX_WATCHERS} clients watch already, the maximum"
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            self.num_watchers += 1
        context.add_callback(self._wake_watchers)
        try:
            sent = None
            while context.is_active() and sent != NOT_SERVING:
                with self._changed:
                    while self._status == sent and context.is_active():
                        self._changed.wait()
                    sent = self._status
                yield codec.encode(Response(sent))
        finally:
            with self._changed:
                self.num_watchers -= 1

    def _wake_watchers(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _service(request: bytes, context: Any) -> str | None:
    try:
        return codec.decode(Request, request).service
    except messages.WireError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    return None
