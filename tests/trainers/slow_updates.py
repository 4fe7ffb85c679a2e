# SPDX-License-Identifier: Apache-2.0
"""The trainers with updates that take longer than the limits at the end of a run."""

import importlib
import os
import time
from pathlib import Path

from core.algorithm import update
from core.running import run

UPDATE_S = 2.0
LIMIT_S = 0.5


def main(argv: list[str]) -> int:
    """Train; the last of `argv` are `hangs` or `slow`, and the trainer's module.

    With `slow` each update takes UPDATE_S, and the limits are LIMIT_S. With `hangs` an
    update after the first checkpoint does not end.
    """
    *argv, kind, name = argv
    trainer = importlib.import_module(name)
    compute_gradient = update.compute_gradient

    def compute_slowly(flags, *args):
        if kind == "slow":
            os.write(2, b"an update begins\n")
            time.sleep(UPDATE_S)
        elif Path(flags.savedir, flags.xpid, "checkpoints").exists():
            os.write(2, b"about to hang\n")
            time.sleep(1e6)
        return compute_gradient(flags, *args)

    update.compute_gradient = compute_slowly
    if kind == "slow":
        run.JOIN_S = run.LOCK_S = LIMIT_S
    return trainer.main(argv)
