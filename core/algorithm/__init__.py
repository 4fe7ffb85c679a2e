# SPDX-License-Identifier: Apache-2.0
"""IMPALA itself: V-trace, the losses, the update, and parts of networks.

Code that turns a batch of rollouts into new weights belongs here. Code that steps
environments, starts processes or writes files does not: modules here import no other
package of core.

Start with `update`, then `losses` and `vtrace`.
"""
