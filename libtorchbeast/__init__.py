# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's C++: queues, dynamic batching, and actors that play over the network.

    for batch in inference_batcher:               # In one or several threads.
        batch.set_outputs(model(batch.get_inputs()))

    for tensors in learner_queue:                 # In one or several threads.
        learn(tensors)

Several threads may use one object. `close()` ends these loops and wakes all threads
that wait.

Inputs and outputs are nests (see `libtorchbeast.nest`) of arrays. Inputs are torch
tensors on the CPU, or numpy arrays, of booleans, integers, float16, float32, float64 or
bfloat16. Other inputs raise a TypeError that names the leaf. Inputs are not copied, so
do not change them afterwards. (Read-only numpy arrays, and arrays that are not
contiguous, are copied.) Outputs are torch tensors, or numpy arrays if torch is not
installed. The memory of a batch is reused after its last tensor was deleted.

A call that blocks releases the GIL. In the main thread Ctrl-C ends the call, except
`ActorPool.stop`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from libtorchbeast._C import (
        ActorError,
        ActorPool,
        AsyncError,
        Batch,
        BatchingQueue,
        ClosedBatchingQueue,
        DynamicBatcher,
        ServerMismatch,
        ServerUnavailable,
        describe,
    )
except ModuleNotFoundError as error:
    if error.name != "libtorchbeast._C":
        raise
    hint = Path(__file__).with_name("INSTALL.txt").read_text()
    raise ImportError(f"libtorchbeast was not compiled.\n\n{hint}") from error
except ImportError as error:  # A shared library that it needs has gone.
    hint = Path(__file__).with_name("INSTALL.txt").read_text()
    raise ImportError(f"libtorchbeast does not load: {error}\n\n{hint}") from error

if TYPE_CHECKING:
    from core.remote.env_server import Server as Server

__all__ = [
    "ActorError",
    "ActorPool",
    "AsyncError",
    "Batch",
    "BatchingQueue",
    "ClosedBatchingQueue",
    "DynamicBatcher",
    "Server",
    "ServerMismatch",
    "ServerUnavailable",
    "describe",
]


def __getattr__(name: str) -> Any:
    if name == "Server":  # Late: it imports grpcio, which a learner does not need.
        from core.remote.env_server import Server

        return Server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
