# SPDX-License-Identifier: Apache-2.0
"""The exit statuses."""

from core.errors import Exit


def test_exit_statuses_are_those_documented():
    assert {e.name: e.value for e in Exit} == {
        "DONE": 0,
        "USAGE": 2,
        "BUSY": 69,
        "INTERNAL": 70,
        "CHECKPOINT": 74,
        "STOPPED": 75,
        "CONFIG": 78,
    }
