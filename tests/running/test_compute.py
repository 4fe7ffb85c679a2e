# SPDX-License-Identifier: Apache-2.0
"""What torch uses of the machine."""

from core.running import compute


def test_rss_is_that_of_this_process():
    assert 10 < compute.rss_mb() < 100_000
