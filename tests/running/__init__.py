# SPDX-License-Identifier: Apache-2.0
"""What surrounds training: checkpoints, logs, flags, signals, supervision."""
