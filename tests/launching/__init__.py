# SPDX-License-Identifier: Apache-2.0
"""Runs as clusters start them: torchrun, Slurm, Kubernetes, Docker."""
