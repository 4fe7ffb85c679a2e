# SPDX-License-Identifier: Apache-2.0
"""Environments by name, as rows, as vectors; the Atari wrappers; the checker."""
