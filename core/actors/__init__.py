# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's actors: processes that fill rollout buffers in shared memory.

This room holds everything that moves rollouts from the actor processes to the learner
of monobeast.py. The acting itself does not belong here: it is monobeast.py's `Actor`.

Start with `processes.Actors`; `shared_memory` has the buffers and the weights.
"""
