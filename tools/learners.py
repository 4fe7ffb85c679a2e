# SPDX-License-Identifier: Apache-2.0
"""torchrun with the exit status of its learners, which schedulers can act on.

    python -m tools.learners --standalone --nproc_per_node 2 -m polybeast [flags]

Takes torchrun's flags. torchrun itself ends with 1 and a traceback, however its
learners have ended. This ends with 75 after a signal to stop: the same command goes on
from the checkpoint. Otherwise it ends with the status of the first learner that ended.
"""

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from core.errors import Exit


def main() -> int:
    try:
        run.main(sys.argv[1:])
    except SignalException:  # torchrun has handed it on, and waited for the learners.
        return Exit.STOPPED
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        # Negative means killed by that signal; shells say that as 128 + signal.
        status = status if status >= 0 else 128 - status
        print(f"Learner {rank} was the first to end, with {status}", file=sys.stderr)
        return status
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
