# SPDX-License-Identifier: Apache-2.0
"""V-trace, the losses, the update, CUDA graphs: all against slow, obvious oracles."""
