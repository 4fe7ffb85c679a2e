# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's shared memory and its fork server."""
