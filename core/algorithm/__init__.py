# SPDX-License-Identifier: Apache-2.0
"""IMPALA itself: V-trace, the losses, the update, and what networks share.

Here belongs what turns a batch of rollouts into new weights. Here does not belong what
steps environments, starts processes, or writes files: this room imports no other room.

Start with `update`, then `losses` and `vtrace`.
"""
