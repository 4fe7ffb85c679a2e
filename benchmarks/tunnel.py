# SPDX-License-Identifier: Apache-2.0
"""Measure what the two extra processes cost when machines dial in.

    python -m benchmarks.tunnel
    python -m benchmarks.tunnel --tls_dir certs   # With certs/learner and certs/HOST.

An echo at a unix socket is reached directly, and then through dialer and acceptor over
TCP on this machine. Prints the time of a message's round trip (median), and the bytes
per second in one direction with as many messages on their way as fit. Raw figures go to
--out.
"""

import argparse
import contextlib
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

from benchmarks import out_file, write_figures
from core.remote.dial_in import DialedIn, DialsOut

CHUNK = bytes(1 << 20)
WAIT_S = 60.0


def echo(path: str) -> None:
    """Serve: send back what comes, in a thread for each connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 20):
                connection.sendall(data)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def measure(path: str, flags: argparse.Namespace) -> tuple[float, float]:
    """Return the microseconds of a round trip and the MB/s of an echo at `path`."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        message = bytes(flags.message_bytes)
        times = []
        for _ in range(flags.round_trips):
            began = time.perf_counter()
            client.sendall(message)
            receive(client, len(message))
            times.append(time.perf_counter() - began)
        began = time.perf_counter()
        sender = threading.Thread(
            target=lambda: [client.sendall(CHUNK) for _ in range(flags.megabytes)]
        )
        sender.start()
        receive(client, len(CHUNK) * flags.megabytes)
        sender.join()
        seconds = time.perf_counter() - began
    return 1e6 * statistics.median(times), len(CHUNK) * flags.megabytes / 1e6 / seconds


def receive(client: socket.socket, nbytes: int) -> None:
    while nbytes:
        received = len(client.recv(min(nbytes, 1 << 20)))
        if not received:
            raise ConnectionError("the echo has hung up")
        nbytes -= received


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tunnel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--message_bytes", type=int, default=8200)
    parser.add_argument("--round_trips", type=int, default=2000)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--tls_dir", type=Path, help="as tools.certs makes it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=out_file, help="JSON file for the raw figures")
    flags = parser.parse_args()
    host = learner = None
    if flags.tls_dir is not None:
        learner = str(flags.tls_dir / "learner")
        names = {p.name for p in flags.tls_dir.iterdir()} - {"ca", "learner"}
        host = str(flags.tls_dir / min(names))
    common = {"keepalive_s": 10.0, "num_servers": 1}
    here = argparse.Namespace(listen="127.0.0.1:0", tls_dir=learner, **common)
    with (
        contextlib.closing(DialedIn(here)) as dialed_in,
        tempfile.TemporaryDirectory() as folder,
    ):
        machine = argparse.Namespace(
            learner_address=[dialed_in.address], tls_dir=host, **common
        )
        with DialsOut(machine) as dialer:
            served = dialer.flags.pipes_basename.removeprefix("unix:") + ".0"
            for path in (served, f"{folder}/echo"):
                threading.Thread(target=echo, args=(path,), daemon=True).start()
            dialer.start()
            deadline = time.monotonic() + WAIT_S
            while not (addresses := dialed_in.addresses()):
                dialer.check()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the dialer has not joined within {WAIT_S} s")
                time.sleep(0.05)
            ways = {"directly": f"{folder}/echo"}
            ways["dialed in"] = addresses[0].removeprefix("unix:")
            runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for _ in range(flags.repeats):  # In turns.
                for name, path in ways.items():
                    runs[name].append(measure(path, flags))
    for name, measured in runs.items():
        round_trip_us, mb_per_s = map(statistics.median, zip(*measured))
        print(
            f"{name:10} {round_trip_us:7.0f} us per round trip of "
            f"{flags.message_bytes} bytes, {mb_per_s:6.0f} MB/s"
        )
    result = {"tls": host is not None, "message_bytes": flags.message_bytes}
    write_figures(flags.out, **result, us_and_mb_per_s=runs)


if __name__ == "__main__":
    main()
