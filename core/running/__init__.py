# SPDX-License-Identifier: Apache-2.0
"""What surrounds the training: a run's folder, checkpoints, logs, flags, supervision.

Code that any training program needs, whatever its algorithm, belongs here. Code that
makes rollouts does not (`core.actors`, `core.remote`). The modules that environment
servers import (flags, terminal, supervision, machine) do not import torch.

Start with `run`.
"""
