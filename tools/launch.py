# SPDX-License-Identifier: Apache-2.0
"""Run a trainer under make: `python tools/launch.py monobeast [flags]`.

On Ctrl-C the terminal signals make, this process and the trainer. On SIGTERM make
signals only this process, which passes the signal on to the trainer. In both cases the
trainer then writes a checkpoint, so this process waits for it. make treats every status
except 0 as an error, so the status "stopped by a signal" becomes 0.
"""

import signal
import subprocess
import sys

STOPPED = 75  # core.errors.Exit.STOPPED: the trainer has printed how to go on.


def main() -> int:
    trainer = None
    asked_to_stop = False

    def hand_on(*_):
        nonlocal asked_to_stop
        asked_to_stop = True
        if trainer is not None:
            trainer.terminate()

    # Handlers instead of SIG_IGN, which the trainer would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, hand_on)
    trainer = subprocess.Popen([sys.executable, "-m", *sys.argv[1:]])
    if asked_to_stop:  # The signal came before there was a trainer.
        trainer.terminate()

    status = trainer.wait()
    if status == STOPPED:
        return 0
    # Negative: a signal killed the trainer. Shells show this as 128 + signal.
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
