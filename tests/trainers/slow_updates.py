# SPDX-License-Identifier: Apache-2.0
"""The trainers with updates that take longer than the limits at the end of a run."""

import importlib
import itertools
import os
import threading
import time
from pathlib import Path

from core.algorithm import update
from core.running import run
from core.running.signals import StopSignal

UPDATE_S = 2.0
LIMIT_S = 0.5


def main(argv: list[str]) -> int:
    """Train; the last of `argv` are `hangs` or `slow`, and the trainer's module.

    With `slow` the first update takes UPDATE_S, and each later one goes on for half as
    long after a signal; the limits are LIMIT_S. With `hangs` an update after the first
    checkpoint does not end.
    """
    *argv, kind, name = argv
    trainer = importlib.import_module(name)
    compute_gradient, handle = update.compute_gradient, StopSignal._handle
    numbers, has_signal = itertools.count(), threading.Event()

    def note(*args):
        handle(*args)
        has_signal.set()

    def compute_slowly(flags, *args):
        if kind == "slow":
            os.write(2, b"an update begins\n")
            if next(numbers) == 0:
                time.sleep(UPDATE_S)
            else:
                has_signal.wait()
                time.sleep(UPDATE_S / 2)
        elif Path(flags.savedir, flags.xpid, "checkpoints").exists():
            os.write(2, b"about to hang\n")
            time.sleep(1e6)
        return compute_gradient(flags, *args)

    update.compute_gradient = compute_slowly
    StopSignal._handle = note
    if kind == "slow":
        run.JOIN_S = run.LOCK_S = LIMIT_S
    return trainer.main(argv)
