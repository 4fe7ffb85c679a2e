# SPDX-License-Identifier: Apache-2.0
"""The two programs as a whole: their networks, flags, training, forks of them."""
