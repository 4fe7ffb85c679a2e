# SPDX-License-Identifier: Apache-2.0
"""PolyBeast with two learners, of which one waits for the other for LIMIT_S only.

The limit holds once the log has some rows: the start may take a busy machine longer.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

import polybeast
from core.algorithm.learners import Learners
from tests.conftest import wait_until
from tests.trainers.several import end_patiently, is_stopped, shorten_limit
from tools.runs import num_rows

LIMIT_S = 1.0
ROWS = 3
LIMITED = "limited"  # A file in the run's folder: from now on the limit holds.


def main(argv: list[str]) -> int:
    """Train; the last of `argv` is the rank of the learner with the limit.

    If that is learner 1, learner 0 stops itself (SIGSTOP) in the same update.
    """
    *argv, impatient = argv
    flags = polybeast.parse_flags(argv)
    run_dir = Path(flags.savedir, flags.xpid)
    sum_update, numbers = Learners.sum_update, itertools.count()

    def sum_with_limit(learner: Learners, sums: dict) -> dict:
        number = next(numbers)
        update = learner._read("update")
        if learner.rank == 0 and update is None and num_rows(run_dir) >= ROWS:
            learner._tell("update", str(number + 1))  # Both will know it by then.
        elif update == str(number) and learner.rank == int(impatient):
            if learner.rank == 1:
                wait_until(lambda: is_stopped(learner, 0))
            shorten_limit(learner, LIMIT_S)
            (run_dir / LIMITED).touch()
        elif update == str(number) and learner.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return sum_update(learner, sums)

    Learners.sum_update = sum_with_limit
    end_patiently()
    return polybeast.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
