# SPDX-License-Identifier: Apache-2.0
"""A learner without a model, to be attacked: a request a line, an answer a line.

{"play": [addresses], "evil": address, "said": pattern, "times": n} plays until the evil
server has failed n times in these words and the others have gone on from there, or the
run ends.
{"describe": address} asks that server what it serves.
"""

import concurrent.futures
import contextlib
import json
import re
import sys
from typing import Any

import numpy as np

import libtorchbeast
from core.remote import codec, messages
from core.running.supervise import start_thread
from tests.conftest import DEADLINE_S, wait_until

T, K = 5, 3  # Steps of a rollout, environments of a stream.
MORE_STEPS = 50  # Of honest servers.


def describe(address: str) -> dict[str, Any]:
    try:
        raw = libtorchbeast.describe(address, timeout_s=DEADLINE_S)
        welcome = codec.decode_welcome(raw)
    except (messages.WireError, libtorchbeast.ActorError) as error:
        return {"error": str(error)}
    return {"error": "", "env": welcome.env}


def play(addresses: list[str], evil: str, said: str, times: int) -> dict[str, Any]:
    queue = libtorchbeast.BatchingQueue(
        minimum_batch_size=3, maximum_batch_size=30, maximum_queue_size=30
    )
    batcher = libtorchbeast.DynamicBatcher(timeout_ms=1)
    pool = libtorchbeast.ActorPool(
        T,
        queue,
        batcher,
        addresses[:1],
        (),
        named_rows=True,
        max_failures=10**6,
        max_streams=len(addresses),
        num_envs=K,
    )

    def infer() -> None:
        for batch in batcher:
            num = batch.get_inputs()[0]["reward"].shape[1]
            batch.set_outputs(({"action": np.zeros((1, num), np.int64)}, ()))

    def learn() -> None:
        for _ in queue:
            pass

    running = start_thread("pool", pool.run)
    workers = [start_thread("inference", infer), start_thread("learner", learn)]
    events: list[str] = []

    def failures() -> int:
        events.extend(pool.take_events())
        return sum(bool(re.search(said, event)) for event in events)

    def honest_steps() -> int:
        stats = pool.stats()["addresses"]
        return sum(stats[address]["steps"] for address in stats if address != evil)

    # The first server's Welcome, or its end, comes before the others connect.
    wait_until(
        lambda: running.done() or pool.stats()["connects"] or failures() or events
    )
    pool.set_addresses(addresses)
    wait_until(lambda: running.done() or failures() >= times)
    before = honest_steps()
    wait_until(lambda: running.done() or honest_steps() >= before + MORE_STEPS)
    error = ""
    with contextlib.suppress(concurrent.futures.TimeoutError):
        error = str(running.exception(0) or "")
    pool.stop()
    queue.close()
    batcher.close()
    for worker in workers:
        worker.result(DEADLINE_S)
    failures()
    stats = pool.stats()
    return {
        "error": error,
        "events": events,
        "ledger": [
            stats[k] for k in ("received", "dequeued", "discarded", "in_flight")
        ],
        "honest_steps": honest_steps(),
    }


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "describe" in request:
            answer = describe(request["describe"])
        else:
            answer = play(request.pop("play"), **request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
