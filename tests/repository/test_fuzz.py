# SPDX-License-Identifier: Apache-2.0
"""`tools.fuzz`: each target still takes the inputs that it begins with."""

import pytest

from tools import fuzz


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_a_target_reads_its_own_seeds(name):
    target = fuzz.TARGETS[name]()
    assert target.seeds
    for seed in target.seeds:
        target.read(seed)
