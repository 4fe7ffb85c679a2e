# SPDX-License-Identifier: Apache-2.0
"""A run of several learners, for tools.sweep: torchrun with a flag for their number.

    python -m results.learners.together --learners 2 --trainer polybeast --env Catch ...

All other flags are the trainer's. One learner is started in the same way.
"""

import argparse
import sys

from tools import learners


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--learners", type=int, required=True)
    parser.add_argument("--trainer", choices=["monobeast", "polybeast"], required=True)
    flags, rest = parser.parse_known_args()
    torchrun = ["--standalone", f"--nproc_per_node={flags.learners}"]
    sys.argv[1:] = [*torchrun, "-m", flags.trainer, *rest]
    return learners.main()


if __name__ == "__main__":
    sys.exit(main())
