# SPDX-License-Identifier: Apache-2.0
"""Start Sample Factory's EnvPool example with the flags of the command line.

Runs in Sample Factory's own environment; see README.md. Gymnasium's close()
of vector environments fails with EnvPool 1.2, so this script replaces it; nothing else
is changed.
"""

import sys

import gymnasium

gymnasium.vector.VectorEnv.closed = False
gymnasium.vector.VectorEnv.close = lambda self, **_: None

from sf_examples.envpool.atari.train_envpool_atari import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
