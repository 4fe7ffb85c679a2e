# SPDX-License-Identifier: Apache-2.0
"""grpc.health.v1: tells load balancers, Kubernetes and people whether a server serves.

Written by hand, because grpcio-health-checking would require protobuf on environment
machines, for messages with one field. A server that is stopping takes no more calls, so
its answer is always SERVING. Watch is not implemented, which clients must expect.
"""

import dataclasses
from typing import Any

from core.remote import codec, messages
from core.remote.grpc_settings import grpc

SERVICES = ("", "torchbeast.EnvServer")  # "" means the whole server.
SERVING = 1


@dataclasses.dataclass(frozen=True)
class Request:
    service: str = messages.field(1, "string", "")


@dataclasses.dataclass(frozen=True)
class Response:
    status: int = messages.field(1, "uint32", 0)


def health_handler() -> grpc.GenericRpcHandler:
    """Return the handler of the health service, for grpc.Server."""
    handlers = {"Check": grpc.unary_unary_rpc_method_handler(_check)}
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers)


def _check(request: bytes, context: Any) -> bytes:
    try:
        service = codec.decode(Request, request).service
    except messages.WireError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    if service not in SERVICES:
        context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
    return codec.encode(Response(SERVING))
