# SPDX-License-Identifier: Apache-2.0
"""`Places`: limits the streams of a server.

A server has S places. The server ends a stream that sends no Hello within HELLO_S.
After its Hello a stream gets a place, or the server tells the learner that it is busy.
"""

import contextlib
import dataclasses
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from core.remote.messages import Hello

HELLO_S = 5.0  # Limit for a stream's Hello; a learner sends it at once.
TAKEOVER_S = 5.0  # Time for a learner's old stream to end after the learner came back.
SPARE_SILENT = 4  # S + SPARE_SILENT streams may wait without a Hello.


class Busy(Exception):
    """Other streams have all places."""


@dataclasses.dataclass(eq=False)  # Two places are equal if they are the same.
class Place:
    """The place of one stream."""

    run_id: str
    first_env_id: int
    progress: np.ndarray  # [2] float64: a row of `ServerOptions.progress`.
    where: str  # As `at_peer` returns it.
    since: str  # Wall clock time, for messages.
    cancel: Callable[[], Any]
    is_closing: bool = False  # Whether the stream is closing its environments.


class Places:
    """The S places of a server. Thread-safe: called by all streams.

    Args:
      num_streams: S.
      progress: [2 * S, 2] float64; each stream writes into one row.
    """

    def __init__(self, num_streams: int, progress: np.ndarray) -> None:
        self.num_streams = num_streams
        # The reason for ending all streams, or None. Streams read it between steps.
        self.goodbye: str | None = None
        # Guards the attributes below; notified when a place becomes free.
        self._changed = threading.Condition()
        self._free = [*reversed(progress)]  # Rows that no stream writes into.
        self._taken: list[Place] = []
        self._silent: list[Any] = []  # gRPC contexts of streams before their Hello.

    @contextlib.contextmanager
    def hello_deadline(self, context: Any) -> Iterator[None]:
        """Cancel the stream of `context` unless it sends a Hello in time."""
        deadline = threading.Timer(HELLO_S, context.cancel)
        deadline.daemon = True
        deadline.start()
        with self._changed:
            self._silent.append(context)
            if len(self._silent) > self.num_streams + SPARE_SILENT:
                # If silent streams took all threads, an honest learner, which sends a
                # Hello at once, would have to wait for their deadlines.
                self._silent.pop(0).cancel()
        try:
            yield
        finally:
            deadline.cancel()
            with self._changed, contextlib.suppress(ValueError):  # Cancelled above.
                self._silent.remove(context)

    @contextlib.contextmanager
    def take(self, hello: Hello, context: Any) -> Iterator[Place]:
        """Hold a place during the block.

        If a learner comes back while its old stream still has the place, this ends the
        old stream. If the old stream's environments take long to close, the new stream
        starts before they are closed.

        Raises:
          Busy: other streams have all places.
        """
        key = (hello.run_id, hello.first_env_id)
        with self._changed:
            old = [
                place
                for place in self._taken
                if hello.run_id and (place.run_id, place.first_env_id) == key
            ]
            for place in old:
                place.cancel()
            self._changed.wait_for(
                lambda: not any(place in self._taken for place in old), TAKEOVER_S
            )
            in_use = [p for p in self._taken if not (p in old and p.is_closing)]
            if len(in_use) >= self.num_streams or not self._free:
                raise Busy(self._describe_taken())
            place = Place(
                run_id=hello.run_id,
                first_env_id=hello.first_env_id,
                where=at_peer(context),
                since=time.strftime("%H:%M:%S"),
                cancel=context.cancel,
                progress=self._free.pop(),
            )
            self._taken.append(place)
        try:
            yield place
        finally:
            place.progress[1] = 0.0
            with self._changed:
                self._taken.remove(place)
                self._free.append(place.progress)
                self._changed.notify_all()

    def _describe_taken(self) -> str:
        places = "; ".join(
            f"run {quote(place.run_id)}{place.where} since {place.since}"
            for place in self._taken
        )
        return (
            f"busy: this server takes {self.num_streams} streams "
            f"(--streams_per_server), and these have them: {places}"
        )


def at_peer(context: Any) -> str:
    """Return " at ADDRESS" for log lines; "" for unix sockets, whose peers have none.

    Args:
      context: gRPC's context of a call, or a `local_streams.Call`.
    """
    peer = urllib.parse.unquote(context.peer())  # ipv6:%5B::1%5D:52456
    return "" if peer.startswith("unix:") else f" at {peer}"


def quote(name: str) -> str:
    """Return a run's name for log lines. It may come from a stranger."""
    return f"{name!r:.80}" if name else "without a name"
