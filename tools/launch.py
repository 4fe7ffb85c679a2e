# SPDX-License-Identifier: Apache-2.0
"""Run a trainer under make: `python tools/launch.py monobeast [flags]`.

On Ctrl-C the terminal signals make, this process and the trainer alike; on SIGTERM
make signals only this process. Either way the trainer now drains and writes a
checkpoint, so wait for it. And make calls every status but 0 an error: turn the
trainer's "stopped by a signal" into a 0.
"""

import signal
import subprocess
import sys

STOPPED = 75  # core.errors.Exit: the trainer has said whether it can go on.


def main() -> int:
    trainer = None
    asked_to_stop = False

    def hand_on(*_):
        nonlocal asked_to_stop
        asked_to_stop = True
        if trainer is not None:
            trainer.terminate()

    # Handlers, not SIG_IGN: the trainer would inherit that.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, hand_on)
    trainer = subprocess.Popen([sys.executable, "-m", *sys.argv[1:]])
    if asked_to_stop:  # Before there was a trainer to tell.
        trainer.terminate()

    status = trainer.wait()
    if status == STOPPED:
        return 0
    # Negative means killed by that signal; shells say that as 128 + signal.
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
