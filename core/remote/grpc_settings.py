# SPDX-License-Identifier: Apache-2.0
"""Import gRPC with the settings of an environment server.

Some settings are environment variables that grpcio reads when Python imports it. So the
files of a server import gRPC from here: `from core.remote.grpc_settings import grpc`.
"""

import importlib.util
import os
import sys
from importlib import metadata

if importlib.util.find_spec("grpc") is None:
    raise ModuleNotFoundError(
        f"No module named 'grpc' in {sys.executable}, but environment servers need it: "
        "pip install grpcio",
        name="grpc",
    )

# gRPC's support for fork stops its threads before each fork and starts them again after
# it. This blocks a server whose environment forks a worker. Workers do not use gRPC.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# Since 1.80 grpcio polls in its own threads besides Python's, which takes a third more
# CPU for each message (benchmarks/transport.py). This setting restores the old polling.
# Remove it after the import: gRPC in child processes may not know the setting.
if (
    "GRPC_EXPERIMENTS" not in os.environ
    and "grpc" not in sys.modules
    and tuple(map(int, metadata.version("grpcio").split(".")[:2])) >= (1, 80)
):
    os.environ["GRPC_EXPERIMENTS"] = "-event_engine_listener"
    import grpc  # Reads the variable now.

    del os.environ["GRPC_EXPERIMENTS"]
import grpc

__all__ = ["grpc", "server_options"]


def server_options(
    *, keepalive_s: float, max_received_nbytes: int, max_streams: int
) -> list[tuple[str, int]]:
    """Return gRPC's options for a server."""
    keepalive_ms = round(1000 * keepalive_s)
    options = {
        # No limit for the learner's pings, by which it notices that a server is gone.
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.http2.max_ping_strikes": 0,
        "grpc.server_handshake_timeout_ms": 5_000,  # Ends peers that connect and stop.
        # Old versions of gRPC do not limit the size of a decompressed message. Learners
        # do not compress.
        "grpc.compression_enabled_algorithms_bitset": 1,  # None.
        "grpc.per_message_decompression": 0,
        "grpc.so_reuseport": 0,  # Otherwise two servers could share a port unnoticed.
        "grpc.max_send_message_length": -1,
        "grpc.keepalive_time_ms": keepalive_ms,
        "grpc.keepalive_timeout_ms": keepalive_ms,
        # Without this option current gRPC takes 60 s to notice a frozen peer.
        "grpc.http2.ping_timeout_ms": keepalive_ms,
        "grpc.max_receive_message_length": max_received_nbytes,
        "grpc.max_concurrent_streams": max_streams,
    }
    return list(options.items())
