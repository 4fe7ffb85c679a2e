# SPDX-License-Identifier: Apache-2.0
"""torchrun starts all learners again after one was killed, and the run goes on."""

import json

import pytest

from benchmarks import recovery

pytest.importorskip("polybeast", reason="needs the extension")


@pytest.mark.slow
def test_a_killed_learner_costs_no_server_and_doubles_no_step(tmp_path, monkeypatch):
    out = tmp_path / "recovery.json"
    flags = ["--kills", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["recovery", *flags])
    often = (*recovery.LEARNER, "--checkpoint_interval_s", "0.5")
    monkeypatch.setattr(recovery, "LEARNER", often)
    assert recovery.main() == 0  # It checks the log and the servers itself.
    (kill,) = json.loads(out.read_text())["kills"]
    assert kill["rank"] == 0 and kill["first_update_s"] > 0
