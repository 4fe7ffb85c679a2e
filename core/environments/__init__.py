# SPDX-License-Identifier: Apache-2.0
"""Environments: made by name, checked, and stepped as rows of a rollout.

Code that knows Gymnasium, classic gym or a vector environment belongs here. Not here:
how actors or servers run environments (`core.actors`, `core.remote`), and the Atari
wrappers, which users edit (atari_wrappers.py). Nothing here imports torch: environment
servers run without torch.

Start with `stepping`, then read `row_writer` and `make`.
"""
