# SPDX-License-Identifier: Apache-2.0
"""What surrounds the training: a run's folder, checkpoints, logs, flags, supervision.

Here belongs what any training program needs, whatever its algorithm. Here does not
belong how rollouts are made (`core.actors`, `core.remote`). The modules that
environment servers import (flags, terminal, supervision, machine) import no torch.

Start with `run`.
"""
