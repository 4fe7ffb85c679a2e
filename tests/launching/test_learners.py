# SPDX-License-Identifier: Apache-2.0
"""tools/learners.py: torchrun's exceptions become the exit status of the learners.

Seen red: with torchrun's own status, 1, for every failure.
"""

import signal

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)

from tools import learners


def failed(*statuses: int) -> ChildFailedError:
    failures = {}
    for rank, status in enumerate(statuses):
        failures[rank] = ProcessFailure(rank, 100 + rank, status, "")
        failures[rank].timestamp = 1000 + rank
    return ChildFailedError("polybeast", failures)


@pytest.mark.parametrize(
    "error, status",
    [
        (None, 0),
        (SignalException("", signal.SIGTERM), 75),
        (failed(75, 75), 75),
        (failed(2, 70), 2),
        (failed(-9, 70), 137),
    ],
)
def test_the_status_is_that_of_the_learners(monkeypatch, error, status):
    def torchrun(argv):
        assert argv == ["-m", "polybeast"]
        if error is not None:
            raise error

    monkeypatch.setattr(run, "main", torchrun)
    monkeypatch.setattr("sys.argv", ["learners", "-m", "polybeast"])
    assert learners.main() == status
