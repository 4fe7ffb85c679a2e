# SPDX-License-Identifier: Apache-2.0
"""A bad network: TCP proxies that can stop forwarding, or reset connections."""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

CHUNK = 1 << 16


class Proxies:
    """A proxy for each address, in a thread of its own. A context manager."""

    def __init__(self, targets: Sequence[str]):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="proxies", daemon=True
        )
        self._proxies = [Proxy(target) for target in targets]
        self.addresses: list[str] = []

    def __enter__(self) -> "Proxies":
        self._thread.start()
        self.addresses = [self._call(proxy.start()) for proxy in self._proxies]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for proxy in self._proxies:
            self._call(proxy.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def call(self, i: int, method: Callable[..., None], *args: Any) -> None:
        """Call a method of proxy `i` in the loop's thread; wait until it returns."""

        async def run() -> None:
            method(self._proxies[i], *args)

        self._call(run())


class Proxy:
    """A proxy for one address. All methods are called in the loop's thread."""

    def __init__(self, target: str):
        self._target = target
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._to_server: set[asyncio.StreamWriter] = set()  # Some of `_writers`.
        self._flips = 0  # Bits that are still to be flipped.

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Stop forwarding. All sockets stay open."""
        self._whole.clear()

    def mend(self) -> None:
        """Forward again, first the bytes that were held up."""
        self._whole.set()

    def flip(self) -> None:
        """Flip one bit of the next bytes, in whichever direction they go."""
        self._flips += 1

    def half_close(self, to_server: bool) -> None:
        """Close one direction of each connection; the other stays open."""
        for writer in self._writers:
            if (writer in self._to_server) == to_server and not writer.is_closing():
                writer.write_eof()

    def reset(self) -> None:
        """Reset all connections, at both ends."""
        for writer in self._writers:
            if writer.is_closing():
                continue
            linger = struct.pack("ii", 1, 0)  # Linger for 0 s: send RST.
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    async def _forward(self, reader, writer) -> None:
        """Serve one connection, both ways."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            await self._whole.wait()  # While it is cut, connect to no server.
            host, _, port = self._target.rpartition(":")
            there, out = await asyncio.open_connection(host, int(port))
            writers.append(out)
            self._writers.update(writers)
            self._to_server.add(out)
            # If one end closes, `_pump` closes the other end.
            pumps = [self._pump(reader, out), self._pump(there, writer)]
            await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # The server is not there; or stop() was called.
        finally:
            for each in writers:
                each.close()
                self._writers.discard(each)
                self._to_server.discard(each)
            self._tasks.discard(task)

    async def _pump(self, reader, writer) -> None:
        # RuntimeError: half_close() came between.
        with contextlib.suppress(OSError, RuntimeError):
            while data := await reader.read(CHUNK):
                await self._whole.wait()
                if self._flips:
                    self._flips -= 1
                    i = random.randrange(len(data))
                    flipped = data[i] ^ 1 << random.randrange(8)
                    data = data[:i] + bytes([flipped]) + data[i + 1 :]
                writer.write(data)
                await writer.drain()
            await self._whole.wait()
        writer.close()
